"""TOML tables of settings: how they are read, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_kvconform.settings.option import ENV_PREFIX, Option
from pytest_kvconform.settings.parsers import did_you_mean


class BadSetting(ValueError):
    """Error: a setting does not exist or cannot be read. The message is one sentence and names its place."""


def read_table(path: Path) -> dict[str, Any]:
    """Return the table tool.kvconform of a pyproject.toml; empty if there is none. Raises BadSetting."""
    if not path.is_file():
        return {}
    import tomllib

    try:
        tool = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSetting(f"{path.name}: {error}") from None
    except RecursionError:
        raise BadSetting(f"{path.name}: it is nested too deeply") from None
    table = tool.get("kvconform", {}) if isinstance(tool, dict) else tool
    if not isinstance(table, dict):
        key = "tool.kvconform" if isinstance(tool, dict) else "tool"
        raise BadSetting(f"{path.name}: {key}: expected a table, got {table!r}")
    return table


def refuse_unknown(
    table: Mapping[str, Any], valid: Iterable[str], place: str, dot: str = ".", what: str = "key"
) -> None:
    """Raise BadSetting for a key that does not exist, with a hint to the nearest valid key."""
    valid = list(valid)
    for key in table:
        if key not in valid:
            hint = did_you_mean(str(key), valid) or f"; there are {', '.join(valid)}"
            raise BadSetting(f"{place}{dot}{key}: there is no such {what}{hint}")


def refuse_unknown_settings(
    environment: Mapping[str, str],
    table: Mapping[str, Any],
    options: Sequence[Option],
    other_variables: Sequence[str],
) -> None:
    """Raise BadSetting for a variable KVCONFORM_* or a key of [tool.kvconform] that no option has.

    `other_variables`: those that are read elsewhere.
    """
    variables = [option.variable for option in options if option.variable]
    for name in sorted(environment):
        if name.startswith(ENV_PREFIX) and name not in (*variables, *other_variables):
            raise BadSetting(f"environment: there is no variable {name}{did_you_mean(name, variables)}")
    keys = [option.key for option in options]
    for key in sorted(table):
        if key not in keys:
            raise BadSetting(
                f"pyproject.toml: tool.kvconform.{key}: there is no such key{did_you_mean(key, keys)}"
            )
