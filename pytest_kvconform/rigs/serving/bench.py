"""The bench of cases on servers: the questions of a cell are asked once, however many cases judge."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

from model_matrix import load_families
from pytest_kvconform import extras
from pytest_kvconform.result import Blocked, Cell, HarnessError, NotApplicable
from pytest_kvconform.rigs.context import LONGER, RunContext, declared_amount
from pytest_kvconform.rigs.engine.handle import EngineFailed
from pytest_kvconform.rigs.serving import chain as chains
from pytest_kvconform.rigs.serving import gate
from pytest_kvconform.rigs.serving.again import ask_again, odd_among_others, rounded_answers
from pytest_kvconform.rigs.serving.chain import Chain
from pytest_kvconform.rigs.serving.data import Exam, exam_of, exam_of_deployment, exam_of_real_checkpoint
from pytest_kvconform.rigs.serving.evaluator import AT_ONCE, Progress, Unanswered, ask, new_salt
from pytest_kvconform.rigs.serving.messages import Answers, Prompt
from pytest_kvconform.rigs.serving.metrics import Counters, Unreachable, grown
from pytest_kvconform.rigs.serving.observation import Look, Runs, ServingObservation
from pytest_kvconform.rigs.serving.preload import why_not_imported
from pytest_kvconform.rigs.serving.record import remove_answers, write_answers
from pytest_kvconform.rigs.serving.server import ROUTER, Endpoint, Server, require_packages
from pytest_kvconform.subject import Subject

PROBED = 4  # questions that are asked of a store one by one
TIMEOUT = "TimeoutError"  # what lm-eval raises for a question that is not answered in time
CONTROL = 8  # questions that are asked of the servers without the connector, at least
NO_PREFIX_CACHE = "the servers of this tier have no prefix cache, and vLLM then keeps no states for a store"
SUBJECT, BASELINE = "the subject", "the baseline"
Failed = (EngineFailed, Unanswered, Unreachable)


class LoadsAlone(Exception):
    """D loads when it is asked alone, too, as from a cache of its own, so that it is no baseline."""


class ServingBench:
    """Asks the questions of a cell, of the subject and of the baseline."""

    def __init__(self, context: RunContext):
        self.context = context
        # waits of full length, whatever the connector has made shorter, where it is to be told whose failure
        # it is
        self._patient = replace(context, in_vain=set())
        self._hasty = replace(context, in_vain={"request"})
        self._with_baseline = False  # see `chain.start`
        self._hangs = False  # questions of a cell were not answered in time, twice
        self._seen: dict[Cell, ServingObservation | Exception] = {}
        self._chain: Chain | None = None
        self._progress = Progress(context, 0)
        context.running.register(self.end)

    def observe(self, cell: Cell) -> ServingObservation:
        """What was seen in a cell; the first call asks the questions.

        Raises Blocked, NotApplicable, HarnessError or ProcessKilled if they could not be asked.
        """
        if cell not in self._seen:
            try:
                self._seen[cell] = self._observe(cell)
            except (Blocked, NotApplicable, HarnessError) as error:
                self._seen[cell] = error
            except OSError as error:
                text = error.strerror or str(error)
                self._seen[cell] = HarnessError(f"this machine keeps the servers from being asked: {text}")
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
        if self.context.subject.is_same_engine:
            self.context.require_known_handover("accuracy")
        if self.context.settings.nightly:
            chains.require_gpus(self.context, cell)
        require_packages(*extras.LM_EVAL)
        if why := why_not_imported(self.context.address):
            raise Blocked(why)
        self.context.require_nothing_missing()
        if not self.context.settings.deployed:
            self.context.require_kernels()
        remove_answers(Path(self.context.settings.report), cell)
        exam = self._exam(cell)
        data = exam.questions.data
        known = self._hangs or self._is_known(cell)
        context = self._hasty if known else self._patient
        try:
            runs = self._question(context, cell, exam)
            if exam.canary and not runs.loaded and not declared_amount(self.context.subject):
                self.context.progress("D loaded nothing: asking with longer prompts, which it may load alone")
                exam = exam_of(self.context, cell, LONGER)
                runs = self._question(context, cell, exam)
        except Failed as failed:
            first = failed
        else:
            return ServingObservation(data=data, model=exam.model, runs=runs, file=self._file(runs, cell))
        self._raise_unless_the_connector_failed(cell, exam, first)
        try:
            # the first wait was of full length, or one from which the cause is known
            self._question(self._hasty if _in_vain(first) else self._patient, cell, exam)
        except Failed as again:
            _raise_if_the_machine_failed(again)
            self._hangs |= not known and _in_vain(first) and _in_vain(again)
            log, refusal = (again.log, again.refusal) if isinstance(again, EngineFailed) else ((), "")
            return ServingObservation(data=data, failed=str(again), refusal=refusal, log=log)
        raise Blocked(
            f"{first}; nothing failed when the same was done once more, with the connector and without it, "
            "so whose failure it was cannot be told: run it again on a machine with less other work"
        )

    def _is_known(self, cell: Cell) -> bool:
        """Whether it is known why servers do not answer: engines of the cell kept blocks, so that the servers
        are soon full, or hung.
        """
        return cell in self.context.keeping or cell in self.context.hanging

    def _exam(self, cell: Cell) -> Exam:
        if self.context.settings.deployed:
            return exam_of_deployment(self.context)
        of = exam_of_real_checkpoint if self.context.settings.nightly else exam_of
        return of(self.context, cell)

    def _question(self, context: RunContext, cell: Cell, exam: Exam) -> Runs:
        """Start what is asked, and ask until the answers tell enough, or all looks were taken."""
        try:
            return self._ask(context, cell, exam)
        except LoadsAlone:
            context.progress("D loads when it is asked alone, too: asking a server without the connector")
            self._with_baseline = True
            return self._ask(context, cell, exam)

    def _ask(self, context: RunContext, cell: Cell, exam: Exam) -> Runs:
        """See `_question`. Raises LoadsAlone, once."""
        self._progress = Progress(context, 0)
        try:
            deployed = context.settings.deployed
            more = {"with_baseline": self._with_baseline}
            chain = chains.attach(context) if deployed else chains.start(context, cell, exam, **more)
            self._chain = chain
            self._progress = Progress(context, 3 + chain.fills, exam.looks)
            block = chain.decode.block_size()
            look = self._look(context, chain, exam)
            runs = Runs((look,), block)
            if chain.fills and any(not one.external for one in look.prompts):
                runs = replace(runs, probed=self._one_by_one(context, chain, exam))
            runs = self._asked_in_turn(context, chain, exam, runs)
            if generations(runs).outcome is not gate.Outcome.FAIL:
                runs = replace(runs, repeated=ask_again(context, cell, chain, exam, look))
            while True:
                if generations(runs).outcome is gate.Outcome.FAIL:
                    rounded = rounded_answers(context, cell, exam, runs)
                    runs = replace(runs, repeated=(*runs.repeated, *rounded))
                if runs.wrong or not wants_more(runs, exam):
                    return runs
                if sum(not one.in_turn for one in runs.looks) == exam.looks:
                    found = odd_among_others(context, cell, exam, runs)
                    return replace(runs, repeated=(*runs.repeated, *found))
                context.progress("answers differ: asking all questions again")
                self._progress.end_of_look()
                look = self._look(context, chain, exam.again(len(runs.looks)))
                runs = replace(runs, looks=(*runs.looks, look))
                runs = self._asked_in_turn(context, chain, exam, runs)
        finally:
            self.end()

    def _look(self, context: RunContext, chain: Chain, exam: Exam, in_turn: bool = False) -> Look:
        """Ask the subject, and the baseline twice.

        The subject is asked first: D has not computed the prompts before, so that a block that is never
        written cannot hold the right KV. In later looks it holds the KV of other questions. Only AT_ONCE
        prompts are in D at a time, and vLLM gives away the block first that became free last
        (v1/core/block_pool.py: BlockPool.free_blocks, without prefix caching).
        """
        progress, at_once = self._progress, AT_ONCE
        if in_turn:
            progress, at_once = Progress(context, 3), 1
        if chain.fills and chain.prefill is not None:
            ask(context, chain, chain.prefill.url, exam, progress, "P, which saves")
        before = len(_prompts(chain))

        def counted(url: str, what: str, *counts: Endpoint) -> tuple[Answers, list[Counters]]:
            earlier = [one.counters() for one in counts]
            answers = ask(context, chain, url, exam, progress, what, at_once=at_once)
            pairs = zip(counts, earlier, strict=True)
            return answers, [one.counters().since(before) for one, before in pairs]

        by_p = _moved(chain.prefill)
        subject, [of_subject] = counted(chain.subject.url, SUBJECT, chain.decode)
        moved_by_p = None if by_p is None else grown(by_p, _moved(chain.prefill) or {})
        prompts = _prompts(chain)[before:]
        first, [of_first] = counted(chain.baseline.url, BASELINE, chain.baseline)
        if of_first.external and chain.baseline is chain.decode and not context.settings.deployed:
            raise LoadsAlone
        second, [of_second] = counted(chain.baseline.url, f"{BASELINE} again", chain.baseline)
        counts = of_subject, (of_first, of_second)
        return Look(subject, (first, second), *counts, prompts, moved_by_p, in_turn)

    def _asked_in_turn(self, context: RunContext, chain: Chain, exam: Exam, runs: Runs) -> Runs:
        """Add a look that asks one question after the other, if D has computed prompts in the last look.

        A connector may let D compute a prompt while D loads others. One such look is enough.
        """
        if chain.fills or not runs.looks[-1].has_skipped or any(look.in_turn for look in runs.looks):
            return runs
        context.progress("D has computed some prompts: asking one question after the other")
        look = self._look(context, chain, exam.again(len(runs.looks)), in_turn=True)
        return replace(runs, looks=(*runs.looks, look))

    def _one_by_one(self, context: RunContext, chain: Chain, exam: Exam) -> tuple[Prompt, ...]:
        """D's requests for some questions, each of which P has answered just before.

        A store may keep fewer prompts than there are questions, or save them later.
        """
        assert chain.prefill is not None
        before, progress = len(_prompts(chain)), Progress(context, 0)
        for question in range(min(PROBED, exam.questions.count)):
            alone = exam.alone((question,), 1)
            salt = new_salt()  # D has seen the prompt before, and may have saved it itself
            ask(context, chain, chain.prefill.url, alone, progress, "P, which saves", salt)
            ask(context, chain, chain.subject.url, alone, progress, SUBJECT, salt)
        return _prompts(chain)[before:]

    def _file(self, runs: Runs, cell: Cell) -> str:
        """Write the answers into the folder of the report. Raises HarnessError."""
        folder = Path(self.context.settings.report)
        try:
            return str(write_answers(runs, folder, cell))
        except OSError as error:
            raise HarnessError(f"the answers cannot be written to {folder}: {error.strerror}") from None

    def _raise_unless_the_connector_failed(self, cell: Cell, exam: Exam, error: Exception) -> None:
        """Raise HarnessError or Blocked if the connector need not be to blame for a failure."""
        _raise_if_the_machine_failed(error)
        if self.context.settings.deployed:
            raise Blocked(
                f"{error}: whose failure it is cannot be told of servers that already run"
            ) from None
        # what was being answered when it failed had been asked, too
        asked = max(CONTROL, self._progress.done + AT_ONCE if self._progress.done else 0)
        if excuse := self._without_connector(cell, exam, asked):
            raise Blocked(f"the servers fail here without the connector, too: {excuse}") from None
        if isinstance(error, EngineFailed):
            _raise_if_states_want_a_prefix_cache(self.context.subject, cell, error.refusal)

    def _without_connector(self, cell: Cell, exam: Exam, asked: int) -> str:
        """Return why the same fails here without the connector; "" if it does not.

        As many questions are `asked` as had been when it failed.
        """
        context = self._patient
        try:
            with chains.started(context, cell, exam, with_connector=False) as chain:
                fill = chain.prefill if chain.fills else None
                urls = (chain.subject.url, *((fill.url,) if fill else ()))
                progress = Progress(context, len(urls))
                while asked > 0:
                    part = exam.first(min(asked, exam.questions.count))
                    for url in urls:
                        ask(context, chain, url, part, progress, "P and D without the connector")
                    asked -= part.questions.count
        except Failed as error:
            return str(error)
        return ""


def _in_vain(failed: Exception) -> bool:
    """Whether a question was not answered in time."""
    return isinstance(failed, Unanswered) and TIMEOUT in str(failed)


def _raise_if_states_want_a_prefix_cache(subject: Subject, cell: Cell, refusal: str) -> None:
    """Raise Blocked if a store that supports states refuses the servers of this tier, which have no prefix
    cache: without one vLLM keeps no state at the end of a block (model_executor/models/config.py:
    MambaModelConfig).
    """
    if not (refusal and subject.is_store and subject.features.get("mamba-state") == ""):
        return
    if load_families()[cell.family].has_state:
        raise Blocked(f"{NO_PREFIX_CACHE}: {refusal}") from None


def _raise_if_the_machine_failed(error: Exception) -> None:
    """Raise HarnessError if the router failed, in which no code of the connector runs, or a disk is full."""
    if isinstance(error, EngineFailed) and error.role == ROUTER:
        raise HarnessError(f"{error}, and no code of the connector runs in it") from None
    if os.strerror(errno.ENOSPC) in str(error):
        raise HarnessError(f"a disk of this machine is full: {error}") from None


def _moved(server: Endpoint | None) -> dict[str, int] | None:
    """P's own metrics of bytes; None: it is not known, or does not tell. They are no condition of a run."""
    try:
        return server.moved() if server else None
    except Unreachable:
        return None


