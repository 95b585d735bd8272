"""All that changes with a version of vLLM, torch or NIXL. To support another vLLM minor, begin at `compat`.

| module | what it has |
|---|---|
| `compat` | the supported minors, and functions of vLLM whose arguments differ between them |
| `preload` | what the zygote imports and does once before it forks |
| `overrides` | every override of vLLM and of torch, one function each |
| `cpu_layers` | layers in plain torch for engines on a CPU, where vLLM has kernels for GPUs alone |
| `stand_ins` | a copy engine in host memory, and a device's number, in place of a GPU's; a fake connector |
| `statistics` | the way of a connector's statistics through vLLM's front end, a process of its own |
| `nixl_agents` | the overrides of NIXL |
| `optional_packages` | imports of vLLM beside packages that were built for another torch, and without CUDA |
| `engine_config` | the one builder of vLLM's engine configuration and KV cache configurations |
| `differences.toml` | in what these differ from what vLLM builds of a model, with the reason of each |
| `kv_cache_specs` | vLLM's KV cache specs of a geometry, without building the model |
| `forked_executor` | vLLM's executor for tensor parallel workers that are forked |
| `worker` | functions of vLLM that its workers call: groups, the worker half, KV memory, contexts |
| `hooks` | the one list of the connector interface's hooks, how vLLM calls each, and its classes |
| `answers` | which answers of hooks vLLM can use, and how P's params reach D |
| `probe` | what is checked of the connector's class, in a child process |

The way of one hand-over through this room:

1. The zygote calls `preload.preload`: packages are mended, vLLM and the rigs' modules are imported,
   overrides are made, model classes are registered.
2. `probe.probe` imports and checks the connector's class in a fork.
3. P and D are forked. `engine_config` builds the VllmConfig of each: for a checkpoint, or for a geometry,
   whose KV cache layers `kv_cache_specs` describes. With several ranks `forked_executor` forks the workers.
4. After an engine has built its connector, `overrides.release_cores` undoes the pinning of its threads.
5. The scheduler rig records the calls of `hooks.RECORDED`; a stack through a hook of `hooks.IN_STACKS`
   shows where the connector was when an engine died or hung.

This room imports `rigs/processes`, `model_matrix`, vLLM, torch and NIXL. vLLM, torch and NIXL are imported
inside functions, except in `forked_executor` and `stand_ins/fake_connector`, which only engines import.
"""

from pathlib import Path

DIFFERENCES = Path(__file__).with_name("differences.toml")
