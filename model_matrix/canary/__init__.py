"""Canaries: tiny models that know the answers to questions in gsm8k's format, and what they are made of.

| module | what it has |
|---|---|
| `questions` | questions and train examples, made from a seed or drawn from gsm8k |
| `tokenizer` | a byte-level BPE, trained on the questions |
| `exam` | `ensure_exam`: the folder of both, and the prompts that lm-eval makes of them |
| `widen` | a family's tiny model with a last hidden state that is wide enough for many answers |
| `readout` | the lm_head that gives the answers, and nothing else for any other hidden state |

A canary answers right if D has the whole KV cache of the prompt, and something else if a single block is
wrong. `readout` explains how. The last hidden states come from vLLM itself, so a canary is taught by an
engine: `pytest_kvconform/rigs/canary`.
"""

from model_matrix.canary.exam import SHOTS, Exam, ensure_exam, shots_for
from model_matrix.canary.questions import QuestionsError

__all__ = ["SHOTS", "Exam", "QuestionsError", "ensure_exam", "shots_for"]
