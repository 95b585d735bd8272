"""Scheduler halves with one mistake each about params, prefix hits, aborts and other connectors.

The rig's child processes import this package under its full name; the tests themselves do not import it.
"""

# ruff: noqa: F403
from .hits import *
from .multi import *
from .params import *
from .right import *
from .stores import *
