"""What becomes of KV cache groups that are not part of the state that is transferred."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, NotApplicable
from pytest_kvconform.rigs.scheduler.leaks import integers
from pytest_kvconform.rigs.scheduler.rig import APART, BLOCKS, Rig, Side
from pytest_kvconform.suite.interface._cells import has_groups


@case("KV-GROUPS-001", applies=has_groups, rig="scheduler")
def untransferred_groups_stay_out(rig: Rig, _: None) -> Evidence:
    """With the last group marked as not transferred, none of its blocks stands in what P hands over or in what D is told to load."""
    p, d = (_without_last_group(rig, role, index) for index, role in enumerate("PD"))
    prompt = rig.prompt(3 * d.block_size + 5)
    first, second = rig.hand_over(p, d, prompt)
    step = rig.step_until_matched(d, second)  # to load nothing of such a model is no fault
    last, observed = len(d.group_sizes) - 1, 0
    blocks = {
        "P hands over": (
            p.calls_of("request_finished", first)[0].arguments["blocks"],
            integers(p.kv_transfer_params(first)),
        ),
        "D's workers are told to load": (d.blocks(second), step.block_ids_for(second)),
    }
    for what, (groups, found) in blocks.items():
        *others, own = (set(group) - {0} for group in groups)
        observed += len(set().union(*others) & found)
        if wrong := sorted(own & found):
            raise rig.violation(
                "",
                f"group {last} is not transferred (enable_kv_transfer=False), and its blocks {wrong[:8]} are among what {what}",
                diagnosis="block ids of every group are exchanged, and not those of select_transfer_block_ids",
            )
    if not observed:
        raise NotApplicable(
            "neither what P hands over nor the orders for D's workers name a block in a form that can be read"
        )
    return Evidence(looked_at=observed, unit="blocks", external_tokens=d.first_external_tokens(second))


def _without_last_group(rig: Rig, role: str, index: int) -> Side:
    """A side whose last KV cache group is not transferred; block ids tell the two apart."""
    config = rig.host.vllm_config(role)
    kv_config = rig.host.kv_config(role, config, APART * index + BLOCKS + 1)
    kv_config.kv_cache_groups[-1].enable_kv_transfer = False
    return Side(rig, role, 0, config, kv_config, APART * index)
