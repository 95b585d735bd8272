"""KV cache groups that are not transferred."""

from __future__ import annotations

from typing import Any

from pytest_kvconform.case import case
from pytest_kvconform.result import Evidence, NotApplicable
from pytest_kvconform.rigs.scheduler.leaks import integers
from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.suite.interface._cells import has_groups


@case("KV-GROUPS-001", applies=has_groups, rig="scheduler")
def untransferred_groups_stay_out(rig: Rig, _: None) -> Evidence:
    """A last group that is marked as not transferred is left out of P's params and of D's load."""
    p, d = (rig.side(role, change_groups=_without_last_group) for role in "PD")
    if len(d.group_sizes) == 1:  # vLLM marks the group of some layers, never that of all
        raise NotApplicable("without SupportsHMA vLLM makes one KV cache group of all layers")
    prompt = rig.prompt(3 * d.block_size + 5)
    p_id, d_id = rig.hand_over(p, d, prompt)
    step = rig.step_until_matched(d, d_id)  # it is no fault to load nothing for such a model
    last, observed = len(d.group_sizes) - 1, 0
    blocks = {
        "P hands over": (
            p.calls_of("request_finished", p_id)[0].arguments["blocks"],
            integers(p.kv_transfer_params(p_id)),
        ),
        "D orders its workers to load": (d.blocks(d_id), step.block_ids_for(d_id)),
    }
    for what, (groups, found) in blocks.items():
        *others, own = (set(group) - {0} for group in groups)
        observed += len(set().union(*others) & found)
        if wrong := sorted(own & found):
            raise rig.violation(
                "",
                f"group {last} is not transferred (enable_kv_transfer=False), and its blocks {wrong[:8]} are "
                f"among what {what}",
                diagnosis="the connector exchanges block ids of every group, instead of those of "
                "select_transfer_block_ids",
            )
    if not observed:
        raise NotApplicable(
            "neither P's params nor the metadata for D's workers name a block in a form that the suite can "
            "read"
        )
    return Evidence(looked_at=observed, unit="blocks", external_tokens=d.first_external_tokens(d_id))


def _without_last_group(kv_config: Any) -> None:
    """Mark the last KV cache group as not transferred."""
    kv_config.kv_cache_groups[-1].enable_kv_transfer = False
