"""pytest_kvconform/kvspace/pools."""
