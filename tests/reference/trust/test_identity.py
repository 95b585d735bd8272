"""The identity of an engine: what D compares with P's in the handshake, and how the difference is named."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from model_matrix.geometries import load_geometries
from pytest_kvconform.rigs.vllm_setup.optional_packages import mend_imports
from reference_connector.handshake import HandshakeError, Listener, fetch
from reference_connector.messages import Address
from reference_connector.options import BadOption, Fact, read_options
from reference_connector.trust.authentication import Trust
from reference_connector.trust.identity import identity_of
from tests.reference.trust.test_authentication import PATIENCE_S, RANKS


def a_config(geometry: str = "gemma3_1b") -> Any:
    """As much of a VllmConfig as an identity needs."""
    mend_imports()
    config = load_geometries()[geometry].config
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="org/model",
            revision=None,
            dtype="bfloat16",
            quantization=None,
            disable_sliding_window=False,
            hf_text_config=SimpleNamespace(to_dict=lambda: config),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
    )


def changed(change: Callable[[Any], None]) -> Any:
    config = a_config()
    config.model_config.hf_text_config = SimpleNamespace(**load_geometries()["gemma3_1b"].config)
    fields = vars(config.model_config.hf_text_config)
    config.model_config.hf_text_config.to_dict = lambda: {k: v for k, v in fields.items() if k != "to_dict"}
    change(config)
    return config


def a_draft(model: str) -> Any:
    return SimpleNamespace(
        method="eagle3", draft_model_config=SimpleNamespace(model=model, revision=None), num=3
    )


CHANGES: dict[str, Callable[[Any], Any]] = {
    "model": lambda c: setattr(c.model_config, "model", "org/finetuned"),
    "revision": lambda c: setattr(c.model_config, "revision", "v2"),
    "dtype": lambda c: setattr(c.model_config, "dtype", "float16"),
    "quantization": lambda c: setattr(c.model_config, "quantization", "fp8"),
    "rope": lambda c: setattr(c.model_config.hf_text_config, "rope_theta", 5e5),
    "window": lambda c: setattr(c.model_config.hf_text_config, "sliding_window", 4096),
    "cache_dtype": lambda c: setattr(c.cache_config, "cache_dtype", "fp8"),
    "draft": lambda c: setattr(c, "speculative_config", a_draft("org/draft")),
}


def meet(p: dict[str, str], d: dict[str, str], may_differ: tuple[Any, ...] = ()) -> Any:
    """D's handshake with a P of these identities."""
    listener = Listener(Address("127.0.0.1", 0, "p", "first life"), RANKS, Trust(identity=p))
    try:
        address = Address("127.0.0.1", listener.port, "p", "first life")
        return fetch(address, PATIENCE_S, Trust(identity=d, may_differ=may_differ))
    finally:
        listener.close()


@pytest.mark.parametrize("fact", CHANGES)
def test_a_peer_with_other_kv_is_refused_and_the_difference_named(fact: str) -> None:
    here = changed(
        lambda c: setattr(c, "speculative_config", a_draft("org/another") if fact == "draft" else None)
    )
    mine, theirs = identity_of(here), identity_of(changed(CHANGES[fact]))
    assert [name for name in mine if mine[name] != theirs[name]] == [fact], "and in nothing else"
    said = rf"has other KV: its {fact} is .+ and not .+ \(option allow_different\)$"
    with pytest.raises(HandshakeError, match=said):
        meet(theirs, mine)
    assert meet(theirs, mine, (fact,)) == RANKS
    assert meet(mine, mine) == RANKS


def test_what_a_model_writes_into_its_configuration_is_no_difference() -> None:
    """vLLM's deepseek_v2.py names the type of rope anew when a process builds the model."""

    def rope(kind: str, factor: float) -> dict[str, str]:
        parameters = {"rope_type": kind, "factor": factor, "rope_theta": 1e4}
        return identity_of(
            changed(lambda c: setattr(c.model_config.hf_text_config, "rope_parameters", parameters))
        )

    assert rope("yarn", 32.0) == rope("deepseek_yarn", 32.0) != rope("yarn", 40.0)


def test_every_difference_is_named() -> None:
    mine = {"model": '"a"', "dtype": '"bfloat16"'}
    said = 'its model is "b" and not "a", and its dtype is "float16" and not "bfloat16"'
    with pytest.raises(HandshakeError, match=re.escape(said)):
        meet({"model": '"b"', "dtype": '"float16"'}, mine)


def test_another_minor_of_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    mine = identity_of(a_config())
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    assert identity_of(a_config())["vllm"] == '"0.99"' != mine["vllm"]
    with pytest.raises(HandshakeError, match=r'its vllm is "0\.99" and not'):
        meet(identity_of(a_config()), mine)


def test_a_draft_of_p_alone_changes_nothing() -> None:
    with_draft = changed(CHANGES["draft"])
    assert meet(identity_of(with_draft), identity_of(a_config())) == RANKS


def test_names_of_facts_are_checked_at_start() -> None:
    facts = set(identity_of(changed(CHANGES["draft"])))
    assert facts == set(get_args(Fact))
    assert read_options({"allow_different": sorted(facts)}).allow_different == tuple(sorted(facts))
    with pytest.raises(BadOption, match="allow_different"):
        read_options({"allow_different": ["modle"]})


def test_real_configurations_have_an_identity() -> None:
    """Rope and window are found in what transformers makes of config.json."""
    mend_imports()
    from transformers import AutoConfig

    for geometry in ("gemma3_1b", "deepseek_v3"):
        given = copy.deepcopy(load_geometries()[geometry].config)
        config = a_config(geometry)
        config.model_config.hf_text_config = AutoConfig.for_model(given.pop("model_type"), **given)
        identity = identity_of(config)
        assert "10000" in identity["rope"]
        assert ("512" in identity["window"]) == (geometry == "gemma3_1b")
