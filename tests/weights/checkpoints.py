"""Loading checkpoints in tests, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.config import EngineConfig
from nanovllm.weights.checkpoint import locate
from nanovllm.weights.loader import load_model
from nanovllm.weights.safetensors_files import WeightError
from tests.native import NATIVE

CPU = torch.device("cpu")


def load(model, dtype=torch.float32, **arguments):
    checkpoint = locate(EngineConfig(str(model), **arguments))
    with torch.inference_mode():
        return load_model(checkpoint, NATIVE, dtype, CPU, max_position=16)


def edit(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def configure(directory, **entries):
    """Change entries of config.json; None removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def fused(reference, name):
    """The tensor that our parameter `name` must hold, of a transformers model."""
    weights = reference.state_dict()
    for ours, theirs in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        if ours in name:
            return torch.cat([weights[name.replace(ours, part)] for part in theirs])
    return weights[name]


def refused(directory, *words):
    with pytest.raises(WeightError) as error:
        load(directory)
    for word in words:
        assert word in str(error.value)


def not_found(error_type, model, *words, **arguments):
    with pytest.raises(error_type) as error:
        locate(EngineConfig(str(model), **arguments))
    for word in words:
        assert word in str(error.value)
