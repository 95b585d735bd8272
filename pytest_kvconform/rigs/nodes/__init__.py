"""Two nodes of a Ray cluster: P runs on one and D on the other, each forked from a zygote there.

`cluster.py` reserves the nodes, `host.py` is the actor that has the zygote of a node, and `place.py` is how
handles of engines reach it. Only `Nodes` is imported without Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pytest_kvconform.result import Blocked, HarnessError
from pytest_kvconform.rigs.processes.place import Place

if TYPE_CHECKING:
    from pytest_kvconform.rigs.context import SubjectFacts
    from pytest_kvconform.rigs.nodes.cluster import Cluster
    from pytest_kvconform.settings import Settings
    from pytest_kvconform.subject import Subject


class Nodes:
    """The nodes of one pytest process, which are reserved when the first engine starts."""

    def __init__(
        self, subject: Subject, settings: Settings, address: str, facts: SubjectFacts, start_s: float
    ):
        """`address`: of the zygote where pytest runs. `facts`: what the probe found out there. `start_s`: for
        a zygote to import vLLM.
        """
        self._subject, self._arguments = subject, (settings, address, facts, start_s)
        self._cluster: Cluster | Blocked | HarnessError | None = None

    def places(self) -> Mapping[str, Place]:
        """Where the engines of each role start. Raises Blocked or HarnessError, each time the same."""
        if self._cluster is None:
            self._cluster = self._reserve()
        if isinstance(self._cluster, Exception):
            raise self._cluster.with_traceback(None)  # which would grow with each case
        return self._cluster.places

    def _reserve(self) -> Cluster | Blocked | HarnessError:
        if self._subject.is_store or any(child.is_store for child in self._subject.children):
            return Blocked("--kv-ray: a store's folder is where pytest runs, and P and D run elsewhere")
        if self._subject.services:
            return Blocked("--kv-ray: services listen on 127.0.0.1 where pytest runs; P and D run elsewhere")
        try:
            from pytest_kvconform.rigs.nodes.cluster import Cluster
        except ImportError as error:
            needs = "pip install 'pytest-kvconform[ray]'"
            return Blocked(f"--kv-ray needs Ray, which is not installed ({error}): {needs}")
        try:
            return Cluster(*self._arguments)
        except (Blocked, HarnessError) as error:
            return error

    def close(self) -> list[str]:
        """Give the nodes back, if there are any. Returns sentences about what did not end there."""
        if self._cluster is None or isinstance(self._cluster, Exception):
            return []
        return self._cluster.close()
