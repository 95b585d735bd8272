"""Connectors that do one thing wrong as peers or as ranks.

Each is `Right` but for what the first sentence of its docstring says.

`Right` is vLLM's NixlConnector without what the suite finds in it: its listener outlives nonsense, its
handshakes do not wait for one another, and its D knows when P's lease is over. Engines import this package
under its full name; the tests themselves do not import it.
"""

# ruff: noqa: F403

from .failed_steps import *
from .late_writes import *
from .leases import *
from .pools import *
from .ranks import *
from .right import *
from .shutdown import *
from .sockets import *
from .two_peers import *
from .unreachable import *
