"""What the zygote imports for servers: vLLM's server, and lm-eval, where each is installed.

What is missing is told where it is needed. What does not load blocks the cases on servers, and no other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# of the zygote: lm-eval and what it imports ask the hub for nothing
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
REASON = "serving-not-imported.txt"  # in the folder of the run


def preload() -> None:
    """Import vLLM's server and lm-eval."""
    os.environ |= OFFLINE
    _noting("vLLM's OpenAI-compatible server", _import_server)
    _noting("lm-eval", _import_lm_eval)


def preload_without_vllm(arguments: dict[str, Any]) -> dict[str, str]:
    """Import lm-eval alone, for servers that already run. Returns facts like `vllm_setup.preload`."""
    os.environ |= OFFLINE
    _noting("lm-eval", _import_lm_eval)
    return {"vllm": "", "device": "", "mended": "", "kernels": "", "connectors": ""}


def why_not_imported(address: str) -> str:
    """Why the zygote at this address could not import what servers need, in a sentence; "" if it could."""
    try:
        return (Path(address).parent / REASON).read_text()
    except OSError:
        return ""


def _noting(what: str, load: Callable[[], None]) -> None:
    """Import, and write down why it does not work. A package that is not installed is told elsewhere."""
    try:
        load()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "vllm":
            _note(what, error)
    except Exception as error:  # of whatever a package does when it is imported
        _note(what, error)


def _note(what: str, error: Exception) -> None:
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    # the folder of the run is the one for temporary files, see launch.environment
    Path(os.environ["TMPDIR"], REASON).write_text(f"{what} does not load here: {text}")


def _import_server() -> None:
    import pytest_kvconform.rigs.serving.server_process  # noqa: F401
    from pytest_kvconform.rigs.vllm_setup import openai_server

    openai_server.preload()


def _import_lm_eval() -> None:
    import lm_eval.evaluator
    import lm_eval.models.openai_completions
    import lm_eval.tasks

    import pytest_kvconform.rigs.serving.evaluation  # noqa: F401

    # After each run lm-eval would describe this machine, for which torch starts pip and other programs.
    lm_eval.evaluator.add_env_info = lambda results: None
