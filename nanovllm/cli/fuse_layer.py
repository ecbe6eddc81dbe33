"""A decoder layer of a preset, with a batch for it: what `nanovllm fuse` looks at if no module is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from nanovllm.kernels import Kernels, Op, all_ops
from nanovllm.model_config import ModelConfig
from nanovllm.models.decoder import AttentionMetadata, LayerCache, LayerInputs, ResidualStream
from nanovllm.models.model_presets import preset
from nanovllm.models.model_registry import model_class
from nanovllm.wording import counted

_BLOCK = 256  # tokens of a KV cache block, the engine's default
# What attention does inside is its own affair: its traffic follows from lengths, not from shapes, and it is one kernel.
_OPAQUE = ("attention_decode", "attention_prefill")


class LayerOfTensors(nn.Module):
    """A decoder layer whose arguments are tensors, by the names that the graph then has for them.

    Args:
        decode: every token is the last one of a sequence; otherwise all tokens are one prompt.
        max_context_len: the longest sequence.
    """

    def __init__(self, layer: nn.Module, decode: bool, max_context_len: int) -> None:
        super().__init__()
        self.layer = layer
        self._decode = decode
        self._max_context_len = max_context_len

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_table: torch.Tensor,
        context_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = x.shape[0]
        metadata = AttentionMetadata(
            num_decodes=tokens if self._decode else 0, slot_mapping=slot_mapping, block_table=block_table,
            context_lens=context_lens, max_context_len=self._max_context_len, cu_seqlens_q=cu_seqlens_q,
            max_query_len=0 if self._decode else tokens,
        )  # fmt: skip
        # With the reference of every op the next layer's norm is left to that layer.
        cache, norm = LayerCache(k_cache, v_cache), self.layer.input_layernorm
        stream = self.layer(ResidualStream(x, residual), LayerInputs(positions, cache, metadata), norm)
        return stream.x, stream.residual


def _one_operator(declared: Op) -> Callable[..., torch.Tensor]:
    """The op as one operator of the graph: `torch.ops.nanovllm.*` takes the fields of records one by one."""
    operator = getattr(torch.ops.nanovllm, declared.name)

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        return operator(**declared.records.flatten(declared.signature.bind(*args, **kwargs).arguments))

    return call


def reference_kernels() -> Kernels:
    """Every op written out in PyTorch, as a model without fused kernels has them; attention stays one op."""
    return Kernels(
        {
            name: (declared.providers["native"], _one_operator(declared) if name in _OPAQUE else declared.native)
            for name, declared in all_ops().items()
        }
    )


def decoder_layer(
    name: str,
    tokens: int,
    context: int,
    decode: bool = True,
    device: torch.device | str = "meta",
    dtype: torch.dtype | None = None,
) -> tuple[LayerOfTensors, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A layer of a preset and its arguments.

    Args:
        name: a preset of `nanovllm.models.model_presets`.
        tokens: the tokens of the batch.
        context: tokens that each sequence has in the cache at the end, the new ones among them.
        decode: `tokens` sequences of one new token; False: one prompt of `tokens`.
        device: "meta" for shapes without memory; elsewhere weights and activations are random.

    Returns:
        (module, its keyword arguments, values of the integer arguments that decide how much attention does).

    Raises:
        ValueError: an unknown preset, or numbers that do not fit together.
    """
    if tokens < 1:
        raise ValueError(f"tokens: expected at least 1, not {tokens}")
    least = 1 if decode else tokens
    if context < least:
        raise ValueError(f"context: expected at least {counted(least, 'token')}, with the new ones, not {context}")
    config = ModelConfig.from_dict({**preset(name), "num_hidden_layers": 1, "vocab_size": 8})
    dtype = dtype or getattr(torch, str(config.dtype))
    device = torch.device(device)
    torch_default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            decoder = model_class(config.architecture)(config, max(context, 1), reference_kernels()).model
    finally:
        torch.set_default_dtype(torch_default)
    layer = LayerOfTensors(decoder.layers[0], decode, context).requires_grad_(False).eval()
    known = _batch(tokens, context, decode)
    cache = (known["block_table"].numel(), _BLOCK, config.num_kv_heads, config.head_dim)
    hidden = (tokens, config.hidden_size)
    floats = {"x": hidden, "residual": hidden, "k_cache": cache, "v_cache": cache}
    random = torch.Generator(device).manual_seed(0) if device.type != "meta" else None
    arguments: dict[str, Any] = {
        key: torch.empty(shape, dtype=dtype, device=device).normal_(generator=random) for key, shape in floats.items()
    }
    arguments |= {key: value.to(device) for key, value in known.items()}
    if random is not None:
        for parameter in layer.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
            parameter.data.normal_(std=scale, generator=random)
    return layer, arguments, known


def _batch(tokens: int, context: int, decode: bool) -> dict[str, torch.Tensor]:
    """The integer arguments of `LayerOfTensors`."""
    sequences = tokens if decode else 1
    blocks = -(-context // _BLOCK)
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(sequences * blocks, generator=generator).view(sequences, blocks)
    lens = torch.full((sequences,), context)
    positions = lens - 1 if decode else torch.arange(context - tokens, context)
    rows = table if decode else table.expand(tokens, -1)
    slots = rows.gather(1, (positions // _BLOCK)[:, None])[:, 0] * _BLOCK + positions % _BLOCK
    known = {"context_lens": lens.int(), "block_table": table.int(), "positions": positions, "slot_mapping": slots}
    return known if decode else {**known, "cu_seqlens_q": torch.tensor([0, tokens], dtype=torch.int32)}
