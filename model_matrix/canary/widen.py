"""A family's tiny model with another hidden size and another vocabulary, and otherwise as it is.

A read-out that knows many answers by heart needs a last hidden state of many words. Attention, states and
experts stay as small as they are, and so does the KV cache.
"""

from __future__ import annotations

import math
import re
from typing import TypeVar

import msgspec

from model_matrix.canary.tokenizer import END_ID, PAD_ID
from model_matrix.families import Draft, Family, Tensor

Model = TypeVar("Model", Family, Draft)
HEAD = "lm_head.weight"
ROOM = 1.3  # words of the hidden state for each state that the read-out must know
UNIT = 128  # what kernels divide a hidden state into
EMBEDDING = "embed_tokens.weight"
FUSION = "fc.weight"  # of a draft: reads several hidden states of the model, and writes one
# How names of tensors end, and the axis that has the hidden size; None: no axis has. The first line that
# matches holds; other tensors have no such axis.
WRITERS: tuple[tuple[str, int | None], ...] = (
    (r"embed_tokens\.weight", 1),
    (r"(o_proj|out_proj|down_proj)\.(weight|bias)", 0),
    (r"experts\.down_proj", 2),
    (r"experts\.down_proj_bias", 1),
    (r"(q_norm|k_norm|o_norm|q_a_layernorm|kv_a_layernorm|linear_attn\.norm)\.weight", None),
    (r"norm\.weight", 0),
)
READERS: tuple[tuple[str, int | None], ...] = (
    (rf"^{FUSION}", 1),
    (r"self_attn\.(q|k|v|q_a|f_a|g_a|b)_proj\.weight|kv_a_proj_with_mqa\.weight", 1),
    (r"(gate_proj|up_proj|mlp\.gate|router|in_proj_\w+)\.weight", 1),
    (r"experts\.gate_up_proj", 1),
)


def hidden_size_for(states: int) -> int:
    """Return a hidden size for a read-out that must know this many states, each in two forms."""
    return UNIT * max(2, math.ceil(2 * ROOM * states / UNIT))


def widen(family: Family, hidden_size: int, vocabulary: int) -> Family:
    """Return the family with this hidden size, this many tokens, and a read-out that is a tensor of zeros.

    What reads the hidden state has smaller weights in proportion, so that it computes numbers of the same
    size. The checkpoint is to be loaded in the dtype in which engines compute.
    """
    draft = family.draft and _wide(family.draft, family.dtype, hidden_size, vocabulary)
    return msgspec.structs.replace(_wide(family, family.dtype, hidden_size, vocabulary), draft=draft)


def _wide(model: Model, dtype: str, hidden_size: int, vocabulary: int) -> Model:
    before: int = model.config["hidden_size"]
    tensors = {
        table: {name: _widened(name, tensor, before, hidden_size, vocabulary) for name, tensor in of.items()}
        for table, of in model.tensors.items()
    }
    tensors["once"][HEAD] = Tensor((vocabulary, hidden_size))
    config = model.config | {
        "hidden_size": hidden_size,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "pad_token_id": PAD_ID,
        "bos_token_id": None,
        "eos_token_id": END_ID,
    }
    if "draft_vocab_size" in config:
        config["draft_vocab_size"] = vocabulary
    return msgspec.structs.replace(model, config=config, tensors=tensors)


def _widened(name: str, tensor: Tensor, before: int, after: int, vocabulary: int) -> Tensor:
    axis, reads = next(
        (
            (axis, table is READERS)
            for table in (WRITERS, READERS)
            for end, axis in table
            if re.search(rf"({end})$", name)
        ),
        (None, False),
    )
    if axis is None:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = shape[axis] * after // before  # a draft reads several hidden states side by side
    if name == FUSION:
        shape[0] = after
    if name.endswith(EMBEDDING):
        shape[0] = vocabulary
    return Tensor(tuple(shape), tensor.mean, tensor.std * (math.sqrt(before / after) if reads else 1.0))
