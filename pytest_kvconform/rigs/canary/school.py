"""The school: canaries, made of a family's model and of the read-out that an engine's hidden states give."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from model_matrix import Family
from model_matrix.canary.exam import FILES as EXAM_FILES
from model_matrix.canary.exam import Exam
from model_matrix.canary.readout import MOST_GAIN, READOUT_VERSION, gain_for, solve
from model_matrix.canary.widen import HEAD, hidden_size_for, widen
from model_matrix.checkpoints import (
    EncodedTensor,
    cache_folder,
    content_hash,
    encoded_tensors,
    files_of,
    model_folders,
    speculative_config,
    write_file,
    write_model,
    write_once,
)
from model_matrix.families import checkpoint_tensors
from pytest_kvconform.rigs.canary.teacher import Lesson
from pytest_kvconform.rigs.context import Deadlines
from pytest_kvconform.rigs.engine.handle import EngineHandle
from pytest_kvconform.rigs.engine.messages import NO_CONNECTOR, EngineSpec

AT_ONCE = 4  # lessons: a teacher computes them in one batch, as a server does
PROBED = 8  # lessons in which a teacher that has no noise shows that it has none
NO_NOISE = 1e-5  # of the length of a hidden state: rounding of float32
GROUPS = 6  # most KV cache groups of a family
SPARE = 8  # tokens beyond the longest answer, for drafts
REPORT = "canary.json"


class TeacherHandle(EngineHandle):
    """A handle on a teacher, see `canary.teacher.TeacherProcess`."""

    target = "pytest_kvconform.rigs.canary.teacher:serve"

    def teach(self, lessons: Sequence[Lesson]) -> list[np.ndarray]:
        """The hidden states of each lesson: [token, hidden]."""
        return [
            states
            for first in range(0, len(lessons), AT_ONCE)
            for states in self.call("teach", tuple(lessons[first : first + AT_ONCE]))
        ]


class Report(msgspec.Struct, frozen=True):
    """How a canary was made, in its folder."""

    hidden_size: int
    states: int  # at which it must give a certain token
    noise: float  # greatest distance of two right computations of one state
    length: float  # of a hidden state, the mean
    gain: float  # see readout.py


class States(NamedTuple):
    """Hidden states, an array [token, hidden] for each question."""

    first: list[np.ndarray]  # the prompt was computed at once
    other: list[np.ndarray]  # its last token was computed alone; of some questions, if that is the same
    tokens: list[np.ndarray]  # the wanted ones


@dataclass(frozen=True)
class School:
    """Where canaries are taught. `address`: of the zygote. `kernels`: names what computes, for the cache."""

    address: str
    kernels: str
    deadlines: Deadlines


def ensure_canary(
    school: School,
    family: Family,
    exam: Exam,
    cache_dir: str | os.PathLike[str] | None = None,
    most_gain: float = MOST_GAIN,
) -> Path:
    """Return the folder of a canary: a checkpoint with tokenizer and questions, taught now if it is missing.

    A draft model is taught, too, and drafts what the model answers. `most_gain`: 0 for a plain read-out,
    which notices little.
    Raises EngineFailed if vLLM does not run the family here, CheckpointError if it cannot be written.
    """
    prompts = exam.tokens
    hidden_size = hidden_size_for(sum(len(answer) for _, answer in prompts))
    wide = widen(family, hidden_size, exam.vocabulary)
    parts = [content_hash(wide), family.block_size, READOUT_VERSION, most_gain, school.kernels, prompts]
    key = hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:12]

    def write(folder: Path) -> None:
        for name in EXAM_FILES:
            shutil.copyfile(exam.folder / name, folder / name)
        models = model_folders(wide)
        tensors = {name: encoded_tensors(checkpoint_tensors(model)) for name, model in models.items()}
        for name, model in models.items():
            write_model(folder / name, model, tensors[name])
        reports = {}
        for name, model in models.items():  # the draft model reads hidden states of a model that is ready
            states = (_taught_draft if name else _taught)(school, wide, exam, folder)
            reports[name or "model"], head = _solved(states, exam, most_gain)
            tensors[name][HEAD] = EncodedTensor("F32", head.shape, head.astype("<f4").tobytes())
            write_model(folder / name, model, tensors[name])
        write_file(folder / REPORT, msgspec.json.encode(reports))

    final = cache_folder(cache_dir) / "canaries" / family.id / key  # a folder, and so a lock, of the family
    return write_once(final, (*files_of(family), *EXAM_FILES, REPORT), write, f"{family.id} canary")


def read_reports(canary: Path) -> dict[str, Report]:
    """How the model in a canary's folder was made, and the draft model if there is one."""
    return msgspec.json.decode((canary / REPORT).read_bytes(), type=dict[str, Report])


