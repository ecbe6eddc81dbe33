"""What the tests of paged attention share: a reference in float64, compiled launches.

With a GPU the tests run there at real shapes, else in Triton's interpreter on small ones (`tests/test_interpreted.py`).
The interpreter cannot multiply bfloat16 matrices.
"""

import functools
import random
import re

import torch

from nanovllm.kernels.triton.attention import decode, prefill
from nanovllm.kernels.triton.attention.decode_plan import DecodePlan
from tests.kernels import paged_cache
from tests.kernels.flat import flat
from tests.kernels.triton.common import DEVICE
from tests.kernels.triton.compiled import compiled, launches_of

F32, F16, BF16, F8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
TOLERANCE = {F32: 3e-6, F16: 1e-3, BF16: 6e-3}

attention_prefill = flat("attention_prefill", prefill.attention_prefill)
attention_decode = flat("attention_decode", decode.attention_decode)
attention_decode_shared = flat("attention_decode_shared", decode.attention_decode_shared)
qk_norm_rope_attention = flat("qk_norm_rope_attention", decode.qk_norm_rope_attention)
qk_norm_rope_attention_shared = flat("qk_norm_rope_attention_shared", decode.qk_norm_rope_attention_shared)


def cut(pieces, tile=16, stages=1, merge_registers=16, **options):
    """A plan for a small batch."""
    return DecodePlan(pieces, tile, 4, stages, merge_registers, False, **options)


SINGLE_TILES = cut(30)
paged = functools.partial(paged_cache.paged, device=DEVICE)


def reference(q, k_cache, v_cache, table, lens, runs=None, window=None, soft_cap=None, k_scale=None, v_scale=None):
    """Float64, one sequence at a time: the shape of q.

    runs: the query tokens of each sequence, its last tokens; the same number for each unless given. A query before the
    first token of its sequence gets zeros.
    """
    block_size, kv_heads, head_dim = k_cache.shape[1:]
    out, start = torch.zeros(q.shape, dtype=torch.float64, device=q.device), 0
    for i, length in enumerate(lens):
        rows = slice(start, start + (runs[i] if runs else len(q) // len(lens)))
        start = rows.stop
        position = torch.arange(length - (rows.stop - rows.start), length, device=q.device)[:, None]
        first = 0 if window is None else max(0, length - (rows.stop - rows.start) + 1 - window)
        token = torch.arange(first, length, device=q.device)
        slots = table[i, token // block_size].long() * block_size + token % block_size
        k, v = (
            cached_rows(cache, slots).double() * (1 if scale is None else scale.expand(kv_heads)[:, None].double())
            for cache, scale in ((k_cache, k_scale), (v_cache, v_scale))
        )
        scores = torch.einsum("nhgd,thd->hgnt", q[rows].double().unflatten(1, (kv_heads, -1)), k) * head_dim**-0.5
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        hidden = token > position
        if window is not None:
            hidden |= token <= position - window
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1).masked_fill_(position < 0, 0)
        out[rows] = torch.einsum("hgnt,thd->nhgd", weights, v).flatten(1, 2)
    return out


def cached_rows(cache, slots):
    """The tokens in `slots` of a cache: [tokens, num_kv_heads, head_dim]. PyTorch does not index float8 everywhere."""
    rows = cache.flatten(0, 1)
    return rows.view(torch.uint8)[slots].view(F8) if cache.dtype == F8 else rows[slots]


def queries(num_tokens, num_heads, head_dim, dtype, seed=0):
    """A slice of a wider tensor, as the QKV projection gives."""
    wide = torch.randn(num_tokens, num_heads + 2, head_dim, generator=torch.Generator().manual_seed(seed))
    return wide.to(dtype).to(DEVICE)[:, :num_heads]


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def starts_of(runs):
    """cu_seqlens_q."""
    return int32([sum(runs[:i]) for i in range(len(runs) + 1)])


def scales(count, seed):
    return (torch.rand(count, generator=torch.Generator().manual_seed(seed)) + 0.5).to(DEVICE)


def with_scales(options):
    """`k_scale` and `v_scale`, given as their number of elements, as tensors."""
    return {name: scales(n, i) if name[1:] == "_scale" else n for i, (name, n) in enumerate(options.items())}


def mixed(count, longest, seed=0):
    generator = random.Random(seed)
    return [generator.randint(1, longest) for _ in range(count)]


def check(got, expected, dtype, rows=10, floor=1e-3):
    """The error over all, and that of no row above `rows` tolerances: the norm over all would hide a single row.

    floor: the least norm that a row's error is divided by.
    """
    assert got.dtype == dtype and got.is_contiguous() and not got.isnan().any()
    error = ((got.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    assert error < TOLERANCE[dtype], f"relative error {error:.1e}"
    of_rows = (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(floor)
    worst = of_rows.max().item() if of_rows.numel() else 0.0
    assert worst < rows * TOLERANCE[dtype], f"relative error {worst:.1e} in a row"


def poison(q):
    """The allocator's next tensor like q is NaN, so that a row that no program writes shows."""
    torch.full(q.shape, float("nan"), dtype=q.dtype, device=q.device)


def given_bits(cache):
    return cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[cache.element_size()])


def compile_call(call, capability=90, **constants):
    """(kernel, binary) of each launch of a call with CPU tensors, compiled for a GPU of this capability.

    constants: those that differ from the launch's.
    """
    constants = {"DEPENDENT": capability >= 90, **constants}
    for _, kernel, args, options in launches_of([("attention", call)]):
        named = {p.name: value for p, value in zip(kernel.params, args)}
        changed = {name: value for name, value in constants.items() if name in named}
        yield kernel, compiled(kernel, (named | changed).values(), options, capability)


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
