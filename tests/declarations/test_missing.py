"""What an environment lacks is told apart from a mistake of the connector."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_kvconform.rigs import vllm_setup
from pytest_kvconform.rigs.missing import waits_for_server, what_is_missing
from pytest_kvconform.rigs.processes.stacks import Frame


@pytest.mark.parametrize(
    ("kind", "message", "sentence"),
    [
        ("ModuleNotFoundError", "No module named 'lmcache.v1'", "lmcache is not installed here (pip install"),
        ("ImportError", "Please install the hf3fs_fuse package.", "a package is not installed"),
        ("RuntimeError", "NIXL is not available", "a package is not installed"),
        ("OSError", "libibverbs.so.1: cannot open shared object file", "library libibverbs.so.1 is not"),
        ("RuntimeError", "Found no NVIDIA driver on your system.", "needs a device"),
        ("AssertionError", "Torch not compiled with CUDA enabled", "needs a device"),
        ("AttributeError", "'_EventPlaceholder' object has no attribute 'cuda_event'", "needs a device"),
        ("PanicException", "At least one cache tier must be configured.", "add it to --kv-config"),
        ("ConnectionRefusedError", "[Errno 111] Connection refused", "no server answers; start it"),
        (
            "ConnectionError",
            "Error 111 connecting to localhost:6379. Connection refused.",
            "no server answers",
        ),
        (
            "FileNotFoundError",
            "[Errno 2] No such file or directory: '/etc/mooncake.json'",
            "there is no file",
        ),
        ("ValueError", "The environment variable 'NO_SUCH_CONFIG_PATH' is not set.", "NO_SUCH_CONFIG_PATH"),
        ("KeyError", "'NO_SUCH_CONFIG_PATH'", "NO_SUCH_CONFIG_PATH is not set"),
    ],
)
def test_what_is_missing_is_named(kind: str, message: str, sentence: str) -> None:
    assert sentence in what_is_missing(kind, message, "my_pkg.mod")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ModuleNotFoundError", "No module named 'my_pkg.absent'"),
        ("ImportError", "cannot import name 'Absent' from 'vllm.config'"),
        ("AttributeError", "'NoneType' object has no attribute 'block_size'"),
        ("KeyError", "'block_size'"),
        ("TypeError", "unsupported operand type(s) for +: 'int' and 'str'"),
        ("FileNotFoundError", "[Errno 2] No such file or directory: '/tmp/shared/42.bin'"),
        ("ValueError", "block_size must be set to a multiple of 16"),
        ("ValueError", "kv_role must be configured as kv_both"),
        ("RuntimeError", ""),
    ],
)
def test_a_mistake_is_the_connectors(kind: str, message: str) -> None:
    assert what_is_missing(kind, message, "my_pkg.mod") == ""


def frames(*lines: str) -> list[Frame]:
    """Frames of lines like "/lib/socket.py in create_connection"."""
    return [(file, 1, name) for file, _, name in (line.partition(" in ") for line in lines)]


def test_a_process_that_waits_for_a_server() -> None:
    asks = ("/lib/socket.py in create_connection", "/site/connector.py in __init__")
    assert waits_for_server(frames(*asks))
    assert not waits_for_server(frames("/site/connector.py in _wait", "/site/connector.py in __init__"))
    receives = ("/lib/connection.py in _recv", "/lib/connection.py in recv_bytes")
    assert waits_for_server(frames(*receives, "/site/connector.py in __init__"))
    ours = Path(vllm_setup.__file__).parent / "forked_executor.py"  # its processes wait for each other
    assert not waits_for_server(frames(*receives, f"{ours} in _receive"))
    assert waits_for_server(frames(*asks, f"{ours} in _worker_main"))
