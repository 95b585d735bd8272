"""A hook in which an engine has hung is known: the next engine that stands there has no long wait."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import pytest

from pytest_kvconform.rigs.engine.handle import EngineFailed, EngineHandle
from pytest_kvconform.rigs.launch import LIGHT_PRELOAD, launch_zygote, wait_for_zygote
from pytest_kvconform.rigs.processes.stacks import Frame
from tests.helpers.fixtures import ROOT, importable_from

LONG_S = 600.0


@dataclass
class Spec:
    role: str
    seconds: float  # that a hook lasts
    hook: str
    runs: str = ""  # a program that is started before


class Handle(EngineHandle):
    target = "tests.peers.test_hangs:serve"


def serve(connection: Connection, spec: Spec) -> None:
    """An engine whose step is one hook."""
    program = subprocess.Popen(spec.runs.split()) if spec.runs else None
    connection.send(("ok", None))
    while True:
        connection.recv()
        globals()[spec.hook](spec.seconds)
        connection.send(("ok", program.poll() if program else None))


def start_load_kv(seconds: float) -> None:
    time.sleep(seconds)


def wait_for_save(seconds: float) -> None:
    time.sleep(seconds)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with importable_from(ROOT):
        zygote = launch_zygote((), preload=LIGHT_PRELOAD)
    wait_for_zygote(zygote.address, 90.0)
    yield zygote.address
    assert zygote.close() == []


@pytest.fixture
def engine(address: str) -> Iterator[Callable[..., Handle]]:
    """Start an engine whose hook lasts so long. Its calls have a deadline of 1 s, or of minutes."""
    hung_in, engines = set[Frame](), list[Handle]()

    def start(seconds: float, hook: str, deadline_s: float, runs: str = "") -> Handle:
        name = f"hangs-{len(engines)}-{hook}"
        spec = Spec("D", seconds, hook, runs)
        engines.append(Handle(address, name, spec, deadline_s, 60.0, hung_in))
        engines[-1].wait_ready()
        return engines[-1]

    yield start
    for one in engines:
        one.end()


def test_a_second_engine_that_stands_in_the_same_hook_has_no_long_wait(
    engine: Callable[..., Handle],
) -> None:
    with pytest.raises(EngineFailed, match=r"D did not answer within 1 s in start_load_kv \(\S+\)$"):
        engine(LONG_S, "start_load_kv", 1.0).call("step")
    known = r"D did not answer within \d s in start_load_kv \(test_hangs.py:\d+\), where another engine has"
    with pytest.raises(EngineFailed, match=known):
        engine(LONG_S, "start_load_kv", LONG_S / 2).call("step")


def test_an_engine_that_stands_in_another_hook_has_its_whole_deadline(engine: Callable[..., Handle]) -> None:
    with pytest.raises(EngineFailed):
        engine(LONG_S, "start_load_kv", 1.0).call("step")
    slow = engine(5.0, "wait_for_save", LONG_S, runs="sleep 600")
    assert slow.call("step") is None  # the program that it runs has not ended: SIGUSR1 would end it
