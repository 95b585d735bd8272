"""TCP ports for engines: free when they are chosen, and still free when the engine binds them."""

from __future__ import annotations

import errno
import itertools
import random
import socket
import time
from collections import deque
from pathlib import Path

FIRST = 10240
BOOTSTRAP_PORT = "VLLM_MOONCAKE_BOOTSTRAP_PORT"  # variable of vLLM: where MooncakeConnector's P is found
LISTEN = "0A"  # TCP_LISTEN of include/net/tcp_states.h in Linux, as /proc/net/tcp writes it
NAME = "\0kvconform-port-%d"  # of the abstract Unix socket that keeps other runs off a port
PORTS_APART = 64  # distance of two ports that are given out: a connector may add its rank to its port
# Ports that a run keeps from others. An engine has two or three, and six runs leave some free. From MOST the
# run goes back to ENOUGH at once, since `_listening` takes 50 ms on some machines.
ENOUGH, MOST = 48, 56
LOOKS, LOOK_S = 10, 0.01  # tries to keep a port, and seconds between them
# Ports, and names of abstract Unix sockets that keep other runs off them. They end with this process.
_taken: deque[tuple[int, socket.socket]] = deque()
_next = itertools.count(random.SystemRandom().randrange(1 << 20))


def free_port() -> int:
    """A TCP port on which no process listens.

    No other call of this function, in any process, returns the port while this process keeps it (see
    `_keep`), and the system does not choose it either. If every port is kept or taken, this process gives
    its oldest one again.

    An engine binds its port about a second after it was chosen. A port that the system had chosen (bind to
    port 0) can by then be one end of a connection. Raises OSError if every port is taken.
    """
    end = _first_ephemeral()
    while True:
        for _ in range(FIRST, end, PORTS_APART):
            port = FIRST + next(_next) * PORTS_APART % (end - FIRST)
            if token := _token(port):
                _keep(port, token)
                return port
        if not _taken:
            raise OSError(
                errno.EADDRINUSE, "no TCP port is free: a smaller -n, or fewer runs at once, need less"
            )
        _taken.popleft()[1].close()  # many runs at once: the next engine gets what the oldest one had


def keep_again(port: int) -> None:
    """Keep other runs off a port whose engine is about to end, so that the next engine can have it.

    `_keep` may have let the port go once the engine had bound it.
    """
    for _ in range(LOOKS):
        if any(kept == port for kept, _ in _taken):
            return
        token = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            token.bind(NAME % port)
        except OSError:  # another run looks whether the port is free, and finds that it is not
            token.close()
            time.sleep(LOOK_S)
        else:
            _taken.append((port, token))


def _keep(port: int, token: socket.socket) -> None:
    """Keep other runs off a port until its engine has bound it, or ENOUGH younger ones are kept.

    On a busy machine an engine may need a minute for that, while this run starts many others.
    """
    _taken.append((port, token))
    if len(_taken) > MOST:
        listening = _listening()
        bound = [one for one in _taken if one[0] in listening]
        for one in bound or list(_taken)[:-ENOUGH]:
            _taken.remove(one)
            one[1].close()


def _token(port: int) -> socket.socket | None:
    """What keeps other runs off a port; None if another run has it, or a process listens on it."""
    token = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        token.bind(NAME % port)
    except OSError:
        token.close()
        return None
    if _is_free(port):
        return token
    token.close()
    return None


def _is_free(port: int) -> bool:
    """Whether no process listens on a port."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _listening() -> set[int]:
    """The ports on which some process listens.

    Read from the system's table. `_is_free` would bind the port for a moment, and an engine whose own bind
    falls into that moment does not start.
    """
    rows = [row.split() for name in ("tcp", "tcp6") for row in _lines(Path("/proc/net", name))]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTEN}


def _lines(table: Path) -> list[str]:
    """The rows of a table of the system; none where there is no such table."""
    try:
        return table.read_text().splitlines()[1:]
    except OSError:
        return []


def _first_ephemeral() -> int:
    """The first port that Linux gives to sockets that ask for any."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        first = 32768
    return first if first > FIRST + 1000 else 32768
