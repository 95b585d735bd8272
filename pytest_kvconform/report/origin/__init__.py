"""Which suite made a report: its commit, and its manifest, which names every case with what belongs to it.

A suite grows, so a report is judged by the cases of the suite that made it. The report brings its manifest
(manifest.py) and the commits of the suite and of the connector (commits.py). That nobody has dropped a case
from the manifest is shown by the suite itself (compare.py): by the one that is installed, by the list of
releases, or by the commit in the history of the checkout in which `kvconform verify` runs.
"""
