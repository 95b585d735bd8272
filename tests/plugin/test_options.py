"""Every option changes something, and a bad value of one is one sentence."""

from __future__ import annotations

import pytest

from pytest_kvconform.settings import OPTIONS

from .test_selection import collect

DOES = {  # option -> arguments that must change something, and what is then different
    "connector": (["--kv-connector=n:D"], lambda run: run.report["subject"]["spec"]),
    "config": (['--kv-config={"kv_port": 7}'], lambda run: run.report["subject"]["config"]),
    "declare": (["--kv-declare=other.toml"], lambda run: run.report["subject"]["features"]),
    "tier": (["--kv-tier=engine"], lambda run: sorted(run.outcomes)),
    "family": (["--kv-family=llama"], lambda run: sorted(run.outcomes)),
    "topology": (["--kv-topology=P1D2"], lambda run: sorted(run.outcomes)),
    "rule": (["--kv-rule=KV-BYTES-002"], lambda run: sorted(run.outcomes)),
    "level": (["--kv-level=hybrid"], lambda run: sorted(run.outcomes)),
    "feature": (["--kv-feature=sliding-window"], lambda run: sorted(run.outcomes)),
    "shard": (["--kv-shard=2/2"], lambda run: sorted(run.outcomes)),
    "matrix": (["--kv-matrix=full"], lambda run: sorted(run.outcomes)),
    "device": (["--kv-device=cpu"], lambda run: run.log),
    # what they do to servers: tests/accuracy
    "gsm8k": (["--kv-gsm8k=a"], lambda run: run.report["settings"]["gsm8k"]),
    "models": (["--kv-models=a"], lambda run: run.report["settings"]["models"]),
    **{
        f"{name}_url": ([f"--kv-{name}-url=http://127.0.0.1:1"], lambda run: run.code)
        for name in ("router", "prefill", "decode", "baseline")
    },
    "header": (["--kv-header=X-Key: a"], lambda run: run.code),
    # what it does to vLLM: tests/engine/test_cpu_features.py
    "stand_in": (["--kv-stand-in"], lambda run: run.report["settings"]["stand-in"]),
    "hide_cpu": (["--kv-hide-cpu=avx512"], lambda run: run.report["settings"]["hide-cpu"]),
    # what it does to engines: tests/nodes
    "ray": (["--kv-ray=auto"], lambda run: run.report["settings"]["ray"]),
    "timeout_scale": (["--kv-timeout-scale=3"], lambda run: run.log),
    "seed": (["--kv-seed=7"], lambda run: run.ran),
    "report": (
        ["--kv-report=elsewhere"],
        lambda run: [line for line in run.lines if line.startswith("report: ")],
    ),
    "html": (["--kv-html"], lambda run: run.path.with_name("report.html").exists()),
    "claim": (["--kv-claim", "--kv-family=llama"], lambda run: run.code),
}


@pytest.mark.parametrize("option", [option.name for option in OPTIONS if option.flag])
def test_every_option_does_something(kv, pytester, option):
    (pytester.path / "other.toml").write_text("[features]\nmla = true")
    arguments, look = DOES[option]
    without = arguments[1:]
    assert look(kv("-v", *without)) != look(kv("-v", *arguments))


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["--kv-tier=interface"], 3),
        (["--kv-tier=interface,engine"], 13),
        (["--kv-tier=interface", "--kv-tier=engine"], 13),
        (["--kv-family=llama"], 3),
        (["--kv-family=llama,gemma3"], 13),
        (["--kv-topology=P1D2"], 5),
        (["--kv-topology=P1D2", "--kv-family=gemma3"], 5),
        (["--kv-rule=KV-BYTES-002"], 2),
        (["--kv-rule=KV-BYTES-*"], 10),
        (["--kv-feature=tp-heterogeneous"], 5),
        (["--kv-feature=tp-heterogeneous,sliding-window"], 10),
        (["--kv-feature=mla"], 0),
        (["--kv-level=core"], 3),
        (["--kv-level=core", "--kv-level=hybrid"], 7),
        (["--kv-level=heterogeneous,accurate"], 4),
        (["--kv-level=resilient"], 2),
        (["--kv-matrix=full"], 16),
        (["--kv-matrix=full", "--kv-family=llama", "--kv-topology=P1D2"], 3),
    ],
)
def test_options_that_select(kv, arguments, count):
    assert len(collect(kv, *arguments)) == count


