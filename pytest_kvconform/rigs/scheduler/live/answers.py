"""Whether get_num_new_matched_tokens waits for what the connector's own workers say.

The scripted workers of the scheduler rig cannot say it (build_connector_worker_meta). Live engines can.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from pytest_kvconform.result import Blocked, Evidence, NotApplicable, Violation
from pytest_kvconform.rigs.scheduler.connector_class import connector_class

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.live.pair import Live
    from pytest_kvconform.rigs.scheduler.rig import Rig

REPORTS = "build_connector_worker_meta"
LENGTHS = (53, 69, 37)  # tokens of prompts; the last one carries no params
WAITS = (
    "get_num_new_matched_tokens answers None until the connector's own workers have reported "
    f"({REPORTS}), and the scheduler rig has scripted workers"
)


def waits_for_own_workers(rig: Rig, heard: bool) -> Evidence:
    """Let D load two prompts and compute one, with both halves of the connector. It is no case.

    `heard`: whether D's scheduler half gets what its worker half reports of its own. If so, it passes if
    every request ends. If not, it passes if the answer for one of them stays None. Both together show that
    the answer waits for the reports.

    Raises Blocked if the worker half cannot run on this machine, and NotApplicable instead if its class has
    no such reports. Raises NotApplicable if all requests end unheard, and Violation if one does not end
    though the reports are heard. Raises Blocked if another rule is broken unheard, as where a hook raises:
    vLLM's workers report in every step, and a connector may rely on it (v1/worker/gpu/kv_connector.py:
    ActiveKVConnector.post_forward).
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from pytest_kvconform.rigs.scheduler.live.pair import live_engines

    name = rig.subject.connector
    own = getattr(connector_class(rig), REPORTS, None) is not getattr(KVConnectorBase_V1, REPORTS, None)
    if not own and rig.subject.lacks(rig.host.spec.facts.device):
        raise NotApplicable(f"{name} has no {REPORTS}: its workers report nothing of their own")
    rig.waited = False  # a wait cut short would say nothing
    with live_engines(rig) as live:
        if not heard:
            _drop_reports(live.d.side)
        for owner, length in enumerate(LENGTHS):
            id = ""
            try:
                id = _let_d_load(rig, live, owner, length)
                live.settle(functools.partial(live.d.ended, [id]), "a request of D")
            except Violation as violation:
                if not heard and violation.finding.rule != rig.rule:
                    raise Blocked(f"without their reports {violation.finding.happened}") from None
                if heard or id not in live.d.side.recorder.unsure:
                    raise
                return Evidence(looked_at=owner + 1, unit="requests")
    if not heard:
        raise NotApplicable(f"{name} answers without what its own workers report")
    return Evidence(looked_at=len(LENGTHS), unit="requests")


def _let_d_load(rig: Rig, live: Live, owner: int, length: int) -> str:
    """Let P compute a prompt, and add it to D. Returns D's id of the request."""
    prompt, loads = rig.prompt(length, seed=owner), owner < len(LENGTHS) - 1
    params, like = None, ""
    if loads and not live.store:
        like = live.p.add(prompt, owner, rig.prefill_params())
        live.settle(functools.partial(live.p.ended, [like]), "a prefill")
        params = live.p.params(like)
    id: str = live.d.add(prompt, owner, params, loads_from=live.p.spec.engine, like=like)
    return id


def _drop_reports(side: Any) -> None:
    """Keep from the scheduler half from now on what the worker half reports of its own."""
    work = side.worker

    def work_unheard(output: Any) -> Any:
        reported = work(output)
        if reported is not None:
            reported.kv_connector_worker_meta = None
        return reported

    side.worker = work_unheard
