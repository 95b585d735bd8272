"""The tokenizer of the canary checkpoints: a byte-level BPE, trained on the questions themselves."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

PAD, END = "<pad>", "<end>"
PAD_ID, END_ID = 0, 1
SIZE = 2048  # most tokens that it has; fewer if the questions have fewer words
FILES = ("tokenizer.json", "tokenizer_config.json")
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": END}


def write_tokenizer(folder: Path, texts: Iterable[str]) -> int:
    """Train a tokenizer on texts and write its files into a folder. Returns how many tokens it has.

    Every text can be encoded, and decoding gives it back. No token is added to a prompt. The same texts give
    the same tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=[PAD, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / FILES[0]))
    (folder / FILES[1]).write_bytes(msgspec.json.encode(CONFIG))
    return tokenizer.get_vocab_size()
