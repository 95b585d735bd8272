"""Conformance tests for vLLM KV connectors, as a pytest plugin.

Importing this package loads neither torch nor vLLM. Only the child processes that start engines load them.
"""

__version__ = "2026.11.1.dev0"  # .dev0: not released, see CONTRIBUTING.md
