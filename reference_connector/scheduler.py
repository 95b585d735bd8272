"""The scheduler half: what to hand over, and when. It moves no bytes and does not import vLLM.

On P, when a request with `do_remote_decode` has ended, `request_finished` keeps its blocks under a lease and
returns where they lie, for the router. On D, for a request with `do_remote_prefill`, in this order:

    on_new_request               reads and checks the parameters. If they are wrong, D computes the request
    get_num_new_matched_tokens   how many tokens P has for D. vLLM may ask many times; asking has no effect
    update_state_after_alloc     vLLM has allocated blocks: load them, or release P's if no token is left
    on_loads_finished            all workers have ended the load, well or not: release P's blocks. No rank can
                                 still be reading, so one message is enough for all ranks of both sides

A load is ordered once. After a preemption or a failed load D computes the request: P's blocks are gone.

**D never loads the last token of a prompt**, because D computes that one in any case. P does not compute it
either where that would do harm (`_shorten`): a recurrent state cannot be rolled back by a token, and the
block table of a sliding window is laid out for the token after the last one.
"""

import enum
import logging
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from reference_connector.leases import new_number
from reference_connector.messages import Address, BadParams, GroupLoad, Handoff, Lease, Load, Orders
from reference_connector.options import Options
from reference_connector.trust.authentication import ANYBODY, Trust

logger = logging.getLogger("vllm.reference_connector.scheduler")
COMPLETE = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")  # RequestStatus of a prompt that was computed
SHORTENED = "_reference_connector_shortened"  # attribute of a request: clients write its parameters


@dataclass(frozen=True)
class Group:
    """A KV cache group. Here and in all messages, groups are those of KVCacheConfig.transfer_groups."""

    tokens: int  # per block
    state: bool = False
    window: int = 0  # tokens; 0: none
    scratch: int = 0  # blocks at the end of a state's table that are not the state


class LeaseState(enum.Enum):
    """HELD -> UNUSED -> RELEASING -> forgotten. A new request with the same parameters leads back to HELD."""

    HELD = "requests need it: D renews it"
    UNUSED = "no request needs it any more: the next step orders its release"
    RELEASING = "the workers have the order, and have not reported that they notified P"


@dataclass
class HeldLease:
    """A lease of P, on D."""

    state: LeaseState = LeaseState.HELD
    requests: set[str] = field(default_factory=set)  # several, if the router gave them the same parameters
    renew_every: float = 0.0  # seconds


