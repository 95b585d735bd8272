"""A mistake in a declaration is one sentence that names the key, and the word that was probably meant."""

from __future__ import annotations

import datetime

import hypothesis.strategies as st
from hypothesis import assume, given

from pytest_kvconform import declaration
from tests.helpers.bad_input import FEATURES, VALUES, examples, hinted, sentence, typos


@examples("feature names")
@given(typos(FEATURES))
def test_a_feature_that_does_not_exist(name):
    text = sentence(declaration.read, {"features": {"mla": True, name: True}}, "d.toml")
    assert text.startswith(f"d.toml: features.{name}: there is no such feature")
    assert hinted(text, FEATURES)


@examples("feature values")
@given(st.sampled_from(FEATURES), VALUES)
def test_a_feature_that_is_neither_true_nor_a_reason(name, value):
    assume(value is not True)
    assume(not (isinstance(value, dict) and str(value.get("unsupported", "")).strip()))
    text = sentence(declaration.read, {"features": {name: value}}, "d.toml")
    assert text.startswith(f"d.toml: features.{name}")
    assert "expected true or { unsupported" in text or "there is no such key" in text


GOOD = {
    "case": "kv::engine/bytes::*",
    "issue": "https://e.org/1",
    "expires": datetime.date(2100, 1, 1),
    "reason": "r",
    "vllm": ">=0.32",
}


@examples("known")
@given(st.data())
def test_a_known_failure_that_is_wrong(data):
    row, keys = dict(GOOD), list(GOOD)
    how = data.draw(st.sampled_from(["missing", "typo", "value"]))
    if how == "missing":
        key = data.draw(st.sampled_from(keys[:4]))
        del row[key]
        assert f"p[0]: {key} is missing" in sentence(declaration.read_known, [row], "p")
    elif how == "typo":
        key = data.draw(typos(keys))
        row[key] = "x"
        text = sentence(declaration.read_known, [row], "p")
        assert text.startswith(f"p[0].{key}: there is no such key")
        assert hinted(text, keys)
    else:
        key = data.draw(st.sampled_from(keys))
        value = data.draw(VALUES)
        assume(
            not isinstance(value, datetime.date) or key != "expires" or isinstance(value, datetime.datetime)
        )
        assume(not (isinstance(value, str) and value.strip() and key == "reason"))
        row[key] = value
        assert sentence(declaration.read_known, [row], "p").startswith(f"p[0].{key}: expected ")
