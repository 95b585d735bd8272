"""Ports of engines: nobody else is given them before the engine binds them."""

import subprocess
import sys
from collections import deque

import pytest

from pytest_kvconform.rigs.processes.ports import _first_ephemeral, free_port

ASK = """
from pytest_kvconform.rigs.processes.ports import free_port
print(*(free_port() for _ in range(16)))
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
        ports += [free_port() for _ in range(16)]
    finally:
        for process in processes:
            process.communicate("\n", timeout=20)
    assert len(set(ports)) == 64


def test_none_is_one_that_the_system_gives_out():
    assert all(1024 < free_port() < _first_ephemeral() for _ in range(20))


def test_a_port_in_use_is_passed_over(monkeypatch):
    import itertools
    import socket

    from pytest_kvconform.rigs.processes import ports

    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        monkeypatch.setattr(ports, "_next", itertools.count((port - ports.FIRST) // ports.PORTS_APART))
        assert free_port() != port


def test_many_runs_at_once_get_ports(monkeypatch):
    from pytest_kvconform.rigs.processes import ports

    monkeypatch.setattr(ports, "FIRST", ports.FIRST + ports.PORTS_APART // 2)  # other runs get other ports
    few = ports.FIRST + 8 * ports.PORTS_APART
    monkeypatch.setattr(ports, "_first_ephemeral", lambda: few)
    first = [free_port() for _ in range(8)]
    later = [free_port() for _ in range(8)]  # every port was given to an engine of this run
    assert set(first) == set(later) <= set(range(ports.FIRST, few, ports.PORTS_APART))
    while ports._taken:
        ports._taken.popleft()[1].close()


def test_a_port_is_kept_until_its_engine_has_bound_it(monkeypatch):
    """Of more than MOST ports those go first that an engine has bound, and not the oldest one."""
    import socket

    from pytest_kvconform.rigs.processes import ports

    monkeypatch.setattr(ports, "_taken", deque())
    slow, *given = (free_port() for _ in range(ports.MOST))
    listening = [socket.create_server(("127.0.0.1", port)) for port in given[:8]]
    try:
        free_port()
        kept = {port for port, _ in ports._taken}
        assert slow in kept and kept.isdisjoint(given[:8])
        assert ports._token(slow) is None
    finally:
        for one in (*listening, *(token for _, token in ports._taken)):
            one.close()


def test_a_port_is_kept_again_for_the_next_engine(monkeypatch):
    """An engine has bound its port, and this run has let it go. The port is not given to others meanwhile."""
    import itertools

    from pytest_kvconform.rigs.processes import ports

    monkeypatch.setattr(ports, "_taken", deque())
    port = free_port()
    ports._taken.popleft()[1].close()
    for _ in range(2):  # it may be kept already
        ports.keep_again(port)
    monkeypatch.setattr(ports, "_next", itertools.count((port - ports.FIRST) // ports.PORTS_APART))
    try:
        assert free_port() != port and [kept for kept, _ in ports._taken].count(port) == 1
    finally:
        for _, token in ports._taken:
            token.close()


def test_without_a_port_a_smaller_run_is_suggested(monkeypatch):
    from pytest_kvconform.rigs.processes import ports

    monkeypatch.setattr(ports, "_token", lambda port: None)
    with pytest.raises(OSError, match="no TCP port is free: a smaller -n"):
        free_port()


def test_a_port_that_an_engine_is_about_to_bind_is_not_bound_to_look_at_it(monkeypatch):
    """An engine whose bind fell into such a moment did not start, 388 times in 200,000."""
    from pytest_kvconform.rigs.processes import ports

    monkeypatch.setattr(ports, "_taken", deque())
    bound, is_free = [], ports._is_free
    monkeypatch.setattr(ports, "_is_free", lambda port: bound.append(port) or is_free(port))
    given = [free_port() for _ in range(ports.MOST + 8)]
    try:
        assert len(bound) == len(set(bound)) and set(given) <= set(bound)
    finally:
        for _, token in ports._taken:
            token.close()
