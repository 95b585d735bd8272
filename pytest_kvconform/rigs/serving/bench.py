"""The bench of cases on servers: the questions of a cell are asked once, however many cases judge."""

from __future__ import annotations

import time
from pathlib import Path

from pytest_kvconform.result import Blocked, Cell, HarnessError
from pytest_kvconform.rigs.context import RunContext
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.serving import chain as chains
from pytest_kvconform.rigs.serving import gate
from pytest_kvconform.rigs.serving.chain import Chain
from pytest_kvconform.rigs.serving.data import Exam, exam_of, exam_of_deployment
from pytest_kvconform.rigs.serving.evaluator import Progress, evaluate
from pytest_kvconform.rigs.serving.messages import Answers, Job, Prompt
from pytest_kvconform.rigs.serving.metrics import Counters, Unreachable
from pytest_kvconform.rigs.serving.observation import Runs, ServingObservation
from pytest_kvconform.rigs.serving.record import write_answers
from pytest_kvconform.rigs.serving.server import LOOK_S, ROUTER, Server, require_package

AT_ONCE = 4  # questions
CONTROL = 8  # questions that are asked of the servers without the connector, after a failure
LONGER = 2  # times the deadline of a hand-over: a request through a router, beside three others
END_S = 3.0  # for a server to end whose engine core has ended
BASELINE, SUBJECT = "the baseline", "the subject"
PACKAGES = {"lm_eval": "lm-eval[api]", "scipy": "scipy", "prometheus_client": "prometheus-client"}


class Unanswered(Exception):
    """Questions were not answered. The message is one sentence."""


