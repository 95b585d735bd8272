"""Soak: thousands of hand-overs between two byte engines over real NIXL, disturbed as users disturb them.

    python ci/soak.py [--handovers 5000] [--connector NAME|MODULE:CLASS] [--geometry gpt_oss_20b] [--seed 0]
                      [--lease 2]

The soak looks for wrong words and for leaks. P computes up to four prompts at a time, some with a common
beginning, and D takes them. The seed chooses the fate of each prompt (`FATES`). After a fifth of the
hand-overs the soak kills P before D has read P's answers, and starts P again at the same port. P overwrites
blocks the moment they are free. After each load the whole pool of D is compared byte by byte
(pytest_kvconform/rigs/bytes/checks.py), and both pools at every rest.

There are 25 rests. At a rest every request has ended and every lease is over: neither engine may hold blocks
or requests, and neither may have more of NIXL's objects, threads and open files than in the first half of its
rests. leak_table.py explains when Python's objects and the resident set leak. Numbers of P are of its second
life.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from counting_engine import BLOCK, CountingEngine, background, start
from leak_table import NONE, leak_table

from model_matrix import load_geometries
from pytest_kvconform.kvspace.pools.diagnose import count_pool
from pytest_kvconform.rigs.bytes.handover import shared_owners
from pytest_kvconform.rigs.bytes.messages import ByteRequest
from pytest_kvconform.rigs.bytes.specs import blocks_for
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.engine.messages import ON_D, ON_P, PREFILL, Output
from pytest_kvconform.rigs.processes.ports import free_port
from pytest_kvconform.rigs.scenario import VOCABULARY

LONGEST, TOGETHER, RESTS = 200, 4, 25  # tokens; prompts a round
PATIENCE_S = 60.0  # for a round, and for a rest besides the lease
SPARE = {"P": 9, "D": 5}  # prompts of full length that a pool has room for: leases keep blocks on P
FATES = {
    "undisturbed": 0.70,
    "in chunks on P": 0.08,
    "preempted on P": 0.04,
    "preempted on D": 0.05,
    "aborted on P": 0.03,
    "aborted on D": 0.06,
    "never fetched": 0.02,
    "fetched too late": 0.02,
}


@dataclass
class Handover:
    """One prompt that is handed over: its fate, and its request on P or on D."""

    fate: str
    request: ByteRequest  # on P, and from P's answer on: on D
    excused: bool  # whether D may end it with an error
    due: float = 0.0  # when D is to fetch it

    def answered(self, params: dict[str, Any] | None) -> None:
        """Turn the request on P into a request on D, with P's kv_transfer_params."""
        # A request that is preempted must still be running then.
        max_tokens = 2 if self.fate == "preempted on D" else 1
        id = self.request.id.replace(ON_P, ON_D)
        self.request = msgspec.structs.replace(
            self.request, id=id, max_tokens=max_tokens, kv_transfer_params=params, watch=True
        )


