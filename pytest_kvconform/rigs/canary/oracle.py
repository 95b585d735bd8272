"""The oracle of a canary: P and D without a connector, between which the harness copies KV.

It shows what a right hand-over does to an answer. D computes the last token of a prompt alone after it, and
with the whole prompt when D is asked alone, and these round differently.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from model_matrix import Family
from model_matrix.canary.exam import Exam
from model_matrix.canary.tokenizer import END_ID
from pytest_kvconform.rigs.canary.school import AT_ONCE, School, engine_for
from pytest_kvconform.rigs.engine.handle import EngineFailed, ModelEngineHandle
from pytest_kvconform.rigs.engine.messages import Request, Snapshot
from pytest_kvconform.rigs.processes.cores import Deadline


class Answer(NamedTuple):
    """What D generated."""

    tokens: tuple[int, ...]  # up to the end token
    accepted: int  # tokens of the draft model among them


class Compared(NamedTuple):
    """Texts of D's answers to one question, several at once and alone, as they may be on a server."""

    alone: tuple[str, ...]  # D computed the whole prompt
    handed_over: tuple[str, ...]  # D computed its last token


class Oracle:
    """P and D of one canary, which end with the block of `with`."""

    def __init__(
        self,
        school: School,
        family: Family,
        canary: Path,
        exam: Exam,
        tensor_parallel: tuple[int, int] = (1, 1),
    ):
        """`canary`: its folder; `tensor_parallel`: sizes of P and D. Raises EngineFailed."""
        self.exam, self._asked, self._has_state = exam, 0, family.has_state
        self.layers: int = family.config["num_hidden_layers"]  # of the model, without a draft
        spec, deadlines = engine_for(family, canary, exam.longest), school.deadlines
        self._request_s = deadlines.request
        self._engines: list[ModelEngineHandle] = []
        try:
            for role, size in zip("PD", tensor_parallel, strict=True):
                made = msgspec.structs.replace(spec, role=role, tensor_parallel=size)
                name = f"oracle-{family.id}-{role}"
                self._engines.append(
                    ModelEngineHandle(school.address, name, made, deadlines.call, deadlines.start)
                )
            for engine in self._engines:
                engine.wait_ready()
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        for engine in self._engines:
            engine.end()

    def handed_over(self, question: int, less: int = 0) -> Snapshot:
        """What P hands over for a question: its KV, and its state before the last token of the prompt.

        `less`: tokens at the end of the prompt that P does not know.
        """
        p, prompt = self._engines[0], self.exam.tokens[question][0]
        # D computes the last token, and needs the state before it
        [name], _ = self._ask(p, prompt[: len(prompt) - less - self._has_state], 1)
        found = p.pop_snapshot(name)
        assert found is not None
        return found

    def answers(self, question: int, handed_over: Snapshot | None, at_once: int = 1) -> list[Answer]:
        """What D generates for each of so many equal requests at once. None: D computes the whole prompt."""
        d, (prompt, answer) = self._engines[1], self.exam.tokens[question]
        names, generated = self._ask(d, prompt, len(answer), handed_over, at_once)
        ends = [tokens.index(END_ID) + 1 if END_ID in tokens else None for tokens in generated]
        return [
            Answer(tuple(tokens[:end]), d.trace(name).accepted)
            for name, tokens, end in zip(names, generated, ends, strict=True)
        ]

    def compare(self, question: int) -> Compared:
        """D's answers to a question alone and after a right hand-over, 1 to AT_ONCE of them at once."""
        given, sizes = self.handed_over(question), range(1, AT_ONCE + 1)

        def texts(handed_over: Snapshot | None) -> tuple[str, ...]:
            answers = (one for size in sizes for one in self.answers(question, handed_over, size))
            return tuple(self.exam.text(answer.tokens) for answer in answers)

        return Compared(texts(None), texts(given))

    def _ask(
        self,
        engine: ModelEngineHandle,
        prompt: tuple[int, ...],
        most: int,
        handed_over: Snapshot | None = None,
        count: int = 1,
    ) -> tuple[list[str], list[list[int]]]:
        """Run equal requests at once. Returns their ids, and what was generated for each.

        Raises EngineFailed.
        """
        if self._has_state:
            engine.poison()  # states of earlier requests in free blocks could be read as NaN
        generated = dict[str, list[int]]()
        for _ in range(count):
            self._asked += 1
            generated[name := f"question-{self._asked}"] = []
            watch = engine.role == "P"
            engine.add(Request(id=name, tokens=prompt, max_tokens=most, oracle=handed_over, watch=watch))
        left, deadline = count, Deadline(self._request_s, (engine.process.pid,))
        while left:
            if deadline.over():
                sentence = f"{engine.role} did not answer a question within {self._request_s:.0f} s"
                raise EngineFailed(engine.role, "hung", sentence)
            for output in engine.step().outputs:
                generated[output.id] += output.tokens
                left -= output.finish is not None
        return list(generated), list(generated.values())
