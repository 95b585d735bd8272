"""The serving rig: two OpenAI-compatible vLLM servers, a router between them, and lm-eval.

| module | what it has |
|---|---|
| `bench` | `ServingBench`, what cases of the tier "accuracy" ask |
| `data` | what is asked in a cell: a checkpoint with its tokenizer, and questions |
| `chain` | the start of P, D and the router of a cell, and their end |
| `server` | handles on these processes: whether they answer, what they count, how they failed |
| `server_process` | what runs in the children |
| `evaluator`, `evaluation` | one run of lm-eval: its deadline and progress, and what runs in the child |
| `metrics` | what a server counts, read from its own /metrics |
| `again` | odd questions, asked again alone, and what a right hand-over does to their answers |
| `gate` | the exact tests, as pure functions |
| `observation` | what was seen in a cell |
| `record` | the answers as a file of the report |
| `messages` | the records that travel between pytest and the children |
| `preload` | what the zygote imports for all this |

The way of a cell:

1. A case calls `bench.serving.observe(cell)`. `data` makes the checkpoint and the questions, and writes the
   file of lm-eval's task, which includes lm-eval's own gsm8k. In the nightly matrix it finds a real
   checkpoint, and `chain` leases GPUs.
2. `chain.start` forks P and D from the zygote, and vllm-router when they answer. D's prefix cache is off, so
   that it cannot hide a hand-over that does not happen.
3. lm-eval asks the subject through the router, then D alone, then D alone again. Counters are read before
   and after each run. Each server also writes down where the tokens of each prompt came from. If D loads
   when it is asked alone, too, the questions are asked anew: the baseline is a server without a connector.
4. Questions of a canary whose answers are odd are asked again alone. Those that stay odd are asked of engines
   without the connector, between which the harness copies KV: rounding is no mistake of the connector.
5. If a server fails or a question is not answered, as many questions are asked without the connector, and
   then the same is done once more with it. Unless only the latter fails, the cases are BLOCKED.
6. Every process is ended by the zygote, which also ends them when pytest is gone.

This room imports `processes`, `vllm_setup`, `engine` (the failure of an engine, what it lacks, and the
connector that does nothing), `canary`, `context.py` and `missing.py`.
"""
