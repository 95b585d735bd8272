"""The exam: a folder of questions with its tokenizer, and the prompts that lm-eval's gsm8k makes of it."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import msgspec

from model_matrix.canary import tokenizer
from model_matrix.canary.questions import EXAMPLES, TEST, TRAIN, Question, draw_questions, make_questions
from model_matrix.checkpoints import cache_folder, write_file, write_once

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VERSION = 1  # raise it if the same questions give other files
QUESTIONS = 96
SHOTS = 5  # solved examples in a prompt, as lm-eval's gsm8k has
TOKENS_OF_SHOT = 36  # at least, of the generator and of gsm8k
SHUFFLE = 1234  # lm-eval's default for `fewshot_random_seed`
FILES = (TEST, TRAIN, *tokenizer.FILES)


class Exam(msgspec.Struct, frozen=True, dict=True):
    """Questions in a folder, which is also a tokenizer that transformers and vLLM load."""

    folder: Path
    prompts: tuple[str, ...]  # of lm-eval, one a question
    answers: tuple[str, ...]  # what a canary answers: " #### 42"

    @cached_property
    def tokens(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Token ids of each prompt and of its answer, with the end token."""
        prompts, answers = map(self._tokenizer.encode_batch, (list(self.prompts), list(self.answers)))
        return tuple(
            (tuple(prompt.ids), (*answer.ids, tokenizer.END_ID))
            for prompt, answer in zip(prompts, answers, strict=True)
        )

    def text(self, tokens: Sequence[int]) -> str:
        """The text of generated tokens, without the end token."""
        return self._tokenizer.decode(list(tokens))

    @property
    def used(self) -> int:
        """How many tokens the tokenizer has."""
        return self._tokenizer.get_vocab_size()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.folder / tokenizer.FILES[0]))

    @property
    def vocabulary(self) -> int:
        """How many tokens a model has: the tokenizer's, rounded up to what kernels like."""
        return -(-self.used // 64) * 64

    @property
    def longest(self) -> int:
        """Most tokens of a prompt with its answer."""
        return max(len(prompt) + len(answer) for prompt, answer in self.tokens)


def ensure_exam(
    count: int = QUESTIONS,
    seed: int = 0,
    gsm8k: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    shots: int = SHOTS,
) -> Exam:
    """Return an exam of `count` questions, after writing its folder if it is missing.

    `gsm8k`: a folder with gsm8k's test.jsonl and train.jsonl, from which the questions are drawn; None: they
    are made from the seed. `cache_dir`: see `ensure_checkpoint`. `shots`: solved examples in a prompt,
    at most EXAMPLES.
    Raises QuestionsError if gsm8k's files cannot be used, CheckpointError if the folder cannot be written.
    """
    questions = draw_questions(gsm8k, count, seed) if gsm8k else make_questions(count, seed)
    lines = {
        name: b"".join(msgspec.json.encode(one) + b"\n" for one in questions[name]) for name in questions
    }

    def write(folder: Path) -> None:
        for name, data in lines.items():
            write_file(folder / name, data)
        tokenizer.write_tokenizer(folder, _texts(questions))

    key = hashlib.sha256(msgspec.json.encode([VERSION, *lines.values()])).hexdigest()[:12]
    folder = write_once(cache_folder(cache_dir) / "exams" / key, FILES, write, "canaries' questions")
    return Exam(folder, tuple(prompts_of(questions, shots)), tuple(answer_of(one) for one in questions[TEST]))


def answer_of(question: Question) -> str:
    """What a canary answers: the number alone, in the form that lm-eval's strict match wants."""
    return f" #### {question.number}"


def shots_for(tokens: int) -> int:
    """Return how many examples make prompts longer by at least so many tokens."""
    return min(EXAMPLES, SHOTS + math.ceil(tokens / TOKENS_OF_SHOT))


def prompts_of(questions: dict[str, list[Question]], shots: int = SHOTS) -> list[str]:
    """Return the prompts that lm-eval 0.4.13 makes for its task gsm8k, in its order.

    It draws examples for each question anew (lm_eval/api/samplers.py, ContextSampler.sample).
    """
    random = Random(SHUFFLE)
    prompts = []
    for question in questions[TEST]:
        examples = random.sample(questions[TRAIN], shots)
        solved = [f"Question: {one.question}\nAnswer: {one.answer}\n\n" for one in examples]
        prompts.append(f"{''.join(solved)}Question: {question.question}\nAnswer:")
    return prompts


def _texts(questions: dict[str, list[Question]]) -> list[str]:
    """What the tokenizer is trained on: all texts of prompts, and the answers."""
    return [
        f"Question: {one.question}\nAnswer: {one.answer}\n\nAnswer:{answer_of(one)}"
        for name in sorted(questions)
        for one in questions[name]
    ]
