"""`{engine.port}` and `{engine.host}` in the configuration of a connector: each engine has its own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_kvconform.result import Cell
from pytest_kvconform.rigs.bytes.specs import byte_engine_spec
from pytest_kvconform.rigs.context import RunContext, SubjectFacts
from pytest_kvconform.services.engine_values import fill_engine
from pytest_kvconform.settings import BadSetting, Settings
from pytest_kvconform.subject import resolve

CONFIG = {
    "port": "{engine.port}",
    "urls": ["tcp://127.0.0.1:{engine.port}/{engine.port.side}"],
    "host": "{engine.host}",
    "other": "{x}",
}


def with_config(extra: dict[str, Any]) -> Settings:
    return Settings(connector="m:C", config=json.dumps({"kv_connector_extra_config": extra}))


def test_a_port_is_a_number_alone_and_text_in_a_url() -> None:
    filled = fill_engine(CONFIG, 7000, "10.0.0.7")
    urls = ["tcp://127.0.0.1:7000/7001"]
    assert filled == {"port": 7000, "urls": urls, "host": "10.0.0.7", "other": "{x}"}


def test_p_and_d_have_other_ports_and_none_is_that_of_a_side_channel() -> None:
    settings = with_config(CONFIG)
    subject = resolve(settings)
    facts = SubjectFacts(name="", module="", file="", supports_hma=True, vllm="0.32.0", device="cpu")
    context = RunContext("/run/zygote", subject, settings, facts, print)
    taken: list[int] = []
    for role in "PD":
        spec = byte_engine_spec(context, Cell("llama3_1_8b", "P1D1", "b16"), role, 64)
        extra = spec.kv_transfer_config["kv_connector_extra_config"]
        side = int(extra["urls"][0].rpartition("/")[2])
        taken += [extra["port"], side, spec.kv_transfer_config["kv_port"]]
        taken += map(int, spec.environment.values())
    assert len(set(taken)) == len(taken) == 10
    assert subject.config["kv_connector_extra_config"] == CONFIG  # as the report has it


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (
            {"at": "tcp://127.0.0.1:{engine.prot}"},
            "{engine.prot} is no placeholder; there are {engine.port}, {engine.port.NAME} and {engine.host}",
        ),
        (
            {name: f"{{engine.port.{name}}}" for name in "abcd"},
            "it names 4 ports of an engine (port.a, port.b, port.c, port.d); it can have 3",
        ),
    ],
)
def test_what_means_nothing_is_one_sentence(extra: dict[str, str], says: str) -> None:
    with pytest.raises(BadSetting) as caught:
        resolve(with_config(extra))
    assert str(caught.value) == f"--kv-config: {says}"
