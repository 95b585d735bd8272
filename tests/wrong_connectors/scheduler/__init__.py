"""Connectors whose scheduler half makes one mistake, all made of vLLM's NixlConnector."""

# ruff: noqa: F403
from .announced import *
from .failures import *
from .finished import *
from .matched import *
from .reports import *
from .requests import *
from .right import *
from .steps import *
