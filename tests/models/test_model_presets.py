"""Published shapes: every preset parses, is served, and has the number of parameters that its name says."""

import pytest
import torch

from nanovllm.model_config import ModelConfig
from nanovllm.models.model_presets import PRESETS, preset
from nanovllm.models.model_registry import model_class
from tests.native import NATIVE

# Millions of parameters, as the model cards give them; tied embeddings count once.
MILLIONS = {
    "qwen3-0.6b": 596, "qwen3-1.7b": 1720, "qwen3-4b": 4022, "qwen3-8b": 8191, "qwen3-14b": 14768, "qwen3-32b": 32762,
    "qwen3-30b-a3b": 30532,
    "llama2-7b": 6738, "llama3-8b": 8030, "llama3.1-8b": 8030, "llama3.2-1b": 1236, "llama3.2-3b": 3213,
    "smollm2-135m": 134.5, "smollm2-360m": 361.8, "smollm2-1.7b": 1711,
    "smollm3-3b": 3075, "qwen2.5-0.5b": 494.0, "qwen2.5-1.5b": 1543.7, "qwen2.5-3b": 3085.9, "qwen2.5-7b": 7615.6,
    "qwen2.5-14b": 14770, "qwen2.5-32b": 32764, "qwen2.5-72b": 72706, "mistral-7b": 7248, "mistral-7b-v0.1": 7242,
    "mistral-nemo-12b": 12248, "mistral-small-24b": 23572, "phi-3-mini": 3821, "phi-4-mini": 3836, "phi-4": 14660,
    "gemma-2-2b": 2614, "gemma-2-9b": 9242, "gemma-2-27b": 27227, "gemma-3-1b": 999.9, "gemma-3-4b": 3880,
    "gemma-3-12b": 11766, "gemma-3-27b": 27009,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_shape(name):
    config = ModelConfig.from_dict(preset(name))
    with torch.device("meta"):
        model = model_class(config.architecture)(config, 8, NATIVE)
    parameters = {id(p): p.numel() for p in model.parameters()}
    assert sum(parameters.values()) / 1e6 == pytest.approx(MILLIONS[name], rel=2e-3)
    assert config.dtype in ("bfloat16", "float16") and config.max_position_embeddings >= 4096


def test_names():
    assert preset("Qwen3-0.6B") == PRESETS["qwen3-0.6b"]
    preset("qwen3-8b")["vocab_size"] = 0  # of a copy
    assert PRESETS["qwen3-8b"]["vocab_size"] == 151936
    with pytest.raises(ValueError, match="'llama3.1_8b'; did you mean 'llama3.1-8b'[?]") as error:
        preset("llama3.1_8b")
    assert all(known in str(error.value) for known in PRESETS)
