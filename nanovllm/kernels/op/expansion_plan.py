"""For which numbers of tokens a layer multiplies with a dequantised copy of its packed weights.

A product of a small matrix lasts about 3 us, whatever its bytes. There a weight of 16 bits is faster than a packed one,
since its products have more fused forms: layers run fewer kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nanovllm.kernels.op.provider import NATIVE
from nanovllm.kernels.op.selected_kernels import Kernels

ANY = range(sys.maxsize)
"""All numbers of tokens."""


@dataclass(frozen=True)
class ExpansionRule:
    """Of the products that some ops compute, in layers of a size."""

    ops: tuple[str, ...]
    """Such as "linear_int4"; "linear_fp8_dynamic" for weights whose layer quantises activations in some steps."""
    max_layer_weights: int
    """The most weights of a decoder layer, on one rank."""
    num_tokens: range
    """Where the copy is used."""


_SMALLEST = 2**24
"""Qwen3-0.6B has 15.7 million weights in a layer."""
_SMALL = 2**26
"""Qwen3-1.7B has 50.3 million. Interpolated between that and Qwen3-8B, with 192.9, int4 loses up to 96 million."""
_INTEGERS = "linear_int4", "linear_int8", "linear_gguf"

MEASURED: Mapping[tuple[int, int], tuple[ExpansionRule, ...]] = {
    (9, 0): (
        # The copy wins with 1,024 tokens, fp8 tensor cores with 2,048.
        ExpansionRule(("linear_fp8_dynamic",), _SMALLEST, range(1025)),
        # Packed weights win with 16 tokens, the copy with 48 to 256, fp8 tensor cores with 512.
        ExpansionRule(("linear_fp8_dynamic",), 51_000_000, range(17, 385)),
        # Without them a product of many tokens dequantises the weight each time.
        ExpansionRule(("linear_fp8",), _SMALLEST, ANY),
        ExpansionRule(("linear_fp8",), 51_000_000, range(17, ANY.stop)),
        ExpansionRule(_INTEGERS, _SMALLEST, ANY),
        ExpansionRule(_INTEGERS, _SMALL, range(9, ANY.stop)),
    ),
}
"""By compute capability. Measured on an H200 with fp8 and int4 of Qwen3-0.6B, 1.7B and 8B, 1 to 256 sequences and
prompts of 256 to 16,384 tokens (docs/log/kernels.md). The first rule that holds decides."""


@dataclass(frozen=True)
class ExpansionPlan:
    """Decides which packed weights have a copy, and for how many tokens it is used.

    Args:
        rules: the first one that holds decides.
        max_bytes: if all copies take more, none is made: weights are quantised to save memory.
    """

    rules: Sequence[ExpansionRule]
    max_bytes: int

    MEMORY_SHARE = 0.04
    """Of a GPU's memory, for all copies."""

    @classmethod
    def measured(
        cls, capability: tuple[int, int], memory: int, dtype: torch.dtype, kernels: Kernels
    ) -> ExpansionPlan | None:
        """What was measured on a GPU with the kernels of this package, and 16 bits for activations; None: nothing.

        Args:
            capability: the compute capability.
            memory: bytes of the GPU.
        """
        rules = MEASURED.get(capability, ()) if dtype.itemsize == 2 else ()
        kept = [
            ExpansionRule(ops, rule.max_layer_weights, rule.num_tokens)
            for rule in rules
            if (ops := tuple(op for op in rule.ops if _is_measured(op, kernels)))
        ]
        return cls(kept, int(cls.MEMORY_SHARE * memory)) if kept else None

    def num_tokens(self, ops: Sequence[str], layer_weights: int) -> range:
        """The numbers of tokens for which the copy of a weight is used; empty: it has none.

        Args:
            ops: one for each matrix of the weight; "linear" for one that is stored in floats.
            layer_weights: weights of its decoder layer, on this rank.
        """
        packed = [self._of_op(op, layer_weights) for op in ops if op != "linear"]
        if not packed:
            return range(0)
        return range(max(each.start for each in packed), min(each.stop for each in packed))

    def _of_op(self, op: str, layer_weights: int) -> range:
        holding = (r.num_tokens for r in self.rules if op in r.ops and layer_weights <= r.max_layer_weights)
        return next(holding, range(0))


def _is_measured(op: str, kernels: Kernels) -> bool:
    """Whether the package's own kernels compute it: neither the reference nor a user's plugin."""
    provider = kernels.provider(op)
    return provider.name != NATIVE and provider.origin is None
