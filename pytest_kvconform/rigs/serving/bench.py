"""The bench of cases on servers: the questions of a cell are asked once, however many cases judge."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_kvconform.result import Blocked, Cell, HarnessError
from pytest_kvconform.rigs.context import RunContext
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.serving import chain as chains
from pytest_kvconform.rigs.serving import gate
from pytest_kvconform.rigs.serving.chain import Chain
from pytest_kvconform.rigs.serving.data import Exam, exam_of
from pytest_kvconform.rigs.serving.evaluator import Progress, evaluate
from pytest_kvconform.rigs.serving.messages import Answers, Job, Prompt
from pytest_kvconform.rigs.serving.metrics import Counters, Unreachable
from pytest_kvconform.rigs.serving.observation import Runs, ServingObservation
from pytest_kvconform.rigs.serving.server import Server, require_package

AT_ONCE = 4  # questions
CONTROL = 8  # questions that are asked of the servers without the connector, after a failure


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
        exam = exam_of(self.context, cell)
        try:
            self._chain = chains.start(self.context, cell, exam.checkpoint, exam.longest)
            runs = self._ask_all(self._chain, exam)
        except (EngineFailed, Unanswered, Unreachable) as error:
            self.end()
            failed = str(error)
            if isinstance(error, EngineFailed) and error.role == "router":
                raise HarnessError(f"{failed}, which is not the connector's doing") from None
            if excuse := self._without_connector(cell, exam):
                raise Blocked(f"the servers fail here without the connector, too: {excuse}") from None
            log = error.log if isinstance(error, EngineFailed) else ()
            return ServingObservation(data=exam.questions.data, failed=failed, log=log)
        finally:
            self.end()
        return ServingObservation(data=exam.questions.data, runs=runs)

    def _ask_all(self, chain: Chain, exam: Exam) -> Runs:
        """Ask the baseline, the subject and the baseline again."""
        progress = Progress(self.context, exam.questions.count, 4 if chain.fill else 3)
        first, first_counted = self._counted(chain, exam, progress, "the baseline")
        if chain.fill is not None:
            self._ask(chain, chain.fill.url, exam, progress, "P, which saves")
        before = self._prompts(chain)
        subject, counted = self._counted(chain, exam, progress, "the subject")
        prompts = self._prompts(chain)[len(before) :]
        second, second_counted = self._counted(chain, exam, progress, "the baseline again")
        return Runs(subject, (first, second), counted, (first_counted, second_counted), prompts)

    def _counted(
        self, chain: Chain, exam: Exam, progress: Progress, what: str
    ) -> tuple[Answers, Counters]:
        """Ask once. Returns the answers, and what D counted meanwhile."""
        endpoint = chain.subject if what == "the subject" else chain.baseline
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
            request_s=self.context.deadlines.request,
        )
        answers = evaluate(self.context, job, what, chain.processes, progress)
        for one in chain.processes:
            one.require_alive()
        if answers.unanswered:
            raise Unanswered(
                f"{len(answers.unanswered)} questions to {what} were not answered, the first with "
                f"{answers.unanswered[0]}"
            )
        return answers

    def _prompts(self, chain: Chain) -> tuple[Prompt, ...]:
        return chain.decode.prompts() if isinstance(chain.decode, Server) else ()

    def _without_connector(self, cell: Cell, exam: Exam) -> str:
        """Return why the same fails here without the connector; "" if it does not."""
        few = exam.part(0, CONTROL)
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


PACKAGES = {"lm_eval": "lm-eval[api]", "scipy": "scipy", "prometheus_client": "prometheus-client"}
__all__ = ["ServingBench", "gate"]
