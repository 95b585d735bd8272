"""The rigs: what cases run on. Each rig is a room (folder); all rigs use two more rooms.

    processes  <-  vllm_setup  <-  engine  <-  bytes  <-  cluster  <-  scheduler  <-  bench.py
                             engine  <-  canary  <-  serving  <-  bench.py

A room imports rooms to its left, never to its right.

| room | what it has |
|---|---|
| `processes` | the zygote (fork server), its children, ports, logs; knows nothing of vLLM |
| `vllm_setup` | all that changes with a vLLM version: overrides, engine configuration, hooks, cache specs |
| `engine` | one engine process with a tiny checkpoint, and what all engine processes have in common |
| `bytes` | one engine process without a model: its KV cache holds words that tell their own address |
| `cluster` | engines by name and the scripts that drive them: hand-overs, faults, peers |
| `scheduler` | the scheduler rig: vLLM's scheduler, the scheduler half, and scripted worker reports |
| `canary` | tiny models that are taught answers, on a real engine |
| `serving` | the serving rig: OpenAI-compatible servers, a router, and questions that lm-eval asks |

| module | what it has |
|---|---|
| `bench` | what a case is given: one bench for each rig |
| `context` | settings, subject, deadlines, addresses and names, handed down to every bench |
| `scenario` | what is handed over, as data |
| `tap` | the one way to put a function around a hook of a connector |
| `history` | the one recorder of hooks: what vLLM asked of a connector, and what it answered |
| `hook_calls` | the last calls of a connector's hooks, for the timeline of a finding |
| `missing` | what an environment lacks, told by an exception of a start |
| `services` | servers that the connector needs: their ports, their start, their end |
| `launch` | the start of the zygote, its environment and its end |
| `second_zygote` | the start of a second zygote, for a D that is no fork of P's |
| `probe_subject` | the start of the probe, a child process that imports the connector's class |

The way of one hand-over:

1. pytest's process starts the zygote (`launch`) while it collects cases. The zygote imports vLLM
   (`vllm_setup/preload.py`). `probe_subject` forks the probe, which imports the connector's class.
2. A case asks its bench (`bench.engine`, `bench.bytes`, ...) for an observation of a `Scenario` in the
   current cell.
3. The bench starts P and D, unless they run already: a handle in pytest's process (`engine/handle.py`) and
   an engine in a fork of the zygote (`engine/process.py`). They talk over a connection, and each answer has
   a deadline.
4. The rig adds the request to P and steps P until the prefill has finished. P's answer names the blocks to
   read.
5. The rig adds the request to D with that answer as `kv_transfer_params`, and steps P and D until D has
   loaded the KV cache and computed its tokens. With rendezvous P and D get one transfer id instead
   (`engine/router.py`). While a step of one engine lasts, the other engine steps, too: a load may need it.
   The engine records what the connector was asked and what stood in the cache.
6. The bench compares: tokens and logprobs with the oracle's (engine), every word of D's pool with the word
   that belongs there (bytes). The case gets the result as evidence or raises a violation.
7. The bench keeps engines and observations for the other cases of the cell. The zygote kills every engine
   at the end.

Cases of the scheduler rig run in forks of a scheduler host process instead, one fork for each case.
"""
