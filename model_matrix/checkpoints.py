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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
WAIT_SECONDS = 600  # for another process that is writing: a canary takes seconds, or more on a slow machine


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

    def write(unfinished: Path) -> None:
        for name, model in model_folders(family).items():
            write_model(unfinished / name, model, encoded_tensors(checkpoint_tensors(model)))

    final = cache_folder(cache_dir) / "checkpoints" / f"{family.id}-{content_hash(family)}"
    return write_once(final, files_of(family), write, f"{family.id} checkpoint")


def model_folders(family: Family) -> dict[str, Family | Draft]:
    """Return the model in each folder of a checkpoint, relative to its own folder, which is ""."""
    return dict(zip(("", DRAFT), family.models, strict=False))


def files_of(family: Family) -> tuple[str, ...]:
    """Return the files of a checkpoint, relative to its folder."""
    return tuple(os.path.join(folder, name) for folder in model_folders(family) for name in FILES)


def write_model(folder: Path, model: Family | Draft, tensors: dict[str, EncodedTensor]) -> None:
    """Write the files of one model into its folder."""
    folder.mkdir(exist_ok=True)
    config = msgspec.json.format(msgspec.json.encode(model.config), indent=2)
    for name, data in zip(FILES, (config, safetensors_file(tensors)), strict=True):
        write_file(folder / name, data)


def write_once(final: Path, files: Sequence[str], write: Callable[[Path], None], what: str) -> Path:
    """Return a folder with these files, after writing it if one is missing.

    `write` fills a folder beside the final one, which is then renamed: a folder with the final name is
    complete. `what` it is, for messages. Raises CheckpointError if the folder cannot be written.
    """

    def complete() -> bool:
        return all((final / name).is_file() for name in files)

    folder = final.parent
    if complete():
        return final
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / ".lock", timeout=WAIT_SECONDS):
            for left_over in folder.glob("*.tmp"):  # we hold the lock, so its writer has ended
                shutil.rmtree(left_over)
            if not complete():
                shutil.rmtree(final, ignore_errors=True)  # a folder from which files were deleted
                _write(final, write)
    except filelock.Timeout:
        raise CheckpointError(
            f"another process has been writing to {folder} for {WAIT_SECONDS} s: run it again when that has "
            f"ended, or set {ENVIRONMENT} to another folder"
        ) from None
    except OSError as error:
        why = error.strerror or str(error)
        raise CheckpointError(
            f"cannot write the {what} to {folder}: {why}; free space there, or set "
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


def cache_folder(given: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder for all cached data: the given one, $KVCONFORM_CACHE_DIR, or in the user's cache."""
    chosen = given or os.environ.get(ENVIRONMENT) or platformdirs.user_cache_dir("pytest-kvconform")
    return Path(chosen).expanduser().absolute()


def write_file(path: Path, data: bytes) -> None:
    """Write a file to the disk itself: a power cut must not leave an empty one under the final name."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class EncodedTensor(NamedTuple):
    """A tensor of a file: dtype as safetensors names it, shape, and its bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def encoded_tensors(tensors: dict[str, Tensor]) -> dict[str, EncodedTensor]:
    """Return the values of tensors in bfloat16."""
    return {
        name: EncodedTensor(
            "BF16", tensor.shape, to_bfloat16(tensor_values(name, tensor)).astype("<u2").tobytes()
        )
        for name, tensor in tensors.items()
    }


def safetensors_file(tensors: dict[str, EncodedTensor]) -> bytes:
    """Return a file in the safetensors format: length of the header, header, data.

    The arguments of `safetensors.serialize` change between versions; the format does not.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        start, end = end, end + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)  # the data begins at a multiple of 8
    return b"".join([struct.pack("<Q", len(encoded)), encoded, *(one.data for one in tensors.values())])


def _write(final: Path, write: Callable[[Path], None]) -> None:
    unfinished = final.with_name(final.name + ".tmp")
    try:
        unfinished.mkdir()
        write(unfinished)
        unfinished.rename(final)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
