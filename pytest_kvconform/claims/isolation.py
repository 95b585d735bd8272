"""What of a project could change a claim, and the arguments of a pytest that has none of it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

PLUGIN, XDIST = "pytest_kvconform.plugin", "xdist.plugin"
# distributions whose plugins may be there: this one, and that which runs cells side by side
_OURS = ("pytest-kvconform", "pytest-xdist")
_VARIABLES = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")
# Without it, pytest loads the plugins of every installed package.
_NO_OTHER_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def arguments(root: Path, jobs: int) -> list[str]:
    """Return arguments of a pytest that reads no settings, no conftest file and no plugin of a project."""
    # -P, as in run.py: a worker does not look for modules in the current folder
    worker = f"--tx={jobs}*popen//python={shlex.quote(sys.executable)} -P"
    side_by_side = ["-p", XDIST, "--dist=load", worker] if jobs else []
    return [
        "-c",
        os.devnull,
        f"--rootdir={root}",  # where [tool.kvconform] is read
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-p",
        PLUGIN,
        *side_by_side,
    ]


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of that pytest."""
    return {name: value for name, value in given.items() if name not in _VARIABLES} | _NO_OTHER_PLUGINS


def interference(config: pytest.Config, others: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return the name of one thing that could change the run of a claim; "" if there is none.

    `others`: arguments of pytest that name no case of the suite. `variables`: the environment.
    """
    manager = config.pluginmanager
    files = [Path(getattr(one, "__file__", None) or "") for one in manager.get_plugins()]
    plugins = [dist.project_name for _, dist in manager.list_plugin_distinfo()]
    named = [name for name in config.option.plugins if not name.startswith("no:")]
    found = [
        *(f"the argument {argument}" for argument in others),
        *(f"the variable {name}" for name in _VARIABLES if variables.get(name)),
        *(str(file) for file in files if file.name == "conftest.py"),
        *(f"addopts of {config.inipath}" for _ in config.getini("addopts")),
        *(f"the plugin {name}" for name in named if name not in (PLUGIN, XDIST, "xdist")),
        *(f"the plugin {name}" for name in plugins if name not in _OURS),
    ]
    return found[0] if found else ""
