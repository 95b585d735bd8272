"""The one wrapper of hooks: who looks at the calls of a connector's hook, or changes them, goes around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Around = Callable[..., Any]  # around(hook, *args, **kwargs) -> answer; `hook` is called as it was before
WRAPPED = "_kvconform_wrapped"  # attribute of a connector: wrapped hook -> what its own attribute was
_NONE = object()  # it had none: the hook was that of its class


def around(connector: Any, name: str, function: Around) -> None:
    """Let vLLM's calls of a hook be calls of function(hook, *args, **kwargs); the last one is the outermost.

    The hook is wrapped on the object: its class, and with it isinstance(connector, SupportsHMA), stays as it
    is. A hook that the object lacks stays so.
    """
    if (hook := getattr(connector, name, None)) is None:
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(hook, *args, **kwargs)

    own = vars(connector)
    own.setdefault(WRAPPED, {}).setdefault(name, own.get(name, _NONE))
    setattr(connector, name, call)


def unwrap(connector: Any) -> None:
    """Let the hooks be what they were.

    The wrappers hold the connector, whose end may be that of its threads and ports.
    """
    own = vars(connector)
    for name, before in own.pop(WRAPPED, {}).items():
        own.pop(name, None)
        if before is not _NONE:
            setattr(connector, name, before)
