"""Transfer ids of the scheduler rig."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_kvconform.rigs.scheduler.rig import Rig
from pytest_kvconform.subject import Subject


def test_no_two_cases_have_the_same_transfer_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux gives the ids of ended processes again, and a connector may remember what P has answered."""
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    subject = Subject(spec="m:C", connector="C", module="m", handover="rendezvous")
    cases: list[Any] = [SimpleNamespace(subject=subject) for _ in range(2)]
    first, second = (Rig.prefill_params(cast(Rig, case))["transfer_id"] for case in cases)
    assert first != second
