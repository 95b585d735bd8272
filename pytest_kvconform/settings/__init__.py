"""Table of all settings: the fields of `Settings`.

Flags, environment variables and TOML keys follow from their names.

The field `timeout_scale` is set by `--kv-timeout-scale`, by `KVCONFORM_TIMEOUT_SCALE`, or by
`timeout-scale` in `[tool.kvconform]` of pyproject.toml. The first of these that is set wins, in this order;
otherwise the default holds. `Settings.origins` records where each value came from.

Every pytest run of everybody who has the plugin installed imports this module. It may import only the cheap
part of the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from pytest_kvconform.settings.option import Option
from pytest_kvconform.settings.option import option as row
from pytest_kvconform.settings.parsers import (
    object_or_path,
    one_of,
    parse_factor,
    parse_headers,
    parse_requests,
    parse_seconds,
    parse_seed,
    parse_shard,
    parse_switch,
    parse_text,
    parse_tokens,
    parse_url,
    parse_words,
    tables_as_json,
    word_or_function,
    words_and_those_before,
)
from pytest_kvconform.settings.places import HUB as HUB
from pytest_kvconform.settings.places import Places
from pytest_kvconform.settings.tables import BadSetting as BadSetting
from pytest_kvconform.settings.tables import read_table, refuse_unknown_settings

OTHER_VARIABLES = ("KVCONFORM_CACHE_DIR",)  # read elsewhere: where built checkpoints are kept
KEY_VARIABLE = "OPENAI_API_KEY"  # as OpenAI's own clients and lm-eval name it
NIGHTLY = "nightly"  # as in model_matrix/nightly.py
# vLLM chooses its kernels by these. The newest is first, and a CPU with one of them has all that follow.
CPU_FEATURES = ("amx_tile", "avx512_bf16", "avx512")
PROFILES, HANDOVERS = ("p2p", "store", "same-engine"), ("handoff", "rendezvous", "none")
CONNECTOR_SETTINGS = (  # they describe the connector that pyproject.toml names, and no other
    "config",
    "declare",
    "profile",
    "handover",
    "lease",
    "turn_lease",
    "load_timeout",
    "load_granularity",
    "min_load",
    "remembers",
    "save_delay",
    "asks_worker",
    "services",
    "features",
    "known",
)


# ---- the table --------------------------------------------------------------------------------------------

toml_row = partial(row, toml_only=True)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for. A setting whose default is a tuple may be repeated."""

    connector: str = row(
        "",
        parse_text,
        "NAME|MODULE:CLASS",
        "connector to test: a name registered in vLLM, or a class; the plugin does nothing without it",
    )
    config: str = row(
        "",
        object_or_path,
        "JSON|FILE",
        "the object you give vLLM's --kv-transfer-config, as JSON or in a file",
        is_path=True,
    )
    declare: str = row(
        "",
        parse_text,
        "FILE",
        "TOML file that declares what the connector supports, instead of [tool.kvconform]",
        is_path=True,
    )
    tier: tuple[str, ...] = row((), parse_words, "NAME", "only the cases of this tier, a folder of the suite")
    level: tuple[str, ...] = row((), parse_words, "LEVEL", "only this level of the verdict, e.g. core")
    family: tuple[str, ...] = row((), parse_words, "ID", "only this model family, e.g. gemma3")
    topology: tuple[str, ...] = row(
        (), parse_words, "PnDm", "only this pair of tensor parallel sizes, e.g. P1D2: prefill 1, decode 2"
    )
    rule: tuple[str, ...] = row(
        (), parse_words, "ID|GLOB", "only the cases that check this rule, e.g. KV-BYTES-*"
    )
    feature: tuple[str, ...] = row(
        (), parse_words, "NAME", "only the cases that need this feature, e.g. prefix-hit"
    )
    shard: str = row("", parse_shard, "I/N", "only part I of the N parts of the selected cells, by cost")
    matrix: str = row(
        "quick",
        one_of("quick", "full", NIGHTLY),
        "quick|full|nightly",
        "how many families and topologies are run; nightly: real checkpoints on GPUs, in the accuracy tier",
    )
    gsm8k: str = row(
        "",
        parse_text,
        "hub|PATH",
        "questions of the accuracy tier: a folder with test.jsonl and train.jsonl of gsm8k, or hub for "
        "openai/gsm8k; default: hub for real checkpoints, a generator for tiny models",
        is_path=True,
    )
    models: str = row(
        "",
        parse_text,
        "PATH",
        "folder of the checkpoints of the nightly matrix, each in OWNER/NAME below it; default: the cache of "
        "the Hugging Face hub; nothing is downloaded",
        is_path=True,
    )
    router_url: str = row(
        "",
        parse_url,
        "URL",
        "router of a deployment that already runs, for the accuracy tier; neither vLLM nor the connector is "
        "needed here then",
    )
    prefill_url: str = row(
        "", parse_url, "URL", "prefill server of a deployment without a router: vllm-router is started here"
    )
    decode_url: str = row(
        "", parse_url, "URL", "decode server of a deployment, whose /metrics are the evidence"
    )
    baseline_url: str = row(
        "",
        parse_url,
        "URL",
        "server that answers without the connector; default: the decode server, which is then asked alone",
    )
    header: tuple[str, ...] = row(
        (),
        parse_headers,
        "NAME: VALUE",
        "header of every request to a deployment, beside the key in the variable OPENAI_API_KEY; no report "
        "has its value",
        is_secret=True,
    )
    device: str = row("auto", one_of("auto", "cpu", "cuda"), "auto|cpu|cuda", "where the engines run")
    hide_cpu: tuple[str, ...] = row(
        (),
        words_and_those_before(*CPU_FEATURES),
        "FEATURE",
        "feature of the CPU that vLLM takes for missing, with all before it in this list, to test with the "
        "kernels of another CPU: " + ", ".join(CPU_FEATURES),
    )
    stand_in: bool = row(
        False,
        parse_switch,
        "",
        "on a CPU, let parts of this suite stand in for what a connector asks of a GPU: the copy engine of "
        "vLLM's offloading connectors, the number of the device for MooncakeConnector; the report names it",
    )
    ray: str = row(
        "",
        parse_text,
        "ADDRESS",
        "address of a Ray cluster, HOST:PORT or auto: P and D of the tiers bytes and engine run on two of "
        "its nodes",
    )
    timeout_scale: float = row(
        1.0, parse_factor, "X", "factor for every deadline; more than 1 for a slow machine"
    )
    seed: int = row(
        0,
        parse_seed,
        "N|last",
        "seed of the order of cells and cases; 0: the order of the suite; last: the seed of the previous run",
    )
    report: str = row("kv-report", parse_text, "DIR", "folder for report.json", is_path=True)
    html: bool = row(False, parse_switch, "", "also write the report as a page, report.html, to that folder")
    claim: bool = row(
        False,
        parse_switch,
        "",
        "require a complete run, as kvconform claim starts it: no case left out, no known failure, no "
        "feature that works and is declared unsupported; otherwise the verdict is not CONFORMS",
    )
    profile: str = toml_row(
        "",
        one_of(*PROFILES),
        "p2p|store|same-engine",
        "what the connector is: one half of a P/D pair (p2p, the default, except for vLLM's own stores), a "
        "store, which saves KV and loads it later in any engine, or one that loads in the engine alone that "
        "has saved it (same-engine)",
    )
    handover: str = toml_row(
        "",
        word_or_function(*HANDOVERS),
        "handoff|rendezvous|none|MODULE:FUNCTION",
        "how D learns which KV to load: from P's output (handoff, the default for p2p), from a transfer id "
        "that P and D get (rendezvous, or a function that does what your proxy does), or from no parameter "
        "(none, the default for stores)",
    )
    lease: str = toml_row(
        "",
        parse_text,
        "KEY",
        "key of kv_connector_extra_config, or $NAME of an environment variable, for the seconds that P keeps "
        "KV which no D reads; the suite sets a small value",
    )
    turn_lease: str = toml_row(
        "", parse_text, "KEY", "the same for D's KV that no P reads with the next turn (bidirectional)"
    )
    load_timeout: str = toml_row(
        "", parse_text, "KEY", "key of kv_connector_extra_config for the seconds of a load"
    )
    load_granularity: int = toml_row(
        0, parse_tokens, "TOKENS", "a load is a multiple of so many tokens, or ends at one; 0: undeclared"
    )
    min_load: int = toml_row(
        0, parse_tokens, "TOKENS", "a load of fewer tokens is not made, and D computes them; 0: undeclared"
    )
    remembers: int = toml_row(
        0, parse_requests, "REQUESTS", "something of so many requests is kept after their end, at most"
    )
    save_delay: float = toml_row(
        0.0, parse_seconds, "SECONDS", "so long after the end of a request a store finds what it has saved"
    )
    asks_worker: bool = toml_row(
        False,
        parse_switch,
        "",
        "the scheduler half asks the worker half of rank 0 over a socket, and waits for the answer; the tier "
        "protocol then starts one beside it",
    )
    services: str = toml_row(
        "",
        tables_as_json(dict),
        "TABLES",
        "servers that the connector needs: command, ready, deadline, environment, engine_environment, files",
    )
    features: str = toml_row(
        "",
        tables_as_json(dict),
        "TABLE",
        'what the connector supports: each feature true or { unsupported = "why" }',
    )
    known: str = toml_row(
        "",
        tables_as_json(list),
        "TABLES",
        "known failures: case, issue, expires, reason, and optionally vllm",
    )

    @property
    def deployed(self) -> bool:
        """Whether servers that already run are tested."""
        return bool(self.router_url or self.prefill_url or self.decode_url or self.baseline_url)

    @property
    def nightly(self) -> bool:
        """Whether servers with real checkpoints are started."""
        return self.matrix == NIGHTLY

    @property
    def real(self) -> bool:
        """Whether real checkpoints answer, and no canaries."""
        return self.deployed or self.nightly

    @property
    def asks_hub(self) -> bool:
        """Whether the questions of gsm8k come from the hub."""
        return self.real and self.gsm8k in ("", HUB)

    # setting -> "command line", the name of the variable, "pyproject.toml" or "default"
    origins: dict[str, str] = field(default_factory=dict)
    api_key: str = field(default="", repr=False)  # of a deployment: OPENAI_API_KEY of the environment

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request to a deployment. Those of --kv-header win over the key's."""
        key = (f"Authorization: Bearer {self.api_key}",) if self.api_key else ()
        pairs = (one.split(": ", 1) for one in (*key, *self.header))
        return dict({name.casefold(): (name, value) for name, value in pairs}.values())


