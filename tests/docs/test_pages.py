"""Facts of the pages about files, settings, records and exit codes: the code has the same ones."""

from __future__ import annotations

import datetime
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from model_matrix import load_families
from model_matrix.families import Family
from pytest_kvconform import declaration, rules
from pytest_kvconform.kvspace import kinds
from pytest_kvconform.report.document import Report, Selection
from pytest_kvconform.result import CaseResult, Evidence, Finding, Outcome
from pytest_kvconform.rigs import context
from pytest_kvconform.rigs import launch as background
from pytest_kvconform.rigs.cluster import model_bench as engine_bench
from pytest_kvconform.subject import Subject
from pytest_kvconform.verdict import EXIT_CODES, Verdict
from tests.helpers import warm_zygotes
from tests.helpers.fixtures import must_be_installed

from .pages import DOCS, PAGES, ROOT, anchors, blocks, prose, regenerate, terms, words

LINKS = [
    (page, link)
    for page, text in PAGES.items()
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(text))
]


# ---- links and paths -----------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "link"), LINKS, ids=" ".join)
def test_a_link_leads_somewhere(page: str, link: str) -> None:
    path, _, anchor = link.partition("#")
    target = (ROOT / page).parent / path if path else ROOT / page
    assert target.is_file()
    if anchor:
        assert anchor in anchors(target.read_text())


def test_every_page_can_be_reached_from_the_readme() -> None:
    linked = {link.partition("#")[0] for page, link in LINKS if page == "README.md"}
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} <= linked


TOPS = ("pytest_kvconform", "reference_connector", "model_matrix", "tests", "docs", "ci", "vllm")


def paths(text: str) -> Iterator[str]:
    for word in words(text):
        if re.fullmatch(r"[\w./-]+/[\w./-]*", word) and word.split("/")[0] in TOPS:
            yield word


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    spec = importlib.util.find_spec("vllm")
    vllm = (
        Path(spec.submodule_search_locations[0]).parent if spec and spec.submodule_search_locations else None
    )
    for path in paths(PAGES[page]):
        root = vllm if path.startswith("vllm/") else ROOT
        assert root is None or (root / path).exists(), path


def test_every_room_is_in_the_tables() -> None:
    rigs = ROOT / "pytest_kvconform" / "rigs"
    rooms = sorted(page.parent.name for page in rigs.glob("*/__init__.py"))
    modules = sorted(path.stem for path in rigs.glob("*.py") if path.stem != "__init__")
    script = regenerate()
    assert sorted(script.ROOMS) == rooms
    assert sorted(script.JOINING) == modules
    listed = re.findall(r"^\| `(\w+)/` \|", PAGES["CONTRIBUTING.md"], re.MULTILINE)
    assert set(rooms) <= set(listed)


def test_sources_of_rules_name_files_of_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec, "vLLM is not installed here: the extra cpu has it"
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    for rule in rules.load().values():
        files = re.findall(r"[\w/]+\.py", rule.source)
        known = [file for file in files if (root / file).is_file() or list(root.rglob(file))]
        assert known == files, rule.id
        assert files, rule.id


