"""Safetensors files: which are read, and what is wrong with them."""

import json
import math
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.weights.safetensors_files import iter_tensors
from tests import tiny
from tests.weights.checkpoints import load, refused


def test_a_safetensors_file_of_any_name_without_an_index(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "weights.safetensors")
    load(checkpoint)


def test_a_second_copy_under_mistrals_own_names_is_not_read(checkpoint):
    save_file({"layers.0.attention.wq.weight": torch.zeros(1)}, checkpoint / "consolidated.safetensors")
    load(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    refused(checkpoint, "holds no .safetensors file")


def test_a_damaged_file(checkpoint):
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    spoilt_header = content[:8] + b"!!!!" + content[12:]
    for damaged in (b"", content[:4], content[:100], content[: len(content) // 2], content[:-1], spoilt_header):
        path.write_bytes(damaged)
        refused(checkpoint, "model.safetensors", "corrupt or truncated", "download it again")
    path.unlink()
    path.mkdir()
    refused(checkpoint, str(path), "cannot be read")


def test_a_missing_shard(tmp_path):
    tiny.save(tmp_path, "qwen3", max_shard_size="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    refused(tmp_path, shard.name, "not found")


def test_an_error_names_the_file_that_holds_the_tensor(tmp_path):
    tiny.save(tmp_path, "phi3", max_shard_size="40KB", hidden_size=64, num_key_value_heads=4, num_hidden_layers=1)
    fused = "model.layers.0.self_attn.qkv_proj.weight"
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(names.values())) > 2
    path = tmp_path / names[fused]
    tensors = load_file(path)
    for spoilt, said in (
        (tensors[fused][1:].clone(), f"tensor {fused!r} has shape [191, 64], expected 192 rows"),
        (tensors[fused].int(), f"{fused!r}: tensor 'model.layers.0.self_attn.q_proj.weight' has dtype int32"),
        (
            torch.full_like(tensors[fused], math.nan),
            f"{fused!r}: tensor 'model.layers.0.self_attn.q_proj.weight' holds",
        ),
    ):
        save_file(tensors | {fused: spoilt}, path)
        refused(tmp_path, f"{path}: {said}")
    save_file({name: tensor for name, tensor in tensors.items() if name != fused}, path)
    refused(tmp_path, f"{tmp_path}: the checkpoint lacks model.layers.0.self_attn.k_proj.weight")


def test_a_spoilt_index(checkpoint):
    for content in ("{", "{}", "[]", '{"weight_map": 3}'):
        (checkpoint / "model.safetensors.index.json").write_text(content)
        refused(checkpoint, "model.safetensors.index.json", "does not say which file holds which tensor")


def test_an_index_that_names_a_file_outside_of_the_directory(original, checkpoint):
    """A checkpoint must not read what its directory does not hold, even if that is a right file."""
    index = checkpoint / "model.safetensors.index.json"
    for outside in (
        f"../{original.name}/model.safetensors",
        str(original / "model.safetensors"),
        "a/../../x.safetensors",
    ):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": outside}}))
        refused(checkpoint, str(index), "weight_map", repr(outside), "outside of the model's directory")


@pytest.mark.parametrize("name", ["pytorch_model-00001-of-00002.bin", "model.pt"])
def test_pickles_are_named_and_never_opened(checkpoint, name):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(checkpoint / "sprung"),)

    (checkpoint / "model.safetensors").unlink()
    refused(checkpoint, "holds no .safetensors file", 'load_format="dummy"')
    (checkpoint / name).write_bytes(pickle.dumps(Trap()))
    refused(checkpoint, name, "never opened", "convert them to safetensors")
    assert not (checkpoint / "sprung").exists()


def test_tensors_are_read_one_at_a_time(checkpoint):
    seen = {name: tensor.shape for name, tensor in iter_tensors(checkpoint)}
    assert seen["model.norm.weight"] == (48,) and len(seen) == 14
