"""The connector under test is resolved without an import of its module."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from pytest_kvconform import subject as module
from pytest_kvconform.settings import BadSetting, Settings
from pytest_kvconform.subject import registered_names, resolve

FACTORY = """
import torch_is_not_imported
class KVConnectorFactory: ...
KVConnectorFactory.register_connector("OneConnector", "vllm.one", "OneConnector")
KVConnectorFactory.register_connector("TwoConnector", "vllm.two", "Other")
"""


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A vLLM that registers OneConnector and TwoConnector, and that cannot be imported."""
    path = tmp_path / "vllm" / module._FACTORY
    path.parent.mkdir(parents=True)
    path.write_text(FACTORY)
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('vLLM was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(module, "_plugins_that_may_register", list)


def test_a_class(vllm):
    subject = resolve(
        Settings(
            connector="my_pkg.mod:Mine", handover="none", config='{"kv_port": 3, "kv_connector": "Mine"}'
        )
    )
    assert (subject.spec, subject.connector, subject.module) == ("my_pkg.mod:Mine", "Mine", "my_pkg.mod")
    assert (subject.config, subject.profile, subject.handover) == ({"kv_port": 3}, "p2p", "none")


def test_a_registered_name(vllm):
    assert registered_names() == {"OneConnector": "vllm.one", "TwoConnector": "vllm.two"}
    subject = resolve(Settings(connector="OneConnector"))
    assert (subject.connector, subject.module) == ("OneConnector", None)


def test_a_name_that_is_not_registered(vllm, monkeypatch):
    with pytest.raises(BadSetting) as caught:
        resolve(Settings(connector="OneConector"))
    assert "vLLM registers no connector 'OneConector' (did you mean OneConnector?)" in str(caught.value)
    assert "OneConnector, TwoConnector" in str(caught.value)
    monkeypatch.setattr(module, "_plugins_that_may_register", lambda: ["theirs"])
    assert resolve(Settings(connector="OneConector")).connector == "OneConector"


def test_a_typo_in_the_project_is_not_its_own_mend(vllm, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text('[tool.kvconform]\nconnector = "OneConector"')
    with pytest.raises(BadSetting, match=r"did you mean OneConnector\?"):
        resolve(Settings(connector="OneConector"), tmp_path)


def test_the_connector_of_the_project_is_suggested_before_those_of_vllm(vllm, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.kvconform]\nconnector = "my_connector:MyConnector"')
    with pytest.raises(BadSetting, match=r"did you mean my_connector:MyConnector, as in pyproject.toml\?"):
        resolve(Settings(connector="MyConnector"), tmp_path)
    with pytest.raises(BadSetting, match=r"did you mean TwoConnector\?"):
        resolve(Settings(connector="TwoConector"), tmp_path)


@pytest.mark.parametrize(
    ("spec", "better"),
    [
        ("my_connector.py:MyConnector", "my_connector:MyConnector"),
        ("./my_connector.py:MyConnector", "my_connector:MyConnector"),
        ("my_pkg/mod.py:Mine", "my_pkg.mod:Mine"),
        ("my_pkg/mod:Mine", "my_pkg.mod:Mine"),
    ],
)
def test_a_file_in_the_place_of_a_module(tmp_path, monkeypatch, spec, better):
    (tmp_path / "my_connector.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadSetting, match=rf"names a file and no module \(did you mean {better}\?\)"):
        resolve(Settings(connector=spec))


def test_a_module_may_be_called_py(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve(Settings(connector="my_pkg.py:Mine")).module == "my_pkg.py"


def test_without_vllm_a_name_is_left_to_the_probe(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert registered_names() is None
    assert resolve(Settings(connector="Whatever")).connector == "Whatever"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM's source")
def test_the_installed_vllm_is_readable():
    names = registered_names()
    assert names is not None
    assert {"NixlConnector", "ExampleConnector", "MultiConnector"} <= set(names)


@pytest.mark.parametrize("spec", ["a b:C", "a:", ":C", "a:b:C", "a b/c.py:C", "1a:C", "a..b:C", "a-b"])
def test_a_malformed_spec(spec, vllm):
    with pytest.raises(BadSetting, match="neither NAME nor MODULE:CLASS"):
        resolve(Settings(connector=spec))


def test_config_from_a_file(vllm, tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"kv_connector_extra_config": {"a": 1}, "kv_connector_module_path": "m"}))
    assert resolve(Settings(connector="m:C", config=str(path))).config == {
        "kv_connector_extra_config": {"a": 1}
    }
    path.write_text('{\n  "a": 1,\n}')
    with pytest.raises(BadSetting, match=r"c\.json: line 3 column 1: "):
        resolve(Settings(connector="m:C", config=str(path)))
    path.write_text("3")
    with pytest.raises(BadSetting, match=r"c\.json: expected a JSON object, got int"):
        resolve(Settings(connector="m:C", config=str(path)))
    with pytest.raises(BadSetting, match="cannot be read"):
        resolve(Settings(connector="m:C", config=str(tmp_path)))


def test_a_config_of_another_connector(vllm):
    with pytest.raises(
        BadSetting, match="kv_connector_module_path is 'other', but --kv-connector=m:C makes it 'm'"
    ):
        resolve(Settings(connector="m:C", config='{"kv_connector_module_path": "other"}'))
