"""Wrong KV in one sentence: the first word that is not what it should be, and what it tells about itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from pytest_kvconform.kvspace.kinds import COLLATERAL, SAME, ZEROED
from pytest_kvconform.kvspace.pools.addresses import ATTENTION, POISON, STATE
from pytest_kvconform.rigs.bytes.messages import Check

OWNERS = 251  # numbers of requests that words can tell apart


def wrong_kv(check: Check, base: int) -> str:
    """One sentence about what a load has left wrong; "" if everything is right. `base`: the number in words
    of what a script calls request 0.
    """
    after = f"after the load of {check.request}"
    runs = check.pool.runs
    due = runs[(runs["kind"] != SAME) & (runs["kind"] != COLLATERAL)]
    if len(due):
        order = np.lexsort((due["expected"]["token"], due["region"]))
        run = due[order[0]]
        whose = f"{after} (request {_number(run['expected'], base)})"
        layer = check.pool.regions[int(run["region"])].layer
        where = f"block {run['block']} of {layer} is {_content(run, base)}"
        tokens = int(run["expected"]["token"])
        if run["expected"]["kind"] == STATE:
            return f"{whose}, the state after {tokens} tokens in {where}"
        return f"{whose}, token {tokens} in {where}"
    if check.missing:
        first = check.missing[0]
        return f"{after}, token {first.tokens[0]} of {first.layers[0]} has no block"
    if check.pool.wrong:
        blocks = sorted({int(block) for block in runs["block"][runs["kind"] == COLLATERAL]})
        return f"{after}, bytes were written where nothing was due, in blocks {blocks[:8]}"
    return ""


def _content(run: Any, base: int) -> str:
    """What a word tells about itself."""
    found = run["found"]
    if found["kind"] == POISON:
        return "poison, as before the first write"
    if run["kind"] == ZEROED:
        return "zeros"
    who = f"of request {_number(found, base)}, computed by engine {found['engine']}"
    if found["kind"] == STATE:
        return f"the state after {found['token']} tokens {who}"
    return (
        f"token {found['token']} {who}"
        if found["kind"] == ATTENTION
        else "no word that an engine has written"
    )


def _number(address: Any, base: int) -> int:
    return int(address["owner"] - base) % OWNERS
