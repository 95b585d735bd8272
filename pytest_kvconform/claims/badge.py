"""The files that are computed from a claim: two badges for each level, and a predicate for an attestation.

A badge names the level, its verdict, the minor of vLLM, the device, and the last day on which it holds. One
file is what the endpoint badge of shields.io reads (https://shields.io/badges/endpoint-badge), the other is a
drawing. The predicate is the claim in short, for the input `predicate-path` of actions/attest.
"""

from __future__ import annotations

import datetime
import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_kvconform.claims import DAYS
from pytest_kvconform.report.document import FILE, Report
from pytest_kvconform.result import LEVELS

PREDICATE = "predicate.json"
PATTERNS = ("badge-*.json", "badge-*.svg", PREDICATE)  # of all files
_SCHEMA = "kvconform-claim/v1"
# verdict -> name of the colour for shields.io, and the colour of the drawing: white text can be read on it
_COLOURS = {
    "CONFORMS": ("brightgreen", "#2c6e1f"),
    "VIOLATES": ("red", "#b3261e"),
    "NOT-APPLICABLE": ("lightgrey", "#666"),
}
_LETTER, _MARGIN = 6.7, 6  # pixels: of a letter of the drawing, and beside a text


def expires(reports: Sequence[Report]) -> datetime.date:
    """Return the last day on which the claim holds."""
    return min(report.day for report in reports if report.day) + datetime.timedelta(days=DAYS)


def levels(reports: Sequence[Report]) -> dict[str, str]:
    """Return level -> the verdict of all runs together.

    A level violates if it does so in one run. It has no verdict if it did not run, or if a run shows nothing
    about it.
    """
    found: dict[str, str] = {}
    for level in LEVELS:
        words = {one.word for report in reports for one in report.verdict.levels if one.name == level}
        word: str = "VIOLATES" if "VIOLATES" in words else words.pop() if len(words) == 1 else ""
        if word in _COLOURS:
            found[level] = word
    return found


def files(reports: Mapping[int, Report], hashes: Mapping[int, str]) -> dict[str, bytes]:
    """Return name -> content of each file of a claim besides its reports: seed -> report.

    `hashes`: seed -> SHA-256 of the file of the report.
    """
    predicate = _predicate(reports, hashes)
    return badges(predicate) | {PREDICATE: as_json(predicate)}


def badges(predicate: Mapping[str, Any]) -> dict[str, bytes]:
    """Return name -> content of each badge of a claim, which its predicate gives in short."""
    minor = ".".join(str(predicate["vllm"]).split(".")[:2])
    connector, device, until = (predicate[key] for key in ("connector", "device", "expires"))
    made = {}
    for level, word in predicate["levels"].items():
        name = f"badge-{level}-vllm-{minor}-{device}"
        label = f"KV {level}"
        message = f"{word.lower().replace('-', ' ')} · vLLM {minor} {device} · until {until}"
        made[f"{name}.json"] = as_json(
            {"schemaVersion": 1, "label": label, "message": message, "color": _COLOURS[word][0]}
        )
        title = f"{connector if connector.isprintable() else repr(connector)}: {label} {message}"
        made[f"{name}.svg"] = _drawing(label, message, title, _COLOURS[word][1]).encode()
    return made


def _predicate(reports: Mapping[int, Report], hashes: Mapping[int, str]) -> dict[str, Any]:
    runs = list(reports.values())
    first, facts = runs[0], runs[0].facts or {}
    return {
        "schema": _SCHEMA,
        "suite": first.suite,
        **({"commits": first.commits} if first.commits else {}),
        "connector": first.subject.spec,
        "config": first.subject.config,
        **{name: facts.get(name) for name in ("vllm", "device", "kernels")},
        "environment": first.environment,
        "unsupported": {name: why for name, why in first.subject.features.items() if why},
        "levels": levels(runs),
        "expires": str(expires(runs)),
        "reports": [
            {
                "seed": seed,
                "day": str(report.day),
                "verdict": report.verdict.word,
                FILE: {"sha256": hashes[seed]},
            }
            for seed, report in reports.items()
        ],
    }


def as_json(value: object) -> bytes:
    """Return JSON that is the same for equal values."""
    return json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True).encode() + b"\n"


def _drawing(label: str, message: str, title: str, colour: str) -> str:
    """Return an SVG that loads nothing. A browser stretches the texts to the widths, whatever its font."""
    left, right = (round(len(text) * _LETTER) + 2 * _MARGIN for text in (label, message))
    texts = "".join(
        f'<text x="{start + _MARGIN}" y="14" textLength="{width - 2 * _MARGIN}">{html.escape(text)}</text>'
        for text, start, width in ((label, 0, left), (message, left, right))
    )
    size, title = f'width="{left + right}" height="20"', html.escape(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">'
        f'<title>{title}</title><rect {size} rx="3" fill="#444"/>'
        f'<path d="M{left} 0h{right - 3}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3H{left}z" fill="{colour}"/>'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{texts}</g></svg>\n'
    )
