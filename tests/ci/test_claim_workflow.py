"""The reusable workflow of a claim: its commands are those of the suite, and docs/badges.md shows it."""

from __future__ import annotations

import re

import yaml

from pytest_kvconform import cli
from pytest_kvconform.claims import SEEDS, badge
from pytest_kvconform.settings import OPTIONS
from tests.docs.pages import PAGES, blocks
from tests.helpers.fixtures import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "claim.yml"
READ = yaml.safe_load(WORKFLOW.read_text())
JOBS = READ["jobs"]
INPUTS = READ[True]["workflow_call"]["inputs"]  # in YAML 1.1 the key `on` is true
CALLER, STEP = (yaml.safe_load(block) for block in blocks(PAGES["docs/badges.md"], "yaml"))


def commands(job: str) -> list[str]:
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def test_each_seed_has_a_job_and_the_commands_are_those_of_the_suite() -> None:
    assert tuple(JOBS["run"]["strategy"]["matrix"]["seed"]) == SEEDS
    ours = [line for job in JOBS for line in commands(job) if line.startswith("kvconform")]
    assert [line.split()[1] for line in ours] == ["claim", "badge", "verify"]
    values = {"$CONNECTOR": "m:C", "$SEED": "3", "$SIDE_BY_SIDE": "2"}
    for line in ours:
        words = [
            re.sub(r"\$\w+", lambda found: values[found[0]], word.replace('"', "")) for word in line.split()
        ]
        assert cli._parser().parse_args(words[1:]).run


def test_what_is_signed_is_what_a_claim_has() -> None:
    [step] = [one for one in JOBS["badge"]["steps"] if one.get("uses", "").startswith("actions/attest@")]
    assert [step] == STEP
    assert step["with"]["predicate-path"] == f"kv-claim/{badge.PREDICATE}"
    assert step["with"]["subject-path"].split() == ["kv-claim/seed-*/report.json", "kv-claim/badge-*"]


def test_the_caller_gives_inputs_and_rights_that_the_workflow_needs() -> None:
    [job] = CALLER["jobs"].values()
    assert job["uses"].partition("@")[0].endswith(str(WORKFLOW.relative_to(ROOT)))
    assert {name for name, one in INPUTS.items() if one.get("required")} <= set(job["with"]) <= set(INPUTS)
    assert CALLER["permissions"] == JOBS["badge"]["permissions"]


def test_names_and_inputs() -> None:
    text = WORKFLOW.read_text()
    assert set(re.findall(r"\bKVCONFORM_\w+", text)) <= {option.variable for option in OPTIONS}
    assert set(re.findall(r"inputs\.([a-z-]+)", text)) == set(INPUTS)
    runs = [command for job in JOBS for command in commands(job)]
    assert not any("${{" in command for command in runs)  # text of a caller is no program
