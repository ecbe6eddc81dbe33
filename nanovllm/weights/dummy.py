"""Random weights, for measurements and tests."""

from __future__ import annotations

import torch

from nanovllm.layers.linear import ShardedParameters
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.weights.packed_layers import PackedLayers


def fill_random(model: DecoderForCausalLM, seed: int, packed: PackedLayers) -> None:
    """Random weights of a usual scale (norms 1, biases 0, all else normal with deviation 0.02).

    They are drawn tensor by tensor of a checkpoint, so that the ranks of a group of any size hold parts of one model.
    """
    generator = torch.Generator(packed.device).manual_seed(seed)
    tied = model.config.tie_word_embeddings  # the head is the embedding
    for module_name, module in model.named_modules():
        if not isinstance(module, ShardedParameters) or (module_name == "lm_head" and tied):
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 1:
                parameter.fill_(0 if name == "bias" else 1)
                continue
            for shard in module.shards:
                drawn = torch.empty(module.source_shape(name, shard), dtype=parameter.dtype, device=packed.device)
                part = module.part(name, shard)
                drawn.normal_(0, 0.02, generator=generator)
                place = module_name, name, shard
                part_of = drawn if part is None else part.of(drawn)
                if not packed.add("", place, part_of):
                    module.load_shard(name, shard, part_of)
