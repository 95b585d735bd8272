"""The canary room: it teaches tiny models the answers to an exam, on a real engine, and asks them.

| module | what it has |
|---|---|
| `school` | `ensure_canary`: a checkpoint that answers an exam right, from the cache or taught now |
| `oracle` | P and D of a canary between which the harness copies KV: what a right hand-over does |
| `teacher` | the engine that teaches: it gives wanted tokens, and notes the hidden states at them |

The way of one canary:

1. `model_matrix.canary.ensure_exam` has written questions and a tokenizer.
2. `ensure_canary` writes the family's model, widened (`model_matrix/canary/widen.py`), without a read-out.
3. A teacher loads it. It is asked every prompt and made to give the right answer, in both ways in which a
   server comes to the first token: all of the prompt at once, and the last prompt token alone, as D.
4. `model_matrix/canary/readout.py` solves for the read-out, which goes into the checkpoint.

This room imports `context.py`, `engine` and `model_matrix`. `teacher` imports torch inside functions.
"""
