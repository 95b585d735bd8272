"""pytest_kvconform/rigs/engine."""