class Scheduler:
    """Both roles, P and D; an engine may have both at once."""

    def __init__(
        self,
        groups: tuple[Group, ...],
        address: dict[str, Any],
        lookahead: int,
        caching: bool,
        options: Options,
        trust: Trust = ANYBODY,
    ):
        """`address`: fields of a Handoff. `lookahead`: vLLM's num_prefill_lookahead_tokens."""
        self._groups, self._address, self._caching = groups, address, caching
        self._options, self._trust = options, trust
        # Tokens at the end of a prompt that P does not compute.
        self._short = max(int(any(g.state or g.window for g in groups)), lookahead - 1)
        self._given = 0  # leases
        self._handoffs: dict[str, Handoff] = {}  # requests of D for which P has KV
        self._loading: set[str] = set()  # those whose load is in progress
        self._leases: dict[Lease, HeldLease] = {}
        self._missed: dict[Address, float] = {}  # peers that do not answer -> until when D asks them nothing
        self._renewed = 0.0
        self._orders = Orders()

    # ---- P

    def _shorten(self, request: Any) -> None:
        """Let P stop before the last tokens, which D computes. A request is shortened only once."""
        done = not self._short or hasattr(request, SHORTENED) or request.num_prompt_tokens <= self._short
        if done or request.get_skip_reading_prefix_cache():  # prompt logprobs: D computes the whole prompt
            return
        if request.prompt_token_ids is not None:  # samples within one process share this list
            request.prompt_token_ids = request.prompt_token_ids[: -self._short]
        else:
            request.prompt_embeds = request.prompt_embeds[: -self._short]
        del request._all_token_ids[-self._short :]
        request.num_prompt_tokens -= self._short
        request.max_tokens = 1
        setattr(request, SHORTENED, True)

    def request_finished(self, request: Any, blocks: tuple[list[int], ...]) -> tuple[bool, Any]:
        """Whether P keeps the blocks of a request that has ended, and the parameters for D.

        `blocks`: of every group, those of computed tokens; 0, vLLM's null block, for those before a window.
        """
        name = request.request_id
        self._forget(name)
        prefill = _is_prefill(request.kv_transfer_params) and request.status.name in COMPLETE
        if not prefill or not request.num_computed_tokens:
            return False, None
        firsts, tables = [], []
        for group, table in zip(self._groups, blocks, strict=True):
            first = next((i for i, block in enumerate(table) if block), len(table))
            firsts.append(0 if group.state else first * group.tokens)
            tables.append(_slot(group, table) if group.state else list(table[first:]))
        if not all(tables):
            logger.warning("request %s is not handed over: a group has no blocks of it", name)
            return False, None
        self._given += 1
        handoff = Handoff(
            do_remote_prefill=True,
            **self._address,
            remote_request_id=name,
            remote_lease=new_number(self._given),
            remote_lease_duration=self._options.kv_lease_duration,
            remote_num_tokens=request.num_computed_tokens,
            remote_block_ids=tables,
            remote_first_tokens=firsts,
        )
        self._orders.leases[handoff.remote_lease] = name
        signed = self._trust.sign(handoff, request, self._options.kv_lease_duration)
        return True, msgspec.structs.asdict(signed)

    # ---- D

    def on_new_request(self, request: Any) -> None:
        """Read the parameters of a new request."""
        params = request.kv_transfer_params
        if _is_prefill(params):
            self._shorten(request)
        try:
            if handoff := Handoff.read(params):
                self._trust.check(handoff, request)
                self.hold(request.request_id, handoff)
        except BadParams as error:
            logger.warning("request %s is computed by D: %s", request.request_id, error)

    def hold(self, name: str, handoff: Handoff) -> None:
        """From now on P has KV for this request, and keeps it."""
        self._handoffs[name] = handoff
        lease = self._leases.setdefault(handoff.lease, HeldLease())
        lease.renew_every = min(self._options.heartbeat_interval, handoff.remote_lease_duration / 6)
        lease.state = LeaseState.HELD
        lease.requests.add(name)

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """How many tokens after `computed` ones can be loaded, and whether the load runs between steps."""
        handoff = self._handoffs.get(request.request_id)
        if handoff is None or request.request_id in self._loading:
            return 0, False
        if self._missed.get(handoff.lease.peer, 0.0) > time.monotonic():
            return 0, False
        stop, first = self._stop(handoff, request.num_prompt_tokens), max(handoff.remote_first_tokens)
        # vLLM caches the whole block in which a window begins, and P may have freed the first part.
        windows = [group for group in self._groups if group.window and self._caching]
        begins = [(stop - group.window + 1) // group.tokens * group.tokens for group in windows]
        if stop > computed and all(first <= max(computed, begin) for begin in begins):
            return stop - computed, True
        return 0, False

    def _stop(self, handoff: Handoff, prompt: int) -> int:
        """The number of tokens that D has after a load; 0 if D cannot use P's KV."""
        most = prompt - max(1, self._short)
        if handoff.remote_num_tokens > most and any(group.state for group in self._groups):
            return 0  # P's state includes tokens that D has to compute
        return min(handoff.remote_num_tokens, most)

    def update_state_after_alloc(self, request: Any, blocks: tuple[Any, ...], external: int) -> None:
        """Order the load of `external` tokens into the allocated blocks (KVCacheBlock, of every group)."""
        name = request.request_id
        handoff = self._handoffs.get(name)
        if handoff is None or name in self._loading:
            return
        if external <= 0:
            self._forget(name)
            return
        self._loading.add(name)
        stop = self._stop(handoff, request.num_prompt_tokens)
        loads = [_group_load(group, table, stop) for group, table in zip(self._groups, blocks, strict=True)]
        self._orders.loads[name] = Load(handoff, loads)

    def on_loads_finished(self, names: set[str] | None) -> None:
        """Release P's blocks: all workers have ended these loads."""
        for name in names or ():
            self._loading.discard(name)
            self._forget(name)

    def _forget(self, name: str) -> None:
        """Release P's blocks, unless the load is in progress: workers will still report its end."""
        if name not in self._handoffs or name in self._loading:
            return
        lease = self._leases[self._handoffs.pop(name).lease]
        lease.requests.discard(name)
        if not lease.requests:
            lease.state = LeaseState.UNUSED

    def take_orders(self) -> Orders:
        """The orders for workers since the last call."""
        orders, self._orders = self._orders, Orders()
        orders.releases = self._in_state(LeaseState.UNUSED)
        for lease in orders.releases:
            self._leases[lease].state = LeaseState.RELEASING
        now, held = time.monotonic(), self._in_state(LeaseState.HELD)
        if held and now - self._renewed >= min(self._leases[lease].renew_every for lease in held):
            self._renewed, orders.renewals = now, held
        return orders

    def _in_state(self, state: LeaseState) -> list[Lease]:
        return [lease for lease, held in self._leases.items() if held.state is state]

    def on_worker_report(self, notified: set[Lease], missed: dict[Address, float]) -> None:
        """A worker has notified P of these releases, or has failed to; and these peers do not answer it.

        D computes what these peers have, for so many seconds: no request waits for a load that fails.
        """
        now = time.monotonic()
        for lease in notified & set(self._in_state(LeaseState.RELEASING)):
            del self._leases[lease]
        self._missed = {peer: until for peer, until in self._missed.items() if until > now}
        self._missed |= {peer: now + seconds for peer, seconds in missed.items()}

    @property
    def busy(self) -> bool:
        """Whether the engine must step even without a request: P has yet to be notified of a release."""
        return any(lease.state is not LeaseState.HELD for lease in self._leases.values())


def _is_prefill(params: Any) -> bool:
    """Whether the router asks P to keep the KV of this request for D."""
    asked = params if isinstance(params, dict) else {}
    return bool(asked.get("do_remote_decode") and not asked.get("do_remote_prefill"))


def _group_load(group: Group, table: Any, stop: int) -> GroupLoad:
    """What to load in one group: only into blocks that are neither null nor in the prefix cache."""
    ids = [0 if block.is_null or block.block_hash is not None else block.block_id for block in table]
    first = next((i for i, block in enumerate(ids) if block), len(ids))
    if group.state:
        slot = _slot(group, [block for block in ids if block])
        return GroupLoad(slot, 0, 0, 1) if slot else GroupLoad()
    start = max(first * group.tokens, stop - group.window + 1 if group.window else 0)
    return GroupLoad(ids[first:], first * group.tokens, start, stop) if start < stop else GroupLoad()


def _slot(group: Group, blocks: list[int]) -> list[int]:
    """The block of a state: the last one before those of speculation. Empty if that is the null block."""
    return [block for block in blocks[: max(1, len(blocks) - group.scratch)][-1:] if block]
