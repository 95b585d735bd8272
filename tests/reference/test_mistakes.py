"""Mistakes in plan.py and boxes.py, one at a time in their source: the tests of each module notice them."""

from __future__ import annotations

import inspect
import sys
import types

import pytest
from hypothesis import given

from reference_connector import boxes, plan
from reference_connector.plan import Unplannable
from tests.reference import test_boxes, test_plan
from tests.reference.worlds import World, worlds

vllm = test_boxes.vllm  # the fixture that lets vLLM be imported beside any torchvision

OF_PLAN = {  # a piece of plan.py -> the piece with a mistake
    "if local == remote == width:": "if local == width:",
    " & (remote[1:] == remote[:-1] + length[:-1])": "",
    "np.union1d(ends[1:-1], others[1:-1])": "ends[1:-1]",
    "local += (start - a.start) * a.stride": "local += 0",
    "remote += (start - b.start) * b.stride": "remote += 0",
    "min(a.stop, b.stop) - start": "a.stop - a.start",
    "np.divmod(cuts[:-1] - table.first // box.unit,": "np.divmod(cuts[:-1],",
    "(ids * box.pieces + piece)": "(ids + piece)",
    "steps[last] == steps[first]": "steps[last][0] == steps[first][0]",
    "+ within * box.token_stride": "+ within",
    "remote[group])": "remote[match.mine.group])",
    "(match.width * _many(match.axes) // _many(left))": "match.width",
    "end if rest <= WORTH * (exact - whole) else stop": "end + 1",
    "start - (start - table.first // box.unit) % size": "start",
    "return min(start, max(start - before, theirs.first // unit))": "return start",
    "max(start - before, theirs.first // unit)": "start - before",
    "min(ends[-1], others[-1])": "ends[-1]",
    "local[order], remote[order], length[order]": "local[order], remote, length",
    "found[ranges][number] = box": "found[(number,), *ranges][number] = box",
    "abs(number - nearest)": "-abs(number - nearest)",
    "np.add.reduceat(length, firsts)": "length[firsts]",
    "if 0 < total <= EXACT else (local": "if False else (local",
}


@pytest.mark.parametrize("right", OF_PLAN)
def test_a_mistake_in_plan_is_noticed(right: str) -> None:
    source = inspect.getsource(plan)
    assert source.count(right) == 1, f"plan.py has {right!r} not exactly once"
    planner = types.ModuleType("mistaken_plan")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, planner.__name__, planner)  # dataclasses look there
        exec(source.replace(right, OF_PLAN[right]), vars(planner))

        @test_plan.SEARCHED
        @given(worlds())
        def search(world: World) -> None:
            test_plan.check(world, planner)

        with pytest.raises((AssertionError, planner.Unplannable, ValueError, IndexError, KeyError)):
            search()


def _of_the_generic_kernel(patch: pytest.MonkeyPatch) -> None:
    """On a CPU with AMX another kernel writes K in tiles, and the test looks at no other layout."""
    from vllm.v1.attention.backends import cpu_attn

    patch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "vec")
    test_boxes.test_cpu_attention_lies_where_its_kernel_writes_it(32)


OF_BOXES = {  # a piece of boxes.py -> the piece with a mistake, and a test that must fail with it
    "block * pieces, tokens * pieces": (
        "block, tokens * pieces",
        lambda _: test_boxes.test_attention_lies_where_vllm_views_it("LBNHC", 16),
    ),
    "rank * number, (rank + 1) * number": ("0, number", lambda patch: test_boxes.states("SD", patch)),
    "strides = (taps * width, width)": (
        "strides = (width, channels * width)",
        lambda patch: test_boxes.states("DS", patch),
    ),
    "at += number * strides[0]": ("at += number", lambda patch: test_boxes.states("DS", patch)),
    "address += channels * taps * width": (
        "address += channels * width",
        lambda patch: test_boxes.states("DS", patch),
    ),
    "shards = min(config.get_total_num_kv_heads(), tp_size)": (
        "shards = tp_size",
        lambda _: test_boxes.test_heads_of_every_rank("gemma3_1b", 1),
    ),
    "shards = min(most, tp_size)": (
        "shards = tp_size",
        lambda _: test_boxes.test_heads_of_every_rank("deepseek_v3", 1),
    ),
    "most = 1 if isinstance(spec, MLAAttentionSpec) else spec.max_tp_shards": (
        "most = spec.max_tp_shards",
        lambda _: test_boxes.test_heads_of_every_rank("deepseek_v3", None),
    ),
    "and _is_draft(vllm_config, name)": (
        "and False",
        lambda _: test_boxes.test_heads_of_a_draft_that_has_fewer_than_its_model(),
    ),
    "address + tokens * row": (
        "address + row",
        test_boxes.test_cpu_attention_with_blocks_of_another_size,
    ),
    "token_stride=size, axes=(axis, inner)": (
        "token_stride=row, axes=(axis, inner)",
        _of_the_generic_kernel,
    ),
}


@pytest.mark.parametrize("right", OF_BOXES)
def test_a_mistake_in_boxes_is_noticed(right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, notice = OF_BOXES[right]
    source = inspect.getsource(boxes)
    assert source.count(right) == 1, f"boxes.py has {right!r} not exactly once"
    mistaken = types.ModuleType("mistaken_boxes")
    monkeypatch.setitem(sys.modules, mistaken.__name__, mistaken)  # msgspec resolves annotations there
    exec(source.replace(right, wrong), vars(mistaken))
    monkeypatch.setattr(test_boxes, "boxes_of", mistaken.boxes_of)
    monkeypatch.setattr(boxes, "_heads", vars(mistaken)["_heads"])
    with pytest.raises((AssertionError, Unplannable)):
        notice(monkeypatch)
