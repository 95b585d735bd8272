"""Connectors with one mistake each.

All are vLLM's NixlConnector but for what the first sentence of their docstring says; those of
`within_a_step.py` are the layer-wise connector of tests/right_connectors, and those of `across_ranks.py` the
reference connector.

`Right` has no mistake: what the suite reports about NixlConnector it must report about `Right` too. The
tests themselves do not import this package.
"""

# ruff: noqa: F403
from .across_ranks import *
from .corruption import *
from .failures import *
from .form import *
from .later import *
from .reads import *
from .reports import *
from .right import *
from .shutdown import *
from .within_a_step import *
