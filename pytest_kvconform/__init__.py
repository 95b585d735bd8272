"""Conformance tests for vLLM KV connectors, as a pytest plugin.

Importing this package is light on purpose: neither torch nor vLLM is loaded until an engine is started in a process of its own.
"""

__version__ = "2026.11"
