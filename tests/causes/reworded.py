"""The connectors of `failing`, in processes in which every sentence of the suite has other words."""

from tests.causes.failing import *  # noqa: F403
from tests.causes.wording import patches

for one, init in patches():
    one.__init__ = init  # type: ignore[misc]
