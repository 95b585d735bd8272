"""Right and wrong connectors for the cases that are scripts."""

# ruff: noqa: F401, F403
from tests.right_connectors.designs import LayerWise, Rendezvous

from .handovers import *
from .hangs import *
from .sleepers import *
from .stores import *
