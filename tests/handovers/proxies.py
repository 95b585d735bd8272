"""Hand-overs of an author: what the proxy of a connector does, as functions. They need no vLLM."""

from __future__ import annotations

from typing import Any

Params = dict[str, Any]


def by_room(side: str, params: Params, returned: Params | None) -> Params:
    """Both requests are sent at once, and name a room where P and D meet."""
    return {"room": params["transfer_id"], "part": "gives" if side == "P" else "takes"}


def by_room_and_rank(side: str, params: Params, returned: Params | None) -> Params:
    """The same with a rank, which may be 0, a word that may be false, and one that is null."""
    return by_room(side, params, returned) | {"rank": 0, "warm": False, "note": None}


def by_room_with_a_note(side: str, params: Params, returned: Params | None) -> Params:
    """The same with a key that is null."""
    return by_room(side, params, returned) | {"note": None}


def one_after_the_other(side: str, params: Params, returned: Params | None) -> Params | None:
    """P is asked first, and D gets what P returned: as vLLM's own proxy does."""
    return {"do_remote_decode": True} if side == "P" else returned


def raises(side: str, params: Params, returned: Params | None) -> Params:
    return {"room": params["room"]}


def ends(side: str, params: Params, returned: Params | None) -> Params:
    raise SystemExit(3)


def returns_a_list(side: str, params: Params, returned: Params | None) -> Any:
    return [side]


def forgets_p(side: str, params: Params, returned: Params | None) -> Any:
    return params if side == "D" else None
