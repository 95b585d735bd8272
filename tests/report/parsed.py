"""Pages and reports of these tests: a parsed page, and small reports."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

from pytest_kvconform.report import document
from pytest_kvconform.result import CaseResult, Cell, Evidence, Outcome
from pytest_kvconform.settings import Settings
from pytest_kvconform.subject import Subject

VOID = {"meta", "input", "line", "circle"}


class Page(HTMLParser):
    """What a browser would see: elements with attributes, in order, and the text of each."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data

    @property
    def shape(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(tag, tuple(attributes)) for tag, attributes in self.tags]

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.texts["script"][0])

    def of(self, tag: str, css: str = "") -> list[dict[str, str | None]]:
        return [
            attributes
            for name, attributes in self.tags
            if name == tag and css in (attributes.get("class") or "")
        ]


def passed(name: str, rule: str = "KV-BYTES-001", **evidence: Any) -> CaseResult:
    return CaseResult(
        id=name,
        rule=rule,
        outcome=Outcome.PASS,
        level="core",
        cell=Cell("llama", "P1D1", "b16"),
        evidence=Evidence(looked_at=4, **evidence),
    )


def made(results: list[CaseResult], ids: list[str] | None = None, **more: Any) -> document.Report:
    names = [one.id for one in results] if ids is None else ids
    subject = Subject(spec="m:C", connector="C", module="m")
    return document.make_report(Settings(connector="m:C"), subject, None, results, names, names, (), **more)
