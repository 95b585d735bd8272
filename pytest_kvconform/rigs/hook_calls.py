"""The last calls of a connector's hooks in each process of an engine, for the timeline of a finding.

A finding shows the end of what vLLM asked and what the connector answered, on P and D. An engine that polls
makes the same calls again and again: they are counted in one record, so that the last records reach back to
where something happened. Of an answer a short text is kept.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

from msgspec.structs import replace

from pytest_kvconform.case_outcome import MOST_CALLS
from pytest_kvconform.result import HookCall, message_of, utf8

NEAR = 12  # a call like one of so many last records is counted there
MOST_CHARACTERS = 100  # characters of an answer, and of an id
ITEMS = 3  # of a collection that are shown
DEEPEST = 2  # collections inside of each other that are shown
REQUESTS = 8  # ids of a record
# hooks that vLLM calls in each step, and of which only an answer is of interest
_POLLS = frozenset(
    (
        "build_connector_worker_meta",
        "clear_connector_metadata",
        "get_block_ids_with_load_errors",
        "get_kv_connector_kv_cache_events",
        "get_kv_connector_stats",
        "handle_preemptions",
        "has_pending_push_work",
        "take_events",
    )
)
_NOTHING = ("", "False", "()", "[]", "{}")

_in_process: list[LastCalls] = []


class LastCalls:
    """The last calls of one half of a connector. `side`: name of the engine. `rank` None: scheduler half.

    `most`: how many records are kept.
    """

    def __init__(self, side: str, rank: int | None = None, most: int = MOST_CALLS):
        self.side, self.rank = side, rank
        self._kept: deque[HookCall] = deque(maxlen=most)
        _in_process.append(self)

    def note(self, began: float, hook: str, arguments: tuple[Any, ...], answer: str) -> None:
        """Note a call that has ended. `began`: of time.time(). `answer`: of `short` or `raised`."""
        if answer in _NOTHING and hook in _POLLS:
            return
        requests, given = _requests(arguments), _given(hook, arguments)
        for place in range(len(self._kept) - 1, max(-1, len(self._kept) - 1 - NEAR), -1):
            one = self._kept[place]
            if (one.hook, one.requests, one.given, one.answer) == (hook, requests, given, answer):
                self._kept[place] = replace(one, times=one.times + 1)
                return
        self._kept.append(
            HookCall(
                at=began,
                side=self.side,
                rank=self.rank,
                hook=hook,
                requests=requests,
                given=given,
                answer=answer,
            )
        )

    def take(self) -> list[HookCall]:
        """Return the calls, and forget them."""
        taken = list(self._kept)
        self._kept.clear()
        return taken


def take_all(worker: Any = None) -> list[HookCall]:
    """Return the calls of all connectors in this process, and forget them."""
    return [call for one in _in_process for call in one.take()]


# ---- texts -------------------------------------------------------------------------------------------------

_PLAIN = (type(None), bool, int, float, str, bytes)
_SEVERAL = (list, tuple, set, frozenset, dict)


def short(value: Any) -> str:
    """Return a short text of an answer, "" for None."""
    if value is None:
        return ""
    try:
        return _cut(_text(value))
    except Exception:  # an object of the connector may do what it likes
        return _cut(type(value).__name__)


def raised(error: BaseException) -> str:
    """Return a short text of an exception that a hook raised."""
    message = " ".join(message_of(error).split())
    return _cut(f"raised {type(error).__name__}" + (f": {message}" if message else ""))


def _text(value: Any, depth: int = 0) -> str:
    kind = type(value)
    if kind in _PLAIN:
        return repr(value[:MOST_CHARACTERS] if kind in (str, bytes) else value)
    if kind in _SEVERAL and depth <= DEEPEST:
        return _several(value, depth + 1)
    if depth:
        return kind.__name__
    fields = [
        f"{name.lstrip('_')}: {_text(one, 1)}"
        for name in _fields(value)
        if type(one := getattr(value, name)) in (str, *_SEVERAL) and one
    ]
    return f"{kind.__name__}({', '.join(fields)})" if fields else f"{kind.__name__}()"


def _several(value: Any, depth: int) -> str:
    items = sorted(value, key=repr) if isinstance(value, set | frozenset) and len(value) < NEAR else value
    shown = [_text(one, depth) for one in islice(items, ITEMS)]
    more = [f"{len(value) - ITEMS} more"] if len(value) > ITEMS else []
    ends = "()" if isinstance(value, tuple) else "[]" if isinstance(value, list) else "{}"
    return f"{ends[0]}{', '.join([*shown, *more])}{ends[1]}"


def _fields(value: Any) -> list[str]:
    names: Any = getattr(type(value), "__struct_fields__", None) or getattr(value, "__dict__", None)
    return list(names or getattr(type(value), "__dataclass_fields__", ()))


def _requests(arguments: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the ids of the requests that a call is about."""
    first: Any = arguments[0] if arguments else None
    try:
        found = getattr(first, "request_id", None)
    except Exception:  # of metadata, which is the connector's
        return ()
    if type(found) is str:
        return (found[:MOST_CHARACTERS],)
    ids = set(first) if type(first) in (set, frozenset) else set[Any]()
    for name in ("finished_sending", "finished_recving"):
        reported: Any = getattr(first, name, None)
        ids |= reported if type(reported) in (set, frozenset) else set()
    return tuple(sorted(one[:MOST_CHARACTERS] for one in ids if type(one) is str)[:REQUESTS])


def _given(hook: str, arguments: tuple[Any, ...]) -> str:
    """Return a short text of the metadata that a rank gets; of other hooks the whole numbers that they get,
    such as num_computed_tokens.
    """
    if hook == "bind_connector_metadata" and arguments:
        return short(arguments[0])
    return ", ".join(str(one) for one in arguments if type(one) is int)


def _cut(text: str) -> str:
    text = utf8(text)
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 3]}..."
