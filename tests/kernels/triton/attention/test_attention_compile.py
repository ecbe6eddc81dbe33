"""The attention kernels as their wrappers launch them, compiled for GPUs that need not be here: no spilled registers,
no race between lanes, asynchronous copies, and tensor-core products that are waited for."""

import re
from dataclasses import replace
from itertools import islice

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under TRITON_INTERPRET", allow_module_level=True)
import triton.language as tl

from nanovllm.kernels.triton.attention.attention_dense import attention_dense
from nanovllm.kernels.triton.attention.decode_plan import (
    DecodeSizes,
    plan_decode,
    plan_rest,
    plan_shared,
    tokens_together,
)
from nanovllm.kernels.triton.attention.prefill_plan import plan_hopper_prefill, plan_prefill
from nanovllm.kernels.triton.attention.rotate import load_heads, rotate_heads, rotated_halves
from tests.kernels.sass_wgmma import machine_code, touched_in_flight
from tests.kernels.triton.attention.cases import (
    BF16,
    F8,
    F16,
    F32,
    attention_decode,
    attention_decode_shared,
    attention_prefill,
    compile_call,
    fused_shuffles,
    qk_norm_rope_attention,
    qk_norm_rope_attention_shared,
)
from tests.kernels.triton.attention.hopper_calls import compile_hopper_prefill
from tests.kernels.triton.compiled import compiled, in_turn, launches_of, resources

KV_HEADS = 8
# Bytes outside of the loop cost nothing that was measured: addresses, column numbers. A spilling loop takes hundreds.
DECODE_STACK, PREFILL_STACK = 64, 160
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
DTYPES = {"bf16": (BF16, BF16), "fp16": (F16, F16), "fp32": (F32, F32), "fp8": (BF16, F8)}


def decode_arguments(count, group, dim, dtype, queries=1, kv_heads=KV_HEADS, block_size=256):
    """(q, k, v, caches and the rest of the cache's fields, scales of the cache)."""
    q_dtype, cache_dtype = DTYPES[dtype]
    heads = group * kv_heads, kv_heads, kv_heads
    q, k, v = torch.empty(count * queries, sum(heads), dim, dtype=q_dtype).split(heads, 1)
    caches = [torch.empty(3, block_size, kv_heads, dim, dtype=cache_dtype) for _ in range(2)]
    lens, table = torch.ones(count, dtype=torch.int32), torch.zeros(count, 8, dtype=torch.int32)
    scales = {"k_scale": torch.ones(1), "v_scale": torch.ones(kv_heads)} if cache_dtype == F8 else {}
    return q, k, v, [*caches, table, lens, 8 * block_size], scales


def normed(dim, dtype):
    weights = [torch.empty(dim, dtype=DTYPES[dtype][0]) for _ in range(2)]
    return dict(zip(("q_weight", "k_weight"), weights), eps=1e-6)


def check_decode_binary(binary, dtype, capability, tmp_path, shared_memory=99 << 10):
    _, stack, local = resources(binary, tmp_path)
    assert stack <= DECODE_STACK and local == 0, stack
    assert binary.metadata.shared <= shared_memory
    assert not fused_shuffles(binary.asm["ptx"])
    if dtype != "fp32":
        assert "cp.async.cg.shared.global [ %r" in binary.asm["ptx"]  # 16 bytes at a time, and asynchronous


# (dtype, head_dim, query heads a KV head, query tokens, capability, whether queries are normalised and rotated, window)
# Of a dtype and capability the largest, which spill first, and the odd; a window is more code than none.
DECODE = [
    *(("bf16", dim, group, 1, 90, False, None) for dim, group in ((80, 1), (128, 7), (256, 4))),
    ("fp8", 64, 3, 1, 90, False, None), ("fp32", 256, 4, 1, 90, False, None), ("fp32", 64, 3, 1, 80, False, None),
    ("fp8", 128, 2, 1, 80, False, None), ("bf16", 128, 2, 1, 100, False, None),
    *((dtype, 128, 2, 1, 90, True, None) for dtype in ("bf16", "fp8", "fp32")), ("bf16", 128, 2, 1, 80, True, None),
    ("bf16", 96, 4, 1, 90, True, None), ("bf16", 256, 4, 1, 90, True, 512),
    ("bf16", 128, 8, 8, 90, False, 300), ("bf16", 80, 9, 3, 90, False, 300), ("bf16", 256, 4, 8, 90, False, 300),
    ("fp32", 256, 4, 8, 90, False, 300), ("fp8", 256, 2, 4, 90, False, None),
    ("fp8", 128, 4, 8, 100, False, 300), ("bf16", 128, 4, 8, 80, False, 300),
]  # fmt: skip


