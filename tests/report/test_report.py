"""report.json is canonical, can be read back, and its verdict recomputed; and the commands that read it."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from pytest_kvconform import cli
from pytest_kvconform.report import consistency, document
from pytest_kvconform.result import CaseResult, Outcome
from pytest_kvconform.verdict import EXIT_CODES

from .test_verdict import result

DEEDS = {"arrive(gemma3*": "violate", "hello(llama*": "blocked"}


def edit(path, change):
    report = json.loads(path.read_text())
    change(report)
    path.write_text(json.dumps(report))


def timeless(text: str) -> str:
    """A report without its durations, and without its digest, which follows from them."""
    return re.sub(r'"seconds": [0-9.e-]+|"digest": "[0-9a-f]{64}"', "", text)


def test_two_runs_differ_only_in_seconds(kv):
    first = kv(deeds=DEEDS).path.read_text()
    second = kv("-p", "no:cacheprovider", deeds=DEEDS).path.read_text()

    assert timeless(first) == timeless(second)
    keys = list(json.loads(first))
    assert keys == sorted(keys)
    ids = [result["id"] for result in json.loads(first)["results"]]
    assert ids == sorted(ids)


def test_what_is_written_is_read_back_and_written_the_same(kv):
    path = kv(deeds=DEEDS).path
    report = document.read(path)
    assert document.encode(report) == path.read_bytes()
    assert document.recompute_verdict(report) == report.verdict
    assert document.read(path.parent) == report
    assert report.facts == {
        "name": "C",
        "version": "1.2.3",
        "vllm": "0.32.0",
        "layout": "HND",
        "device": "cpu",
    }
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]


def test_every_outcome_is_written_and_read_back():
    for outcome in Outcome:
        one = msgspec.json.decode(msgspec.json.encode(result(outcome)), type=CaseResult)
        assert one.outcome is outcome


@pytest.mark.parametrize("deeds", [{}, {"*n16*": "violate"}, {"*n63*": "blocked"}, {"*n63*": "assert"}])
def test_a_report_of_any_verdict_is_read_back(kv, deeds):
    path = kv(deeds=deeds).path
    report = document.read(path)
    assert report.verdict.word in EXIT_CODES
    assert document.encode(report) == path.read_bytes()
    assert consistency.inconsistencies(report) == []


def test_neither_a_hash_seed_nor_an_order_changes_a_byte(kv, monkeypatch):
    texts = []
    for seed in ("0", "1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        run = kv(
            *(["-p", "shuffles"] if seed == "2" else []),
            deeds=DEEDS,
            apart=True,
        )
        texts.append(timeless(run.path.read_text()))
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    ("deeds", "bench"),
    [
        ({}, ""),
        (DEEDS, ""),
        ({"*": "blocked"}, ""),
        ({}, "leftover"),
        ({"window*": "assert"}, ""),
        ({}, "no vllm"),
    ],
)
def test_verify_agrees_with_the_run(kv, capsys, deeds, bench):
    run = kv(deeds=deeds, bench=bench)
    capsys.readouterr()
    assert cli.main(["verify", str(run.path)]) == 0
    assert capsys.readouterr().out.startswith(f"{run.word}: the verdict follows")


@pytest.mark.parametrize(
    "change",
    [
        lambda report: report["verdict"].update(word="CONFORMS", exit_code=0),
        lambda report: report["verdict"].update(exit_code=0),
        lambda report: report["verdict"].update(causes=[]),
        lambda report: report["results"].pop(),
        lambda report: next(one for one in report["results"] if one["outcome"] == "BLOCKED").update(
            outcome="PASS"
        ),
        lambda report: report["selection"]["selected"].append("kv::engine/bytes::zzz[llama-P1D1]"),
        lambda report: report["troubles"].append("a process is left"),
    ],
)
def test_verify_sees_a_report_that_was_changed(kv, capsys, change):
    path = kv(deeds={"window*": "blocked"}).path
    edit(path, change)
    assert cli.main(["verify", str(path)]) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda report: report["verdict"].update(word="CONFORMS", exit_code=0),
        lambda report: [
            one.update(outcome="NOT-APPLICABLE") for one in report["results"] if one["outcome"] == "FAIL"
        ],
        lambda report: [
            one.update(outcome="KNOWN", case_outcome="FAIL")
            for one in report["results"]
            if one["outcome"] == "FAIL"
        ],
        lambda report: report.update(results=[one for one in report["results"] if one["outcome"] == "PASS"]),
        lambda report: report["selection"].update(
            manifest=(ids := [one["id"] for one in report["results"] if one["outcome"] == "PASS"]),
            selected=ids,
        ),
        lambda report: report["subject"]["features"].pop("mla"),
    ],
)
def test_verify_sees_that_violations_were_removed(kv, capsys, change):
    path = kv(deeds={"window*": "violate"}).path
    edit(path, change)
    assert cli.main(["verify", str(path)]) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda report: report.update(schema="kvconform/v2"), "$.schema"),
        (lambda report: report.update(extra=1), "extra"),
        (lambda report: report["results"][0].update(outcome="FINE"), "$.results[0].outcome"),
        (lambda report: report.pop("verdict"), "verdict"),
    ],
)
def test_a_file_that_is_no_report(kv, capsys, change, says):
    path = kv().path
    edit(path, change)
    capsys.readouterr()
    assert cli.main(["verify", str(path)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert cli.main(["verify", "no-such-file"]) == 2


def test_diff(kv, capsys, tmp_path):
    before = kv().path.read_bytes()
    (tmp_path / "a.json").write_bytes(before)
    run = kv(deeds={"window(gemma3-P1D2*": "violate"})
    capsys.readouterr()
    assert cli.main(["diff", str(tmp_path / "a.json"), str(run.path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "kv::engine/bytes::window[gemma3-P1D2]  PASS -> FAIL",
        "1 of 13 cases changed; verdict CONFORMS -> VIOLATES",
    ]
    assert cli.main(["diff", str(run.path), str(run.path)]) == 0
    assert cli.main(["diff", "nowhere", str(run.path)]) == 2


@pytest.fixture
def fake(kv):
    """The small suite, for commands that run nothing."""


def test_list_and_explain(fake, capsys):
    assert cli.main(["list", "cases"]) == 0
    assert (
        capsys.readouterr().out.splitlines()[0] == "kv::interface/answers::hello[llama-P1D1]   KV-ANSWER-001"
    )
    assert cli.main(["list", "families", "--matrix=full"]) == 0
    assert capsys.readouterr().out == "llama   P1D1 P1D2\ngemma3  P1D1 P1D2\n"
    assert cli.main(["list", "rules"]) == 0
    assert "KV-ANSWER-001  SHOULD  core       A connector answers." in capsys.readouterr().out
    assert cli.main(["list", "features"]) == 0
    assert capsys.readouterr().out.startswith(
        "full-attention            core           layers that attend to every token"
    )
    assert cli.main(["list", "settings"]) == 0
    assert "--kv-timeout-scale  KVCONFORM_TIMEOUT_SCALE  timeout-scale" in capsys.readouterr().out
    assert cli.main(["explain", "kv-bytes-001"]) == 0
    out = capsys.readouterr().out
    for words in (
        "Every byte arrives.",
        "MUST, since vLLM 0.9, level core",
        "caller   core.py: step",
        "breaks   Answers wrongly.",
        "- is the partial tail in the block list?",
        "kv::engine/bytes::arrive",
    ):
        assert words in out
    assert cli.main(["explain", "KV-BYTE-001"]) == 2
    assert "did you mean KV-BYTES-00" in capsys.readouterr().err
    for case in ("kv::engine/bytes::arrive[llama-P1D1-n63]", "kv::engine/bytes::arrive"):
        assert cli.main(["explain", case]) == 0
        assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("prefix-hit", "prefix-hit is a feature, and no rule; see: kvconform list features"),
        ("core", "core is a level, and no rule; see: kvconform list levels"),
        ("kv::engine/bytes", "kv::engine/bytes has cases of 2 rules: KV-BYTES-001, KV-BYTES-002"),
        ("kv::engine/bytes::arive", "there is no case, module or tier kv::engine/bytes::arive (did you mean"),
    ],
)
def test_what_is_no_rule_is_named(fake, capsys, word, says):
    assert cli.main(["explain", word]) == 2
    assert capsys.readouterr().err.startswith(f"kvconform: {says}")


@pytest.mark.parametrize(
    ("command", "argument"), [("badge", "CLAIM"), ("html", "REPORT"), ("diff", "A"), ("verify", "REPORT")]
)
def test_arguments_have_a_description(capsys, command, argument):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    [row] = [one for one in capsys.readouterr().out.splitlines() if one.split()[:1] == [argument]]
    assert len(row.split()) > 2


def test_doctor_says_what_is_missing():
    from pytest_kvconform.doctor import Import, advice

    good, bad = Import(True, "runs on cpu"), Import(False, "cannot be imported: x")
    versions: dict[str, str | None] = {"vllm": "0.32.0", "torch": "2", "nixl": "1"}
    nothing = {"torch": bad, "vllm": bad, "nixl": bad}
    assert "pip install 'pytest-kvconform[cpu]'" in advice({**versions, "vllm": None}, nothing, [])[0]
    assert "pip install 'pytest-kvconform[cuda]'" in advice({**versions, "vllm": None}, nothing, ["H200"])[0]
    assert "cannot be imported" in advice(versions, nothing, [])[0]
    assert advice(versions, {"torch": good, "vllm": good, "nixl": good}, [])[0].startswith(
        "can run  every connector that works on cpu"
    )
    ours = advice(versions, {"torch": good, "vllm": good, "nixl": good}, [], "mine:Mine")[0]
    assert ours.endswith("try: pytest --kv-connector=mine:Mine --kv-family=llama")
    assert any(
        "pip install nixl" in line
        for line in advice(versions, {"torch": good, "vllm": good, "nixl": bad}, [])
    )
    assert any(
        "uses the GPU" in line
        for line in advice(versions, {"torch": good, "vllm": good, "nixl": good}, ["H200"])
    )


@pytest.mark.parametrize(
    ("version", "lacks", "why"),
    [
        ("0.33.0", "without kernels", "is built without kernels"),
        ("0.34.0rc1.dev4+g017e9f444.empty", "without kernels", "is built without kernels"),
        (
            "0.33.0",
            "with kernels for other devices",
            "has no kernels that load here: it is built for a GPU, or another CPU",
        ),
    ],
)
def test_doctor_says_what_a_vllm_without_kernels_can_run(version, lacks, why):
    from pytest_kvconform.doctor import Import, advice

    here, nixl = Import(True, f"runs on cpu {lacks}"), Import(True, "usable")
    first, second, *rest = advice({"vllm": version}, {"vllm": here, "nixl": nixl}, [])
    assert first == (
        "can run  the tiers interface,protocol,bytes; try: "
        "pytest --kv-connector=NixlConnector --kv-tier=interface,protocol,bytes"
    )
    assert second == (
        f"blocked  the tiers engine,accuracy: vLLM {version} {why}; "
        "pip install 'pytest-kvconform[cpu]' in another environment"
    )
    assert any("comes from main: the rules of the newest minor hold for it" in line for line in rest) == (
        ".dev" in version
    )
    assert not any("accuracy tier" in line for line in rest)


def test_doctor_says_that_a_minor_is_not_supported(monkeypatch, capsys):
    from pytest_kvconform import doctor

    fine = doctor.Import(True, "runs on cpu")
    monkeypatch.setattr(doctor, "try_imports", lambda: dict.fromkeys(("torch", "vllm", "nixl"), fine))
    monkeypatch.setattr(doctor, "version", lambda *names: "0.30.1" if "vllm" in names else "1")
    assert doctor.main() == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "can run  nothing: vLLM 0.30.1 is installed, and this suite holds the contracts of 0.31.x, 0.32.x, "
        "0.33.x: install one of them"
    )


def test_doctor_survives_imports_that_fail(monkeypatch, capsys):
    from pytest_kvconform import doctor

    monkeypatch.setattr(doctor, "_IMPORT_SECONDS", 1.0)
    codes = {
        "torch": "import os; os._exit(3)",
        "vllm": "raise ImportError('no kernels')",
        "nixl": "import time; time.sleep(60)",
    }
    monkeypatch.setattr(doctor, "_IMPORTS", codes)
    found = doctor.try_imports()
    assert not any(one.works for one in found.values())
    assert "exit status 3" in found["torch"].message
    assert "no kernels" in found["vllm"].message
    assert "not done after" in found["nixl"].message
    assert doctor.main() == 1
    said = capsys.readouterr()
    assert said.out.startswith("python ")
    assert said.err == "importing torch, vLLM and NIXL, which takes up to half a minute\n"


@pytest.mark.parametrize(
    ("table", "named"), [('connector = "mine:Mine"', "mine:Mine"), ("connector = [", ""), ("", "")]
)
def test_doctor_names_the_connector_of_the_folder(tmp_path, monkeypatch, table, named):
    from pytest_kvconform import doctor

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVCONFORM_CONNECTOR", raising=False)
    (tmp_path / "pyproject.toml").write_text(f"[tool.kvconform]\n{table}")
    assert doctor._configured() == named
