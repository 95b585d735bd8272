"""Comparison of KV caches: which bytes on D are not what they should be, and where the wrong ones come from.

A rig passes arrays of bytes; nothing here knows vLLM, torch or a connector. NumPy only.

There are two rooms, because there are two ways to know what KV should be:

    rows/    engine rig. A real model computes the KV, so the expected bytes are those of P's cache.
             The unit is a row: what one token leaves in one layer, for one KV head, in K or V.
    pools/   byte rig, and peers on it. A fake model writes words of 8 bytes that hold their own address,
             so the expected bytes are computed. The unit is a word, and all of a rank's memory is compared.

Both rooms have the same three modules, and each is one step of a comparison:

    compare.py    bytes -> a kind for each row or word (same, moved, never written, ...), and its origin
    diagnose.py   a comparison -> one sentence: the likely mistake ("block is off by +1 in all 320 words")
    draw.py       a comparison -> a picture of at most 20 lines: layers by blocks

kinds.py has what both rooms use: the kinds and their names. window.py has the sentence on a gap in a sliding
window, which both tiers report. The rooms import kinds.py and window.py, and nothing of each other.

The suite calls these functions and copies what they return into a Finding: `count_*` into `differs`, `draw_*`
into `picture`, `diagnose_*` into `diagnosis`.
"""
