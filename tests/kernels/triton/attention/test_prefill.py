"""The Triton prefill kernels against float64 softmax attention, with NaN in every cache slot that holds no token.

With a GPU they run there at real shapes, else in Triton's interpreter on small ones. The interpreter is chosen when
Triton
is imported, by an environment variable, so it gets a process of its own: `test_in_the_interpreter`. It does not run the
kernel for Hopper, which is compiled here for a GPU that need not be.
"""

import random
import re
import subprocess
import weakref
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
INTERPRETED = triton.knobs.runtime.interpret
GPU = torch.cuda.is_available() and not INTERPRETED
HOPPER = GPU and torch.cuda.get_device_capability()[0] == 9
DEVICE = "cuda" if GPU else "cpu"

from nanovllm.kernels.triton.attention import prefill
from nanovllm.kernels.triton.attention.prefill_kernel import prefill_kernel
from nanovllm.kernels.triton.attention.prefill_plan import (
    HopperPrefillPlan,
    PrefillPlan,
    fit_hopper,
    plan_hopper_prefill,
    plan_prefill,
    prefill_registers,
)
from tests.interpreter import check_interpreted
from tests.kernels.flat import flat
from tests.kernels.sass_wgmma import machine_code, touched_in_flight

attention_prefill = flat("attention_prefill", prefill.attention_prefill)


def room(k_cache, table):
    """Tokens that a sequence can have."""
    return table.shape[1] * k_cache.shape[1]


F32, F16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
TOLERANCE = {F32: 3e-6, F16: 1e-3, BF16: 6e-3}


