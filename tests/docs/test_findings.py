"""Programs of the pages in docs/findings print what these pages show."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.fixtures import must_be_installed
from tests.helpers.rings import night

from .pages import FINDINGS, blocks

WITH_OPTIONAL_PACKAGES = """
from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports
mend_imports()
"""  # torchvision from PyPI does not load beside a CPU torch


def test_a_read_after_a_notification_waits_as_the_findings_say() -> None:
    must_be_installed()
    [code] = [code for code in blocks(FINDINGS, "python") if "P makes calls" in code]
    [said] = [text for text in blocks(FINDINGS, "text") if text.startswith("notified")]
    environment = os.environ | {"UCX_TLS": "tcp,self,sm", "UCX_NET_DEVICES": "lo"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert [line for line in run.stdout.splitlines() if line.startswith("notified")] == said.splitlines(), (
        run.stderr
    )


def test_the_cpu_kernel_refuses_one_row_as_the_findings_say() -> None:
    must_be_installed()
    [code] = [code for code in blocks(FINDINGS, "python") if "causal_conv1d_fwd_cpu" in code]
    [printed] = [text for text in blocks(FINDINGS, "text") if text.startswith("2 tokens")]
    can = "from torch import cpu; print(cpu._is_avx512_bf16_supported() and not cpu._is_amx_tile_supported())"
    run = subprocess.run([sys.executable, "-c", can], capture_output=True, text=True, timeout=60, check=True)
    if run.stdout.strip() != "True":
        return  # the finding is about CPUs with AVX512-BF16 and without AMX: others have nothing to show
    run = subprocess.run(
        [sys.executable, "-c", WITH_OPTIONAL_PACKAGES + code], capture_output=True, text=True, timeout=120
    )
    assert [line for line in run.stdout.splitlines() if "tokens, strides" in line] == printed.splitlines(), (
        run.stderr
    )


@pytest.mark.night
def test_latent_attention_is_as_the_findings_say() -> None:
    """Five programs in one process, which imports vLLM once."""
    must_be_installed()
    page = FINDINGS
    words = (
        "_zero_block_ids",
        "maybe_transfer_kv_layer",
        "rotary_embedding",
        "get_head_size",
        "CPUMLABackend",
    )
    begins = ("zeroed for", "vllm.model_executor.layers", "query: ", "head_dim=", "No common block size")
    code = [code for word in words for code in blocks(page, "python") if word in code]
    printed = [text for begin in begins for text in blocks(page, "text") if text.startswith(begin)]
    assert len(code) == len(printed) == len(words)
    run = subprocess.run(
        [sys.executable, "-c", WITH_OPTIONAL_PACKAGES + "\n".join(code)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.stdout.endswith("".join(printed)), run.stderr


def test_a_generator_on_cpu_has_no_position_as_the_findings_say() -> None:
    must_be_installed()
    [code] = [code for code in blocks(FINDINGS, "python") if "get_offset" in code]
    [printed] = [text for text in blocks(FINDINGS, "text") if "use offset" in text]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout == printed, run.stderr


@pytest.mark.parametrize(
    ("of", "begins"),
    [
        night("prompt_embeds", ("NixlPull", "NixlPush")),
        ("KeyMetadata", ("fields: ", "key: ")),
        night("LookupKeyClient(", ("still in: ",)),
        night("SimpleCPUOffloadWorker(", ("reported after a preemption",)),
        night("get_zmq_rpc_path_lookup(", ("lookup_rpc_port_0",)),
        ("NixlPullConnectorScheduler)", ("first: ", "after a preemption, or a failed load")),
    ],
    ids=["embeddings", "keys", "collection", "preemption", "socket", "next turn"],
)
def test_vllm_counts_and_names_as_the_findings_say(of: str, begins: tuple[str, ...]) -> None:
    must_be_installed()
    [code] = [code for code in blocks(FINDINGS, "python") if of in code]
    [printed] = [text for text in blocks(FINDINGS, "text") if text.startswith(begins)]
    run = subprocess.run(
        [sys.executable, "-c", WITH_OPTIONAL_PACKAGES + code], capture_output=True, text=True, timeout=120
    )
    assert [line for line in run.stdout.splitlines() if line.startswith(begins)] == printed.splitlines(), (
        run.stderr
    )