@dataclass
class Soak:
    """One run. `troubles` are sentences, and there should be none."""

    address: str  # of the zygote
    options: argparse.Namespace
    rests: int = RESTS
    troubles: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    # one entry a rest
    series: dict[str, list[dict[str, int]]] = field(default_factory=lambda: {"P": [], "D": []})
    ready: list[Handover] = field(default_factory=list)  # P has answered
    engines: dict[str, CountingEngine] = field(default_factory=dict)

    def run(self) -> None:
        """All of it, or until the first trouble."""
        self.random, self.ports = (
            np.random.default_rng(self.options.seed),
            {role: free_port() for role in "PD"},
        )
        try:
            for role in "PD":
                self._start(role)
            for rest in range(1, self.rests + 1):
                while (
                    self.counts["right"] < self.options.handovers * rest // self.rests and not self.troubles
                ):
                    self._round(
                        kill=not self.counts["P was killed"]
                        and self.counts["right"] > self.options.handovers // 5
                    )
                self._rest()
                if self.troubles:
                    break
        except EngineFailed as failed:
            self.troubles.append(failed.sentence)
        finally:
            for engine in self.engines.values():
                engine.end()

    def _start(self, role: str) -> None:
        model, name = self.options.geometry, f"soak-{role}-{self.ports[role]}-{self.counts['P was killed']}"
        blocks, extra = (
            blocks_for(load_geometries()[model], BLOCK, LONGEST) * SPARE[role],
            {"kv_lease_duration": self.options.lease},
        )
        where = self.address, name, role, self.options.connector, model
        self.engines[role] = start(
            *where, tp=1, blocks=blocks, longest=LONGEST + BLOCK, port=self.ports[role], **extra
        )
        self.engines[role].wait_ready()
        self.engines[role].reuse(role == "P")

    def _round(self, kill: bool) -> None:
        """Hand some prompts over, from P's prefill to the end on D. `kill`: kill P once it has answered."""
        self.counts["rounds"] += 1
        self.engines["D"].call("poison")
        for one in self._compute(self._prompts(kill)):
            one.due = time.monotonic() + 2 * self.options.lease * (one.fate == "fetched too late")
            self.ready += [one] * (one.fate != "never fetched")
        now = time.monotonic()
        fetched, self.ready = (
            [one for one in self.ready if one.due <= now],
            [one for one in self.ready if one.due > now],
        )
        self._fetch(fetched, kill)

    def _prompts(self, kill: bool) -> list[Handover]:
        count, salt = int(self.random.integers(1, TOGETHER + 1)), f"round-{self.counts['rounds']}"
        ids, same = (
            self.random.choice(VOCABULARY, size=(count, LONGEST)),
            self.random.integers(-LONGEST, LONGEST, size=count),
        )
        prompts = [
            (*ids[0, : max(0, same[i])].tolist(), *ids[i].tolist())[: self.random.integers(2, LONGEST)]
            for i in range(count)
        ]
        fates = self.random.choice(list(FATES), size=count, p=list(FATES.values())).tolist()
        self.counts.update(fates)
        # numbers are written into the rows: those of the last 64 rounds differ
        first = self.counts["rounds"] * TOGETHER % 256
        more: dict[str, Any] = {"max_tokens": 1, "kv_transfer_params": PREFILL, "salt": salt}
        return [
            Handover(
                fates[i],
                ByteRequest(
                    id=f"{salt}-{i}-{ON_P}",
                    tokens=prompts[i],
                    owners=owners + first,
                    number=first + i,
                    **more,
                ),
                excused=kill or fates[i] == "fetched too late",
            )
            for i, owners in enumerate(shared_owners(prompts))
        ]

    def _steps(self, role: str, waiting: dict[str, Handover]) -> Iterator[Output | None]:
        """Step both engines until no request of one engine is waiting.

        Yields the outputs of these requests, and None after each step.
        """
        engine, over = self.engines[role], time.monotonic() + PATIENCE_S
        while waiting:
            yield from [output for output in engine.step().outputs if output.id in waiting]
            yield None
            self.engines["P" if role == "D" else "D"].step()
            if time.monotonic() > over:
                states = [
                    f"{name} ({one.fate}) is {engine.trace(name).status}" for name, one in waiting.items()
                ]
                self.troubles.append(f"not over after {PATIENCE_S:.0f} s on {role}: {', '.join(states)}")
                return

    def _compute(self, some: list[Handover]) -> list[Handover]:
        """Let P compute them. Returns those that were not aborted."""
        p, ready, waiting = self.engines["P"], [], {one.request.id: one for one in some}
        p.budget(3 * BLOCK if any(one.fate.endswith("on P") for one in some) else 0)
        for one in some:
            p.add(one.request)
        for output in self._steps("P", waiting):
            if output is not None and output.finish:
                ready.append(waiting.pop(output.id))
                ready[-1].answered(output.kv_transfer_params)
            for name in [name for name in waiting if output is None and self.random.random() < 0.5]:
                if waiting[name].fate == "preempted on P":
                    p.preempt(name)
                elif waiting[name].fate == "aborted on P":
                    p.abort(name)
                    del waiting[name]
        return ready

    def _fetch(self, some: list[Handover], kill: bool) -> None:
        """Give them to D, one now and then, and see how they end."""
        d, waiting = self.engines["D"], dict[str, Handover]()
        while some and not self.troubles:
            now = len(some) if kill else int(self.random.integers(1, len(some) + 1))
            for one in some[:now]:
                d.add(one.request)
                waiting[one.request.id] = one
            del some[:now]
            if kill:
                self.engines["P"].end()
                self.counts["P was killed"] += 1
                self.series["P"].clear()
                self._start("P")
            for output in self._steps("D", waiting):
                if output is not None and output.finish:
                    self._ended(waiting.pop(output.id), output.finish)
                elif output is not None:
                    d.preempt(output.id)
                if output is not None:
                    continue
                for name in [
                    name
                    for name, one in waiting.items()
                    if one.fate == "aborted on D" and self.random.random() < 0.5
                ]:
                    d.abort(name)
                    d.pop_checks(name)
                    del waiting[name]
                if some and self.random.random() < 0.2:
                    break  # to add more while these are under way

    def _ended(self, one: Handover, finish: str) -> None:
        """Look at what D found in its pool before its first forward."""
        d, name = self.engines["D"], one.request.id
        checks, given = d.pop_checks(name), d.trace(name).external_tokens
        which = f"{name} ({one.fate}, {len(one.request.tokens)} tokens)"
        if finish == "error":
            self.counts["failed as they may" if one.excused else "failed"] += 1
            if not one.excused:
                self.troubles.append(
                    f"{which} ended with an error on D: {' '.join(d.process.last_lines()[-1:])}"
                )
        elif given and not any(check.rows_due for check in checks):
            self.troubles.append(f"{which}: no rank compared {given} tokens that were loaded")
        elif wrong := [check for check in checks if not check.clean]:
            self.troubles.append(
                f"{which}: {count_pool(wrong[0].pool)}; not in the cache: {wrong[0].missing}"
            )
        else:
            self.counts["right" if given else "D had all of it"] += 1
            self.counts["of these with a prefix hit on D"] += bool(given and d.trace(name).local_tokens)
            self.counts["bytes compared"] += sum(check.bytes_due for check in checks)

    def _rest(self) -> None:
        """Wait until neither engine holds a block or a request, and count what their processes have."""
        deadline, engines = time.monotonic() + self.options.lease + PATIENCE_S, list(self.engines.values())
        while any(
            u.requests or u.unfinished or u.free_blocks != u.total_blocks
            for u in [e.usage() for e in engines]
        ):
            for engine in engines:
                engine.step()
            if self.troubles or time.monotonic() > deadline:
                break
        for role, engine in self.engines.items():
            self.troubles += [
                f"{role}'s pool at rest: {count_pool(check.pool)}"
                for check in engine.audit()
                if check.pool.wrong
            ]
            has = engine.has()
            self.troubles += [f"{role} at rest still has {has[what]} {what}" for what in NONE if has[what]]
            self.series[role].append(has)
        print(
            f"{self.counts['right']} hand-overs, {self.counts['rounds']} rounds", file=sys.stderr, flush=True
        )

    def table(self) -> list[str]:
        """Make the table of both engines, as lines. Adds leaks to `troubles`."""
        lines, leaks = leak_table(self.series, self.counts["right"])
        self.troubles += leaks
        return lines


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--connector", default="reference_connector:ReferenceConnector")
    parser.add_argument("--geometry", default="gpt_oss_20b", choices=sorted(load_geometries()))
    for name, kind, number in (("handovers", int, 5000), ("seed", int, 0), ("lease", float, 2.0)):
        parser.add_argument(f"--{name}", type=kind, default=number)
    options, began = parser.parse_args(arguments), time.monotonic()
    with background(load_geometries()[options.geometry]) as address:
        soak = Soak(address, options)
        soak.run()
    table = soak.table()
    found = soak.troubles or ["nothing wrong, nothing left"]
    print(
        *table,
        "",
        *(f"{count} {what}" for what, count in soak.counts.items()),
        f"{time.monotonic() - began:.0f} s",
        *found,
        sep="\n",
    )
    return int(bool(soak.troubles))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
