"""Gemma 2 and Gemma 3 (text): each sublayer's result is normalised too, before it is added to the residual."""

from __future__ import annotations

from nanovllm.kernels import Kernels
from nanovllm.layers.custom_mlp import GatedMLP
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.residual_stream import ResidualStream
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.model_config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, LayerInputs


class GemmaLayer(DecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), each norm with weights of its own."""

    mlp: GatedMLP

    def __init__(
        self, config: ModelConfig, index: int, rotary: RotaryEmbedding, kernels: Kernels, qk_norm: bool
    ) -> None:
        super().__init__(config, index, rotary, kernels, qk_norm)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)

    def forward(self, stream: ResidualStream, inputs: LayerInputs, next_norm: RMSNorm) -> ResidualStream:
        """As of `DecoderLayer`. The next layer applies `next_norm`, after the addition."""
        x, residual = self.self_attn.after_norm(stream, self.input_layernorm, inputs)
        stream = ResidualStream(self.post_attention_layernorm(x), residual)
        x, residual = self.mlp.after_norm(stream, self.pre_feedforward_layernorm)
        return ResidualStream(self.post_feedforward_layernorm(x), residual)


class Gemma2ForCausalLM(DecoderForCausalLM):
    norm_offset = 1.0
    layer_class = GemmaLayer


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    qk_norm = True
