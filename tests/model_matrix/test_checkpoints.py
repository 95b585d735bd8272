"""Checkpoints have the same bytes everywhere and are never half written; no room is one clear sentence."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from model_matrix import checkpoints
from model_matrix.checkpoints import (
    CheckpointError,
    content_hash,
    ensure_checkpoint,
    speculative_config,
    tensor_values,
    to_bfloat16,
)
from model_matrix.families import FOLDER, Tensor, checkpoint_tensors, load_families

ROOT = FOLDER.parents[1]
FAMILIES = pytest.mark.parametrize("family", load_families().values(), ids=lambda family: family.id)
LLAMA = load_families()["llama"]

# A change here is a change of every logprob that anybody has noted: raise the version of the family or of the
# generator with it.
SHA256 = {
    "gemma3": "6cfdc4909a3f4c93aff582c6384fac649ee24c2914f91ff7270f5748581cc309",
    "gpt_oss": "2b944ac5fcae2e818551b023d95e54f7960c973811553c69493235f35fd237de",
    "kimi_linear": "a5d60c9ad4331d819e1fb33ba7a6e9a0aad04b44c97744193c9c6283bbf6acb6",
    "kimi_k2_5_eagle3": "489f8a9787724a7cdcee2b943da1534d05578ee0c9e8d4f69ed095960b06d646",
    "kimi_k2_5_eagle3/draft": "f7d50cce2516545d52b3d0f34dff9dba81d2d8065f6d18e22fe01787fec93302",
    "llama_mla_eagle3": "a84e2aa57e5a4c2645797386b3b5fed045664eff2dfd837d9e12beb8364b2860",
    "llama_mla_eagle3/draft": "778d11d984ae687b1b07300a5d0612f557eb9e0650186647187ba409cefd56b9",
    "llama": "a84e2aa57e5a4c2645797386b3b5fed045664eff2dfd837d9e12beb8364b2860",
    "qwen3_5": "3ab17942f88da42ff132fe4b32819e5901643f8ebe1e64411dc61a0d5d6fa395",
}


@FAMILIES
def test_same_bytes_in_two_places(tmp_path, family):
    one, two = ensure_checkpoint(family, tmp_path / "one"), ensure_checkpoint(family, tmp_path / "two")
    assert one != two
    assert one.name == two.name == f"{family.id}-{content_hash(family)}"
    folders = ["", "draft"] if family.draft else [""]
    assert sorted(os.listdir(one)) == ["config.json", *filter(None, folders), "model.safetensors"]
    for folder, model in zip(folders, family.models, strict=True):
        files = {name: (one / folder / name).read_bytes() for name in checkpoints.FILES}
        assert files == {name: (two / folder / name).read_bytes() for name in files}
        word = f"{family.id}/{folder}".removesuffix("/")
        assert hashlib.sha256(files["model.safetensors"]).hexdigest() == SHA256[word]
        assert json.loads(files["config.json"]) == model.config


@pytest.mark.parametrize(
    ("family", "draft"),
    [(family, draft) for family in load_families().values() for draft in range(len(family.models))],
    ids=lambda value: getattr(value, "id", "draft" if value else "model"),
)
def test_the_file_is_what_the_data_says(tmp_path, family, draft):
    wanted = checkpoint_tensors(family.models[draft])
    folder = ensure_checkpoint(family, tmp_path) / ("draft" if draft else "")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == sorted(wanted)
        for name, tensor in wanted.items():
            got = file.get_tensor(name)
            assert (tuple(got.shape), got.dtype) == (tensor.shape, torch.bfloat16)
            assert torch.equal(got, torch.from_numpy(tensor_values(name, tensor)).to(torch.bfloat16))


def test_values_are_normal():
    values = tensor_values("any", Tensor((400, 500), mean=1.0, std=0.5))
    assert values.dtype == np.float32
    sorted_z = np.sort((values.ravel() - 1.0) / 0.5)
    for z, share in ((-2, 0.0228), (-1, 0.1587), (0, 0.5), (1, 0.8413), (2, 0.9772)):
        assert abs(np.searchsorted(sorted_z, z) / sorted_z.size - share) < 0.004
    assert not np.array_equal(values, tensor_values("other", Tensor((400, 500), mean=1.0, std=0.5)))
    assert np.array_equal(tensor_values("any", Tensor((3,), mean=2.0)), np.full(3, 2.0, np.float32))


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_rounding_is_that_of_torch(numbers):
    values = np.array(numbers, np.float32)
    assert (
        to_bfloat16(values).tolist()
        == torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).tolist()
    )


def test_rounding_at_ties():
    """1 + k/256 lies halfway between two bfloat16 numbers for odd k, and goes to the even one."""
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000, 0x7F7FFFFF], np.uint32)
    assert to_bfloat16(bits.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF82, 0x7F80]


@pytest.mark.parametrize(
    "change",
    [
        {"config": {**LLAMA.config, "rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}},
        {
            "tensors": {
                **LLAMA.tensors,
                "once": {**LLAMA.tensors["once"], "model.norm.weight": Tensor((128,), mean=2.0)},
            }
        },
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_change_has_a_folder_of_its_own(tmp_path, change):
    changed = msgspec.structs.replace(LLAMA, **change)
    assert ensure_checkpoint(LLAMA, tmp_path) != ensure_checkpoint(changed, tmp_path)
    renamed = msgspec.structs.replace(LLAMA, title="another title", version=9)
    assert ensure_checkpoint(renamed, tmp_path) == ensure_checkpoint(LLAMA, tmp_path)


def test_a_change_of_the_draft_has_a_folder_of_its_own(tmp_path):
    family = load_families()["kimi_k2_5_eagle3"]
    draft = msgspec.structs.replace(family.draft, config={**family.draft.config, "head_dim": 64})
    changed = msgspec.structs.replace(family, draft=draft)
    assert ensure_checkpoint(changed, tmp_path) != ensure_checkpoint(family, tmp_path)
    without = msgspec.structs.replace(family, draft=None)
    assert not (ensure_checkpoint(without, tmp_path) / "draft").exists()


def test_what_vllm_is_told_of_a_draft(tmp_path):
    family = load_families()["kimi_k2_5_eagle3"]
    assert speculative_config(family, tmp_path) == {
        "method": "eagle3",
        "model": str(tmp_path / "draft"),
        "num_speculative_tokens": 3,
    }
    assert speculative_config(LLAMA, tmp_path) is None


def test_written_once(tmp_path, monkeypatch):
    first = ensure_checkpoint(LLAMA, tmp_path)
    monkeypatch.setattr(checkpoints, "_write", None)  # calling it would raise
    assert ensure_checkpoint(LLAMA, tmp_path) == first


def test_where_it_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCONFORM_CACHE_DIR", str(tmp_path / "environment"))
    assert ensure_checkpoint(LLAMA).parent == tmp_path / "environment" / "checkpoints"
    assert ensure_checkpoint(LLAMA, tmp_path / "argument").parent == tmp_path / "argument" / "checkpoints"
    monkeypatch.delenv("KVCONFORM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert ensure_checkpoint(LLAMA).parent == tmp_path / "user" / "pytest-kvconform" / "checkpoints"


def test_deleted_files_are_written_again(tmp_path):
    folder = ensure_checkpoint(LLAMA, tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    assert ensure_checkpoint(LLAMA, tmp_path) == folder
    assert (folder / "model.safetensors").read_bytes() == whole
    family = load_families()["kimi_k2_5_eagle3"]
    draft = ensure_checkpoint(family, tmp_path) / "draft" / "config.json"
    draft.unlink()
    ensure_checkpoint(family, tmp_path)
    assert draft.is_file()


WRITER = """
import pathlib, sys, time
from model_matrix import checkpoints, ensure_checkpoint, load_families
real = checkpoints.safetensors_file
def slow(tensors):
    with open(sys.argv[1] + "/writers", "a") as file:
        file.write("one\\n")
    time.sleep(float(sys.argv[2]))
    return real(tensors)
