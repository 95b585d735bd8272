"""pytest_kvconform/rigs/bytes."""
