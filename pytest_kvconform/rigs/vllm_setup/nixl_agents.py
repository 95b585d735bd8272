"""NIXL on a small machine: load its UCX plugin once, and keep its progress threads from eating the cores that engines share.

A NIXL agent's progress thread polls without a pause (nixl/_api.py sets pthrDelay = 0): one core per agent, all the time, half of it in the
kernel. P at TP 1 and D at TP 2 are three agents; on two cores UCX's spin locks then wait for threads that are not running, and a hand-over
of 0.2 s takes up to 28 s (docs/findings.md). Without the thread an agent makes progress in every call: connectors poll in
each step of their engine, and this rig steps both engines while a transfer is under way. On a GPU machine nothing is changed.

Without that thread an agent is not for several threads at once unless it is asked to be, and the push connector has a thread that writes
while the engine's own asks for states. Unsynchronised, one of two writes was lost in 3 runs of 3; otherwise in none.
"""

from __future__ import annotations

from typing import Any


def preload() -> bool:
    """Load the library of NIXL's UCX backend, so that forked engines find it loaded (0.4 s each). Returns whether NIXL is installed.

    The agent made for this has no backend and no thread, and is gone before anything is forked.
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
    """Turn the progress thread of agents that are made from now on off, and let calls of several threads wait for each other."""
    from nixl._api import nixl_agent_config, nixl_thread_sync_t

    original = nixl_agent_config.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.enable_pthread = False
        self.sync_mode = self.sync_mode or nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT

    nixl_agent_config.__init__ = __init__
