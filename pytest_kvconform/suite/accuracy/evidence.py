"""Evidence that the KV of each question was handed over, and not computed by D."""

from __future__ import annotations

from pytest_kvconform.case import case
from pytest_kvconform.result import (
    Blocked,
    Evidence,
    Finding,
    HarnessError,
    NotApplicable,
    Violation,
    blocked_by,
)
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.context import declared_amount
from pytest_kvconform.rigs.serving.messages import Prompt
from pytest_kvconform.rigs.serving.observation import Look, Runs
from pytest_kvconform.subject import Subject
from pytest_kvconform.suite._load_amount import due_end_of
from pytest_kvconform.suite.accuracy._observations import answered, loads


@case("KV-ACC-002")
def each_question_is_loaded(bench: Bench, _: None) -> Evidence:
    """D loads KV for each question, by D's own count, as much as is declared. A connector may let D compute
    prompts while it loads others: then D loads each question of a look that asks one after the other.

    A D that loads when it is asked alone, too, is no baseline.
    """
    runs = answered(bench)
    counted, subject = runs.counted, bench.subject
    if runs.counted_alone.external:
        raise Blocked(
            "D loads KV when it is asked alone, too, so that its answers are no baseline: give "
            "--kv-baseline-url, a server that answers without the connector"
        )
    if not runs.loaded:
        whole = f"all {counted.computed} prompt tokens of {runs.questions} questions"
        just = f"the prompts of {len(runs.probed)} questions that P had just answered"
        raise _not_loaded(f"D computed {just if runs.probed else whole}, and loaded none")
    if runs.prompts:
        _require_agreement(runs)
        asked = runs.prompts_in_turn
        if without := _not_loaded_at_all(subject, runs):
            whole = f"D computed the whole prompt of {len(without)} of {len(asked)} requests" + (
                ", although D was asked one question after the other"
                * any(look.in_turn for look in runs.looks)
            )
            if subject.is_store:
                raise Blocked(
                    f"{whole}: the store does not keep the prompts of so many questions, or saves them later"
                )
            raise _not_loaded(whole)
        declared = declared_amount(subject)
        if declared and (less := _loaded_less(subject, asked, runs)):
            raise _not_loaded(
                f"{declared} is declared, and of {len(less)} of {len(asked)} requests D loaded less: "
                f"{less[0].external} of {less[0].prompt} tokens"
            )
    else:
        for look in runs.looks:
            _require_loads_by_totals(subject, look, runs)
    return _evidence(runs, len(runs.prompts_in_turn) or len(runs.subject))


@case("KV-HANDOVER-003")
def all_whole_blocks_are_loaded(bench: Bench, _: None) -> Evidence:
    """D loads every whole block of each question, or what the connector declares.

    KV-ACC-002 holds the connector to what it declares, unless D was asked one question after the other.
    """
    declared = declared_amount(bench.subject)
    if declared and not _was_asked_in_turn(bench):
        raise NotApplicable(f"{declared} is declared, and KV-ACC-002 holds the connector to it")
    runs = loads(bench)
    if not runs.prompts:
        raise NotApplicable("a server that already runs counts sums alone: see KV-ACC-002")
    if _not_loaded_at_all(bench.subject, runs):
        case = f"kv::accuracy/evidence::each_question_is_loaded[{bench.cell}]"
        raise blocked_by(case, "D loaded nothing of some prompts")
    if less := _loaded_less(bench.subject, runs.prompts, runs):
        one = less[0]
        due = _due(bench.subject, one, runs) - one.local
        blocks = f"in whole blocks of {runs.block} tokens that P had and D had not"
        raise Violation(
            Finding(
                rule="KV-HANDOVER-003",
                happened=f"D loaded {one.external} of the {one.prompt} prompt tokens of a question, of which "
                f"{due} are {f'due, since {declared} is declared' if declared else blocks}",
                differs=f"D loaded less than {'what is due' if declared else 'the whole blocks'} "
                f"of {len(less)} of {len(runs.prompts)} requests",
                diagnosis="get_num_new_matched_tokens announced less than P had",
                signature="D recomputed what P had",
            )
        )
    return _evidence(runs, len(runs.subject))


