"""Soak: thousands of hand-overs between byte engines over real NIXL and TCP, disturbed as users disturb them.

    python ci/soak.py [--handovers 5000] [--connector NAME|MODULE:CLASS] [--geometry gpt_oss_20b] [--seed 0]
                      [--lease 2] [--visits 200] [--minutes M]

With --minutes the soak ends at the first rest after so many minutes.

The soak looks for wrong words and for leaks. P computes up to four prompts at a time, some with a common
beginning, and D takes them. The seed chooses the fate of each prompt (disturbed_prompts.py). P's process is
stopped in some loads, for up to one and a half leases. After a fifth of the hand-overs the soak kills P
before D has read P's answers, and starts P again at the same port. P overwrites blocks the moment they are
free. After each load the whole pool of D is compared byte by byte (pytest_kvconform/rigs/bytes/checks.py),
and both pools at every rest.

Other engines visit, in turn a P from which D loads and a D that loads from P. Each hands one round of prompts
over. Then it shuts down, or is killed. A P is also killed while loads are under way. A D is not: over TCP UCX
may then end the process from which that D reads (docs/findings.md). Visitors have PORTS ports in turn, as
engines have that are started again.

There are 25 rests. At a rest every request has ended and every lease is over: neither engine may hold blocks
or requests, and neither may have more of NIXL's objects, threads and open files than in the first half of its
rests. leak_table.py explains when Python's objects and the resident set leak. Numbers of P are of its second
life.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from counting_engine import BLOCK, CountingEngine, background, start
from disturbed_prompts import FATES, LONGEST, UNDISTURBED, Handover, prompts
from leak_table import NONE, leak_table

from model_matrix import load_geometries
from pytest_kvconform.kvspace.pools.diagnose import count_pool
from pytest_kvconform.rigs.bytes.specs import blocks_for
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.engine.messages import Output
from pytest_kvconform.rigs.processes.ports import free_port

RESTS, PORTS = 25, 4  # PORTS: of visitors of each role
PATIENCE_S = 60.0  # for a round, and for a rest besides the lease
SPARE = {"P": 9, "D": 5}  # prompts of full length that a pool has room for: leases keep blocks on P
UNDER_WAY = "it was killed while loads were under way"
ENDS = {"P": ("it shut down", "it was killed", UNDER_WAY), "D": ("it shut down", "it was killed")}


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
    engines: dict[str, CountingEngine] = field(default_factory=dict)  # "P", "D", "visitor"
    lives: int = 0  # engines that were started

    def run(self) -> None:
        """All of it, or until the first trouble."""
        self.random = np.random.default_rng(self.options.seed)
        self.ports = {role: free_port() for role in "PD"}
        self.visitors = {role: [free_port() for _ in range(PORTS)] for role in "PD"}
        handovers, ends = self.options.handovers, time.monotonic() + 60 * self.options.minutes
        try:
            for role in "PD":
                self._start(role, role, self.ports[role])
            for rest in range(1, self.rests + 1):
                while self.counts["right"] < handovers * rest // self.rests and not self.troubles:
                    self._round(
                        kill=not self.counts["P was killed"] and self.counts["right"] > handovers // 5
                    )
                    if self.counts["visits"] * handovers < self.options.visits * self.counts["right"]:
                        self._visit()
                self._rest()
                if self.troubles or time.monotonic() > ends:
                    break
        except EngineFailed as failed:
            self.troubles += [failed.sentence, *failed.log]
        finally:
            for engine in self.engines.values():
                engine.end()

    def _start(self, name: str, role: str, port: int) -> None:
        """Start an engine, which is `engines[name]` from now on."""
        model, self.lives = self.options.geometry, self.lives + 1
        blocks = blocks_for(load_geometries()[model], BLOCK, LONGEST) * SPARE[role]
        where = self.address, f"soak-{role}-{port}-{self.lives}", role, self.options.connector, model
        extra = {"kv_lease_duration": self.options.lease}
        engine = start(*where, tp=1, blocks=blocks, longest=LONGEST + BLOCK, port=port, **extra)
        self.engines[name] = engine
        engine.wait_ready()
        engine.reuse(role == "P")

    def _round(self, kill: bool) -> None:
        """Hand some prompts over, from P's prefill to the end on D. `kill`: kill P once it has answered."""
        for one in self._compute(self._prompts(FATES), "P", "D"):
            one.due = time.monotonic() + 2 * self.options.lease * (one.fate == "fetched too late")
            self.ready += [one] * (one.fate != "never fetched")
        now = time.monotonic()
        fetched = [one for one in self.ready if one.due <= now]
        self.ready = [one for one in self.ready if one.due > now]
        self._fetch(fetched, "D", "P" if kill else "")

    def _visit(self) -> None:
        """Let an engine come, hand one round of prompts over with P or D, and go."""
        number = self.counts["visits"]
        role, (again, port) = "PD"[number % 2], divmod(number // 2, PORTS)
        end = ENDS[role][(port + again) % len(ENDS[role])]  # another end on this port each time
        self.counts.update({"visits": 1, f"visits of a {role}: {end}": 1})
        self._start("visitor", role, self.visitors[role][port])
        p, d = ("visitor", "D") if role == "P" else ("P", "visitor")
        answered = self._compute(self._prompts(UNDISTURBED), p, d)
        self._fetch(answered, d, "visitor" if end is UNDER_WAY else "")
        if (visitor := self.engines.pop("visitor", None)) is not None:
            if end == "it shut down" and not self.troubles:
                visitor.shutdown()
            visitor.end()

    def _prompts(self, fates: dict[str, float]) -> list[Handover]:
        self.counts["rounds"] += 1
        made = prompts(self.random, self.counts["rounds"], fates)
        self.counts.update(one.fate for one in made)
        return made

    def _steps(self, name: str, waiting: dict[str, Handover]) -> Iterator[Output | None]:
        """Step all engines that are awake, until no request of this one is waiting.

        Yields the outputs of these requests, and None after each step.
        """
        engine, over = self.engines[name], time.monotonic() + PATIENCE_S
        while waiting:
            yield from [output for output in engine.step().outputs if output.id in waiting]
            yield None
            for other in self.engines.values():
                if other is not engine and other.is_awake():
                    other.step()
            if time.monotonic() > over:
                states = [f"{one} ({waiting[one].fate}) is {engine.trace(one).status}" for one in waiting]
                self.troubles.append(f"not over after {PATIENCE_S:.0f} s on {name}: {', '.join(states)}")
                return

    def _compute(self, some: list[Handover], name: str, d: str) -> list[Handover]:
        """Let a P compute them, for this D. Returns those that were not aborted."""
        self.engines[d].call("poison")
        p, ready, waiting = self.engines[name], [], {one.request.id: one for one in some}
        p.budget(3 * BLOCK if any(one.fate.endswith("on P") for one in some) else 0)
        for one in some:
            p.add(one.request)
        for output in self._steps(name, waiting):
            if output is not None and output.finish:
                ready.append(waiting.pop(output.id))
                ready[-1].answered(output.kv_transfer_params)
            for request in [one for one in waiting if output is None and self.random.random() < 0.5]:
                if waiting[request].fate == "preempted on P":
                    p.preempt(request)
                elif waiting[request].fate == "aborted on P":
                    p.abort(request)
                    del waiting[request]
        return ready

    def _fetch(self, some: list[Handover], name: str, kill: str = "") -> None:
        """Give them to a D, one now and then, and see how they end. `kill`: an engine to be killed then."""
        d, waiting, p = self.engines[name], dict[str, Handover](), self.engines["P"]
        while some and not self.troubles:
            now = len(some) if kill else int(self.random.integers(1, len(some) + 1))
            for one in some[:now]:
                d.add(one.request)
                waiting[one.request.id] = one
            sleeps = not kill and any(one.fate == "loaded while P sleeps" for one in some[:now])
            if sleeps and p.is_awake():
                p.sleep(self.random.uniform(0.2, 1.5) * self.options.lease)
            for one in (*waiting.values(), *some):
                one.excused |= bool(kill) or not p.is_awake()
            del some[:now]
            for output in self._steps(name, waiting):
                if output is not None and output.finish:
                    self._ended(waiting.pop(output.id), output.finish, d)
                elif output is not None:
                    d.preempt(output.id)
                if output is not None:
                    continue
                if kill and self.random.random() < 0.5:
                    self._kill(kill)
                    if kill == name:
                        return
                    kill = ""
                for request in [one for one in waiting if waiting[one].fate == "aborted on D"]:
                    if self.random.random() < 0.5:
                        d.abort(request)
                        d.pop_checks(request)
                        del waiting[request]
                if some and self.random.random() < 0.2:
                    break  # to add more while these are under way
        while not p.is_awake():
            time.sleep(0.01)
        if kill:  # every load had ended before
            self._kill(kill)

    def _kill(self, name: str) -> None:
        """Kill an engine. P is started again at the same port."""
        self.engines.pop(name).end()
        if name == "P":
            self.counts["P was killed"] += 1
            self.series["P"].clear()
            self._start("P", "P", self.ports["P"])

    def _ended(self, one: Handover, finish: str, d: CountingEngine) -> None:
        """Look at what D found in its pool before its first forward."""
        name = one.request.id
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
    for name, number in (
        ("handovers", 5000),
        ("seed", 0),
        ("lease", 2.0),
        ("visits", 200),
        ("minutes", float("inf")),
    ):
        parser.add_argument(f"--{name}", type=type(number), default=number)
    options, began = parser.parse_args(arguments), time.monotonic()
    # Over shared memory a read ends although P sleeps.
    os.environ.setdefault("UCX_TLS", "tcp,self")
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
