"""The examples of the authors' page about services and about the hand-over of a proxy: they are run."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_kvconform.rigs.services import RunningServices
from pytest_kvconform.settings import load
from pytest_kvconform.subject import resolve
from tests.handovers import proxies

from .pages import PAGES, ROOT, blocks

PAGE = PAGES["docs/authors.md"]


def test_the_function_of_a_proxy(tmp_path: Path) -> None:
    [table] = [block for block in blocks(PAGE, "toml") if "hand_over" in block]
    (tmp_path / "pyproject.toml").write_text(table)
    subject = resolve(load({}, {}, tmp_path))
    assert (subject.handover, subject.way) == ("rendezvous", "my_pkg.proxy:hand_over")
    [block] = [block for block in blocks(PAGE, "python") if "def hand_over" in block]
    names: dict[str, Any] = {}
    exec(block, names)
    for side in "PD":
        given = side, {"transfer_id": "7"}, None
        assert names["hand_over"](*given) == proxies.by_room(*given)


def test_the_table_of_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example starts a server that is called my-cache, and ends it."""
    [table] = [block for block in blocks(PAGE, "toml") if "services" in block]
    (tmp_path / "pyproject.toml").write_text(table)
    command = tmp_path / "my-cache"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT / "tests/services/server.py"} "$2"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    settings = replace(load({}, {}, tmp_path), report=str(tmp_path / "report"))
    services = RunningServices(resolve(settings), settings)
    assert services.start() == ""
    port = services.subject.config["kv_connector_extra_config"]["port"]
    assert services.environment == {"MY_CACHE_URL": f"http://127.0.0.1:{port}"}
    socket.create_connection(("127.0.0.1", port)).close()
    assert services.close() == []
    assert not services.folder.exists()
    assert (tmp_path / "report" / "services" / "cache.log").read_text() == "listening\n"
