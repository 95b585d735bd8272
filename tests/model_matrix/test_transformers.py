"""Names and shapes of every checkpoint are those of transformers' own model.

On the meta device: no weight is ever allocated.
"""

import json
import subprocess
import sys

import pytest

from model_matrix.families import FOLDER, checkpoint_tensors, load_families

# In a process of its own: what makes transformers importable next to a CPU build of torch must not leak into
# the test session. The packages from PyPI are built for CUDA: torchaudio and torchcodec fail to load,
# torchvision misses two operators.
MODELS = """
import json, sys
sys.modules["torchaudio"] = sys.modules["torchcodec"] = None
import torch
try:
    import torchvision
except Exception:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name in ("nms", "qnms"):
        signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", signature)
import transformers
shapes = {}
for family, config in json.load(sys.stdin).items():
    model_class = getattr(transformers, config["architectures"][0])
    config = model_class.config_class.from_dict(config)
    with torch.device("meta"):
        model = model_class(config)
    left_out = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    kept = {name: weight for name, weight in model.state_dict().items() if name not in left_out}
    shapes[family] = {name: list(weight.shape) for name, weight in kept.items()}
print("shapes:", json.dumps(shapes))
"""

# A model that transformers does not have comes with code of its own. vLLM does not start on a checkpoint that
# lacks a tensor.
FAMILIES = [family for family in load_families().values() if family.source.startswith("transformers ")]


@pytest.fixture(scope="module")
def shapes():
    """Family id -> tensor name -> shape, as transformers builds the models."""
    configs = json.dumps({family.id: family.config for family in FAMILIES})
    child = subprocess.run(
        [sys.executable, "-c", MODELS], input=configs, cwd=FOLDER, capture_output=True, text=True, check=False
    )
    [line] = [line for line in child.stdout.splitlines() if line.startswith("shapes:")] or [child.stderr]
    return json.loads(line.removeprefix("shapes:"))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.id)
def test_names_and_shapes(shapes, family):
    assert {name: list(tensor.shape) for name, tensor in checkpoint_tensors(family).items()} == shapes[
        family.id
    ]
