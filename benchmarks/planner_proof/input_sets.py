"""Running a planned configuration: the kernels of `nanovllm.kernels` on random inputs, with the plan's tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.hardware.gpu_presets import DeviceModel
from nanovllm.hardware.precision import float32_products
from nanovllm.plan.attention_tiles import AttentionProblem
from nanovllm.plan.elementwise_tiles import ElementwiseProblem
from nanovllm.plan.gemm_tiles import GemmProblem
from nanovllm.plan.reduction_tiles import ReductionProblem
from nanovllm.plan.resources import Plan, cdiv

EPS = 1e-6
_BLOCK = 256  # tokens of a block of the KV cache


@dataclass(frozen=True)
class InputSets:
    """Several sets of tensors of one problem, so that each call of a round finds the L2 cache without its own.

    Attributes:
        sets: arguments, each a tuple of tensors.
        run: (plan, arguments) -> output.
        reference: arguments -> output, in float32 or better.
        library: arguments -> output, by PyTorch's own kernels, or None where it has none to compare with.
    """

    sets: Sequence[Any]
    run: Callable[[Plan, Any], torch.Tensor]
    reference: Callable[[Any], torch.Tensor]
    library: Callable[[Any], torch.Tensor] | None


def num_sets(bytes_of_a_set: float, l2_bytes: int) -> int:
    """Enough for twice the L2 cache, and at least 2."""
    return max(2, math.ceil(2 * l2_bytes / bytes_of_a_set) + 1)


def prepare(problem: Any, where: torch.device, model: DeviceModel, sets: int | None = None, seed: int = 0) -> InputSets:
    """Random inputs for a problem; on the device "meta" without memory, to follow launches that do not run.

    Args:
        sets: how many; by default as many as the L2 cache of `model` asks for.

    Raises:
        ValueError: nanovllm has no kernel for it (packed weights, float8, convolutions, more than three inputs,
            decoding in pieces).
    """
    generator = None if where.type == "meta" else torch.Generator(where).manual_seed(seed)

    def random(*shape: int, dtype: str) -> torch.Tensor:
        kind = getattr(torch, "float32" if dtype == "tfloat32" else dtype)
        if generator is None:
            return torch.empty(shape, dtype=kind, device=where)
        return torch.randn(shape, device=where, generator=generator).to(kind)

    for kind, make in _MAKERS.items():
        if isinstance(problem, kind):
            return make(problem, where, model, sets, random)
    raise ValueError(f"problem: nanovllm has no kernel for a {type(problem).__name__}")


def _gemm(p: GemmProblem, where: torch.device, model: DeviceModel, sets: int | None, random: Any) -> InputSets:
    from nanovllm.kernels.triton.gemm.product_plan import StreamPlan, TilePlan
    from nanovllm.kernels.triton.gemm.stream_kernel import stream
    from nanovllm.kernels.triton.gemm.tiled_kernel import gemm

    if p.weight is not None or p.dtype == "float8":
        raise ValueError(f"gemm: nanovllm has no kernel for {p.dtype} with weights in {p.weight or p.dtype}")
    count = sets or num_sets((p.m + p.n) * p.k * p.bytes_x, model.l2_bytes)
    tensors = [(random(p.m, p.k, dtype=p.dtype), random(p.n, p.k, dtype=p.dtype)) for _ in range(count)]
    out_dtype = tensors[0][0].dtype

    def run(plan: Plan, t: Any) -> torch.Tensor:
        c, (x, w) = plan.config, t
        out = torch.empty((p.m, p.n), dtype=out_dtype, device=where)
        if isinstance(c, StreamPlan):
            stream(x, w, None, out, "none", False, c, "ieee", False)
            return out
        tiles = TilePlan(c.block_m, c.block_n, c.block_k, c.group_m, c.splits, c.warps, c.stages, c.tma, c.flatten)
        precision = "tf32" if p.dtype == "tfloat32" else "ieee"
        gemm(x, w, None, out, "none", False, tiles, precision, False, plan.occupancy.blocks * model.sms)
        return out

    def library(t: Any) -> torch.Tensor:
        with float32_products(p.dtype):
            return F.linear(*t)

    def reference(t: Any) -> torch.Tensor:
        with float32_products("float32"):
            return t[0].float() @ t[1].float().T

    return InputSets(tensors, run, reference, library)


def _attention(
    p: AttentionProblem, where: torch.device, model: DeviceModel, sets: int | None, random: Any
) -> InputSets:
    from nanovllm.kernels.ops.paged_kv import PagedKV
    from nanovllm.kernels.triton.attention.prefill import attention_prefill
    from nanovllm.kernels.triton.attention.prefill_plan import PrefillPlan

    if not p.causal:
        raise ValueError("causal: the attention of nanovllm is causal")
    if p.query == 1:
        raise ValueError("query: decoding has kernels of its own, which these plans do not configure")
    blocks = cdiv(p.context, _BLOCK)
    count = sets or num_sets(p.least_bytes, model.l2_bytes)
    cache = (p.batch * blocks, _BLOCK, p.kv_heads, p.head_dim)
    tensors = [
        (
            random(p.batch * p.query, p.heads, p.head_dim, dtype=p.dtype),
            random(*cache, dtype=p.dtype),
            random(*cache, dtype=p.dtype),
        )
        for _ in range(count)
    ]
    # Rows of the block table begin at multiples of 16 entries, whatever the context: one kernel for all of them.
    table = torch.zeros((p.batch, 16 * cdiv(blocks, 16)), dtype=torch.int32)
    table[:, :blocks] = torch.randperm(p.batch * blocks).view(p.batch, blocks)
    table = table.to(where)[:, :blocks]
    starts = torch.arange(0, p.batch * p.query + 1, p.query, dtype=torch.int32, device=where)
    lengths = torch.full((p.batch,), p.context, dtype=torch.int32, device=where)
    scale = p.head_dim**-0.5

    def run(plan: Plan, t: Any) -> torch.Tensor:
        c = plan.config
        tiles = PrefillPlan(c.rows, c.tile, c.warps, c.stages)
        q, k, v = t
        return attention_prefill(q, PagedKV(k, v, table, lengths, p.context), starts, p.query, scale, plan=tiles)

    mask = torch.ones(p.query, p.context, dtype=torch.bool, device=where).tril(p.context - p.query)

    def reference(t: Any) -> torch.Tensor:
        q, k, v = t
        out = torch.empty(q.shape, dtype=torch.float32, device=where)
        for b in range(p.batch):  # one KV head at a time: the scores of all of them may not fit
            rows = slice(b * p.query, (b + 1) * p.query)
            keys, values = (c[table[b].long()].flatten(0, 1)[: p.context].float() for c in (k, v))
            for h in range(p.kv_heads):
                heads = slice(h * p.group, (h + 1) * p.group)
                scores = torch.einsum("qhd,kd->hqk", q[rows, heads].float() * scale, keys[:, h])
                weights = scores.masked_fill_(~mask, float("-inf")).softmax(-1)
                out[rows, heads] = torch.einsum("hqk,kd->qhd", weights, values[:, h])
        return out

    return InputSets(tensors, run, reference, None)


def _elementwise(
    p: ElementwiseProblem, where: torch.device, model: DeviceModel, sets: int | None, random: Any
) -> InputSets:
    from nanovllm.kernels.triton.rows.activation import activate_and_mul_kernel, activation_kernel
    from nanovllm.kernels.triton.rows.elementwise import _mul_add_kernel

    if p.outputs != 1 or p.inputs > 3:
        raise ValueError(
            f"inputs: nanovllm has kernels of 1 to 3 inputs and one output, not {p.inputs} and {p.outputs}"
        )
    count = sets or num_sets(p.elements * p.inputs * p.itemsize, model.l2_bytes)
    shapes = [p.elements] * 3 if p.inputs == 3 else [p.elements * p.inputs]
    tensors = [tuple(random(n, dtype=p.dtype) for n in shapes) for _ in range(count)]
    n = p.elements

    def run(plan: Plan, t: Any) -> torch.Tensor:
        y = torch.empty(n, dtype=t[0].dtype, device=where)
        block, warps, blocks = plan.config.block, plan.config.warps, cdiv(n, plan.config.block)
        if p.inputs == 3:
            _mul_add_kernel[(blocks,)](*t, y, n, blocks, n, n, n, block, num_warps=warps, enable_fp_fusion=False)
        elif p.inputs == 2:
            activate_and_mul_kernel[(blocks,)](*t, y, n, 2 * n, blocks, "silu", block, num_warps=warps)
        else:
            activation_kernel[(blocks,)](*t, y, n, n, blocks, "silu", block, num_warps=warps)
        return y

    def reference(t: Any) -> torch.Tensor:
        wide = [x.float() for x in t]
        if p.inputs == 3:
            return (wide[0] * wide[1]).to(t[0].dtype).float() + wide[2]
        return F.silu(wide[0]) if p.inputs == 1 else F.silu(wide[0][:n]) * wide[0][n:]

    library = (lambda t: F.silu(t[0])) if p.inputs == 1 else None
    return InputSets(tensors, run, reference, library)


def _reduction(
    p: ReductionProblem, where: torch.device, model: DeviceModel, sets: int | None, random: Any
) -> InputSets:
    from benchmarks.planner_proof.builtin_choice import OwnKernel
    from nanovllm.kernels.triton.rows import norm
    from nanovllm.kernels.triton.rows.pieces import norm_pieces_kernel
    from nanovllm.kernels.triton.rows.plans import POLICY
    from nanovllm.kernels.triton.rows.softmax import _long_softmax_kernel, _softmax_kernel, softmax

    count = sets or num_sets(p.rows * p.size * p.itemsize, model.l2_bytes)
    weight, bias = random(p.size, dtype=p.dtype), random(p.size, dtype=p.dtype)
    tensors = [(random(p.rows, p.size, dtype=p.dtype), weight, bias) for _ in range(count)]
    rows, n = p.rows, p.size
    own = {
        "layer_norm": lambda x, w, b: norm.layer_norm(x, w, b, EPS),
        "rms_norm": lambda x, w, b: norm.rms_norm(x, w, EPS),
        "softmax": lambda x, w, b: softmax(x),
    }[p.kind]

    def run(plan: Plan, t: Any) -> torch.Tensor:
        c, (x, w, b) = plan.config, t
        if isinstance(c, OwnKernel):
            return own(x, w, b)
        y = torch.empty_like(x)
        grid = (cdiv(rows, c.rows),)
        if c.held > 1:
            modes = p.kind == "layer_norm", rows > POLICY.few_rows, False
            norm_pieces_kernel[grid](x, w, b, y, 1, n, n, n, EPS, c.block, c.held, *modes, num_warps=c.warps)
        elif p.kind == "softmax" and c.one_pass:
            _softmax_kernel[grid](x, y, rows, n, n, c.rows, c.block, num_warps=c.warps)
        elif p.kind == "softmax":
            _long_softmax_kernel[grid](x, y, n, n, c.block, num_warps=c.warps)
        elif p.kind == "layer_norm":
            kernel = norm._layer_norm_kernel if c.one_pass else norm._long_layer_norm_kernel
            kernel[grid](x, w, b, y, n, n, EPS, c.block, num_warps=c.warps)
        elif c.one_pass:
            norm._rms_norm_kernel[grid](x, w, y, rows, 1, n, n, n, EPS, c.rows, c.block, num_warps=c.warps)
        else:
            norm._long_rms_norm_kernel[grid](x, x, w, y, y, 1, n, n, n, n, EPS, False, c.block, num_warps=c.warps)
        return y

    def compute(t: Any) -> torch.Tensor:
        x, w, b = t
        if p.kind == "softmax":
            return x.softmax(-1)
        return F.layer_norm(x, (n,), w, b, EPS) if p.kind == "layer_norm" else F.rms_norm(x, (n,), w, EPS)

    return InputSets(tensors, run, lambda t: compute(tuple(x.float() for x in t)), compute)


_MAKERS: dict[type, Any] = {
    GemmProblem: _gemm, AttentionProblem: _attention, ElementwiseProblem: _elementwise, ReductionProblem: _reduction,
}  # fmt: skip
