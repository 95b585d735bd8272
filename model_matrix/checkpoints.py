"""Tiny checkpoints, written on first use and kept in the user's cache.

It imports neither torch nor transformers.

The same family gives the same bytes on every machine: values come from integer sums of a generator's raw
bits, and from one multiplication, one addition and one rounding of IEEE floats. NumPy guarantees the stream
of raw bits, but not that of its normal distribution.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import filelock
import msgspec
import numpy as np
import platformdirs

from model_matrix.families import Draft, Family, Tensor, checkpoint_tensors

VERSION = 1  # of this generator: raise it if the same family gives other bytes
SEED = 20  # any number; another one gives other models
FILES = ("config.json", "model.safetensors")
DRAFT = "draft"  # folder of the draft model within the checkpoint
ENVIRONMENT = "KVCONFORM_CACHE_DIR"
WAIT_SECONDS = 300  # for another process that is writing; one checkpoint takes a fraction of a second


class CheckpointError(RuntimeError):
    """Error: a checkpoint cannot be written.

    The message names the folder, the reason and the variable to set.
    """


def ensure_checkpoint(family: Family, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the family's checkpoint, a model path for vLLM, after writing it if it is missing.

    `cache_dir`: folder for all cached data of this project; None: $KVCONFORM_CACHE_DIR, or else the user's
    cache folder. Any number of processes may call this at once. A process that is killed leaves no
    checkpoint that is used later. Raises CheckpointError if the folder cannot be written.
    """
    folder = _cache_dir(cache_dir) / "checkpoints"
    final = folder / f"{family.id}-{content_hash(family)}"
    if _complete(family, final):
        return final
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / ".lock", timeout=WAIT_SECONDS):
            for left_over in folder.glob("*.tmp"):  # we hold the lock, so its writer has ended
                shutil.rmtree(left_over)
            if not _complete(family, final):
                shutil.rmtree(final, ignore_errors=True)  # a folder from which files were deleted
                _write(family, final)
    except OSError as error:
        why = error.strerror or str(error)
        raise CheckpointError(
            f"cannot write the {family.id} checkpoint to {folder}: {why}; free space there, or set "
            f"{ENVIRONMENT} to a writable folder"
        ) from error
    return final


def speculative_config(family: Family, folder: Path) -> dict[str, Any] | None:
    """Return vLLM's speculative_config for a checkpoint; None for a family without a draft."""
    if not family.draft:
        return None
    draft = family.draft
    return {"method": draft.method, "model": str(folder / DRAFT), "num_speculative_tokens": draft.tokens}


def content_hash(family: Family) -> str:
    """Return twelve hex digits: a hash of all that decides the bytes (configuration, tensors, generator)."""
    models = [part for model in family.models for part in (model.config, checkpoint_tensors(model))]
    data = msgspec.json.encode([VERSION, SEED, *models])
    return hashlib.sha256(data).hexdigest()[:12]


def tensor_values(name: str, tensor: Tensor) -> np.ndarray:
    """Return the values of one tensor before rounding: float32, nearly normal, seeded by its name."""
    count = int(np.prod(tensor.shape))
    if tensor.std == 0:
        return np.full(tensor.shape, tensor.mean, np.float32)
    raw = np.random.PCG64([SEED, zlib.crc32(name.encode())]).random_raw(3 * count).astype("<u8", copy=False)
    # The sum of twelve uniform 16-bit numbers has mean 12 * 65535 / 2 and, except for one part in 2**32,
    # standard deviation 65536.
    sums = raw.view("<u2").reshape(count, 12).sum(axis=1, dtype=np.int64)
    normal = (sums - 6 * 65535) / 65536.0
    return (tensor.mean + tensor.std * normal).astype(np.float32).reshape(tensor.shape)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, to nearest, ties to even.

    Returns the bit patterns as uint16, of the same shape.

    It does not handle NaN.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    half_or_less = 0x7FFF + ((bits >> 16) & 1)  # a tie goes up only if that makes the last bit even
    return ((bits + half_or_less) >> 16).astype(np.uint16)


def _cache_dir(given: str | os.PathLike[str] | None) -> Path:
    chosen = given or os.environ.get(ENVIRONMENT) or platformdirs.user_cache_dir("pytest-kvconform")
    return Path(chosen).expanduser().absolute()


def _models(family: Family, folder: Path) -> dict[Path, Family | Draft]:
    """Return each model of a checkpoint by the folder that it is in."""
    return dict(zip((folder, folder / DRAFT), family.models, strict=False))


def _complete(family: Family, folder: Path) -> bool:
    return all((part / name).is_file() for part in _models(family, folder) for name in FILES)


def _write(family: Family, final: Path) -> None:
    """Write a folder beside the final one, then rename it: a folder with the final name is complete."""
    unfinished = final.with_name(final.name + ".tmp")
    try:
        for folder, model in _models(family, unfinished).items():
            folder.mkdir()
            config = msgspec.json.format(msgspec.json.encode(model.config), indent=2)
            for name, data in zip(FILES, (config, _safetensors(checkpoint_tensors(model))), strict=True):
                with open(folder / name, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())  # else a power cut can leave an empty file under the final name
        unfinished.rename(final)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _safetensors(tensors: dict[str, Tensor]) -> bytes:
    """Return a file in the safetensors format: length of the header, header, data.

    The arguments of `safetensors.serialize` change between versions; the format does not.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    chunks, end = [], 0
    for name, tensor in tensors.items():
        chunks.append(to_bfloat16(tensor_values(name, tensor)).astype("<u2").tobytes())
        start, end = end, end + len(chunks[-1])
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, end]}
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)  # the data begins at a multiple of 8
    return b"".join([struct.pack("<Q", len(encoded)), encoded, *chunks])
