"""The declarations that this project has of vLLM's own connectors."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import msgspec
import pytest

from pytest_kvconform import declaration, features, subject
from pytest_kvconform.settings import Settings
from tests.small_suite.runs import declare

HERE = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM's source")


@HERE
def test_every_connector_of_vllm_has_a_declaration_of_ours():
    names = subject.registered_names()
    assert names is not None
    assert set(subject.bundled_declarations()) == set(names)


@pytest.mark.parametrize("name", sorted(subject.bundled_declarations()))
def test_a_declaration_of_ours_is_whole(name):
    known = subject.bundled_declarations()[name]
    known = subject.together(known, known.config, "")  # of MultiConnector, with what it contains
    assert set(declaration.read_features(known.features, name)) == set(features.load())
    text = (Path(subject.__file__).with_name("declarations") / f"{name}.toml").read_text()
    assert text.startswith("# vLLM 0.32, ")
    assert list(known.features) == list(features.load())
    assert (known.handover == "rendezvous") <= (known.profile == "p2p")
    assert msgspec.json.encode(known)


@HERE
@pytest.mark.parametrize("name", sorted(subject.bundled_declarations()))
def test_a_declaration_of_ours_names_files_of_vllm(name):
    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    text = (Path(subject.__file__).with_name("declarations") / f"{name}.toml").read_text()
    source = text.splitlines()[0].removeprefix("# vLLM 0.32, ")
    file = re.split("[:;,]", source)[0]
    assert (folder / file).exists(), file
    module = subject.registered_names()[name].replace(".", "/").removeprefix("vllm/")
    assert module.rpartition("/")[0] in source.replace("nixl/", "nixl") or module in source


def test_what_the_user_says_wins_over_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(subject, "registered_names", lambda: {"NixlConnector": "m"})
    path = declare(tmp_path / "d.toml", {"mla": "mine"})
    path.write_text("[features]\nmla = { unsupported = 'mine' }")
    found = subject.resolve(Settings(connector="NixlConnector", declare=str(path)))
    assert found.features["mla"] == "mine"
    assert found.features["full-attention"] == ""
    assert set(found.features) == set(features.load())


NOT_HERE = ", which is not installed here"
MISSING = {  # connector -> what the reason says after its name; {} is NOT_HERE
    "LMCacheConnectorV1": "needs the package lmcache{} (pip install lmcache)",
    "MooncakeConnector": "needs the package mooncake{} (pip install mooncake-transfer-engine)",
    "FlexKVConnectorV1": "needs the package flexkv{} (install FlexKV by its own instructions)",
    "HF3FSKVConnector": "needs the package hf3fs_fuse{} (the client of 3FS; without it",
    "MoRIIOConnector": "needs the package mori{} (MoRI, which requires ROCm)",
    "DecodeBenchConnector": "cannot be tested by this suite: it fills D's cache with dummy values",
    "ExampleHiddenStatesConnector": "cannot be tested by this suite: it saves the hidden states",
}


@pytest.mark.parametrize("name", MISSING)
def test_a_connector_that_cannot_run_here_is_blocked_in_one_sentence(kv, monkeypatch, name):
    find = importlib.util.find_spec
    missing = ("lmcache", "mooncake", "flexkv", "hf3fs_fuse", "mori")
    monkeypatch.setattr(
        subject.importlib.util,
        "find_spec",
        lambda module, *rest: None if module in missing else find(module, *rest),
    )
    run = kv(f"--kv-connector={name}", plain=True, undeclared=True)
    assert (run.code, run.word) == (10, "INCOMPLETE")
    assert set(run.outcomes.values()) == {"BLOCKED"}
    says = f"{name} {MISSING[name].format(NOT_HERE)}"
    assert any(
        line.startswith(f"INCOMPLETE: 13 of 13 cases could not run here: {says}") for line in run.lines
    ), run.text
    assert run.log == []  # nothing was started


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise ImportError('libibverbs.so.1: no such file')", "ImportError: libibverbs.so.1: no such file"),
        ("import os; os._exit(9)", "the import ends with exit code 9"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named_with_its_error(kv, monkeypatch, tmp_path, code, why):
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "engine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ['PYTHONPATH']}")
    run = kv("--kv-connector=MooncakeConnector", plain=True, undeclared=True)
    assert (run.code, run.word) == (10, "INCOMPLETE")
    says = f"MooncakeConnector needs the package mooncake, which cannot be imported here ({why})"
    assert any(says in line for line in run.lines), run.text
    assert run.log == []


@pytest.mark.parametrize("theirs", ["", "77"])
def test_a_lease_can_be_an_environment_variable(monkeypatch, theirs):
    from pytest_kvconform.rigs.context import lease_environment, transfer_config

    name = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"
    monkeypatch.setenv(name, theirs)
    found = subject.resolve(Settings(connector="MooncakeConnector"))
    assert found.lease == f"${name}"
    assert lease_environment(found, 3.2) == ({} if theirs else {name: "4"})
    assert lease_environment(found, 0) == {}
    extra = transfer_config(found, "P", "cpu", lease_s=3.2)["kv_connector_extra_config"]
    assert not any("ABORT" in key for key in extra)


@pytest.mark.parametrize(
    ("name", "variable", "config", "started"),
    [
        ("MooncakeStoreConnector", "", "{}", ["mooncake_master", "mooncake_client"]),
        ("MooncakeStoreConnector", "MOONCAKE_CONFIG_PATH", "{}", []),
        ("LMCacheMPConnector", "", "{}", ["lmcache"]),
        ("LMCacheMPConnector", "", '{"kv_connector_extra_config": {"lmcache.mp.port": 5655}}', []),
        ("NixlConnector", "", "{}", []),
    ],
)
def test_the_servers_that_a_connector_needs_are_started_unless_the_user_has_some(
    monkeypatch, name, variable, config, started
):
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    if variable:
        monkeypatch.setenv(variable, "mine.json")
    found = subject.resolve(Settings(connector=name, config=config))
    assert [service.name for service in found.services] == started


@pytest.mark.parametrize(
    ("name", "theirs", "started"),
    [
        ("LMCacheMPConnector", {"more": {"command": ["more", "{port}"]}}, ["lmcache", "more"]),
        ("LMCacheMPConnector", {"lmcache": {"command": ["mine", "{port}"]}}, ["lmcache"]),
        (
            "MooncakeStoreConnector",
            {
                "mine": {
                    "command": ["mine", "{port}"],
                    "engine_environment": {"MOONCAKE_CONFIG_PATH": "mine.json"},
                }
            },
            ["mine"],
        ),
    ],
)
def test_servers_that_the_user_declares_are_started_too(monkeypatch, name, theirs, started):
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    found = subject.resolve(Settings(connector=name, services=json.dumps(theirs)))
    assert [service.name for service in found.services] == started
    commands = {service.name: service.command[0] for service in found.services}
    assert all(commands[one] == table["command"][0] for one, table in theirs.items())
