"""Collectors and items of the suite: `pytest_collect`, and the run of a case (`pytest_runtest_protocol`).

The nodes are of our own classes, so that no setting, fixture or file pattern of the user changes them. The
tree is a child of the session and has no path: an installed suite lies in a virtual environment, where
pytest would look for conftest files and could refuse to collect, and where ids would depend on the current
folder.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pytest_kvconform.apply_declaration import shown_finding
from pytest_kvconform.case_outcome import CaseEnd, run_case, with_calls
from pytest_kvconform.plan import PREFIX, PlannedCase, load_module
from pytest_kvconform.report.failure import failure_line, failure_text
from pytest_kvconform.result import CaseResult, Evidence, Outcome

if TYPE_CHECKING:
    from pytest_kvconform.pytest_hooks.runner import CaseRunner

# neither passed nor failed: pytest calls such a test skipped
_NEITHER = (Outcome.WARNING, Outcome.BLOCKED, Outcome.NOT_APPLICABLE, Outcome.KNOWN)
_WAYS_OUT = ("skip", "skipif", "xfail")  # marks with which a case would not run


class Suite(pytest.Collector):
    """The root collector `kv`: all selected cases."""

    runner: CaseRunner
    planned: tuple[PlannedCase, ...]

    def collect(self) -> Iterator[pytest.Collector]:
        for tier in dict.fromkeys(one.module.split("/")[0] for one in self.planned):
            node = Tier.from_parent(self, name=tier, nodeid=f"{PREFIX}{tier}")
            node.runner, node.planned = (
                self.runner,
                [one for one in self.planned if one.module.split("/")[0] == tier],
            )
            yield node


class Tier(pytest.Collector):
    """Collector of the cases of one tier, such as `kv::engine`."""

    runner: CaseRunner
    planned: list[PlannedCase]

    def collect(self) -> Iterator[pytest.Collector]:
        for name in dict.fromkeys(one.module for one in self.planned):
            path = Path(inspect.getfile(load_module(name)[0]))
            inside = name.partition("/")[2]
            node = CaseModule.from_parent(self, name=inside, nodeid=f"{PREFIX}{name}", path=path)
            node.runner, node.planned = self.runner, [one for one in self.planned if one.module == name]
            yield node


class CaseModule(pytest.Collector):
    """Collector of the cases of one file, such as `kv::engine/bytes`."""

    runner: CaseRunner
    planned: list[PlannedCase]

    def collect(self) -> Iterator[pytest.Item]:
        for one in self.planned:
            # The name has the parameters in brackets: --lf compares names.
            item = CaseItem.from_parent(self, name=one.name, nodeid=one.id)
            item.runner, item.planned = self.runner, one
            item.user_properties += self.runner.properties_of(one)
            yield item


class CaseFailed(Exception):
    """Raised by `CaseItem.runtest`: the connector broke a rule.

    The message is the whole text of the failure.
    """


class CaseItem(pytest.Item):
    """One case in one cell with one variant.

    It is no pytest.Function: it has no fixtures, so no user can override them.
    """

    runner: CaseRunner
    planned: PlannedCase
    result: CaseResult | None = None

    def iter_markers_with_node(self, name: str | None = None) -> Iterator[tuple[Any, pytest.Mark]]:
        """Yield the marks of the case and its parents, but for those with which it would not run.

        Such a mark was meant for a test of the user.
        """
        marks = super().iter_markers_with_node(name)
        return ((node, mark) for node, mark in marks if mark.name not in _WAYS_OUT)

    def setup(self) -> None:
        """Run the case and keep its result.

        pytest, including its JUnit file, calls an exception of `setup` an error and one of `runtest` a
        failure. Therefore `setup` raises errors of the suite, and `runtest` raises failures of the
        connector.
        """
        one, started = self.planned, time.perf_counter()
        end = with_calls(run_case(self._call_body, one.case.name), self.runner.hook_calls())
        end = self.runner.without_service(end)
        if end.ends_run:
            self.runner.stop(end.reason)
        result = CaseResult(
            id=self.nodeid,
            rule=one.case.rule,
            outcome=end.outcome,
            cell=one.cell,
            reason=end.reason,
            finding=end.finding,
            evidence=end.evidence,
            refused=end.refused,
            depends_on=end.depends_on,
            seconds=round(time.perf_counter() - started, 3),
        )
        self.result = self.runner.apply_declaration(one, result)
        self.user_properties.append(("outcome", self.result.outcome.value))
        if self.result.evidence:
            self.user_properties += [
                ("looked_at", self.result.evidence.looked_at),
                ("bytes_moved", self.result.evidence.bytes_moved),
            ]
        if end.defect or end.ends_run:  # pytest's own traceback would show frames of pytest
            pytest.fail(f"harness: {self.result.reason}\n\n{end.defect}".rstrip(), pytrace=False)

    def _call_body(self) -> Evidence | CaseEnd:
        one, benches = self.planned, self.runner.benches(self)
        bench = benches.at(one.cell, one.scenarios, self.runner.scenarios.get(one.cell, ()))
        return one.case.body(bench, one.variant)

    def runtest(self) -> None:
        assert self.result is not None
        if self.result.outcome is Outcome.FAIL:
            raise CaseFailed(failure_text(self.result, self.runner.rules, self.runner.settings))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return an exception without its traceback if it is a finding: its frames would be the suite's.

        Other exceptions keep their traceback.
        """
        if not isinstance(excinfo.value, CaseFailed) or self.result is None:
            return super().repr_failure(excinfo, style)
        shown = excinfo.getrepr(style="value")
        finding = shown_finding(self.result)
        if shown.reprcrash and finding:  # the line of pytest's short summary and of JUnit's message
            shown.reprcrash.message = failure_line(self.result)
        return shown

    def reportinfo(self) -> tuple[Path, int | None, str]:
        # inspect.getsourcelines reads the whole function, which takes seconds for 2000 cases.
        return self.path, inspect.unwrap(self.planned.case.body).__code__.co_firstlineno - 1, self.nodeid

    def annotate(self, report: pytest.TestReport) -> None:
        """Put the outcome of the case into pytest's report.

        No mark of the user, such as xfail, makes it milder.
        """
        if (
            self.result is None
            or report.when == "teardown"
            or (report.when == "setup" and self.result.outcome is not Outcome.HARNESS)
        ):
            return
        outcome = self.result.outcome
        report.outcome = (
            "passed" if outcome is Outcome.PASS else "skipped" if outcome in _NEITHER else "failed"
        )
        if outcome in _NEITHER:
            path, line, _ = self.reportinfo()
            report.longrepr = (str(path), (line or 0) + 1, failure_line(self.result))
        if hasattr(report, "wasxfail"):
            del report.wasxfail
        # xdist sends the report to the controller.
        report.kv_result = msgspec.json.encode(self.result).decode()  # type: ignore[attr-defined]
