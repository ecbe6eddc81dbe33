"""The decode kernel that also normalises, rotates and stores: against the op's reference, and against float64.

As in `test_triton_attention`: on a GPU at real shapes, else in the interpreter on small ones, in a process of its own.
"""

import re
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl

from nanovllm.kernels.ops import qk_norm_rope_attention as OP
from nanovllm.kernels.triton.attention import decode
from nanovllm.kernels.triton.attention.decode_plan import DecodePlan
from nanovllm.kernels.triton.attention.rotate import load_heads, rotate_heads, rotated_halves
from tests.interpreter import check_interpreted
from tests.kernels.flat import flat

qk_norm_rope_attention = flat("qk_norm_rope_attention", decode.qk_norm_rope_attention)
from tests.kernels.triton.attention.test_decode import (
    BF16,
    DEVICE,
    F8,
    F16,
    F32,
    GPU,
    INTERPRETED,
    check,
    int32,
    mixed,
    paged,
    scales,
)  # fmt: skip

MAX_POSITION = 24576 if GPU else 4096


def angles(head_dim, dtype=F32):
    frequencies = 1e6 ** (-torch.arange(0, head_dim, 2, device=DEVICE, dtype=torch.float64) / head_dim)
    table = torch.arange(MAX_POSITION, device=DEVICE)[:, None] * frequencies
    return torch.cat((table.cos(), table.sin()), -1).to(dtype)


