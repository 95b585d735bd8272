"""What an environment lacks is told apart from a mistake of the connector."""

from __future__ import annotations

import pytest

from pytest_kvconform.rigs.missing import waits_for_server, what_is_missing


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


def test_a_process_that_waits_for_a_server() -> None:
    assert waits_for_server(["socket.py:850 in create_connection", "connector.py:12 in __init__"])
    assert not waits_for_server(["connector.py:13 in _wait", "connector.py:12 in __init__"])
    of_a_rank = ["connection.py:395 in _recv", "connection.py:216 in recv_bytes"]
    assert waits_for_server([*of_a_rank, "connector.py:12 in __init__"])
    for function in ("_receive", "_worker_main"):
        assert not waits_for_server([*of_a_rank, f"forked_executor.py:112 in {function}"])
    asks = ["socket.py:850 in create_connection", "connector.py:12 in __init__"]
    assert waits_for_server([*asks, "forked_executor.py:190 in _worker_main"])
