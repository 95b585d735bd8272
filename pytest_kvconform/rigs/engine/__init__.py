"""The engine rig: two vLLM engines with tiny checkpoints, and what the engines of all rigs have in common.

| module | what it has |
|---|---|
| `bench` | `EngineBench`, what cases of the tier "engine" ask |
| `pairs` | the one start of a pair of engines, and its cache; also for the rigs bytes and peers |
| `handle` | `EngineHandle`: one engine process, as pytest calls it; `EngineFailed` |
| `process` | `EngineProcess`: vLLM's EngineCore in the child, driven one call at a time; for all rigs |
| `ends` | the end of an engine by vLLM's shutdown, and what its process still has after it |
| `model_engine` | `ModelEngineProcess`: an engine with a checkpoint, its snapshots, the oracle's writes |
| `kv_access` | reads and writes a worker's KV cache in logical coordinates |
| `handover` | one scenario: the subject's run, then the oracle's |
| `control` | `Control`: whether the same fails without the connector, when an engine fails |
| `no_connector` | the connector of engines without a connector |
| `router` | the kv_transfer_params that a router gives P and D, by the hand-over that is declared |
| `release` | the wait until engines hold nothing, and what they are known to keep |
| `observation` | what a scenario showed, and the comparison of D's answers |
| `messages` | the records that travel between pytest and an engine |

The way of one hand-over:

1. A case calls `bench.engine.observe(cell, scenario)`. `EnginePairs` starts P and D, or finds them running.
2. `handover.observe` empties and poisons both caches. P computes the prompts; a snapshot of P's KV is taken.
3. D gets the requests with P's kv_transfer_params, as from vLLM's proxy. Before D's first forward that reads
   loaded KV, a snapshot of D's KV is taken, and unowned blocks are compared with a digest from before.
4. Both engines are stepped until neither holds a block.
5. The same again with the oracle: the harness copies P's KV into D's blocks, and the connector hears of no
   request. A store would hear of them in each step, so its oracle has engines of its own, without the
   connector, and brings as many tokens as D has loaded.
6. Engines of another cell start, and those of this one shut down meanwhile, as vLLM shuts down
   (`handle.leave_all`). The zygote kills what has not ended after ten seconds.
7. The `Observation` has rows and states that differ, D's answers in both runs, traces, usage and logged
   exceptions.

This room imports `processes`, `vllm_setup`, `kvspace`, `context.py`, `missing.py` and `scenario.py`. Modules
that run in pytest import neither torch nor vLLM; `process` and `model_engine` import them inside functions.
"""
