"""Comparison of rows, for the engine rig: D's cache against P's, at (layer, token, head, plane).

A row is what one token leaves in one layer for one KV head and one plane (K or V). A real model makes all
rows different, so a row that is in the wrong place can be found where it is. Each rank of D that holds a head
has a copy of its rows.

The way of one comparison:

1. `rigs/cluster/model_handover.py` stops D before its first forward and reads P's and D's caches as arrays
   [token, head, plane, word] for each layer. The rig lists the rows that are due (`Due`).
2. compare.py: `compare_rows` gives each row a kind; `compare_state` does the same for recurrent states.
3. window.py: `missing_window` finds rows that D's next forward reads and that D's block table does not have.
4. diagnose.py and draw.py: one sentence and one picture of a `RowComparison`.
5. The cases in `suite/engine/bytes.py` put them into a Finding.

Imports: NumPy and kvspace/kinds.py, kvspace/window.py.
"""