def test_the_summary_says_what_was_left_out(kv):
    assert "selection: 2 of 13" in kv("--kv-rule=KV-BYTES-002").lines
    assert not any("selection" in line for line in kv().lines)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (
            "--kv-tier=engin",
            "--kv-tier: there is no tier 'engin' (did you mean engine?); there are interface, engine",
        ),
        (
            "--kv-level=resilent",
            "--kv-level: there is no level 'resilent' (did you mean resilient?); there are core, hybrid",
        ),
        ("--kv-rule=KV-BYTE-001", "--kv-rule: no rule is called 'KV-BYTE-001' (did you mean KV-BYTES-001?)"),
        (
            "--kv-feature=sliding-windw",
            (
                "--kv-feature: there is no feature 'sliding-windw' (did you mean sliding-window?); "
                "there are full-attention, mla"
            ),
        ),
        ("--kv-declare=nowhere.toml", "--kv-declare: nowhere.toml: there is no such file"),
        ("--kv-family=gemma", "there is no family called 'gemma' (did you mean gemma3?)"),
        ("--kv-matrix=ful", "--kv-matrix: expected quick or full or nightly, got 'ful' (did you mean full?)"),
        ("--kv-device=tpu", "--kv-device: expected auto or cpu or cuda, got 'tpu'"),
        ("--kv-timeout-scale=0", "--kv-timeout-scale: expected a number above 0, got '0'"),
        ("--kv-timeout-scale=1e308", "expected a number from 0.001 to 100000, got '1e308'"),
        ("--kv-timeout-scale=1e-300", "expected a number from 0.001 to 100000, got '1e-300'"),
        ("--kv-seed=-1", "--kv-seed: expected a whole number from 0 on, or last, got '-1'"),
        ("--kv-seed=last", "--kv-seed: there is no previous run whose seed could be used"),
        ("--kv-config=nowhere.json", "--kv-config: 'nowhere.json' is neither a JSON object nor a file"),
        ('--kv-config={"a": }', "--kv-config: line 1 column 7: Expecting value"),
        (
            '--kv-config={"kv_connector_extra_config": {"a": ["{services.kv.port}"]}}',
            "--kv-config: there is no service 'kv'; none is declared",
        ),
        ("--kv-config=[1]", "--kv-config: expected a JSON object, got list"),
        ('--kv-config={"kv_connector": "Other"}', "kv_connector is 'Other'"),
        (
            "--kv-connector=my.mod.Class",
            "'my.mod.Class' is neither NAME nor MODULE:CLASS (did you mean my.mod:Class?)",
        ),
        ("--kv-connector=", "--kv-connector: name a connector"),
        ("--kv-connector=nixl", "vLLM registers no connector 'nixl' (did you mean NixlConnector?)"),
        ("--kv-connector=NIXLCONNECTOR", "(did you mean NixlConnector?)"),
        ("--kv-connector=multi", "(did you mean MultiConnector?)"),
        *(
            (f"--kv-{name}={value}", f"--kv-{name}: it names nothing: give a word, or leave it out")
            for name in ("tier", "level", "family", "topology", "rule", "feature", "hide-cpu")
            for value in ("", " ,")
        ),
    ],
)
def test_a_bad_value_is_one_sentence(kv, argument, says):
    run = kv(argument)
    assert run.code == 4
    assert says in run.text
    assert "Traceback" not in run.text
    assert run.log == [] or run.log[-1] == "zygote closed"


def test_config_device_timeout_profile_and_handover_reach_the_bench(kv, pytester):
    pytester.makepyprojecttoml('[tool.kvconform]\nhandover = "rendezvous"\nprofile = "p2p"')
    run = kv(
        '--kv-config={"kv_connector": "C", "kv_port": 1}',
        "--kv-device=cpu",
        "--kv-timeout-scale=2.5",
        "--kv-seed=4",
    )
    assert run.code == 0
    assert "probe C {'kv_port': 1} p2p rendezvous" in run.log
    assert "probe deadline 300" in run.log
    assert "bench device cpu seed 4 timeout-scale 2.5" in run.log
    assert run.report["settings"]["handover"] == {"value": "rendezvous", "origin": "pyproject.toml"}


def test_seed_shuffles_the_same_way_each_time_and_last_means_last(kv):
    plain = kv("-v").ran
    first, again = kv("-v", "--kv-seed=7"), kv("-v", "--kv-seed=last")
    assert any("seed 7" in line for line in again.lines)
    assert first.ran == again.ran != plain
    assert sorted(first.ran) == sorted(plain)
    assert len(first.cells) == 3
    assert {kv("-v", f"--kv-seed={seed}").cells[0] for seed in range(1, 9)} > {"llama-P1D1"}


def test_report_goes_to_the_given_folder(kv, pytester):
    run = kv("--kv-report=out/here")
    assert (pytester.path / "out/here/report.json").is_file()
    assert "report: out/here/report.json" in run.lines


def test_help_lists_exactly_these_options(kv):
    run = kv("--help", plain=True)
    flags = [line.split()[0].partition("=")[0] for line in run.lines if line.strip().startswith("--kv-")]
    assert flags == [
        "--kv-connector",
        "--kv-config",
        "--kv-declare",
        "--kv-tier",
        "--kv-level",
        "--kv-family",
        "--kv-topology",
        "--kv-rule",
        "--kv-feature",
        "--kv-shard",
        "--kv-matrix",
        "--kv-gsm8k",
        "--kv-models",
        "--kv-router-url",
        "--kv-prefill-url",
        "--kv-decode-url",
        "--kv-baseline-url",
        "--kv-header",
        "--kv-device",
        "--kv-hide-cpu",
        "--kv-stand-in",
        "--kv-ray",
        "--kv-timeout-scale",
        "--kv-seed",
        "--kv-report",
        "--kv-html",
        "--kv-claim",
    ]
    assert run.log == []
