"""Random weights, for measurements and tests: a checkpoint that is drawn when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from nanovllm.layers.linear import Part, ShardedParameters
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.weights.safetensors_files import NO_PARTS, TensorHeader


def read_headers(model: DecoderForCausalLM) -> list[TensorHeader]:
    """The headers of a checkpoint's tensors, in the order in which they are drawn. model: may be on the meta device."""
    return [TensorHeader(name, tuple(tensor.shape), "F32", True) for name, tensor in _tensors(model)]


def iter_tensors(
    model: DecoderForCausalLM, seed: int, device: torch.device, parts: Mapping[str, Part] = NO_PARTS
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of a usual scale (norms 1, biases 0, all else normal with deviation 0.02), one tensor at a time.

    Whole tensors are drawn, and then cut to `parts`, so that the ranks of a group of any size hold parts of one model.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, empty in _tensors(model):
        tensor = torch.empty(empty.shape, dtype=empty.dtype, device=device)  # empty_like of "meta" imports sympy
        if tensor.dim() == 1:
            tensor.fill_(0 if name.endswith(".bias") else 1)
        else:
            tensor.normal_(0, 0.02, generator=generator)
        yield name, parts[name].of(tensor) if name in parts else tensor


def _tensors(model: DecoderForCausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    """(a checkpoint's name, a tensor without memory) of every weight."""
    tied = model.config.tie_word_embeddings  # the head is the embedding
    for module_name, module in model.named_modules():
        if not isinstance(module, ShardedParameters) or (module_name == "lm_head" and tied):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            for shard in module.shards:
                shape = module.source_shape(name, shard)
                yield (
                    model.source_name(module_name, name, shard),
                    torch.empty(shape, dtype=parameter.dtype, device="meta"),
                )
