"""What becomes of answers and errors of Ray, without a cluster."""

from __future__ import annotations

import contextlib
import signal
from typing import Any

import pytest
import ray

from pytest_kvconform.result import Blocked
from pytest_kvconform.rigs.nodes import cluster

REACHED = "--kv-ray: no Ray cluster was reached at '10.0.0.7:6379': "


@pytest.mark.parametrize("error", [None, ray.exceptions.RaySystemError("it is gone"), TimeoutError("late")])
def test_ray_leaves_the_handler_of_sigterm_as_it_was(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    def init(*_: Any, **__: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        if error:
            raise error

    monkeypatch.setattr(ray, "init", init)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Blocked, match=REACHED) if error else contextlib.nullcontext():
        cluster._connect("10.0.0.7:6379")
    after = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    assert after is before
