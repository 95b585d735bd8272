"""Cases that run a connector's scheduler half with vLLM's real scheduler and no worker, or its worker half on
the peers rig.
"""
