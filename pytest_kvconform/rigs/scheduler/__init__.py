"""The scheduler rig: vLLM's real scheduler with the connector's scheduler half, and a scripted worker.

A case of this rig (`@case(RULE, rig="scheduler")`) decides what the workers report and when, and reads every
answer of the connector. It takes milliseconds: no engine runs and no byte moves. A real worker half, of one
rank and without a model, can be had in addition (worker_half.py, store_engine.py, own_workers/). A case that
needs whole engines is a script on engines of the cluster.

The way of a case:

1. The controller calls `bench.scheduler.run` (bench.py), which starts one host process for each cell.
2. host.py builds vLLM's configurations and KV cache groups once, and forks a child for each case.
3. case_process.py runs the case in the child. The case gets a `Rig` (rig.py) and makes sides with it.
4. A side is one engine without workers: side_state.py builds vLLM's scheduler and reads it, side.py drives
   it, steps.py has the records of a step. fake_connector.py is a second connector, for MultiConnector. A
   connector may wait for what only its own workers say: then the case runs again, with real ones
   (own_workers/own_reports.py).
5. recorder.py keeps every call of a hook (history.py), and checks every answer. violations.py has
   what no case looks for: a hook that raises, a scheduler that stops. leaks.py finds what is left at the end.
6. `case_outcome.run_case` makes a `CaseEnd` of what the case returned or raised. The child sends it to the
   host, and the host to the controller. A child that dies or hangs is a violation that
   names the running hook.

May import: `rigs.bytes` (layers and memory of a worker half), `rigs.cluster`, `rigs.vllm_setup`,
`rigs.processes`, and `context.py`, `scenario.py`, `history.py`.
"""
