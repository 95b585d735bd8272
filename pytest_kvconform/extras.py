"""Packages: those of the extra `accuracy`, without which its tier asks nothing, and those of a connector."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable

EXTRA = "pytest-kvconform[accuracy]"
# module -> distribution
ROUTER = {"vllm_router": "vllm-router"}  # stores need none, nor does a router that runs already
LM_EVAL = {
    "lm_eval": "lm-eval[api]",
    "aiohttp": "lm-eval[api]",
    "tenacity": "lm-eval[api]",
    "orjson": "orjson",
    "scipy": "scipy",
    "prometheus_client": "prometheus-client",
}
PACKAGES = LM_EVAL | ROUTER
IMPORT_S = 60  # for one package that a connector needs


def not_installed(modules: Iterable[str] = PACKAGES) -> tuple[str, ...]:
    """The distributions of these modules that are not installed. Imports none of them."""
    return tuple(dict.fromkeys(PACKAGES[name] for name in modules if importlib.util.find_spec(name) is None))


def import_error(module: str) -> str:
    """Return the last line that an import of a module prints when it fails; "" if it does not."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        run = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_S,
        )
    except subprocess.TimeoutExpired:
        return f"the import of {module} takes more than {IMPORT_S} s"
    if run.returncode == 0:
        return ""
    return (run.stderr.strip().splitlines() or [f"the import ends with exit code {run.returncode}"])[-1]
