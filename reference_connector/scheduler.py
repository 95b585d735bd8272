"""What to hand over: the half of the connector that lives in vLLM's scheduler. It moves nothing and imports nothing of vLLM.

On P, when a request with `do_remote_decode` has ended: keep its blocks under a lease and tell the router where they lie (`finished`).
On D, for a request with `do_remote_prefill`, in this order, and each at most once:

    known     the parameters are read and checked. If they are wrong the request is computed like any other
    matched   how many tokens P has for us; asked again and again until vLLM finds room, and without any effect
    placed    vLLM has given it blocks: load them, or, if there is nothing to load, let P have its own back
    loaded    all workers have ended the load, well or not: let P have its blocks back. No rank can still be reading, so one message
              is enough, whatever the number of ranks on either side

A request that was placed once is never loaded again: after a preemption or a failed load D computes it, P's blocks are gone.

**D never loads the last token of a prompt**, since it computes that one in any case. Where it would do harm if P computed it, P stops
before it, too (`_shorten`): a recurrent state cannot be taken back by a token; a sliding window is laid out for the token after it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from reference_connector.messages import BadParams, Handoff, Lease, Load, Orders, Part, read_params

logger = logging.getLogger("vllm.reference_connector.scheduler")
COMPLETE = (
    "FINISHED_LENGTH_CAPPED",
    "FINISHED_STOPPED",
)  # RequestStatus of a prompt that was computed to its end
SHORTENED = "_reference_connector_shortened"  # key of a request's own parameters


@dataclass(frozen=True)
class Group:
    """What the scheduler has to know of a KV cache group. Here and in all messages groups are those of KVCacheConfig.transfer_groups."""

    tokens: int  # per block
    state: bool = False
    window: int = 0  # tokens; 0: none
    scratch: int = 0  # blocks at the end of a state's table that are not the state


class Scheduler:
    """Both roles; an engine may have both at once."""

    def __init__(
        self,
        groups: tuple[Group, ...],
        address: dict[str, Any],
        lookahead: int,
        heartbeat: float,
        caching: bool,
    ):
        """`address`: the fields of a Handoff that say where this engine is; `lookahead`: vLLM's num_prefill_lookahead_tokens."""
        self._groups, self._address, self._heartbeat, self._caching = groups, address, heartbeat, caching
        self._short = max(
            int(any(g.state or g.window for g in groups)), lookahead - 1
        )  # tokens of a prompt that P leaves to D
        self._last_lease = 0
        self._handoffs: dict[str, Handoff] = {}  # requests of D that P has something for
        self._placed: set[str] = set()  # those of them whose load is under way
        self._held: dict[
            Lease, set[str]
        ] = {}  # the requests that need a lease: several, if the router gave them one answer of P
        self._to_release: dict[Lease, bool] = {}  # whether workers have been told
        self._renewed = 0.0
        self._orders = Orders()

    # ---- P -------------------------------------------------------------------------------------------------------------------

    def _shorten(self, request: Any) -> None:
        """Let P stop before the tokens that D is to compute. A request is shortened once, whatever vLLM does with it."""
        params = request.kv_transfer_params
        done = not self._short or params.get(SHORTENED) or request.num_prompt_tokens <= self._short
        if done or request.get_skip_reading_prefix_cache():  # prompt logprobs: D computes the whole prompt
            return
        if request.prompt_token_ids is not None:
            del request.prompt_token_ids[-self._short :]
        else:
            request.prompt_embeds = request.prompt_embeds[: -self._short]
        del request._all_token_ids[-self._short :]
        request.num_prompt_tokens -= self._short
        request.max_tokens = 1
        params[SHORTENED] = True

    def finished(self, request: Any, blocks: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """A request is over. Returns whether its blocks are kept, and the parameters for D.

        `blocks`: of every group, those of computed tokens; what a window has left behind is 0, vLLM's null block.
        """
        self._forget(request.request_id)
        params = request.kv_transfer_params
        asked = (
            isinstance(params, dict)
            and params.get("do_remote_decode")
            and not params.get("do_remote_prefill")
        )
        if not asked or request.status.name not in COMPLETE or not request.num_computed_tokens:
            return False, None
        firsts = [next((i for i, block in enumerate(table) if block), len(table)) for table in blocks]
        tables = [list(table[first:]) for table, first in zip(blocks, firsts, strict=True)]
        for index, group in enumerate(self._groups):
            if group.state:
                tables[index], firsts[index] = _slot(group, blocks[index]), 0
        if not all(tables):
            logger.warning(
                "request %s is not handed over: it has no blocks in one of its groups", request.request_id
            )
            return False, None
        self._last_lease += 1
        self._orders.leases[self._last_lease] = request.request_id
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            **self._address,
            "remote_request_id": request.request_id,
            "remote_lease": self._last_lease,
            "remote_num_tokens": request.num_computed_tokens,
            "remote_block_ids": tables,
            "remote_first_tokens": [
                first * group.tokens for first, group in zip(firsts, self._groups, strict=True)
            ],
        }

    # ---- D -------------------------------------------------------------------------------------------------------------------

    def known(self, request: Any) -> None:
        """A request has come."""
        params = request.kv_transfer_params
        if (
            isinstance(params, dict)
            and params.get("do_remote_decode")
            and not params.get("do_remote_prefill")
        ):
            self._shorten(request)
            return
        try:
            handoff = read_params(params)
        except BadParams as error:
            logger.warning("request %s is computed here: %s", request.request_id, error)
            return
        if handoff is not None:
            self._handoffs[request.request_id] = handoff
            self._held.setdefault(handoff.lease, set()).add(request.request_id)

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """How many tokens behind the first `computed` can be loaded, and whether that happens between steps."""
        handoff = self._handoffs.get(request.request_id)
        if handoff is None or request.request_id in self._placed:
            return 0, False
        stop, first = self._stop(handoff, request.num_prompt_tokens), max(handoff.remote_first_tokens)
        # vLLM caches the block in which a window begins as a whole, and P may have given the first part of it back.
        blocks = [
            (stop - group.window + 1) // group.tokens * group.tokens
            for group in self._groups
            if group.window and self._caching
        ]
        return (
            (stop - computed, True)
            if stop > computed and all(first <= max(computed, b) for b in blocks)
            else (0, False)
        )

    def _stop(self, handoff: Handoff, prompt: int) -> int:
        """The number of tokens after a load; 0 if what P has is of no use."""
        most = prompt - max(1, self._short)
        if handoff.remote_num_tokens > most and any(group.state for group in self._groups):
            return 0  # P's state has seen too much
        return min(handoff.remote_num_tokens, most)

    def placed(self, request: Any, blocks: tuple[Any, ...], external: int) -> None:
        """vLLM has given the request blocks (KVCacheBlock, of every group), `external` tokens of which are to be loaded."""
        name = request.request_id
        handoff = self._handoffs.get(name)
        if handoff is None or name in self._placed:
            return
        if external <= 0:
            self._forget(name)
            return
        self._placed.add(name)
        stop = self._stop(handoff, request.num_prompt_tokens)
        parts = [_part(group, table, stop) for group, table in zip(self._groups, blocks, strict=True)]
        self._orders.loads[name] = Load(handoff, parts)

    def loaded(self, names: set[str] | None) -> None:
        """All workers have ended these loads."""
        for name in names or ():
            self._placed.discard(name)
            self._forget(name)

    def _forget(self, name: str) -> None:
        """The request needs P no more, unless its load is under way: workers will yet report the end of that."""
        if name not in self._handoffs or name in self._placed:
            return
        lease = self._handoffs.pop(name).lease
        self._held[lease].discard(name)
        if not self._held[lease]:
            del self._held[lease]
            self._to_release[lease] = False

    def orders(self) -> Orders:
        """What is new since the last call."""
        orders, self._orders = self._orders, Orders()
        orders.releases = [lease for lease, told in self._to_release.items() if not told]
        self._to_release.update(dict.fromkeys(orders.releases, True))
        now = time.monotonic()
        if self._held and now - self._renewed >= self._heartbeat:
            self._renewed, orders.renewals = now, list(self._held)
        return orders

    def released(self, leases: set[Lease]) -> None:
        """A worker has told P, or has given it up."""
        self._to_release = {lease: told for lease, told in self._to_release.items() if lease not in leases}

    @property
    def busy(self) -> bool:
        """Whether the engine has to go on stepping although it may have no request: P has not been told yet."""
        return bool(self._to_release)


def _part(group: Group, table: Any, stop: int) -> Part:
    """What of a group is to be loaded, into the request's own blocks: neither null nor in the prefix cache (those have a hash)."""
    own = [not block.is_null and block.block_hash is None for block in table]
    if not any(own):
        return Part()
    if group.state:
        return Part(
            0, 1, _slot(group, [block.block_id for block, mine in zip(table, own, strict=True) if mine])
        )
    first = own.index(True)
    start = max(first * group.tokens, stop - group.window + 1 if group.window else 0)
    if start >= stop:
        return Part()
    return Part(
        start,
        stop,
        [block.block_id if mine else 0 for block, mine in zip(table, own, strict=True)][first:],
        first * group.tokens,
    )


def _slot(group: Group, blocks: list[int]) -> list[int]:
    """The block of a state: the last but for those that speculation writes to. Empty if that is the null block."""
    return [block for block in blocks[: max(1, len(blocks) - group.scratch)][-1:] if block]
