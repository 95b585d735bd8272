"""pytest_kvconform/rigs/vllm_setup."""
