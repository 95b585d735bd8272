"""The table of settings: precedence, origins, and one sentence for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_kvconform.report import document, failure
from pytest_kvconform.settings import OPTIONS, BadSetting, Settings, load
from pytest_kvconform.subject import Subject

# setting -> (two texts, their values): a flag and a variable take the text, the table takes the value
SAMPLES = {
    "connector": [("A", "A"), ("m:B", "m:B")],
    "config": [("{}", "{}"), ('{"a": 1}', '{"a": 1}')],
    "tier": [("engine", ("engine",)), ("a,b", ("a", "b"))],
    "family": [("llama", ("llama",)), ("a, b,a", ("a", "b"))],
    "topology": [("P1D1", ("P1D1",)), ("P1D2,P2D1", ("P1D2", "P2D1"))],
    "rule": [("KV-*", ("KV-*",)), ("KV-A-001", ("KV-A-001",))],
    "matrix": [("full", "full"), ("quick", "quick")],
    "gsm8k": [("a", "a"), ("b", "b")],
    "models": [("a", "a"), ("b", "b")],
    **{
        f"{name}_url": [("http://a:1", "http://a:1"), ("https://b", "https://b")]
        for name in ("router", "prefill", "decode", "baseline")
    },
    "header": [("X-Key: a, b", ("X-Key: a, b",)), ("A:b\nc : d", ("A: b", "c: d"))],
    "device": [("cpu", "cpu"), ("cuda", "cuda")],
    "hide_cpu": [
        ("avx512_bf16", ("amx_tile", "avx512_bf16")),  # no CPU has AMX without AVX512-BF16
        ("avx512,amx_tile", ("amx_tile", "avx512_bf16", "avx512")),
    ],
    "ray": [("auto", "auto"), ("10.0.0.7:6379", "10.0.0.7:6379")],
    "shard": [("1/2", "1/2"), ("02/3", "2/3")],
    "timeout_scale": [("2", 2.0), ("0.5", 0.5)],
    "seed": [("3", 3), ("4", 4)],
    "report": [("a", "a"), ("b", "b")],
    "declare": [("a.toml", "a.toml"), ("b.toml", "b.toml")],
    "feature": [("mla", ("mla",)), ("mla,abort", ("mla", "abort"))],
    "level": [("core", ("core",)), ("core,hybrid", ("core", "hybrid"))],
    "html": [("true", True), ("1", True)],
    "claim": [("true", True), ("1", True)],
    "stand_in": [("true", True), ("1", True)],
}


def toml(folder: Path, body: str) -> Path:
    (folder / "pyproject.toml").write_text(f"[tool.kvconform]\n{body}\n")
    return folder


def test_the_table_is_consistent():
    assert {option.name for option in OPTIONS if option.flag} == set(SAMPLES)
    for option in OPTIONS:
        assert option.default in ("", None) or option.parse(option.default) == option.default
        assert option.help[-1] not in ".!"
    assert len({option.key for option in OPTIONS}) == len(OPTIONS)


@pytest.mark.parametrize(
    "option", [option for option in OPTIONS if option.flag], ids=lambda option: option.key
)
def test_precedence_and_origin(option, tmp_path):
    (text, value), (other_text, other_value) = SAMPLES[option.name]
    command_line = {option.dest: [text] if option.repeatable else True if option.switch else text}
    settings = load(command_line, {option.variable: other_text}, tmp_path)
    assert (getattr(settings, option.name), settings.origins[option.name]) == (value, "command line")
    settings = load({}, {option.variable: other_text}, tmp_path)
    assert (getattr(settings, option.name), settings.origins[option.name]) == (other_value, option.variable)
    assert option.variable == "KVCONFORM_" + option.flag.removeprefix("--kv-").replace("-", "_").upper()
    raw = repr(text).replace("'", '"') if option.name != "seed" else text
    settings = load({}, {option.variable: other_text}, toml(tmp_path, f"{option.key} = {raw}"))
    assert getattr(settings, option.name) == other_value
    settings = load({}, {option.variable: ""}, tmp_path)
    assert getattr(settings, option.name) == (
        str(tmp_path / value) if option.is_path and text != "{}" else value
    )
    assert settings.origins[option.name] == "pyproject.toml"
    (tmp_path / "pyproject.toml").unlink()
    assert getattr(load({}, {}, tmp_path), option.name) == option.default


def test_toml_types(tmp_path):
    body = (
        'tier = ["engine", "bytes"]\nconfig = {kv_port = 7}\ntimeout-scale = 2\nseed = 5\nreport = '
        '"out"\nhandover = "none"'
    )
    settings = load({}, {}, toml(tmp_path, body))
    assert settings.tier == ("engine", "bytes")
    assert settings.config == '{"kv_port": 7}'
    assert (settings.timeout_scale, settings.seed, settings.handover) == (2.0, 5, "none")
    assert settings.report == str(tmp_path / "out")


def test_paths_are_relative_to_where_they_were_said(tmp_path):
    settings = load({"kv_report": "out"}, {}, toml(tmp_path, 'config = "sub/c.json"\nreport = "elsewhere"'))
    assert settings.config == str(tmp_path / "sub" / "c.json")
    assert settings.report == "out"


def test_last_seed(tmp_path):
    assert load({"kv_seed": "last"}, {}, tmp_path, last_seed=12).seed == 12
    with pytest.raises(BadSetting, match="no previous run"):
        load({"kv_seed": "last"}, {}, tmp_path)


@pytest.mark.parametrize(
    ("command_line", "environment", "body", "says"),
    [
        (
            {},
            {"KVCONFORM_MATRX": "full"},
            "",
            "environment: there is no variable KVCONFORM_MATRX (did you mean KVCONFORM_MATRIX?)",
        ),
        ({}, {"KVCONFORM_HANDOVER": "none"}, "", "environment: there is no variable KVCONFORM_HANDOVER"),
        (
            {},
            {"KVCONFORM_MATRIX": "ful"},
            "",
            "KVCONFORM_MATRIX: expected quick or full or nightly, got 'ful' (did you mean full?)",
        ),
        (
            {},
            {},
            "matrx = 1",
            "pyproject.toml: tool.kvconform.matrx: there is no such key (did you mean matrix?)",
        ),
        (
            {},
            {},
            "timeout_scale = 1",
            "tool.kvconform.timeout_scale: there is no such key (did you mean timeout-scale?)",
        ),
        (
            {},
            {},
            "timeout-scale = true",
            "pyproject.toml: tool.kvconform.timeout-scale: expected a number above 0, got True",
        ),
        ({}, {}, "timeout-scale = nan", "expected a number above 0, got nan"),
        ({}, {}, "seed = 1.5", "expected a whole number from 0 on, or last, got 1.5"),
        (
            {},
            {},
            "tier = [1]",
            "pyproject.toml: tool.kvconform.tier: expected a text or a list of texts, got [1]",
        ),
        ({}, {}, "connector = 3", "expected a text, got 3"),
        (
            {},
            {},
            'handover = "handof"',
            "expected handoff or rendezvous or none or MODULE:FUNCTION, got 'handof' (did you mean handoff?)",
        ),
        (
            {},
            {},
            'profile = "stor"',
            "expected p2p or store or same-engine, got 'stor' (did you mean store?)",
        ),
        ({}, {}, "= broken", "pyproject.toml: "),
        ({"kv_timeout_scale": "fast"}, {}, "", "--kv-timeout-scale: expected a number above 0, got 'fast'"),
    ],
)
def test_one_sentence_for_every_mistake(command_line, environment, body, says, tmp_path):
    with pytest.raises(BadSetting) as caught:
        load(command_line, environment, toml(tmp_path, body))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_variables_and_tables_are_ignored(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.other]\nmatrx = 1\n")
    settings = load({}, {"KVCONFORM_CACHE_DIR": "x", "OTHER": "y"}, tmp_path)
    assert settings == Settings(origins=settings.origins)
    assert set(settings.origins.values()) == {"default"}


# ---- keys of a deployment ------------------------------------------------------------------------

DEPLOYED = {"kv_decode_url": "http://d:1", "kv_router_url": "http://r:1"}


def test_a_deployment_gets_the_key_of_the_environment_and_headers(tmp_path):
    given = {**DEPLOYED, "kv_header": ["X-Key: a, b", "X-Key: c"]}
    settings = load(given, {"OPENAI_API_KEY": " sesame\n"}, tmp_path)
    assert settings.headers == {"Authorization": "Bearer sesame", "X-Key": "c"}
    other = load({**DEPLOYED, "kv_header": ["authorization: Basic x"]}, {"OPENAI_API_KEY": "k"}, tmp_path)
    assert other.headers == {"authorization": "Basic x"}
    assert load(DEPLOYED, {}, tmp_path).headers == {}
    assert load({}, {"OPENAI_API_KEY": "sesame"}, tmp_path).headers == {}


def test_keys_are_in_no_report_and_in_no_line(tmp_path):
    settings = load({**DEPLOYED, "kv_header": ["X-Key: sesame"]}, {"OPENAI_API_KEY": "sesame"}, tmp_path)
    report = document.make_report(settings, Subject(spec="C", connector="C"), None, (), (), (), ())
    again = failure.rerun_command(settings, "kv::a")
    for text in (repr(settings), document.encode(report).decode(), again):
        assert "sesame" not in text
    assert report.settings["header"].value == ("X-Key: ...",)
    assert "'--kv-header=X-Key: ...'" in again


@pytest.mark.parametrize(
    "header", ["sesame", ": sesame", "X Key: sesame", "X:", "X: \x7fsesame", "é: sesame", ""]
)
def test_a_bad_header_is_not_shown(header, tmp_path):
    with pytest.raises(BadSetting) as caught:
        load({**DEPLOYED, "kv_header": [header]}, {}, tmp_path)
    assert str(caught.value) == (
        "--kv-header: expected the name of a header and its value, such as 'X-Api-Key: ...'"
    )


def test_a_key_that_no_header_can_carry_is_not_shown(tmp_path):
    with pytest.raises(BadSetting, match=r"^OPENAI_API_KEY: expected a key of visible ASCII characters$"):
        load(DEPLOYED, {"OPENAI_API_KEY": "ses\name"}, tmp_path)
