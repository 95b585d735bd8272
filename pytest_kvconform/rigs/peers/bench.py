"""What cases about peers run on: every story of a cell is told once, side by side with the others, and its cases judge what it showed."""

from __future__ import annotations

from dataclasses import replace

from pytest_kvconform.result import Blocked, Cell, HarnessError
from pytest_kvconform.rigs.bytes.messages import ByteEngineSpec
from pytest_kvconform.rigs.bytes.specs import byte_engine_spec
from pytest_kvconform.rigs.context import RunContext
from pytest_kvconform.rigs.peers.scenario_engines import LONGEST, Desk, StorySeen
from pytest_kvconform.rigs.peers.scenarios import STORIES
from pytest_kvconform.rigs.peers.stepping import Telling, tell

LEASE_S = 3  # heartbeats prolong it by a third less, and a busy machine may keep an engine from stepping for a second


class PeerBench:
    """Stories of one cell at a time, each with its engines."""

    def __init__(self, context: RunContext):
        self.context = context
        self._seen: dict[Cell, dict[str, StorySeen] | Blocked | HarnessError] = {}

    def observe(self, cell: Cell, name: str) -> StorySeen:
        """What a story shows in a cell. The first question tells all of them. Raises Blocked where engines do not start."""
        if cell not in self._seen:
            try:
                self._seen[cell] = self._tell(cell)
            except (Blocked, HarnessError) as error:
                self._seen[cell] = error
        found = self._seen[cell]
        if isinstance(found, Exception):
            raise found
        return found[name]

    @property
    def lease_s(self) -> float:
        """Seconds for which P may keep blocks that no peer reads."""
        return self.context.lease_s(self._asked_lease_s)

    def require_short_lease(self) -> None:
        """Raise Blocked where the lease takes longer than a run should: stories that wait for one are not told."""
        self.context.require_short_lease(self._asked_lease_s)

    def patience(self, seconds: float) -> float:
        """A wait inside a story: longer with --kv-timeout-scale, never shorter."""
        return self.context.patience(seconds)

    def spec(self, role: str, cell: Cell) -> ByteEngineSpec:
        """How an engine of a role is built."""
        return byte_engine_spec(self.context, cell, role, LONGEST, lease_s=self._asked_lease_s)

    @property
    def _asked_lease_s(self) -> float:
        """Seconds of the lease that the suite asks for."""
        return self.context.patience(LEASE_S)

    def _tell(self, cell: Cell) -> dict[str, StorySeen]:
        """Tell every story of a cell, all at once."""
        long_lease = self.context.has_long_lease(self._asked_lease_s)
        stories = {
            name: story
            for name, story in STORIES[cell.topology].items()
            if not story.leases or not long_lease
        }
        self.context.running.end_all()  # the engines of other cells and rigs
        self.context.progress(f"telling {len(stories)} stories about peers, all at once")
        desk = Desk(self, cell, self.context.deadlines, self.lease_s)
        try:
            first = [
                desk.open(name)
                for name in dict.fromkeys(
                    engine for story in stories.values() for engine in (*story.engines, *story.borrows)
                )
            ]
            for name, story in stories.items():
                actors = tuple(desk.actors[engine] for engine in story.engines)
                borrowed = tuple(desk.actors[engine] for engine in story.borrows)
                waits = borrowed if story.early else tuple(first)
                desk.tellings[name] = Telling(
                    story.tell(desk, *actors, *borrowed), actors, waits, desk.tellings.get(story.after)
                )
            tell(list(desk.tellings.values()), desk.everybody)
            engines = desk.seen()
            logs = {name: actor.handle.process.exceptions(0) for name, actor in desk.actors.items()}
        finally:
            desk.close()
        if refused := next(
            (actor.failed for actor in first if actor.failed and actor.failed.how == "refused"), None
        ):
            raise Blocked(
                f"stands on kv::bytes/start::engines_start[{cell}]: {refused.sentence}",
                refused=refused.declined,
            )
        return {
            name: replace(
                telling.result or StorySeen(),
                engines=engines,
                failed=telling.broken.failed if telling.broken else None,
                broken=telling.broken.name if telling.broken else "",
                begun=telling.begun,
                stuck=telling.stuck,
                logged=tuple(
                    f"{engine}: {line}" for engine in stories[name].engines for line in logs[engine]
                ),
            )
            for name, telling in desk.tellings.items()
        }
