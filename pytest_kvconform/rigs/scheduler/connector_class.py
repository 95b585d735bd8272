"""The class of the connector under test, as cases of the scheduler rig see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_kvconform.rigs.hook_calls import LastCalls
from pytest_kvconform.rigs.scheduler.recorder import Recorder

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.rig import Rig


def connector_class(rig: Rig) -> Any:
    """The class of which vLLM's factory builds both halves."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return KVConnectorFactory.get_connector_class(rig.host.vllm_config("P").kv_transfer_config)


def call_class_hook(rig: Rig, hook: str, *args: Any) -> Any:
    """Call a hook on the connector's class. Raises HookRaised."""
    recorder = Recorder(rig.host.note_running_hook, LastCalls("class"))
    return recorder.call(hook, getattr(connector_class(rig), hook), *args)
