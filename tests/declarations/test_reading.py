"""A declaration is read from a file or from pyproject.toml.

A mistake in it is one sentence that names the key.
"""

from __future__ import annotations

import pytest

from pytest_kvconform import declaration
from pytest_kvconform.settings import BadSetting


def read(tmp_path, text: str) -> declaration.Declaration:
    (tmp_path / "d.toml").write_text(text)
    return declaration.read(declaration.read_file(tmp_path / "d.toml", "d.toml"), "d.toml")


def test_a_file(tmp_path):
    said = read(tmp_path, "profile = 'store'\n[features]\nmla = true\nabort = {unsupported = ' not  yet '}")
    assert (said.profile, said.features, said.known) == ("store", {"mla": "", "abort": "not yet"}, ())


def test_how_much_is_loaded(tmp_path):
    declared = read(tmp_path, "load_granularity = 256\nmin_load = 40")
    assert (declared.load_granularity, declared.min_load) == (256, 40)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[feature]\nmla = true", "d.toml: feature: there is no such key (did you mean features?)"),
        (
            "[features]\nmla-and-gqo = true",
            "d.toml: features.mla-and-gqo: there is no such feature (did you mean mla-and-gqa?)",
        ),
        (
            "[features]\nzzz = true",
            "d.toml: features.zzz: there is no such feature; there are full-attention, mla, ",
        ),
        (
            "[features]\nmla = 'yes'",
            "d.toml: features.mla: expected true or { unsupported = \"why\" }, got 'yes'",
        ),
        ("[features]\nmla = false", 'features.mla: expected true or { unsupported = "why" }, got False'),
        ("[features]\nmla = 1", 'features.mla: expected true or { unsupported = "why" }, got 1'),
        ("[features]\nmla = {unsupported = ' '}", "features.mla: expected true or"),
        (
            "[features]\nmla = {unsuported = 'a'}",
            "d.toml: features.mla.unsuported: there is no such key (did you mean unsupported?)",
        ),
        ("features = 3", "d.toml: features: expected a table of features, got 3"),
        (
            "profile = 'stor'",
            "d.toml: profile: expected p2p or store or same-engine, got 'stor' (did you mean store?)",
        ),
        ("handover = ['none']", "d.toml: handover: expected handoff or rendezvous or none, got ['none']"),
        ("load_granularity = 1.5", "d.toml: load_granularity: expected a number of tokens from 0 to"),
        ("min_load = true", "d.toml: min_load: expected a number of tokens from 0 to 2147483647, got True"),
        ("min_load = -1", "d.toml: min_load: expected a number of tokens from 0"),
        ("min-load = 1", "d.toml: min-load: there is no such key (did you mean min_load?)"),
        ("known = 3", "d.toml: known: expected a list of tables ([[known]]), got 3"),
        ("= 3", "d.toml: "),
        ("a = " + "[" * 5000, "d.toml: "),
    ],
)
def test_a_mistake_names_the_key(tmp_path, text, says):
    with pytest.raises(BadSetting) as caught:
        read(tmp_path, text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mistake_in_pyproject_is_one_sentence(kv, pytester):
    pytester.makepyprojecttoml("[tool.kvconform.features]\nslidng-window = true")
    run = kv(undeclared=True)
    assert run.code == 4
    says = (
        "pyproject.toml: tool.kvconform.features.slidng-window: there is no such feature (did you mean "
        "sliding-window?)"
    )
    assert f"ERROR: {says}" in run.text
    assert "Traceback" not in run.text
