"""Servers of the nightly matrix, shown on tiny checkpoints that lie in folders as real ones do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import msgspec
import pytest

from model_matrix import RealCheckpoint, ensure_checkpoint, load_families, load_real_checkpoints
from model_matrix.checkpoints import DRAFT
from pytest_kvconform.case_outcome import CaseEnd, run_case
from pytest_kvconform.plan import make_plan
from pytest_kvconform.result import Blocked, Cell, Outcome
from pytest_kvconform.rigs.bench import Benches
from pytest_kvconform.rigs.processes.gpus import Gpu, lease
from pytest_kvconform.rigs.serving import bench as bench_of_servers
from pytest_kvconform.rigs.serving import chain, data, gate
from pytest_kvconform.rigs.serving.data import exam_of, exam_of_real_checkpoint, find_checkpoint
from pytest_kvconform.rigs.serving.messages import Answer, Answers, ServerSpec
from pytest_kvconform.rigs.serving.metrics import Counters
from pytest_kvconform.rigs.serving.observation import Look, Runs
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import resolve
from tests.helpers.case_runner import CONFIG, CaseRunner

CELL = Cell("llama", "P1D1")
EAGLE = Cell("kimi_k2_5_eagle3", "P1D2")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def nightly(**more: Any) -> Settings:
    return Settings(connector="NixlConnector", config=CONFIG, matrix="nightly", family=("llama",), **more)


def context_of(settings: Settings, tmp_path: Path, device: str = "cuda") -> Any:
    """As much of a RunContext as the making of specs needs."""
    return SimpleNamespace(
        settings=settings,
        subject=resolve(settings),
        facts=SimpleNamespace(device=device, vllm="0.32"),
        address=str(tmp_path / "run" / "socket"),
        next_name=lambda: "name",
    )


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder like a copy of the hub, with tiny checkpoints under the names of real ones."""
    for family, real in load_real_checkpoints().items():
        if family in (CELL.family, EAGLE.family):
            made = ensure_checkpoint(load_families()[family])
            places = {real.repository: made} | ({real.draft.repository: made / DRAFT} if real.draft else {})
            for repository, folder in places.items():
                place = tmp_path / "models" / repository
                place.parent.mkdir(parents=True)
                place.symlink_to(folder)
    (tmp_path / "run").mkdir()
    return tmp_path / "models"


# ---- where a checkpoint is --------------------------------------------------------------------------------


def test_a_checkpoint_lies_in_the_folder_that_is_named(models: Path) -> None:
    repository = load_real_checkpoints()["llama"].repository
    folder, holds = find_checkpoint(repository, "main", str(models))
    assert folder == models / repository and str(models) in holds
    with pytest.raises(Blocked, match=r"^--kv-models: .*/a/b is no checkpoint: it has no config\.json$"):
        find_checkpoint("a/b", "main", str(models))


def test_or_in_the_cache_of_the_hub_and_its_commit_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    stored = tmp_path / "models--a--b"
    snapshot = stored / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(COMMIT)
    says = "the checkpoint a/b is not in the cache of the Hugging Face hub: hf download a/b --revision "
    with pytest.raises(Blocked, match=f"^{says}main$"):
        find_checkpoint("a/b", "main")
    (snapshot / "config.json").write_text("{}")
    assert find_checkpoint("a/b", "main") == (snapshot, f"commit {COMMIT}")
    with pytest.raises(Blocked, match=f"^{says}v2$"):
        find_checkpoint("a/b", "v2")


# ---- what a server is started with ------------------------------------------------------------------------


def spec_of(context: Any, cell: Cell, size: int, **environment: str) -> ServerSpec:
    exam = exam_of_real_checkpoint(context, cell)
    return chain.server_spec(context, cell, "D", size, exam, None, "name", environment)


def test_the_record_reaches_the_server(models: Path, tmp_path: Path) -> None:
    settings = nightly(models=str(models))
    real = load_real_checkpoints()["llama"]
    spec = spec_of(context_of(settings, tmp_path), CELL, 1, CUDA_VISIBLE_DEVICES="3")
    assert (spec.checkpoint, spec.dtype) == (str(models / real.repository), real.dtype)
    assert spec.max_model_len == real.max_model_len
    assert (spec.block_size, spec.num_blocks, spec.engine_arguments) == (None, None, {})
    assert spec.environment["CUDA_VISIBLE_DEVICES"] == "3"


