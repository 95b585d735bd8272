"""What becomes of answers and errors of Ray, without a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from pytest_kvconform.result import Blocked, Cell, HarnessError
from pytest_kvconform.rigs.cluster import model_bench as bench
from pytest_kvconform.rigs.cluster.engine import Engine, Steps
from pytest_kvconform.rigs.cluster.loop import play
from pytest_kvconform.rigs.cluster.pairs import EnginePairs
from pytest_kvconform.rigs.context import RunContext, SubjectFacts
from pytest_kvconform.rigs.engine.handle import EngineFailed, EngineHandle, logged
from pytest_kvconform.rigs.nodes import Nodes, cluster, host, place
from pytest_kvconform.rigs.nodes.place import NodeConnection, NodePlace
from pytest_kvconform.rigs.processes.child import ChildProcess, ForkRefused
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.place import Place
from pytest_kvconform.suite._outcomes import last_logged_exception

HERE = SubjectFacts(
    name="C", module="m", file="m.py", supports_hma=True, vllm="0.32.0", device="cpu", kernels="_C"
)
REACHED = "--kv-ray: no Ray cluster was reached at '10.0.0.7:6379': "


@pytest.mark.parametrize("error", [None, ray.exceptions.RaySystemError("it is gone"), TimeoutError("late")])
def test_ray_leaves_the_handler_of_sigterm_as_it_was(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    def init(*_: Any, **__: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        if error:
            raise error

    monkeypatch.setattr(ray, "init", init)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Blocked, match=REACHED) if error else contextlib.nullcontext():
        cluster._connect("10.0.0.7:6379")
    after = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    assert after is before


class SilentActor:
    """An actor whose node is gone: no call is answered."""

    def __getattr__(self, name: str) -> SilentActor:
        return self

    def remote(self, *_: Any) -> None:
        return None


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ray wait in vain for every answer."""

    def get(_: Any, timeout: float | None = None) -> None:
        assert timeout, "it would wait for ever"
        raise ray.exceptions.GetTimeoutError("Get timed out")

    monkeypatch.setattr(ray, "get", get)


@pytest.mark.usefixtures("silence")
def test_an_actor_that_does_not_answer_is_like_one_that_is_gone() -> None:
    assert place.ask(SilentActor().length, "p") is None
    with pytest.raises(OSError, match="Get timed out"):
        place.NodeConnection(SilentActor())


@pytest.mark.usefixtures("silence")
def test_the_end_names_each_actor_that_did_not_answer_and_nodes_that_were_not_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def remove(_: Any) -> None:
        raise ray.exceptions.RaySystemError("no answer")

    monkeypatch.setattr(cluster, "remove_placement_group", remove)
    left = object.__new__(cluster.Cluster)
    left._actors, left._group = {role: SilentActor() for role in "PD"}, None
    of_p, of_d, of_group = left.close()
    assert of_p == "the actor on the node of P did not answer at the end"
    assert of_d == of_p.replace("P", "D")
    assert of_group.startswith("--kv-ray: the two nodes were not given back: ")


@pytest.mark.parametrize(
    ("fact", "found", "here"),
    [("vllm", "0.33.0", "0.32.0"), ("device", "cuda", "cpu"), ("kernels", "_C_AVX2", "_C")],
)
def test_a_node_that_differs_from_where_pytest_runs_is_named_with_the_difference(
    fact: str, found: str, here: str
) -> None:
    same = {"vllm": "0.32.0", "device": "cpu", "kernels": "_C", "mended": ""}
    assert cluster._difference(same, HERE) == ""
    said = cluster._difference(same | {fact: found}, HERE)
    assert said == f"has {fact} {found!r}, and where pytest runs it is {here!r}"


@pytest.mark.parametrize("inside", [False, True])
def test_a_store_has_no_nodes_also_inside_another_connector(inside: bool) -> None:
    store: Any = SimpleNamespace(is_store=True, children=(), services=())
    multi: Any = SimpleNamespace(is_store=False, children=(store,), services=())
    settings: Any = SimpleNamespace(ray="10.0.0.7:6379")
    nodes = Nodes(multi if inside else store, settings, "zygote", HERE, 1.0)
    lengths = []
    for _ in range(3):
        with pytest.raises(Blocked, match="a store's folder is where pytest runs") as raised:
            nodes.places()
        lengths.append(len(raised.traceback))
    assert len(set(lengths)) == 1, "each case adds its frames to the exception that is kept"


def test_an_address_that_is_no_peer_is_what_a_failure_shows_until_the_next_transfer() -> None:
    d: Any = object.__new__(EngineHandle)
    d.role, d.call = "D", lambda *_: None
    d.process = SimpleNamespace(
        place=NodePlace("zygote", "10.0.0.8", role="D", peer="10.0.0.7", actor=None),
        exceptions=lambda since: ("RuntimeError: no peer",),
        position=lambda: 7,
        last_lines=lambda: ("the last line",),
    )
    assert d.begin_log() == 7
    for params in ({"remote_host": "127.0.0.1"}, None):  # a request without params does not take it back
        d.add(SimpleNamespace(kv_transfer_params=params))
    said = (
        "kv_transfer_params name '127.0.0.1' (remote_host): on the node of D, 10.0.0.8, that is D itself; "
        "its peer is on 10.0.0.7"
    )
    found: Any = SimpleNamespace(logged=logged([(d, 7)]))
    assert found.logged == ("D: RuntimeError: no peer", f"the suite: {said}")
    assert last_logged_exception(found) == said
    assert d._last_lines() == ("the last line", f"the suite: {said}")
    d.begin_log()
    assert logged([(d, 7)]) == ("D: RuntimeError: no peer",)


