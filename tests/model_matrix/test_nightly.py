"""Real checkpoints of the nightly matrix: records are checked, and expand to cells of the accuracy tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_matrix import load_accuracy_matrices, load_families, load_real_checkpoints
from model_matrix.cells import UnknownName, expand, parse_topology
from model_matrix.nightly import FILE, NightlyError, read_real_checkpoints
from pytest_kvconform.plan import make_plan
from pytest_kvconform.settings import BadSetting, Settings


def nightly(**more: object) -> Settings:
    return Settings(connector="NixlConnector", matrix="nightly", **more)  # type: ignore[arg-type]


def test_each_family_of_the_accuracy_tier_has_a_record() -> None:
    assert list(load_real_checkpoints()) == list(load_accuracy_matrices().quick)


def test_a_record_speculates_as_its_family_does() -> None:
    drafts = {family for family, real in load_real_checkpoints().items() if real.draft}
    assert drafts == {family for family in load_real_checkpoints() if load_families()[family].draft}


def test_the_cells_are_those_of_the_records_on_the_serving_rig() -> None:
    places = expand("nightly")
    assert {place.rig for place in places} == {"serving"}
    assert len(set(places)) == len(places)
    for family, real in load_real_checkpoints().items():
        words = [place.topology for place in places if place.family == family]
        assert [parse_topology(word) for word in words] == list(real.tensor_parallel)


def test_selections_narrow() -> None:
    assert [place[:2] for place in expand("nightly", ["gemma3"], ["P1D2"])] == [("gemma3", "P1D2")]
    with pytest.raises(UnknownName, match="family in the nightly matrix called 'gema3'"):
        expand("nightly", ["gema3"])


def test_the_plan_has_cases_of_the_accuracy_tier_alone_and_all_questions() -> None:
    planned = make_plan(nightly(), ()).selected
    assert {one.case.tier for one in planned} == {"accuracy"}
    assert {one.case.rule for one in planned} >= {"KV-ACC-005", "KV-ACC-007"}
    assert load_accuracy_matrices().questions["nightly"] == 1319
    # an acceptance rate is compared where a draft is served
    drafts = {one.cell.family for one in planned if one.case.rule == "KV-ACC-006"}
    assert drafts == {"kimi_k2_5_eagle3"}


def test_servers_that_already_run_are_no_part_of_it() -> None:
    urls = {"router_url": "http://127.0.0.1:9", "decode_url": "http://127.0.0.1:9"}
    with pytest.raises(BadSetting, match=r"^--kv-matrix=nightly: it starts servers"):
        make_plan(nightly(tier=("accuracy",), family=("llama",), **urls), ())


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[gemma3]", "[gema3]", "gema3: there is no such family"),
        (
            'revision = "main"',
            'revison = "main"',
            "unknown field `revison`|missing required field",
        ),
        ('"google/gemma-3-4b-it"', '"gemma-3-4b-it"', "gemma3: repository is 'gemma-3-4b-it'"),
        ('revision = "main"', 'revision = ""', "llama: revision must be"),
        ("[[8, 8]]", "[]", "kimi_k2_5_eagle3: tensor_parallel needs"),
        ("[[8, 8]]", "[[8, 0]]", "kimi_k2_5_eagle3: tensor_parallel needs"),
        ("[[8, 8]]", "[[8, 8], [8, 8]]", "tensor_parallel has a pair twice"),
        ("score = 0.845\n", "", "llama: score and score_source"),
        ("score = 0.845", "score = 84.5", "llama: score is 84.5"),
        ('dtype = "bfloat16"', 'dtype = "bf16"', "Invalid enum value 'bf16'"),
        (", tokens = 3", ", tokens = 0", "draft.tokens must be above 0"),
        ("draft = {", "# draft = {", "kimi_k2_5_eagle3: draft: there must be one"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, old: str, new: str, says: str) -> None:
    whole = "\n[llama]" + FILE.read_text().partition("\n[llama]")[2]
    assert old in whole
    (tmp_path / "nightly.toml").write_text(whole.replace(old, new, 1))
    with pytest.raises(NightlyError, match=rf"^nightly\.toml: .*({says})"):
        read_real_checkpoints(tmp_path / "nightly.toml")
