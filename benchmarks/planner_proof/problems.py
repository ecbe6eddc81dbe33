"""The problems that predictions are held against, each with more than 2 MB of input."""

from __future__ import annotations

from typing import Any

from nanovllm.hardware.gpu_presets import DeviceModel
from nanovllm.plan.attention_tiles import AttentionProblem, plan_attention
from nanovllm.plan.elementwise_tiles import ElementwiseProblem, plan_elementwise
from nanovllm.plan.gemm_tiles import GemmProblem, plan_gemm
from nanovllm.plan.reduction_tiles import ReductionProblem, plan_reduction
from nanovllm.plan.resources import Plan

# Shapes share kernels as far as possible: Triton compiles anew for another dtype, for a size of 1 or no multiple of 16,
# and attention for another number of query heads a KV head or of sequences, rounded up to a power of two.

# Projections of models of 0.6 and 8 billion parameters (outputs, inputs), squares, and odd sizes.
_LAYERS = ((4096, 1024), (1024, 3072), (6144, 4096), (4096, 12288), (24576, 4096))
_TOKENS = (16, 64, 256, 2048)
GEMM = (
    *(GemmProblem(m, n, k) for n, k in _LAYERS for m in _TOKENS),
    GemmProblem(8192, 6144, 4096),
    GemmProblem(1, 4096, 4096),
    GemmProblem(128, 151936, 1024),
    GemmProblem(1024, 1024, 1024),
    GemmProblem(2048, 2048, 2048, "float16"),
    GemmProblem(4096, 4096, 4096, "float16"),
    GemmProblem(8192, 8192, 8192),
    GemmProblem(304, 1008, 2000),
    GemmProblem(777, 3333, 1111),
    GemmProblem(1536, 640, 2560),
    GemmProblem(1024, 1024, 1024, "float32"),
    GemmProblem(2048, 2048, 2048, "tfloat32"),
)
ATTENTION = (
    AttentionProblem(16, 1024, 1024, 32, 8),
    AttentionProblem(4, 4096, 4096, 32, 8),
    AttentionProblem(1, 16384, 16384, 32, 8),
    AttentionProblem(4, 512, 8192, 32, 8),
    AttentionProblem(3, 16, 8192, 32, 8),
    AttentionProblem(4, 1024, 1024, 16, 8),
    AttentionProblem(3, 300, 700, 16, 8),
    AttentionProblem(4, 128, 16384, 16, 8),
    AttentionProblem(4, 2048, 2048, 16, 16, 64),
    AttentionProblem(2, 1000, 3000, 14, 2, 64, dtype="float16"),
)
STREAMING = (
    ElementwiseProblem(1 << 21, 1, 1, "bfloat16", 15),
    ElementwiseProblem(1 << 25, 1, 1, "bfloat16", 15),
    ElementwiseProblem(1 << 23, 2, 1, "float16", 17),
    ElementwiseProblem(10_000_000, 3, 1, "float32", 3),
    ReductionProblem("softmax", 2048, 1000, "float32"),
    ReductionProblem("softmax", 4096, 16384),
    ReductionProblem("softmax", 512, 151936, "float16"),
    ReductionProblem("rms_norm", 1024, 1024),
    ReductionProblem("rms_norm", 16384, 4096),
    ReductionProblem("layer_norm", 8192, 1024),
    ReductionProblem("layer_norm", 4096, 12288),
)
ALL: dict[str, tuple[Any, ...]] = {"gemm": GEMM, "attention": ATTENTION, "streaming": STREAMING}


def plan(problem: Any, model: DeviceModel) -> list[Plan]:
    """The plans of any problem that the proof times."""
    if isinstance(problem, GemmProblem):
        return plan_gemm(problem, model)
    if isinstance(problem, AttentionProblem):
        return plan_attention(problem, model)
    return (
        plan_elementwise(problem, model) if isinstance(problem, ElementwiseProblem) else plan_reduction(problem, model)
    )
