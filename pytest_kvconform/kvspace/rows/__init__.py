"""pytest_kvconform/kvspace/rows."""
