"""The fixture `claimed`: claims of the small suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def claimed(kv, pytester) -> Callable[..., Path]:
    """claimed(*arguments, ...): the folder of a claim of the small suite."""

    def run(*arguments: str, claim: str = "--kv-claim", **how: Any) -> Path:
        for seed in (1, 2, 3):
            kv(claim, f"--kv-seed={seed}", f"--kv-report=claim/seed-{seed}", *arguments, **how)
        return pytester.path / "claim"

    return run