def paged(context_lens, num_kv_heads, head_dim, block_size, dtype, seed=0):
    """(k_cache, v_cache, block_table): shuffled blocks, NaN wherever no token is, a table wider than needed."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-n // block_size) for n in context_lens]
    num_blocks = sum(blocks) + 3
    shuffled = torch.randperm(num_blocks, generator=generator)
    table = torch.zeros(len(blocks), max(blocks) + 1, dtype=torch.int32)
    used = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for i, n in enumerate(blocks):
        if n:
            mine, shuffled = shuffled[:n], shuffled[n:]
            table[i, :n] = mine
            table[i, n:] = mine[0]
            used[mine] = True
            used[mine[-1], context_lens[i] - (n - 1) * block_size :] = False
    shape = num_blocks, block_size, num_kv_heads, head_dim
    generator, unused = torch.Generator(DEVICE).manual_seed(seed), ~used.to(DEVICE)
    caches = [torch.randn(shape, generator=generator, device=DEVICE) for _ in range(2)]
    for cache in caches:
        cache[unused] = float("nan")
    return *(c.to(dtype) for c in caches), table.to(DEVICE)


def reference(
    q, k_cache, v_cache, table, query_lens, context_lens, window=None, soft_cap=None, k_scale=None, v_scale=None
):
    """Float64, one sequence and one KV head at a time: the shape of q."""
    num_kv_heads = k_cache.shape[2]
    num_heads, head_dim = q.shape[1:]
    group = num_heads // num_kv_heads
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    start = 0
    for i, (num_new, length) in enumerate(zip(query_lens, context_lens)):
        blocks = table[i, : -(-length // k_cache.shape[1])].long()
        positions = torch.arange(length - num_new, length, device=q.device)[:, None]
        tokens = torch.arange(length, device=q.device)
        hidden = tokens > positions
        if window:
            hidden |= tokens <= positions - window
        for h in range(num_kv_heads if length else 0):
            k, v = (
                c.view(torch.uint8)[blocks, :, h].view(c.dtype) if c.dtype == FP8 else c[blocks, :, h]
                for c in (k_cache, v_cache)
            )
            k, v = (x.flatten(0, 1)[:length].double() for x in (k, v))
            k, v = (x * s[h % len(s)] if s is not None else x for x, s in ((k, k_scale), (v, v_scale)))
            queries = q[start : start + num_new, h * group : (h + 1) * group].double().transpose(0, 1)
            scores = queries @ k.T * head_dim**-0.5
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            o = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
            out[start : start + num_new, h * group : (h + 1) * group] = o.transpose(0, 1)
        start += num_new
    return out


def queries(num_tokens, num_heads, head_dim, dtype, seed=0):
    """A slice of a wider tensor, as the QKV projection gives."""
    wide = torch.randn(num_tokens, num_heads + 2, head_dim, generator=torch.Generator().manual_seed(seed))
    return wide.to(dtype).to(DEVICE)[:, :num_heads]


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def check(
    query_lens, lens, heads, kv_heads, dim, block_size, dtype, plan=None, *, cache_dtype=None, scale_q=1.0, **options
):
    k, v, table = paged(lens, kv_heads, dim, block_size, cache_dtype or dtype, seed=len(lens))
    q = queries(sum(query_lens), heads, dim, dtype) * scale_q
    if scale_q == 1.0:
        q = queries(sum(query_lens), heads, dim, dtype)  # not contiguous
    starts = int32([sum(query_lens[:i]) for i in range(len(lens) + 1)])

    def run():
        # What the allocator hands out next is this, so that a row which is not written is seen.
        torch.full(q.shape, float("nan"), dtype=dtype, device=DEVICE)
        return attention_prefill(
            q, k, v, table, int32(lens), room(k, table), starts, max(query_lens), dim**-0.5, plan=plan, **options
        )

    got = run()
    expected = reference(q, k, v, table, query_lens, lens, **options)
    assert got.dtype == dtype and got.is_contiguous() and not got.isnan().any()
    error = ((got.double() - expected).norm() / expected.norm()).item()
    assert error < TOLERANCE[dtype], f"relative error {error:.1e}"
    # No single row is off either, which the norm over all would hide.
    rows = (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(0.1)
    assert rows.max() < 4 * TOLERANCE[dtype], f"relative error {rows.max():.1e} in a row"
    for _ in range(2):
        assert torch.equal(got, run())


def mixed(count, longest, seed=0):
    generator = random.Random(seed)
    return [generator.randint(1, longest) for _ in range(count)]


def run_lengths():
    """Six runs, every second one after a cached prefix."""
    new, cached = mixed(6, 700), mixed(6, 500, seed=1)
    return new, [n + (c if i % 2 else 0) for i, (n, c) in enumerate(zip(new, cached))]


# ---- small cases, which the interpreter runs too. It cannot multiply bfloat16 matrices.


@pytest.mark.parametrize(
    "query_lens, lens, heads, kv_heads, dim, block_size, dtype, plan, options",
    [
        ([1], [1], 2, 2, 64, 16, F32, None, {}),
        ([5], [50], 9, 3, 80, 16, F32, None, {"window": 20}),
        ([1, 17, 40], [1, 17, 100], 4, 2, 64, 16, F32, PrefillPlan(16, 32, 4, 1), {}),
        ([33, 1, 2], [33, 70, 2], 7, 1, 96, 64, F16, PrefillPlan(64, 16, 4, 2), {"soft_cap": 5.0, "window": 33}),
        ([33, 1, 2], [33, 70, 2], 8, 8, 64, 32, F16, PrefillPlan(16, 16, 4, 2), {"soft_cap": 5.0}),
        ([20, 31], [20, 64], 4, 1, 64, 16, F16, PrefillPlan(64, 32, 4, 2), {}),  # a tile of two blocks
        ([20, 31], [20, 64], 4, 1, 64, 48, F16, PrefillPlan(64, 32, 4, 2), {}),  # a tile of a block and a half
        ([40], [64], 2, 1, 64, 32, F16, PrefillPlan(16, 16, 4, 1), {"window": 1}),
        ([3, 2, 4], [30, 0, 4], 4, 2, 64, 16, F32, None, {}),  # a sequence without tokens gets zeros
    ],
)
def test_small(query_lens, lens, heads, kv_heads, dim, block_size, dtype, plan, options):
    check(query_lens, lens, heads, kv_heads, dim, block_size, dtype, plan, **options)


@pytest.mark.parametrize("scales", [None, [0.5], [0.25, 3.0]])
@pytest.mark.parametrize("dtype", [F16, F32])
def test_fp8_cache(dtype, scales):
    scale = scales and torch.tensor(scales, device=DEVICE)
    other = scale.flip(0) * 0.5 if scales else None
    check([20, 3], [50, 3], 4, 2, 64, 16, dtype, cache_dtype=FP8, k_scale=scale, v_scale=other)


def test_large_logits():
    check([30, 33], [60, 33], 4, 2, 64, 16, F32, scale_q=2000.0)


@pytest.mark.parametrize("options", [{}, {"window": 300}])
def test_company_counts_by_the_longest_run_only(options):
    """With the same max_query_len, and so the same plan, a sequence has the same bits alone and beside others."""
    k, v, table = paged([400, 90, 33, 5], 2, 64, 16, F16)
    q, starts, lens = queries(3 + 20 + 33 + 2, 4, 64, F16), [0, 3, 23, 56, 58], int32([400, 90, 33, 5])

    def run(first, end, longest):
        rows = slice(starts[first], starts[end])
        here = int32([start - starts[first] for start in starts[first : end + 1]])
        return attention_prefill(
            q[rows], k, v, table[first:end], lens[first:end], room(k, table), here, longest, 0.125, **options
        )

    together = run(0, 4, 33)
    for i in range(4):
        assert torch.equal(run(i, i + 1, 33), together[starts[i] : starts[i + 1]])
    # Another longest run is another plan, whose sums are taken in another order.
    assert plan_prefill(2, 64, 2, 3) != plan_prefill(2, 64, 2, 33)
    assert not torch.equal(run(0, 1, 3), together[:3])


def test_no_tokens():
    k, v, table = paged([3], 2, 64, 16, F32)
    got = attention_prefill(queries(0, 4, 64, F32), k, v, table, int32([3]), 3, int32([0, 0]), 0, 0.125)
    assert got.shape == (0, 4, 64)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"cu_seqlens_q": torch.zeros(2)}, "cu_seqlens_q: expected contiguous int32 \\[2\\], got torch.float32"),
        ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}, "cu_seqlens_q: .* got torch.int32 \\[3\\]"),
        ({"cu_seqlens_q": int32([1, 3])}, "cu_seqlens_q: expected 0 as the start of the first run, got 1"),
        ({"cu_seqlens_q": int32([0, 2])}, "cu_seqlens_q: sequence 0 ends at token 2, expected 3"),
        ({"max_query_len": 2}, "max_query_len: expected at least 3, the query tokens of sequence 0, got 2"),
        ({"context_lens": int32([2])}, "context_lens: sequence 0 has length 2, shorter than its 3 query tokens"),
        ({"context_lens": int32([33])}, "context_lens: sequence 0 has length 33, expected 0 to 32"),
        ({"window": 0}, "window: expected None or a whole number of tokens from 1"),
        ({"soft_cap": -1.0}, "soft_cap"),
        ({"k_scale": torch.ones(3)}, "k_scale: expected contiguous float32 of shape \\[1\\] or \\[2\\]"),
    ],
)
def test_bad_input(change, message, monkeypatch):
    monkeypatch.setenv("NANOVLLM_CHECK", "1")
    k, v, table = paged([3], 2, 64, 16, F32)
    arguments = dict(
        q=queries(3, 4, 64, F32), k_cache=k, v_cache=v, block_table=table, cu_seqlens_q=int32([0, 3]),
        context_lens=int32([3]),
        max_context_len=32, max_query_len=3, scale=0.125,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        attention_prefill(**{**arguments, **change})
    attention_prefill(**{**arguments, "context_lens": int32([0])})  # padding


# ---- a GPU

ANYWHERE = PrefillPlan(rows=64, tile=32, warps=4, stages=2)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(
    "heads, kv_heads, block_size", [(16, 8, 256), (9, 3, 16), (14, 2, 64), (8, 8, 1024), (6, 1, 32), (4, 1, 128)]
)
def test_shapes(dim, dtype, heads, kv_heads, block_size):
    check(*run_lengths(), heads, kv_heads, dim, block_size, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("heads, kv_heads, block_size", [(16, 8, 256), (14, 2, 16)])
def test_the_kernel_for_any_gpu(dim, heads, kv_heads, block_size, beside):
    check(
        *run_lengths(),
        heads,
        kv_heads,
        dim,
        block_size,
        BF16,
        plan_prefill(heads // kv_heads, dim, 2, 700, concurrent=beside),
    )


def test_beside_other_kernels_it_leaves_them_room(monkeypatch):
    """Even where Hopper's kernel would take it, or another plan was tuned."""
    taken = []
    monkeypatch.setattr(prefill.prefill_hopper, "takes", lambda *args: True)
    monkeypatch.setattr(prefill.tunables.ATTENTION_PREFILL.__class__, "find", lambda *args: pytest.fail("tuned alone"))
    monkeypatch.setattr(prefill, "_launch_anywhere", lambda plan, *args: taken.append(plan))
    k, v, table = paged([200], 2, 128, 16, BF16)
    attention_prefill(
        queries(100, 4, 128, BF16), k, v, table, int32([200]), 200, int32([0, 100]), 100, 0.125, concurrent=True
    )
    assert taken == [plan_prefill(2, 128, 2, 100, capability=prefill.capability(k.device), concurrent=True)]
    alone, beside = (plan_prefill(2, 128, 2, 100, concurrent=beside) for beside in (False, True))
    assert beside.rows * beside.warps < alone.rows * alone.warps


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{"soft_cap": 30.0}, {"window": 1}, {"window": 100}, {"soft_cap": 20.0, "window": 300}]
)
@pytest.mark.parametrize("dtype, plan", [(BF16, None), (F16, None), (BF16, ANYWHERE), (F32, None)])
def test_options(options, dtype, plan):
    new, cached = mixed(6, 700), mixed(6, 500, seed=1)
    check(new, [n + c for n, c in zip(new, cached)], 16, 8, 128, 256, dtype, plan, **options)
    check([500, 129, 128, 1], [500, 1000, 128, 1], 7, 1, 64, 16, dtype, plan, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_fp8_on_a_gpu(dtype):
    scale = torch.rand(8, device=DEVICE) + 0.5
    for dim in (64, 80, 128, 256):
        check(*run_lengths(), 16, 8, dim, 256, dtype, cache_dtype=FP8, k_scale=scale, v_scale=scale[:1])


@pytest.mark.gpu
def test_very_different_lengths():
    check([2, 3, 1], [40000, 3, 300], 16, 8, 128, 256, BF16)
    check([100, 3, 1], [40000, 3, 300], 16, 8, 128, 256, BF16)
    check([9000, 1, 700], [9100, 1, 700], 4, 1, 128, 256, BF16)
    check(mixed(5, 30), [50] * 5, 71, 1, 64, 256, BF16)
    check(mixed(600, 5), [6] * 600, 4, 2, 64, 16, BF16)
    check([*mixed(300, 5), 200, 1, 400], [*[6] * 300, 900, 77, 400], 4, 2, 64, 16, BF16)
    check([130, 2, 400], [130, 0, 500], 8, 2, 128, 64, BF16)  # a sequence without tokens


@pytest.mark.gpu
@pytest.mark.parametrize(
    "plan",
    [
        HopperPrefillPlan(1, 128, 2),
        HopperPrefillPlan(4, 64, 4),
        HopperPrefillPlan(2, 128, 3),
        HopperPrefillPlan(4, 64, 2, programs=3),
    ],
)
def test_hopper_plans(plan):
    if not HOPPER:
        pytest.skip("needs a Hopper GPU")
    for options in ({}, {"window": 150}):
        check(*run_lengths(), 16, 4, 128, 32, BF16, plan, **options)
        check(*run_lengths(), 16, 4, 128, 256, F16, plan, **options)


@pytest.mark.gpu
def test_graph_replay():
    """A graph replays with other lengths and tables."""
    heads, kv_heads, longest, count = 16, 8, 700, 4
    q = queries(count * 300, heads, 128, BF16)
    k, v, table = paged([longest] * count, kv_heads, 128, 256, BF16)
    starts, lens = int32([0] * (count + 1)), int32([1] * count)

    def run():
        return attention_prefill(q, k, v, table, lens, room(k, table), starts, 400, 128**-0.5)

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in range(3):
        new = mixed(count, 400, seed)
        new[-1] = max(1, count * 300 - sum(new[:-1]))
        new = [min(n, longest) for n in new]
        now = [min(longest, n + 50 * seed) for n in new]
        new_k, new_v, new_table = paged(now, kv_heads, 128, 256, BF16, seed)
        k[: len(new_k)], v[: len(new_v)] = new_k, new_v
        table[:, : new_table.shape[1]] = new_table[:, : table.shape[1]]
        starts.copy_(int32([sum(new[:i]) for i in range(count + 1)])), lens.copy_(int32(now))
        expected = reference(q[: sum(new)], k, v, table, new, now)
        for _ in range(2):
            graph.replay()
            error = (out[: sum(new)].double() - expected).norm() / expected.norm()
            assert error < TOLERANCE[BF16]


# ---- compiled here, for GPUs that need not be here

SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
SHAPES = [(64, 3), (80, 1), (96, 4), (128, 2), (128, 7), (256, 4)]
CASES = [(dtype, *shape, 90) for dtype in ("bf16", "fp32") for shape in SHAPES]
CASES += [
    (*shape, capability) for shape in (("bf16", 128, 2), ("bf16", 256, 4), ("fp32", 64, 3)) for capability in (80, 100)
]
CASES += [("fp16", 128, 2, 80), ("bf16", 96, 3, 80), ("bf16", 128, 7, 89)]
# Bytes: addresses and column numbers, most of head_dim 256. Spilled accumulators take hundreds.
STACK = 160


def stack(binary, tmp_path):
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    (tmp_path / "kernel.cubin").write_bytes(binary.asm["cubin"])
    done = subprocess.run(
        [tools / "cuobjdump", "--dump-resource-usage", tmp_path / "kernel.cubin"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(re.search(r"STACK:(\d+)", done.stdout)[1])


def signature(kernel, constants, types):
    """What the wrapper passes: aligned pointers, strides that are multiples of 16."""
    kinds, fixed, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr or types.get(name) == "constexpr":
            kinds[name], fixed[(i,)] = "constexpr", constants.get(name)
        else:
            kinds[name] = types.get(name, "i32")
        varies = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        if not varies and kinds[name][0] in "*i":
            attributes[(i,)] = [["tt.divisibility", 16]]
    return kinds, fixed, attributes


@pytest.mark.parametrize("options", [{}, {"FP8": True}, {"WINDOW": 300}, {"SOFT_CAP": 30.0}], ids=str)
@pytest.mark.parametrize("dtype, dim, group, capability", CASES)
def test_compiles_without_spills(dtype, dim, group, capability, options, tmp_path):
    if options and (dtype == "fp32" or (dim, group) != (128, 2) and "FP8" not in options):
        pytest.skip("of one shape")
    fp8 = "FP8" in options
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for longest, block_size, beside in ((700, 256, False), (700, 16, False), (700, 256, True)):
        plan = plan_prefill(group, dim, 4 if dtype == "fp32" else 2, longest, 1 if fp8 else 2, capability // 10, beside)
        constants = dict(
            SEQS_PAD=8, GROUP=group, ROWS=plan.rows, HEAD_DIM=dim, DIM_PAD=triton.next_power_of_2(dim),
            BLOCK_SIZE=block_size,
            TILE=plan.tile, SOFT_CAP=0.0, WINDOW=0, FP8=False, K_SCALES=int(fp8), V_SCALES=int(fp8), STAGES=plan.stages,
        ) | options  # fmt: skip
        types = {n: "*" + dtype for n in ("out_ptr", "q_ptr", "k_ptr", "v_ptr")} | {"scale": "fp32"}
        types |= {n: "*i32" for n in ("table_ptr", "starts_ptr", "lens_ptr")}
        types |= {n: "*fp32" if fp8 else "constexpr" for n in ("k_scale_ptr", "v_scale_ptr")}
        types |= {n: "*u8" for n in ("k_ptr", "v_ptr") if fp8}
        binary = triton.compile(
            ASTSource(prefill_kernel, *signature(prefill_kernel, constants, types)),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": plan.warps, "num_stages": plan.stages},
        )
        assert stack(binary, tmp_path) <= STACK, (plan, block_size)
        assert binary.metadata.shared <= SHARED_MEMORY[capability]
        if block_size == 256 and "wgmma" in binary.asm["ptx"]:
            assert touched_in_flight(machine_code(binary)) == [], plan


def compile_hopper(plan, heads, kv_heads, dim, block_size, **options):
    """The kernel as the wrapper launches it, but for `options`: `soft_cap`, `window`, or constants of the kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from nanovllm.kernels.triton.attention.prefill_hopper_kernel import prefill_hopper_kernel

    dim_pad = max(64, triton.next_power_of_2(dim))
    queries, wide = fit_hopper(plan, dim_pad)
    constants = dict(
        HEADS=heads, PACK=plan.pack, GROUP=heads // kv_heads, HEAD_DIM=dim, DIM_PAD=dim_pad, BLOCK_SIZE=block_size,
        TILE=plan.tile,
        STAGES=plan.stages, SOFT_CAP=options.pop("soft_cap", 0.0), WINDOW=options.pop("window", 0),
        QUERIES=queries, WIDE=wide, CONSUMER_REGISTERS=prefill_registers(dim_pad)[0],
        PRODUCER_REGISTERS=prefill_registers(dim_pad)[1],
    ) | options  # fmt: skip
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    part = min(block_size, plan.tile)
    types = {n: "*i32" for n in ("table_ptr", "starts_ptr", "lens_ptr", "counter_ptr")} | {
        "out_ptr": "*bf16",
        "scale": "fp32",
    }
    types |= {"q_descriptor": f"tensordesc<bf16[{64 // plan.pack}, {plan.pack}, {dim_pad}],{layout!r}>"}
    types |= {n: f"tensordesc<bf16[{part}, 1, 64],{layout!r}>" for n in ("k_descriptor", "v_descriptor")}
    return triton.compile(
        GluonASTSource(prefill_hopper_kernel, *signature(prefill_hopper_kernel, constants, types)),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "maxnreg": 168},
    )


@pytest.mark.parametrize("dim, group, block_size, options", [
    (64, 3, 16, {}), (80, 1, 256, {}), (96, 4, 64, {"window": 100}), (128, 2, 256, {}), (128, 7, 256,
    {"soft_cap": 20.0}), (256, 4, 256, {}),
    (128, 1, 16, {"window": 1000, "soft_cap": 50.0}),
])  # fmt: skip
def test_hopper_kernel_compiles_without_spills(dim, group, block_size, options, tmp_path):
    binary = compile_hopper(plan_hopper_prefill(group, dim, block_size), 8 * group, 8, dim, block_size, **options)
    assert stack(binary, tmp_path) <= STACK
    assert binary.metadata.shared <= SHARED_MEMORY[90]
    assert touched_in_flight(machine_code(binary)) == []


def test_descriptors_are_kept_and_tensors_are_not():
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime.jit import mangle_type

    from nanovllm.kernels.triton.gluon_compat import descriptor

    tensor = torch.empty(64, 4, 128, dtype=BF16)[:, 1:3]

    def kept(x, box=(16, 1, 64)):
        return descriptor(x.data_ptr(), x.dtype, x.shape, x.stride(), box)

    ours = kept(tensor)
    direct = TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [16, 1, 64], ours.layout)
    assert mangle_type(ours) == mangle_type(direct) and "NVMMASharedLayout" in mangle_type(ours)
    for name in ("shape", "strides", "block_shape", "padding"):
        assert getattr(ours, name) == getattr(direct, name)
    assert (ours.base.data_ptr(), ours.base.dtype) == (tensor.data_ptr(), tensor.dtype)
    assert kept(tensor) is ours
    others = [tensor[1:], tensor[:8], tensor.view(F16), torch.empty(64, 2, 128, dtype=BF16)]
    found = [kept(tensor, (32, 1, 64)), *map(kept, others)]
    assert len({id(d) for d in [ours, *found]}) == 6
    for x, made in zip([tensor, *others], found):
        assert (made.base.data_ptr(), made.base.dtype) == (x.data_ptr(), x.dtype)
        assert (made.shape, made.strides) == (list(x.shape), list(x.stride()))
    alive = weakref.ref(tensor)
    del tensor, direct, others, x
    assert alive() is None


def test_in_the_interpreter():
    check_interpreted(__file__)


# Only what can run here is collected, so that nothing is reported as skipped.
_HERE = {
    "test_in_the_interpreter": not GPU and not INTERPRETED,
    "test_compiles_without_spills": not INTERPRETED,
    "test_hopper_kernel_compiles_without_spills": not INTERPRETED,
    "test_descriptors_are_kept_and_tensors_are_not": not INTERPRETED,
    "test_beside_other_kernels_it_leaves_them_room": True,
    "test_hopper_plans": HOPPER,
    **{
        name: GPU or INTERPRETED
        for name in (
            "test_small",
            "test_fp8_cache",
            "test_large_logits",
            "test_company_counts_by_the_longest_run_only",
            "test_no_tokens",
            "test_bad_input",
        )  # fmt: skip
    },
}
for _name in [name for name in globals() if name.startswith("test_")]:
    if not _HERE.get(_name, GPU):
        del globals()[_name]