# ---- generated parts -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in regenerate().PARTS if name not in regenerate().RUNS])
def test_a_table_is_up_to_date(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = regenerate()
    found = script.block(PAGES[f"docs/{script.PAGES[name]}"], name)[2]
    if day := re.match(r"\nAs of (\S+):\n", found):  # no page is out of date because a day has passed
        monkeypatch.setattr(declaration, "today", lambda: datetime.date.fromisoformat(day[1]))
    assert found == script.PARTS[name]() + "\n", (
        f"docs/{script.PAGES[name]} is out of date: python docs/regenerate.py {name}"
    )


@pytest.mark.parametrize("name", regenerate().RUNS)
def test_the_output_that_people_read_is_what_a_run_prints(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_installed()
    warm_zygotes.start()  # a run that imports vLLM by itself takes 20 s more
    monkeypatch.setenv("PYTEST_PLUGINS", "warm_zygotes")
    monkeypatch.setenv("PYTHONPATH", str(warm_zygotes.HERE), prepend=os.pathsep)
    script = regenerate()
    page = script.PAGES[name]
    found = script.block(PAGES[f"docs/{page}"], name)[2]
    assert found == script.PARTS[name]() + "\n", (
        f"docs/{page} is out of date: python docs/regenerate.py {name}"
    )


def test_the_picture_of_the_matrix_is_up_to_date() -> None:
    regenerate()  # after it, Python finds the modules beside that script
    picture = importlib.import_module("matrix_picture")
    assert picture.FILE.read_text("utf-8") == picture.picture(), "python docs/matrix_picture.py"
    assert "docs/matrix.svg" in PAGES["README.md"]


def test_the_first_page_shows_parts_of_a_real_failure() -> None:
    [shown] = [block for block in blocks(PAGES["README.md"], "text") if block.startswith("rule ")]
    whole = iter(blocks(PAGES["docs/failures.md"], "text")[0].splitlines())
    assert [line for line in shown.splitlines() if line != "..." and line not in whole] == []


def test_the_parts_of_a_failure_are_all_explained() -> None:
    page = PAGES["docs/failures.md"]
    parts = [term.strip("`") for term in terms(page, "Read a failure")]
    first, *others = [block for block in blocks(page, "text") if block.startswith("...\nrule ")]
    shown = re.findall(r"^([a-z]+) +\S", first, re.MULTILINE)
    assert [part for part in parts if part != "log"] == shown
    assert all(set(re.findall(r"^([a-z]+) +\S", other, re.MULTILINE)) <= set(parts) for other in others)


def test_every_sign_of_a_picture_is_explained() -> None:
    shown = terms(PAGES["docs/failures.md"], "The picture")
    signs = {kind: sign for kind, sign in kinds.LETTERS.items() if kind != kinds.NOT_DUE}
    assert set(shown) == {f"`{sign}` {kinds.NAMES.get(kind, 'correct')}" for kind, sign in signs.items()}


# ---- records -------------------------------------------------------------------------------------


OPERATORS, AUTHORS = PAGES["docs/operators.md"], PAGES["docs/authors.md"]
OF_REPORT, OF_RESULT = terms(OPERATORS, "Keys of the report"), terms(OPERATORS, "Keys of a result")


def named(texts: Iterable[str]) -> list[str]:
    """Everything between single backticks."""
    return [word for text in texts for word in re.findall(r"`([^`]+)`", text)]


def test_every_key_of_the_report_is_described_and_exists() -> None:
    assert named(OF_REPORT) == list(Report.__struct_fields__)
    assert sorted(named(OF_RESULT)) == sorted(CaseResult.__struct_fields__)


@pytest.mark.parametrize(
    ("key", "struct"),
    [
        ("subject", Subject),
        ("selection", Selection),
        ("verdict", Verdict),
        ("finding", Finding),
        ("evidence", Evidence),
    ],
)
def test_keys_inside_of_keys_exist(key: str, struct: type[msgspec.Struct]) -> None:
    meaning = (OF_REPORT | OF_RESULT)[f"`{key}`"]
    assert sorted(named([meaning])) == sorted(struct.__struct_fields__)


def test_outcomes_and_exit_codes() -> None:
    shown = terms(AUTHORS, "Outcomes, verdicts, exit codes")
    codes = {term.split(" (`")[0]: term.split(" (`")[1].rstrip("`)") for term in shown}
    verdicts = {word: int(code) for word, code in codes.items() if code.isdigit() and word in EXIT_CODES}
    assert set(codes) == {outcome.value for outcome in Outcome} | set(EXIT_CODES)
    assert verdicts == EXIT_CODES
    readme = named(terms(PAGES["README.md"], "What a result means"))
    assert {int(code) for code in readme} - {2, 6} == set(EXIT_CODES.values())


def test_the_environment_of_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(background, "_has_gpu", lambda: False)
    for name in ("UCX_TLS", "UCX_NET_DEVICES", "UCX_MODULES", "THP_MEM_ALLOC_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    monkeypatch.setenv("VLLM_MINE", "mine")
    monkeypatch.setenv("PLAINLY_MINE", "mine")
    given = background.environment(tmp_path)
    assert given["VLLM_PLUGINS"] == given["PLAINLY_MINE"] == given["VLLM_MINE"] == "mine"
    ours = {name for name, value in given.items() if value != os.environ.get(name)}
    items = terms(PAGES["docs/environment.md"], "What engines find in their environment")
    variables = named(item for item in items if re.match(r"`[A-Z0-9_]+[=`]", item))
    described = dict(word.split("=", 1) if "=" in word else (word, "") for word in variables)
    of_each_engine = {*context.port_environment(1)}
    assert set(described) - of_each_engine >= ours
    assert set(described) - of_each_engine <= set(given)
    assert {name: value for name, value in described.items() if value and given[name] != value} == {}
    monkeypatch.setenv("UCX_TLS", "rc,self")
    assert background.environment(tmp_path)[
        "UCX_TLS"
    ] == "rc,self" and "UCX_MODULES" not in background.environment(tmp_path)


def test_numbers_that_authors_read() -> None:
    text = re.sub(r"\s+", " ", PAGES["docs/authors.md"])
    assert (
        f"An engine has {context.START_S:.0f} s to start and {context.CALL_S:.0f} s to answer a call" in text
    )
    assert (
        f"a hand-over has {context.REQUEST_S:.0f} s (in the byte tier P and D each); "
        f"blocks must be free {context.RELEASE_S:.0f} s after the last token" in text
    )
    pools = f"pools of {engine_bench.BLOCKS['P']} blocks (P) and {engine_bench.BLOCKS['D']} blocks (D)"
    assert pools in re.sub(r"\s+", " ", PAGES["docs/environment.md"])
    assert f"A prompt may be {engine_bench.PROMPT_BLOCKS} blocks long" in PAGES["docs/families.md"]
    for family in load_families():
        assert f"`{family}`" in text


def test_every_field_of_a_family_is_described() -> None:
    keys = terms(PAGES["docs/families.md"], "Add a family")
    assert [key for key in named(keys) if key in Family.__struct_fields__] == list(Family.__struct_fields__)


# ---- examples in TOML and Python -----------------------------------------------------------------