class ServingBench:
    """Asks the questions of a cell, of the subject and of the baseline."""

    def __init__(self, context: RunContext):
        self.context = context
        self._seen: dict[Cell, ServingObservation | Exception] = {}
        self._chain: Chain | None = None
        context.running.register(self.end)

    def observe(self, cell: Cell) -> ServingObservation:
        """What was seen in a cell; the first call asks the questions.

        Raises Blocked, HarnessError or ProcessKilled if they could not be asked.
        """
        if cell not in self._seen:
            try:
                self._seen[cell] = self._observe(cell)
            except (Blocked, HarnessError) as error:
                self._seen[cell] = error
        found = self._seen[cell]
        if isinstance(found, Exception):
            raise found
        return found

    def end(self) -> None:
        """End every process of the chain that runs."""
        chain, self._chain = self._chain, None
        if chain is not None:
            chain.end()

    def _observe(self, cell: Cell) -> ServingObservation:
        for module, distribution in PACKAGES.items():
            require_package(module, distribution)
        self.context.require_nothing_missing()
        deployed = self.context.settings.deployed
        exam = exam_of_deployment(self.context) if deployed else exam_of(self.context, cell)
        data = exam.questions.data
        try:
            if deployed:
                self._chain = chains.attach(self.context)
            else:
                self._chain = chains.start(self.context, cell, exam.checkpoint, exam.longest)
            runs = self._ask_enough(self._chain, exam)
            return ServingObservation(data=data, runs=runs, file=self._file(runs, cell))
        except (EngineFailed, Unanswered, Unreachable) as error:
            self.end()
            self._raise_unless_the_connector_failed(cell, exam, error)
            log = error.log if isinstance(error, EngineFailed) else ()
            return ServingObservation(data=data, failed=str(error), log=log)
        finally:
            self.end()

    def _file(self, runs: Runs, cell: Cell) -> str:
        """Write the answers into the folder of the report. Raises HarnessError."""
        folder = Path(self.context.settings.report)
        try:
            return str(write_answers(runs, folder, cell))
        except OSError as error:
            raise HarnessError(f"the answers cannot be written to {folder}: {error.strerror}") from None

    def _raise_unless_the_connector_failed(self, cell: Cell, exam: Exam, error: Exception) -> None:
        """Raise HarnessError or Blocked if the connector need not be to blame for a failure."""
        if isinstance(error, EngineFailed) and error.role == ROUTER:
            raise HarnessError(f"{error}, and no code of the connector runs in it") from None
        if self.context.settings.deployed:
            raise Blocked(
                f"{error}: whose failure it is cannot be told of servers that already run"
            ) from None
        if excuse := self._without_connector(cell, exam):
            raise Blocked(f"the servers fail here without the connector, too: {excuse}") from None

    def _ask_enough(self, chain: Chain, exam: Exam) -> Runs:
        """Ask questions until the answers tell enough, or there are no more."""
        runs = self._ask_all(chain, exam)
        while runs.looks < exam.looks and gate.wants_more(generations(runs)):
            self.context.progress("answers differ: asking the questions again")
            runs += self._ask_all(chain, exam.again(runs.looks))
        return runs

    def _ask_all(self, chain: Chain, exam: Exam) -> Runs:
        """Ask the baseline, the subject and the baseline again."""
        progress = Progress(self.context, exam.questions.count, 4 if chain.fill else 3)
        first, first_counted = self._counted(chain, exam, progress, BASELINE)
        if chain.fill is not None:
            self._ask(chain, chain.fill.url, exam, progress, "P, which saves")
        before = self._prompts(chain)
        subject, counted = self._counted(chain, exam, progress, SUBJECT)
        prompts = self._prompts(chain)[len(before) :]
        second, second_counted = self._counted(chain, exam, progress, f"{BASELINE} again")
        return Runs(subject, (first, second), counted, (first_counted, second_counted), prompts)

    def _counted(self, chain: Chain, exam: Exam, progress: Progress, what: str) -> tuple[Answers, Counters]:
        """Ask once. Returns the answers, and what D counted meanwhile."""
        endpoint = chain.subject if what == SUBJECT else chain.baseline
        before = chain.decode.counters()
        answers = self._ask(chain, endpoint.url, exam, progress, what)
        return answers, chain.decode.counters().since(before)

    def _ask(self, chain: Chain, url: str, exam: Exam, progress: Progress, what: str) -> Answers:
        """One run of lm-eval. Raises Unanswered if a question was not answered."""
        job = Job(
            url=url,
            model=chain.decode.model(),
            questions=exam.questions,
            at_once=AT_ONCE,
            # lm-eval counts all seconds, also those in which a server waits for a core
            request_s=LONGER * self.context.deadlines.request * self.context.slow,
            salt=f"kvconform-{self.context.next_name()}" if self.context.settings.deployed else "",
        )
        answers = evaluate(self.context, job, what, chain.processes, progress)
        _require_alive(chain, END_S if answers.unanswered else 0.0)
        if answers.unanswered:
            causes = [cause for one in chain.processes for cause in one.causes()]
            raise Unanswered(
                f"{len(answers.unanswered)} questions to {what} were not answered, the first with "
                f"{answers.unanswered[0]}" + (f"; logged: {causes[0]}" if causes else "")
            )
        return answers

    def _prompts(self, chain: Chain) -> tuple[Prompt, ...]:
        return chain.decode.prompts() if isinstance(chain.decode, Server) else ()

    def _without_connector(self, cell: Cell, exam: Exam) -> str:
        """Return why the same fails here without the connector; "" if it does not."""
        few = exam.first(CONTROL)
        try:
            with chains.started(
                self.context, cell, exam.checkpoint, exam.longest, with_connector=False
            ) as chain:
                progress = Progress(self.context, few.questions.count, 2)
                self._ask(chain, chain.baseline.url, few, progress, "D without the connector")
                self._ask(chain, chain.subject.url, few, progress, "P and D without the connector")
        except (EngineFailed, Unanswered, Unreachable) as error:
            return str(error)
        return ""


def _require_alive(chain: Chain, seconds: float) -> None:
    """Raise EngineFailed if a process of the chain has ended, or ends within `seconds`."""
    deadline = Deadline(seconds)
    while True:
        for one in chain.processes:
            one.require_alive()
        if deadline.over():
            return
        time.sleep(LOOK_S)


def generations(runs: Runs) -> gate.Result:
    """The subject's texts compared with those of the baseline's two runs."""
    subject, first, second = (gate.texts(run.answers) for run in (runs.subject, *runs.baselines))
    return gate.compare_generations(subject, first, second)
