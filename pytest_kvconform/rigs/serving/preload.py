"""What the zygote imports for servers: vLLM's server, and lm-eval, where each is installed.

The import is the whole work of this module. What is missing is told where it is needed.
"""

from __future__ import annotations

import contextlib
import os

# lm-eval and what it imports ask the hub for nothing
os.environ |= {"HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

with contextlib.suppress(ImportError):
    import uvloop
    import vllm.entrypoints.launchers.api_server.entry
    import vllm.entrypoints.launchers.cli_args
    import vllm.v1.engine.async_llm

    import pytest_kvconform.rigs.serving.server_process  # noqa: F401
with contextlib.suppress(ImportError):
    import datasets
    import lm_eval.evaluator
    import lm_eval.models.openai_completions
    import lm_eval.tasks

    import pytest_kvconform.rigs.serving.evaluation  # noqa: F401
