"""Byte engines whose transport fails on demand, and what each rank of them reports.

| module | what it has |
|---|---|
| `engine` | `FaultyEngineProcess`: a byte engine whose transport follows faults |
| `nixl` | what replaces NIXL's agent: it delays, fails, repeats or withholds |
| `ranks` | sets the faults in each rank: those of NIXL, or of a connector that has `kvconform_fault` |
| `peer` | `PeerEngineProcess`: ranks record their worker halves, requests can be kept queued, steps fail |
| `messages` | the records about faults and reports that travel between pytest, an engine and its ranks |
"""
