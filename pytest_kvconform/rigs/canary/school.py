"""The school: canaries, made of a family's model and of the read-out that an engine's hidden states give."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from model_matrix import Family
from model_matrix.canary.exam import FILES as EXAM_FILES
from model_matrix.canary.exam import Exam
from model_matrix.canary.readout import MOST_GAIN, READOUT_VERSION, gain_for, solve
from model_matrix.canary.widen import HEAD, hidden_size_for, widen
from model_matrix.checkpoints import (
    FILES,
    EncodedTensor,
    cache_folder,
    content_hash,
    encoded_tensors,
    safetensors_file,
    write_file,
    write_once,
)
from model_matrix.families import checkpoint_tensors
from pytest_kvconform.rigs.canary.teacher import Lesson
from pytest_kvconform.rigs.context import Deadlines
from pytest_kvconform.rigs.engine.handle import EngineHandle
from pytest_kvconform.rigs.engine.messages import EngineSpec

AT_ONCE = 4  # lessons: a teacher computes them in one batch, as a server does
PROBED = 8  # lessons in which a teacher that has no noise shows that it has none
NO_NOISE = 1e-5  # of the length of a hidden state: rounding of float32
GROUPS = 6  # most KV cache groups of a family
NONE = {
    "kv_connector": "NoConnector",
    "kv_connector_module_path": "pytest_kvconform.rigs.engine.no_connector",
    "kv_role": "kv_both",
}
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

    `most_gain`: 0 for a plain read-out, which notices little.
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
        tensors = encoded_tensors(checkpoint_tensors(wide))
        _write_model(folder, wide, tensors)
        report, head = _taught(school, wide, exam, folder, most_gain)
        tensors[HEAD] = EncodedTensor("F32", head.shape, head.astype("<f4").tobytes())
        _write_model(folder, wide, tensors)
        write_file(folder / REPORT, msgspec.json.encode(report))

    final = cache_folder(cache_dir) / "canaries" / family.id / key  # a folder, and so a lock, of the family
    return write_once(final, (*FILES, *EXAM_FILES, REPORT), write, f"{family.id} canary")


def read_report(canary: Path) -> Report:
    """How the canary in a folder was made."""
    return msgspec.json.decode((canary / REPORT).read_bytes(), type=Report)


def teacher_spec(family: Family, checkpoint: Path, longest: int) -> EngineSpec:
    """An engine for a few prompts of at most `longest` tokens, without prefix caching, as servers have."""
    blocks = math.ceil(longest / family.block_size) + 1
    return EngineSpec(
        role="P",
        checkpoint=str(checkpoint),
        tensor_parallel=1,
        dtype=family.dtype,
        block_size=family.block_size,
        num_blocks=2 * AT_ONCE * GROUPS * blocks,
        max_model_len=longest + 1,
        max_batched_tokens=AT_ONCE * (longest + 1),
        kv_transfer_config=NONE,
        environment={},
        engine_arguments={"enable_prefix_caching": False},
    )


def _write_model(folder: Path, family: Family, tensors: dict[str, EncodedTensor]) -> None:
    config = msgspec.json.format(msgspec.json.encode(family.config), indent=2)
    for name, data in zip(FILES, (config, safetensors_file(tensors)), strict=True):
        write_file(folder / name, data)


def _taught(
    school: School, wide: Family, exam: Exam, folder: Path, most_gain: float
) -> tuple[Report, np.ndarray]:
    """How the canary was made, and its read-out."""
    at_once = [Lesson(prompt, answer) for prompt, answer in exam.tokens]
    # D computes the last token of a prompt alone
    alone = [Lesson(prompt[:-1], (prompt[-1], *answer)) for prompt, answer in exam.tokens]
    spec = teacher_spec(wide, folder, exam.longest)
    teacher = TeacherHandle(
        school.address, f"teacher-{wide.id}", spec, school.deadlines.request, school.deadlines.start
    )
    try:
        teacher.wait_ready()
        states = teacher.teach(at_once)
        others = [one[1:] for one in teacher.teach(alone[:PROBED])]
        length = float(np.mean([np.linalg.norm(one, axis=1).mean() for one in states]))
        if _noise(states, others) > NO_NOISE * length:
            others += [one[1:] for one in teacher.teach(alone[PROBED:])]
    finally:
        teacher.end()
    noise = _noise(states, others)
    noisy = noise > NO_NOISE * length
    rows = np.concatenate([*states, *(others if noisy else ())])
    tokens = np.array([token for lesson in at_once * (1 + noisy) for token in lesson.answer])
    gain = min(most_gain, gain_for(noise))
    head = solve(rows, tokens, wide.config["vocab_size"], exam.used, gain)
    return Report(rows.shape[1], len(rows), noise, length, gain), head


def _noise(states: list[np.ndarray], others: list[np.ndarray]) -> float:
    """The greatest distance between two computations of one state."""
    return max(
        float(np.linalg.norm(one - other, axis=1).max()) for one, other in zip(states, others, strict=False)
    )
