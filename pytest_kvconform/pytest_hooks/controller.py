"""Hooks of the process that a person started: it owns the zygote, gathers all results, decides and reports.

With pytest-xdist this process is xdist's controller, which runs no case. Without xdist it also runs the
cases.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import pytest

from pytest_kvconform import loading
from pytest_kvconform.declaration import block_to_paste
from pytest_kvconform.plan import cell_of_id
from pytest_kvconform.pytest_hooks.lost_workers import LostWorkers
from pytest_kvconform.pytest_hooks.overview import Overview
from pytest_kvconform.pytest_hooks.runner import (
    WORKER_KEY,
    CaseRunner,
    WorkerInput,
    WorkerOutput,
    ZygoteLink,
    write_line,
)
from pytest_kvconform.report import document, failure, terminal
from pytest_kvconform.report.for_people import write_for_people
from pytest_kvconform.result import Blocked, CaseResult, HarnessError, Outcome
from pytest_kvconform.rigs.services import RunningServices
from pytest_kvconform.settings import non_default
from pytest_kvconform.subject import reason_not_runnable
from pytest_kvconform.verdict import signature

_PROBE_SECONDS = 120.0  # enough to import vLLM on a slow, busy machine
_MOST_LINES = 20  # of ids with one cause that are shown
_LETTERS: dict[Outcome, tuple[str, str, tuple[str, dict[str, bool]]]] = {
    Outcome.WARNING: ("warned", "w", ("WARNING", {"yellow": True})),
    Outcome.BLOCKED: ("blocked", "B", ("BLOCKED", {"yellow": True})),
    Outcome.NOT_APPLICABLE: ("not applicable", "n", ("NOT-APPLICABLE", {})),
    Outcome.KNOWN: ("known", "k", ("KNOWN", {"yellow": True})),
}
_TABLES = ("features", "known", "services")  # settings whose values are too long for a line


class Controller:
    """One run, from its first process to its exit code."""

    def __init__(self, config: pytest.Config, runner: CaseRunner):
        self.config, self.runner, self.settings = config, runner, runner.settings
        self._declared = runner.subject  # `runner.subject` has placeholders for services filled in
        self._services: RunningServices | None = None
        self._zygote: Any = None
        self._results: list[CaseResult] = []
        self._decoded = WeakKeyDictionary[Any, CaseResult]()  # report of a case -> its result
        self._of_workers: set[str] | None = None  # ids that workers of xdist are to run
        self._troubles: list[str] = []
        self._report: document.Report | None = None
        # for each category of pytest's terminal: the list that pytest shows, and a copy of all its reports
        self._stats: list[tuple[list[Any], list[Any]]] = []
        self._hit_limit = False
        self._overview: Overview | None = None
        self.lost = LostWorkers()

    # ---- before the first case ----------------------------------------------------------------------------

    def pytest_report_header(self) -> str:
        settings = self.settings
        words = [
            settings.connector,
            f"matrix {settings.matrix}",
            f"seed {settings.seed}",
            f"device {settings.device}",
        ]
        shown = [
            f"{option.key}{'' if option.key in _TABLES else f'={_text(option.shown(value))}'} ({origin})"
            for option, value, origin in non_default(settings)
        ]
        return f"kv: {', '.join(words)}; set: {', '.join(shown)}"

    def pytest_sessionstart(self) -> None:
        if self.config.getoption("collectonly"):
            return
        if (cache := getattr(self.config, "cache", None)) is not None:
            cache.set("kvconform/seed", self.settings.seed)
        try:
            reason = "" if self.settings.deployed else reason_not_runnable(self.runner.subject)
            if reason:  # known at once, before vLLM is loaded
                self.runner.link = ZygoteLink(outcome="BLOCKED", reason=reason)
            else:
                if self._declared.services and not self.settings.deployed:
                    self._services = RunningServices(self._declared, self.settings)
                    self.runner.subject = self._services.subject
                    self.runner.services = str(self._services.folder)
                variables = self._services.environment if self._services else {}
                self._zygote = loading.bench_module().start_zygote(self.settings, variables)
        except Exception as error:  # the run goes on to its verdict, even if the zygote cannot start
            self.runner.link = ZygoteLink(
                outcome="HARNESS",
                reason="the zygote (the process that engines are forked from) did not start: "
                f"{type(error).__name__}: {error}",
            )
        if self.config.pluginmanager.has_plugin("dsession"):
            self.runner.plan()  # a usage error comes before the workers
            if self._zygote is not None:  # workers start while vLLM is being loaded
                self.runner.link = ZygoteLink(later_in=str(Path(self._zygote.address).with_name("link.json")))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> None:
        if self.config.getoption("collectonly"):
            return
        later = self.runner.link.later_in
        self._probe()
        self._overview = Overview(self.runner.plan().selected, self.settings.matrix, lambda: self._selected)
        if later:
            Path(later).parent.mkdir(exist_ok=True)  # a zygote that has ended has removed its folder
            Path(later).write_bytes(msgspec.json.encode(self.runner.link))

    @property
    def _selected(self) -> list[str]:
        """Ids that are to run; as long as no worker of xdist has collected, those of the plan."""
        return self.runner.selected if self._of_workers is None else sorted(self._of_workers)

    def _probe(self) -> None:
        """Probe the connector once, if a case is selected. Raises UsageError if it does not exist."""
        if self._zygote is None or not self._selected:
            return
        if self._services is not None:
            names = ", ".join(service.name for service in self._declared.services)
            write_line(self.config, f"kv: starting services: {names}")
            if sentence := self._services.start():
                self.runner.link = ZygoteLink(outcome="BLOCKED", reason=sentence)
                return
        deployed = self.settings.deployed
        what = "lm-eval" if deployed else f"vLLM and probing {self.settings.connector}"
        write_line(self.config, f"kv: loading {what}")
        bench, deadline = loading.bench_module(), _PROBE_SECONDS * self.settings.timeout_scale
        try:
            look = partial(bench.facts_of_deployment, self.settings) if deployed else bench.probe_subject
            found = msgspec.json.encode(look(self._zygote.address, self.runner.subject, deadline))
            self.runner.link = ZygoteLink(address=self._zygote.address, facts=msgspec.Raw(found))
        except bench.BadSubject as error:
            raise pytest.UsageError(f"--kv-connector={self.settings.connector}: {error}") from None
        except Blocked as error:
            self.runner.link = ZygoteLink(outcome="BLOCKED", reason=str(error))
        except HarnessError as error:
            self.runner.link = ZygoteLink(outcome="HARNESS", reason=str(error))
        except Exception as error:  # a defect of the suite: every case becomes HARNESS with this reason
            self.runner.link = ZygoteLink(
                outcome="HARNESS", reason=f"probing the connector failed: {type(error).__name__}: {error}"
            )

    # ---- xdist --------------------------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        runner = self.runner
        worker_input = WorkerInput(
            settings=self.settings, subject=runner.subject, link=runner.link, services=runner.services
        )
        node.workerinput[WORKER_KEY] = msgspec.json.encode(worker_input).decode()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        # A run that ends early, as with -x, does not wait for what a worker sends at its end.
        self._of_workers = {*(self._of_workers or ()), *filter(cell_of_id, ids)}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Return the scheduler that gives each cell to one worker, unless the user chose another --dist."""
        if config.getoption("dist") != "load":
            return None
        from pytest_kvconform.pytest_hooks.xdist_scheduling import CellScheduling

        return CellScheduling(config, log)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if sent := getattr(node, "workeroutput", {}).get(WORKER_KEY):
            output = msgspec.json.decode(sent, type=WorkerOutput)
            self._troubles += output.troubles
            self._of_workers = {*(self._of_workers or ()), *output.selected}
            self.runner.tell_left_out(output.left_out)

    # ---- results ------------------------------------------------------------------------------------------

    def pytest_runtest_logreport(self, report: Any) -> None:
        if hasattr(report, "kv_progress"):
            write_line(self.config, f"kv: {report.kv_progress}")
        if hasattr(report, "kv_result"):
            self._results.append(result := self._result(report))
            if self._overview and (line := self._overview.line(result)):
                write_line(self.config, f"kv: {line}", report.nodeid)

    def _result(self, report: Any) -> CaseResult:
        """Return the result in pytest's report of a case, which is decoded once."""
        if report not in self._decoded:
            self._decoded[report] = msgspec.json.decode(report.kv_result, type=CaseResult)
        return self._decoded[report]

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> Any:
        if hasattr(report, "kv_progress"):
            return "", "", ""
        if report.outcome == "skipped" and hasattr(report, "kv_result"):
            return _LETTERS[self._result(report).outcome]
        return None

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        # xdist ends a run with -x or --maxfail by an interrupt whose message begins with these words.
        self._hit_limit = str(excinfo.value).startswith("stopping after")

    # ---- the end ------------------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        # 3, 4 and 11: the run broke before it had results
        if self.config.getoption("collectonly") or exitstatus in (3, 4, 11):
            return
        self._troubles += self.lost.sentences + self.runner.close() + self._close()
        verdict = self._decide_and_write().verdict
        stopped = exitstatus == 2 and (self._hit_limit or self.lost.sentences)
        if exitstatus in (0, 5) or (verdict.exit_code and (exitstatus == 1 or stopped)):
            # Otherwise a test of the user failed, or a person pressed Ctrl-C.
            session.exitstatus = verdict.exit_code

    def _decide_and_write(self) -> document.Report:
        """Decide the verdict and write the report. If it cannot be written, the verdict is HARNESS."""
        folder = Path(self.settings.report)
        self._report = self._document()
        try:
            document.write(self._report, folder)
        except OSError as error:
            self._troubles.append(f"{folder / document.FILE} cannot be written: {error.strerror}")
            self._report = self._document()
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        for sentence in write_for_people(self._report, folder, self.settings.html, summary):
            write_line(self.config, f"kv: {sentence}")
        return self._report

    def _document(self) -> document.Report:
        return document.report_of_plan(
            self.settings,
            self._declared,
            msgspec.json.decode(self.runner.link.facts),
            self._results,
            self._selected,
            self.runner.plan(),
            sorted(self._troubles),
        )

    def _close(self) -> list[str]:
        """End the zygote and all processes that it started, and then the services.

        Returns sentences about what did not end; a second call does nothing.
        """
        zygote, self._zygote = self._zygote, None
        services, self._services = self._services, None
        troubles: list[str] = []
        for one, name in (
            (zygote, "the zygote (the process that engines are forked from)"),
            (services, "the guard of the services"),
        ):
            try:
                troubles += one.close() if one is not None else []
            except Exception as error:  # the verdict shows the sentence
                troubles.append(f"{name} did not end: {type(error).__name__}: {error}")
        return troubles

    def pytest_unconfigure(self) -> None:
        self._close()  # in case the session broke before pytest_sessionfinish

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Iterator[None]:
        """Show failures that have one cause only once.

        pytest prints its sections inside the yield, and its short summary after our verdict.
        """
        for category in ("failed", "error"):
            reports = terminalreporter.stats.get(category, [])
            self._stats.append((reports, list(reports)))
            reports[:] = _one_per_cause(reports, self._decoded)
        return (yield)

    @pytest.hookimpl(specname="pytest_terminal_summary", tryfirst=True)
    def pytest_terminal_summary_verdict(self, terminalreporter: Any) -> None:
        for reports, every_report in self._stats:
            reports[:] = every_report
        if self._report is None:
            return
        unicode = terminal.can_show(sys.__stdout__, "✓✗·×")
        self._write_warnings(terminalreporter)
        subject = self.runner.subject
        if self._results and (block := block_to_paste(subject.features, subject.profile)):
            terminalreporter.write_sep("=", "to declare in pyproject.toml")
            terminalreporter.write_line(block if unicode else terminal.to_ascii(block))
        title = terminal.title(self._report)
        terminalreporter.write_sep("=", title if unicode else terminal.to_ascii(title))
        width = self.config.get_terminal_writer().fullwidth
        for text, markup in terminal.summary(
            self._report, str(Path(self.settings.report) / document.FILE), width, unicode
        ):
            terminalreporter.write_line(text, **markup)

    def _write_warnings(self, terminalreporter: Any) -> None:
        """Write the text of the first case of each warning. pytest itself shows only failures."""
        assert self._report is not None
        results = {result.id: result for result in self._report.results}
        causes = [cause for cause in self._report.verdict.causes if cause.outcome is Outcome.WARNING]
        if not causes:
            return
        terminalreporter.write_sep("=", "BROKEN SHOULD RULES")
        for cause in causes:
            first = results[cause.ids[0]]
            more = f" and {len(cause.ids) - 1} more" if len(cause.ids) > 1 else ""
            text = failure.failure_text(first, self.runner.rules, self.settings)
            terminalreporter.write_sep("_", f"{first.id}{more}")
            terminalreporter.write_line(
                text if terminal.can_show(sys.__stdout__, text) else text.encode("ascii", "replace").decode()
            )


def _one_per_cause(reports: list[Any], results: Mapping[Any, CaseResult]) -> list[Any]:
    """Return the first report of each cause, and all reports of other tests.

    `results`: report of a case -> its result.
    The ids of other failures with the same cause are in a section of the first report.
    """
    groups: dict[object, list[Any]] = {}
    for report in reports:
        cause: object = id(report)
        if (result := results.get(report)) is not None:
            cause = (result.outcome, signature(result)) if result.outcome is not Outcome.PASS else cause
        groups.setdefault(cause, []).append(report)
    for first, *others in groups.values():
        if others:
            lines = failure.compress_ids(other.nodeid for other in others)
            more = [f"and {len(lines) - _MOST_LINES} more lines"] if len(lines) > _MOST_LINES else []
            first.longrepr.addsection(
                f"the same cause in {len(others)} more", "\n".join([*lines[:_MOST_LINES], *more]), "-"
            )
    return [group[0] for group in groups.values()]


def _text(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)
