"""How `--kv-shard=i/n` divides a plan: every case is in one shard, with all that share its engines."""

from __future__ import annotations

import random

import pytest

from model_matrix.cells import EVERY_MATRIX
from pytest_kvconform.plan import make_plan
from pytest_kvconform.settings import BadSetting, Settings
from pytest_kvconform.shards import ALONE_RIGS, group_of, groups, load_costs, seconds


def shards(count: int, **settings) -> list:
    return [make_plan(Settings(shard=f"{number}/{count}", **settings), ()) for number in range(1, count + 1)]


@pytest.mark.parametrize("count", [1, 2, 4, 7])
@pytest.mark.parametrize(
    "settings",
    [{}, {"tier": ("interface", "protocol", "bytes")}, {"matrix": "full", "family": ("gemma3",)}],
    ids=["quick", "tiers", "full"],
)
def test_every_case_is_in_one_shard(settings, count):
    whole = make_plan(Settings(**settings), ())
    parts = shards(count, **settings)
    ids = [one.id for part in parts for one in part.selected]
    assert sorted(ids) == sorted(one.id for one in whole.selected)
    for part in parts:
        assert part.manifest == whole.manifest
        assert set(part.elsewhere) == set(ids) - {one.id for one in part.selected}
        assert list(part.elsewhere) == sorted(part.elsewhere)


def test_cases_of_a_cell_that_share_engines_stay_together():
    parts = shards(7)
    for number, part in enumerate(parts):
        others = {group_of(one) for other in parts[:number] for one in other.selected}
        assert others.isdisjoint(groups(part.selected))
    apart = {group.apart for part in parts for group in groups(part.selected)}
    assert apart == {"", *ALONE_RIGS}


def test_a_shard_keeps_the_order_of_the_run():
    order = [one.id for one in make_plan(Settings(), ()).selected]
    for part in shards(4):
        ids = [one.id for one in part.selected]
        assert ids == sorted(ids, key=order.index)


def test_neither_the_seed_nor_the_order_of_names_changes_a_shard():
    plain = [one.id for one in shards(4)[1].selected]
    assert [one.id for one in shards(4, seed=7)[1].selected] == plain
    names = ["gemma3", "llama", "gpt_oss"]
    random.Random(1).shuffle(names)
    first, second = (shards(3, family=tuple(order))[0].selected for order in (names, sorted(names)))
    assert {one.id for one in first} == {one.id for one in second}


def test_shards_cost_about_the_same():
    """No shard of the quick run costs more than the mean and its most expensive group."""
    costs = [sum(seconds(one, "quick") for one in part.selected) for part in shards(4)]
    assert max(costs) < 1.02 * sum(costs) / 4


def test_more_shards_than_groups_are_refused_for_every_shard():
    few = {"tier": ("interface",), "family": ("gemma3", "qwen3_5")}
    for number in (1, 3):
        with pytest.raises(BadSetting) as caught:
            make_plan(Settings(shard=f"{number}/3", **few), ())
        assert str(caught.value) == (
            f"--kv-shard={number}/3: the selection can be divided into 2 shards at most, by cells: give N "
            "from 1 to 2"
        )


@pytest.mark.parametrize("matrix", EVERY_MATRIX)
def test_every_case_has_a_cost(matrix):
    assert all(seconds(one, matrix) > 0 for one in make_plan(Settings(matrix=matrix), ()).selected)


def test_every_family_of_the_quick_matrix_was_measured():
    cases = make_plan(Settings(), ()).selected
    assert {(one.case.rig, one.cell.family) for one in cases} == {
        (name, family) for name, rig in load_costs().items() for family in rig.families
    }


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("2", "expected I/N, such as 2/4, got '2'"),
        ("a/4", "expected I/N, such as 2/4, got 'a/4'"),
        ("1/2/3", "expected I/N, such as 2/4, got '1/2/3'"),
        ("/4", "expected I/N, such as 2/4, got '/4'"),
        ("12345/12345", "expected I/N, such as 2/4, got '12345/12345'"),
        ("0/4", "expected I/N with I from 1 to N, such as 2/4, got '0/4'"),
        ("5/4", "expected I/N with I from 1 to N, such as 2/4, got '5/4'"),
        ("7/4", "expected I/N with I from 1 to N, such as 2/4, got '7/4'"),
    ],
)
def test_a_bad_shard_is_one_sentence(kv, value, says):
    run = kv(f"--kv-shard={value}")
    assert (run.code, run.errors) == (4, [f"ERROR: --kv-shard: {says}", ""])
    assert not run.path.exists()


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["one", "n2"])
def test_too_many_shards_end_the_run_before_it_begins(kv, workers):
    run = kv("--kv-shard=1/9", *workers)
    assert run.code == 4
    assert "--kv-shard=1/9: the selection can be divided into 3 shards at most" in run.text
    assert "Traceback" not in run.text
