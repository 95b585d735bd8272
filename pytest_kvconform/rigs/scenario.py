"""Scenarios, transfers and faults: what is handed over, as data. One of them is one variant of a case."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

VOCABULARY = range(5, 500)  # token ids that every tiny model has and none treats as special


@dataclass(frozen=True)
class Prompt:
    """One prompt. D's own prefix cache has the first `warm` tokens before the hand-over.

    `turn`: the first `turn` tokens are an earlier turn, which was handed over before and is in the prefix
    caches of both engines.
    """

    tokens: tuple[int, ...]
    warm: int = 0
    turn: int = 0


@dataclass(frozen=True)
class Scenario:
    """Requests that are handed over together."""

    name: str  # the last word of a case's id
    prompts: tuple[Prompt, ...]
    max_tokens: int = 3  # tokens D generates
    n: int = 1  # samples of one prompt
    budget: int = 0  # tokens P may compute in a step; 0: no chunking
    abort: str = ""  # "prefill": P's request; "waiting", "loading": D's
    measure_noise: bool = False  # run the oracle twice even if subject and oracle agree to the last bit
    # whether KV must move: D computes the last token itself, and finds whole blocks in its own cache
    due: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def unread(self) -> bool:
        """Whether D reads nothing that P keeps for it: D aborts first, or has whole prompts in its cache."""
        return self.abort == "waiting" or (not self.due and any(prompt.warm for prompt in self.prompts))

    def expanded(self) -> tuple[Prompt, ...]:
        """One prompt per request on D."""
        return self.prompts * self.n


@functools.lru_cache(1 << 12)  # each plan of a run makes the same prompts
def tokens(length: int, seed: int = 0, shared: int = 0) -> tuple[int, ...]:
    """A prompt of pseudo-random tokens.

    Prompts of different seeds agree in the first `shared` tokens and differ at the next.
    """
    size = len(VOCABULARY)
    return tuple(
        VOCABULARY[((i * 2654435761 + (0 if i < shared else (seed + 1) * 40503)) >> 7) % size]
        for i in range(length)
    )


def with_other_tokens(prompt: tuple[int, ...], secret: int) -> tuple[int, ...]:
    """A prompt of the same length in tokens that no other secret gives.

    Prompts of one secret share the prefixes that they shared before.
    """
    by, first, size = random.Random(secret), VOCABULARY.start, len(VOCABULARY)
    return tuple(first + (token - first + by.randrange(size)) % size for token in prompt)


def with_new_tokens(prompts: tuple[Prompt, ...]) -> tuple[Prompt, ...]:
    """Prompts of the same lengths and shared prefixes, in tokens that no store has.

    A store keeps what earlier runs have saved.
    """
    secret = random.SystemRandom().getrandbits(64)
    return tuple(replace(prompt, tokens=with_other_tokens(prompt.tokens, secret)) for prompt in prompts)


# How a transfer fails: its state is "ERR"; transfer() raises; check_xfer_state() raises.
STATUS, POST, POLL = "status", "post", "poll"
# What happens to notifications.
TWICE, LATE, NEVER, REVERSED = "twice", "late", "never", "reversed"
MANY = 64  # requests for which P writes while faults are set


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What the transport of one engine does wrong. The default: nothing.

    An engine may get several of these records; for each transfer the first one that fits holds. A round of a
    transfer is one question for its state, see bytes/faulty/nixl.py.
    """

    ranks: tuple[int, ...] = ()  # tensor parallel ranks that it is for; empty: all
    # Numbers of the transfers of each NIXL agent that it is for, counted from 0 since
    # these faults were set; empty: all.
    transfers: tuple[int, ...] = ()
    hold: int = 0  # rounds before a transfer is begun, or before it fails; until then its state is "PROC"
    late: int = 0  # rounds for which the state of a completed transfer is still "PROC"
    fail: str = ""  # STATUS, POST or POLL: no byte is moved
    # Rounds after a failure in which the handle cannot be released, and after which
    # the bytes are moved all the same.
    linger: int = 0
    # TWICE, LATE, NEVER or REVERSED: what happens to notifications that arrive at this engine
    notifications: str = ""
    # Rounds that a LATE notification waits, or the second copy of TWICE; the longest that
    # REVERSED waits for another one.
    delay: int = 0


def faults_where_p_writes(faults: tuple[Faults, ...], p_ranks: int, d_ranks: int) -> tuple[Faults, ...]:
    """The faults of a load on ranks of D, for a P that writes to D.

    Where D has more ranks than P, a rank of P writes each request to one rank of D after the other. What
    faults name by the rank of D is then one in so many transfers of P.
    """
    if not any(rank >= p_ranks for one in faults for rank in one.ranks):
        return faults
    each = d_ranks // p_ranks
    return tuple(
        msgspec.structs.replace(
            one,
            ranks=(rank // each,),
            transfers=tuple(n * each + rank % each for n in one.transfers or range(MANY)),
        )
        for one in faults
        for rank in one.ranks or range(d_ranks)
    )


@dataclass(frozen=True)
class Turn:
    """The next turn of a conversation. A router gives its request to P, with what D returned at the end of
    the first turn: P loads what D has, and hands the prompt over to D as it did before.
    """

    answer: int  # tokens that D generates in the first turn; the next prompt begins with it and with these
    more: int  # tokens behind them; negative: the next prompt ends so many tokens before them
    forgets: bool = True  # whether P's prefix cache has lost the first turn, as that of another P
    late: bool = False  # whether the request comes when D has freed its blocks, and others have them


@dataclass(frozen=True)
class Transfer:
    """What the byte rig hands over: prompts of which every byte of KV is known beforehand."""

    name: str  # the last word of a case's id
    prompts: tuple[Prompt, ...]
    budget: int = 0  # tokens of each prompt that P may compute in a step; 0: no chunking
    reuse: bool = False  # other requests of P overwrite blocks as soon as they are free
    generates: int = 1  # tokens P generates before it hands over
    # "P": its request, while its prompt is computed in chunks; "D": its request, after its first token
    preempt: str = ""
    faults: tuple[Faults, ...] = ()  # what the transport of either engine does wrong; empty: NIXL as it is
    fails: bool = False  # whether the faults let the load of a request fail
    policy: str = "fail"  # vLLM's kv_load_failure_policy, where there are faults
    beside: bool = False  # whether the requests that compute `warm` on D go on until the load has ended
    graphs: bool = False  # whether steps of one token a request are replayed as full CUDA graphs
    fake: str = ""  # "first", "last": where a fake connector is beside the subject in MultiConnector
    # What follows the transfer of its only prompt. `reuse` is for D's blocks then, and `preempt` for P's
    # request of the next turn.
    turn: Turn | None = None
    abort: str = ""  # with `turn`: P's request of the next turn ("P"), or D's first one while it generates

    def __str__(self) -> str:
        return self.name


Handed = TypeVar("Handed", Scenario, Transfer)


def lengthened(what: Handed, by: int) -> Handed:
    """The same scenario or transfer with `by` more tokens at the end of each prompt."""
    if not by:
        return what
    prompts = tuple(
        replace(prompt, tokens=prompt.tokens + tokens(by, seed=len(prompt.tokens))) for prompt in what.prompts
    )
    return replace(what, prompts=prompts)
