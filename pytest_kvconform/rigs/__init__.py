"""What cases run on. `zygote` forks processes, `engine` drives one vLLM engine, `handover` joins two, `bench` is what a case gets."""
