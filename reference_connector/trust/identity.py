"""Identity: what two engines must have in common so that KV of one is KV of the other.

KV of another model fits into the same blocks, and D would answer with fluent nonsense. So P sends its facts
in the handshake, and D compares them with its own. Not here is what boxes.py compares byte by byte: heads,
sizes of cells, their elements, and the layout in which a backend keeps them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from reference_connector.messages import escaped

# What rotates keys. Other entries of rope_parameters are not compared: models of vLLM change them in the
# configuration when they are built (deepseek_v2.py: rope_type), so that they tell which process was asked.
ROPE = frozenset(
    "rope_theta rope_local_base_freq factor original_max_position_embeddings beta_fast beta_slow mscale "
    "mscale_all_dim low_freq_factor high_freq_factor short_factor long_factor".split()
)
WINDOW = ("window", "layer_types", "chunk_size")  # words of keys of config.json


def identity_of(vllm_config: Any) -> dict[str, str]:
    """The facts of an engine, by name."""
    import vllm

    model, draft = vllm_config.model_config, vllm_config.speculative_config
    config = model.hf_text_config.to_dict()
    windows = {key: config[key] for key in config if any(word in key for word in WINDOW)}
    facts = {
        "model": model.model,
        "revision": model.revision,
        "dtype": str(model.dtype),
        "quantization": model.quantization,  # of weights
        "rope": dict(_rope_numbers(config)),
        "window": [model.disable_sliding_window, windows],
        "cache_dtype": vllm_config.cache_config.cache_dtype,
        # The minor: another one may lay out KV in another way.
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
    }
    if draft is not None and draft.draft_model_config is not None:
        facts["draft"] = [draft.method, draft.draft_model_config.model, draft.draft_model_config.revision]
    return {name: json.dumps(fact, sort_keys=True, default=str) for name, fact in facts.items()}


def _rope_numbers(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers of ROPE in config.json, by their place: rope parameters may differ by kind of layer."""
    for key, value in config.items():
        place = f"{path}.{key}" if path else key
        if key in ROPE:
            yield place, value
        elif isinstance(value, Mapping) and (path or "rope" in key):
            yield from _rope_numbers(value, place)


def difference(here: Mapping[str, str], there: Mapping[str, str], may_differ: Iterable[str] = ()) -> str:
    """What differs, as a part of a sentence; empty if nothing does. Only facts of both sides are compared."""
    names = [name for name in here if there.get(name, here[name]) != here[name] and name not in may_differ]
    return ", and ".join(f"its {name} is {escaped(there[name])} and not {here[name]:.300}" for name in names)
