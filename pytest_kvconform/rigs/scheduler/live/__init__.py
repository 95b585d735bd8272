"""Live engines of the scheduler rig: vLLM's scheduler with both halves of the connector, and words as KV.

A case gets one or more of them, each in a process of its own, and scripts what is difficult for a
connector and cheap to arrange here: a preemption at a chosen moment, many loads in flight, large block ids,
speculation, a clock that jumps. Every load is compared, word by word, when the scheduler believes that it is
complete.

| module | what it has |
|---|---|
| `memory` | the KV memory of the only rank: words of tokens and of states, written and compared |
| `engine` | `LiveEngine`: one engine, and what a case can do with it |
| `config` | its vLLM configuration: speculation, ranks, large pools |
| `pair` | `live_engines`: P and D (a store: one engine), P in a forked process |
| `own_reports` | the reports of a real worker half, for a scheduler half that waits for them |
| `worker_beside` | a worker half in a process of its own, for a scheduler half that needs it |
| `ends` | whose doing it is that one of these processes has ended |
| `clocks` | the clocks of a process, which a case may set |
| `sizes` | what grows with the number of requests: containers of both halves, and open files |
| `fake_loads` | what loads of the fake connector bring, beside the subject in MultiConnector |
| `reports` | what a worker half reports must stay as it is until the scheduler has read it |
"""
