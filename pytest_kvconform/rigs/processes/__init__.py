"""pytest_kvconform/rigs/processes."""