@case("KV-ACC-003")
def moved_bytes_are_counted(bench: Bench, _: None) -> Evidence:
    """The connector's own metric of moved bytes grows, if it has one."""
    runs = loads(bench)
    moved, external = runs.moved, runs.counted.external
    if not moved:
        raise NotApplicable("the connector has no metric of bytes in the /metrics of P and D")
    if not sum(moved.values()):
        if not all(moved.keys() <= (look.moved_by_p or {}).keys() for look in runs.looks):
            raise Blocked(
                f"D counts no bytes in {', '.join(moved)}, and P, which may count them, is not known or does "
                "not: give --kv-prefill-url, the address of a server without --disable-log-stats"
            )
        raise Violation(
            Finding(
                rule="KV-ACC-003",
                happened=f"{', '.join(moved)} of P and D did not grow while D loaded {external} tokens",
                diagnosis="the connector's metric of bytes does not count what it moves",
            )
        )
    return Evidence(
        looked_at=len(moved),
        unit="metrics",
        bytes_moved=sum(moved.values()),
        external_tokens=external,
        notes=dict(moved),
    )


def _was_asked_in_turn(bench: Bench) -> bool:
    """Whether D was asked one question after the other, since it had computed some prompts."""
    try:
        return any(look.in_turn for look in loads(bench).looks)
    except Blocked:
        return False


def _evidence(runs: Runs, questions: int) -> Evidence:
    return Evidence(
        looked_at=questions,
        unit="questions",
        bytes_moved=sum(runs.moved.values()),
        external_tokens=runs.counted.external,
        computed_tokens=runs.counted.computed,
    )


def _not_loaded(happened: str) -> Violation:
    return Violation(
        Finding(
            rule="KV-ACC-002",
            happened=f"{happened}: there is no evidence of a hand-over",
            diagnosis="D computes prompts whose KV P has",
        )
    )


def _due(subject: Subject, one: Prompt, runs: Runs) -> int:
    """The token of a prompt at which D's own computation begins at the latest; 0: no load is due.

    Of a D that speculates vLLM computes the last block that a store has again (see `suite._load_amount`). A
    server does not tell with what it speculates, so a block less is due whatever it is.
    """
    drops = subject.is_store and runs.speculates
    return due_end_of(subject, one.prompt, one.local, runs.block, drops)


def _not_loaded_at_all(subject: Subject, runs: Runs) -> list[Prompt]:
    """The prompts of which D loaded nothing, though a load is due.

    A connector that declares nothing may load longer prompts alone, such as chunks of 256 tokens.
    """
    shortest = 0
    if not declared_amount(subject):
        shortest = min((one.prompt for one in runs.prompts if one.external), default=0)
    without = (one for one in runs.prompts_in_turn if not one.external and one.prompt >= shortest)
    return [one for one in without if _due(subject, one, runs) > one.local]


def _loaded_less(subject: Subject, prompts: tuple[Prompt, ...], runs: Runs) -> list[Prompt]:
    """Those of the prompts of which D loaded less than `_due`."""
    return [one for one in prompts if one.local + one.external < _due(subject, one, runs)]


def _require_loads_by_totals(subject: Subject, look: Look, runs: Runs) -> None:
    """Raise Blocked unless the sums over the questions of a look show that D loaded something for each.

    A server of the user counts sums alone. D computes the rest of each prompt behind the last token that is
    due. A question that was not loaded costs D what is due of its prompt, too. So each of them was loaded if
    D computed less beyond the rests than is due of the shortest prompt.
    """
    counted = look.counted
    prompts = [one for one in look.subject.prompts if one is not None]
    if len(prompts) < len(look.subject.answers):
        raise Blocked(
            "the answers of the router do not tell how many tokens a prompt has (usage.prompt_tokens), so "
            "that the sums of D cannot be compared with them"
        )
    own, asked = counted.computed + counted.local, sum(prompts)
    if counted.external + own != asked:
        raise Blocked(
            f"D counted {counted.external + own} tokens of prompts, and the questions have {asked}: "
            "let nobody else ask it meanwhile"
        )
    due = [_due(subject, Prompt("", length, 0, 0, length), runs) for length in prompts]
    beyond = own - (asked - sum(due))
    if beyond >= min(due):
        raise Blocked(
            f"D loaded {counted.external} tokens of {len(prompts)} prompts, and {sum(due)} are due: the sums "
            "cannot show that each question was loaded"
        )


def _require_agreement(runs: Runs) -> None:
    """Raise HarnessError unless vLLM's counters are the sums of what vLLM counts for each request."""
    external = sum(prompt.external for prompt in runs.prompts)
    if external != runs.counted.external or len(runs.prompts) != len(runs.subject):
        raise HarnessError(
            f"D's requests loaded {external} tokens in {len(runs.prompts)} prompts, but its counter grew by "
            f"{runs.counted.external} while {len(runs.subject)} questions were asked"
        )
