"""Connectors that follow vLLM's sleep mode: the reference connector, which unregisters its memory meanwhile.

`Sleeps` is right. The others are `Sleeps` with one mistake.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from reference_connector import ReferenceConnector


class Sleeps(ReferenceConnector):
    """Right: forgets its registration when it is unregistered, and makes it anew when it is restored."""

    asleep = False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> Any:
        return True

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.kv_caches = kv_caches
        super().register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        if not self.asleep:
            self.asleep = True
            self.give_up()

    def restore_kv_caches(self) -> None:
        if self.asleep:
            self.asleep = False
            super().register_kv_caches(self.kv_caches)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        if self._listener is not None:  # peers are to connect anew
            self._listener.close()
            self._listener, self._me = None, msgspec.structs.replace(self._me, incarnation=str(uuid.uuid4()))
            self._address["remote_incarnation"] = self._me.incarnation
        super().set_xfer_handshake_metadata_pp_aware(metadata)

    def give_up(self) -> None:
        """Close the worker half, as `shutdown` does."""
        worker, self._worker = self._worker, None
        worker.close()


class UnregistersOnce(Sleeps):
    """A second call of unregister_kv_caches fails."""

    def unregister_kv_caches(self) -> None:
        self.give_up()


class StaysAsleep(Sleeps):
    """restore_kv_caches registers nothing, and what is loaded then is lost."""

    def unregister_kv_caches(self) -> None:
        self.asleep = True

    def restore_kv_caches(self) -> None:
        pass

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if not self.asleep:
            super().start_load_kv(forward_context, **kwargs)


class PublishesOnce(Sleeps):
    """A second set_xfer_handshake_metadata_pp_aware fails."""

    published = False

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        if self.published:
            raise RuntimeError("the handshake metadata are set already")
        self.published = True
        super().set_xfer_handshake_metadata_pp_aware(metadata)


class RefusesToForget(Sleeps):
    """reset_cache fails always, and so does vLLM's request to sleep."""

    def reset_cache(self) -> bool:
        return False


class AnswersByMethod(Sleeps):
    """supports_sleep_mode returns a method, which is always true."""

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> Any:
        return cls.restore_kv_caches
