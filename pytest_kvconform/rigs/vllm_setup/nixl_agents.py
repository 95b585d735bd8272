"""Overrides of NIXL: load its UCX plugin once, turn progress threads off, replace the class of agents.

A NIXL agent's progress thread polls without a pause (nixl/_api.py sets pthrDelay = 0): one core per agent,
all the time, half of it in the kernel. P at TP 1 and D at TP 2 are three agents; on two cores UCX's spin
locks then wait for threads that are not running, and a hand-over of 0.2 s takes up to 28 s
(docs/findings.md). Without the thread an agent makes progress in every call: connectors poll in each step of
their engine, and the engine rig steps both engines while a transfer is under way. On a GPU machine nothing is
changed.

Without that thread an agent is not for several threads at once unless it is asked to be, and the push
connector has a thread that writes while the engine's own asks for states. Unsynchronised, one of two writes
was lost in 3 runs of 3; otherwise in none.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable
from typing import Any

# Modules that refer to NIXL's agent class, with their name for it; then the module that had been loaded last
# when these were found.
_users: list[tuple[Any, str]] = []
_last = ""


def preload() -> bool:
    """Load the library of NIXL's UCX backend, so that forked engines find it loaded (0.4 s each).

    Returns whether NIXL is installed. The agent made for this has no backend and no thread, and is gone
    before anything is forked.
    """
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError:
        return False
    agent = nixl_agent("preload", nixl_agent_config(enable_prog_thread=False, backends=[]))
    if "UCX" in agent.get_plugin_list():
        agent.get_plugin_params("UCX")
    return True


def without_progress_threads() -> None:
    """Turn off the progress thread of agents that are made from now on.

    Their callers wait for each other. `wants_progress_thread` of a configuration notes what was asked for. A
    configuration whose thread is left as it is, as on a GPU, has no such attribute.
    """
    from nixl._api import nixl_agent_config, nixl_thread_sync_t

    original = nixl_agent_config.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.wants_progress_thread = self.enable_pthread
        self.enable_pthread = False
        self.sync_mode = self.sync_mode or nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT

    nixl_agent_config.__init__ = __init__


def replace_agent_class(replacement: Callable[[Any, type[Exception]], Any]) -> bool:
    """Put another class in the place of `nixl_agent`, in this process and in what it forks.

    `replacement` gets the class in use and the exception that NIXL's backends raise, and returns the class to
    use. Modules that imported the class already (vLLM's nixl_utils and its connectors among them) get the new
    one under the name that they gave it. Returns whether NIXL is installed.
    """
    try:
        from nixl import _api, _bindings
    except ImportError:
        return False
    used = _api.nixl_agent
    new = replacement(used, getattr(_bindings, "nixlBackendError", RuntimeError))
    if new is not used:
        find_users_of_agent_class()
        for module, name in _users:
            if vars(module).get(name) is used:
                setattr(module, name, new)
    return True


def find_users_of_agent_class() -> None:
    """Find the modules that refer to `nixl_agent` by now.

    What is forked after this call looks only at modules that were loaded later: a look at all modules copies
    the whole inherited heap (0.3 s).
    """
    global _last
    with contextlib.suppress(ImportError):
        from nixl._api import nixl_agent

        new = itertools.takewhile(lambda name: name != _last, reversed(sys.modules))
        for module in [sys.modules[name] for name in new]:
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is nixl_agent:
                    _users.append((module, name))
        _last = next(reversed(sys.modules))
