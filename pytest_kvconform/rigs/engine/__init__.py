"""One engine process with a checkpoint, and what the engine processes of all rigs have in common.

| module | what it has |
|---|---|
| `handle` | `EngineHandle`: one engine process, as pytest calls it; `EngineFailed` |
| `process` | `EngineProcess`: vLLM's EngineCore in the child, driven one call at a time; for all rigs |
| `ends` | the end of an engine by vLLM's shutdown, and what its process still has after it |
| `objects` | what the objects of a connector hold, and which requests they name |
| `sizes` | what grows with the number of requests: containers of both halves, and open files |
| `answers` | what holds for every answer of a hook of the scheduler half |
| `stopped` | the finding if vLLM's scheduler stops at what the connector answered |
| `reports` | what a worker half reports must stay as it is until the scheduler has read it |
| `clocks` | the clocks of a process, which a case may set |
| `model_engine` | `ModelEngineProcess`: an engine with a checkpoint, its snapshots, the oracle's writes |
| `kv_access` | reads and writes a worker's KV cache in logical coordinates |
| `no_connector` | the connector of engines without a connector |
| `router` | the kv_transfer_params that a router gives P and D, by the hand-over that is declared |
| `messages` | the records that travel between pytest and an engine |

This room imports `processes`, `vllm_setup`, `context.py`, `missing.py` and `scenario.py`. Modules
that run in pytest import neither torch nor vLLM; `process` and `model_engine` import them inside functions.
"""
