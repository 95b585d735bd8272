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
    """What a worker wants to generate, by request, and the hidden states it has seen so far."""

    wanted: dict[str, tuple[int, ...]]
    seen: dict[tuple[str, int], np.ndarray]


def serve(connection: Connection, spec: EngineSpec) -> None:
    """Run a teacher in a child of the zygote, see `engine.process.serve`."""
    serve_engine(connection, spec, TeacherProcess)


def sit_down(worker: Any, desk: Desk) -> None:
    """Let a worker generate what the desk wants, and note each last hidden state that vLLM samples from.

    A prompt that is computed in several steps has a state after each of them. The last one stays.
    """
    import torch

    runner = worker.model_runner
    model, compute = runner.model, runner.model.compute_logits

    def compute_logits(hidden: Any, *args: Any, **kwargs: Any) -> Any:
        logits = compute(hidden, *args, **kwargs)
        states = hidden.detach().float().cpu().numpy()
        for row, request in enumerate(runner.input_batch.req_ids[: len(states)]):
            place = len(runner.requests[request].output_token_ids)
            if place < len(wanted := desk.wanted.get(request, ())):
                desk.seen[request, place] = states[row].copy()
                logits[row] = torch.zeros_like(logits[row])
                logits[row, wanted[place]] = 1.0
        return logits

    model.compute_logits = compute_logits


class TeacherProcess(ModelEngineProcess):
    """An engine that teaches."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self.desk, self.lessons = Desk({}, {}), 0
        self._workers(sit_down, self.desk)

    def teach(self, lessons: tuple[Lesson, ...]) -> list[np.ndarray]:
        """Return the last hidden states at which each lesson's tokens were generated: [token, hidden]."""
        self.manager.reset_prefix_cache()
        names = []
        for lesson in lessons:
            names.append(name := f"lesson-{self.lessons}")
            self.lessons += 1
            self.desk.wanted[name] = lesson.answer
            self.add(Request(id=name, tokens=lesson.prompt, max_tokens=len(lesson.answer)))
        while self.scheduler.has_requests():
            self.step(0.0)
        states = [
            np.stack([self.desk.seen[name, place] for place in range(len(lesson.answer))])
            for name, lesson in zip(names, lessons, strict=True)
        ]
        self.desk.wanted.clear()
        self.desk.seen.clear()
        return states
