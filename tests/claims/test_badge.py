"""Badges of a claim: what they say, which folder has none, and what `kvconform verify` finds."""

from __future__ import annotations

import datetime
import hashlib
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_kvconform import cli, declaration
from pytest_kvconform.claims import DAYS
from pytest_kvconform.report import document
from tests.report.test_verify import seal
from tests.small_suite.runs import TODAY

UNTIL = TODAY + datetime.timedelta(days=DAYS)
CORE, RESILIENT = "badge-core-vllm-0.32-cpu", "badge-resilient-vllm-0.32-cpu"


def edit(claim: Path, seed: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a report, with its digest."""
    path = claim / f"seed-{seed}" / "report.json"
    raw = json.loads(path.read_bytes())
    change(raw)
    seal(path, raw)


def badges(claim: Path) -> dict[str, dict[str, Any]]:
    """Level -> what shields.io reads."""
    return {path.name.split("-")[1]: json.loads(path.read_bytes()) for path in claim.glob("badge-*.json")}


def said(command: str, claim: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.main([command, str(claim)])
    found = capsys.readouterr()
    return code, found.out + found.err


def test_a_badge_for_each_level_that_ran(claimed, capsys):
    claim = claimed()
    code, out = said("badge", claim, capsys)
    assert code == 0, out
    assert sorted(out.split()) == sorted(str(path) for path in claim.glob("*.*"))
    assert set(badges(claim)) == {"core", "hybrid", "heterogeneous", "resilient"}
    assert badges(claim)["core"] == {
        "schemaVersion": 1,
        "label": "KV core",
        "message": f"conforms · vLLM 0.32 cpu · until {UNTIL}",
        "color": "brightgreen",
    }
    code, out = said("verify", claim, capsys)
    assert code == 0, out
    assert out.startswith(
        "core CONFORMS, hybrid CONFORMS, heterogeneous CONFORMS, resilient CONFORMS: the 9 "
    )


def test_the_drawing_is_xml_that_loads_nothing_and_has_the_words(claimed):
    claim = claimed()
    assert cli.main(["badge", str(claim)]) == 0
    root = ET.fromstring((claim / f"{CORE}.svg").read_text())
    tags = {element.tag.partition("}")[2] for element in root.iter()}
    assert tags == {"svg", "title", "rect", "path", "g", "text"}
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert words == ["KV core", f"conforms · vLLM 0.32 cpu · until {UNTIL}"]
    assert root.attrib["aria-label"] == f"m:C: {words[0]} {words[1]}"


def test_a_level_that_violates_in_one_run_is_red_and_the_others_stay_green(claimed, kv, capsys):
    claim = claimed()
    kv("--kv-claim", "--kv-seed=2", "--kv-report=claim/seed-2", deeds={"window*": "violate"})
    assert said("badge", claim, capsys)[0] == 0
    colours = {level: one["color"] for level, one in badges(claim).items()}
    assert colours.pop("resilient") == "red"
    assert set(colours.values()) == {"brightgreen"}


def test_a_level_that_a_run_shows_nothing_about_has_no_badge(claimed, capsys):
    """Where another level violates, the run has a verdict, though cases of this level could not run."""
    claim = claimed(deeds={"window*": "violate", "hello(llama*": "blocked"})
    assert said("badge", claim, capsys)[0] == 0
    assert "resilient" in badges(claim)
    words = {one.name: one.word for one in document.read(claim / "seed-1").verdict.levels}
    assert {level for level, word in words.items() if word == "INCOMPLETE"} == {"core"}
    assert "core" not in badges(claim)


def test_the_predicate_is_the_claim_in_short(claimed):
    claim = claimed(unsupported={"tp-heterogeneous": "one size only"}, deeds={"*P1D2*": "refuse"})
    assert cli.main(["badge", str(claim)]) == 0
    found = json.loads((claim / "predicate.json").read_bytes())
    assert found["levels"]["heterogeneous"] == "NOT-APPLICABLE"
    assert found["unsupported"] == {"tp-heterogeneous": "one size only"}
    assert (found["connector"], found["vllm"], found["device"]) == ("m:C", "0.32.0", "cpu")
    assert found["expires"] == str(UNTIL)
    assert [one["seed"] for one in found["reports"]] == [1, 2, 3]
    for one in found["reports"]:
        content = (claim / f"seed-{one['seed']}" / "report.json").read_bytes()
        assert one["report.json"]["sha256"] == hashlib.sha256(content).hexdigest()


# ---- what has no badge -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"claim": "--kv-html"}, "the run was no claim: start it with kvconform claim"),
        ({"arguments": ("--kv-family=llama",)}, "setting family is ['llama'], and a claim has the default"),
        ({"arguments": ("--kv-shard=1/2",)}, "setting shard is '1/2', and a claim has the default"),
        ({"arguments": ("-k", "hello")}, "10 of 13 cases did not run"),
        ({"arguments": ("-x",), "deeds": {"window*": "violate"}}, "of 13 cases did not run"),
        (
            {"deeds": {"hello(llama*": "blocked"}},
            "the verdict is INCOMPLETE: 1 of 13 cases could not run here",
        ),
        ({"bench": "leftover"}, "the verdict is HARNESS: the suite did not end cleanly"),
        ({"bench": "no vllm"}, "the verdict is INCOMPLETE"),
    ],
)
def test_what_has_no_badge(claimed, capsys, how, says):
    claim = claimed(*how.pop("arguments", ()), **how)
    code, out = said("badge", claim, capsys)
    assert code == 2
    assert len(out.splitlines()) == 1
    assert out.startswith(f"kvconform: {claim}/seed-1: ")
    assert says in "\n".join([out, said("verify", claim, capsys)[1]])
    assert list(claim.glob("*.*")) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw["settings"]["timeout-scale"].update(value=9.0), "timeout-scale is 9.0"),
        (lambda raw: raw["settings"]["seed"].update(value=2), "its seed is 2, not 1"),
        (lambda raw: raw["facts"].update(stand_in="a copy engine"), "stood in for a GPU: a copy engine"),
        (lambda raw: raw["facts"].update(device="../../x"), "names no vLLM or no device"),
        (lambda raw: raw.update(facts=None), "names no vLLM or no device"),
        (lambda raw: raw.pop("day"), "the report has no day or no digest"),
        (lambda raw: raw.update(day="2999-01-01"), f"the report is of 2999-01-01, but today is {TODAY}"),
        (lambda raw: raw["subject"].update(config={"a": 1}), "are not of one claim: subject.config is"),
        (lambda raw: raw["verdict"].update(word="VIOLATES"), "the verdict of the report is VIOLATES"),
        (lambda raw: raw["selection"]["manifest"].pop(), "1 cases of the suite are not in the manifest"),
    ],
)
def test_a_report_that_was_edited_with_its_digest(claimed, capsys, change, says):
    claim = claimed()
    edit(claim, 1, change)
    code, out = said("badge", claim, capsys)
    assert (code, len(out.splitlines())) == (2, 1)
    assert says in out


def test_cases_that_are_left_out_need_a_reason_of_the_suite(claimed, capsys):
    """Who moves a case that fails from the results to the limits has a report that agrees with itself."""
    claim = claimed()
    path = claim / "seed-1" / "report.json"
    raw = json.loads(path.read_bytes())
    name = "kv::engine/bytes::window[gemma3-P1D1]"
    for key in ("manifest", "selected"):
        raw["selection"][key].remove(name)
    for out in ({"limits": [{"limit": "a kernel", "ids": [name]}]}, {"not_installed": [name]}):
        changed = raw | {"selection": raw["selection"] | out}
        changed["results"] = [result for result in raw["results"] if result["id"] != name]
        seal(path, changed)
        report = document.read(path)
        path.write_bytes(
            document.encode(msgspec.structs.replace(report, verdict=document.recompute_verdict(report)))
        )
        code, text = said("verify", claim / "seed-1", capsys)
        assert code == 1
        assert text.startswith(f"{name} is left out, but ")


def test_a_seed_that_is_missing(claimed, capsys):
    claim = claimed()
    (claim / "seed-2" / "report.json").unlink()
    assert said("badge", claim, capsys) == (
        2,
        f"kvconform: {claim}/seed-2/report.json: No such file or directory\n",
    )


def test_one_report_is_no_claim(kv, capsys):
    folder = kv("--kv-claim").path.parent
    sentence = f"kvconform: {folder} is no claim: it has no folder seed-1; make one with kvconform claim\n"
    assert said("badge", folder, capsys) == (2, sentence)


# ---- verify ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f"{RESILIENT}.json", f"{RESILIENT}.svg", "predicate.json"])
def test_a_file_that_was_edited(claimed, capsys, name):
    claim = claimed(deeds={"window*": "violate"})
    assert cli.main(["badge", str(claim)]) == 0
    path = claim / name
    path.write_text(path.read_text().replace("violates", "conforms").replace("VIOLATES", "CONFORMS"))
    assert said("verify", claim, capsys) == (
        1,
        f"{path} does not follow from the reports: write it again with kvconform badge\n",
    )


def test_a_badge_of_another_claim(claimed, capsys):
    claim = claimed()
    assert cli.main(["badge", str(claim)]) == 0
    other = claim / "badge-core-vllm-0.31-cuda.json"
    (claim / f"{CORE}.json").rename(other)
    assert said("verify", claim, capsys)[1].startswith(f"{other} does not follow from the reports")
    assert said("badge", claim, capsys)[0] == 0
    assert not other.exists()
    assert said("verify", claim, capsys)[0] == 0


def test_a_claim_holds_until_its_last_day(claimed, capsys, monkeypatch):
    claim = claimed()
    assert cli.main(["badge", str(claim)]) == 0
    monkeypatch.setattr(declaration, "today", lambda: UNTIL)
    assert said("verify", claim, capsys)[0] == 0
    monkeypatch.setattr(declaration, "today", lambda: UNTIL + datetime.timedelta(days=1))
    expired = f"the claim expired on {UNTIL}: run kvconform claim again\n"
    assert said("verify", claim, capsys) == (1, expired)
    assert said("badge", claim, capsys) == (2, f"kvconform: {expired}")
