"""Scenarios between peers: unreachable, silent, stopped or restarted peers, leases, malformed messages."""

from __future__ import annotations

import itertools
import math
import os
import time
from dataclasses import replace

from pytest_kvconform.rigs.cluster.engine import Engine, Steps
from pytest_kvconform.rigs.cluster.loop import let_run, pause, until
from pytest_kvconform.rigs.cluster.peers.hostile_clients import (
    CuttingProxy,
    HostileClient,
    SilentListener,
    listening_ports,
    malformed_messages,
    ports_named_in,
    speaks_zeromq,
    with_port_replaced,
)
from pytest_kvconform.rigs.cluster.peers.rank_scenarios import SCENARIOS as OF_RANKS
from pytest_kvconform.rigs.cluster.peers.rank_scenarios import two_peers, two_readers, two_samples
from pytest_kvconform.rigs.cluster.peers.scenario_engines import (
    HELD,
    KEEPS,
    PeerScenario,
    ScenarioEngines,
    ScenarioObservation,
)
from pytest_kvconform.rigs.cluster.peers.sleeping_peer import (
    first_load,
    restarted_peer,
    shutdown_during_load,
    sleeping_peer,
)
from pytest_kvconform.rigs.processes.cores import Deadline
from pytest_kvconform.rigs.processes.ports import free_port

STALL_S = 1.0  # for which P's process is stopped; a hook that waits for P takes as long
MESSAGES = 1000
CHUNK = 50  # messages at a time; the first of them is sent once more as raw bytes
CONTACT_S = 5.0  # in which D has sent its first message to the silent peer
ATTEMPTS = 3  # of a request after a failure: it may wait for what the request before it has begun
CUT = {"accepted": -1, "answering": 512}  # bytes of P after which a connection to it is cut
DELIVERY_S = 0.2  # in which messages arrive
SLOW = 0.5  # part of the time of a request for which engines wait for a core, on a machine that is too slow
LEASES_WAITED = 1.3  # leases that a request waits
CHOSEN = ", /:;|'\u00fc"  # in the id of a request, which a client chooses (X-Request-Id)
OTHERS = ("model", "dtype", "rope")  # in which a D differs for which P's KV is of no use
BAD = ("bad", "bad_too")  # requests whose P cannot be reached
NO_PORT = "its kv_transfer_params name no port on which P listens"


# ---- P cannot be reached -----------------------------------------------------------------------------------


def prefill_elsewhere(engines: ScenarioEngines, other: Engine, *names: str) -> Steps:
    """Let another engine compute prompts, whose params are then changed.

    Returns name -> PrefillResult, and the engine's ports.
    """
    bad = {}
    for name in names:
        bad[name] = yield from engines.prefill(other)
    engines.prefills_elsewhere += 1
    return bad, listening_ports(other.handle.process.pid)


def unreachable_peer(engines: ScenarioEngines, p: Engine, d: Engine, other: Engine) -> Steps:
    """For two of four requests no process listens on the port that their params name. Both fail at once.

    Another request is from a peer that D has met.
    """
    met = yield from engines.decode(d, (yield from engines.prefill(p)))
    bad, ports = yield from prefill_elsewhere(engines, other, *BAD)
    good = yield from engines.prefill(p)
    if not ports_named_in(bad[BAD[0]].params, ports):
        return ScenarioObservation(unsupported=NO_PORT)
    port = free_port()
    changed = {name: (one, with_port_replaced(one.params, ports, port)) for name, one in bad.items()}
    decodes = yield from engines.decode_all(d, changed | {"good": (good, None), "own": (None, None)})
    after = yield from engines.decode(d, (yield from engines.prefill(p)))
    return ScenarioObservation({"met": met, **decodes, "after": after})


def silent_peer(engines: ScenarioEngines, p: Engine, d: Engine, other: Engine) -> Steps:
    """For one of three requests the port that its params name accepts connections and never answers.

    Another request is from a peer that D has not met.
    """
    # One alone: a connector may have few threads, and may let each of them wait for a peer.
    bad, ports = yield from prefill_elsewhere(engines, other, BAD[0])
    if not (named := ports_named_in(bad[BAD[0]].params, ports)):
        return ScenarioObservation(unsupported=NO_PORT)
    zeromq = yield from speaks_zeromq(min(named), other.handle.process.pid)
    good, port = (yield from engines.prefill(p)), free_port()
    engines.silent_listeners.append(listener := SilentListener(port, zeromq))
    changed = {name: (one, with_port_replaced(one.params, ports, port)) for name, one in bad.items()}
    decodes = yield from engines.decode_all(d, changed | {"good": (good, None), "own": (None, None)})
    after = yield from engines.decode(d, (yield from engines.prefill(p)))
    return ScenarioObservation({**decodes, "after": after}, numbers={"heard": len(listener.received)})


