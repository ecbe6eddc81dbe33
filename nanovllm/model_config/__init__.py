"""A model's architecture: what its config.json says, and what its family takes for missing entries."""

from nanovllm.model_config.architecture import LayerConfig, ModelConfig
from nanovllm.model_config.families import FAMILIES, MoeConfig
from nanovllm.model_config.rope import RopeConfig

__all__ = ["FAMILIES", "LayerConfig", "ModelConfig", "MoeConfig", "RopeConfig"]
