"""What is asked in a cell: a checkpoint with its tokenizer, and questions in gsm8k's format."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from model_matrix import CheckpointError, load_accuracy_matrices, load_families, load_real_checkpoints
from model_matrix.canary import SHOTS, QuestionsError, ensure_exam, shots_for
from model_matrix.canary import Exam as CanaryExam
from model_matrix.canary.questions import TEST, TRAIN, read_questions
from pytest_kvconform.result import Blocked, Cell, HarnessError
from pytest_kvconform.rigs.canary.school import School, ensure_canary
from pytest_kvconform.rigs.context import Deadlines, RunContext, declared_addition
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.serving.gate import LOOKS
from pytest_kvconform.rigs.serving.messages import TASK, Questions

# lm-eval's own gsm8k; `include` is resolved by lm-eval, relative to this file or absolute
YAML = """\
include: {gsm8k}
task: {task}
num_fewshot: {shots}
"""
LOCAL = """\
dataset_path: json
dataset_name: null
dataset_kwargs:
  cache_dir: {cache}
  data_files:
    train: {train}
    test: {test}
"""


@dataclass(frozen=True)
class Exam:
    """The questions of a cell, and the model that answers them."""

    checkpoint: Path  # folder of the model and its tokenizer
    longest: int  # tokens of the longest prompt with its answer
    questions: Questions
    looks: int = 1  # times at which they are asked at most
    canary: CanaryExam | None = None  # what the model was taught; None: a real checkpoint
    model: str = ""  # what answers, where it is a real checkpoint that is served here
    draft: Path | None = None  # folder of the draft of a real checkpoint, if it has one

    def again(self, look: int) -> Exam:
        """The same questions once more."""
        return replace(self, questions=msgspec.structs.replace(self.questions, look=look))

    def alone(self, questions: tuple[int, ...], times: int) -> Exam:
        """These questions alone, each several times."""
        return replace(self, questions=msgspec.structs.replace(self.questions, alone=questions, times=times))

    def first(self, count: int) -> Exam:
        """The first questions alone."""
        return replace(self, questions=msgspec.structs.replace(self.questions, count=count))


def exam_of(context: RunContext, cell: Cell, longer: int = 0) -> Exam:
    """Teach the canary of a cell its questions, or find it in the cache.

    `longer`: tokens by which prompts are lengthened at least, with more examples, beside those that the
    connector's declaration needs. Raises Blocked if vLLM does not run the family here, gsm8k's files cannot
    be used, or prompts would be too long; HarnessError if a file cannot be written.
    """
    settings, family = context.settings, load_families()[cell.family]
    shots = shots_for(longer + declared_addition(context.subject, family.block_size))
    count = load_accuracy_matrices().questions[settings.matrix]
    school = school_of(context)
    try:
        exam = ensure_exam(count, gsm8k=settings.gsm8k or None, shots=shots)
        context.progress(f"teaching a tiny {family.id} the answers, unless it knows them")
        canary = ensure_canary(school, family, exam)
    except QuestionsError as error:
        raise Blocked(f"--kv-gsm8k: {error}") from None
    except EngineFailed as failed:
        raise Blocked(
            f"the tiny {family.id} cannot be taught the questions here: {failed.sentence}"
        ) from None
    except (CheckpointError, OSError) as error:
        raise HarnessError(str(error)) from None
    questions = Questions(
        task=str(write_task(context, canary, shots)),
        data=f"gsm8k in {settings.gsm8k}" if settings.gsm8k else "a generator",
        count=len(exam.prompts),
        longest_answer=max(len(answer) for _, answer in exam.tokens),
    )
    # lm-eval asks for the longest answer to each prompt, and vLLM refuses what may become too long. It drafts
    # no token behind the longest length.
    spare = questions.longest_answer + 1 + (family.draft.tokens if family.draft else 0)
    longest = max(len(prompt) for prompt, _ in exam.tokens) + spare
    return Exam(canary, longest, questions, LOOKS, exam)


def school_of(context: RunContext) -> School:
    """Where the canaries of a run are taught, without the connector, and so with deadlines of full length."""
    deadlines = Deadlines.scaled(context.settings.timeout_scale)
    return School(context.address, f"{context.facts.vllm} {context.facts.kernels}", deadlines)


def exam_of_real_checkpoint(context: RunContext, cell: Cell) -> Exam:
    """A real checkpoint of the nightly matrix, and the questions that `exam_of_deployment` finds.

    Raises Blocked if a checkpoint is not on this machine, or a file of questions cannot be used.
    """
    real = load_real_checkpoints()[cell.family]
    folder, commit = find_checkpoint(real.repository, real.revision, context.settings.models)
    exam = replace(
        exam_of_deployment(context),
        checkpoint=folder,
        longest=real.max_model_len,
        model=f"{real.repository}, {commit}",
    )
    if real.draft is None:
        return exam
    draft, commit = find_checkpoint(real.draft.repository, real.draft.revision, context.settings.models)
    return replace(exam, draft=draft, model=f"{exam.model}; draft {real.draft.repository}, {commit}")


def find_checkpoint(repository: str, revision: str, models: str = "") -> tuple[Path, str]:
    """Return the folder of a checkpoint, a model path for vLLM, and what it holds, in words.

    `models`: the folder of --kv-models; "": the cache of the hub, in which a folder has its commit as its
    name. Nothing is downloaded. Raises Blocked if the checkpoint is not there.
    """
    if models:
        folder, holds = Path(models).absolute() / repository, f"as it is in {models}"
        lacks = f"--kv-models: {folder} is no checkpoint: it has no config.json"
    else:
        from huggingface_hub import snapshot_download

        lacks = (
            f"the checkpoint {repository} is not in the cache of the Hugging Face hub: "
            f"hf download {repository} --revision {revision}"
        )
        try:
            folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
        except (OSError, ValueError):
            raise Blocked(lacks) from None
        holds = f"commit {folder.name}"
    if not (folder / "config.json").is_file():
        raise Blocked(lacks)
    return folder, holds


def exam_of_deployment(context: RunContext) -> Exam:
    """The questions for real checkpoints: gsm8k of the hub, or of the folder that the user named.

    Raises Blocked if a file of the folder cannot be used.
    """
    local = None if context.settings.asks_hub else Path(context.settings.gsm8k).absolute()
    if local is not None:
        try:
            for name in (TEST, TRAIN):
                read_questions(local / name)
        except QuestionsError as error:
            raise Blocked(f"--kv-gsm8k: {error}") from None
    questions = Questions(
        task=str(write_task(context, local)),
        data=f"gsm8k in {local}" if local else "openai/gsm8k of the hub",
        count=load_accuracy_matrices().questions[context.settings.matrix],
        longest_answer=0,  # as lm-eval's gsm8k has it
        varied=True,
    )
    return Exam(Path(), 0, questions, LOOKS)


def write_task(context: RunContext, data: Path | None, shots: int = SHOTS) -> Path:
    """Write the file of lm-eval's task into a new folder of the run. `data`: None for the hub's; `shots`:
    examples in a prompt.

    What `datasets` makes of local files is kept there, too, and removed with the run. Raises OSError.
    """
    import importlib.util

    found = importlib.util.find_spec("lm_eval")
    assert found is not None
    assert found.origin is not None
    gsm8k = Path(found.origin).parent / "tasks" / "gsm8k" / "gsm8k.yaml"
    folder = Path(context.address).parent / f"gsm8k-{context.next_name()}"
    folder.mkdir(exist_ok=True)
    text = YAML.format(gsm8k=json.dumps(str(gsm8k)), task=TASK, shots=shots)
    if data is not None:
        places = {"cache": folder / "datasets", "train": data / TRAIN, "test": data / TEST}
        text += LOCAL.format(**{name: json.dumps(str(place)) for name, place in places.items()})
    (folder / f"{TASK}.yaml").write_text(text)
    return folder
