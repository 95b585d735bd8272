"""Every id of a case, and every prefix of one, is an argument of pytest."""

from __future__ import annotations

import pytest

from pytest_kvconform.plan import make_plan, module_names
from pytest_kvconform.settings import Settings


def ids(run) -> list[str]:
    return [line for line in run.lines if line.startswith("kv::")]


def collect(kv, *arguments, **how):
    return ids(kv("--collect-only", "-q", *arguments, **how))


def test_every_prefix_of_an_id_is_an_argument(kv):
    every = collect(kv)
    assert len(every) == 13
    assert collect(kv, "kv::") == every
    assert set(collect(kv, "kv::engine")) == {name for name in every if name.startswith("kv::engine/")}
    assert set(collect(kv, "kv::engine/bytes")) == {
        name for name in every if name.startswith("kv::engine/bytes")
    }
    assert set(collect(kv, "kv::engine/bytes::arrive")) == {name for name in every if "::arrive[" in name}
    for name in every:
        assert collect(kv, name) == [name]


def test_two_arguments_are_one_selection(kv):
    assert (
        len(
            collect(
                kv, "kv::interface", "kv::interface/answers::hello", "kv::engine/bytes::window[gemma3-P1D1]"
            )
        )
        == 4
    )


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("kv::engin", "kv::engine"),
        ("kv::engine/byte", "kv::engine/bytes"),
        ("kv::engine/bytes::arive", "kv::engine/bytes::arrive"),
        ("kv::engine/bytes::arrive[llama-P1D1-n64]", "kv::engine/bytes::arrive[llama-P1D1-n63]"),
        ("kv::engine/bytes::not_a_case", ""),
    ],
)
@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["one", "n2"])
def test_an_argument_that_names_nothing(kv, argument, hint, workers):
    run = kv(argument, *workers)
    assert run.code == 4
    assert f"ERROR: there is no case, module or tier {argument}" in run.text
    assert f"(did you mean {hint}?)" in run.text or not hint
    assert "Traceback" not in run.text


def test_ids_are_the_same_in_a_subfolder_and_can_be_pasted_there(kv, pytester, monkeypatch):
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\n")
    sub = pytester.mkdir("sub")
    every = collect(kv)
    monkeypatch.chdir(sub)
    assert collect(kv) == every
    assert collect(kv, "../kv::interface") == collect(kv, "kv::interface")


def test_files_that_begin_with_an_underscore_hold_no_cases(kv):
    assert not any("_help" in name for name in collect(kv))


def test_a_file_without_cases_is_a_defect_of_the_suite(kv, pytester, monkeypatch):
    package = pytester.mkpydir("otherkv")
    (package / "cells.py").write_text(
        "from fakekv.cells import Place\ndef expand(matrix, families=(), topologies=()): return "
        "[Place('llama', 'P1D1')]"
    )
    (package / "bench.py").write_text("from fakekv.bench import *")
    (package / "rules").mkdir()
    (package / "suite" / "engine").mkdir(parents=True)
    (package / "suite" / "engine" / "empty.py").write_text("def forgotten(bench, variant): pass")
    run = kv(plain=True)
    assert run.code == 5
    monkeypatch.setenv("_KVCONFORM_TEST_PACKAGE", "otherkv")
    monkeypatch.syspath_prepend(pytester.path)
    run = kv()
    assert run.code == 11
    assert "engine/empty.py: no function has @case" in run.text


@pytest.mark.parametrize(
    "arguments",
    [
        ("-k", "hello"),
        ("-k", "not arrive and not window"),
        ("--deselect", "kv::engine/bytes"),
        ("--deselect=kv::engine",),
        ("-m", "not x"),
    ],
)
def test_pytests_own_selection_works(kv, arguments, pytester):
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\nmarkers = ['x']")
    run = kv(*arguments)
    assert run.code == 0
    assert len(run.outcomes) == (13 if "-m" in arguments else 3)
    assert ("selection: 3 of 13" in run.lines) == ("-m" not in arguments)


def test_last_failed(kv):
    kv(deeds={"arrive(gemma3-P1D2-n63*": "violate"})
    assert collect(kv, "--lf") == ["kv::engine/bytes::arrive[gemma3-P1D2-n63]"]


@pytest.mark.parametrize(("option", "mine"), [("--lf", False), ("--lf", True), ("--sw", False)])
def test_what_failed_is_selected_beside_tests_and_a_plugin_of_the_user(kv, pytester, option, mine):
    """pytest's own plugins get all tests, also where they are asked again because of another plugin."""
    pytester.makeconftest("def pytest_collection_modifyitems(items): pass")
    pytester.makepyfile(f"def test_other(): pass\ndef test_mine(): assert {not mine}")
    kv(option, ".", "kv::", deeds={} if mine else {"window(gemma3-P1D2*": "violate"})
    again = kv(option, ".", "kv::", "--collect-only", "-q")
    assert ids(again) == ([] if mine else ["kv::engine/bytes::window[gemma3-P1D2]"])
    assert sum("::test_" in line for line in again.lines) == mine


def test_a_folder_of_a_tier_is_an_argument():
    """`kv::protocol/peers` selects the cases of all files of the folder."""
    plan = make_plan(Settings(), ["kv::protocol/peers"])
    modules = {planned.module for planned in plan.selected}
    assert modules == {name for name in module_names() if name.startswith("protocol/peers/")}
    assert "protocol/peers/lease" in modules
