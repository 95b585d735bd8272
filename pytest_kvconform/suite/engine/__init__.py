"""Cases on two real vLLM engines with tiny models. Each judges what `Bench.observe` saw; none touches an engine itself."""
