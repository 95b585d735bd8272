"""What the zygote imports for servers: vLLM's server, and lm-eval, where each is installed.

What is missing is told where it is needed.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

# lm-eval and what it imports ask the hub for nothing
os.environ |= {"HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def preload() -> None:
    """Import vLLM's server and lm-eval."""
    import vllm.entrypoints.launchers.api_server.entry
    import vllm.entrypoints.launchers.cli_args
    import vllm.v1.engine.async_llm  # noqa: F401

    import pytest_kvconform.rigs.serving.server_process  # noqa: F401

    _import_lm_eval()


def preload_without_vllm(arguments: dict[str, Any]) -> dict[str, str]:
    """Import lm-eval alone, for servers that already run. Returns facts like `vllm_setup.preload`."""
    _import_lm_eval()
    return {"vllm": "", "device": "", "mended": "", "kernels": "", "connectors": ""}


def _import_lm_eval() -> None:
    import pytest_kvconform.rigs.serving.evaluation  # noqa: F401

    with contextlib.suppress(ImportError):
        import lm_eval.evaluator
        import lm_eval.models.openai_completions
        import lm_eval.tasks  # noqa: F401
