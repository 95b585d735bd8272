"""One vLLM server, or vllm-router, in a child of the zygote."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection

from pytest_kvconform.rigs.serving.messages import ServerSpec
from pytest_kvconform.rigs.vllm_setup import openai_server
from pytest_kvconform.rigs.vllm_setup.engine_config import engine_arguments
from pytest_kvconform.rigs.vllm_setup.overrides import arguments_on_cpu, keep_configured_limits


def serve(connection: Connection, spec: ServerSpec) -> None:
    """Serve. The connection carries nothing: its end is the end of this process."""
    os.environ.update(spec.environment)
    if spec.block_size is not None:  # of a real checkpoint vLLM chooses it
        keep_configured_limits()  # as the engines of the engine rig
    more = {
        "skip_tokenizer_init": False,
        "disable_log_stats": False,
        "served_model_name": ["model"],
    } | spec.engine_arguments
    arguments = engine_arguments(
        spec.checkpoint,
        dtype=spec.dtype,
        block_size=spec.block_size,
        max_model_len=spec.max_model_len,
        max_batched_tokens=spec.max_seqs * spec.max_model_len,
        max_seqs=spec.max_seqs,
        tensor_parallel=spec.tensor_parallel,
        kv_transfer=spec.kv_transfer_config,
        num_blocks=spec.num_blocks,
        prefix_caching=False,
        more=arguments_on_cpu(more),
    )
    openai_server.run(arguments, spec.port, spec.records)


def route(connection: Connection, given: tuple[tuple[str, ...], str]) -> None:
    """Run vllm-router's own command line. The connection carries nothing: its end is this process's end.

    `given`: arguments, and the key with which the router asks servers. It reads the key in the environment.
    """
    from vllm_router.launch_router import main

    arguments, key = given
    os.environ |= {"RUST_BACKTRACE": "0", "OPENAI_API_KEY": key}
    sys.argv = ["vllm-router", *arguments]
    main()
