"""`kvconform register`, the entries of `registry/`, and the page that shows them."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from pytest_kvconform import cli, declaration
from pytest_kvconform.claims import registry
from pytest_kvconform.report.document import BadReport
from tests.claims.test_badge import UNTIL, edit
from tests.docs.pages import ROOT, regenerate
from tests.small_suite.runs import TODAY

URL, COMMIT = "https://github.com/owner/name", "0123456789abcdef" * 2 + "01234567"
COMMAND = "pip install pytest-kvconform -e . && kvconform claim --connector=m:C | tail -3"
FILE = "m-C-vllm-0.32-cpu.json"


def register(claim: Path, **more: str) -> int:
    options = {"project": URL, "commit": COMMIT, "reproduce": COMMAND, "output": "registry"} | more
    return cli.main(["register", str(claim), *(f"--{name}={value}" for name, value in options.items())])


def page(folder: Path) -> str:
    script = regenerate()
    return script.registered_results(script._table, folder)


def test_every_entry_of_the_registry_is_one() -> None:
    entries = registry.read(ROOT / "registry")
    files = {path.name for path in (ROOT / "registry").iterdir()}
    assert files == {"README.md", *(entry.file for entry in entries)}


def test_an_entry_is_the_predicate_of_a_claim(claimed, capsys) -> None:
    claim = claimed()
    assert cli.main(["badge", str(claim)]) == 0
    capsys.readouterr()
    assert register(claim) == 0
    assert capsys.readouterr().out == f"registry/{FILE}\n"
    raw = json.loads(Path("registry", FILE).read_bytes())
    assert raw.pop("claim") == json.loads((claim / "predicate.json").read_bytes())
    assert raw == {"project": URL, "commit": COMMIT, "reproduce": COMMAND}
    [entry] = registry.read(Path("registry"))
    assert [run.report.sha256 for run in entry.claim.reports] == [
        run["report.json"]["sha256"] for run in json.loads((claim / "predicate.json").read_bytes())["reports"]
    ]


def test_the_page_shows_each_entry_with_its_command(claimed) -> None:
    assert register(claimed(deeds={"window*": "violate"})) == 0
    lines = page(Path("registry")).splitlines()
    assert lines[1] == f"As of {TODAY}:"
    [row] = [line for line in lines if "m:C" in line]
    assert row.startswith(f"| [`m:C`]({URL}), commit `0123456789ab` | 0.32.0, cpu | core conforms, ")
    assert "resilient **violates**" in row
    assert f"| {TODAY}, suite " in row
    assert row.endswith(f"| until {UNTIL} | `{COMMAND.replace('|', chr(92) + '|')}` |")


def test_what_has_expired_is_marked(claimed, monkeypatch) -> None:
    assert register(claimed()) == 0
    monkeypatch.setattr(declaration, "today", lambda: UNTIL + datetime.timedelta(days=1))
    assert f"| **expired** on {UNTIL} |" in page(Path("registry"))


def test_without_an_entry_the_page_says_so(tmp_path: Path) -> None:
    assert page(tmp_path) == "\nThere is no result yet.\n"


def test_a_later_claim_takes_the_place_of_an_earlier_one(claimed) -> None:
    assert register(claimed()) == register(claimed(), commit="f" * 40) == 0
    [entry] = registry.read(Path("registry"))
    assert entry.commit == "f" * 40


def test_neither_another_project_nor_an_older_claim_takes_its_place(claimed, capsys) -> None:
    claim = claimed()
    assert register(claim) == 0
    file = Path("registry", FILE)
    assert register(claim, project=f"{URL}-2") == 2
    assert f"{file} is a result of {URL}, which {URL}-2 cannot replace" in capsys.readouterr().err
    raw = json.loads(file.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(declaration, "today", lambda: TODAY + datetime.timedelta(days=1))
        for run in raw["claim"]["reports"]:
            run["day"] = str(TODAY + datetime.timedelta(days=1))
        raw["claim"]["expires"] = str(UNTIL + datetime.timedelta(days=1))
        file.write_text(json.dumps(raw))
        assert register(claim) == 2
    assert f"{file} is newer: it holds until {raw['claim']['expires']}" in capsys.readouterr().err
    with pytest.raises(BadReport, match="a day is in the future"):
        registry.read(Path("registry"))


def test_an_entry_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"claim": {"config": ' + '{"a":' * 100_000 + "0" + "}" * 100_002)
    with pytest.raises(BadReport, match="nested too deeply"):
        registry.read(tmp_path)


def test_a_claim_that_does_not_verify_has_no_entry(claimed, capsys) -> None:
    claim = claimed()
    assert cli.main(["badge", str(claim)]) == 0
    predicate = claim / "predicate.json"
    predicate.write_text(predicate.read_text().replace("CONFORMS", "VIOLATES"))
    assert register(claim) == 2
    assert "predicate.json does not follow from the reports" in capsys.readouterr().err
    predicate.unlink()
    edit(claim, 2, lambda raw: raw.update(facts=None))
    assert register(claim) == 2
    assert not Path("registry").exists()


def test_what_the_page_could_not_show_is_refused(claimed, capsys) -> None:
    claim = claimed()
    for name, value in (
        ("project", "http://example.org/x"),
        ("project", "https://x.org/a) <script>"),
        ("commit", "main"),
        ("reproduce", "make\nclaim"),
        ("reproduce", "`make claim`"),
        ("reproduce", ""),
        ("project", "https://github.com/\u043ewner/name"),  # a Cyrillic letter that looks like an o
    ):
        capsys.readouterr()
        assert register(claim, **{name: value}) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"kvconform: the entry: {name} is {value!r}, which does not fit ")
    for invisible in "\u202e\u2066\u2028":
        assert register(claim, reproduce=f"make {invisible}claim") == 2
        assert "has a character that is not printable" in capsys.readouterr().err
    assert not Path("registry").exists()


def change(raw: dict[str, Any], path: str, value: object) -> None:
    *outer, last = path.split("/")
    for key in outer:
        raw = raw[int(key) if key.isdigit() else key]
    raw[last] = value


EDITS = [
    ("claim/levels", {"core": "PERFECT"}, "Invalid enum value 'PERFECT'"),
    ("claim/levels", {"best": "CONFORMS"}, "there is no level 'best'"),
    ("claim/levels", {}, "claim.levels is empty"),
    ("claim/levels", {"core": "CONFORMS"}, "claim.levels do not fit the verdicts of claim.reports"),
    ("claim/expires", "2999-01-01", "claim.expires is not 90 days after the first report"),
    ("claim/reports/0/seed", 7, "a claim has the seeds 1, 2, 3"),
    ("claim/reports/0/verdict", "INCOMPLETE", "Invalid enum value 'INCOMPLETE'"),
    ("claim/reports/1/report.json", {"sha256": "0"}, "sha256 has 64 hexadecimal digits"),
    ("claim/connector", "m`C", "claim.connector is 'm`C'"),
    ("claim/device", "cuda", f"its name must be {FILE.replace('cpu', 'cuda')}"),
    ("stars", 5, "Object contains unknown field `stars`"),
]


def test_an_entry_that_somebody_edited_is_refused(claimed) -> None:
    assert register(claimed(deeds={"window*": "violate"})) == 0
    file = Path("registry", FILE)
    whole = file.read_bytes()
    for path, value, says in EDITS:
        raw = json.loads(whole)
        change(raw, path, value)
        file.write_text(json.dumps(raw))
        with pytest.raises(BadReport) as caught:
            registry.read(Path("registry"))
        assert says in str(caught.value), (path, value)


def test_the_commit_of_an_entry_is_that_of_the_connector_that_ran(claimed, capsys) -> None:
    """The reports tell which commit git or pip knew, and the entry may name no other one."""
    claim = claimed()
    for seed in (1, 2, 3):
        edit(claim, seed, lambda raw: raw["commits"].update(connector="f" * 40))
    assert register(claim) == 2
    assert f"commit is {COMMIT}, but the claim was made with the connector of {'f' * 40}" in (
        capsys.readouterr().err
    )
    assert register(claim, commit="f" * 40) == 0
    [entry] = registry.read(Path("registry"))
    assert entry.claim.commits["connector"] == entry.commit