def _rows() -> Iterable[Option]:
    for one in fields(Settings):
        if "option" in one.metadata:
            yield Option(one.name, one.default, *one.metadata["option"])


OPTIONS: tuple[Option, ...] = tuple(_rows())


# ---- reading the four places ------------------------------------------------------------------------------


def load(
    command_line: Mapping[str, Any], environment: Mapping[str, str], root: Path, last_seed: int | None = None
) -> Settings:
    """Return the settings of one run. Raises BadSetting: one sentence that begins with the path of the key.

    `command_line`: option dest -> text, or None. `last_seed`: the value of `--kv-seed=last`; None if there
    was no earlier run.
    """
    table = read_table(root / "pyproject.toml")
    refuse_unknown_settings(environment, table, OPTIONS, OTHER_VARIABLES)
    places = Places(command_line, environment, table, root, last_seed)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for option in OPTIONS:
        of_another = option.name in CONNECTOR_SETTINGS and table.get(
            "connector", values.get("connector")
        ) != values.get("connector")
        found = places.find(option, in_table=not of_another)
        origins[option.name] = found[1] if found else "default"
        values |= {option.name: found[0]} if found else {}
    settings = Settings(**values, origins=origins)
    if not settings.deployed:
        return settings
    key = environment.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise BadSetting(f"{KEY_VARIABLE}: expected a key of visible ASCII characters")
    return replace(settings, api_key=key)


def non_default(settings: Settings) -> list[tuple[Option, Any, str]]:
    """Return (option, value, origin) of each setting that was set, in the order of the table."""
    rows = [
        (option, getattr(settings, option.name), settings.origins.get(option.name, "default"))
        for option in OPTIONS
    ]
    return [row for row in rows if row[2] != "default"]