@pytest.mark.parametrize(("answers", "raised"), [(True, ForkRefused), (False, HarnessError)])
def test_a_connection_on_which_nothing_was_forked_is_closed(
    tmp_path: Path, answers: bool, raised: type[Exception]
) -> None:
    here, there = Pipe()

    class Somewhere(Place):
        def connect(self) -> Any:
            return here

    if answers:
        there.send(("refused", "no more processes"))
    with pytest.raises(raised):
        ChildProcess(Somewhere(str(tmp_path / "zygote")), "p", "module:function", None, 0.1)
    assert here.closed


@pytest.mark.parametrize(
    ("connector", "said"),
    [
        ("kv_of_nobody.module:Connector", ("BLOCKED", "there is no module 'kv_of_nobody'", {})),
        ("reference_connector:ReferenceConnector", ("", "", {"vllm": "0.32.0"})),
        ("NixlConnector", ("", "", {"vllm": "0.32.0"})),
    ],
)
def test_a_node_without_the_connectors_module_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connector: str, said: tuple[Any, ...]
) -> None:
    zygote: Any = SimpleNamespace(address="zygote")
    monkeypatch.setattr(host, "start_zygote", lambda settings: zygote)
    monkeypatch.setattr(host, "wait_for_zygote", lambda address, deadline_s: {"vllm": "0.32.0"})
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.8")
    for name in ("UCX_NET_DEVICES", host.FOLDER_OF_NODES):  # the actor sets them for its zygote
        monkeypatch.setenv(name, "")
    settings: Any = SimpleNamespace(connector=connector)
    node = host.NodeHost(settings, str(Path.cwd()), str(tmp_path / "far" / "models"))
    assert node.ready(1.0) == ("10.0.0.8", *said)


@pytest.mark.parametrize("seen", [True, False])
def test_a_checkpoint_that_a_node_does_not_see_is_named_before_an_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    checkpoint = tmp_path / "checkpoint"
    if seen:
        checkpoint.mkdir()
    monkeypatch.setattr(bench, "ensure_checkpoint", lambda family: checkpoint)
    monkeypatch.setattr(place, "ask", lambda method, *arguments: method(*arguments))
    of_d = NodePlace("zygote", "10.0.0.8", role="D", peer="10.0.0.7", actor=object.__new__(host.NodeHost))
    subject: Any = SimpleNamespace(way="handoff", save_delay=0.0)
    context: Any = SimpleNamespace(
        place=lambda role: of_d,
        subject=subject,
        require_kernels=lambda: None,
        transfer_config=lambda role, **_: {},
        engine_environment=lambda role: {},
    )
    engines: Any = object.__new__(bench.EngineBench)
    engines.context = context
    if seen:
        assert engines._spec(Cell("llama", "P1D1"), "D", 1, 0).checkpoint == str(checkpoint)
    else:
        with pytest.raises(Blocked, match=f"the node of D, 10.0.0.8, has no {checkpoint}: let KVCONFORM"):
            engines._spec(Cell("llama", "P1D1"), "D", 1, 0)


@pytest.mark.parametrize("on_nodes", [True, False])
@pytest.mark.parametrize("times", [1, 2])
def test_engines_whose_port_is_taken_start_once_more(times: int, on_nodes: bool) -> None:
    """A port that is taken twice is no failure of the connector if the engines run on nodes."""
    taken = EngineFailed("D", "refused", "D did not start: ZMQError: Address already in use (addr='tcp://')")
    tries, ended = [], []

    class StartsLater:
        def __init__(self, *_: Any) -> None: ...

        def wait_ready(self) -> str:
            tries.append(self)
            if len(tries) <= times:
                raise taken
            return "facts"

        def end(self) -> None:
            ended.append(self)

    subject: Any = SimpleNamespace(module="m", connector="C", packages={})
    settings: Any = SimpleNamespace(timeout_scale=1.0)
    places = {role: Place("zygote") for role in "PD"}
    context = RunContext(
        "zygote", subject, settings, HERE, lambda _: None, places=(lambda: places) if on_nodes else None
    )
    handle: Any = StartsLater
    pairs, cell = EnginePairs(context, handle), Cell("llama", "P1D1")
    if times == 1:
        pair = pairs.pair(cell, lambda role, tp, folder: None)
        assert set(pair) == set(tries[1:]) and tries[0] in ended and not set(pair) & set(ended)
        return
    with pytest.raises(Blocked if on_nodes else EngineFailed, match="Address already in use"):
        pairs.pair(cell, lambda role, tp, folder: None)
    assert len(tries) == 2 and set(tries) <= set(ended)


class AnswersLater(NodeConnection):
    """Has the answer of an engine when it has been polled some times."""

    def __init__(self, polls: int):
        self.polls = polls

    def poll(self, timeout: float | None = 0.0) -> bool:
        self.polls -= 1
        return self.polls <= 0


def test_the_loop_waits_for_an_engine_on_a_node() -> None:
    """Its connection has no file descriptor, unlike that of an engine here."""
    connection = AnswersLater(7)
    handle: Any = SimpleNamespace(
        role="P",
        start_s=60.0,
        deadline_s=60.0,
        process=SimpleNamespace(connection=connection, watched=os.getpid()),
        call_deadline=lambda seconds, pids: Deadline(seconds, pids),
        send=lambda name, *arguments: None,
        answered=lambda: connection.poll(0),
        take_answer=lambda name: f"the answer to {name}",
    )

    def script(p: Engine) -> Steps:
        return (yield from p.call("usage"))

    assert play(script, handle) == "the answer to usage"
    assert connection.polls <= 0