@pytest.mark.parametrize("dtype, dim, group, queries, capability, rotate, window", DECODE)
def test_decode_compiles_without_spills(dtype, dim, group, queries, capability, rotate, window, tmp_path):
    """Built-in plans: every one of bfloat16 heads of 128 on sm_90 with one query token, elsewhere one, by turns. Of
    plans that differ in nothing but their pieces, one."""
    rows = group * tokens_together(queries, group)
    columns = KV_HEADS * -(-queries * group // rows)
    itemsize = DTYPES[dtype][1].itemsize
    plans = {}
    for count in (1, 4, 8, 300) if rotate else (1, 8, 70, 300):
        plan = plan_decode(DecodeSizes(count, columns, rows, dim, itemsize, dtype == "fp32", 132), rotate)
        plans.setdefault(replace(plan, pieces=1, least=1), (count, plan))
    every = list(plans.values())
    if (dtype, dim, capability, queries) != ("bf16", 128, 90, 1):
        every = [every[DECODE.index((dtype, dim, group, queries, capability, rotate, window)) % len(every)]]
    for count, plan in every:
        q, k, v, cache, scales = decode_arguments(count, group, dim, dtype, queries)

        def call(plan=plan, q=q, k=k, v=v, cache=cache, scales=scales):
            options = dict(window=window, plan=plan, **scales)
            if rotate:
                qk_norm_rope_attention(q, k, v, torch.empty(4096, dim), *cache, 1.0, **normed(dim, dtype), **options)
            else:
                attention_decode(q, *cache, 1.0, **options)

        for _, binary in compile_call(call, capability, RELEASE=capability >= 90 and queries * count <= 256):
            check_decode_binary(binary, dtype, capability, tmp_path)


@pytest.mark.parametrize(
    "count, heads, kv_heads, dim, dtype, rotate, capability, passes",
    [
        (256, 16, 8, 128, "bf16", True, 90, 2),
        (16, 16, 8, 128, "bf16", True, 90, 1),
        (256, 14, 2, 64, "bf16", True, 80, 1),
        (256, 32, 8, 128, "bf16", False, 100, 1),
        (256, 16, 8, 256, "bf16", True, 90, 1),
        (256, 16, 8, 128, "fp8", True, 90, 2),
        (64, 16, 8, 128, "fp32", True, 90, 2),
    ],
)
def test_passes_over_shared_prefixes_compile_without_spills(
    count, heads, kv_heads, dim, dtype, rotate, capability, passes, tmp_path
):
    """The second pass is the kernel of `test_decode_compiles_without_spills` with a beginning and an end of its own."""
    group = heads // kv_heads
    q, k, v, cache, scales = decode_arguments(count, group, dim, dtype, kv_heads=kv_heads)
    lens = cache[3]
    prefixes = torch.zeros(64, 3, dtype=torch.int32), torch.zeros_like(lens), torch.zeros_like(lens)
    sizes = DecodeSizes(count, kv_heads, group, dim, DTYPES[dtype][1].itemsize, dtype == "fp32", 132)
    plans = dict(plan=plan_shared(sizes, warpgroups=capability >= 90), rest=plan_rest(sizes))

    def call():
        if rotate:
            new = q, k, v, torch.empty(4096, dim)
            options = normed(dim, dtype) | scales | plans
            qk_norm_rope_attention_shared(*new, *cache, *prefixes, 1.0, **options)
        else:
            attention_decode_shared(q, *cache, *prefixes, 1.0, **scales, **plans)

    names = []
    for kernel, binary in islice(compile_call(call, capability, RELEASE=capability >= 90), passes):
        names.append(kernel.__name__)
        check_decode_binary(binary, dtype, capability, tmp_path, (99 if capability == 80 else 227) << 10)
        ptx = binary.asm["ptx"]
        if names[-1] == "shared_kernel" and (capability, count, dtype) == (90, 256, "bf16") and dim <= 128:
            assert "wgmma.mma_async" in ptx
        if "wgmma.mma_async" in ptx:
            assert touched_in_flight(machine_code(binary)) == []
    assert names == ["shared_kernel", "decode_kernel"][:passes]


# (dtype, head_dim, query heads a KV head, capability, options)
PREFILL = [
    *(("bf16", dim, group, 90, {}) for dim, group in ((80, 1), (128, 2), (256, 4))), ("fp32", 256, 4, 90, {}),
    *(("fp8", dim, group, 90, {}) for dim, group in ((80, 1), (256, 4))),
    ("bf16", 128, 2, 90, {"window": 300, "soft_cap": 30.0}),
    ("fp8", 128, 2, 100, {}), ("fp8", 256, 4, 80, {}),
    ("fp32", 64, 3, 80, {}), ("fp16", 128, 2, 80, {}), ("bf16", 96, 3, 80, {}), ("fp8", 128, 7, 89, {}),
]  # fmt: skip


@pytest.mark.parametrize("dtype, dim, group, capability, options", PREFILL)
def test_prefill_compiles_without_spills(dtype, dim, group, capability, options, tmp_path):
    """In blocks of 256 and of 16 tokens, and with the plan for several sequences at a time: all of bfloat16 heads of
    128 on sm_90, elsewhere one of them, by turns."""
    starts = torch.arange(9, dtype=torch.int32)
    itemsizes = [t.itemsize for t in DTYPES[dtype]]
    plans = [plan_prefill(group, dim, itemsizes[0], 700, itemsizes[1], capability // 10, c) for c in (False, True)]
    every = [(256, plans[0]), *[(16, plans[0])] * ((dim, group, options) == (128, 2, {}))]
    every += [(256, plans[1])] * (plans[0] != plans[1])
    if (dtype, dim, capability, options) != ("bf16", 128, 90, {}):
        every = [every[PREFILL.index((dtype, dim, group, capability, options)) % len(every)]]
    for block_size, plan in every:
        q, _, _, cache, scales = decode_arguments(8, group, dim, dtype, block_size=block_size)

        def call(q=q, cache=cache, scales=scales, plan=plan):
            attention_prefill(q, *cache, starts, 700, 1.0, plan=plan, **scales, **options)

        for _, binary in compile_call(call, capability):
            _, stack, _ = resources(binary, tmp_path)
            assert stack <= PREFILL_STACK, (plan, block_size)
            assert binary.metadata.shared <= SHARED_MEMORY[capability]
            if block_size == 256 and "wgmma" in binary.asm["ptx"]:
                assert touched_in_flight(machine_code(binary)) == [], plan


@pytest.mark.parametrize(
    "dim, group, block_size, options",
    [
        (64, 3, 16, {}),
        (96, 4, 64, {"window": 100}),
        (128, 2, 256, {}),
        (256, 2, 256, {"window": 4096, "soft_cap": 50.0}),
    ],
)
def test_hopper_prefill_compiles_without_spills(dim, group, block_size, options, tmp_path):
    """test_prefill_hopper_ptx.py runs two of them, which are in Triton's cache then."""
    plan = plan_hopper_prefill(group, dim, block_size)
    binary = compile_hopper_prefill(plan, 2 * group, 2, dim, block_size, **options)
    _, stack, _ = resources(binary, tmp_path)
    assert stack <= PREFILL_STACK
    assert binary.metadata.shared <= SHARED_MEMORY[90]
    assert touched_in_flight(machine_code(binary)) == []


def dense(queries, length, padded):
    q, k = torch.zeros(2, 16, queries, 128, dtype=BF16), torch.zeros(2, 8, length, 128, dtype=BF16)
    visible = torch.full((2, queries), queries, dtype=torch.int32)
    tokens = torch.arange(length, dtype=torch.int32).repeat(2, 1) if padded else None
    return lambda: attention_dense(q, k, k, visible, 0.1, tokens)


@pytest.mark.parametrize("capability", [80, 90])
def test_attention_over_dense_caches_compiles_without_spills(capability, tmp_path):
    """In blocks of one token and of 64: all on sm_90, elsewhere every kernel, whose launches take turns."""
    shapes = [(n, *of) for n in (1, 128) for of in ((192, False), (192, True), (200, False))]
    launches = launches_of([(str(shape), dense(*shape)) for shape in shapes])
    for name, kernel, args, options in launches if capability == 90 else in_turn(launches, slice(0, None, 3)):
        registers, stack, local = resources(compiled(kernel, args, options, capability), tmp_path)
        assert registers <= 255 and stack <= 64 and local == 0, (name, kernel.__name__, registers, stack, local)


@triton.jit
def rotate_kernel(x, weight, angles, y, stride, eps, HALVES: tl.constexpr):
    """Without a norm, then with one."""
    rows = tl.arange(0, 8)[:, None]
    for NORM in tl.static_range(2):
        if HALVES:
            rotated = rotated_halves(x + rows * stride, weight, angles + 0 * rows, eps, rows < 8, 128, NORM)
        else:
            heads = load_heads(x + rows * stride, weight, angles, rows < 8, 128, 128, NORM)
            rotated = rotate_heads(heads, eps, 128, NORM)
        tl.store(y + (NORM * 8 + rows) * 128 + tl.arange(0, 128)[None, :], rotated)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_compiled_products_are_rounded_before_they_are_added(dtype, capability):
    """The interpreter cannot show it. Fused with the addition, every fifth sum of two products has another last bit."""
    x, weight, y, angles = *(torch.empty(128, dtype=dtype) for _ in range(3)), torch.empty(128)
    for halves in (False, True):
        ptx = compiled(rotate_kernel, (x, weight, angles, y, 130, 1e-6, halves), {}, capability).asm["ptx"]
        # sm_80 adds bfloat16 as a * 1 + b, subtracts as b * -1 + a and multiplies as a * b + -0; also two in a
        # register.
        constants_of = re.findall(r"mov\.b(?:16|32)\s+(%\w+), (-?\d+|0x\w+);", ptx)
        harmless = {name for name, value in constants_of if int(value, 0) & 0xFFFF in (0x3F80, 0xBF80, 0x8000)}
        fused = [re.findall(r"%\w+", line) for line in ptx.splitlines() if re.search(r"fma\.rn\.b?f16", line)]
        assert "mul.rn.f32" in ptx and all(harmless & set(operands[2:]) for operands in fused)
