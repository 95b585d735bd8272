"""Variants of a geometry: the first layers of a model, and a model with a draft."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from model_matrix.geometries import FullAttention, Geometry, Kind, Mla, SlidingWindow, State

DRAFT, HEAD = "draft", 128  # kind of the draft's layer; elements of its heads beside latent attention
DRAFT_TOKENS = 1 << 17  # tokens of a draft
EAGLE = "LlamaForCausalLMEagle3"  # the class of drafts


def few_layers(geometry: Geometry) -> Geometry:
    """A geometry with the first layers of a model: the first run of kinds once, or two layers of one kind.

    Its id is another one, since its config.json is.
    """
    run = geometry.layers[0]
    first = structs.replace(run, times=2 if len(run.kinds) == 1 else 1)
    count = first.times * len(first.kinds)
    config = geometry.config | {"num_hidden_layers": count}
    if kinds := config.get("layer_types"):
        config["layer_types"] = kinds[:count]
    return structs.replace(geometry, id=f"{geometry.id}-few", layers=(first,), config=config)


def speculating(geometry: Geometry, method: str, tokens: int) -> Geometry:
    """A geometry that speculates with `tokens` tokens. `method`: "eagle3": by its own draft, or by one of one
    layer; another one, such as "ngram": without a draft model. The geometry has none either if vLLM takes
    none beside its layers.
    """
    if method == "eagle3" and not takes_draft(geometry):
        method = "ngram"
    speculation = {"method": method, "num_speculative_tokens": tokens}
    geometry = structs.replace(geometry, kinds=_with_states_of(geometry.kinds, tokens))
    if method != "eagle3" or geometry.draft_config:
        return structs.replace(geometry, speculation=speculation)
    kind = _draft_kind(geometry)
    config: dict[str, Any] = {key: geometry.config[key] for key in ("dtype", "vocab_size", "hidden_size")}
    return structs.replace(
        geometry,
        kinds=geometry.kinds | {DRAFT: kind},
        draft_layers=(structs.replace(geometry.layers[0], times=1, kinds=(DRAFT,)),),
        draft_config=config
        | {
            "architectures": [EAGLE],
            "model_type": "llama",
            "intermediate_size": 2 * config["hidden_size"],
            "num_hidden_layers": 1,
            "num_attention_heads": geometry.config["num_attention_heads"],
            "num_key_value_heads": kind.kv_heads,
            "head_dim": kind.head_size,
            "max_position_embeddings": DRAFT_TOKENS,
        },
        speculation=speculation,
    )


def _with_states_of(kinds: dict[str, Kind], tokens: int) -> dict[str, Kind]:
    """Kinds whose convolutions also keep the inputs of proposed tokens. Source: `num_spec` of
    MambaStateShapeCalculator (model_executor/layers/mamba/mamba_utils.py).
    """
    return {
        word: structs.replace(kind, kernel=kind.kernel + tokens) if isinstance(kind, State) else kind
        for word, kind in kinds.items()
    }


def takes_draft(geometry: Geometry) -> bool:
    """Whether vLLM takes a draft with KV heads beside a model's layers. Beside states it has to pad pages,
    and it pads none of latent attention (v1/core/kv_cache_utils.py: unify_kv_cache_spec_page_size).
    """
    kinds = geometry.kinds.values()
    return not (
        any(isinstance(kind, Mla) for kind in kinds) and any(isinstance(kind, State) for kind in kinds)
    )


def _draft_kind(geometry: Geometry) -> FullAttention:
    """Full attention as in the model. Beside latent attention a draft has as many KV heads as the model has
    attention heads, as that of Kimi K2.5.
    """
    for kind in geometry.kinds.values():
        if isinstance(kind, FullAttention):
            return kind
    name = next(kind.name for kind in geometry.kinds.values() if not isinstance(kind, SlidingWindow | State))
    return FullAttention(name=name, kv_heads=geometry.config["num_attention_heads"], head_size=HEAD)
