"""Scripts of cases: a case with `script=True` gets a `Cluster`, and starts engines by role.

| module | what it has |
|---|---|
| `cluster` | `Cluster`: the engines of one case, and what a script lets them do |
| `wanted` | `Wanted`: how one of these engines is built, as data |
| `bench` | `ScriptBench`: runs the script, keeps engines for the next case, judges what ended it |
| `failures` | the finding about an engine that raised, died, hung or did not start |
| `sentences` | wrong KV in one sentence |

The engines are byte engines of one rank with the first layers of the cell's model: they start in a second.
They step when the script says so, all in turn, so that what happens in which order is the same in every run.
Each load is compared with what is due, byte by byte, before the first forward that reads it.
"""
