"""Hooks of every process that runs cases: they collect, order and run them.

The process that a person started also has a `Controller`, see controller.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from pytest_kvconform import extras, features, loading, rules
from pytest_kvconform.apply_declaration import Criteria, apply_declaration
from pytest_kvconform.case_outcome import CaseEnd
from pytest_kvconform.declaration import check_known
from pytest_kvconform.plan import (
    BadSuite,
    Plan,
    PlannedCase,
    cell_of_id,
    make_plan,
    order_by_cell,
    scenarios_by_cell,
)
from pytest_kvconform.pytest_hooks.items import CaseItem, Suite
from pytest_kvconform.result import Blocked, CaseResult, Cell, HarnessError, HookCall, Outcome
from pytest_kvconform.rigs import services
from pytest_kvconform.settings import BadSetting, Settings
from pytest_kvconform.subject import Subject
from pytest_kvconform.verdict import MOVING_TIERS

WORKER_KEY = "kvconform"  # key of xdist's workerinput and workeroutput


class ZygoteLink(msgspec.Struct, frozen=True, kw_only=True):
    """Address of the zygote and facts of the connector, or why there are none."""

    address: str = ""
    facts: msgspec.Raw = msgspec.Raw(b"null")  # SubjectFacts as JSON
    outcome: str = ""  # of every case if there is no zygote: "BLOCKED" or "HARNESS"; else ""
    reason: str = ""
    later_in: str = ""  # path of a file that holds the final ZygoteLink before the first case starts


class WorkerInput(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller sends to a worker of xdist (`pytest_configure_node`).

    Only the controller reads settings.
    """

    settings: Settings
    subject: Subject
    link: ZygoteLink
    services: str  # folder of the services, "": none is declared


class WorkerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker of xdist sends to the controller when it ends."""

    troubles: list[str]  # sentences about processes that did not end
    selected: list[str]  # `CaseRunner.selected`
    left_out: int  # `CaseRunner.left_out`


class CaseRunner:
    """Hooks of every process of an active run."""

    def __init__(
        self,
        config: pytest.Config,
        arguments: list[str] | None,
        settings: Settings,
        subject: Subject,
        link: ZygoteLink,
        services_folder: str = "",
    ):
        self.config, self.settings, self.subject, self.link = config, settings, subject, link
        # those with kv::; empty: the whole suite; None: the user named only paths of their own tests
        self._arguments = arguments
        self.services = services_folder  # see `WorkerInput`
        self._item: pytest.Item | None = None
        self._benches: Any = None
        self._plan: Plan | None = None
        self.left_out = 0  # cases that a conftest file or plugin left out, and that run nevertheless
        self._deselected: set[str] = set()  # ids that options of pytest left out
        self.scenarios: dict[Cell, frozenset[str]] = {}  # between peers, that the selected cases observe

    @property
    def rules(self) -> dict[str, rules.Rule]:
        return rules.load()

    def plan(self) -> Plan:
        """Return the cases of this run.

        Raises UsageError; ends pytest with code 11 for a defect of the suite.
        """
        if self._plan is None:
            try:
                plan = make_plan(self.settings, self._arguments or (), extras.not_installed())
                if unmatched := [
                    entry for entry in self.subject.known if not any(map(entry.matches, plan.manifest))
                ]:
                    other = make_plan(
                        Settings(matrix="full" if self.settings.matrix == "quick" else "quick"), ()
                    )
                    check_known(unmatched, [*plan.manifest, *plan.left_out, *other.manifest])
            except BadSetting as error:
                raise pytest.UsageError(str(error)) from None
            except (BadSuite, rules.BadRules) as error:
                pytest.exit(f"harness: {error}", returncode=11)
            self._plan = plan if self._arguments is not None else replace(plan, selected=(), elsewhere=())
        return self._plan

    @property
    def selected(self) -> list[str]:
        """Return the ids of the cases that are to run: those of the plan that no option of pytest left out.

        A case that is cut from pytest's items otherwise stays among them, has no result, and makes the run
        INCOMPLETE.
        """
        return [planned.id for planned in self.plan().selected if planned.id not in self._deselected]

    def apply_declaration(self, planned: PlannedCase, result: CaseResult) -> CaseResult:
        """Return the result of a case with its features and level, after the declaration is applied."""
        needed = features.required_features(planned)
        return apply_declaration(
            msgspec.structs.replace(result, features=needed, level=planned.level), self.criteria
        )

    @property
    def criteria(self) -> Criteria:
        """Return the declaration, which is applied to every result."""
        return Criteria(
            features=self.subject.features,
            known=self.subject.known,
            claim=self.settings.claim,
            should=rules.should(self.rules),
        )

    def properties_of(self, planned: PlannedCase) -> list[tuple[str, object]]:
        """Return the properties of a case that pytest writes into JUnit, besides the outcome."""
        rule = self.rules.get(planned.case.rule)
        return [
            ("rule", planned.case.rule),
            ("strength", rule.strength if rule else "unknown"),
            ("cell", str(planned.cell)),
        ]

    def benches(self, item: CaseItem) -> Any:
        """Return the benches of this process, made on first use.

        Raises Blocked or HarnessError if there is no zygote.
        """
        self._item = item
        if self.link.later_in:
            self.link = msgspec.json.decode(Path(self.link.later_in).read_bytes(), type=ZygoteLink)
        if self.link.outcome:
            raise (Blocked if self.link.outcome == "BLOCKED" else HarnessError)(self.link.reason)
        if self.services and (sentence := services.problem(self.services)):
            raise Blocked(sentence)
        if self._benches is None:
            module = loading.bench_module()
            facts = msgspec.json.decode(self.link.facts, type=module.SubjectFacts)
            run = Path(self.link.address).parent
            self._benches = module.Benches(
                self.link.address, self.subject, self.settings, facts, self.progress, shared=run
            )
        if self.subject.requires_device and item.planned.case.tier in MOVING_TIERS:
            device = getattr(self._benches.facts, "device", "")
            if lacks := self.subject.lacks(device):
                raise Blocked(lacks)
        return self._benches

    def hook_calls(self) -> Sequence[HookCall]:
        """Return the last calls of the connector's hooks in what the case has observed."""
        calls: Sequence[HookCall] = self._benches.hook_calls() if self._benches is not None else ()
        return calls

    def without_service(self, end: CaseEnd) -> CaseEnd:
        """Return how a case ended: BLOCKED, if it did not pass and a service has ended meanwhile."""
        if end.outcome is Outcome.PASS or end.ends_run or not self.services or self.link.outcome:
            return end
        sentence = services.problem(self.services, wait=True)
        return CaseEnd(outcome=Outcome.BLOCKED, reason=sentence) if sentence else end

    def stop(self, reason: str) -> None:
        """Let every later case of this process end as HARNESS at once."""
        self.link = ZygoteLink(outcome="HARNESS", reason=reason)

    def close(self) -> list[str]:
        """Close the benches of this process. Returns sentences about processes that did not end."""
        benches, self._benches = self._benches, None
        try:
            sentences: list[str] = benches.close() if benches is not None else []
        except Exception as error:  # the run goes on to its verdict, which shows the sentence
            return [f"closing the engines failed: {type(error).__name__}: {error}"]
        return sentences

    def progress(self, sentence: str) -> None:
        """Print at once what happens now.

        A worker of xdist sends the sentence to the controller, as a report of a phase that pytest does not
        know.
        """
        if self._item is None:
            return
        cell = cell_of_id(self._item.nodeid)
        sentence = sentence if sentence.startswith(cell) else f"{cell}: {sentence}"
        if not hasattr(self.config, "workerinput"):
            write_line(self.config, f"kv: {sentence}", self._item.nodeid)
            return
        report = pytest.TestReport(
            nodeid=self._item.nodeid,
            location=self._item.location,
            keywords={},
            outcome="passed",
            longrepr=None,
            when="progress",  # type: ignore[arg-type]
            kv_progress=sentence,
        )
        self.config.hook.pytest_runtest_logreport(report=report)

    # ---- hooks --------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        report: Any = yield
        if isinstance(collector, pytest.Session):
            suite = Suite.from_parent(collector, name="kv", nodeid="kv")
            suite.runner, suite.planned = self, self.plan().selected
            report.result = [*report.result, suite]
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> Iterator[None]:
        """Order the cases cell by cell. Only options of pytest leave cases out, such as -k and --lf.

        A conftest file or plugin that drops or marks items means tests of the user. The cases stay.
        """
        before = list(items)
        result = yield
        left = list({item.planned.id: item for item in _cases(items)}.values())
        if len(left) < len(_cases(before)) and (plugins := self._other_plugins_that_select()):
            left = self._selected_by_pytest(session, before, plugins, len(left))
        self._deselected = {item.nodeid for item in _cases(before)} - {item.nodeid for item in left}
        cases = {item.planned.id: item for item in left}
        others = [item for item in items if not isinstance(item, CaseItem)]
        order = order_by_cell([item.planned for item in cases.values()], self.settings.seed)
        self.scenarios = scenarios_by_cell(order)
        items[:] = [*others, *(cases[planned.id] for planned in order)]
        return result

    def _other_plugins_that_select(self) -> list[object]:
        """Return the conftest files and plugins that may leave items out, but for those of pytest."""
        hook = self.config.hook.pytest_collection_modifyitems
        plugins = [implementation.plugin for implementation in hook.get_hookimpls()]
        return [plugin for plugin in plugins if plugin is not self and not _is_of_pytest(plugin)]

    def _selected_by_pytest(
        self, session: pytest.Session, before: list[pytest.Item], others: list[object], count: int
    ) -> list[CaseItem]:
        """Return the cases that pytest's own plugins select. `count`: how many the others left.

        These plugins see the user's tests, too: --lf and --sw look for the tests that failed among all.
        """
        manager, again = self.config.pluginmanager, list(before)
        reporter = manager.getplugin("terminalreporter")  # it was told what was left out
        told = list(reporter.stats.get("deselected", [])) if reporter is not None else []
        hook = manager.subset_hook_caller("pytest_collection_modifyitems", [self, *others])
        hook(session=session, config=self.config, items=again)
        left = _cases(again)
        if reporter is not None:
            selected = {item.nodeid for item in left}
            reporter.stats["deselected"] = [
                *(item for item in told if not isinstance(item, CaseItem)),
                *(item for item in _cases(before) if item.nodeid not in selected),
            ]
        self.tell_left_out(len(left) - count)
        return left

    def tell_left_out(self, count: int) -> None:
        """Say once how many cases a conftest file or plugin left out.

        A worker of xdist has no terminal: it sends the number to the controller.
        """
        if count > 0 and not self.left_out:
            self.left_out = count
            write_line(
                self.config,
                f"kv: a conftest file or plugin left {count} cases out, which run nevertheless: "
                "-k, -m, --deselect and --kv-... select cases, and --kv-shard divides them",
            )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: Any = yield
        if isinstance(item, CaseItem):
            item.annotate(report)
        return report

    def pytest_sessionfinish(self) -> None:
        output = getattr(self.config, "workeroutput", None)
        if output is not None:  # a worker of xdist; otherwise the controller closes the runner
            sent = WorkerOutput(troubles=self.close(), selected=self.selected, left_out=self.left_out)
            output[WORKER_KEY] = msgspec.json.encode(sent).decode()


def write_line(config: pytest.Config, text: str, nodeid: str = "") -> None:
    """Write a line past pytest's capture, between its dots.

    `nodeid`: the running item, whose dot is not printed yet.
    """
    reporter: Any = config.pluginmanager.getplugin("terminalreporter")
    if reporter is None:
        return
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else nullcontext():
        reporter.ensure_newline()
        if getattr(config.get_terminal_writer(), "width_of_current_line", 0):  # dots under -q and xdist
            reporter.write_line("")
        if nodeid and reporter.showfspath and not reporter.showlongtestinfo:
            reporter.write(text)  # the next text begins with a newline, then the dots go on
            reporter.write_fspath_result(nodeid, "")
        else:
            reporter.write_line(text)
        reporter.flush()


def _cases(items: list[pytest.Item]) -> list[CaseItem]:
    return [item for item in items if isinstance(item, CaseItem)]


def _is_of_pytest(plugin: object) -> bool:
    name = plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__
    return name.partition(".")[0] == "_pytest"
