"""The op `moe_route`: a program picks the experts of one token, the largest logit first."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.ops.moe_route import check_top_k
from nanovllm.kernels.triton.device_math import exp
from nanovllm.kernels.triton.early_start import can_launch_early
from nanovllm.kernels.triton.launch_arguments import matrix_of, next_power_of_2


@triton.jit
def route_kernel(
    logits,  # [tokens, num_experts], rows `stride` apart
    weights,  # [tokens, TOP_K] float32
    experts,  # [tokens, TOP_K] int32
    num_experts, stride,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # TOP_K, as a power of two
    BLOCK: tl.constexpr,  # num_experts, as a power of two
    RENORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The largest of 64-bit keys, TOP_K times: a logit's bits in an order of integers, then its index, falling."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    live = index < num_experts
    x = tl.load(logits + token * stride + index, live, other=0.0).to(tl.float32)
    LARGEST: tl.constexpr = 3.4028234663852886e38
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), -LARGEST)
    x = tl.where(x == 0.0, 0.0, x)  # -0.0 and 0.0 are equal: the lower index stands first
    bits = x.to(tl.int32, bitcast=True)
    # Of negative numbers larger bits are smaller numbers: flipped, all but the sign, integers have the floats' order.
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (order.to(tl.int64) << 32) | (BLOCK - 1 - index).to(tl.int64)
    NONE: tl.constexpr = -(2**63)
    keys = tl.where(live, keys, NONE)
    slot = tl.arange(0, SLOTS)
    picked = tl.full([SLOTS], -LARGEST, tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, NONE, keys)
        high = (best >> 32).to(tl.int32)
        value = tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True)
        picked = tl.where(slot == j, value, picked)
        tl.store(experts + token * TOP_K + j, (BLOCK - 1 - (best & (BLOCK - 1))).to(tl.int32))
    largest = tl.max(picked, 0)
    chosen = slot < TOP_K
    numerators = tl.where(chosen, exp(picked - largest), 0.0)
    if RENORMALISE:
        total = tl.sum(numerators, 0)
    else:
        total = tl.sum(tl.where(live, exp(x - largest), 0.0), 0)
    tl.store(weights + token * TOP_K + slot, numerators / total, chosen)


def moe_route(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `moe_route`."""
    check_top_k(logits, top_k)
    num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    if num_tokens:
        logits, _, stride = matrix_of(logits)
        block, pdl = next_power_of_2(num_experts), can_launch_early(logits)
        route_kernel[(num_tokens,)](
            logits, weights, experts, num_experts, stride, top_k, next_power_of_2(top_k), block, renormalise, pdl,
            num_warps=1 if block <= 512 else 4, launch_pdl=pdl,
        )  # fmt: skip
    return weights, experts
