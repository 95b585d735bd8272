"""The order in which xdist's workers get cells."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from pytest_kvconform.pytest_hooks.xdist_scheduling import CellScheduling

IDS = [
    "test_of_theirs.py::test_one",
    *(f"kv::engine/bytes::arrive[llama-P1D1-n{n}]" for n in range(4)),
    "kv::engine/bytes::arrive[qwen3_5-P1D1-n1]",
    *(f"kv::bytes/pool::attention_kv_arrives[gemma3_1b-P1D1.b16-n{n}]" for n in range(3)),
    *(f"kv::bytes/pool::attention_kv_arrives[qwen3_5_35b_a3b-P2D2.outer-n{n}]" for n in range(2)),
]


@pytest.fixture
def order(pytester):
    """The scopes in the order in which one worker is given them."""
    given: list[str] = []
    node = Mock()
    node.send_runtest_some = lambda indexes: given.append(IDS[indexes[0]])
    scheduler = CellScheduling(pytester.parseconfig("--dist=load", "--tx=popen"), None)
    scheduler.add_node(node)
    scheduler.add_node_collection(node, IDS)
    scheduler.schedule()
    while scheduler.workqueue:
        scheduler._assign_work_unit(node)
    return given


def test_cells_with_states_come_first_and_large_cells_before_small_ones(order):
    assert order == [IDS[9], IDS[5], IDS[1], IDS[6], IDS[0]]
