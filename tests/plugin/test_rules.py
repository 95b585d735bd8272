"""The rules: read strictly, each with a case, each case with a rule."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from pytest_kvconform import plan, rules

BREAKS = 'level = "core"\ncaller = "core.py: step"\nbreaks = "B."\n'
GOOD = f'sentence = "S."\nstrength = "MUST"\nsince = "0.9"\nsource = "base.py"\ndone = "D."\n{BREAKS}'


def load(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return rules.load(folder)


def test_rules_come_sorted_from_all_files(tmp_path):
    loaded = load(tmp_path, a=f"[KV-B-001]\n{GOOD}", b=f'[KV-A-001]\n{GOOD}check = ["c"]')
    assert list(loaded) == ["KV-A-001", "KV-B-001"]
    assert loaded["KV-A-001"].check == ("c",)
    assert loaded["KV-A-001"].id == "KV-A-001"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            {"a": f"[KV-A-001]\n{GOOD}", "b": f"[KV-A-001]\n{GOOD}"},
            "b.toml: KV-A-001: another file has a rule of this id",
        ),
        ({"a": f"[KV-A-001]\n{GOOD}sourc = 1"}, "a.toml: KV-A-001: Object contains unknown field `sourc`"),
        (
            {"a": f"[KV-A-001]\n{GOOD}".replace("MUST", "MAY")},
            "a.toml: KV-A-001: Invalid enum value 'MAY' - at `$.strength`",
        ),
        ({"a": '[KV-A-001]\nsentence = "S."'}, "a.toml: KV-A-001: Object missing required field"),
        ({"a": f"[KV-A-1]\n{GOOD}"}, "a.toml: KV-A-1: an id looks like KV-BYTES-001"),
        (
            {"a": f'[KV-A-001]\n{GOOD}id = "KV-A-002"'},
            "a.toml: KV-A-001: expected a table without the key id",
        ),
        ({"a": "[KV-A-001\n"}, "a.toml: "),
        (
            {"a": f"[KV-A-001]\n{GOOD}".replace('caller = "core.py: step"\n', "")},
            "a.toml: KV-A-001: caller is missing: a rule is a MUST only where vLLM breaks",
        ),
        ({"a": f"[KV-A-001]\n{GOOD}".replace('breaks = "B."\n', "")}, "a.toml: KV-A-001: breaks is missing"),
    ],
)
def test_a_mistake_names_the_file_and_the_key(tmp_path, files, says):
    with pytest.raises(rules.BadRules) as caught:
        load(tmp_path, **files)
    assert says in str(caught.value)


def cases():
    return [case for name in plan.module_names() for case in plan.load_module(name)[1]]


def test_every_case_of_the_suite_has_a_rule():
    assert {case.rule for case in cases()} <= set(rules.load())


def test_every_rule_has_a_case_or_says_why_not():
    assert {rule.id for rule in rules.load().values() if not rule.untestable} == {
        case.rule for case in cases()
    }


def test_a_rule_may_end_and_may_have_no_case(tmp_path):
    loaded = load(tmp_path, a=f'[KV-A-001]\n{GOOD}until = "0.33"\nuntestable = "why"\n[KV-A-002]\n{GOOD}')
    assert (loaded["KV-A-001"].until, loaded["KV-A-001"].untestable) == ("0.33", "why")
    assert (loaded["KV-A-002"].until, loaded["KV-A-002"].untestable) == ("", "")


@pytest.mark.parametrize(
    ("version", "holds"),
    [("0.9.1", False), ("0.31.4", False), ("0.32.0+cpu", True), ("0.33.0", False), ("1.0.0", False)],
)
def test_a_rule_holds_for_minors(tmp_path, version, holds):
    text = GOOD.replace('since = "0.9"', 'since = "0.32"')
    [rule] = load(tmp_path, a=f'[KV-A-001]\n{text}until = "0.33"\n').values()
    said = "" if holds else "KV-A-001, which holds since vLLM 0.32, no longer since 0.33"
    assert rule.why_not(version) == said


@pytest.mark.parametrize("version", ["", "0.8.5", "0.1.dev1"])
def test_a_vllm_older_than_every_rule_leaves_no_rule_out(tmp_path, version):
    known = load(tmp_path, a=f"[KV-A-001]\n{GOOD}[KV-A-002]\n{GOOD.replace('0.9', '0.32')}")
    assert rules.not_in_force(known, version) == {}
    assert list(rules.not_in_force(known, "0.31.0")) == ["KV-A-002"]


def test_vllm_main_comes_after_every_minor(tmp_path):
    known = load(
        tmp_path,
        a=f'[KV-A-001]\n{GOOD.replace("0.9", "0.34")}[KV-A-002]\n{GOOD}until = "0.33"\n',
    )
    assert list(rules.not_in_force(known, "0.33.0")) == ["KV-A-001", "KV-A-002"]
    for version in ("0.33.1rc1.dev42+g017e9f444.empty", "0.1.dev1+g017e9f444"):
        assert list(rules.not_in_force(known, version)) == ["KV-A-002"]


def test_a_should_needs_no_caller(tmp_path):
    text = GOOD.replace("MUST", "SHOULD").replace(BREAKS, 'level = "core"')
    [rule] = load(tmp_path, a=f"[KV-A-001]\n{text}").values()
    assert (rule.caller, rule.breaks) == ("", "")
    assert rules.should({rule.id: rule}) == ("KV-A-001",)


def test_every_caller_is_a_function_of_vllm():
    spec = importlib.util.find_spec("vllm")
    assert spec and spec.submodule_search_locations, "vLLM is not installed here: the extra cpu has it"
    root = Path(spec.submodule_search_locations[0])
    names = {path: names_in(root / path) for path in {file_of(rule) for rule in callers()}}
    assert [rule.id for rule in callers() if rule.caller.partition(": ")[2] not in names[file_of(rule)]] == []


def callers():
    return [rule for rule in rules.load().values() if rule.caller]


def file_of(rule):
    return rule.caller.partition(": ")[0]


def names_in(path):
    """The functions of a module, and the methods of its classes as Class.method."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return found


def test_the_file_of_clauses_holds_no_rules(tmp_path):
    assert list(load(tmp_path, a=f"[KV-A-001]\n{GOOD}", clauses="[C2]\n")) == ["KV-A-001"]


def test_every_rule_is_a_sentence():
    for rule in rules.load().values():
        assert rule.sentence.endswith("."), rule.id
        assert rule.done.endswith("."), rule.id
        assert rule.breaks.endswith("."), rule.id
        assert all(line.strip() for line in rule.check), rule.id


def test_cases_are_named_in_their_tiers_folder():
    for name in plan.module_names():
        assert {case.tier for case in plan.load_module(name)[1]} == {name.split("/")[0]}
        assert name.split("/")[0] in plan.TIERS
