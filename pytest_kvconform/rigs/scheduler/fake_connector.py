"""The fake connector beside the subject in vLLM's MultiConnector, on a side. A case sets its answers.

    # MultiConnector([FakeConnector, the subject])
    side = rig.side("D", transfer=with_fake_connector("first"))
    subject, fake = multi_connector_children(side)
    fake.connector.loads = True  # announces the missing tokens of the next request
    subject.calls_of(...)  # calls of the subject's hooks

recorder.py checks the calls of the subject. vLLM is imported inside functions only: cases import this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pytest_kvconform.kv_config import inside_multi_connector
from pytest_kvconform.rigs.history import Call
from pytest_kvconform.rigs.scheduler.recorder import Recorder
from pytest_kvconform.rigs.vllm_setup.hooks import FINISHED

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

    from pytest_kvconform.rigs.scheduler.rig import Side


@dataclass(frozen=True)
class Child:
    """One of the two connectors of a side."""

    connector: Any
    index: int  # in MultiConnector, and in its metadata
    recorder: Recorder

    def calls_of(self, hook: str, id: str) -> tuple[Call, ...]:
        """Calls of one hook about one request.

        "request_finished" stands for request_finished_all_groups, too.
        """
        names = FINISHED if hook == "request_finished" else (hook,)
        return tuple(call for call in self.recorder.calls if call.hook in names and call.request == id)


def with_fake_connector(where: str) -> Callable[[KVTransferConfig], KVTransferConfig]:
    """Return a function that turns the subject's configuration into MultiConnector's.

    `where`: "first" or "last", the place of the fake connector.
    """
    from vllm.config import KVTransferConfig

    return lambda subject: KVTransferConfig(**inside_multi_connector(asdict(subject), where))


def is_fake(value: Any) -> bool:
    """Whether a connector is the fake one, or an exception is that of the fake one."""
    from pytest_kvconform.rigs.vllm_setup.stand_ins.fake_connector import FakeConnector, FakeError

    return isinstance(value, FakeConnector | FakeError)


def multi_connector_children(side: Side) -> tuple[Child, Child]:
    """The subject and the fake connector of a side made with `with_fake_connector`.

    From now on their calls are recorded.
    """
    found = []
    for index, connector in enumerate(side.connector._connectors):
        recorder = Recorder(side.rig.host.note_running_hook, f"{side.name}.{index}")
        found.append(Child(recorder.wrap_hooks(connector), index, recorder))
    first, second = found
    return (second, first) if is_fake(first.connector) else (first, second)
