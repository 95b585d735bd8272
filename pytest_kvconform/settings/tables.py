"""Checks of tables that have no setting of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pytest_kvconform.settings import BadSetting
from pytest_kvconform.settings.parsers import did_you_mean


def refuse_unknown(
    table: Mapping[str, Any], valid: Iterable[str], place: str, dot: str = ".", what: str = "key"
) -> None:
    """Raise BadSetting for a key that does not exist, with a hint to the nearest valid key."""
    valid = list(valid)
    for key in table:
        if key not in valid:
            hint = did_you_mean(str(key), valid) or f"; there are {', '.join(valid)}"
            raise BadSetting(f"{place}{dot}{key}: there is no such {what}{hint}")
