"""Reports of a run: `report.json` (document.py), the end of the terminal output, one failure, and a CI job
summary.

The verdict is decided in pytest_kvconform/verdict.py. These modules only store and show it.
"""
