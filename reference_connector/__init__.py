"""A KV connector for vLLM 0.32 that reads well: P keeps what it has computed, D reads it with NIXL. Begin with connector.py."""

from typing import Any

__all__ = ["ReferenceConnector"]


def __getattr__(name: str) -> Any:
    """Import vLLM only when the connector itself is wanted: the rest of the package does without."""
    if name == "ReferenceConnector":
        from reference_connector.connector import ReferenceConnector

        return ReferenceConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
