"""The class of the connector under test, as cases of the scheduler rig see it: its hooks, and whether it may
wait for what scripted workers do not say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_kvconform.result import Blocked
from pytest_kvconform.rigs.scheduler.recorder import Recorder

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.rig import Rig
    from pytest_kvconform.rigs.scheduler.side_state import SideState

REPORTS = "build_connector_worker_meta"  # the hook of the worker half whose answers vLLM passes on


def connector_class(rig: Rig) -> Any:
    """The class of which vLLM's factory builds both halves."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return KVConnectorFactory.get_connector_class(rig.host.vllm_config("P").kv_transfer_config)


def call_class_hook(rig: Rig, hook: str, *args: Any) -> Any:
    """Call a hook on the connector's class. Raises HookRaised."""
    recorder = Recorder(rig.host.note_running_hook, "class")
    return recorder.call(hook, getattr(connector_class(rig), hook), *args)


def classes_with(side: SideState, hook: str) -> set[type]:
    """Classes of a side's connector, and of those within a MultiConnector, that have a hook of their own."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    kinds = {type(one) for one in getattr(side.connector, "_connectors", ()) or (side.connector,)}
    return {kind for kind in kinds if getattr(kind, hook) is not getattr(KVConnectorBase_V1, hook)}


def miss_reports(side: SideState) -> None:
    """Let the case run again with real workers, see own_reports.py, if the scripted workers of a side cannot
    say what the connector's may say, and it has waited in vain.
    """
    side.rig.unheard |= side.worker is None and bool(classes_with(side, REPORTS))


def require_standard_reports(side: SideState) -> None:
    """Raise Blocked for a connector that waits for reports of its workers in a format of their own. The case
    runs again with real workers.

    A store waits for what is saved, and so does a connector that holds blocks in vLLM's pool.
    """
    own, holds = classes_with(side, REPORTS), classes_with(side, "bind_gpu_block_pool")
    if side.worker is None and (own if side.rig.subject.is_store else own & holds):
        side.rig.unheard = True
        raise Blocked(
            f"{side.rig.subject.connector} waits for reports of its own workers ({REPORTS}), and the "
            "scheduler rig has no worker"
        )
