"""Safetensors files: which are read, and what is wrong with them."""

import json
import os
import pickle

import pytest

from nanovllm.weights.safetensors_files import iter_tensors
from tests import tiny
from tests.weights.checkpoints import load, refused


def test_a_safetensors_file_of_any_name_without_an_index(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "weights.safetensors")
    load(checkpoint)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_file(checkpoint, keep):
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    refused(checkpoint, "model.safetensors", "corrupt or truncated", "download it again")


def test_a_file_that_cannot_be_read(checkpoint):
    file = checkpoint / "model.safetensors"
    file.unlink()
    file.mkdir()
    refused(checkpoint, str(file), "cannot be read")


def test_a_file_with_a_spoilt_header(checkpoint):
    path = checkpoint / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:12] = b"!!!!"
    path.write_bytes(content)
    refused(checkpoint, "model.safetensors", "corrupt or truncated")


def test_a_missing_shard(tmp_path):
    tiny.save(tmp_path, "qwen3", max_shard_size="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    refused(tmp_path, shard.name, "not found")


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_a_spoilt_index(tmp_path, content):
    tiny.save(tmp_path, "qwen3", max_shard_size="40KB")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    refused(tmp_path, "model.safetensors.index.json")


@pytest.mark.parametrize("outside", ["../other/model.safetensors", "/etc/hostname", "a/../../x.safetensors"])
def test_an_index_that_names_a_file_outside_of_the_directory(tmp_path, outside):
    """A checkpoint must not read what its directory does not hold, even if that is a right file."""
    tiny.save(tmp_path / "model", num_hidden_layers=1)
    tiny.save(tmp_path / "other", num_hidden_layers=1)
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": outside}}))
    refused(tmp_path / "model", str(index), "weight_map", repr(outside), "outside of the model's directory")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt"])
def test_pickles_are_named_and_never_opened(checkpoint, name):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(checkpoint / "sprung"),)

    (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).write_bytes(pickle.dumps(Trap()))
    refused(checkpoint, name, "never opened", "convert them to safetensors")
    assert not (checkpoint / "sprung").exists()


def test_a_directory_without_weights(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    refused(checkpoint, "holds no .safetensors file", 'load_format="dummy"')


def test_tensors_are_read_one_at_a_time(checkpoint):
    seen = {name: tensor.shape for name, tensor in iter_tensors(checkpoint)}
    assert seen["model.norm.weight"] == (48,) and len(seen) == 14