checkpoints.safetensors_file = slow
print(ensure_checkpoint(load_families()["llama"], sys.argv[1]))
"""


def writer(cache_dir, seconds):
    """A process that spends so many seconds in the middle of writing the checkpoint."""
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(cache_dir), str(seconds)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path):
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, f"{path} never came"
        time.sleep(0.01)


def test_many_at_once(tmp_path):
    children = [writer(tmp_path, 0.5) for _ in range(4)]
    said = [child.communicate(timeout=60) for child in children]
    folder = ensure_checkpoint(LLAMA, tmp_path)
    assert said == [(f"{folder}\n", "")] * 4
    assert (tmp_path / "writers").read_text() == "one\n"  # one wrote, the others waited for it
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == SHA256["llama"]


def test_killed_in_the_middle(tmp_path):
    child = writer(tmp_path, 60)
    wait_for(tmp_path / "writers")
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=10)
    folder = tmp_path / "checkpoints"
    final = f"llama-{content_hash(LLAMA)}"
    # what it left; the final name was never there
    assert sorted(os.listdir(folder)) == [
        ".lock",
        f"{final}.tmp",
    ]
    gemma3 = ensure_checkpoint(load_families()["gemma3"], tmp_path)
    assert sorted(os.listdir(folder)) == [".lock", gemma3.name]  # whoever writes next clears it away
    assert (
        hashlib.sha256((ensure_checkpoint(LLAMA, tmp_path) / "model.safetensors").read_bytes()).hexdigest()
        == SHA256["llama"]
    )


NO_ROOM = """
import resource, sys
from model_matrix import ensure_checkpoint, load_families
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
ensure_checkpoint(load_families()["llama"], sys.argv[1])
"""


def test_a_write_that_fails_leaves_nothing(tmp_path):
    """A limit on the size of files stands for a full disk: the write fails part-way."""
    child = subprocess.run(
        [sys.executable, "-c", NO_ROOM, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert child.stderr.splitlines()[-1] == (
        "model_matrix.checkpoints.CheckpointError: cannot write the llama checkpoint to "
        f"{tmp_path / 'checkpoints'}: File too large; "
        "free space there, or set KVCONFORM_CACHE_DIR to a writable folder"
    )
    assert os.listdir(tmp_path / "checkpoints") == [".lock"]


def test_no_space_and_no_folder_say_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError,
        match=f"checkpoint to {tmp_path}/file/checkpoints: Not a directory; .* set KVCONFORM_CACHE_DIR",
    ):
        ensure_checkpoint(LLAMA, tmp_path / "file")

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CheckpointError, match=f"checkpoint to {tmp_path}/checkpoints: No space left on device; "
    ):
        ensure_checkpoint(LLAMA, tmp_path)
    assert os.listdir(tmp_path / "checkpoints") == [".lock"]


def test_a_lock_that_never_comes_free(tmp_path, monkeypatch):
    child = writer(tmp_path, 60)
    wait_for(tmp_path / "writers")
    monkeypatch.setattr(checkpoints, "WAIT_SECONDS", 0.1)
    with pytest.raises(CheckpointError, match="another process has been writing"):
        ensure_checkpoint(LLAMA, tmp_path)
    child.kill()
    child.communicate(timeout=10)
