"""vLLM's OpenAI-compatible server, run in a fork of the zygote, with a record of each request's prompt.

vLLM starts the engine core as a process of its own. On CPU it asks for the start method `spawn`, which
imports everything again (15 s). `fork_engine_core` lets it fork.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

from pytest_kvconform.rigs.vllm_setup import compat

REAP_S = 5.0  # for vLLM to reap an engine core that has ended


def preload() -> None:
    """Import what `run` needs: in the zygote, for all servers."""
    import vllm.entrypoints.launchers.api_server.entry
    import vllm.v1.engine.async_llm  # noqa: F401

    compat.server_options()


def run(arguments: dict[str, Any], port: int, records: str) -> None:
    """Serve until SIGTERM. `arguments`: fields of EngineArgs; `records`: a file, see `record_prompts`.

    Raises what vLLM raises while the server starts, such as OSError for a port that is taken.
    """
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    fork_engine_core()
    record_prompts(records)
    add_up_statistics()
    server = compat.server_options()
    parser = server.make_arg_parser(FlexibleArgumentParser())
    options = ["--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "warning"]
    parsed = parser.parse_args([*options, "--disable-uvicorn-access-log", "--no-enable-log-requests"])
    for name, value in arguments.items():
        getattr(parsed, name)  # raises AttributeError where vLLM has renamed an argument
        setattr(parsed, name, value)
    server.validate_parsed_serve_args(parsed)
    uvloop.run(run_server(parsed))


def fork_engine_core() -> None:
    """Let vLLM fork the process of its engine core, whatever start method the platform asks for."""
    from vllm.v1.engine import utils

    utils.get_mp_context = _Context


class _EngineCore(ForkProcess):
    """The process of an engine core. If it is killed, so is the server.

    vLLM tells of an engine core that was killed as of one that has failed. A server that is killed is no
    failure of the connector: most likely the machine ran out of memory.
    """

    _told_to_end = False

    def start(self) -> None:
        super().start()
        threading.Thread(target=self._pass_on, daemon=True).start()

    def terminate(self) -> None:  # vLLM's shutdown begins with it, and may kill then
        # vLLM also does it to one that is just ending
        self._told_to_end = self._told_to_end or not wait([self.sentinel], 0)
        super().terminate()

    def _pass_on(self) -> None:
        wait([self.sentinel])
        deadline = time.monotonic() + REAP_S
        while self.exitcode is None and time.monotonic() < deadline:  # another thread is reaping it
            time.sleep(0.01)
        if self.exitcode == -signal.SIGKILL and not self._told_to_end:
            os.kill(os.getpid(), signal.SIGKILL)


class _Context(ForkContext):
    """What vLLM makes the process of its engine core with."""

    Process = _EngineCore


def add_up_statistics() -> None:
    """Let the front end add up and log statistics, as vLLM does unless it logs warnings alone.

    StatLoggerManager (v1/metrics/loggers.py) asks for the level of its logger. What it logs is dropped.
    """
    logging.getLogger("vllm.v1.metrics.loggers").setLevel(logging.INFO)


def record_prompts(path: str) -> None:
    """Append a line to a file for each request that has computed its prompt.

    A line is JSON: the id of the request, and its prompt's tokens: how many there are, how many came from
    outside, from the engine's own prefix cache, and how many the engine computed. vLLM's counters
    `vllm:prompt_tokens_by_source` are the sums of these numbers over all requests
    (v1/metrics/stats.py: PrefillStats).
    """
    from vllm.v1.engine.output_processor import OutputProcessor

    update = OutputProcessor._update_stats_from_output
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _update_stats_from_output(self: Any, req_state: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        if (stats := output.prefill_stats) is not None:
            line = {
                "id": output.request_id,
                "prompt": stats.num_prompt_tokens,
                "external": stats.num_external_cached_tokens,
                "local": stats.num_local_cached_tokens,
                "computed": stats.num_computed_tokens,
            }
            os.write(file, (json.dumps(line) + "\n").encode())
        return update(self, req_state, output, *args, **kwargs)

    OutputProcessor._update_stats_from_output = _update_stats_from_output
