"""ReferenceConnector with one object that does not survive the way to another process, as the first sentence
of its docstring says; and a right one, whose objects are unusual and do.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from reference_connector import ReferenceConnector
from reference_connector.statistics import ReferenceStats

SURROGATE = "no peer \udcff here"  # text that UTF-8 cannot hold


class Right(ReferenceConnector):
    """No mistake."""


# ---- statistics --------------------------------------------------------------------------------------------


class Counted(ReferenceStats):
    """Has a lock, which it leaves behind on its way and makes anew, and a field beside vLLM's."""

    def __init__(self, data: dict[str, Any] | None = None):
        super().__init__(data or {})
        self.lock, self.sums = threading.Lock(), 0

    def __getstate__(self) -> tuple[dict[str, Any], int]:
        return self.data, self.sums

    def __setstate__(self, state: tuple[dict[str, Any], int]) -> None:
        self.__init__(state[0])  # type: ignore[misc]
        self.sums = state[1]

    def aggregate(self, other: Any) -> Counted:
        summed = Counted(super().aggregate(other).data)
        summed.sums = self.sums + 1
        return summed


class HasOddStatistics(ReferenceConnector):
    """No mistake: its statistics are of a class of its own, with a lock that does not travel."""

    kind: type[ReferenceStats] = Counted

    def get_kv_connector_stats(self) -> Any:
        found = super().get_kv_connector_stats()
        return found and self.kind(found.data)


class NoDict(ReferenceStats):
    def to_dict(self) -> NoReturn:
        raise RuntimeError("no dict")


class StatisticsRaise(HasOddStatistics):
    """to_dict of its statistics raises."""

    kind = NoDict


class Locked(ReferenceStats):
    def __init__(self, data: dict[str, Any] | None = None):
        super().__init__(data or {})
        self.lock = threading.Lock()


class StatisticsHaveALock(HasOddStatistics):
    """Its statistics have a lock."""

    kind = Locked


class StatisticsAreLocal(ReferenceConnector):
    """Makes a class of statistics within a function: cloudpickle would carry it, and vLLM uses pickle."""

    def get_kv_connector_stats(self) -> Any:
        class Here(ReferenceStats):
            pass

        found = super().get_kv_connector_stats()
        return found and Here(found.data)


# ---- metadata ----------------------------------------------------------------------------------------------


class MetadataHasALock(ReferenceConnector):
    """Its metadata has a lock."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        object.__setattr__(metadata, "lock", threading.Lock())
        return metadata


class HandshakeHasALock(ReferenceConnector):
    """What its workers publish has a lock."""

    def get_handshake_metadata(self) -> Any:
        published = super().get_handshake_metadata()
        object.__setattr__(published, "lock", threading.Lock())
        return published


class Report(KVConnectorWorkerMetadata):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def aggregate(self, other: Any) -> Any:
        return self


class WorkerMetadataHasALock(ReferenceConnector):
    """What its workers report of their own has a lock."""

    def build_connector_worker_meta(self) -> Any:
        return Report()

    def update_connector_output(self, connector_output: Any) -> None:
        connector_output.kv_connector_worker_meta = None
        super().update_connector_output(connector_output)


class ParamsHaveALock(ReferenceConnector):
    """P's params have a lock."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        keep, params = super().request_finished_all_groups(request, block_ids)
        return keep, params and params | {"lock": threading.Lock()}


# ---- exceptions --------------------------------------------------------------------------------------------


class NeedsTwo(Exception):
    """An exception that pickle cannot make again: it passes one argument."""

    def __init__(self, what: str, lock: Any):
        super().__init__(f"{what} {'locked' if lock.locked() else 'open'}")


class HoldsALock(RuntimeError):
    """An exception that pickle does not carry."""

    def __init__(self, text: str):
        super().__init__(text)
        self.lock = threading.Lock()


class Mute(RuntimeError):
    def __str__(self) -> NoReturn:
        raise ValueError("mute")


class Raises(ReferenceConnector):
    def error(self) -> Exception:
        raise NotImplementedError

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise self.error()


class RaisesWithTwoArguments(Raises):
    """start_load_kv raises an exception whose class wants two arguments."""

    def error(self) -> Exception:
        return NeedsTwo("the door is", threading.Lock())


class RaisesWithALock(Raises):
    """start_load_kv raises an exception that has a lock."""

    def error(self) -> Exception:
        return HoldsALock("the door is shut")


class RaisesSurrogates(Raises):
    """start_load_kv raises an exception whose message no report can hold."""

    def error(self) -> Exception:
        return RuntimeError(SURROGATE)


class RaisesMute(Raises):
    """start_load_kv raises an exception whose __str__ raises."""

    def error(self) -> Exception:
        return Mute()


class AnswersSurrogates(ReferenceConnector):
    """get_num_new_matched_tokens answers with a text that no report can hold."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return SURROGATE, False


class Shy:
    def __repr__(self) -> NoReturn:
        raise ValueError("shy")


class AnswersWithoutRepr(ReferenceConnector):
    """get_num_new_matched_tokens answers with an object whose repr raises."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return Shy(), False
