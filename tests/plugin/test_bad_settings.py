"""A mistake in a setting is one sentence that names the key, and the word that was probably meant."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import assume, given

from pytest_kvconform import declaration, plan
from pytest_kvconform.pytest_hooks.runner import WorkerInput, ZygoteLink
from pytest_kvconform.report import document
from pytest_kvconform.settings import OPTIONS, BadSetting, Settings, load
from pytest_kvconform.subject import resolve
from tests.helpers.bad_input import EXAMPLES, FEATURES, TEXT, examples, hinted, sentence, typos
from tests.small_suite import runs


def test_there_are_a_thousand_examples():
    assert sum(EXAMPLES.values()) >= 1000


def test_tool_must_be_a_table(tmp_path):
    (tmp_path / "pyproject.toml").write_text("tool = 3")  # pytest itself does not get this far
    assert sentence(load, {}, {}, tmp_path) == "pyproject.toml: tool: expected a table, got 3"


def prepare(command_line: dict[str, Any], environment: dict[str, str], folder: Path) -> Settings:
    """Do all that a run does with settings before its first process starts.

    The run reads, resolves and plans, hands the settings to workers, and puts them into a report.
    """
    found = load({"kv_connector": "m:C"} | command_line, environment, folder)
    subject = resolve(found)
    declaration.check_known(subject.known, plan.make_plan(found, ()).manifest)
    sent = WorkerInput(settings=found, subject=subject, link=ZygoteLink(), services="")
    assert msgspec.json.decode(msgspec.json.encode(sent), type=WorkerInput) == sent
    document.encode(document.make_report(found, subject, None, (), (), (), ()))
    return found


KEYS = [option.key for option in OPTIONS]
VARIABLES = [option.variable for option in OPTIONS if option.variable]


def toml(folder: Path, body: str) -> Path:
    (folder / "pyproject.toml").write_text(f"[tool.kvconform]\n{body}\n", encoding="utf-8")
    return folder


@examples("keys")
@given(name=typos(KEYS))
def test_a_key_that_does_not_exist(name, tmp_path):
    text = sentence(prepare, {}, {}, toml(tmp_path, f"{json.dumps(name)} = 1"))
    assert text.startswith(f"pyproject.toml: tool.kvconform.{name}: there is no such key")
    assert hinted(text, KEYS)


@examples("variables")
@given(name=typos([name.removeprefix("KVCONFORM_").lower() for name in VARIABLES]))
def test_a_variable_that_does_not_exist(name, tmp_path):
    name = f"KVCONFORM_{name.upper()}"
    assume(name != "KVCONFORM_CACHE_DIR")
    text = sentence(prepare, {}, {name: "x"}, tmp_path)
    assert text.startswith(f"environment: there is no variable {name}")
    assert hinted(text, VARIABLES)


LISTED = {
    "matrix": ["quick", "full", "nightly"],
    "device": ["auto", "cpu", "cuda"],
    "profile": ["p2p", "store"],
    "handover": ["handoff", "none"],
}


@examples("values")
@given(data=st.data())
def test_a_malformed_value(data, tmp_path):
    name = data.draw(
        st.sampled_from(
            [*LISTED, *"timeout-scale seed claim tier connector config report features known".split()]
        )
    )
    if name in LISTED:
        value: Any = data.draw(typos(LISTED[name]) | st.integers() | st.booleans())
    elif name in ("tier", "report"):
        value = data.draw(st.integers() | st.booleans() | st.lists(st.integers(), min_size=1))
    elif name == "connector":
        value = data.draw(st.integers() | st.sampled_from(["a b", "a:b:c", "a.b.C", "1", ":C"]))
    elif name in ("features", "known"):
        value = data.draw(st.integers() | TEXT.filter(str.isalnum) | st.booleans())
    elif name == "config":
        value = data.draw(st.integers() | st.booleans() | st.lists(st.integers()))
    else:
        value = data.draw(
            st.integers(max_value=-1) | st.sampled_from(["", "fast", "1e999", "nan", "0x", "last?"])
        )
    written = {"connector": "m:C", name: value}
    # Not \uD800\uDC00 for one character: TOML has no surrogates.
    body = "\n".join(f"{key} = {json.dumps(word, ensure_ascii=False)}" for key, word in written.items())
    text = sentence(prepare, {"kv_connector": None}, {}, toml(tmp_path, body))
    assert f"tool.kvconform.{name}: expected " in text or name == "connector"
    assert hinted(text, LISTED[name]) if name in LISTED and isinstance(value, str) else True


@examples("configs")
@given(data=st.data())
def test_a_malformed_config(data, tmp_path):
    how = data.draw(st.sampled_from(["cut", "other", "extra", "cannot be kept", "deep", "digits"]))
    if how == "cut":
        text = json.dumps(
            {"kv_connector_extra_config": {"a": data.draw(st.text(alphabet="abc", max_size=5))}}
        )
        text = text[: data.draw(st.integers(1, len(text) - 1))]
    elif how == "other":
        text = json.dumps(data.draw(st.lists(st.integers(), max_size=3)))
    elif how == "extra":
        text = json.dumps(
            {"kv_connector_extra_config": data.draw(st.integers() | st.lists(st.integers()) | TEXT)}
        )
    elif how == "cannot be kept":
        text = json.dumps({"a": data.draw(st.sampled_from(["\ud800", "a\udfff"]))})
    elif how == "deep":
        text = "[" * data.draw(st.integers(3000, 90000)) if data.draw(st.booleans()) else '{"a":' * 50000
    else:
        text = f'{{"a": {"9" * data.draw(st.integers(5000, 6000))}}}'
    in_file = data.draw(st.booleans())
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    place = f"--kv-config: {path}" if in_file else "--kv-config"
    assert sentence(prepare, {"kv_config": str(path) if in_file else text}, {}, tmp_path).startswith(
        f"{place}: "
    )


ANYTHING = st.binary(max_size=60) | st.text(alphabet='[]{}=".#\n\\ abf1-', max_size=60).map(str.encode)


@examples("files")
@given(text=ANYTHING, where=st.sampled_from(["declare", "config", "pyproject"]))
def test_a_file_with_random_bytes(text, where, tmp_path):
    """It is refused in one sentence, or it happens to be right."""
    (tmp_path / "pyproject.toml").unlink(missing_ok=True)
    path = tmp_path / ("pyproject.toml" if where == "pyproject" else "file")
    path.write_bytes((b"[tool.kvconform]\n" if where == "pyproject" else b"") + text)
    said = ""
    try:
        prepare({} if where == "pyproject" else {f"kv_{where}": str(path)}, {}, tmp_path)
    except BadSetting as error:
        said = str(error)
    assert not said or path.name in said or "tool.kvconform" in said


@examples("specs")
@given(spec=st.text(max_size=20) | st.text(alphabet="ab.: -/", max_size=10))
def test_a_malformed_connector(spec, tmp_path):
    assume(not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", spec))
    text = sentence(prepare, {"kv_connector": spec}, {}, tmp_path)
    assert text.startswith("--kv-connector")


WORDS = {
    "tier": ["bytes", "engine"],
    "feature": FEATURES,
    "rule": ["KV-BYTES-001"],
    "family": ["llama", "gemma3"],
    "topology": ["P1D1"],
}


@examples("words")
@given(data=st.data())
def test_a_word_that_selects_nothing(data, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(runs.HERE)
    monkeypatch.setenv("_KVCONFORM_TEST_PACKAGE", "fakekv")
    name = data.draw(st.sampled_from(["tier", "feature", "rule", "family"]))
    word = data.draw(
        typos(["engine", "interface"] if name == "tier" else WORDS[name])
        | st.text(alphabet="xyz", min_size=1, max_size=5)
    )
    text = sentence(prepare, {f"kv_{name}": [word]}, {}, tmp_path)
    assert text.startswith(f"--kv-{name}")
    assert repr(word) in text
