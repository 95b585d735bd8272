"""One background process for all tests of this folder, and the cases about peers and ranks alone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_kvconform.plan import load_module
from pytest_kvconform.result import Blocked, Cell, HarnessError, NotApplicable, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.process_facts import descendants_of
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import resolve
from tests.engine.conftest import _installed  # noqa: F401 - these tests run real engines, too
from tests.engine.judged import Jury

ROOT = Path(__file__).parents[2]
MODULES = ("peers", "lease", "side_channel", "ranks")
LEASE = '{"kv_connector_extra_config": {"num_threads": 0, "kv_lease_duration": %d}}'  # seconds; NixlConnector itself gets it from the suite
LEASE_S = 4  # a second more than the suite's own: tests run beside one another
END_S = 5.0  # that processes may take to be gone when a bench was closed
Said = dict[str, tuple[str, str]]  # "case[variant]" -> outcome, and the reason or what happened and why


class PeerJury(Jury):
    """Runs the cases that run on worker halves, and no other."""

    def judge_peers(self, connector: str, topology: str, scale: float = 1.0, lease_s: int = LEASE_S) -> Said:
        """What each case of one cell says."""
        spec, config = (connector, "") if connector == "NixlConnector" else (f"{self.module}:{connector}", LEASE % lease_s)
        settings = Settings(connector=spec, config=config, timeout_scale=scale)
        bench = Bench(self.zygote.address, resolve(settings), settings, self.probe(settings), lambda sentence: None)
        cell, said = Cell("llama3_1_8b", topology, "b16"), Said()
        bench.use(cell)
        try:
            for case in (case for name in MODULES for case in load_module(f"protocol/{name}")[1] if case.applies(cell)):
                for variant in case.variants(cell, "quick"):
                    name = f"{case.name}[{variant}]" if variant else case.name
                    try:
                        evidence = case.body(bench, variant)
                        said[name] = "PASS" if evidence.looked_at else "EMPTY", ""
                    except Violation as error:
                        finding = error.finding
                        said[name] = "FAIL" if finding.rule == case.rule else finding.rule, f"{finding.happened}\n{finding.diagnosis}"
                    except (Blocked, NotApplicable, HarnessError) as error:
                        said[name] = type(error).__name__, str(error)
        finally:
            bench.close()
        return said


@pytest.fixture(scope="package")
def jury() -> Iterator[PeerJury]:
    """One zygote, from which the engines of every test are forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(ROOT)])  # where the module of a connector is looked for first
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        jury = PeerJury("tests.protocol_worker.wrong_connectors", "bytes", ("llama3_1_8b",))
        yield jury
    assert jury.close() == []


@pytest.fixture
def judge(jury: PeerJury) -> Iterator[Callable[..., Said]]:
    """judge("NoHeartbeats", "P1D1") -> what each case says. No process of an engine stays."""
    yield jury.judge_peers
    deadline = time.monotonic() + END_S
    while left := descendants_of(jury.zygote.process.pid):
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.02)
