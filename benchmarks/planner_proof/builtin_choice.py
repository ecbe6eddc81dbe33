"""What the engine's own rules choose for a problem: timed too, since it may be none of the planner's plans."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from nanovllm.hardware.gpu_presets import DeviceModel
from nanovllm.kernels.triton.gemm.product_plan import StreamPlan, TilePlan
from nanovllm.plan import attention_tiles as attention
from nanovllm.plan import elementwise_tiles as elementwise
from nanovllm.plan import gemm_tiles as gemm
from nanovllm.plan import reduction_tiles as reduction
from nanovllm.plan.attention_tiles import AttentionProblem, AttentionTile
from nanovllm.plan.elementwise_tiles import ElementwiseProblem, ElementwiseTile
from nanovllm.plan.gemm_tiles import GemmProblem
from nanovllm.plan.reduction_tiles import ReductionProblem, ReductionTile
from nanovllm.plan.resources import Plan, cdiv, occupancy, waves
from nanovllm.tune.launches import RecordedLaunch, recorded


class StreamTile(StreamPlan):
    """The configuration of the kernel for few rows, which the planner does not know."""

    def __str__(self) -> str:
        text = f"stream {self.tokens}x{self.rows}x{self.block_k} w{self.warps} s{self.stages}"
        return text + (f" split {self.splits}" if self.splits > 1 else "")


@dataclass(frozen=True)
class OwnKernel:
    """A kernel that the engine has in place of the planned one, with its own configuration."""

    name: str
    warps: int

    def __str__(self) -> str:
        return f"{self.name} w{self.warps}"


def builtin(problem: Any, device: DeviceModel) -> Plan | None:
    """The engine's plan, with an infinite time if the planner does not know the kernel. None: it has no kernel."""
    if isinstance(problem, GemmProblem):
        return _product(problem, device)
    if isinstance(problem, AttentionProblem):
        from nanovllm.kernels.triton.attention.prefill_plan import plan_prefill

        size, capability = _dtype(problem.dtype).itemsize, device.capability // 10
        chosen = plan_prefill(problem.group, problem.head_dim, size, problem.query, capability=capability)
        tile = AttentionTile(chosen.rows, chosen.tile, chosen.warps, chosen.stages)
        return attention.predict(tile, problem, device)
    if isinstance(problem, ElementwiseProblem):
        launch = _launch(_elementwise_call(problem))
        if launch is None:
            return None
        block = ElementwiseTile(launch.arguments["BLOCK"], launch.options["num_warps"])
        return elementwise.predict(block, problem, device)
    if isinstance(problem, ReductionProblem):
        launch = _launch(_row_call(problem))
        if launch is None:
            return None
        if launch.name == "norm_pieces_kernel" and launch.arguments["PIECES"] > 1:
            a = launch.arguments
            held = ReductionTile(1, a["BLOCK"], launch.options["num_warps"], held=a["PIECES"])
            return reduction.predict(held, problem, device)
        if launch.name.removeprefix("_").removeprefix("long_") != f"{problem.kind}_kernel":
            own = OwnKernel(launch.name.strip("_"), launch.options["num_warps"])
            moved = 2.0 * problem.rows * problem.size * problem.itemsize
            return _unknown(own, problem.rows, own.warps, 0.0, moved, device)
        a = launch.arguments
        one_pass = not launch.name.startswith("_long")
        own_tile = ReductionTile(a.get("ROWS", 1), a["BLOCK"], launch.options["num_warps"], one_pass)
        return reduction.predict(own_tile, problem, device)
    return None


def _product(p: GemmProblem, device: DeviceModel) -> Plan | None:
    chosen = gemm.engine_plan(p, device)
    if chosen is None:
        return None
    if isinstance(chosen, TilePlan):
        own = gemm.engine_tile(p, device)
        return None if own is None else gemm.predict(own, p, device)
    tile = StreamTile(**vars(chosen))
    moved = ((p.m + p.n) * p.k + p.m * p.n) * p.bytes_x
    return _unknown(tile, cdiv(p.n, tile.rows) * tile.splits, tile.warps, 2.0 * p.m * p.n * p.k, moved, device)


def _unknown(config: Any, blocks: int, warps: int, flops: float, moved: float, device: DeviceModel) -> Plan:
    """A plan of a kernel that the planner cannot predict."""
    return Plan(
        config=config, blocks=blocks, intensity=flops / moved, shared=0, registers=0,
        occupancy=occupancy(device, 0, 32, warps), min_stages=1, waves=waves(blocks, 1, device.sms), seconds=math.inf,
        parts={"unknown": math.inf}, fixed=0.0, flops=flops, bytes=moved,
    )  # fmt: skip


def with_builtin(plans: list[Plan], problem: Any, device: DeviceModel) -> tuple[list[Plan], int | None]:
    """(the plans, the engine's at their end if it is none of them, its place)."""
    own = builtin(problem, device)
    if own is None:
        return plans, None
    for i, plan in enumerate(plans):
        if plan.config == own.config:
            return plans, i
    if not own.occupancy.blocks:  # the prediction says that it does not fit; whether it does, its launch tells
        own = replace(own, occupancy=replace(own.occupancy, blocks=1))
    return [*plans, own], len(plans)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, "float32" if name == "tfloat32" else name)


def _launch(call: Callable[[], Any] | None) -> RecordedLaunch | None:
    """The one launch that a call makes on tensors without memory."""
    if call is None:
        return None
    with recorded() as launches:
        call()
    return launches[0] if len(launches) == 1 else None


def _elementwise_call(p: ElementwiseProblem) -> Callable[[], Any] | None:
    from nanovllm.kernels.triton.rows.activation import fused_activation, silu_and_mul
    from nanovllm.kernels.triton.rows.elementwise import element_wise_mul_add

    def tensor(n: int) -> torch.Tensor:
        return torch.empty(n, dtype=_dtype(p.dtype), device="meta")

    if p.outputs != 1 or p.inputs > 3:
        return None
    if p.inputs == 1:
        return lambda: fused_activation(tensor(p.elements), "silu")
    if p.inputs == 2:
        return lambda: silu_and_mul(tensor(2 * p.elements).view(1, -1))
    return lambda: element_wise_mul_add(*(tensor(p.elements) for _ in range(3)))


def _row_call(p: ReductionProblem) -> Callable[[], Any]:
    from nanovllm.kernels.triton.rows import norm
    from nanovllm.kernels.triton.rows.softmax import softmax

    x, weight = (torch.empty(s, dtype=_dtype(p.dtype), device="meta") for s in ((p.rows, p.size), (p.size,)))
    if p.kind == "softmax":
        return lambda: softmax(x)
    return lambda: (
        norm.layer_norm(x, weight, weight, 1e-6) if p.kind == "layer_norm" else norm.rms_norm(x, weight, 1e-6)
    )
