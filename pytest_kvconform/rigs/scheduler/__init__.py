"""pytest_kvconform/rigs/scheduler."""
