"""Cases on two real vLLM engines with tiny models.

Each case judges an observation of the engine bench; none calls an engine itself.
"""
