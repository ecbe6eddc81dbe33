"""The Triton decode attention kernel against float64 softmax attention, with NaN in every cache slot that holds no
token.

With a GPU they run there at real shapes, else in Triton's interpreter on small ones. The interpreter is chosen when
Triton
is imported, by an environment variable, so it gets a process of its own: `test_in_the_interpreter`.
"""

import random
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
INTERPRETED = triton.knobs.runtime.interpret
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"

from nanovllm.kernels.triton.attention import decode
from nanovllm.kernels.triton.attention.common import padded_count
from nanovllm.kernels.triton.attention.decode_kernel import decode_kernel
from nanovllm.kernels.triton.attention.decode_plan import DecodePlan, plan_decode, tokens_together
from tests.interpreter import check_interpreted
from tests.kernels.flat import flat

attention_decode = flat("attention_decode", decode.attention_decode)

F32, F16, BF16, F8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
TOLERANCE = {F32: 3e-6, F16: 1e-3, BF16: 6e-3}


def paged(context_lens, num_kv_heads, head_dim, block_size, dtype, seed=0, scale=1.0):
    """(k_cache, v_cache, block_table): shuffled blocks, NaN wherever no token is, a table wider than needed."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [max(1, -(-n // block_size)) for n in context_lens]
    num_blocks = sum(blocks) + 3
    shuffled = torch.randperm(num_blocks, generator=generator)
    table = torch.zeros(len(blocks), max(blocks) + 1, dtype=torch.int32)
    used = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for i, n in enumerate(blocks):
        mine, shuffled = shuffled[:n], shuffled[n:]
        table[i, :n] = mine
        table[i, n:] = mine[0]
        used[mine] = True
        used[mine[-1], context_lens[i] - (n - 1) * block_size :] = False
    shape = num_blocks, block_size, num_kv_heads, head_dim
    generator, unused = torch.Generator(DEVICE).manual_seed(seed), ~used.to(DEVICE)
    caches = [torch.randn(shape, generator=generator, device=DEVICE) * scale for _ in range(2)]
    for cache in caches:
        cache[unused] = float("nan")
    return *(cache.to(dtype) for cache in caches), table.to(DEVICE)


def reference(q, k_cache, v_cache, table, context_lens, window=None, soft_cap=None, k_scale=None, v_scale=None):
    """Float64, one query token and one KV head at a time: the shape of q."""
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_heads, head_dim = q.shape[1:]
    group = num_heads // num_kv_heads
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    n = len(q) // len(context_lens)
    for i in range(len(q)):
        length = max(0, context_lens[i // n] - (n - 1) + i % n)  # up to the query's own token
        blocks = table[i // n, : -(-length // block_size)].long()
        first = 0 if window is None else max(0, length - window)
        for h in range(num_kv_heads if length else 0):
            k, v = (
                cache.view(torch.uint8)[blocks].view(F8) if cache.dtype == F8 else cache[blocks]
                for cache in (k_cache, v_cache)
            )
            k, v = (x[:, :, h].flatten(0, 1)[first:length].double() for x in (k, v))
            if k_scale is not None:
                k = k * k_scale.expand(num_kv_heads)[h].double()
            if v_scale is not None:
                v = v * v_scale.expand(num_kv_heads)[h].double()
            scores = q[i, h * group : (h + 1) * group].double() @ k.T * head_dim**-0.5
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            out[i, h * group : (h + 1) * group] = scores.softmax(-1) @ v
    return out


def queries(num_tokens, num_heads, head_dim, dtype, seed=0):
    """A slice of a wider tensor, as the QKV projection gives."""
    wide = torch.randn(num_tokens, num_heads + 2, head_dim, generator=torch.Generator().manual_seed(seed))
    return wide.to(dtype).to(DEVICE)[:, :num_heads]


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def check(got, expected, dtype):
    assert got.dtype == dtype and got.is_contiguous() and not got.isnan().any()
    error = ((got.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    assert error < TOLERANCE[dtype], f"relative error {error:.1e}"
    # No single row is off either, which the norm over all would hide.
    rows = (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-3)
    assert rows.max() < 10 * TOLERANCE[dtype], f"relative error {rows.max():.1e} in a row"


def scales(count, seed):
    return (torch.rand(count, generator=torch.Generator().manual_seed(seed)) + 0.5).to(DEVICE)


def check_decode(
    lens, num_heads, num_kv_heads, head_dim, block_size, dtype, plan=None, cache_dtype=None, n=1, **options
):
    """n: query tokens a sequence."""
    k, v, table = paged(lens, num_kv_heads, head_dim, block_size, cache_dtype or dtype, seed=len(lens))
    q = queries(len(lens) * n, num_heads, head_dim, dtype)
    options = {name: scales(n, i) if name[1:] == "_scale" else n for i, (name, n) in enumerate(options.items())}

    def run():
        # What the output was allocated over is NaN, so that a row that nobody writes shows.
        poison = torch.full((len(q), num_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)
        del poison
        return attention_decode(q, k, v, table, int32(lens), max(*lens, 1), head_dim**-0.5, plan=plan, **options)

    got = run()
    check(got, reference(q, k, v, table, lens, **options), dtype)
    for _ in range(3):  # whichever program merges, and with counters as the last launch left them
        assert torch.equal(got, run())


def mixed(count, longest, seed=0):
    generator = random.Random(seed)
    return [generator.randint(1, longest) for _ in range(count)]


# ---- small cases, which the interpreter runs too. It cannot multiply bfloat16 matrices.


@pytest.mark.parametrize(
    "lens, heads, kv_heads, dim, block_size, dtype, plan, options",
    [
        ([1], 2, 2, 64, 16, F32, None, {}),
        ([0], 2, 2, 64, 16, F32, None, {}),
        ([1, 17, 100, 16, 0], 4, 2, 64, 16, F32, None, {}),
        ([100, 3, 1, 64, 33], 4, 2, 64, 16, F32, DecodePlan(7, 32, 4, 1, 16, False), {}),  # a tile of two blocks, cut
        ([100, 3, 1, 64, 33], 4, 2, 64, 64, F32, DecodePlan(2, 16, 4, 1, 16, False), {}),  # hardly cut
        ([100, 3, 1, 64, 33], 4, 2, 64, 64, F32, DecodePlan(30, 16, 4, 1, 16, False, 3), {}),  # to three tiles at least
        ([100, 3, 160], 4, 2, 64, 48, F32, DecodePlan(4, 32, 4, 1, 16, False), {}),  # tiles that straddle larger blocks
        (
            [90, 0, 5],
            9,
            3,
            80,
            32,
            F16,
            DecodePlan(30, 16, 4, 1, 16, False),
            {},
        ),  # no power of two anywhere, cut to tiles
        ([40, 70], 7, 1, 96, 64, F16, None, {"soft_cap": 5.0, "window": 33}),
        ([40, 70, 2], 4, 1, 64, 16, F32, DecodePlan(5, 16, 4, 1, 16, False), {"window": 20}),
        ([70], 4, 4, 64, 16, F32, DecodePlan(5, 16, 4, 1, 1, False), {"window": 1}),
        ([70], 20, 1, 64, 32, F32, DecodePlan(3, 16, 4, 2, 16, False), {"soft_cap": 30.0}),
        ([40, 0, 70], 4, 2, 64, 16, F16, DecodePlan(4, 32, 4, 1, 16, False), {"cache_dtype": F8}),
        (
            [40, 70],
            4,
            2,
            64,
            16,
            F32,
            DecodePlan(4, 16, 4, 1, 16, False),
            {"cache_dtype": F8, "k_scale": 1, "v_scale": 2},
        ),
        (
            [90, 5],
            9,
            3,
            80,
            32,
            F16,
            None,
            {"cache_dtype": F8, "k_scale": 3, "v_scale": 1, "window": 40, "soft_cap": 9.0},
        ),
        ([90, 5], 4, 2, 64, 32, F32, None, {"cache_dtype": F16, "v_scale": 2}),
    ],
)
def test_decode_small(lens, heads, kv_heads, dim, block_size, dtype, plan, options):
    check_decode(lens, heads, kv_heads, dim, block_size, dtype, plan, **options)


CUT = DecodePlan(30, 16, 4, 1, 16, False)  # to single tiles
FEW = [
    ([1], 2, 2, 64, 16, F32, 1, None, {}),
    ([2, 17, 100, 16, 33], 4, 2, 64, 16, F32, 2, None, {}),
    ([1, 17, 0, 2, 3], 4, 2, 64, 16, F32, 4, None, {}),  # lengths below n, also where nothing is cut
    ([1, 17, 100, 2], 4, 2, 64, 16, F32, 4, CUT, {}),
    (
        [65, 64, 63],
        4,
        2,
        64,
        64,
        F32,
        3,
        DecodePlan(40, 16, 4, 1, 1, False),
        {},
    ),  # a query before its sequence's last tile
    ([90, 0, 5], 9, 3, 80, 32, F16, 5, CUT, {}),  # no power of two anywhere, 15 rows
    ([90, 4], 9, 3, 80, 32, F16, 7, CUT, {}),  # 21 rows
    ([70, 3], 8, 1, 64, 48, F32, 9, DecodePlan(9, 32, 4, 1, 16, False), {}),  # tiles of 4, 4 and 1 tokens
    ([70, 3], 20, 1, 64, 32, F32, 3, DecodePlan(5, 16, 4, 2, 16, False), {"soft_cap": 30.0}),  # a tile for each token
    ([40, 70, 2], 4, 1, 64, 16, F32, 3, DecodePlan(5, 16, 4, 1, 16, False), {"window": 20}),
    ([70, 33, 1], 4, 4, 64, 16, F32, 8, CUT, {"window": 1}),
    # Partial results merged one by one, the first of which has nothing for some rows, or none of them has.
    ([70, 3], 4, 4, 64, 16, F32, 8, replace(CUT, merge_registers=1), {"window": 1}),
    ([18], 2, 2, 64, 16, F32, 20, replace(CUT, merge_registers=1), {}),
    ([65], 2, 2, 64, 16, F32, 20, CUT, {"window": 20}),  # 39 tokens in four tiles
    ([40, 70], 7, 1, 96, 64, F16, 5, None, {"soft_cap": 5.0, "window": 33}),
    ([40, 0, 70], 4, 2, 64, 16, F16, 4, DecodePlan(4, 32, 4, 1, 16, False), {"cache_dtype": F8}),
    ([40, 1], 4, 2, 64, 16, F32, 2, CUT, {"cache_dtype": F8, "k_scale": 1, "v_scale": 2, "window": 30}),
    ([90, 5], 6, 2, 64, 32, F32, 3, None, {"cache_dtype": F16, "v_scale": 2}),
]


@pytest.mark.parametrize("lens, heads, kv_heads, dim, block_size, dtype, n, plan, options", FEW)
def test_few_query_tokens_small(lens, heads, kv_heads, dim, block_size, dtype, n, plan, options):
    check_decode(lens, heads, kv_heads, dim, block_size, dtype, plan, n=n, **options)


def test_few_query_tokens_see_what_one_sees():
    """Every query gets what it gets alone with the tokens up to its own; those before the first token see nothing,
    NaN or not.
    """
    lens, n = [50, 2, 31], 3
    k, v, table = paged(lens, 2, 64, 16, F32)
    q = queries(len(lens) * n, 4, 64, F32)
    got = attention_decode(q, k, v, table, int32(lens), 50, 0.125, plan=CUT)
    for i in range(n):
        short = [max(0, length - (n - 1) + i) for length in lens]
        alone = attention_decode(q[i::n], k, v, table, int32(short), 50, 0.125, plan=CUT)
        check(got[i::n].contiguous(), alone.double(), F32)
    assert not got[n].any() and got[n + 1].any()
    q[0] = float("nan")
    mixed_up = attention_decode(q, k, v, table, int32(lens), 50, 0.125, plan=CUT)
    assert mixed_up[0].isnan().all() and torch.equal(mixed_up[1:], got[1:])


def test_bad_input(monkeypatch):
    monkeypatch.setenv("NANOVLLM_CHECK", "1")
    k, v, table = paged([20, 3], 2, 64, 16, F32)
    q, lens = queries(3, 4, 64, F32), int32([20, 3])

    def call(q=q[:2], table=table, lens=lens, bound=20):
        return attention_decode(q, k, v, table, lens, bound, 0.125)

    call()
    assert not call(lens=int32([20, 0]))[1].any()  # padding
    for wrong in (q, q[:1], q[:0]):
        with pytest.raises(
            ValueError, match=rf"q: expected \[n \* 2, .* 2 sequences of .* got \[{len(wrong)}, 4, 64\]"
        ):
            call(wrong)
    with pytest.raises(ValueError, match=r"q: expected \[n \* 0, "):
        call(table=table[:0], lens=lens[:0])
    assert call(q[:0], table[:0], lens[:0]).shape == (0, 4, 64)
    with pytest.raises(ValueError, match=r"block_table: expected int32 \[2, max_blocks\]"):
        call(table=table[:1])
    bad = table.clone()
    bad[1, 0] = 99
    with pytest.raises(ValueError, match="block_table: sequence 1 has block 99 in column 0"):
        call(table=bad)
    with pytest.raises(ValueError, match="context_lens: sequence 0 has length 20, expected 0 to 19"):
        call(bound=19)
    with pytest.raises(ValueError, match="context_lens: sequence 1 has length -3"):
        call(lens=int32([20, -3]))


def test_large_logits():
    lens = [60, 33]
    k, v, table = paged(lens, 2, 64, 16, F32, scale=60.0)
    q = queries(2, 4, 64, F32) * 60
    got = attention_decode(q, k, v, table, int32(lens), 60, 64**-0.5, plan=DecodePlan(9, 16, 4, 1, 16, False))
    check(got, reference(q, k, v, table, lens), F32)


# ---- a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("heads, kv_heads, block_size", [(16, 8, 256), (9, 3, 16), (14, 2, 64), (8, 8, 1024)])
def test_decode(dim, dtype, heads, kv_heads, block_size):
    check_decode(mixed(3, 2000), heads, kv_heads, dim, block_size, dtype)
    check_decode(mixed(70, 1500, seed=1), heads, kv_heads, dim, block_size, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dim, dtype", [(64, BF16), (80, F16), (96, BF16), (128, BF16), (128, F32), (256, BF16), (256, F32)]
)
@pytest.mark.parametrize("heads, kv_heads, block_size", [(16, 8, 256), (9, 3, 16)])
def test_decode_with_a_float8_cache(dim, dtype, heads, kv_heads, block_size):
    options = {"cache_dtype": F8, "k_scale": 1, "v_scale": kv_heads}
    check_decode(mixed(3, 2000), heads, kv_heads, dim, block_size, dtype, **options)
    check_decode([*mixed(70, 1500, seed=1), 0], heads, kv_heads, dim, block_size, dtype, **options)
    check_decode(mixed(300, 900, seed=1), heads, kv_heads, dim, block_size, dtype, cache_dtype=F8)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"soft_cap": 30.0}, {"window": 100}, {"soft_cap": 20.0, "window": 300}])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_options(options, dtype):
    for count in (2, 90, 250):
        check_decode(mixed(count, 2000), 16, 8, 128, 256, dtype, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "n, heads, kv_heads, dim, block_size, dtype",
    [
        (2, 16, 8, 128, 256, BF16),
        (4, 32, 8, 128, 256, BF16),
        (8, 32, 8, 128, 16, BF16),
        (8, 16, 2, 128, 256, F16),
        (3, 9, 3, 80, 16, BF16),
        (5, 14, 2, 64, 64, F16),
        (4, 16, 8, 256, 256, BF16),
        (20, 8, 8, 64, 1024, F32),
        (3, 16, 4, 256, 16, F32),
    ],
)
def test_few_query_tokens(n, heads, kv_heads, dim, block_size, dtype):
    check_decode([*mixed(3, 2000), 1], heads, kv_heads, dim, block_size, dtype, n=n)
    check_decode([*mixed(70, 900, seed=1), 0], heads, kv_heads, dim, block_size, dtype, n=n, window=300)
    check_decode([9000, 5], heads, kv_heads, dim, block_size, dtype, n=n, cache_dtype=F8, k_scale=1, v_scale=kv_heads)


@pytest.mark.gpu
def test_very_different_lengths():
    check_decode([40000], 16, 8, 128, 256, BF16)
    check_decode([40000, 1, 300, 17, 0], 16, 8, 128, 256, BF16)
    check_decode([5] * 100 + [20000] + [7] * 150, 16, 8, 128, 256, BF16)
    check_decode(mixed(3, 900), 71, 1, 64, 256, BF16)
    check_decode([0] * 40, 16, 8, 128, 256, BF16)
    check_decode(mixed(5, 900), 16, 8, 128, 256, F16, cache_dtype=BF16)


@pytest.mark.gpu
def test_large_queries_and_a_float8_cache():
    """Queries beyond float16's range, which the products are computed in."""
    lens = [900, 33]
    k, v, table = paged(lens, 2, 128, 64, F8, scale=1e-2)
    q = (queries(2, 4, 128, F32) * torch.tensor([1e6, 1e-9], device=DEVICE)[:, None, None]).to(BF16)
    got = attention_decode(q, k, v, table, int32(lens), 900, 128**-0.5)
    check(got, reference(q, k, v, table, lens), BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("count, n", [(1, 1), (3, 1), (100, 1), (1, 4), (5, 3)])
def test_graph_replay(count, n, warm):
    """A graph replays with other lengths and tables, also where the first launch on its stream is the captured one."""
    longest, heads, kv_heads = 3000, 16, 8
    k, v, _ = paged([longest] * count, kv_heads, 128, 256, BF16)
    table = torch.zeros(count, -(-longest // 256), dtype=torch.int32, device=DEVICE)
    lens, q = int32([1] * count), queries(count * n, heads, 128, BF16)

    def run():
        return attention_decode(q, k, v, table, lens, longest, 128**-0.5)

    run()  # compiles
    stream = torch.cuda.Stream()
    if warm:
        with torch.cuda.stream(stream):
            run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    for seed in range(4):
        new_lens = mixed(count, longest, seed)
        new_k, new_v, new_table = paged(new_lens, kv_heads, 128, 256, BF16, seed)
        k[: len(new_k)], v[: len(new_v)] = new_k, new_v
        width = min(table.shape[1], new_table.shape[1])
        table[:, :width] = new_table[:, :width]
        lens.copy_(int32(new_lens))
        expected = reference(q, k, v, table, new_lens)
        for _ in range(3):
            graph.replay()
            check(out, expected, BF16)


# ---- compiled here, for GPUs that need not be here


def compiled(kernel, constants, dtype, capability, warps, stages):
    """The kernel as a wrapper launches it: aligned pointers, strides that are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if dtype == "fp8":
        dtype, words = "bf16", "i16"
    else:
        words = dtype
    types = {
        **dict.fromkeys(("shared_lens_ptr", "shared_counts_ptr", "groups_ptr", "group_rows_ptr"), "*i32"),
        **dict.fromkeys(("shared_acc_ptr", "shared_ml_ptr"), "*fp32"),
        "k_ptr": "*" + words,
        "v_ptr": "*" + words,
        "table_ptr": "*i32",
        "lens_ptr": "*i32",
        "starts_ptr": "*i32",
        "counters_ptr": "*i32",
        "acc_ptr": "*fp32",
        "ml_ptr": "*fp32",
        "k_scale_ptr": "*fp32",
        "v_scale_ptr": "*fp32",
        "cos_sin_ptr": "*fp32",
    }
    signature, fixed, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], fixed[(i,)] = "constexpr", constants[name]
        elif name in ("scale", "eps"):
            signature[name] = "fp32"
        elif name.endswith("_ptr"):
            signature[name] = types.get(name, "*" + dtype)
        else:
            signature[name] = "i32"
        if (
            not parameter.do_not_specialize
            and not parameter.do_not_specialize_on_alignment
            and signature[name][0] in "*i"
        ):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, fixed, attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": stages}
    )


def fused_shuffles(ptx):
    """Additions of another lane's value that also multiply: two lanes of one sum would round differently, and race."""
    shuffled, products, count = set(), set(), 0
    for line in ptx.splitlines():
        operation, _, rest = line.strip().partition(" ")
        to, *operands = re.findall(r"%\w+", rest) or [None]
        if operation.startswith("shfl.") or (operation == "mov.b32" and operands and operands[0] in shuffled):
            shuffled.add(to)
        elif operation == "mul.f32":
            products.add(to)
        elif operation == "fma.rn.f32":
            count += operands[-1] in shuffled
        elif operation == "add.f32":
            count += any(x in shuffled and y in products for x, y in (operands, operands[::-1]))
    return count


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


SHAPES = [(64, 3), (80, 1), (96, 4), (128, 2), (128, 7), (256, 4)]
CASES = [(dtype, *shape, 90) for dtype in ("bf16", "fp32", "fp8") for shape in SHAPES]
CASES += [
    (*shape, capability)
    for shape in (("bf16", 128, 2), ("bf16", 256, 4), ("fp32", 64, 3), ("fp8", 128, 2))
    for capability in (80, 100)
]
# A few bytes of stack, outside of the loop, cost nothing that was measured; a spilling loop takes hundreds.
STACK = 64


@pytest.mark.parametrize(
    "dtype, dim, group, capability, rotate",
    [(*case, False) for case in CASES] + [(*CASES[i], True) for i in (2, 3, 5, 6, 9, 15, 18, 19, 23)],
)
def test_decode_compiles_without_spills(dtype, dim, group, capability, rotate, tmp_path):
    """Each plan; of those that differ in nothing but their pieces, the first and the last. With `rotate` none for
    middling batches.
    """
    plans = {}
    for num_seqs in (1, 4, 8, 300) if rotate else (1, 4, 8, 70, 300):
        plan = plan_decode(
            num_seqs, 8, group, dim, {"fp32": 4, "bf16": 2, "fp8": 1}[dtype], dtype == "fp32", 132, rotate
        )
        plans.setdefault(replace(plan, pieces=1, least=1), []).append((num_seqs, plan))
    for num_seqs, plan in (batch for batches in plans.values() for batch in (batches[0], batches[-1])[: len(batches)]):
        dim_pad, group_pad = triton.next_power_of_2(dim), triton.next_power_of_2(group)
        constants = dict(
            PIECES=plan.pieces, LEAST=plan.least, SEQS_PAD=padded_count(num_seqs), QUERIES=1, GROUP=group,
            GROUP_PAD=group_pad,
            HEAD_DIM=dim, DIM_PAD=dim_pad, BLOCK_SIZE=256, TILE=plan.tile, CHUNK=plan.chunk(group_pad * dim_pad),
            SOFT_CAP=0.0, WINDOW=0, STAGES=plan.stages, FP8=dtype == "fp8", K_SCALES=1, V_SCALES=2,
            DEPENDENT=capability >= 90,
            ROTATE=rotate, NORM=rotate, RELEASE=rotate and capability >= 90, SHARED=False,
            EARLY=plan.early,
        )  # fmt: skip
        binary = compiled(decode_kernel, constants, dtype, capability, plan.warps, plan.stages)
        assert stack(binary, tmp_path) <= STACK, plan
        assert binary.metadata.shared <= 99 * 1024
        assert not fused_shuffles(binary.asm["ptx"])
        if dtype != "fp32":
            assert "cp.async.cg.shared.global [ %r" in binary.asm["ptx"]  # 16 bytes at a time, and asynchronous


FEW_CASES = [
    ("bf16", 128, 2, 4, 90), ("bf16", 128, 4, 8, 90), ("bf16", 128, 8, 8, 90), ("bf16", 80, 9, 3, 90), ("bf16", 256, 4,
    8, 90),
    ("fp32", 64, 3, 5, 90), ("fp32", 128, 4, 8, 90), ("fp32", 256, 4, 8, 90), ("fp8", 128, 4, 8, 90), ("fp8", 256, 2, 4,
    90),
    *((dtype, 128, 4, 8, capability) for dtype in ("bf16", "fp32", "fp8") for capability in (80, 100)),
]  # fmt: skip


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("dtype, dim, group, n, capability", FEW_CASES)
def test_few_query_tokens_compile_without_spills(dtype, dim, group, n, capability, window, tmp_path):
    """As above; with 32 rows a tile, and where these are not all, with two."""
    rows = group * tokens_together(n, group)
    tiles = -(-n * group // rows)
    plans = {}
    for num_seqs in (1, 8, 70, 300):
        plan = plan_decode(
            num_seqs, 8 * tiles, rows, dim, {"fp32": 4, "bf16": 2, "fp8": 1}[dtype], dtype == "fp32", 132, False
        )
        plans.setdefault(replace(plan, pieces=1, least=1), (num_seqs, plan))
    for num_seqs, plan in plans.values():
        dim_pad, group_pad = triton.next_power_of_2(dim), triton.next_power_of_2(rows)
        constants = dict(
            PIECES=plan.pieces, LEAST=plan.least, SEQS_PAD=padded_count(num_seqs), QUERIES=n, GROUP=group,
            GROUP_PAD=group_pad,
            HEAD_DIM=dim, DIM_PAD=dim_pad, BLOCK_SIZE=256, TILE=plan.tile, CHUNK=plan.chunk(group_pad * dim_pad),
            SOFT_CAP=0.0,
            WINDOW=window, STAGES=plan.stages, FP8=dtype == "fp8", K_SCALES=1, V_SCALES=2, DEPENDENT=capability >= 90,
            ROTATE=False, NORM=False, RELEASE=capability >= 90, SHARED=False, EARLY=False,
        )  # fmt: skip
        binary = compiled(decode_kernel, constants, dtype, capability, plan.warps, plan.stages)
        assert stack(binary, tmp_path) <= STACK, plan
        assert binary.metadata.shared <= 99 * 1024
        assert not fused_shuffles(binary.asm["ptx"])
        if dtype != "fp32":
            assert "cp.async.cg.shared.global [ %r" in binary.asm["ptx"]


def test_tokens_of_a_tile():
    assert [tokens_together(*case) for case in ((2, 2), (8, 4), (8, 8), (5, 9), (3, 71), (40, 1))] == [
        2,
        8,
        4,
        3,
        1,
        32,
    ]


def test_in_the_interpreter():
    check_interpreted(__file__)


# Only what can run here is collected, so that nothing is reported as skipped.
_HERE = {
    "test_in_the_interpreter": not GPU and not INTERPRETED,
    "test_decode_compiles_without_spills": not INTERPRETED,
    "test_few_query_tokens_compile_without_spills": not INTERPRETED,
    "test_tokens_of_a_tile": not INTERPRETED,
    **{
        name: GPU or INTERPRETED
        for name in (
            "test_decode_small",
            "test_few_query_tokens_small",
            "test_few_query_tokens_see_what_one_sees",
            "test_bad_input",
            "test_large_logits",
        )
    },  # fmt: skip
}
for _name in [name for name in globals() if name.startswith("test_")]:
    if not _HERE.get(_name, GPU):
        del globals()[_name]


def test_a_table_without_blocks():
    """Only sequences without tokens can have it: there is nothing to read, and no launch."""
    k, v, table = paged([3, 1], 2, 64, 16, F32)
    lens = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    out = attention_decode(torch.ones(2, 4, 64, device=DEVICE), k, v, table[:, :0], lens, 0, 0.125)
    assert out.shape == (2, 4, 64) and not out.any()
