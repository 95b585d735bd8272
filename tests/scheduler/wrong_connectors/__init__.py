"""Connectors whose scheduler half makes one mistake each: vLLM's NixlConnector, and one line too few or too
many.
"""

# ruff: noqa: F403
from .failures import *
from .finished import *
from .matched import *
from .reports import *
from .requests import *
from .right import *
