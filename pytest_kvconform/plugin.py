"""Hooks that every pytest run with the plugin installed calls: `pytest_addoption` and `pytest_configure`.

`pytest_configure` decides whether the run is active, that is, whether it tests a connector. It is active
with `--kv-connector`, with `KVCONFORM_CONNECTOR`, or if an argument begins with `kv::`. A
`[tool.kvconform]` table alone does not make a run active: plain `pytest` still runs the tests of the user's
project. All other modules are imported only in an active run.
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
        default = f". Default: {option.shown_default}" if option.shown_default else ""
        action: dict[str, Any] = {"action": "store_true"} if option.switch else {"metavar": option.metavar}
        if option.repeatable:
            action["action"] = "append"
        group.addoption(
            option.flag,
            dest=option.dest,
            default=None,
            help=f"{option.help}{option.repeats}{default}",
            **action,
        )


def _as_case_argument(argument: str) -> str:
    """Return the argument from `kv::` on, or "".

    pytest prints ids relative to the current folder, so that in a subfolder `kv::` reads `../kv::`.
    """
    before, found, after = argument.partition("kv::")
    return f"kv::{after}" if found and (not before or before.endswith(("/", "\\"))) else ""


def _check_report_folder(folder: str) -> None:
    """Raise BadSetting if the report cannot be written to this folder, so that no run ends without one."""
    path = os.path.abspath(folder)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        raise BadSetting(f"--kv-report={folder}: {path} is no folder, and so no report can be written there")
    if not os.access(path, os.W_OK | os.X_OK):
        raise BadSetting(f"--kv-report={folder}: the folder {path} cannot be written")


def pytest_configure(config: pytest.Config) -> None:
    case_ids = [name for argument in config.args if (name := _as_case_argument(argument))]
    flags = {option.dest: config.getoption(option.dest) for option in OPTIONS if option.flag}
    if not (flags["kv_connector"] is not None or os.environ.get("KVCONFORM_CONNECTOR") or case_ids):
        unused = [option.flag for option in OPTIONS if option.flag and flags[option.dest]]
        if unused:
            raise pytest.UsageError(f"{unused[0]} does nothing without --kv-connector=NAME|MODULE:CLASS")
        return

    import msgspec

    from pytest_kvconform.claims.isolation import interference
    from pytest_kvconform.pytest_hooks.controller import Controller
    from pytest_kvconform.pytest_hooks.runner import WORKER_KEY, CaseRunner, WorkerInput, ZygoteLink
    from pytest_kvconform.subject import resolve

    from_command_line = config.args_source is config.ArgsSource.ARGS
    others = (
        [argument for argument in config.args if not _as_case_argument(argument)] if from_command_line else []
    )
    arguments = case_ids if case_ids or not others else None
    config.args[:] = others  # the suite is a child of the session and has no path: see pytest_hooks/items.py
    config.args_source = config.ArgsSource.ARGS  # otherwise pytest's header names `testpaths`
    if hasattr(config, "workerinput"):
        received = msgspec.json.decode(config.workerinput[WORKER_KEY], type=WorkerInput)
        config.pluginmanager.register(
            CaseRunner(
                config, arguments, received.settings, received.subject, received.link, received.services
            ),
            "kvconform-runner",
        )
        return
    try:
        cache = getattr(config, "cache", None)
        settings = load(
            flags, os.environ, config.rootpath, cache.get("kvconform/seed", None) if cache else None
        )
        if settings.claim and (what := interference(config, others, os.environ)):
            raise BadSetting(
                f"--kv-claim: {what} could change what runs: start it with kvconform claim, which ignores it"
            )
        subject = resolve(settings, config.rootpath)
        if not config.getoption("collectonly"):
            _check_report_folder(settings.report)
        runner = CaseRunner(config, arguments, settings, subject, ZygoteLink())
    except BadSetting as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(runner, "kvconform-runner")
    config.pluginmanager.register(controller := Controller(config, runner), "kvconform-controller")
    config.pluginmanager.register(controller.lost, "kvconform-lost-workers")
