"""What models write in the place of fused ops, and what replaces it.

A pattern is a function that is traced, and so decomposed, as a compiled model is. Of each op there are the spellings
that models use: transformers' RMSNorm, that of PyTorch, products in either order, halves by `chunk` and by slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.kernels import all_ops

_EPS = 1.25e-6
"""Stands for any eps."""
_DTYPES = (torch.float32, torch.bfloat16)
"""Without conversions to float32, and with them. float16 has those of bfloat16."""

Function = Callable[..., Any]


@dataclass(frozen=True)
class Pattern:
    """What to look for, and what to put in its place.

    Attributes:
        search, replace: functions with the same parameters.
        examples: tensors to trace them with.
        scalars: numbers among the parameters, with values that occur nowhere else in the pattern.
    """

    search: Function
    replace: Function
    examples: tuple[torch.Tensor, ...]
    scalars: dict[str, float | int] = field(default_factory=dict)


def patterns_of(op: str) -> Iterator[Pattern]:
    """The patterns of an op, the larger ones first."""
    if op == "add_rms_norm":
        yield from _norms(_added, _replaced_sum_and_norm, 2)
    elif op == "rms_norm":
        yield from _norms(lambda norm: norm, torch.ops.nanovllm.rms_norm.default, 1)
    elif op == "silu_and_mul":
        yield from _gates()
    elif op == "fused_add_gelu":
        yield from _gelus()
    else:
        yield from _products()


def misfit(op: str, values: Sequence[torch.Tensor]) -> str | None:
    """Why a match is no call of an op; None: it is one. values: its tensors, without data, in the op's order."""
    first = values[0]
    inputs = all_ops()[op].inputs
    assert inputs is not None
    if first.dtype not in inputs.dtypes:
        return f"{first.dtype} is none of the op's dtypes".replace("torch.", "")
    if any(v.dtype != first.dtype for v in values):
        names = ", ".join(dict.fromkeys(str(v.dtype).removeprefix("torch.") for v in values))
        return f"tensors of several dtypes: {names}"
    full = 2 if op == "add_rms_norm" else 1
    for i, value in enumerate(values[1:], 1):
        like_a_row = value.dim() == 1 and value.shape[0] == first.shape[-1]
        same = value.shape == first.shape
        if not (same if i < full else like_a_row or (same and "norm" not in op)):
            return f"a tensor {list(value.shape)} with one {list(first.shape)}"
    return None


def _of_transformers(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _weight_last(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def _of_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """What `torch.nn.functional.rms_norm` becomes. Its own trace has an operation in place, which models have not."""
    wide = x.to(torch.float32)
    mean = wide.pow(2).mean([x.dim() - 1], keepdim=True)
    wide = wide * torch.rsqrt(torch.ops.aten.add.Scalar(mean, eps))
    return (wide * weight).to(x.dtype)


def _added(norm: Function) -> Function:
    def added(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        total = residual + x
        return norm(total, weight, eps), total

    return added


def _replaced_sum_and_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    return torch.ops.nanovllm.add_rms_norm(x, residual, weight, eps)


def _norms(wrap: Callable[[Function], Function], replace: Function, num_rows: int) -> Iterator[Pattern]:
    for dtype in _DTYPES:
        examples = (*(torch.empty(4, 16, dtype=dtype) for _ in range(num_rows)), torch.empty(16, dtype=dtype))
        for norm in (_of_transformers, _weight_last, _of_torch):
            yield Pattern(wrap(norm), replace, examples, {"eps": _EPS})


def _gates() -> Iterator[Pattern]:
    def chunks(x: torch.Tensor) -> Sequence[torch.Tensor]:
        return x.chunk(2, dim=-1)

    def slices(x: torch.Tensor) -> Sequence[torch.Tensor]:
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]

    def gate_first(halves: Function) -> Function:
        def search(gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = halves(gate_up)
            return F.silu(gate) * up

        return search

    def up_first(halves: Function) -> Function:
        def search(gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = halves(gate_up)
            return up * F.silu(gate)

        return search

    def replace(gate_up: torch.Tensor) -> torch.Tensor:
        return torch.ops.nanovllm.silu_and_mul(gate_up)

    for dtype in _DTYPES:
        for halves in (chunks, slices):
            for order in (gate_first, up_first):
                yield Pattern(order(halves), replace, (torch.empty(4, 16, dtype=dtype),))


def _gelus() -> Iterator[Pattern]:
    def pair(approximate: str, bias_first: bool) -> tuple[Function, Function]:
        def search(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return F.gelu(bias + x if bias_first else x + bias, approximate=approximate)

        def replace(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return torch.ops.nanovllm.fused_add_gelu(x, bias, approximate)

        return search, replace

    for dtype in _DTYPES:
        for approximate in ("none", "tanh"):
            for bias_first in (False, True):
                examples = torch.empty(4, 16, dtype=dtype), torch.empty(16, dtype=dtype)
                yield Pattern(*pair(approximate, bias_first), examples)


def _products() -> Iterator[Pattern]:
    orders: tuple[Function, ...] = (
        lambda a, b, c: a * b + c, lambda a, b, c: b * a + c, lambda a, b, c: c + a * b, lambda a, b, c: c + b * a,
    )  # fmt: skip

    def replace(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.ops.nanovllm.element_wise_mul_add(a, b, c)

    for search in orders:
        yield Pattern(search, replace, (torch.empty(4, 16), torch.empty(16), torch.empty(16)))
