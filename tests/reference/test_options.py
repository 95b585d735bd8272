"""Options: each is checked, and a wrong one is refused in a sentence that names it."""

from __future__ import annotations

from typing import Any

import pytest

from reference_connector.options import BadOption, Options, read_options


def test_nothing_is_needed() -> None:
    assert read_options({}) == Options()
    assert Options().heartbeat == Options().kv_lease_duration / 6


def test_what_is_given_holds() -> None:
    options = read_options(
        {"kv_lease_duration": 6, "side_channel_port": 0, "backends": ["UCX", "LIBFABRIC"], "integrity": True}
    )
    assert (options.kv_lease_duration, options.heartbeat, options.backends) == (
        6.0,
        1.0,
        ("UCX", "LIBFABRIC"),
    )


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"kv_lease_duration": 0}, "kv_lease_duration"),
        ({"kv_lease_duration": "30"}, "kv_lease_duration"),
        ({"kv_lease_duration": float("nan")}, "kv_lease_duration"),
        ({"transfer_timeout": -1}, "transfer_timeout"),
        ({"side_channel_port": 65536}, "side_channel_port"),
        ({"side_channel_host": 7}, "side_channel_host"),
        ({"num_threads": 1.5}, "num_threads"),
        ({"backends": "UCX"}, "backends"),
        ({"integrity": "yes"}, "integrity"),
        ({"lease": 30}, "no option 'lease'; there are kv_lease_duration"),
    ],
)
def test_what_is_wrong_is_named(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(BadOption, match=said) as raised:
        read_options(extra)
    assert "\n" not in str(raised.value)
