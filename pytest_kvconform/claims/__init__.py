"""A claim: the whole suite, run three times with three seeds, with nothing that a project could change.

A claim is a folder. `kvconform claim` runs the suite once for each seed (run.py) and writes
`seed-1/report.json` and so on into it. The run ignores conftest files, settings of pytest and plugins. pytest
refuses `--kv-claim` where one of them could change the run (isolation.py). A claim also fixes every setting
that does not describe the connector. `kvconform badge` reads the three reports, refuses what is no claim
(reports.py), and writes a badge for each level and a predicate for an attestation (badge.py). `kvconform
verify` computes these files again.
"""

from __future__ import annotations

from pytest_kvconform.settings import CONNECTOR_SETTINGS

SEEDS = (1, 2, 3)  # each is another order of the cells and the cases
DAYS = 90  # that a badge holds: docs/badges.md says why
# settings that a claim may have: what the connector is, device and kernels, and where the report goes
_FREE = ("connector", *CONNECTOR_SETTINGS, "device", "hide_cpu", "claim", "seed", "report", "html")


def is_fixed(setting: str) -> bool:
    """Whether a claim has the default of a setting: a field of `Settings`, or its key."""
    return setting.replace("-", "_") not in _FREE
