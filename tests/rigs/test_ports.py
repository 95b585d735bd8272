"""Ports of engines: nobody else is given them before the engine binds them."""

import subprocess
import sys

from pytest_kvconform.rigs.processes.ports import _first_ephemeral, free_port

ASK = """
from pytest_kvconform.rigs.processes.ports import free_port
print(*(free_port() for _ in range(40)))
input()
"""


def test_no_two_processes_are_given_the_same():
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    try:
        ports = [int(word) for process in processes for word in process.stdout.readline().split()]
        # while the others live: their ports are theirs until they end
        ports += [free_port() for _ in range(40)]
    finally:
        for process in processes:
            process.communicate("\n", timeout=20)
    assert len(set(ports)) == 160


def test_none_is_one_that_the_system_gives_out():
    assert all(1024 < free_port() < _first_ephemeral() for _ in range(20))


def test_a_port_in_use_is_passed_over(monkeypatch):
    import itertools
    import socket

    from pytest_kvconform.rigs.processes import ports

    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        monkeypatch.setattr(ports, "_next", itertools.count((port - ports.FIRST) // ports.APART))
        assert free_port() != port
