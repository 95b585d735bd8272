"""pytest_kvconform/rigs/peers."""
