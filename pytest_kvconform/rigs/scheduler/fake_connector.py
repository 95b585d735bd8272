"""A second connector for vLLM's MultiConnector. A case sets its answers. It moves nothing.

    # MultiConnector([FakeConnector, the subject])
    side = rig.side("D", transfer=with_fake_connector("first"))
    subject, fake = multi_connector_children(side)
    fake.connector.loads = True  # announces the missing tokens of the next request
    subject.calls_of(...)  # calls of the subject's hooks

recorder.py checks the calls of the subject.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from pytest_kvconform.rigs.hook_calls import LastCalls
from pytest_kvconform.rigs.scheduler.recorder import Call, Recorder
from pytest_kvconform.rigs.vllm_setup.hooks import FINISHED

if TYPE_CHECKING:
    from pytest_kvconform.rigs.scheduler.rig import Side


class FakeConnector(KVConnectorBase_V1, SupportsHMA):
    """The fake connector. A case sets its attributes.

    `loads`: whether it announces all but the last token of the next request, to load between steps.
    `none_answers`: how often it answers None before. `keeps`: whether it keeps the blocks of every request
    that ends. `params`: the kv_transfer_params that it returns then.
    """

    loads, none_answers, keeps = False, 0, False
    params: dict[str, Any] | None = None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.none_answers:
            self.none_answers -= 1
            return None, False
        missing = request.num_tokens - 1 - num_computed_tokens if self.loads else 0
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Announce no further load: each load is announced once."""
        self.loads = self.loads and not num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.keeps, None if self.params is None else dict(self.params)

    request_finished_all_groups = request_finished

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""


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

    def both(subject: KVTransferConfig) -> KVTransferConfig:
        # MultiConnector passes its own
        given = {name: value for name, value in asdict(subject).items() if name != "engine_id"}
        fake = {
            "kv_connector": "FakeConnector",
            "kv_connector_module_path": __name__,
            "kv_role": subject.kv_role,
        }
        return KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role=subject.kv_role,
            kv_load_failure_policy=subject.kv_load_failure_policy,
            kv_connector_extra_config={"connectors": [fake, given] if where == "first" else [given, fake]},
        )

    return both


def multi_connector_children(side: Side) -> tuple[Child, Child]:
    """The subject and the fake connector of a side made with `with_fake_connector`.

    From now on their calls are recorded.
    """
    found = []
    for index, connector in enumerate(side.connector._connectors):
        recorder = Recorder(side.rig.host.note_running_hook, LastCalls(f"{side.name}.{index}"))
        found.append(Child(recorder.wrap_hooks(connector), index, recorder))
    first, second = found
    return (second, first) if isinstance(first.connector, FakeConnector) else (first, second)