def _prompts(chain: Chain) -> tuple[Prompt, ...]:
    return chain.decode.prompts() if isinstance(chain.decode, Server) else ()


def wants_more(runs: Runs, exam: Exam) -> bool:
    """Whether all questions are asked again before the answers are judged.

    Of a canary one odd answer is enough. Some answers of a real checkpoint always differ, for rounding: those
    of the nightly matrix, which are many, are asked again only while a test cannot tell.
    """
    if not exam.model:
        return gate.wants_more(generations(runs))
    correct = [gate.compare_correctness(*judged(runs, strict)) for strict in (True, False)]
    if any(one.outcome is gate.Outcome.FAIL for one in correct):
        return False
    return any(map(gate.is_in_doubt, (generations(runs), *correct)))


def judged(runs: Runs, strict: bool) -> tuple[dict[int, bool], dict[int, bool]]:
    """Whether each answer of the subject and of the baseline is right, by strict-match or flexible-extract.

    Without the questions that show nothing.
    """
    subject, baseline = (
        gate.without(gate.right(answers, strict), runs.rounded)
        for answers in (runs.subject, runs.baselines[0])
    )
    return subject, baseline


def generations(runs: Runs) -> gate.Result:
    """The subject's texts compared with those of the baseline's two runs."""
    subject, first, second = (
        gate.without(gate.texts(answers), runs.rounded) for answers in (runs.subject, *runs.baselines)
    )
    return gate.compare_generations(subject, first, second)
