"""The cluster: engines by name, and scripts that drive them, with one loop for every rig of engine processes.

| module | what it has |
|---|---|
| `engine` | `Engine`: one engine process as a script sees it. No call of it blocks |
| `loop` | the loop that advances engines and scripts side by side; `play` runs one script to its end |
| `turns` | parts of scripts in which engines step by turns |
| `release` | the wait until engines hold nothing, and what they are known to keep |
| `model_handover`, `observation` | a scenario on engines with models: the subject's run, the oracle's |
| `transfer`, `two_turns` | one transfer on byte engines; two turns of a conversation |
| `faults` | a transfer while the transport delays, fails or repeats on demand |
| `scripts` | cases that are scripts on these engines |
| `peers` | scenarios between several engines: peers that do not answer, leases, ranks |
| `pairs` | the one start of a pair of engines, and its cache |
| `control` | whether the same fails without the connector, when an engine fails |
| `model_bench`, `byte_bench`, `fault_bench` | what cases of the tiers "engine" and "bytes" ask |

A script is a generator. It yields where it waits, and then every other script and every engine goes on.
Engines step by themselves, or they are paused and step when a script says so: then what happens in which
order is the same in every run.

The way of one hand-over between engines with models:

1. A case calls `bench.engine.observe(cell, scenario)`. `EnginePairs` starts P and D, or finds them running.
2. `model_handover.observe` empties and poisons both caches. P computes the prompts; a snapshot of P's KV is
   taken.
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

Between byte engines:

1. A case calls `bench.bytes.observe(cell, transfer, longest)`. `EnginePairs` starts P and D, unless they run.
2. `transfer.observe_transfer` poisons both pools. P "computes" the prompts: each write goes to storage and
   shadow.
3. D gets the requests with P's kv_transfer_params, or finds them in a store. Before the first step that reads
   loaded KV, each rank of D puts what is due into its shadow and compares the whole pool
   (`PoolChecker.check_loads`). Where loads happen within the step, each layer is compared as it was when its
   own wait_for_layer_load returned.
4. Both engines are stepped until neither holds a block. Then each rank compares its pool again (`audit`).
5. The `TransferObservation` has the checks, the audits, traces, usage and logged exceptions.

This room imports `bytes`, `engine`, `vllm_setup`, `processes`, `kvspace`, `context.py`, `missing.py` and
`scenario.py`. It runs in pytest's process, and imports neither torch nor vLLM.
"""
