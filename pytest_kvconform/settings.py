"""Every setting, once. The fields of `Settings` are the table; flags, environment variables and TOML keys follow from their names.

`timeout_scale` is `--kv-timeout-scale`, `KVCONFORM_TIMEOUT_SCALE` and `timeout-scale` in `[tool.kvconform]` of pyproject.toml. The first of
them that is set wins, in this order; else the default. Where a value came from is kept in `Settings.origins`.

This module is imported by every pytest run of everybody who has the plugin installed: only the cheap part of the standard library, please.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

ENV_PREFIX = "KVCONFORM_"
OTHER_VARIABLES = ("KVCONFORM_CACHE_DIR",)  # read elsewhere: where built checkpoints are kept
PROFILES, HANDOVERS = ("p2p", "store"), ("handoff", "rendezvous", "none")
# What pyproject.toml says of the connector that it names. Another one that is tested in the same folder has none of it.
OF_THE_CONNECTOR = ("config", "declare", "profile", "handover", "lease", "features", "known")


class BadSetting(ValueError):
    """The user asked for something that does not exist or cannot be read. The message is one sentence and names where it was said."""


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """A hint to put behind a complaint: `` (did you mean quick?)``, or nothing when no valid word is near."""
    import difflib

    near = difflib.get_close_matches(word, list(valid), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


# ---- parsers: a text of the command line or the environment, or a value of the TOML file -> the setting's value --------------


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value or value.encode("utf-8", "replace").decode() != value:
        raise ValueError(
            f"expected a text, got {value!r}"
        )  # neither a path nor a report can hold null bytes or halves of characters
    return value


def _words(value: Any) -> tuple[str, ...]:
    """One text with commas, or a list of texts -> words without repetition, in the order given."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"expected a text or a list of texts, got {value!r}")
    return tuple(
        dict.fromkeys(word.strip() for text in texts for word in _text(text).split(",") if word.strip())
    )


