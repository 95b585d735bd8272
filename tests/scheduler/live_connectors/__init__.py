"""Right and wrong connectors for the cases on live engines."""

# ruff: noqa: F403
from .handovers import *
from .stores import *
