"""Objects of a connector on the way between processes: none ends as an error of the suite."""

from __future__ import annotations

from functools import partial

from tests.helpers.wrong import Right, Theme, Wrong, on

MODULE = "tests.wrong_connectors.crossings.objects"
UNUSUAL = ("HasOddStatistics",)  # right all the same
PREEMPTED, COMPLETES = "preempted_blocks_are_never_read_again", "completes"
LOST = r"a {} of {} does not survive pickle, with which vLLM sends it between its engine core and its workers"
IN_ONE_PROCESS = [
    Wrong(
        "StatisticsRaise",
        on(
            PREEMPTED,
            "RuntimeError: no dict .*, when it called to_dict of the NoDict that get_kv_connector_stats ",
        ),
        rules="KV-HOOK-003",
    ),
    Wrong(
        "RaisesSurrogates", on(PREEMPTED, r"raised RuntimeError: no peer \\udcff here"), rules="KV-HOOK-001"
    ),
    Wrong("RaisesMute", on(PREEMPTED, r"raised Mute: \(ValueError in Mute.__str__\)"), rules="KV-HOOK-001"),
    Wrong("RaisesWithTwoArguments", on(PREEMPTED, "raised NeedsTwo: the door is open"), rules="KV-HOOK-001"),
    Wrong("RaisesWithALock", on(PREEMPTED, "raised HoldsALock: the door is shut"), rules="KV-HOOK-001"),
    Wrong("MetadataHasALock", on(PREEMPTED, "Metadata of build_connector_meta does not survive pickle")),
    Wrong("ParamsHaveALock", on(PREEMPTED, "they reach D through msgpack and JSON, which refuse them")),
    Wrong("AnswersSurrogates", on(PREEMPTED, r"returned \('no peer \\udcff here', False\)")),
    Wrong("AnswersWithoutRepr", on(PREEMPTED, "returned a tuple, whose repr raises ValueError")),
    # vLLM has the worker of one rank in the process of its engine core (v1/executor/uniproc_executor.py).
    *(Right(name, passes=PREEMPTED, cases=PREEMPTED) for name in ("Right", *UNUSUAL, "StatisticsHaveALock")),
]
of_ranks = partial(Wrong, topology="P2D1", variants="n17")
RANKS = [
    of_ranks("StatisticsHaveALock", on(COMPLETES, LOST.format("Locked", "get_kv_connector_stats"))),
    of_ranks("StatisticsAreLocal", on(COMPLETES, LOST.format("Here", "get_kv_connector_stats"))),
    of_ranks("MetadataHasALock", on(COMPLETES, LOST.format("Metadata", "build_connector_meta"))),
    of_ranks("WorkerMetadataHasALock", on(COMPLETES, LOST.format("Report", "build_connector_worker_meta"))),
    of_ranks(
        "HandshakeHasALock",
        on("engines_start", LOST.format("HandshakeMetadata", "get_handshake_metadata")),
        blocked={COMPLETES},
    ),
    of_ranks(
        "ParamsHaveALock", on(COMPLETES, "the kv_transfer_params of request_finished do not reach D: msgpack")
    ),
    of_ranks(
        "RaisesWithTwoArguments", on(COMPLETES, r"P raised NeedsTwo in start_load_kv .*: the door is open$")
    ),
    of_ranks("RaisesWithALock", on(COMPLETES, r"P raised HoldsALock in start_load_kv .*: the door is shut$")),
    of_ranks(
        "RaisesSurrogates", on(COMPLETES, r"P raised RuntimeError in start_load_kv .*: no peer \\udcff here$")
    ),
    of_ranks(
        "RaisesMute", on(COMPLETES, r"P raised Mute in start_load_kv .*: \(ValueError in Mute.__str__\)$")
    ),
]

ARRIVE = [
    Right(name, topology=topology, variants="n17 n55 two_at_once", loads=True)
    for topology in ("P1D1", "P2D1")
    for name in ("Right", *UNUSUAL)
]
cell = {"setup": "b16", "matrix": "full", "config": ""}
THEMES = (
    Theme("objects", MODULE, "protocol", IN_ONE_PROCESS, cell=cell, runs="cases"),
    Theme(
        "objects_of_ranks",
        MODULE,
        "bytes",
        RANKS,
        cell=cell,
        runs="cases",
        also=COMPLETES,
    ),
    Theme(
        "unusual_objects",
        MODULE,
        "bytes",
        ARRIVE,
        cell=cell,
        modules=tuple(f"bytes/{name}" for name in ("handover", "pool", "start", "statistics")),
        others="PASS",
    ),
)