def engine_for(family: Family, checkpoint: Path, longest: int, speculates: bool = True) -> EngineSpec:
    """An engine for a few prompts of at most `longest` tokens, without prefix caching, as servers have.

    `speculates`: with the family's draft model, if it has one.
    """
    blocks = math.ceil(longest / family.block_size) + 1
    draft = speculative_config(family, checkpoint) if speculates else None
    return EngineSpec(
        role="P",
        checkpoint=str(checkpoint),
        tensor_parallel=1,
        dtype=family.dtype,
        block_size=family.block_size,
        num_blocks=2 * AT_ONCE * GROUPS * blocks,
        max_model_len=longest + SPARE,
        max_batched_tokens=AT_ONCE * (longest + SPARE),
        kv_transfer_config=NO_CONNECTOR | {"kv_role": "kv_both"},
        environment={},
        engine_arguments={"enable_prefix_caching": False} | ({"speculative_config": draft} if draft else {}),
    )


@contextlib.contextmanager
def _teacher(school: School, family: Family, spec: EngineSpec) -> Iterator[TeacherHandle]:
    """A teacher, while the block runs."""
    deadlines = school.deadlines
    teacher = TeacherHandle(school.address, f"teacher-{family.id}", spec, deadlines.request, deadlines.start)
    try:
        teacher.wait_ready()
        yield teacher
    finally:
        teacher.end()


def _taught(school: School, family: Family, exam: Exam, folder: Path) -> States:
    """The states at which the model must give the tokens of each answer."""
    at_once = [Lesson(prompt, answer) for prompt, answer in exam.tokens]
    # D computes the last token of a prompt alone
    alone = [Lesson(prompt[:-1], (prompt[-1], *answer)) for prompt, answer in exam.tokens]
    with _teacher(school, family, engine_for(family, folder, exam.longest, speculates=False)) as teacher:
        first = teacher.teach(at_once)
        other = [one[1:] for one in teacher.teach(alone[:PROBED])]
        if _noise(first, other) > NO_NOISE * _length(first):
            other += [one[1:] for one in teacher.teach(alone[PROBED:])]
    return States(first, other, [np.array(answer) for _, answer in exam.tokens])


def _taught_draft(school: School, family: Family, exam: Exam, folder: Path) -> States:
    """The states at which the draft model must draft the tokens of each answer but the first."""
    lessons = [Lesson(prompt, answer) for prompt, answer in exam.tokens]
    with _teacher(school, family, engine_for(family, folder, exam.longest)) as teacher:
        first = [teacher.call("teach_draft", lesson, False) for lesson in lessons]
        other = [teacher.call("teach_draft", lesson, True) for lesson in lessons[:PROBED]]
        if _noise(first, other) > NO_NOISE * _length(first):
            other += [teacher.call("teach_draft", lesson, True) for lesson in lessons[PROBED:]]
    return States(first, other, [np.array(answer[1:]) for _, answer in exam.tokens])


def _solved(states: States, exam: Exam, most_gain: float) -> tuple[Report, np.ndarray]:
    """How a model was made, and its read-out."""
    noise, length = _noise(states.first, states.other), _length(states.first)
    noisy = noise > NO_NOISE * length
    rows = np.concatenate([*states.first, *(states.other if noisy else ())])
    tokens = np.concatenate(states.tokens * (2 if noisy else 1))
    gain = min(most_gain, gain_for(noise))
    head = solve(rows, tokens, exam.vocabulary, exam.used, gain)
    return Report(rows.shape[1], len(rows), noise, length, gain), head


def _length(states: list[np.ndarray]) -> float:
    """The mean length of a state."""
    return float(np.mean([np.linalg.norm(one, axis=1).mean() for one in states]))


def _noise(states: list[np.ndarray], others: list[np.ndarray]) -> float:
    """The greatest distance between two computations of one state."""
    return max(
        float(np.linalg.norm(one - other, axis=1).max()) for one, other in zip(states, others, strict=False)
    )
