"""The places in which one setting may be set: the command line, the environment, and pyproject.toml."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_kvconform.settings.option import Option
from pytest_kvconform.settings.tables import BadSetting

HUB = "hub"  # of --kv-gsm8k: no folder


@dataclass(frozen=True)
class Places:
    """All places of one run. See `settings.load` for the fields."""

    command_line: Mapping[str, Any]
    environment: Mapping[str, str]
    table: Mapping[str, Any]  # [tool.kvconform]
    root: Path  # folder of pyproject.toml
    last_seed: int | None

    def find(self, option: Option, in_table: bool) -> tuple[Any, str] | None:
        """Return the value of a setting, and where it was set: the first of its places that has it.

        `in_table`: whether pyproject.toml is one of them. Raises BadSetting.
        """
        for raw, origin, place in (
            (self.command_line.get(option.dest), "command line", option.flag),
            (self.environment.get(option.variable) or None, option.variable, option.variable),
            (
                self.table.get(option.key) if in_table else None,
                "pyproject.toml",
                f"pyproject.toml: tool.kvconform.{option.key}",
            ),
        ):
            if raw is None or (raw == [] and option.repeatable):
                continue
            try:
                value = option.parse(raw)
                if value == "last" and option.name == "seed":
                    value = self._previous()
            except ValueError as error:
                raise BadSetting(f"{place}: {error}") from None
            is_path = option.is_path and (option.name, value) != ("gsm8k", HUB)
            if is_path and origin == "pyproject.toml" and not value.lstrip().startswith("{"):
                value = os.path.normpath(self.root / value)
            return value, origin
        return None

    def _previous(self) -> int:
        if self.last_seed is None:
            raise ValueError("there is no previous run whose seed could be used; give a number")
        return self.last_seed
