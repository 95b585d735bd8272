"""A KV connector for vLLM, written to be read: P keeps the KV that it computed, D reads it with NIXL.

Begin with connector.py.
"""

from typing import Any

__all__ = ["ReferenceConnector"]


def __getattr__(name: str) -> Any:
    """Import vLLM only when the connector itself is imported: the rest of the package works without vLLM."""
    if name == "ReferenceConnector":
        from reference_connector.connector import ReferenceConnector

        return ReferenceConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