def stopped_peer(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """P's process is stopped while D meets it, and again while D reads from it.

    The third load is undisturbed.
    """
    decodes, numbers = {}, {}
    for what in ("meeting", "reading"):
        prefill = yield from engines.prefill(p)
        yield from p.stop_process()
        numbers[f"{what}_from"] = added = time.monotonic()
        request = yield from engines.add_decode(d, prefill)
        own = engines.make_request(engines.new_prompt(), "d", None)
        d.queue("add", own)  # D may stand in a step until P goes on
        stall = engines.bench.scaled_seconds(STALL_S)
        yield from let_run(stall, d, most=1.5 * stall)  # connectors count by the clock how long P is silent
        numbers[f"{what}_to"] = time.monotonic()
        p.resume()
        decodes[what] = yield from engines.finish_decode(d, request, added)
        yield from engines.finish_decode(d, own, added)
    numbers["calm_from"] = time.monotonic()
    decodes["calm"] = yield from engines.decode(d, (yield from engines.prefill(p)))
    numbers["calm_to"] = time.monotonic()
    return ScenarioObservation(decodes, numbers=numbers)


def another_model(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """P hands over to a D like itself, and to D's that differ in one of `OTHERS`, which changes no size."""
    decodes = {"same": (yield from engines.decode(d, (yield from engines.prefill(p))))}
    for what in OTHERS[:1] if engines.bench.context.settings.matrix == "quick" else OTHERS:
        other = engines.start(f"D-{what}")
        yield from other.call("usage")  # it is up: P's lease is short
        decodes[what] = yield from engines.decode(other, (yield from engines.prefill(p)))
    return ScenarioObservation(decodes)


# ---- leases ------------------------------------------------------------------------------------------------


def lease_ends_before_load(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """D's request is added when its lease is over and P has overwritten its blocks.

    A P that has freed them before may have a copy. Then D loads another prompt ("early"), whose blocks P has
    overwritten, too, within the lease. A normal hand-over follows.
    """
    prefill, limit = (yield from engines.prefill(p)), engines.lease_s + engines.limits.release
    known = prefill.id in (yield from p.call("usage")).requests
    if not (freed := (yield from engines.wait_until_freed(p, prefill, limit))):
        return ScenarioObservation(prefills={"late": prefill}, numbers={"freed": 0.0})
    decodes = {}
    if freed - prefill.added < engines.lease_s:
        copied = yield from engines.prefill(p)
        if (yield from engines.wait_until_freed(p, copied, limit)):
            decodes["early"] = yield from engines.decode(d, copied)
        yield from pause(freed + engines.lease_s - time.monotonic())
    decodes["late"] = yield from engines.decode(d, prefill)
    decodes["after"] = yield from engines.decode(d, (yield from engines.prefill(p)))
    yield from engines.wait_until_empty(p)
    return ScenarioObservation(decodes, {"late": prefill}, numbers={"freed": freed, "known": known})


def lease_ends_during_load(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """D takes no step during a load, until the lease is over and P has overwritten the blocks.

    Then D goes on.
    """
    yield from engines.decode(d, (yield from engines.prefill(p)))
    prefill = yield from engines.prefill(p)
    held = yield from engines.add_decode_with_faults(p, d, prefill, HELD)
    if isinstance(held, str):
        return ScenarioObservation(unsupported=held)
    yield from d.pause_stepping()
    of_p = held[0].id in engines.of_p
    freed = yield from engines.wait_until_freed(p, prefill, 2 * engines.lease_s + engines.limits.release)
    if not freed:
        d.resume()
        yield from engines.start_held_transfers(p, d, held[0])
        found = ScenarioObservation(prefills={"late": prefill}, numbers={"freed": 0.0})
        return replace(found, unsupported=KEEPS) if of_p else found
    if freed - prefill.added < engines.lease_s:
        yield from pause(engines.lease_s)  # that of a copy
    d.resume()
    yield from engines.start_held_transfers(p, d, held[0])
    decodes = {"late": (yield from engines.finish_decode(d, *held))}
    decodes["after"] = yield from engines.decode(d, (yield from engines.prefill(p)))
    return ScenarioObservation(decodes, {"late": prefill}, numbers={"freed": freed, "of_p": of_p})


def queued_past_lease(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """Three requests of D wait in the queue for longer than a lease before they are scheduled. The id of the
    second one has characters that separate words.

    Meanwhile the lease ends of a prompt ("behind") that P has computed after them, and that no D reads.
    `numbers`: "behind": when P no longer held that prompt; 0.0: P still holds it.
    """
    if "loading_past_lease" in engines.running:  # D meets P there
        yield from until(lambda: d.ends, d.deadline(engines.limits.request))
    else:
        yield from engines.decode(d, (yield from engines.prefill(p)))
    prefills, requests, decodes = {}, {}, {}
    p.longest_gap = d.longest_gap = 0.0
    for name, chosen in {"waiting": "", "chosen": CHOSEN, "last": ""}.items():
        like = prefills[name] = yield from engines.prefill(p, chosen=chosen)
        request = requests[name] = engines.make_request(like.number, "d", like.params, chosen=chosen)
        yield from d.call("keep_in_queue", request.id)
        yield from d.call("add", request)
    added = time.monotonic()
    behind = prefills["behind"] = yield from engines.prefill(p)
    freed = yield from engines.wait_until_gone(p, behind.id, engines.lease_s + engines.limits.release)
    yield from pause(added + engines.lease_s * LEASES_WAITED - time.monotonic())
    too_slow, waited = engines.too_slow(p, d), d.core_wait()
    for request in requests.values():
        yield from d.call("let_schedule", request.id)
    for name, request in requests.items():
        decodes[name] = yield from engines.finish_decode(d, request, added)
    too_slow = too_slow or engines.too_slow(p, d, d.core_wait() - waited)
    return ScenarioObservation(decodes, prefills, numbers={"behind": freed}, too_slow=too_slow)


def loading_past_lease(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """D's load takes longer than a lease."""
    yield from engines.decode(d, (yield from engines.prefill(p)))
    prefill = yield from engines.prefill(p)
    p.longest_gap = d.longest_gap = 0.0
    held = yield from engines.add_decode_with_faults(p, d, prefill, HELD)
    if isinstance(held, str):
        return ScenarioObservation(unsupported=held)
    yield from pause(engines.lease_s * LEASES_WAITED)
    too_slow, waited = engines.too_slow(p, d), d.core_wait()
    yield from engines.start_held_transfers(p, d, held[0])
    decode = yield from engines.finish_decode(d, *held)
    too_slow = too_slow or engines.too_slow(p, d, d.core_wait() - waited)
    return ScenarioObservation({"loading": decode}, {"loading": prefill}, too_slow=too_slow)


def cut_connections(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """Connections of D to a P that it has not met are reset; then D reaches this P.

    `numbers`: moment -> connections that were cut, and how many requests failed before one reached P.
    """
    decodes, numbers, peers = {}, {}, {"answering": p}
    if engines.bench.context.settings.matrix != "quick":
        peers["accepted"] = engines.start("P10")  # no other scenario breaks its listener
    for moment, peer in peers.items():
        bad, ports = (yield from engines.prefill(peer)), listening_ports(peer.handle.process.pid)
        if not (named := ports_named_in(bad.params, ports)):
            return ScenarioObservation(unsupported=NO_PORT)
        proxy = CuttingProxy(port := free_port(), min(named), CUT[moment])
        engines.proxies.append(proxy)
        decodes[moment] = yield from engines.decode(d, bad, with_port_replaced(bad.params, ports, port))
        numbers[moment], numbers[f"refused_{moment}"] = float(proxy.cut), 0.0
        for _ in range(ATTEMPTS):
            after = yield from first_load(engines, peer, d)
            decodes[f"after_{moment}"] = after
            if after.finish == "length":
                break
            numbers[f"refused_{moment}"] += 1
    return ScenarioObservation(decodes, numbers=numbers)


# ---- malformed messages ------------------------------------------------------------------------------------


def garbage_messages(engines: ScenarioEngines, p: Engine, d: Engine) -> Steps:
    """A client that is no peer sends a thousand malformed messages to P's ports.

    Then a D that has not met P loads from P. If it does not, and they waited for a core meanwhile or its
    lease was over, another D tries `again`.
    `numbers`: "waited": for so many seconds in the last try.
    """
    senders = [engines.running[name] for name in SCENARIOS["P1D1"]["garbage_messages"].beside]
    yield from until(
        lambda: engines.prefills_elsewhere == len(senders) or all(sender.done for sender in senders),
        p.deadline(engines.limits.request),
    )
    listeners = engines.silent_listeners
    contact = Deadline(engines.bench.scaled_seconds(CONTACT_S))
    yield from until(lambda: any(one.received for one in listeners), contact)
    valid = [frames for one in listeners for frames in one.received[:2]]
    before = yield from engines.prefill(p)
    listening = listening_ports(p.handle.process.pid)
    # a URL names a server where D learns the port on which P listens
    sent, ports = 0, sorted(ports_named_in(before.params, listening, in_texts=False) or listening)
    for port in ports:
        client = HostileClient(port, (yield from speaks_zeromq(port, p.handle.process.pid)))
        stream = malformed_messages(valid, MESSAGES // len(ports), seed=len(ports))
        while chunk := list(itertools.islice(stream, CHUNK)):
            sent += sum(client.send(frames) for frames in chunk)
            client.send_raw(b"".join(chunk[0]))
            yield
        yield from let_run(engines.bench.scaled_seconds(DELIVERY_S), p)
        client.close()
    found = ScenarioObservation(numbers={"sent": sent, "ports": len(ports), "learned": len(valid)})
    for name in ("stranger", "again"):
        if found.decodes:  # the other D may not ask P again so soon
            yield from (d := engines.start("D14")).call("usage")
        found.prefills[name] = prefill = yield from engines.prefill(p)  # another one's lease may be over
        clock = Deadline(math.inf, (os.getpid(), p.handle.process.pid, d.handle.process.pid), look=True)
        found.decodes[name] = ended = yield from engines.decode(d, prefill)
        took = ended.ended - ended.added
        waited = found.numbers["waited"] = took - min(took, clock.passed())
        late = ended.finish and ended.ended - ended.prefill_added > engines.lease_s
        if (ended.finish == "length" and ended.trace.external_tokens) or (waited < SLOW * took and not late):
            break
    return found


# Engines are started in this order. Where possible, an engine that a connector may kill in one scenario is
# not used in another. Where P writes, what is held is held on P, so that scenarios which hold transfers have
# a P whose other transfers do not begin meanwhile.
OF_LEASES = {
    "queued_past_lease": PeerScenario(queued_past_lease, ("P5", "D6"), waits_for_lease=True),
    "lease_ends_before_load": PeerScenario(lease_ends_before_load, ("P6", "D8"), waits_for_lease=True),
}
SCENARIOS: dict[str, dict[str, PeerScenario]] = {
    "P1D1": {
        "silent_peer": PeerScenario(silent_peer, ("P", "D4"), other_engines=("P3",), starts_early=True),
        "unreachable_peer": PeerScenario(
            unreachable_peer, ("P", "D"), other_engines=("P3",), starts_early=True
        ),
        "garbage_messages": PeerScenario(
            garbage_messages, ("P3", "D3"), beside=("unreachable_peer", "silent_peer")
        ),
        "cut_connections": PeerScenario(cut_connections, ("P", "D10"), starts_early=True),
        "loading_past_lease": PeerScenario(loading_past_lease, ("P5", "D6"), waits_for_lease=True),
        "lease_ends_during_load": PeerScenario(lease_ends_during_load, ("P6", "D5"), waits_for_lease=True),
        **OF_LEASES,
        "stopped_peer": PeerScenario(stopped_peer, ("P2", "D2")),
        "sleeping_peer": PeerScenario(
            sleeping_peer, ("P12", "D12"), starts_early=True, over_tcp=True, limits_loads=True
        ),
        "restarted_peer": PeerScenario(restarted_peer, ("P2", "D2", "D7"), after="stopped_peer"),
        **OF_RANKS["P1D1"],
    },
    "P1D2": OF_RANKS["P1D2"],
    "P2D1": {**OF_LEASES, **OF_RANKS["P2D1"]},
}
# Scenarios that run when a case asks for them, without the others.
ON_THEIR_OWN: dict[str, PeerScenario] = {
    "another_model": PeerScenario(another_model, ("P", "D")),
    "shutdown_during_load": PeerScenario(
        shutdown_during_load, ("P13", "D13"), starts_early=True, over_tcp=True
    ),
    "two_peers": PeerScenario(two_peers, ("P15", "P15-pool", "D15")),
    "two_readers": PeerScenario(two_readers, ("P16", "D16", "D17")),
    "two_samples": PeerScenario(two_samples, ("P18", "D18")),
}


def scenario_named(topology: str, name: str) -> PeerScenario:
    """A scenario of the cells of a topology. Raises KeyError if they have none of this name."""
    return ON_THEIR_OWN[name] if name in ON_THEIR_OWN else SCENARIOS[topology][name]


_EVERY = (*ON_THEIR_OWN.values(), *SCENARIOS["P1D1"].values())
OVER_TCP = frozenset(engine for one in _EVERY if one.over_tcp for engine in one.engines)
LIMITED = frozenset(engine for one in _EVERY if one.limits_loads for engine in one.engines)
