"""A teacher: an engine of one rank that is made to give wanted tokens, and notes the hidden state at each."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from pytest_kvconform.rigs.engine.messages import EngineSpec, Request
from pytest_kvconform.rigs.engine.model_engine import ModelEngineProcess
from pytest_kvconform.rigs.engine.process import serve as serve_engine


class Lesson(msgspec.Struct, frozen=True):
    """A prompt, and the tokens that the engine must generate."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Desk(msgspec.Struct):
    """What a worker has to generate, by request, and the hidden states it has seen so far.

    `seen`: (request, place in the answer) -> state. `drafted`: the same of the draft model.
    """

    wanted: dict[str, tuple[int, ...]] = {}
    seen: dict[tuple[str, int], np.ndarray] = {}
    drafted: dict[tuple[str, int], np.ndarray] = {}
    next_draft: dict[str, int] = {}  # place in the answer of which the draft model computes a token next


def serve(connection: Connection, spec: EngineSpec) -> None:
    """Run a teacher in a child of the zygote, see `engine.process.serve`."""
    serve_engine(connection, spec, TeacherProcess)


def sit_down(worker: Any, desk: Desk) -> None:
    """Let a worker generate what the desk wants, and note each last hidden state that vLLM samples from.

    A prompt that is computed in several steps has a state after each of them. The last one stays. An engine
    that speculates has one request at a time, whose rows are the tokens of a step.
    """
    runner = worker.model_runner
    model, compute = runner.model, runner.model.compute_logits
    drafter = getattr(getattr(runner, "drafter", None), "model", None)

    def compute_logits(hidden: Any, *args: Any, **kwargs: Any) -> Any:
        logits = compute(hidden, *args, **kwargs)
        requests = runner.input_batch.req_ids
        if drafter is not None:
            requests = requests[:1] * len(hidden)
        for row, request in enumerate(requests[: len(hidden)]):
            place = len(runner.requests[request].output_token_ids) + (row if drafter is not None else 0)
            _give(desk.wanted.get(request, ()), place, hidden[row], logits[row], request, desk.seen)
            desk.next_draft[request] = place + 1
        return logits

    def compute_draft(hidden: Any, *args: Any, **kwargs: Any) -> Any:
        logits = draft(hidden, *args, **kwargs)
        [request] = runner.input_batch.req_ids
        place = desk.next_draft[request]
        _give(desk.wanted.get(request, ()), place, hidden[0], logits[0], request, desk.drafted)
        desk.next_draft[request] = place + 1
        return logits

    model.compute_logits = compute_logits
    if drafter is not None:
        draft, drafter.compute_logits = drafter.compute_logits, compute_draft


def _give(
    wanted: tuple[int, ...],
    place: int,
    state: Any,
    logits: Any,
    request: str,
    notes: dict[tuple[str, int], np.ndarray],
) -> None:
    """Note a state, and make the wanted token the one with the greatest logit."""
    if place < len(wanted):
        notes[request, place] = state.detach().float().cpu().numpy().copy()
        logits.zero_()
        logits[wanted[place]] = 1.0


class TeacherProcess(ModelEngineProcess):
    """An engine that teaches."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self.desk, self.lessons = Desk(), 0
        self._workers(sit_down, self.desk)

    def teach(self, lessons: tuple[Lesson, ...]) -> list[np.ndarray]:
        """Return the last hidden states at which each lesson's tokens were generated: [token, hidden]."""
        names = self._take(lessons)
        return [
            np.stack([self.desk.seen[name, place] for place in range(len(lesson.answer))])
            for name, lesson in zip(names, lessons, strict=True)
        ]

    def teach_draft(self, lesson: Lesson, alone: bool) -> np.ndarray:
        """Return the draft model's states at which it drafts all tokens but the first: [token, hidden].

        `alone`: the last token of the prompt is computed in a step of its own, as on D.
        """
        self.budget(len(lesson.prompt) - 1 if alone else 0)
        [name] = self._take((lesson,))
        self.budget(0)
        return np.stack([self.desk.drafted[name, place] for place in range(1, len(lesson.answer))])

    def _take(self, lessons: tuple[Lesson, ...]) -> list[str]:
        """Take lessons, all at once. Returns the names of the requests."""
        self.manager.reset_prefix_cache()
        for notes in (self.desk.wanted, self.desk.seen, self.desk.drafted, self.desk.next_draft):
            notes.clear()
        names = []
        for lesson in lessons:
            names.append(name := f"lesson-{self.lessons}")
            self.lessons += 1
            self.desk.wanted[name] = lesson.answer
            self.add(Request(id=name, tokens=lesson.prompt, max_tokens=len(lesson.answer)))
        while self.scheduler.has_requests():
            self.step(0.0)
        return names