def make(lens, num_heads, num_kv_heads, head_dim, block_size, dtype, cache_dtype=None, norm=True, **options):
    """Arguments; the slot of each sequence's last token holds NaN, since that token comes with the call."""
    k_cache, v_cache, table = paged(lens, num_kv_heads, head_dim, block_size, cache_dtype or dtype, seed=len(lens))
    for i, length in enumerate(lens):
        if length:
            block = int(table[i, (length - 1) // block_size])
            for cache in (k_cache, v_cache):
                raw = cache.view(torch.uint8) if cache.dtype == F8 else cache
                raw[block, (length - 1) % block_size] = 0x7F if cache.dtype == F8 else float("nan")
    generator = torch.Generator().manual_seed(7)
    qkv = torch.randn(len(lens), num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(DEVICE, dtype)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
    weights = [(torch.rand(head_dim, generator=generator) + 0.5).to(DEVICE, dtype) if norm else None for _ in range(2)]
    options = {name: scales(n, i) if name[1:] == "_scale" else n for i, (name, n) in enumerate(options.items())}
    return {
        "q": q, "k": k, "v": v, "cos_sin_cache": angles(head_dim), "k_cache": k_cache, "v_cache": v_cache,
        "block_table": table, "context_lens": int32(lens), "max_context_len": max(*lens, 1), "scale": head_dim**-0.5,
        "q_weight": weights[0], "k_weight": weights[1], "eps": 1e-6, **options,
    }  # fmt: skip


def copied(given):
    return given | {name: given[name].clone() for name in ("k_cache", "v_cache")}


def bits(cache):
    return cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[cache.element_size()])


def expected_of(given):
    """The reference in float64 if nothing is quantised, else in the dtypes of the call: rounding is part of the
    result then.
    """
    given = copied(given)
    if given["k_cache"].dtype == given["q"].dtype:
        wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in given.items()}
        wide |= {n: given[n] for n in ("k_scale", "v_scale") if n in given}
        wide["cos_sin_cache"] = angles(given["q"].shape[2], torch.float64)
        return flat("qk_norm_rope_attention", OP.native)(**wide)
    return flat("qk_norm_rope_attention", OP.native)(**given)


def check_call(lens, *shape, plan=None, **options):
    given = make(lens, *shape, **options)
    expected, used = expected_of(given), copied(given)
    got = qk_norm_rope_attention(**used, plan=plan)
    dtype = given["q"].dtype
    # bfloat16 and float16: rounded after the norm, its weight and the rotation, before the scores.
    tolerance = {F32: F32, F16: BF16, BF16: BF16}[dtype]
    assert got.is_contiguous() and got.dtype == dtype
    check(got.to(tolerance), expected.double(), tolerance) if dtype != BF16 else check_loose(got, expected)
    check_caches(used, given)
    for _ in range(2):
        again = copied(given)
        assert torch.equal(got, qk_norm_rope_attention(**again, plan=plan))
        assert all(torch.equal(bits(again[n]), bits(used[n])) for n in ("k_cache", "v_cache"))


def check_caches(used, given):
    """The new tokens' slots hold what the separate ops store there, but for a last bit of k; the others what they
    held.
    """
    stored = copied(given)
    flat("qk_norm_rope_attention", OP.native)(**stored)
    rtol = {F32: 3e-6, F16: 2e-3, BF16: 1.6e-2, F8: 0.13}[given["k_cache"].dtype]
    rounding = {F32: 3e-6, F16: 2e-3, BF16: 1.6e-2}[given["q"].dtype]
    for name in ("k_cache", "v_cache"):
        # Where the rotation cancels, a last bit of a product is many of the result.
        atol = 4 * rounding + 2**-9 * (given[name].dtype == F8) if name == "k_cache" else 1e-5
        new = (bits(stored[name]) != bits(given[name])).any(-1).any(-1)
        assert new.sum() == (given["context_lens"] > 0).sum()
        assert torch.equal(bits(used[name])[~new], bits(given[name])[~new])
        got, expected = (c.float()[new] for c in (used[name], stored[name]))
        torch.testing.assert_close(got, expected, rtol=rtol if name == "k_cache" else 0, atol=atol)
        assert given["q"].dtype == F32 or (got == expected).double().mean() > 0.97


def check_loose(got, expected):
    error = ((got.double() - expected.double()).norm() / expected.double().norm()).item()
    assert not got.isnan().any() and error < 1.5e-2, error


@pytest.mark.parametrize(
    "lens, heads, kv_heads, dim, block_size, dtype, plan, options",
    [
        ([1], 2, 2, 64, 16, F32, None, {}),
        ([1, 17, 100, 16], 4, 2, 64, 16, F32, None, {"norm": False}),
        ([100, 3, 1, 64, 33], 4, 2, 64, 16, F32, DecodePlan(7, 32, 4, 1, 16, False), {}),  # a tile of two blocks, cut
        ([90, 32, 5], 9, 3, 80, 32, F16, DecodePlan(30, 16, 4, 1, 16, False), {}),
        ([40, 70], 7, 1, 96, 64, F16, None, {"soft_cap": 5.0, "window": 33}),
        ([70], 4, 4, 64, 16, F32, DecodePlan(5, 16, 4, 1, 1, False), {"window": 1}),
        ([40, 1, 70], 4, 2, 64, 16, F16, DecodePlan(4, 32, 4, 1, 16, False), {"cache_dtype": F8}),
        ([40, 70], 4, 2, 64, 16, F32, None, {"cache_dtype": F8, "k_scale": 1, "v_scale": 2}),
        ([90, 5], 4, 2, 64, 32, F32, None, {"cache_dtype": F16, "v_scale": 2, "norm": False}),
    ],
)
def test_small(lens, heads, kv_heads, dim, block_size, dtype, plan, options):
    check_call(lens, heads, kv_heads, dim, block_size, dtype, plan=plan, **options)
    if plan is not None:
        check_call(lens, heads, kv_heads, dim, block_size, dtype, plan=replace(plan, early=True), **options)


def test_a_sequence_without_tokens_stores_nothing(monkeypatch):
    monkeypatch.setenv("NANOVLLM_CHECK", "1")
    given = make([20, 0, 3], 4, 2, 64, 16, F32)
    used = copied(given)
    got = qk_norm_rope_attention(**used)
    assert (got[1] == 0).all() and not got.isnan().any()
    changed = (bits(used["k_cache"]) != bits(given["k_cache"])).any(-1).any(-1)
    assert changed.sum() == 2


def test_only_the_piece_with_the_new_token_needs_it(monkeypatch):
    """Pieces run in any order on a GPU; in the interpreter the first one first. Here also the last one first."""
    from triton.runtime.interpreter import interpreter_builder as builder

    given, plan = make([100, 70], 4, 2, 64, 16, F32), DecodePlan(9, 16, 4, 1, 16, False)
    expected = qk_norm_rope_attention(**copied(given), plan=plan)
    assert not expected.isnan().any()
    place = builder.set_grid_idx
    turned = []

    def turn(*index):
        turned.append(index)
        place(*(n - 1 - i for n, i in zip(builder.grid_dim, index)))

    monkeypatch.setattr(builder, "set_grid_idx", turn)
    assert torch.equal(qk_norm_rope_attention(**copied(given), plan=plan), expected) and len(turned) > 4


def test_bad_arguments():
    given = make([20, 3], 4, 2, 64, 16, F32)
    with pytest.raises(ValueError, match="q_weight, k_weight: expected both"):
        qk_norm_rope_attention(**given | {"k_weight": None})
    with pytest.raises(ValueError, match=r"k, v: expected \[2, 2, 64\], got \[1, 2, 64\]"):
        qk_norm_rope_attention(**given | {"k": given["k"][:1]})
    with pytest.raises(
        ValueError, match=r"q: expected \[2, num_heads, head_dim\], a query token for each .* got \[1, 4, 64\]"
    ):
        qk_norm_rope_attention(**given | {name: given[name][:1] for name in ("q", "k", "v")})


def test_a_position_without_angles(monkeypatch):
    monkeypatch.setenv("NANOVLLM_CHECK", "1")
    given = make([20, 3], 4, 2, 64, 16, F32)
    angles = given["cos_sin_cache"]
    qk_norm_rope_attention(**copied(given) | {"cos_sin_cache": angles[:20]})
    with pytest.raises(
        ValueError, match=r"sequence 0 has length 20, expected 0 to 19 \(19 positions in cos_sin_cache\)"
    ):
        qk_norm_rope_attention(**copied(given) | {"cos_sin_cache": angles[:19]})


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("heads, kv_heads, block_size", [(16, 8, 256), (9, 3, 16), (14, 2, 64)])
def test_shapes(dim, dtype, heads, kv_heads, block_size):
    check_call(mixed(3, 2000), heads, kv_heads, dim, block_size, dtype)
    check_call(mixed(70, 1500, seed=1), heads, kv_heads, dim, block_size, dtype, norm=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("count", [1, 8, 64, 256])
def test_batches(count, dtype):
    check_call(mixed(count, 2000), 16, 8, 128, 256, dtype)
    check_call(mixed(count, 900), 32, 8, 128, 256, dtype, cache_dtype=F8, k_scale=1, v_scale=8)
    check_call(mixed(count, 900), 16, 8, 128, 256, dtype, window=100, soft_cap=20.0)


@pytest.mark.gpu
def test_graph_replays_advance():
    """A captured call replays with longer contexts, reading what its own earlier replays stored."""
    given = make([300, 17, 1000], 16, 8, 128, 256, BF16)
    eager, replayed = copied(given), copied(given) | {"context_lens": given["context_lens"].clone()}
    eager["max_context_len"] = replayed["max_context_len"] = 1024
    saved = {n: replayed[n].clone() for n in ("k_cache", "v_cache")}
    qk_norm_rope_attention(**replayed)  # compiles
    for name, cache in saved.items():
        replayed[name].copy_(cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = qk_norm_rope_attention(**replayed)
    for step in range(12):
        lens = given["context_lens"] + step
        replayed["context_lens"].copy_(lens)
        graph.replay()
        assert torch.equal(out, qk_norm_rope_attention(**eager | {"context_lens": lens}))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 4, 8])
def test_calls_that_read_what_the_one_before_them_stored(count):
    """A call loads keys before it waits for the kernel before it, which may be this one with the last token."""
    calls = 24
    given = make([260 + 30 * i for i in range(count)], 16, 8, 128, 256, BF16)  # of two blocks, to the last call
    given["max_context_len"] = 512
    lens = [given["context_lens"] + i for i in range(calls)]
    tokens = [{n: torch.randn_like(given[n]) for n in "qkv"} for _ in range(calls)]
    saved = {n: given[n].clone() for n in ("k_cache", "v_cache")}

    def run(wait=False):
        out = []
        for new, length in zip(tokens, lens):
            out.append(qk_norm_rope_attention(**given | new | {"context_lens": length}))
            if wait:
                torch.cuda.synchronize()
        return out

    expected = run(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(50):
        for name, cache in saved.items():
            given[name].copy_(cache)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(out, expected))


@triton.jit
def rotate_kernel(x, weight, angles, y, stride, eps, HALVES: tl.constexpr, NORM: tl.constexpr):
    rows = tl.arange(0, 8)[:, None]
    if HALVES:
        rotated = rotated_halves(x + rows * stride, weight, angles + 0 * rows, eps, rows < 8, 128, NORM)
    else:
        rotated = rotate_heads(load_heads(x + rows * stride, weight, angles, rows < 8, 128, 128, NORM), eps, 128, NORM)
    tl.store(y + rows * 128 + tl.arange(0, 128)[None, :], rotated)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_compiled_products_are_rounded_before_they_are_added(dtype, capability):
    """What the interpreter cannot show: fused with the addition, every fifth sum of two products has another last
    bit.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**dict.fromkeys(("x", "weight", "y"), "*" + dtype), "angles": "*fp32", "stride": "i32", "eps": "fp32"}
    for halves in (False, True):
        for norm in (False, True):
            constants = {"HALVES": halves, "NORM": norm}
            signature = {p.name: types.get(p.name, "constexpr") for p in rotate_kernel.params}
            source = ASTSource(rotate_kernel, signature, constants, {})
            ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
            # sm_80 adds bfloat16 as a * 1 + b, subtracts as b * -1 + a and multiplies as a * b + -0; also two in a
            # register.
            constants_of = re.findall(r"mov\.b(?:16|32)\s+(%\w+), (-?\d+|0x\w+);", ptx)
            harmless = {name for name, value in constants_of if int(value, 0) & 0xFFFF in (0x3F80, 0xBF80, 0x8000)}
            fused = [re.findall(r"%\w+", line) for line in ptx.splitlines() if re.search(r"fma\.rn\.b?f16", line)]
            assert "mul.rn.f32" in ptx and all(harmless & set(operands[2:]) for operands in fused)


def test_in_the_interpreter():
    check_interpreted(__file__)


# Only what can run here is collected, so that nothing is reported as skipped.
_ANYWHERE = (
    "test_small", "test_a_sequence_without_tokens_stores_nothing", "test_bad_arguments",
    "test_a_position_without_angles",
)  # fmt: skip
_INTERPRETER = ("test_only_the_piece_with_the_new_token_needs_it",)
_HERE = {
    "test_in_the_interpreter": not GPU and not INTERPRETED,
    "test_compiled_products_are_rounded_before_they_are_added": not INTERPRETED,
    **{name: GPU or INTERPRETED for name in _ANYWHERE},
    **dict.fromkeys(_INTERPRETER, INTERPRETED),
}
for _name in [name for name in globals() if name.startswith("test_")]:
    if not _HERE.get(_name, GPU):
        del globals()[_name]
