"""The reference connector is written to be read: in an hour, from top to bottom."""

from __future__ import annotations

from tests.helpers.fixtures import ROOT

LINES = 2400


def test_the_reference_connector_is_short() -> None:
    files = sorted((ROOT / "reference_connector").rglob("*.py"))
    assert len(files) > 10
    assert sum(len(file.read_text("utf-8").splitlines()) for file in files) <= LINES
