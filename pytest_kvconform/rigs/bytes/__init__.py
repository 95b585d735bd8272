"""The byte rig: P and D are vLLM engines without a model, and every byte of their KV caches is known.

The scheduler, the KV cache manager, the allocation of KV memory and the connector are vLLM's own, for the
real geometry of a model. In place of the model each worker writes words that name the token, layer, head and
rank they belong to.

| module | what it has |
|---|---|
| `specs` | from a cell to the specification of one engine; block sizes of a cell |
| `handle` | `ByteEngineHandle`: one engine process, as pytest calls it |
| `process` | `ByteEngineProcess`: knows the blocks of every request, and sends them to the ranks |
| `on_demand` | what a script lets an engine do: preempt, abort at a moment, sleep, set its clocks |
| `overwriter` | requests that overwrite freed blocks, as on a busy engine |
| `worker` | `ByteWorker`: one rank; vLLM's order of the connector's hooks in a step |
| `forward` | what a rank does in place of the model's forward, with vLLM's order of the layers' hooks |
| `layers` | stand-ins for the layers, from which connectors read backends, specs and cache tensors |
| `memory` | one rank's KV memory (`storage`), and what it should hold (`shadow`) |
| `checks` | compares storage and shadow |
| `looks` | what each layer finds in its KV cache when its own wait_for_layer_load returns |
| `messages` | the records that travel between pytest, an engine and its ranks |
| `faulty` | byte engines whose transport fails on demand, and what their ranks report |

This room imports `engine`, `vllm_setup`, `processes`, `kvspace`, `context.py` and `scenario.py`.
`worker`, `forward` and `layers` import torch and vLLM; they run in children of the zygote only.
"""
