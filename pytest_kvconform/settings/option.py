"""One row of the table of settings: what a field of `Settings` carries, and what follows from its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ENV_PREFIX = "KVCONFORM_"


def option(
    default: Any,
    parse: Callable[[Any], Any],
    metavar: str,
    help: str,
    *,
    toml_only: bool = False,
    is_path: bool = False,
    is_secret: bool = False,
) -> Any:
    row = (parse, metavar, help, toml_only, is_path, is_secret)
    return field(default=default, repr=not is_secret, metadata={"option": row})


@dataclass(frozen=True)
class Option:
    """One setting of the table, with its flag, environment variable and TOML key."""

    name: str  # field of Settings
    default: Any
    parse: Callable[[Any], Any]  # raises ValueError, saying what is valid
    metavar: str
    help: str
    toml_only: bool  # describes the connector, not a run
    is_path: bool  # relative to pyproject.toml if it was set there
    is_secret: bool  # headers, of which people see the names alone

    @property
    def flag(self) -> str:
        return "" if self.toml_only else f"--kv-{self.key}"

    @property
    def dest(self) -> str:
        return f"kv_{self.name}"

    @property
    def variable(self) -> str:
        return "" if self.toml_only else f"{ENV_PREFIX}{self.name.upper()}"

    @property
    def key(self) -> str:
        return self.name if self.toml_only else self.name.replace("_", "-")

    @property
    def repeatable(self) -> bool:
        return isinstance(self.default, tuple)

    @property
    def repeats(self) -> str:
        """How the setting may be given more than once, for its help; "" if it may not."""
        if not self.repeatable:
            return ""
        return "; may be repeated" if self.is_secret else "; may be repeated, or hold commas"

    @property
    def switch(self) -> bool:
        return self.default is False

    def shown(self, value: Any) -> Any:
        """The value as terminals and reports have it."""
        return tuple(f"{one.partition(':')[0]}: ..." for one in value) if self.is_secret else value

    @property
    def shown_default(self) -> str:
        """The default as text; "" if the setting is off or empty by default."""
        return "" if self.default is False or self.default in ("", ()) else str(self.default)
