"""`kvconform verify` finds every edit of one field of a report."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from pytest_kvconform import cli

Path = tuple[str | int, ...]


def fields(value: Any, path: Path = ()) -> Iterator[Path]:
    """The path of every value in a report, inside lists and tables too."""
    if path:
        yield path
    for key, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from fields(inner, (*path, key))


def at(report: Any, path: Path) -> Any:
    for key in path:
        report = report[key]
    return report


GONE = object()  # the field is taken away
ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**6),
    st.floats(0, 100),
    st.text(max_size=5),
    st.sampled_from(["PASS", "FAIL", "CONFORMS", "", "2026-01-01", [], {}]),
    st.just(GONE),
)


def test_every_edit_of_one_field_is_found(kv, capsys):
    path = kv("--kv-claim", deeds={"window*": "violate"}).path
    whole = json.loads(path.read_bytes())
    assert cli.main(["verify", str(path)]) == 0
    places = list(fields(whole))
    assert len(places) > 500

    @settings(
        max_examples=300,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(places), st.one_of(ANY, st.sampled_from(places).map(lambda one: at(whole, one))))
    def edited(place: Path, value: Any) -> None:
        report = copy.deepcopy(whole)
        outer, key = at(report, place[:-1]), place[-1]
        if value is GONE:
            del outer[key]
        else:
            outer[key] = value
        path.write_text(json.dumps(report))
        if json.dumps(report) != json.dumps(whole):
            assert cli.main(["verify", str(path)]) in (1, 2), (place, value)

    edited()
