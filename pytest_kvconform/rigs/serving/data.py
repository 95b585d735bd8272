"""What is asked in a cell: a checkpoint with its tokenizer, and questions in gsm8k's format."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from model_matrix import CheckpointError, load_accuracy_matrices, load_families
from pytest_kvconform.result import Cell, HarnessError
from pytest_kvconform.rigs.context import RunContext
from pytest_kvconform.rigs.serving import interim
from pytest_kvconform.rigs.serving.messages import Questions

HUB = "hub"
TASK = "kvconform_gsm8k"
# lm-eval's own gsm8k; `include` is resolved by lm-eval, relative to this file or absolute
YAML = """\
include: {gsm8k}
task: {task}
"""
LOCAL = """\
dataset_path: json
dataset_name: null
dataset_kwargs:
  data_files:
    train: {folder}/train.jsonl
    test: {folder}/test.jsonl
"""


@dataclass(frozen=True)
class Exam:
    """The questions of a cell, and the model that answers them."""

    checkpoint: Path  # folder of the model and its tokenizer
    longest: int  # tokens of the longest prompt with its answer
    questions: Questions
    looks: int = 1  # times at which they are asked at most, with other examples each time

    def again(self, look: int) -> Exam:
        """The same questions with other examples, and so with other prompts."""
        return replace(self, questions=msgspec.structs.replace(self.questions, look=look))

    def first(self, count: int) -> Exam:
        """The first questions alone."""
        return replace(self, questions=msgspec.structs.replace(self.questions, count=count))


def exam_of(context: RunContext, cell: Cell) -> Exam:
    """Make the checkpoint and the questions of a cell, or find them. Raises HarnessError."""
    sizes = load_accuracy_matrices().sizes[context.settings.matrix]
    try:
        made = interim.ensure_canary(load_families()[cell.family], sizes.questions)
    except CheckpointError as error:
        raise HarnessError(str(error)) from None
    except OSError as error:
        raise HarnessError(f"the questions cannot be written: {error}") from None
    return Exam(
        made,
        sizes.longest_prompt,
        Questions(
            task=str(write_task(context, made)),
            data="questions from a seeded generator",
            count=sizes.questions,
            longest_answer=sizes.longest_answer,
        ),
        sizes.looks,
    )


def exam_of_deployment(context: RunContext) -> Exam:
    """The questions for servers that already run: gsm8k of the hub, or of the folder that the user named."""
    sizes = load_accuracy_matrices().sizes[context.settings.matrix]
    given = context.settings.gsm8k
    local = Path(given).absolute() if given not in ("", HUB) else None
    questions = Questions(
        task=str(write_task(context, local)),
        data=f"gsm8k in {local}" if local else "openai/gsm8k of the hub",
        count=sizes.questions,
        longest_answer=0,  # as lm-eval's gsm8k has it
    )
    return Exam(Path(), 0, questions, sizes.looks)


def write_task(context: RunContext, data: Path | None) -> Path:
    """Write the file of lm-eval's task into a new folder of the run. `data`: None for the hub's."""
    import importlib.util

    found = importlib.util.find_spec("lm_eval")
    assert found is not None
    assert found.origin is not None
    gsm8k = Path(found.origin).parent / "tasks" / "gsm8k" / "gsm8k.yaml"
    folder = Path(context.address).parent / f"gsm8k-{context.next_name()}"
    folder.mkdir(exist_ok=True)
    text = YAML.format(gsm8k=json.dumps(str(gsm8k)), task=TASK)
    text += LOCAL.format(folder=data) if data else ""
    (folder / f"{TASK}.yaml").write_text(text)
    return folder
