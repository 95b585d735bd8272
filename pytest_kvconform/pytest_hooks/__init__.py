"""pytest_kvconform/pytest_hooks."""
