"""A suite of four small cases, with a bench that starts nothing.

What each case does is said in the variable FAKEKV: glob of `case[family-topology-variant]` -> deed (see
`act`). The day of a run is FAKEKV_TODAY, though midnight passes meanwhile.
"""

import datetime
import fnmatch
import functools
import json
import os
import signal
import socket
import time

import numpy as np

from pytest_kvconform import declaration
from pytest_kvconform.result import (
    Blocked,
    Evidence,
    Finding,
    HarnessError,
    NotApplicable,
    Violation,
    blocked_by,
)

if day := os.environ.get("FAKEKV_TODAY"):
    declaration.today = functools.partial(datetime.date.fromisoformat, day)


def act(bench, rule, name, variant, moved):
    """Do what FAKEKV says; by default pass with evidence."""
    bench.did.append(name)
    word = f"{name}[{bench.cell}" + ("" if variant is None else f"-{variant}") + "]"
    print(f"body of {word}")
    deeds = [
        deed
        for glob, deed in json.loads(os.environ.get("FAKEKV", "{}")).items()
        if fnmatch.fnmatchcase(word.replace("[", "("), glob)
    ]
    deed = deeds[0] if deeds else "pass"
    if deed == "violate":
        raise Violation(
            Finding(
                rule=rule,
                happened=f"D read block 3 of {word} before it was there",
                differs="64 of 4096 words in layer 5",
                picture=("layer  5 K  . . . U", "layer  5 V  . . . ."),
                diagnosis="the last window block was never read",
                log=("rank 0: last words",),
            )
        )
    if deed == "violate otherwise":
        raise Violation(Finding(rule=rule, happened=f"{word} hung"))
    if deed == "refuse":
        raise Violation(
            Finding(rule=rule, happened=f"P did not start for {word}: no such size", declined="no such size")
        )
    if deed == "depends on a refusal":
        raise blocked_by("kv::engine/start::engines_start", "P did not start", refused=True)
    if deed.startswith("depends on kv::"):
        case = deed.removeprefix("depends on ")
        raise blocked_by(case, "P did not start: KeyError in __init__ (m.py:61): 'hosts'")
    if deed == "blocked":
        raise Blocked("no GPU here; run on a machine with one")
    if deed == "not applicable":
        raise NotApplicable("the connector has no store")
    if deed == "harness":
        raise HarnessError("the port was taken")
    if deed == "assert":
        assert variant == "something else"
    if deed == "skip":
        import pytest

        pytest.skip("not today")
    if deed == "none":
        return None
    if deed == "nothing looked at":
        return Evidence(looked_at=0, unit="bytes")
    if deed == "numpy":
        return Evidence(
            looked_at=np.int64(2), unit=np.str_("bytes"), bytes_moved=moved, notes={"half": np.float32(0.5)}
        )
    if deed == "violate with numpy":
        raise Violation(Finding(rule=rule, happened=np.str_("it hung")))
    if deed == "moves nothing":
        return Evidence(looked_at=1, unit="tokens")
    if deed == "interrupt":
        raise KeyboardInterrupt
    if deed.startswith("ask the service"):
        ask_service(bench.config, deed == "ask the service to end")
    if deed == "ask the service to end":
        raise Violation(Finding(rule=rule, happened=f"{word} lost its store"))
    if deed == "wait":
        time.sleep(60)
    if deed == "be killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "die":
        os._exit(3)
    return Evidence(looked_at=1, unit="bytes", bytes_moved=moved)


def ask_service(config, end):
    """Put something into the store of tests/services, and end the store."""
    with socket.create_connection(("127.0.0.1", config["kv_connector_extra_config"]["port"])) as connection:
        connection.sendall(
            json.dumps({"op": "end" if end else "put", "key": "k", "size": 0}).encode() + b"\n"
        )
        connection.recv(1)
