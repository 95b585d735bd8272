"""What cases about peers run on: every story of a cell is told once, side by side with the others, and its cases judge what it showed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from model_matrix import parse_topology
from pytest_kvconform.result import Blocked, Cell, HarnessError
from pytest_kvconform.rigs.bytes.messages import ByteEngineSpec
from pytest_kvconform.rigs.peers.fault_bench import LEASE, PATIENCE_S
from pytest_kvconform.rigs.peers.scenario_engines import LONGEST, Desk, StorySeen
from pytest_kvconform.rigs.peers.scenarios import STORIES
from pytest_kvconform.rigs.peers.stepping import Telling, tell

if TYPE_CHECKING:
    from pytest_kvconform.rigs.bytes.bench import ByteBench

LEASE_S = 3  # heartbeats prolong it by a third less, and a busy machine may keep an engine from stepping for a second


class PeerBench:
    """Stories of one cell at a time, each with its engines."""

    def __init__(self, pattern: ByteBench):
        self.pattern = pattern
        self._seen: dict[Cell, dict[str, StorySeen] | Blocked | HarnessError] = {}

    def observe(self, name: str) -> StorySeen:
        """What a story shows in the current cell. The first question tells all of them. Raises Blocked where engines do not start."""
        cell = self.pattern.bench.cell
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
        """Seconds that P may keep what nobody reads, as configured; see `pattern_faults.FaultBench.lease_s`."""
        key = self.pattern.bench.subject.lease or LEASE
        return float(
            self._config("P").get("kv_connector_extra_config", {}).get(key, self.pattern.faulty.lease_s)
        )

    def needs_short_lease(self) -> None:
        """Raises Blocked where the lease takes longer than a run should: stories that wait for one are not told."""
        if self._long_lease:
            raise Blocked(
                f"P may keep what nobody has read for {self.lease_s:.0f} s: "
                f"declare `lease`, the key of kv_connector_extra_config for these seconds, and a shorter one is asked for ({LEASE_S} s)"
            )

    def patience(self, seconds: float) -> float:
        """A wait inside a story: longer with --kv-timeout-scale, never shorter."""
        return seconds * max(1.0, self.pattern.bench.settings.timeout_scale)

    @property
    def _long_lease(self) -> bool:
        return self.lease_s > self.patience(PATIENCE_S)

    def spec(self, role: str, cell: Cell) -> ByteEngineSpec:
        """How an engine of a role is built."""
        tp = dict(zip("PD", parse_topology(cell.topology), strict=True))[role]
        spec = self.pattern.spec(role, cell, tp, LONGEST)
        return msgspec.structs.replace(spec, kv_transfer_config=spec.kv_transfer_config | self._config(role))

    def _config(self, role: str) -> dict[str, Any]:
        """The fields of vLLM's KVTransferConfig, with a short lease where it is known how, unless the user has given one."""
        config, key = self.pattern.config(role), self.pattern.bench.subject.lease
        if key:
            config = config | {
                "kv_connector_extra_config": {key: self.patience(LEASE_S)}
                | config.get("kv_connector_extra_config", {})
            }
        return config

    def _tell(self, cell: Cell) -> dict[str, StorySeen]:
        """Tell every story of a cell, all at once."""
        bench = self.pattern.bench
        stories = {
            name: story
            for name, story in STORIES[cell.topology].items()
            if not story.leases or not self._long_lease
        }
        bench.drop()  # the engines of other cells and rigs
        bench.progress(f"telling {len(stories)} stories about peers, all at once")
        desk = Desk(self, cell, self.pattern.limits, self.lease_s)
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
