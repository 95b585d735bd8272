"""A stand-in for canary checkpoints: a random model with a byte-level tokenizer, and sums as questions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

import filelock

from model_matrix import Family, ensure_checkpoint


def ensure_canary(family: Family, questions: int) -> Path:
    """Return a folder with checkpoint, tokenizer, test.jsonl and train.jsonl."""
    made = ensure_checkpoint(family)
    folder = made.with_name(f"{made.name}-asked-{questions}")
    with filelock.FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(made, folder)
            _tokenizer(folder)
            random = Random(1)
            for name, count in (("test", questions), ("train", 64)):
                lines = [_line(random) for _ in range(count)]
                (folder / f"{name}.jsonl").write_text("".join(lines))
            (folder / "done").touch()
    return folder


def _line(random: Random) -> str:
    a, b, c = random.randint(10, 99), random.randint(10, 99), random.randint(2, 9)
    text = f"Ann has {a} eggs, buys {b} eggs and loses {c}. How many?"
    return json.dumps({"question": text, "answer": f"{a}+{b}-{c}\n#### {a + b - c}"}) + "\n"


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
