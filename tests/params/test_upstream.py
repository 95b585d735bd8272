"""What the cases about params report of vLLM's NixlConnector: docs/findings.md."""

from __future__ import annotations

from collections.abc import Callable

from tests.helpers.case_runner import CellRun

FOR_EVER = "the request waits for ever: its load was announced, and none is ordered"


def test_vllms_nixl_connector_trusts_params(run_cases: Callable[..., CellRun]) -> None:
    run = run_cases(
        "NixlConnector", "llama3_1_8b", only=lambda planned: planned.module == "protocol/kv_transfer_params"
    )
    said = {name: finding.happened for name, finding in run.findings.items()}
    assert said["corrupted_params_fail_only_their_request[missing]"] == (
        f"with remote_engine_id, remote_request_id, remote_host, remote_port missing: {FOR_EVER}"
    )
    assert said["corrupted_params_fail_only_their_request[list]"].startswith(
        "with remote_engine_id list: on_new_request raised TypeError: unhashable type: 'list'"
    )
    asserts = "update_state_after_alloc raised AssertionError (pull_scheduler.py:186)"
    assert (
        said["corrupted_lists_fail_only_their_request[missing]"]
        == f"with remote_block_ids missing: {asserts}"
    )
    assert said["corrupted_lists_fail_only_their_request[emptied]"].endswith(
        "the metadata names no block to load from"
    )
    assert said["p_survives_corrupted_params[flag]"] == f"with do_remote_prefill flag: {asserts}"
    assert said["p_survives_params_of_an_earlier_turn"] == f"with params of an earlier turn: {FOR_EVER}"
    assert {finding.rule for finding in run.findings.values()} == {"KV-PARAMS-002", "KV-PARAMS-005"}
