"""Which tiles a kernel should use: what fits a GPU, and what is fastest by prediction.

    from nanovllm.hardware.gpu_presets import device_model
    from nanovllm.plan import GemmProblem, plan_gemm

    best = plan_gemm(GemmProblem(4096, 4096, 4096), device_model("h100"))[0]
    best.config.block_m, best.config.stages, best.registers, best.limit, best.seconds

Every `plan_*` takes a problem and a `DeviceModel` and returns a list of `Plan`, the fastest by prediction first, each
with a `config` of its kernel. None needs a GPU or imports torch. docs/planner.md has the model.
"""

from nanovllm.plan.attention_tiles import AttentionProblem, AttentionTile, plan_attention
from nanovllm.plan.conv_problem import ConvProblem
from nanovllm.plan.conv_tiles import ConvTile, plan_conv
from nanovllm.plan.elementwise_tiles import ElementwiseProblem, ElementwiseTile, plan_elementwise
from nanovllm.plan.gemm_tiles import GemmProblem, GemmTile, plan_gemm
from nanovllm.plan.reduction_tiles import ReductionProblem, ReductionTile, plan_reduction
from nanovllm.plan.resources import Occupancy, Plan, Waves, occupancy, stages_needed, waves

__all__ = [
    "AttentionProblem", "AttentionTile", "ConvProblem", "ConvTile", "ElementwiseProblem", "ElementwiseTile",
    "GemmProblem", "GemmTile", "Occupancy", "Plan", "ReductionProblem", "ReductionTile", "Waves", "occupancy",
    "plan_attention", "plan_conv", "plan_elementwise", "plan_gemm", "plan_reduction", "stages_needed", "waves",
]  # fmt: skip
