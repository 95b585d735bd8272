"""How much of a prompt a load must bring. It is the connector's choice, which the connector may declare.

A connector that declares nothing should load every whole block (KV-HANDOVER-003), and may load fewer of them.
A connector that declares `load_granularity` or `min_load` loads as much as that, and the prompts of all cases
are longer by as many tokens as a load then needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from pytest_kvconform.rigs.context import LONGER, declared_addition, declared_amount
from pytest_kvconform.rigs.engine.messages import Trace, Unfinished
from pytest_kvconform.subject import Subject

Observed = TypeVar("Observed")


class HandedOver(Protocol):
    """One request of an observation."""

    @property
    def name(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def prefill(self) -> Trace: ...
    @property
    def decode(self) -> Trace: ...


class Ended(Protocol):
    """An observation of a hand-over."""

    @property
    def requests(self) -> Sequence[HandedOver]: ...
    @property
    def failed(self) -> object: ...
    @property
    def stuck(self) -> tuple[Unfinished, ...]: ...


def due_end(subject: Subject, r: HandedOver, block: int, drops: bool = False) -> int:
    """Return the token of a prompt at which D's own computation begins at the latest, if the connector loads
    as much as it declares, or else all whole blocks of `block` tokens. D's own hit: no load is due.

    A load is a multiple of the granularity, or ends at one. D computes the last token in any case.
    `drops`: see `due_end_of`.
    """
    return due_end_of(subject, r.length, r.decode.local_tokens, block, drops)


def due_end_of(subject: Subject, length: int, local: int, block: int, drops: bool = False) -> int:
    """`due_end` of a prompt of `length` tokens, of which `local` are D's own hit.

    `drops`: of a store's last block, or last load_granularity, nothing is due. With a draft model vLLM
    computes the last block of a prefix hit again (`use_eagle_block_drop`), and so do its own stores.
    """
    step, last = subject.load_granularity or block, length - 1
    end = min(last // step * step, local + (last - local) // step * step)
    if drops:
        end -= step
    return end if end - local >= max(1, subject.min_load) else local


def load_is_due(subject: Subject, r: HandedOver, block: int, drops: bool = False) -> bool:
    """Whether the prompt is long enough for a load. `drops`: see `due_end_of`."""
    return due_end(subject, r, block, drops) > r.decode.local_tokens


def loads(observed: Ended) -> bool:
    """Whether D loaded something for a request."""
    return any(r.decode.external_tokens for r in observed.requests)


def observe_long_enough(
    subject: Subject, block: int, observe: Callable[[int], Observed], to_add: Callable[[Observed], int]
) -> tuple[Observed, int]:
    """Observe with prompts that are long enough for the connector's loads: with as many more tokens as it
    declares to need, or else as `to_add` finds. Returns also how many tokens were added.

    `observe`: tokens to add to each prompt -> the observation, which is made once. `to_add`: the observation
    without further tokens -> how many to add. `block`: tokens of a block.
    """
    if declared_amount(subject):
        by = declared_addition(subject, block)
        return observe(by), by
    found = observe(0)
    by = to_add(found)
    return (observe(by), by) if by else (found, 0)


def tokens_to_add(subject: Subject, block: int, found: Ended, longest: Callable[[int], Any]) -> int:
    """Return how many tokens to add to the prompts of a cell for a connector that declares no amount.

    LONGER if D loads nothing of the cell's longest prompt, but something of one that is longer by so many
    tokens; otherwise 0.

    `found`: a hand-over of the cell. `longest`: tokens to add -> the observation of the longest prompt.
    """
    if found.failed or found.stuck or loads(found):
        return 0
    if not any(load_is_due(subject, r, block) for r in found.requests) or loads(longest(0)):
        return 0
    return LONGER if loads(longest(LONGER)) else 0
