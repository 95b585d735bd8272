"""The workflow of the documentation: what it builds is what it publishes, and only from main."""

from __future__ import annotations

import yaml
from mkdocs.config import load_config

from tests.helpers.fixtures import ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "docs.yml").read_text())
BUILD, PUBLISH = WORKFLOW["jobs"]["build"], WORKFLOW["jobs"]["publish"]
STEPS = {step.get("uses", step.get("run")).partition("@")[0]: step for step in BUILD["steps"]}
ON_MAIN = "github.event_name == 'push'"


def test_what_is_built_is_what_is_published() -> None:
    config = load_config(str(ROOT / "mkdocs.yml"))
    assert config.site_dir == str(ROOT / STEPS["actions/upload-pages-artifact"]["with"]["path"])
    assert [word for word in STEPS if "/" not in word] == ["make docs"]  # tests/docs runs it


def test_the_site_knows_where_it_is_published(monkeypatch) -> None:
    [(name, value)] = STEPS["make docs"]["env"].items()
    assert value == f"${{{{ steps.{STEPS['actions/configure-pages']['id']}.outputs.base_url }}}}"
    monkeypatch.setenv(name, "https://example.org/kvconform")
    assert load_config(str(ROOT / "mkdocs.yml")).site_url == "https://example.org/kvconform/"


def test_only_main_is_published_and_only_the_job_that_publishes_may() -> None:
    assert WORKFLOW[True]["push"] == {"branches": ["main"]}  # in YAML 1.1 the key `on` is true
    assert PUBLISH["if"] == ON_MAIN
    assert {STEPS[name]["if"] for name in STEPS if "pages" in name} == {ON_MAIN}
    assert (PUBLISH["needs"], PUBLISH["permissions"]) == ("build", {"pages": "write", "id-token": "write"})
    assert "write" not in {*WORKFLOW["permissions"].values(), *BUILD["permissions"].values()}
    assert PUBLISH["environment"]["name"] == "github-pages"  # the one whose deployments Pages accepts
