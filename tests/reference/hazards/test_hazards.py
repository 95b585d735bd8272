"""Each hazard of hazards.toml: with its mend undone, what the table names reports it."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import reference_connector
from pytest_kvconform import rules
from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports
from reference_connector import boxes, messages
from tests.helpers.fixtures import ROOT
from tests.reference import doubles, test_leases
from tests.reference.hazards import undone_mends
from tests.reference.trust import test_handshake, test_peers

HAZARDS = tomllib.loads((ROOT / "tests/reference/hazards/hazards.toml").read_text(encoding="utf-8"))["hazard"]
# A wrong part -> where it takes the place of the right one, and arguments of the test that are no fixtures.
UNDONE: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "LedgerGoesBack": (test_leases, "GivenLeases", {}),
    "number_without_chance": (test_leases, "new_number", {}),
    "RemembersEveryPeer": (test_peers, "Peers", {}),
    "AsksTheDead": (doubles, "Scheduler", {}),
    "EndsWithTheFirst": (doubles, "Scheduler", {}),
    "BelievesTheClient": (doubles, "Scheduler", {}),
    "ignore_the_buffer": (reference_connector, "ReferenceConnector", {}),
    "TellsWhoIsThere": (test_handshake, "Listener", {"incarnation": "second life", "engine": "p"}),
    "decode_all": (messages, "decode", {}),
    "is_no_page": (
        boxes,
        "_is_page",
        {"backend": "FLASHINFER", "of_p": {}, "of_d": {"rank": 0, "size": 2}, "why": "tile of layer l"},
    ),
}
peers, listener = test_peers.peers, test_handshake.listener  # fixtures


def named(place: str) -> tuple[Path, str]:
    """ "path:name" of hazards.toml; the path exists, and defines the name."""
    path, _, name = place.partition(":")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    defined |= {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert name in defined, place
    return ROOT / path, name


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard["wrong"].partition(":")[2])
def test_what_the_table_names_exists(hazard: dict[str, str]) -> None:
    named(hazard["wrong"])
    if (test := hazard.get("test")) is None:
        named(hazard["found"])
        return
    assert hazard["found"] in rules.load()
    path, _ = named(test)
    said = re.sub(r"\"\s*\n\s*[rf]*\"", "", path.read_text(encoding="utf-8"))  # strings in one piece
    assert hazard["says"] in said.replace("\\", ""), hazard["says"]


def test_every_undone_mend_is_in_the_table() -> None:
    tree = ast.parse(Path(undone_mends.__file__).read_text(encoding="utf-8"))
    made = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert made == set(UNDONE) == {h["wrong"].partition(":")[2] for h in HAZARDS if "test" not in h}


@pytest.mark.parametrize("name", UNDONE)
def test_a_mend_that_is_undone_is_noticed(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    mend_imports()
    [hazard] = [hazard for hazard in HAZARDS if hazard["wrong"].endswith(f":{name}")]
    path, test_name = named(hazard["found"])
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    test = getattr(importlib.import_module(module), test_name)
    where, what, arguments = UNDONE[name]
    monkeypatch.setattr(where, what, getattr(undone_mends, name))
    fixtures = {
        fixture: request.getfixturevalue(fixture)
        for fixture in inspect.signature(test).parameters
        if fixture not in arguments
    }
    with pytest.raises((AssertionError, pytest.fail.Exception), match=re.escape(hazard["says"])):
        test(**fixtures, **arguments)
