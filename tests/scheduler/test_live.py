"""Cases on live engines: each mistake is found and named, and right connectors of several designs pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.case_runner import OF_VLLM, CaseRunner, CellRun
from tests.helpers.fixtures import ROOT, importable_from, must_be_installed

FOLDER = "protocol/stress/"
STORES = (
    "BlockStore LaterStore IgnoresPreemptions ExtendsResumedTables CountsOnTheOrder CountsFromTheEnd "
    "KeysOfEmbeds KeepsResults"
).split()


@pytest.fixture(scope="module")
def case_runner() -> Iterator[CaseRunner]:
    must_be_installed()
    with importable_from(ROOT):
        geometries = ("llama3_1_8b", "gemma3_1b", "qwen3_5_35b_a3b")
        runner = CaseRunner("tests.scheduler.live_connectors", "protocol", geometries, "full")
        yield runner
        assert runner.close() == []


Run = Callable[..., CellRun]


@pytest.fixture
def run(case_runner: CaseRunner) -> Run:
    """Run cases of a module on a connector: run("BlockStore", "preemption")."""

    def run(
        connector: str, module: str = "", case: str = "", family: str = "llama3_1_8b", **more: Any
    ) -> CellRun:
        return case_runner.run(
            connector,
            family,
            setup="b16",
            matrix="full",
            profile="store" if connector in STORES else "",
            declared={"handover": "rendezvous"} if connector == "Rendezvous" else {},
            config="" if connector not in OF_VLLM else '{"kv_connector_extra_config": {"num_threads": 0}}',
            only=lambda planned: (
                planned.module.startswith(FOLDER + module) and planned.case.name.startswith(case)
            ),
            **more,
        )

    return run


# Wrong connector, case, rule, what is said.
PREEMPTED, BOUNDED = "preempted_blocks_are_never_read_again", "memory_of_both_halves_is_bounded"
MANY, FAR = "many_loads_in_flight_arrive", "large_block_ids_and_offsets_arrive"
CLOCKS, DRAFTS = "wall_clocks_may_differ_and_jump", "kv_arrives_beside_slots_of_drafts"
DIFFER = "loads_are_made_although_clocks_differ"
KINDS, EMBEDS = "requests_of_every_kind_end", "loads_belong_to_their_own_embeddings[saved]"
OF_ANOTHER = r"\(request 1\), token \d+ in block \d+ of \S+ is token \d+ of request 0, computed by engine 0"
MORE = r"after 480 more requests, {}: {} half: {} holds \d+ things, \d+ more than 480 requests ago"
WRONG = [
    ("IgnoresPreemptions", PREEMPTED, "KV-PREEMPT-001", OF_ANOTHER),
    ("ExtendsResumedTables", PREEMPTED, "KV-PREEMPT-001", r"\(request 1\), token \d+ in block \d+ of \S+ is"),
    ("PacksOldBlocks", PREEMPTED, "KV-PREEMPT-001", OF_ANOTHER),
    ("ForgetsLoads", MANY, "KV-MANY-001", r"did not come to their end: .* WAITING_FOR_REMOTE_KVS"),
    ("TagsOfFiveBits", MANY, "KV-MANY-001", r"\(request 0\), token 0 .* is token 0 of request 32, computed"),
    ("KeepsBlockIds", BOUNDED, "KV-MANY-002", MORE.format("P0", "scheduler", r"tables\.\*")),
    ("KeepsHandles", BOUNDED, "KV-MANY-002", MORE.format("D0", "worker", "handles")),
    ("KeepsResults", BOUNDED, "KV-MANY-002", MORE.format("P0", "worker", "records")),
    ("PacksInto16Bits", f"{FAR}[P]", "KV-NUMBERS-001", r"is zeros: it was never written|no word"),
    ("LeasesByWallClock", f"{CLOCKS}[p_jumps]", "KV-CLOCK-001", r"ended with an error"),
    (
        "ExpiresByWallClock",
        f"{DIFFER}[d_ahead]",
        "KV-CLOCK-002",
        r"D loads nothing since a wall clock is wrong",
    ),
    ("CountsFromTheEnd", f"{DRAFTS}[PD]", "KV-SPEC-001", r"token \d+ in block \d+ of \S+ is"),
    ("CountsOnTheOrder", "wait_for_save_may_come_after_the_results", "KV-SPEC-002", r"keeps blocks"),
    ("ProducersLoadNothing", "two_engines_hand_over_both_ways", "KV-BOTH-001", r"WAITING_FOR_REMOTE_KVS"),
    ("NamesTheFirstRank", "data_parallel_ranks_are_told_apart", "KV-DP-001", r"ended with an error"),
    ("CountsTokenIds", f"{KINDS}[embeds]", "KV-KIND-001", r"on_new_request raised TypeError"),
    (
        "ReadsSamplingParams",
        f"{KINDS}[pooling]",
        "KV-KIND-001",
        r"on_new_request raised Attribute",
    ),
    (
        "IgnoresEmbeddings",
        "blocks_of_embeddings_are_freed",
        "KV-BLOCKS-001",
        r"releases did not come to their end: P keeps blocks, and nothing has changed for \d+ s",
    ),
    (
        "KeysOfEmbeds",
        EMBEDS,
        "KV-KIND-002",
        r"request 0\), token 0 .* of request 2, computed by",
    ),
]


@pytest.mark.parametrize(("connector", "case", "rule", "said"), WRONG, ids=lambda value: value)
def test_a_mistake_is_found_and_named(run: Run, connector: str, case: str, rule: str, said: str) -> None:
    found = run(connector, case=case.partition("[")[0])
    assert "HARNESS" not in found.outcomes.values(), [result.reason for result in found.results]
    assert case in found.failed, found.outcomes
    assert {finding.rule for finding in found.findings.values()} == {rule}
    assert re.search(said, found.findings[case].happened), found.findings[case].happened


UNFIT = EMBEDS, EMBEDS.replace("saved", "handed_over")
# Right connector -> modules whose cases must pass.
RIGHT = {
    "Right": "",
    "BlockStore": "preemption many numbers speculation kinds",
    "LaterStore": "preemption many numbers speculation",
    "PacksBlocks": "preemption numbers roles",
    "RemembersSome": "many",
    "Rendezvous": "preemption numbers roles",
    "LayerWise": "preemption many numbers",
    "NixlConnector": "preemption many numbers roles kinds",
}


@pytest.mark.parametrize("connector", RIGHT)
def test_a_right_connector_passes(run: Run, connector: str) -> None:
    for module in RIGHT[connector].split() or ("",):
        found = run(connector, module)
        other = {
            name: outcome
            for name, outcome in found.outcomes.items()
            # prompts of embeddings are either saved or handed over
            if outcome != ("NOT-APPLICABLE" if name == UNFIT[connector in STORES] else "PASS")
        }
        assert other == {}, [
            (result.reason, result.finding) for result in found.results if result.outcome != "PASS"
        ]
        assert found.outcomes
