"""Features that a connector has with some configuration alone, and how long D keeps KV for a next turn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_kvconform.kv_config import BIDIRECTIONAL, CHILDREN, EXTRA, TURN_S
from pytest_kvconform.rigs.context import transfer_config
from pytest_kvconform.settings import BadSetting, Settings
from pytest_kvconform.subject import Subject, resolve

ON = {"bidirectional_kv_xfer": True}
TTL = "decoder_kv_blocks_ttl"


def subject(connector: str, extra: dict[str, Any], **more: Any) -> Subject:
    return resolve(Settings(connector=connector, config=json.dumps({EXTRA: extra}), **more))


@pytest.mark.parametrize("connector", ["NixlConnector", "NixlPullConnector"])
def test_a_key_of_the_configuration_turns_a_feature_on(connector: str) -> None:
    assert subject(connector, ON).features[BIDIRECTIONAL] == ""
    for off in ({}, {"bidirectional_kv_xfer": False}):
        plain = subject(connector, off)
        assert plain.features[BIDIRECTIONAL] == "bidirectional_kv_xfer is not set"
        assert TTL not in transfer_config(plain, "D", "cpu")[EXTRA]
    assert subject("NixlPushConnector", ON).features[BIDIRECTIONAL]


def test_d_keeps_for_a_moment_what_no_next_turn_reads() -> None:
    on = subject("NixlConnector", ON)
    assert transfer_config(on, "D", "cpu")[EXTRA][TTL] == TURN_S
    assert TTL not in transfer_config(on, "D", "cpu", turn_s=0.0)[EXTRA]
    assert transfer_config(subject("NixlConnector", ON | {TTL: 7}), "D", "cpu")[EXTRA][TTL] == 7


def test_the_user_s_declaration_wins() -> None:
    off = subject(
        "NixlConnector", ON, features=json.dumps({BIDIRECTIONAL: {"unsupported": "no router here"}})
    )
    assert off.features[BIDIRECTIONAL] == "no router here"
    assert TTL not in transfer_config(off, "D", "cpu")[EXTRA]


def test_a_connector_inside_another_one_is_configured_itself() -> None:
    children = [{"kv_connector": "NixlConnector", "kv_role": "kv_both", EXTRA: ON}]
    on = subject("MultiConnector", {CHILDREN: children})
    assert on.features[BIDIRECTIONAL] == ""
    [inside] = transfer_config(on, "D", "cpu")[EXTRA][CHILDREN]
    assert inside[EXTRA][TTL] == TURN_S
    [plain] = transfer_config(resolve(Settings(connector="MultiConnector")), "D", "cpu")[EXTRA][CHILDREN]
    assert TTL not in plain[EXTRA]


def test_the_key_is_one_of_the_configuration() -> None:
    named = subject("my_pkg.mod:MyConnector", {}, turn_lease="keep_s")
    assert transfer_config(named, "D", "cpu")[EXTRA]["keep_s"] == TURN_S
    with pytest.raises(BadSetting, match="turn_lease: expected a key of kv_connector_extra_config"):
        subject("my_pkg.mod:MyConnector", {}, turn_lease="$KEEP_S")
