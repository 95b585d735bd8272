"""A declaration is read from a file or from pyproject.toml.

A mistake in it is one sentence that names the key.
"""

from __future__ import annotations

import pytest

from pytest_kvconform import declaration
from pytest_kvconform.settings import BadSetting


def read(tmp_path, text: str) -> declaration.Declaration:
    (tmp_path / "d.toml").write_text(text)
    return declaration.read(declaration.read_file(tmp_path / "d.toml", "d.toml"), "d.toml")


def test_a_file(tmp_path):
    said = read(tmp_path, "profile = 'store'\n[features]\nmla = true\nabort = {unsupported = ' not  yet '}")
    assert (said.profile, said.features, said.known) == ("store", {"mla": "", "abort": "not yet"}, ())


def test_how_much_is_loaded(tmp_path):
    declared = read(tmp_path, "load_granularity = 256\nmin_load = 40")
    assert (declared.load_granularity, declared.min_load) == (256, 40)


def test_services(tmp_path):
    [kv, _] = read(
        tmp_path,
        "[services.kv]\ncommand = ['kv', '${HOME}', '{\"a\": 1}', '{port}']\nenvironment = {A = '{folder}'}\n"
        "[services.other]\ncommand = ['sh', '{port.metrics}', '{services.kv.port}']\nready = 'line:up'",
    ).services
    assert (kv.command, kv.ready, kv.deadline) == (
        ("kv", "${HOME}", '{"a": 1}', "{port}"),
        "tcp://127.0.0.1:{port}",
        60.0,
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[feature]\nmla = true", "d.toml: feature: there is no such key (did you mean features?)"),
        (
            "[features]\nmla-and-gqo = true",
            "d.toml: features.mla-and-gqo: there is no such feature (did you mean mla-and-gqa?)",
        ),
        (
            "[features]\nzzz = true",
            "d.toml: features.zzz: there is no such feature; there are full-attention, mla, ",
        ),
        (
            "[features]\nmla = 'yes'",
            "d.toml: features.mla: expected true or { unsupported = \"why\" }, got 'yes'",
        ),
        ("[features]\nmla = false", 'features.mla: expected true or { unsupported = "why" }, got False'),
        ("[features]\nmla = 1", 'features.mla: expected true or { unsupported = "why" }, got 1'),
        ("[features]\nmla = {unsupported = ' '}", "features.mla: expected true or"),
        (
            "[features]\nmla = {unsuported = 'a'}",
            "d.toml: features.mla.unsuported: there is no such key (did you mean unsupported?)",
        ),
        ("features = 3", "d.toml: features: expected a table of features, got 3"),
        (
            "profile = 'stor'",
            "d.toml: profile: expected p2p or store or same-engine, got 'stor' (did you mean store?)",
        ),
        (
            "handover = ['none']",
            "d.toml: handover: expected handoff or rendezvous or none or MODULE:FUNCTION, got ['none']",
        ),
        ("handover = 'a:b c'", "d.toml: handover: expected handoff or rendezvous or none or MODULE:FUNCTION"),
        ("services = 3", "d.toml: services: expected a table for each service, got 3"),
        ("[services]\nkv = 3", "d.toml: services: expected a table for each service, got {'kv': 3}"),
        ("[services.'a b']", "d.toml: services.a b: a name has letters, digits, - and _, 32 at most"),
        (
            "[services.kv]\ncommand = ['kv', '{port}']\nfiles = {'a/b' = ''}",
            "d.toml: services.kv.files: 'a/b' is no name of a file: letters, digits, -, _ and dots",
        ),
        (
            "[services.kv]\ncommand = ['kv', '{port}']\nfiles = {a = 3}",
            "d.toml: services.kv.files: expected a table of texts, got {'a': 3}",
        ),
        (
            "[services.kv]\ncommand = ['kv', '{port}']\nfiles = {a = '{prot}'}",
            "d.toml: services.kv.files: {prot} is no placeholder",
        ),
        ("[services.kv]", 'd.toml: services.kv.command: expected a list of texts such as ["server", '),
        ("[services.kv]\ncommand = 'kv'", "d.toml: services.kv.command: expected a list of texts such as"),
        (
            "[services.kv]\ncomand = []",
            "d.toml: services.kv.comand: there is no such key (did you mean command?)",
        ),
        (
            "[services.kv]\ncommand = ['kv']",
            "d.toml: services.kv.ready: is missing, and neither command, environment nor files have {port}",
        ),
        (
            "[services.kv]\ncommand = ['kv', '{prot}']\nready = 'line:up'",
            "d.toml: services.kv.command: {prot} is no placeholder; there are {port}, {port.NAME}, ",
        ),
        (
            "[services.kv]\ncommand = ['kv', '{port}', '{services.kvs.port}']",
            "d.toml: services.kv.command: there is no service 'kvs' (did you mean kv?)",
        ),
        (
            "[services.kv]\ncommand = ['kv', '{port}']\nready = 'udp://a:1'",
            "d.toml: services.kv.ready: expected tcp://HOST:PORT, http://HOST:PORT/PATH or line:TEXT, got",
        ),
        ("[services.kv]\ncommand = ['kv']\nready = 'line: '", "d.toml: services.kv.ready: expected tcp://"),
        (
            "[services.kv]\ncommand = ['kv', '{port}']\ndeadline = 0",
            "d.toml: services.kv: expected a number above 0, got 0",
        ),
        (
            "[services.kv]\ncommand = ['kv', '{port}']\nenvironment = {A = 1}",
            "d.toml: services.kv.environment: expected a table of texts, got {'A': 1}",
        ),
        ("lease = '$'", "d.toml: lease: expected a key of kv_connector_extra_config or $VARIABLE, got '$'"),
        ("load_granularity = 1.5", "d.toml: load_granularity: expected a number of tokens from 0 to"),
        ("remembers = 5001", "d.toml: remembers: expected a number of requests from 0 to 5000, got 5001"),
        ("save_delay = -1", "d.toml: save_delay: expected a number of seconds from 0 to 4, got -1"),
        ("min_load = true", "d.toml: min_load: expected a number of tokens from 0 to 2147483647, got True"),
        ("min_load = -1", "d.toml: min_load: expected a number of tokens from 0"),
        ("asks_worker = 1", "d.toml: asks_worker: expected true or false, got 1"),
        ("min-load = 1", "d.toml: min-load: there is no such key (did you mean min_load?)"),
        ("known = 3", "d.toml: known: expected a list of tables ([[known]]), got 3"),
        ("= 3", "d.toml: "),
        ("a = " + "[" * 5000, "d.toml: "),
    ],
)
def test_a_mistake_names_the_key(tmp_path, text, says):
    with pytest.raises(BadSetting) as caught:
        read(tmp_path, text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mistake_in_pyproject_is_one_sentence(kv, pytester):
    pytester.makepyprojecttoml("[tool.kvconform.features]\nslidng-window = true")
    run = kv(undeclared=True)
    assert run.code == 4
    says = (
        "pyproject.toml: tool.kvconform.features.slidng-window: there is no such feature (did you mean "
        "sliding-window?)"
    )
    assert f"ERROR: {says}" in run.text
    assert "Traceback" not in run.text
