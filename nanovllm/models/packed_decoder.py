"""A decoder whose layers run as one op, over weights in the form that the op's provider reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn

from nanovllm.kernels import Kernels, all_ops
from nanovllm.kernels.cpu.library import PLAIN, PackedMatrix
from nanovllm.kernels.ops.decoder_step import DecoderBatch, DecoderLayerWeights, DecoderWeights
from nanovllm.layers.attention import AttentionMetadata, LayerCache
from nanovllm.model_config import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer, Rows
from nanovllm.models.model_registry import model_class

NOT_SELECTED = "no provider of decoder_step was selected"


def why_not_packed(
    config: ModelConfig, kernels: Kernels, dtype: torch.dtype, cache_dtype: torch.dtype, num_ranks: int = 1
) -> str | None:
    """Why a model's layers cannot run as one op here; None: they can. `NOT_SELECTED` if that is the only reason.

    Args:
        dtype: the dtype of the model.
        num_ranks: processes that share the model.
    """
    if num_ranks > 1:
        return f"tensor_parallel_size={num_ranks}: the processes run the layers op by op"
    for name, value in (("dtype", dtype), ("kv_cache_dtype", cache_dtype)):
        if value not in PLAIN:
            return f"{name}={value}: expected float32, bfloat16 or float16"
    if config.head_dim % 16:
        return f"head_dim={config.head_dim}: expected a multiple of 16"
    if (reason := _unlike_llama(config)) is not None:
        return reason
    return NOT_SELECTED if kernels.providers.get("decoder_step", "native") == "native" else None


def missing_kernels(device: torch.device) -> str | None:
    """Why the C++ kernels, which run a model's layers as one op on a CPU, cannot run; None: they can, or on a GPU."""
    return all_ops()["decoder_step"].providers["cpu"].support(device) if device.type == "cpu" else None


def _unlike_llama(config: ModelConfig) -> str | None:
    """What the op does not compute: it runs a pre-norm decoder with one rotary table."""
    cls = model_class(config.architecture)
    if config.moe is not None:
        return f"{config.architecture}: the op decoder_step has no experts"
    if cls.layer_class is not DecoderLayer:
        return f"{config.architecture}: the layers have another form"
    if len(config.ropes) > 1:
        return "layers that differ in their rotary tables: the op has one"
    if config.activation != "silu":
        return f"activation={config.activation!r}: the op has 'silu' alone"
    scales = config.attention_soft_cap, config.logit_soft_cap, config.embedding_scale, config.attention_scale
    if scales != (None, None, 1.0, config.head_dim**-0.5):
        return "soft caps, or scales of its own for embeddings or queries: the op has none"
    return None


class PackedHead(nn.Module):
    """Hidden states [num_rows, hidden] -> logits [num_rows, vocab_size], float32."""

    def __init__(self, weight: PackedMatrix) -> None:
        super().__init__()
        self.packed = weight

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.packed.product(hidden)
        return logits if out is None else out.copy_(logits)


class PackedDecoderForCausalLM(DecoderForCausalLM):
    """A `DecoderForCausalLM` without layers of its own, for a CPU. Activations and logits are float32.

    Args:
        embedding, head: one matrix if they are tied.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        embedding: PackedMatrix,
        head: PackedMatrix,
        kernels: Kernels,
    ) -> None:
        nn.Module.__init__(self)  # the parent's would make layers
        self.config = config
        self.weights = weights
        self.embedding = embedding
        self._head = head
        self.lm_head = PackedHead(head)  # type: ignore[assignment]
        self._step = kernels.decoder_step

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states and logits."""
        return torch.float32

    @property
    def num_kv_heads(self) -> int:
        """As of `DecoderForCausalLM`."""
        return self.config.num_kv_heads

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrices."""
        matrices = [m for layer in self.weights.layers for m in _matrices(layer)]
        return sum(m.nbytes for m in (*matrices, *{self.embedding, self._head}))  # these are one if they are tied

    @property
    def read_bytes_of_a_weight(self) -> float:
        """As of `DecoderForCausalLM`."""
        read = [m for layer in self.weights.layers for m in _matrices(layer)] + [self._head]
        return sum(m.nbytes for m in read) / sum(m.rows * m.columns for m in read)

    def quantised_weights(self, num_tokens: int) -> int:
        """As of `DecoderForCausalLM`: none with activations of 8-bit floats."""
        return 0

    @property
    def form_changes(self) -> set[int]:
        """As of `DecoderForCausalLM`: there are none."""
        return set()

    @property
    def layer_sizes(self) -> tuple[int, int]:
        """As of `DecoderForCausalLM`."""
        layers = self.weights.layers
        numel = sum(m.rows * m.columns for layer in layers for m in _matrices(layer))
        return numel, sum(m.nbytes for m in _matrices(layers[0]))

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        rows: Rows = None,
    ) -> torch.Tensor:
        """As `DecoderForCausalLM.forward`."""
        if isinstance(rows, slice):
            rows = torch.arange(len(token_ids))[rows]
        m = metadata
        batch = DecoderBatch(positions, m.slot_mapping, m.block_table, m.context_lens, m.num_decodes, m.cu_seqlens_q)
        k_caches, v_caches = [cache.k for cache in caches], [cache.v for cache in caches]
        return self._step(self.embedding.take(token_ids), batch, self.weights, k_caches, v_caches, rows)


def _matrices(layer: DecoderLayerWeights) -> list[PackedMatrix]:
    return [value for value in vars(layer).values() if isinstance(value, PackedMatrix)]
