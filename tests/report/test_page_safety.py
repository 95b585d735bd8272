"""A page loads nothing, and no text of a report becomes HTML, whatever the text looks like."""

from __future__ import annotations

import base64
import hashlib
import re

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from pytest_kvconform.report import document, page
from pytest_kvconform.result import QUESTIONS, CaseResult, Cell, Finding, HookCall, Outcome

from .parsed import Page, made, passed


def test_the_page_loads_nothing(kv):
    text = page.render(document.read(kv(deeds={"arrive(gemma3*": "violate"}).path))
    shown = Page(text)
    for tag, attributes in shown.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "style", "action", "srcset"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert not re.search(
        r"https?:|//[a-z]|url\(|@import|innerHTML|insertAdjacent|eval\(", page._asset("page.js")
    )
    assert not re.search(r"url\(|@import", page._asset("page.css"))


def test_the_policy_allows_this_script_and_no_other(kv):
    shown = Page(page.render(document.read(kv().path)))
    [policy] = [
        one["content"] for one in shown.of("meta") if one.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    for element, text in (("style", shown.texts["style"][0]), ("script", shown.texts["script"][1])):
        name = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{name}'" in policy
    assert [one.get("type") for one in shown.of("script")] == ["application/json", None]


def report_of(text: str) -> document.Report:
    """A report whose every text is this one, as far as a text is free."""
    call = HookCall(at=1.5, side=text, rank=1, hook=text, requests=(text,), given=text, answer=text, times=2)
    finding = Finding(
        rule=text,
        happened=text,
        differs=text,
        picture=(text,),
        diagnosis=text,
        check=(text,),
        log=(text,),
        calls=(call, msgspec.structs.replace(call, at=0.0, rank=None, answer=f"raised {text}")),
    )
    failed = CaseResult(
        id=f"kv::bytes/pool::a[b-P1D1-{text}]",
        rule=text,
        outcome=Outcome.FAIL,
        level="core",
        cell=Cell("f", text, text),
        finding=finding,
    )
    blocked = CaseResult(id=f"kv::engine/x::{text}", rule="KV-A-001", outcome=Outcome.BLOCKED, reason=text)
    answered = passed(
        f"kv::accuracy/answers::{text}",
        "KV-ACC-005",
        unit=text,
        notes={text: text, QUESTIONS: text},
    )
    report = made([failed, blocked, answered], limited=[("kv::bytes/pool::c[d-P1D1]", text)])
    return msgspec.structs.replace(
        report,
        facts={"name": text, "version": text, "device": text},
        troubles=(text,),
        environment={"python": text},
        settings=report.settings | {"config": document.Setting(value=text, origin=text)},
        subject=msgspec.structs.replace(report.subject, features={"mla": text}),
        verdict=document.recompute_verdict(msgspec.structs.replace(report, troubles=(text,))),
    )


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "--><img src=x onerror=alert(1)>",
    "\"><a href='javascript:alert(1)'>",
    "</pre></dl></details><style>*{display:none}</style>",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt;&#60;script&#62;",
    "\u2028\u2029\x00\x7f\u202e",
    "]]></title></textarea></noscript>",
    "' onmouseover='alert(1)",
]
SNIPPETS = st.sampled_from([*HOSTILE, "<", ">", "&", '"', "'", "/", "!--", "-->", "script", " ", "x"])


@pytest.fixture(scope="module")
def harmless() -> Page:
    return Page(page.render(report_of("harmless")))


def hold_up(text: str, harmless: Page) -> None:
    shown = Page(page.render(report_of(text)))
    assert shown.shape == harmless.shape
    assert len(shown.texts["script"]) == 2
    assert shown.texts["script"][1] == harmless.texts["script"][1]
    ids = [row[0] for row in shown.data["rows"]]
    assert f"kv::engine/x::{text}" in ids
    assert text in "\n".join(shown.texts["pre"])


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_stays_a_text(text, harmless):
    hold_up(text.replace("\x00", ""), harmless)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(SNIPPETS, min_size=1, max_size=5))
def test_any_mixture_of_markup_stays_a_text(parts, harmless):
    text = f"h{''.join(parts)}h".replace("\x00", "")
    hold_up(text, harmless)
