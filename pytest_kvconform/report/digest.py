"""The digest of a report: whoever edits one field of `report.json`, and nothing else, is found out.

The digest is no signature. Whoever writes the file can write its digest, too. docs/badges.md tells how GitHub
signs the reports of a claim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

KEY = "digest"


def digest(report: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a report as it stands in JSON, but for the key `digest`."""
    rest = {key: value for key, value in report.items() if key != KEY}
    return hashlib.sha256(msgspec.json.encode(rest, order="sorted")).hexdigest()


def altered(path: Path) -> str:
    """Return a sentence if the file of a report is not what the suite wrote; else "".

    The file was read as a report before. A suite before digests wrote none: such a report is not judged.
    """
    raw = msgspec.json.decode(path.read_bytes())
    if not raw.get(KEY):
        return "" if not raw.get("day") else "the digest is missing: the report was edited after the run"
    found = digest(raw)
    return "" if raw[KEY] == found else f"the digest is not {found}: the report was edited after the run"
