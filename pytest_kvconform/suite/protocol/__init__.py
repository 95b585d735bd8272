"""Cases that drive a connector's scheduler half with vLLM's real scheduler and no worker, and its worker half beside pattern engines."""
