"""A feature that is declared true and that no case tests: a selection says so, and a whole run is INCOMPLETE.

In these runs no case of unequal sizes applies: those are all the cases that need tp-heterogeneous.
"""

from __future__ import annotations

import pytest

from pytest_kvconform import cli

UNTESTED = {"*P1D2*": "not applicable"}
NAME = "tp-heterogeneous"
WHY = "the connector has no store"
INCOMPLETE = f"INCOMPLETE: {NAME} is declared supported, but no case could test it: {WHY}"


def told(run) -> str:
    """What the run says of features that its selection does not test."""
    text = "\n".join(run.lines).partition("not tested in this selection: ")[2]
    return text.replace("\n    ", " ").partition("\n")[0]


def observed(run, name: str = NAME) -> str:
    [row] = [row for row in run.report["verdict"]["features"] if row["name"] == name]
    return row["observed"]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--kv-tier=engine,interface",),
        ("--kv-topology=P1D2", "--kv-topology=P1D1"),
        ("--kv-family=gemma3",),
        (f"--kv-feature={NAME}", "--kv-feature=full-attention"),
        ("-k", "gemma3 or n16"),
        ("--kv-shard=2/2",),  # it has all of them
    ],
)
def test_where_every_case_of_a_feature_ran_the_run_is_incomplete(kv, arguments):
    run = kv(*arguments, deeds=UNTESTED)
    assert (run.code, run.lines.count(INCOMPLETE)) == (10, 1), run.text
    assert observed(run) == "not looked at"
    assert NAME not in told(run)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--kv-tier=engine",),
        ("--kv-topology=P1D1",),
        ("--kv-family=llama",),
        ("--kv-rule=KV-BYTES-001",),
        ("--kv-level=core", "--kv-level=hybrid", "--kv-tier=engine"),
        ("--kv-feature=sliding-window", "-k", "not n95"),
        ("-k", "arrive"),
        ("--deselect", "kv::engine/bytes::window"),
        ("kv::engine",),
        ("--kv-shard=1/2",),
        ("--kv-matrix=full", "--kv-family=gemma3"),  # llama has unequal sizes there
    ],
)
def test_a_selection_says_what_it_does_not_test(kv, capsys, arguments):
    run = kv(*arguments, deeds=UNTESTED)
    assert (run.code, run.word) == (0, "CONFORMS"), run.text
    assert NAME in told(run).split()
    assert observed(run) == "not selected"
    assert cli.main(["verify", str(run.path)]) == 0


def test_a_selection_that_tests_a_feature_does_not_name_it(kv):
    run = kv("--kv-tier=engine")
    assert run.code == 0
    assert observed(run) == "works"
    assert NAME not in told(run)


def test_a_selection_of_which_nothing_passes_shows_nothing(kv):
    run = kv("--kv-topology=P1D2", "-k", "n63", deeds=UNTESTED)
    assert run.code == 10
    assert "INCOMPLETE: no case passed: every case is not applicable" in run.text


def test_a_claim_leaves_out_nothing(kv):
    run = kv("--kv-claim", "--kv-tier=engine", deeds=UNTESTED)
    assert run.code == 10
    assert "INCOMPLETE: a claim leaves out no case, but 3 cases of the manifest did not run" in run.lines
    assert kv("--kv-claim", deeds=UNTESTED).lines.count(INCOMPLETE) == 1


def test_a_level_is_judged_by_what_was_selected(kv):
    """Of the feature's own level no case applies, and the run leaves some of them out."""
    run = kv("--kv-tier=engine", deeds=UNTESTED)
    words = {level["name"]: level["word"] for level in run.report["verdict"]["levels"]}
    assert words["heterogeneous"] == "NOT-APPLICABLE"
    words = {level["name"]: level["word"] for level in kv(deeds=UNTESTED).report["verdict"]["levels"]}
    assert words["heterogeneous"] == "INCOMPLETE"


def test_merged_shards_are_judged_as_the_whole_run(kv, capsys):
    paths = []
    for number in (1, 2):
        kv(f"--kv-shard={number}/2", f"--kv-report=shard-{number}", deeds=UNTESTED)
        paths.append(f"shard-{number}")
    capsys.readouterr()
    assert cli.main(["merge", *paths, "--report=whole"]) == 10
    assert INCOMPLETE in capsys.readouterr().out


def test_a_whole_run_names_what_its_matrix_has_no_case_for(kv):
    run = kv()
    [line] = [line for line in run.lines if line.startswith("not tested in this ")]
    assert line.startswith("not tested in this matrix: mla mamba-state ")
    assert (observed(run, "mla"), run.word) == ("not selected", "CONFORMS")