def test_the_record_of_a_draft_reaches_the_server(models: Path, tmp_path: Path) -> None:
    real = load_real_checkpoints()[EAGLE.family]
    assert real.draft is not None
    exam = exam_of_real_checkpoint(context_of(nightly(models=str(models)), tmp_path), EAGLE)
    assert real.repository in exam.model and real.draft.repository in exam.model
    more = spec_of(context_of(nightly(models=str(models)), tmp_path), EAGLE, 2).engine_arguments
    assert more.pop("speculative_config") == {
        "method": "eagle3",
        "model": str(models / real.draft.repository),
        "num_speculative_tokens": real.draft.tokens,
    }
    assert more == real.arguments


ARGUMENTS = """
import json, sys, msgspec
from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports
mend_imports()
from pytest_kvconform.rigs.serving import server_process
from pytest_kvconform.rigs.serving.messages import ServerSpec
server_process.openai_server.run = lambda given, *_: print(json.dumps(given, default=str))
server_process.serve(None, msgspec.json.decode(sys.argv[1], type=ServerSpec))
"""


def test_the_folder_reaches_vllm(models: Path, tmp_path: Path) -> None:
    """What vLLM's EngineArgs is given has the folder, length and dtype of the record, and no blocks."""
    spec = spec_of(context_of(nightly(models=str(models)), tmp_path), CELL, 1)
    given = msgspec.json.encode(msgspec.structs.replace(spec, environment={})).decode()
    # a process of its own: imports are mended before anything else is imported, as in the zygote
    done = subprocess.run(
        [sys.executable, "-c", ARGUMENTS, given], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    arguments = json.loads(done.stdout.splitlines()[-1])
    assert arguments["model"] == str(models / load_real_checkpoints()["llama"].repository)
    assert (arguments["max_model_len"], arguments["dtype"]) == (4096, "bfloat16")
    assert (arguments["block_size"], arguments["num_gpu_blocks_override"]) == (None, None)


# ---- where GPUs are missing -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "gpus", "cell", "profile", "says"),
    [
        ("cpu", 0, CELL, "", "the nightly matrix serves real checkpoints on GPUs, and vLLM 0.32 runs on cpu"),
        ("cuda", 1, CELL, "", "the cell llama-P1D1 needs 2 GPUs, one for each rank, and this machine has 1"),
        (
            "cuda",
            4,
            Cell("llama", "P1D2"),
            "store",
            "needs 5 GPUs, one for each rank, and this machine",
        ),
    ],
)
def test_a_cell_without_its_gpus_is_blocked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    gpus: int,
    cell: Cell,
    profile: str,
    says: str,
) -> None:
    monkeypatch.setattr(chain, "gpus_here", lambda: [Gpu(str(n), f"none-{n}") for n in range(gpus)])
    context = context_of(nightly(profile=profile), tmp_path, device)
    with pytest.raises(Blocked) as raised:
        chain.require_gpus(context, cell)
    assert says in str(raised.value)


def test_gpus_are_asked_for_before_anything_else(case_runner: CaseRunner) -> None:
    """On a machine without GPUs every case says so, whatever else is missing."""
    settings = nightly(topology=("P1D1",), models="/nowhere")
    found = ends(case_runner, settings)
    assert {end.outcome for end in found.values()} <= {Outcome.BLOCKED, Outcome.NOT_APPLICABLE}
    assert "serves real checkpoints on GPUs" in found["every_question_is_answered"].reason


def ends(case_runner: CaseRunner, settings: Settings) -> dict[str, CaseEnd]:
    """How each case of the cell ends."""
    benches = Benches(
        case_runner.zygote.address,
        resolve(settings),
        settings,
        case_runner.probe(replace(settings, matrix="quick")),
        lambda _: None,
    )
    bench = benches.at(CELL)
    try:
        return {
            planned.name.replace(f"[{CELL}]", ""): run_case(
                lambda planned=planned: planned.case.body(bench, planned.variant), planned.name
            )
            for planned in make_plan(settings, ()).selected
        }
    finally:
        benches.close()


