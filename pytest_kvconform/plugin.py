"""The pytest plugin: options, and the decision whether this run is one of ours. Everything else is loaded only when it is.

It is active with `--kv-connector`, with `KVCONFORM_CONNECTOR`, or when an argument begins with `kv::`. A `[tool.kvconform]`
table alone does not make it so: `pytest` without more goes on running the project's own tests.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from pytest_kvconform.settings import OPTIONS, BadSetting, load


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvconform", "KV connector conformance (also KVCONFORM_* and [tool.kvconform])")
    for option in OPTIONS:
        if not option.flag:
            continue
        many = "; may be repeated, or hold commas" if option.repeatable else ""
        default = f". Default: {option.shown_default}" if option.shown_default else ""
        how: dict[str, Any] = {"action": "store_true"} if option.switch else {"metavar": option.metavar}
        if option.repeatable:
            how["action"] = "append"
        group.addoption(
            option.flag, dest=option.dest, default=None, help=f"{option.help}{many}{default}", **how
        )


def _as_case_argument(argument: str) -> str:
    """The argument from kv:: on, or "". pytest prints ids relative to the current folder: in a subfolder kv:: is shown as ../kv::."""
    before, found, after = argument.partition("kv::")
    return f"kv::{after}" if found and (not before or before.endswith(("/", "\\"))) else ""


def pytest_configure(config: pytest.Config) -> None:
    ours = [name for argument in config.args if (name := _as_case_argument(argument))]
    flags = {option.dest: config.getoption(option.dest) for option in OPTIONS if option.flag}
    if not (flags["kv_connector"] is not None or os.environ.get("KVCONFORM_CONNECTOR") or ours):
        lonely = [option.flag for option in OPTIONS if option.flag and flags[option.dest]]
        if lonely:
            raise pytest.UsageError(f"{lonely[0]} does nothing without --kv-connector=NAME|MODULE:CLASS")
        return

    import msgspec

    from pytest_kvconform.pytest_hooks.controller import Controller
    from pytest_kvconform.pytest_hooks.runner import WORKER_KEY, CaseRunner, WorkerInput, ZygoteLink
    from pytest_kvconform.subject import resolve

    if getattr(config.option, "maxworkerrestart", "") is None:
        # xdist gives the case in which a worker died to worker after worker, and can wait forever for the last. The run ends INCOMPLETE.
        config.option.maxworkerrestart = "0"
    typed = config.args_source is config.ArgsSource.ARGS
    others = [argument for argument in config.args if not _as_case_argument(argument)] if typed else []
    cases = ours if ours or not others else None
    config.args[:] = others  # the suite hangs on the session and not on a path; see collect.py
    config.args_source = config.ArgsSource.ARGS  # or the header would say that `testpaths` is collected
    if hasattr(config, "workerinput"):
        told = msgspec.json.decode(config.workerinput[WORKER_KEY], type=WorkerInput)
        config.pluginmanager.register(
            CaseRunner(config, cases, told.settings, told.subject, told.link), "kvconform-runner"
        )
        return
    try:
        cache = getattr(config, "cache", None)
        settings = load(
            flags, os.environ, config.rootpath, cache.get("kvconform/seed", None) if cache else None
        )
        runner = CaseRunner(config, cases, settings, resolve(settings), ZygoteLink())
    except BadSetting as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(runner, "kvconform-runner")
    config.pluginmanager.register(Controller(config, runner), "kvconform-controller")
