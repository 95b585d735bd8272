"""Comparison of pools, for the byte rig: all memory of one rank against a shadow with the expected bytes.

The engines of this rig run no model. Each word of 8 bytes that they write is an address in code: layer,
token, head, plane, place in the row, and who computed it. So a wrong word tells where it came from. All other
memory is poison, whose words tell where they were written.

The way of one comparison:

1. addresses.py  what a word holds; words.py: the code, an address <-> a word
2. regions.py    where rows lie in a rank's storage (`Region`), and writing rows of tokens and states there
3. poison.py     writing poison. `rigs/bytes/memory.py` poisons a pool and its shadow at the start, and writes
                 into both what the engine computes. What a load has to bring goes into the shadow alone
4. compare.py    `compare_pool` compares storage and shadow, and returns a `PoolComparison`
5. attribute.py  assigns each difference to the layer that holds the block; classify.py gives each word a
                 kind and joins neighbouring words of one kind into runs
6. mistakes.py   names of known layout mistakes, if one explains every wrong word; sources.py: where P's rows
                 lie, and whether what was found stood there before them or after them
7. diagnose.py   one sentence: the named mistake, or what happened to the coordinates. Parts of it come from
                 sentences.py
8. draw.py       a picture: layers by blocks

`rigs/bytes/checks.py` calls `compare_pool`; the cases in `suite/bytes/` and, for peers, in `suite/protocol/`
put the sentence and the picture into a Finding.

Imports: NumPy and kvspace/kinds.py. Within the room: addresses <- poison <- words <- regions <- classify
<- attribute <- compare <- {sources <- mistakes, sentences} <- diagnose; compare <- draw.
"""
