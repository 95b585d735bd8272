"""A D with another model than P: the case finds who uses P's KV all the same."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.peers.conftest import Reported

CASE = "kv_of_another_model_is_not_loaded"
MODULE = ("protocol/peers/model_identity",)
DIFFERENCES = {
    "model": "another model than P, of the same sizes",
    "dtype": "another dtype than P, of the same size",
    "rope": "another rotary embedding than P",
}
# which differences a connector does not notice
USES = {
    "BelievesAnyModel": {"model", "dtype", "rope"},
    "ForgetsRope": {"rope"},
    "NixlConnector": {"rope"},  # a finding
    "Right": set(),
    "Reference": set(),
    "TcpPull": set(),
}


@pytest.mark.parametrize("connector", USES)
def test_who_uses_kv_of_another_model_is_found(run_cases: Callable[..., Reported], connector: str) -> None:
    expected = {f"{CASE}[{what}]": "FAIL" if what in USES[connector] else "PASS" for what in DIFFERENCES}
    # On a busy machine the P of a right connector may hear of its request too late for the D that is as P.
    shows = "" if USES[connector] else "PASS"
    reported = run_cases(connector, "P1D1", modules=MODULE, judged=expected, shows=shows)
    assert {name: outcome for name, (outcome, _) in reported.items()} == expected, reported
    for what in USES[connector]:
        assert re.fullmatch(
            rf"D has {DIFFERENCES[what]}: a request of D loaded \d+ tokens that P had computed\n"
            "neither the handshake nor the kv_transfer_params tell D that P's model differs, or D does not "
            "compare it",
            reported[f"{CASE}[{what}]"][1],
        ), reported
