"""Real worker halves beside the sides of the scheduler rig, and what a connector answers where they report.

| module | what it has |
|---|---|
| `own_reports` | the reports of a real worker half, for a scheduler half that waits for them |
| `worker_beside` | a worker half in a process of its own, for a scheduler half that needs it |
| `memory` | what a scheduler half remembers of ended requests, asked of engines of the cluster |
"""
