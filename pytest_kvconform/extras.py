"""The packages of the extra `accuracy`, without which the accuracy tier asks nothing."""

from __future__ import annotations

import importlib.util
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


def not_installed(modules: Iterable[str] = PACKAGES) -> tuple[str, ...]:
    """The distributions of these modules that are not installed. Imports none of them."""
    return tuple(dict.fromkeys(PACKAGES[name] for name in modules if importlib.util.find_spec(name) is None))
