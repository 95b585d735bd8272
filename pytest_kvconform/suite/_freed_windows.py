"""Whether vLLM frees blocks before the window of layers with a sliding window, in any cell of a connector."""

from __future__ import annotations

from pytest_kvconform.result import NotApplicable
from pytest_kvconform.rigs.bench import Bench


def require_freed_windows(bench: Bench) -> None:
    """Raise NotApplicable for a connector with which vLLM turns its hybrid memory allocator off. In a model
    with layers of full attention it frees no block before a window then (config/vllm.py).
    """
    if not bench.facts.supports_hma:
        raise NotApplicable(
            f"{bench.facts.name} lacks HMA in this configuration, as vLLM's supports_hma_config answers: all "
            "tokens of layers with a window are kept"
        )
