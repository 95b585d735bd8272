"""Loads and saves layer by layer, and what is left of them where vLLM replays full CUDA graphs."""

from __future__ import annotations

import numpy as np

from model_matrix import load_geometries
from pytest_kvconform.case import case
from pytest_kvconform.kvspace.kinds import UNWRITTEN
from pytest_kvconform.result import Blocked, Cell, Evidence, Finding, NotApplicable, Violation
from pytest_kvconform.rigs.bench import Bench
from pytest_kvconform.rigs.bytes.messages import Check
from pytest_kvconform.rigs.cluster.transfer import TransferObservation
from pytest_kvconform.rigs.engine.messages import listed
from pytest_kvconform.rigs.scenario import Transfer
from pytest_kvconform.suite.bytes._observations import completed, finding, moved, observe, with_loaded_kv
from pytest_kvconform.suite.bytes._transfers import one_token_a_step, situations

AWAITED = {"quick": ("two_at_once",), "full": ("two_at_once", "chunked", "hit1")}
PIECEWISE = "requires_piecewise_for_cudagraph"


def _awaited(cell: Cell, matrix: str) -> list[Transfer]:
    """Layers are awaited alike in engines of every size: in the quick matrix engines of one rank do it."""
    if matrix == "quick" and cell.topology != "P1D1":
        return []
    return [transfer for transfer in situations(cell, matrix) if transfer.name in AWAITED[matrix]]


@case("KV-LAYER-001", variants=_awaited)
def each_layer_is_loaded_when_awaited(bench: Bench, transfer: Transfer) -> Evidence:
    """A layer has all that is loaded for it when its own wait_for_layer_load returns."""
    observed = with_loaded_kv(bench, transfer)
    requests = [r for r in observed.requests if not r.decode.asynchronous]
    if not requests:
        raise NotApplicable("the connector loads between steps, and no layer waits for a load")
    for r in requests:
        for check in r.checks:
            if layers := _late_layers(observed, check):
                first = layers[0]
                raise Violation(
                    Finding(
                        rule="KV-LAYER-001",
                        happened=f"wait_for_layer_load({first!r}) returned before this layer of {r.name} of "
                        f"{r.length} tokens was loaded: its words were written later",
                        differs=f"{len(layers)} of {len({g.layer for g in check.pool.regions})} layers were "
                        f"late, the last of them {layers[-1]}",
                        picture=finding(bench, observed, r, check, "KV-LAYER-001").picture,
                        diagnosis=_how_late(layers, check),
                    )
                )
    return Evidence(
        looked_at=sum(check.rows_due for r in requests for check in r.checks),
        unit="rows",
        bytes_moved=moved(observed),
    )


def _late_layers(observed: TransferObservation, check: Check) -> tuple[str, ...]:
    """Return layers of which words were not written when they were awaited, and were written later."""
    came = any(
        check.request in audit.late for audit in observed.audits[1] if audit.rank == check.rank
    ) and check.pool.words.keys() == {UNWRITTEN}
    runs = check.pool.runs
    regions = np.unique(runs["region"][runs["kind"] == UNWRITTEN]).tolist() if came else []
    return tuple(dict.fromkeys(check.pool.regions[region].layer for region in regions))


def _how_late(layers: tuple[str, ...], check: Check) -> str:
    every = tuple(dict.fromkeys(region.layer for region in check.pool.regions))
    if layers == every[-1:]:
        return "wait_for_layer_load does not wait for the last layer"
    if layers == every[1:]:
        return "wait_for_layer_load waits in the first layer only"
    if layers == every:
        return "wait_for_layer_load waits for no layer, or for another than the one that it names"
    return "wait_for_layer_load waits for another layer than the one that it names, or not at all"


def _llama(cell: Cell) -> bool:
    """Whether this is the one cell for questions that depend neither on the model nor on the layout."""
    return (
        load_geometries()[cell.family].family == "llama" and cell.setup == "b16" and cell.topology == "P1D1"
    )


@case("KV-LAYER-002", applies=_llama, variants=lambda cell, matrix: one_token_a_step(cell)[1:])
def full_graphs_find_loaded_kv(bench: Bench, transfer: Transfer) -> Evidence:
    """What a step reads that is replayed as a full CUDA graph is there when start_load_kv returns."""
    plain, _ = one_token_a_step(bench.cell)
    if any(check.pool.wrong for r in with_loaded_kv(bench, plain).requests for check in r.checks):
        raise Blocked(f"D loads wrong KV for {plain}, in which vLLM calls the layer hooks")
    observed = observe(bench, transfer)
    if observed.excuse:
        raise Blocked(observed.excuse)
    failed = observed.failed.sentence if observed.failed else listed(observed.stuck) or observed.refused
    if failed:
        raise Violation(
            Finding(
                rule="KV-LAYER-002",
                happened="a transfer with steps that are replayed as full CUDA graphs did not end, and the "
                f"same transfer with calls of the layer hooks did: {failed}",
                diagnosis=f"{PIECEWISE} returned False, and the connector needs its layer hooks",
            )
        )
    for r in observed.requests:
        for check in r.checks:
            if check.pool.wrong:
                found = finding(bench, observed, r, check, "KV-LAYER-002")
                raise Violation(
                    Finding(
                        rule="KV-LAYER-002",
                        happened=f"{found.happened}, and vLLM replayed D's step as a full CUDA graph, in "
                        "which no layer hook is called",
                        differs=found.differs,
                        picture=found.picture,
                        diagnosis=f"{PIECEWISE} returned False, and start_load_kv returned before the KV was "
                        "loaded",
                    )
                )
    if not any(r.decode.external_tokens for r in observed.requests):
        raise NotApplicable("D loaded nothing of what P has computed in replayed steps, and a miss is right")
    return Evidence(
        looked_at=sum(check.rows_due for r in observed.requests for check in r.checks),
        unit="rows",
        bytes_moved=moved(observed),
    )


@case("KV-LAYER-003", applies=_llama, variants=lambda cell, matrix: one_token_a_step(cell)[1:])
def full_graphs_save_as_much(bench: Bench, transfer: Transfer) -> Evidence:
    """D loads as much of what P has computed in replayed steps as of what it has computed in others."""
    plain = with_loaded_kv(bench, one_token_a_step(bench.cell)[0])
    observed = completed(bench, transfer)
    for before, r in zip(plain.requests, observed.requests, strict=True):
        if r.decode.external_tokens < before.decode.external_tokens:
            raise Violation(
                Finding(
                    rule="KV-LAYER-003",
                    happened=f"of {r.length} tokens {r.decode.external_tokens} were announced after P's "
                    f"steps were replayed as full CUDA graphs, and {before.decode.external_tokens} after "
                    "steps in which layer hooks were called",
                    diagnosis=f"{PIECEWISE} returned False, and save_kv_layer is what saves",
                )
            )
    return Evidence(
        looked_at=len(observed.requests),
        unit="requests",
        bytes_moved=moved(observed),
        external_tokens=sum(r.decode.external_tokens for r in observed.requests),
    )