# ---- a whole cell -----------------------------------------------------------------------------------------


def test_a_cell_is_served_from_a_folder(
    case_runner: CaseRunner,
    questions: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Servers, GPUs, questions and rules of the nightly matrix, with a canary and with GPUs that are none."""
    questions(16)
    plain = Settings(connector="NixlConnector", config=CONFIG, tier=("accuracy",), family=("llama",))
    ours = Benches(
        case_runner.zygote.address, resolve(plain), plain, case_runner.probe(plain), lambda _: None
    )
    canary = exam_of(ours.context, CELL)
    ours.close()
    real = load_real_checkpoints()["llama"]
    place = tmp_path / real.repository
    place.parent.mkdir()
    place.symlink_to(canary.checkpoint)
    served: list[ServerSpec] = []
    fitting = msgspec.structs.replace(real, dtype="float32", max_model_len=canary.longest + 256)
    gpus = [Gpu("5", f"none-{tmp_path.name}-5"), Gpu("7", f"none-{tmp_path.name}-7")]
    use_record(monkeypatch, fitting)
    monkeypatch.setattr(chain, "require_gpus", lambda *_: None)
    monkeypatch.setattr(chain, "gpus_here", lambda: gpus)
    monkeypatch.setattr(
        chain, "server_spec", lambda *given, of=chain.server_spec: served.append(of(*given)) or served[-1]
    )
    found = ends(
        case_runner,
        nightly(
            topology=("P1D1",),
            models=str(tmp_path),
            gsm8k=str(canary.checkpoint),
            report=str(tmp_path / "report"),
        ),
    )
    assert not [name for name, end in found.items() if end.outcome in (Outcome.FAIL, Outcome.HARNESS)], found
    answered = found["every_question_is_answered"]
    assert answered.outcome is found["each_question_is_loaded"].outcome is Outcome.PASS, found
    assert answered.evidence is not None
    assert str(answered.evidence.notes["answered by"]).startswith(real.repository)
    assert found["answers_equal_those_of_d_alone"].outcome is Outcome.NOT_APPLICABLE
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in served[:2]] == ["5", "7"]
    assert {spec.checkpoint for spec in served} == {str(place)}
    lease(2, gpus, "the test", 0.0).give_back()  # both were given back


def use_record(monkeypatch: pytest.MonkeyPatch, real: RealCheckpoint) -> None:
    """Let the rig read this record for `llama`."""
    for module in (data, chain):
        monkeypatch.setattr(module, "load_real_checkpoints", lambda: {"llama": real})


# ---- how often it is asked --------------------------------------------------------------------------------


def look(subject: dict[int, tuple[str, bool]], count: int) -> Look:
    """One look at so many questions. `subject`: question -> other text, and whether it is right."""

    def answers(of: dict[int, tuple[str, bool]]) -> Answers:
        rows = [(n, *of.get(n, ("same", True))) for n in range(count)]
        return Answers(answers=tuple(Answer(n, text, right, right) for n, text, right in rows))

    none = Counters(external=0, local=0, computed=0)
    alone = answers({})
    return Look(answers(subject), (alone, alone), none, (none, none))


@pytest.mark.parametrize(
    ("odd", "lost", "again"),
    [
        (0, 0, False),
        (2, 2, False),  # two odd questions, which chance gives often
        (4, 4, True),  # four, which it gives seldom
        (12, 12, False),  # which are no chance
    ],
)
def test_questions_are_asked_again_only_in_doubt(odd: int, lost: int, again: bool) -> None:
    questions = {n: ("other", n >= lost) for n in range(odd)}
    runs = Runs((look(questions, 1319),), 16)
    exam = data.Exam(Path(), 0, data.Questions(task="", data="", count=1319, longest_answer=0), gate.LOOKS)
    assert bench_of_servers.wants_more(runs, replace(exam, model="a real one")) is again
