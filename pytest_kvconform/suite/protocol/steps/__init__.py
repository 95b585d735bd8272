"""Cases about the step loop: steps in flight, how long hooks take, and hooks that vLLM calls beside them."""
