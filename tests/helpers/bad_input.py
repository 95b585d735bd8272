"""Wrong words and wrong values for the tests of declarations and settings, made by hypothesis."""

from __future__ import annotations

import datetime
import re
import string
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, assume, settings

from pytest_kvconform import features
from pytest_kvconform.settings import BadSetting

FEATURES = list(features.load())
EXAMPLES = {
    "feature names": 150,
    "feature values": 150,
    "known": 200,
    "keys": 150,
    "variables": 100,
    "values": 200,
    "configs": 150,
    "files": 100,
    "specs": 100,
    "words": 100,
}


def examples(kind: str) -> Callable[[Any], Any]:
    """The same examples each time: what fails here fails everywhere."""
    slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
    return settings(
        max_examples=EXAMPLES[kind],
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=slow,
    )


def sentence(call: Callable[..., Any], *arguments: Any) -> str:
    """The one sentence with which a call refuses. Any other exception is a traceback for somebody."""
    with pytest.raises(BadSetting) as caught:
        call(*arguments)
    text = str(caught.value)
    assert text and "\n" not in text.replace("\\n", "") and "Traceback" not in text
    return text


@st.composite
def typos(draw: st.DrawFn, words: list[str]) -> str:
    """A word with one letter too many, too few or changed, that is no other word of the list."""
    word = draw(st.sampled_from(words))
    at = draw(st.integers(0, len(word) - 1))
    letter = draw(st.sampled_from(string.ascii_lowercase))
    wrong = draw(
        st.sampled_from(
            [word[:at] + word[at + 1 :], word[:at] + letter + word[at:], word[:at] + letter + word[at + 1 :]]
        )
    )
    assume(wrong not in words and wrong.strip() and len(word) > 3)
    return wrong


def hinted(text: str, words: list[str]) -> bool:
    """Whether a message proposes one of these words."""
    found = re.search(r"\(did you mean (.+?)\?\)", text)
    return found is not None and found[1] in words


TEXT = st.text(max_size=12)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | TEXT
    | st.dates()
    | st.just(datetime.datetime(2100, 1, 31))
)
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(TEXT, SCALARS, max_size=2)
