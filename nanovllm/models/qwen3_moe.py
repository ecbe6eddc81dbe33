"""Qwen3-MoE: Qwen3 with experts in place of the MLP, in some or all layers."""

from __future__ import annotations

import re

from nanovllm.kernels import Kernels
from nanovllm.layers.moe import SparseMLP
from nanovllm.model_config import ModelConfig, MoeConfig
from nanovllm.models.decoder import MLP, DecoderForCausalLM, DecoderLayer

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(0|[1-9]\d*)\.(gate|up|down)_proj\.(.*)")


class Qwen3MoeLayer(DecoderLayer):
    def make_mlp(self, config: ModelConfig, index: int, kernels: Kernels) -> MLP:
        moe = config.moe
        if moe is None or not config.layers[index].sparse:
            return super().make_mlp(config, index, kernels)
        return SparseMLP(
            config.hidden_size, moe.intermediate_size, moe.num_experts, moe.top_k, moe.renormalise, kernels
        )


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    qk_norm = True
    layer_class = Qwen3MoeLayer

    def place_of(self, name: str) -> tuple[str, str, str]:
        """As of `DecoderForCausalLM`; a checkpoint's experts have tensors of their own, the model's are stacked."""
        found = _EXPERT.fullmatch(name)
        if found is None:
            return super().place_of(name)
        parent, expert, which, parameter = found.groups()
        if which == "down":
            return f"{parent}.down_proj", parameter, expert
        return f"{parent}.gate_up_proj", parameter, f"{expert}.{which}"

    def source_name(self, module: str, parameter: str, shard: str) -> str:
        parent, _, leaf = module.rpartition(".")
        if not parent.endswith(".mlp.experts"):
            return super().source_name(module, parameter, shard)
        expert, _, which = shard.partition(".")
        return f"{parent}.{expert}.{which or 'down'}_proj.{parameter}"

    @property
    def layer_sizes(self) -> tuple[int, int]:
        """(weights in all layers that a token is multiplied with, bytes of the largest layer)."""
        moe, layers = self.config.moe, self.model.layers
        assert isinstance(moe, MoeConfig)
        weights = 0
        for name, parameter in layers.named_parameters():
            share = moe.top_k / moe.num_experts if ".mlp.experts." in name else 1
            weights += int(parameter.numel() * share)
        return weights, max(sum(p.nbytes for p in layer.parameters()) for layer in layers)