def _one_of(*valid: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in valid:
            raise ValueError(f"expected {' or '.join(valid)}, got {value!r}{did_you_mean(str(value), valid)}")
        return str(value)

    return parse


def _factor(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"expected a number above 0, got {value!r}")
    return number


def _seed(value: Any) -> int | str:
    if value == "last":
        return "last"
    try:
        number = -1 if isinstance(value, bool | float) else int(value)
    except (TypeError, ValueError):
        number = -1
    if number < 0:
        raise ValueError(f"expected a whole number from 0 on, or last, got {value!r}")
    return number


def _switch(value: Any) -> bool:
    if value in (True, "1", "true", "yes"):
        return True
    if value in (False, "0", "false", "no"):
        return False
    raise ValueError(f"expected true or false, got {value!r}")


def _tables(kind: type) -> Callable[[Any], str]:
    """A table or a list of tables of pyproject.toml becomes JSON, with dates as texts; `declaration` reads it."""

    def parse(value: Any) -> str:
        if not isinstance(value, kind):
            raise ValueError(f"expected {'a table' if kind is dict else 'a list of tables'}, got {value!r}")
        return json.dumps(value, default=str)

    return parse


def _object_or_file(value: Any) -> str:
    """A TOML table becomes JSON; texts stay as they are: `subject.resolve` reads them."""
    try:
        return json.dumps(value, sort_keys=True) if isinstance(value, dict) else _text(value)
    except TypeError:  # TOML has dates, and JSON has not
        raise ValueError(f"expected what JSON can hold, got {value!r}") from None


# ---- the table ---------------------------------------------------------------------------------------------------------------


def _option(
    default: Any,
    parse: Callable[[Any], Any],
    metavar: str,
    help: str,
    *,
    toml_only: bool = False,
    is_path: bool = False,
) -> Any:
    return field(default=default, metadata={"option": (parse, metavar, help, toml_only, is_path)})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for. A setting with a tuple as its default may be repeated and may hold commas."""

    connector: str = _option(
        "",
        _text,
        "NAME|MODULE:CLASS",
        "connector to test: a name registered in vLLM, or a class; nothing of this plugin acts without it",
    )
    config: str = _option(
        "",
        _object_or_file,
        "JSON|FILE",
        "the object you give vLLM's --kv-transfer-config, as JSON or in a file",
        is_path=True,
    )
    declare: str = _option(
        "",
        _text,
        "FILE",
        "what the connector supports, in a TOML file; else [tool.kvconform] says it",
        is_path=True,
    )
    tier: tuple[str, ...] = _option((), _words, "NAME", "only the cases of this tier, a folder of the suite")
    family: tuple[str, ...] = _option((), _words, "ID", "only this model family, e.g. gemma3")
    topology: tuple[str, ...] = _option(
        (), _words, "PnDm", "only this pair of tensor parallel sizes, e.g. P1D2: prefill 1, decode 2"
    )
    rule: tuple[str, ...] = _option(
        (), _words, "ID|GLOB", "only the cases that check this rule, e.g. KV-BYTES-*"
    )
    feature: tuple[str, ...] = _option(
        (), _words, "NAME", "only the cases that need this feature, e.g. prefix-hit"
    )
    matrix: str = _option(
        "quick", _one_of("quick", "full"), "quick|full", "how many families and topologies to go through"
    )
    device: str = _option("auto", _one_of("auto", "cpu", "cuda"), "auto|cpu|cuda", "where the engines run")
    timeout_scale: float = _option(
        1.0, _factor, "X", "multiplies every deadline; more than 1 for a slow machine"
    )
    seed: int = _option(
        0,
        _seed,
        "N|last",
        "order of cells and cases, 0 for the suite's own; last: the one of the previous run",
    )
    report: str = _option("kv-report", _text, "DIR", "folder for report.json", is_path=True)
    claim: bool = _option(
        False,
        _switch,
        "",
        "a run to rely on: nothing left out, no known failures, no hidden abilities; else it does not conform",
    )
    profile: str = _option(
        "",
        _one_of(*PROFILES),
        "p2p|store",
        "what the connector is: one half of a P/D pair (p2p, unless it is known to be a store), or a store: save, restart, load",
        toml_only=True,
    )
    handover: str = _option(
        "",
        _one_of(*HANDOVERS),
        "handoff|rendezvous|none",
        "how P's answer reaches D: in P's output (handoff, unless it is a store), by a transfer id that both get, or not at all (stores)",
        toml_only=True,
    )
    lease: str = _option(
        "",
        _text,
        "KEY",
        "key of kv_connector_extra_config for the seconds that P keeps what nobody reads; the suite asks for few",
        toml_only=True,
    )
    features: str = _option(
        "",
        _tables(dict),
        "TABLE",
        'what the connector supports: each feature true or { unsupported = "why" }',
        toml_only=True,
    )
    known: str = _option(
        "",
        _tables(list),
        "TABLES",
        "failures that are known: case, issue, expires, reason, and perhaps vllm",
        toml_only=True,
    )
    origins: dict[str, str] = field(
        default_factory=dict
    )  # setting -> "command line", the variable, "pyproject.toml" or "default"


@dataclass(frozen=True)
class Option:
    """One row of the table."""

    name: str  # field of Settings
    default: Any
    parse: Callable[[Any], Any]  # raises ValueError, saying what is valid
    metavar: str
    help: str
    toml_only: bool  # says something about the connector, not about a run
    is_path: bool  # relative to pyproject.toml when it is said there

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
        return self.name.replace("_", "-")

    @property
    def repeatable(self) -> bool:
        return isinstance(self.default, tuple)

    @property
    def switch(self) -> bool:
        return self.default is False

    @property
    def shown_default(self) -> str:
        """For people; "" where the default is that nothing was said."""
        return "" if self.default is False or self.default in ("", ()) else str(self.default)


def _rows() -> Iterable[Option]:
    for row in fields(Settings):
        if "option" in row.metadata:
            yield Option(row.name, row.default, *row.metadata["option"])


OPTIONS: tuple[Option, ...] = tuple(_rows())


# ---- from the four places to one record --------------------------------------------------------------------------------------


def load(
    command_line: Mapping[str, Any], environment: Mapping[str, str], root: Path, last_seed: int | None = None
) -> Settings:
    """Settings of one run. `command_line`: option dest -> text, or None. Raises BadSetting, in one sentence with the key's path.

    `last_seed` is what `--kv-seed=last` stands for; None if no run was before.
    """
    table = _read_table(root / "pyproject.toml")
    _refuse_unknown(environment, table)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for option in OPTIONS:
        of_another = option.name in OF_THE_CONNECTOR and table.get(
            "connector", values.get("connector")
        ) != values.get("connector")
        for raw, origin, place in (
            (command_line.get(option.dest), "command line", option.flag),
            (environment.get(option.variable) or None, option.variable, option.variable),
            (
                None if of_another else table.get(option.key),
                "pyproject.toml",
                f"pyproject.toml: tool.kvconform.{option.key}",
            ),
        ):
            if raw is None or (raw == [] and option.repeatable):
                continue
            try:
                value = option.parse(raw)
                if value == "last" and option.name == "seed":
                    value = _previous(last_seed)
            except ValueError as error:
                raise BadSetting(f"{place}: {error}") from None
            if option.is_path and origin == "pyproject.toml" and not value.lstrip().startswith("{"):
                value = os.path.normpath(root / value)
            values[option.name], origins[option.name] = value, origin
            break
        else:
            origins[option.name] = "default"
    return Settings(**values, origins=origins)


def _previous(seed: int | None) -> int:
    if seed is None:
        raise ValueError("there is no previous run whose seed could be used; give a number")
    return seed


def _read_table(path: Path) -> dict[str, Any]:
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
        raise BadSetting(
            f"{path.name}: tool{'.kvconform' if isinstance(tool, dict) else ''}: expected a table, got {table!r}"
        )
    return table


def _refuse_unknown(environment: Mapping[str, str], table: Mapping[str, Any]) -> None:
    variables = [option.variable for option in OPTIONS if option.variable]
    for name in sorted(environment):
        if name.startswith(ENV_PREFIX) and name not in (*variables, *OTHER_VARIABLES):
            raise BadSetting(f"environment: there is no variable {name}{did_you_mean(name, variables)}")
    keys = [option.key for option in OPTIONS]
    for key in sorted(table):
        if key not in keys:
            raise BadSetting(
                f"pyproject.toml: tool.kvconform.{key}: there is no such key{did_you_mean(key, keys)}"
            )


def non_default(settings: Settings) -> list[tuple[Option, Any, str]]:
    """(option, value, origin) of what was set somewhere, in the order of the table."""
    rows = [
        (option, getattr(settings, option.name), settings.origins.get(option.name, "default"))
        for option in OPTIONS
    ]
    return [row for row in rows if row[2] != "default"]
