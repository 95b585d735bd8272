"""Reports of a run: `report.json`, the end of the terminal output, one failure, a CI job summary.

The verdict is decided in pytest_kvconform/verdict.py. These modules only store and show it.
"""
