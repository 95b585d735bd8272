"""The byte rig: P and D are vLLM engines without a model, and every byte of their KV caches is known.

The scheduler, the KV cache manager, the allocation of KV memory and the connector are vLLM's own, for the
real geometry of a model. In place of the model each worker writes words that name the token, layer, head and
rank they belong to.

| module | what it has |
|---|---|
| `bench` | `ByteBench`, what cases of the tier "bytes" ask |
| `specs` | from a cell to the specification of one engine; block sizes of a cell |
| `handle` | `ByteEngineHandle`: one engine process, as pytest calls it |
| `process` | `ByteEngineProcess`: knows the blocks of every request, and sends them to the ranks |
| `overwriter` | requests that overwrite freed blocks, as on a busy engine |
| `worker` | `ByteWorker`: one rank; vLLM's order of the connector's hooks in a step |
| `forward` | what a rank does in place of the model's forward, with vLLM's order of the layers' hooks |
| `layers` | stand-ins for the layers, from which connectors read backends, specs and cache tensors |
| `memory` | one rank's KV memory (`storage`), and what it should hold (`shadow`) |
| `checks` | compares storage and shadow |
| `looks` | what each layer finds in its KV cache when its own wait_for_layer_load returns |
| `handover` | one transfer, from prompts to checks |
| `messages` | the records that travel between pytest, an engine and its ranks |

The way of one hand-over:

1. A case calls `bench.bytes.observe(cell, transfer, longest)`. `EnginePairs` starts P and D, unless they run.
2. `handover.observe_transfer` poisons both pools. P "computes" the prompts: each write goes to storage and
   shadow.
3. D gets the requests with P's kv_transfer_params, or finds them in a store. Before the first step that reads
   loaded KV, each rank of D puts what is due into its shadow and compares the whole pool
   (`PoolChecker.check_loads`). Where loads happen within the step, each layer is compared as it was when its
   own wait_for_layer_load returned.
4. Both engines are stepped until neither holds a block. Then each rank compares its pool again (`audit`).
5. The `TransferObservation` has the checks, the audits, traces, usage and logged exceptions.

This room imports `engine`, `vllm_setup`, `processes`, `kvspace`, `context.py` and `scenario.py`, and neither
`peers` nor `scheduler`. `worker`, `forward` and `layers` import torch and vLLM; they run in children of the
zygote only.
"""
