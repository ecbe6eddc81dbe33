"""The pre-norm decoder that all architectures share; a file for each says only what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn as nn

from nanovllm.kernels import Kernels
from nanovllm.layers.attention import Attention, AttentionMetadata, LayerCache
from nanovllm.layers.custom_mlp import GatedMLP
from nanovllm.layers.embed_head import LMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import QKVParallelLinear, RowParallelLinear
from nanovllm.layers.packed_weight import PackedWeight, bytes_and_weights
from nanovllm.layers.residual_stream import ResidualStream
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.model_config import ModelConfig

Rows = torch.Tensor | slice | None
"""Some of a batch's tokens: their indices [num_rows] int64, or a slice; None: all."""


class LayerInputs(NamedTuple):
    """What a layer takes besides the residual stream."""

    positions: torch.Tensor
    """[num_tokens] int64"""
    cache: LayerCache
    metadata: AttentionMetadata
    rows: Rows = None
    """Of the layer's result."""


class DecoderAttention(nn.Module):
    """QKV projection, optional norm of each query and key head, rotation, attention, output projection."""

    def __init__(
        self, config: ModelConfig, index: int, rotary: RotaryEmbedding, kernels: Kernels, qk_norm: bool
    ) -> None:
        super().__init__()
        c = config
        self.qkv_proj = QKVParallelLinear(
            c.hidden_size, c.num_attention_heads, c.num_kv_heads, c.head_dim, c.attention_bias, kernels
        )
        self.o_proj = RowParallelLinear(
            c.num_attention_heads * c.head_dim, c.hidden_size, c.attention_output_bias, kernels
        )
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, kernels) if qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, kernels) if qk_norm else None
        self._rotary = rotary
        self._attention = Attention(c.attention_scale, kernels, c.layers[index].window, c.attention_soft_cap)

    def after_norm(
        self, stream: ResidualStream, norm: RMSNorm, inputs: LayerInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(this attention of norm(x + residual), x + residual)."""
        out, residual = self._heads_after(stream, norm, inputs)
        return self.o_proj(out), residual

    def between_norms(
        self, stream: ResidualStream, norm: RMSNorm, inputs: LayerInputs, next_norm: RMSNorm
    ) -> ResidualStream:
        """This attention of norm(x + residual), for a next sublayer that begins with `next_norm`."""
        out, residual = self._heads_after(stream, norm, inputs)
        return self.o_proj.before_norm(out, residual, next_norm)

    def _heads_after(
        self, stream: ResidualStream, norm: RMSNorm, inputs: LayerInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the heads give, [num_rows, num_heads * head_dim], and x + residual."""
        positions, cache, metadata, rows = inputs
        (q, k, v), residual = self.qkv_proj.after_norm(stream, norm)
        out = self._attention.after_projection(
            positions, q, k, v, self._rotary, self.q_norm, self.k_norm, cache, metadata
        ).flatten(1)
        return (out, residual) if rows is None else (out[rows], residual[rows])


class MLP(Protocol):
    """What a layer needs of its MLP, which is an nn.Module."""

    def between_norms(self, stream: ResidualStream, norm: RMSNorm, next_norm: RMSNorm) -> ResidualStream:
        """This MLP of norm(x + residual), for a next sublayer that begins with `next_norm`."""


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); each sum and norm is fused into what comes before or after it."""

    def __init__(
        self, config: ModelConfig, index: int, rotary: RotaryEmbedding, kernels: Kernels, qk_norm: bool
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.self_attn = DecoderAttention(config, index, rotary, kernels, qk_norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.mlp = self.make_mlp(config, index, kernels)

    def make_mlp(self, config: ModelConfig, index: int, kernels: Kernels) -> MLP:
        """The MLP of layer `index`, counted from 0. An architecture with another MLP overrides this method."""
        return GatedMLP(config.hidden_size, config.intermediate_size, kernels, config.mlp_bias, config.activation)

    def forward(self, stream: ResidualStream, inputs: LayerInputs, next_norm: RMSNorm) -> ResidualStream:
        """next_norm: what the next layer begins with."""
        norm = self.post_attention_layernorm
        stream = self.self_attn.between_norms(stream, self.input_layernorm, inputs, norm)
        return self.mlp.between_norms(stream, norm, next_norm)


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(
        self,
        config: ModelConfig,
        max_position: int,
        kernels: Kernels,
        qk_norm: bool,
        layer_class: type[DecoderLayer] = DecoderLayer,
    ) -> None:
        super().__init__()
        layers = config.layers[: config.num_hidden_layers]
        rotary = {
            rope: RotaryEmbedding(None if rope is None else config.ropes[rope], config.head_dim, max_position, kernels)
            for rope in {layer.rope for layer in layers}
        }
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, kernels)
        self.layers = nn.ModuleList(
            layer_class(config, index, rotary[layer.rope], kernels, qk_norm) for index, layer in enumerate(layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        # Rounded to the dtype, as in transformers.
        scale = torch.tensor(config.embedding_scale, dtype=self.embed_tokens.weight.dtype, device="cpu")
        self._embedding_scale = scale.item()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        rows: Rows = None,
    ) -> torch.Tensor:
        x = self.embed_tokens(token_ids)
        if self._embedding_scale != 1:
            x = x * self._embedding_scale
        stream = ResidualStream(x)
        next_norms = [*(layer.input_layernorm for layer in self.layers[1:]), self.norm]
        last = min(len(self.layers), len(caches)) - 1
        for i, (layer, cache, next_norm) in enumerate(zip(self.layers, caches, next_norms)):
            # Of the last layer the other tokens need keys and values alone.
            inputs = LayerInputs(positions, cache, metadata, rows if i == last else None)
            stream = layer(stream, inputs, next_norm)
        return self.norm.of(stream)[0]


class DecoderForCausalLM(nn.Module):
    """A decoder and its language-model head.

    Args:
        config: the architecture.
        max_position: positions below this are served; sizes the rotary table.
        kernels: the provider of every op.
    """

    qk_norm = False
    """Whether each query and key head is normalised."""
    norm_offset = 0.0
    """What a checkpoint leaves out of the weights of its norms: Gemma stores w for a factor of 1 + w."""
    layer_class: type[DecoderLayer] = DecoderLayer

    # Module of the checkpoint with fused tensors -> the modules that it stands for, in the order of its rows.
    SPLIT: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    # Checkpoint module -> (the module it is fused into, the shard of that module).
    FUSED = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
    }

    def __init__(self, config: ModelConfig, max_position: int, kernels: Kernels) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, max_position, kernels, self.qk_norm, self.layer_class)
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, kernels, config.logit_soft_cap)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states and logits."""
        return self.lm_head.weight.dtype

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer that this process holds."""
        layer: Any = self.model.layers[0]
        return layer.self_attn.qkv_proj.num_kv_heads

    @property
    def layer_sizes(self) -> tuple[int, int]:
        """(weights in all layers, bytes of one layer)."""
        layers = self.model.layers
        return bytes_and_weights(layers)[1], bytes_and_weights(layers[0])[0]

    @property
    def read_bytes_of_a_weight(self) -> float:
        """Bytes of a weight in the layers and the head, which every step reads, on average."""
        read = [bytes_and_weights(module) for module in (self.model.layers, self.lm_head)]
        return sum(nbytes for nbytes, _ in read) / sum(weights for _, weights in read)

    def quantised_weights(self, num_tokens: int) -> int:
        """Weights of the layers that a step of `num_tokens` tokens multiplies with quantised activations."""
        packed = (module for module in self.model.layers.modules() if isinstance(module, PackedWeight))
        return sum(weight.quantised_weights(num_tokens) for weight in packed)

    @property
    def form_changes(self) -> set[int]:
        """Numbers of tokens from which on layers multiply with another form of their weights."""
        packed = (module for module in self.model.layers.modules() if isinstance(module, PackedWeight))
        return {bound for weight in packed for bound in weight.form_changes}

    def place_of(self, name: str) -> tuple[str, str, str]:
        """(module, parameter, shard) of a checkpoint's tensor, whether this model has such a place or not."""
        module, _, parameter = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        fused, shard = self.FUSED.get(leaf, (leaf, ""))
        return f"{parent}.{fused}" if parent else fused, parameter, shard

    def source_name(self, module: str, parameter: str, shard: str) -> str:
        """The name of the checkpoint's tensor at a place, for messages."""
        parent, _, leaf = module.rpartition(".")
        original = {value: key for key, value in self.FUSED.items()}.get((leaf, shard), leaf)
        return ".".join(part for part in (parent, original, parameter) if part)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        rows: Rows = None,
    ) -> torch.Tensor:
        """token_ids, positions [num_tokens] int64 -> hidden states [num_rows, hidden_size]; stores K and V in `caches`.

        rows: the tokens that need hidden states, int64 or a slice; None: all tokens.
        """
        return self.model(token_ids, positions, caches, metadata, rows)
