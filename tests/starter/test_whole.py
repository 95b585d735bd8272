"""The connector of `kvconform new` conforms as it is, in the tiers interface and protocol as a whole.

docs/start.md runs the other tiers in part, and tests/docs does so with it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pytest_kvconform import starter
from tests.helpers.fixtures import must_be_installed


def test_it_conforms(tmp_path: Path) -> None:
    must_be_installed()
    starter.write("my_connector", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "--kv-connector=my_connector:MyConnector"]
    run = subprocess.run(
        [*command, "--kv-tier=interface,protocol"], cwd=tmp_path, capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0 and "\nCONFORMS" in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]
