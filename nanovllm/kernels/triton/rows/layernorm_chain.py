"""gelu(dropout(layer_norm(x) + residual)) in one kernel: one read of x and residual, one write."""

import struct

import torch
import triton
import triton.language as tl

from nanovllm.kernels.extra.layernorm_residual_dropout_gelu import DROPOUT_ROUNDS, dropout_counts
from nanovllm.kernels.triton.device_math import INTERPRETED, activation, round2, rounded, to_dtype, wide
from nanovllm.kernels.triton.early_start import are_constant, can_launch_early
from nanovllm.kernels.triton.launch_arguments import adjacent, matrix_of, next_power_of_2, warps_for
from nanovllm.kernels.triton.rows.activation import gelu_kind
from nanovllm.kernels.triton.rows.pieces import cut_of_few, cut_of_many, layer_normed, layer_statistics, load_pieces
from nanovllm.kernels.triton.rows.plans import POLICY, RowPolicy
from nanovllm.kernels.triton.sampling.philox import philox_halves

_MAX_BLOCK = 32768
_MOST_PIECES = 5
_MOST_AHEAD = 16  # random halves of a thread
_ROUNDS = tl.constexpr(DROPOUT_ROUNDS)
MOST_PACKED = 0x7C00
"""The largest limit of dropout that is compared in pairs: infinity in float16."""


@triton.jit
def _kept(v, halves, limit):
    """16-bit v where the low 15 bits of its random half are at least `limit`, else 0; limit is at most MOST_PACKED.

    Two instructions for two elements. Without their signs, float16 numbers compare as their bits do. The unordered
    comparison takes NaN, whose bits are above those of infinity, for larger.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; abs.f16x2 t, $2; set.geu.u32.f16x2 t, t, $3; and.b32 $0, $1, t; }",
        "=r,r,r,r", [v, halves, limit.to(tl.uint16)], dtype=v.dtype, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _scaled(v, high, low, LOW: tl.constexpr):
    """bfloat16 v * (high + low) in at most two instructions for two elements; with float32 it takes seven.

    high and low become bfloat16. low is positive if LOW, so that infinity stays, else 0. The product with low is
    rounded too. For five probabilities in six that changes no result. For the others it changes the results of 1 to 5
    of the 128 significands of v, by one unit in the last place.
    """
    if LOW:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; mov.b32 t, 0x80008000; fma.rn.bf16x2 t, $1, $3, t; fma.rn.bf16x2 $0, $1, $2, t; }",
            "=r,r,r,r", [v, high.to(v.dtype), low.to(v.dtype)], dtype=v.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; mov.b32 t, 0x80008000; fma.rn.bf16x2 $0, $1, $2, t; }",
            "=r,r,r", [v, high.to(v.dtype)], dtype=v.dtype, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _random(piece, row, seed_low, seed_high, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """16 random bits for each element of a piece of a row."""
    return philox_halves(
        piece * (BLOCK // 8), row, seed_low.to(tl.uint32), seed_high.to(tl.uint32), BLOCK, VECTOR, _ROUNDS
    )


@triton.jit(do_not_specialize=["seed_low", "seed_high", "limit"])
def _chain_kernel(
    x, residual, weight, bias, y, x_stride, residual_stride, size, eps, limit, scale, scale_low, seed_low, seed_high,
    DROPOUT: tl.constexpr, PACKED: tl.constexpr, LOW: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
    PIECES: tl.constexpr, EVEN: tl.constexpr, MANY: tl.constexpr, AHEAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """gelu(dropout(layer_norm(x) + residual)) of one row a program.

    limit: dropout keeps an element if the low 15 bits of its random half are at least this. EVEN: PIECES * BLOCK =
    size, always so with more than one piece. MANY: x, residual and y do not stay in the cache, and with several pieces
    weight and bias are loaded at their use. AHEAD: the random bits are computed while the row is on its way. PACKED:
    two 16-bit elements at a time; the factor of bfloat16 is then scale + scale_low, as in `_scaled`. DEPENDENT:
    launched before the kernel that writes x has ended.
    """
    dtype: tl.constexpr = y.dtype.element_ty
    VECTOR: tl.constexpr = 128 // dtype.primitive_bitwidth  # elements side by side in a thread
    LATE: tl.constexpr = MANY and PIECES > 1
    index = tl.program_id(0)
    row = index.to(tl.int64)
    col = tl.arange(0, BLOCK)
    if not LATE:
        weights = load_pieces(weight, col, size, BLOCK, PIECES, EVEN, False)
        biases = load_pieces(bias, col, size, BLOCK, PIECES, EVEN, False)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    loaded = load_pieces(x + row * x_stride, col, size, BLOCK, PIECES, EVEN, MANY)
    others = load_pieces(residual + row * residual_stride, col, size, BLOCK, PIECES, EVEN, MANY)
    random = ()
    if AHEAD:
        for i in tl.static_range(PIECES):
            random = random + (_random(i, index, seed_low, seed_high, BLOCK, VECTOR),)
    statistics = layer_statistics(x + row * x_stride, loaded, col, size, eps, BLOCK, PIECES, EVEN)
    for i in tl.static_range(PIECES):
        place = i * BLOCK + col
        if not LATE:
            w, b = weights[i], biases[i]
        else:
            # Many rows hide these loads from L2. Kept in registers, they would cost every third program.
            w, b = tl.load(weight + place), tl.load(bias + place)
        v = layer_normed(loaded[i], statistics, not LATE or dtype == tl.float32) * wide(w) + wide(b)
        v = to_dtype(rounded(v, dtype) + others[i].to(tl.float32), dtype)
        if DROPOUT:
            if AHEAD:
                halves = random[i]
            else:
                halves = _random(i, index, seed_low, seed_high, BLOCK, VECTOR)
            if PACKED and dtype == tl.bfloat16:
                v = wide(_scaled(_kept(v, halves, limit), scale, scale_low, LOW))
            elif PACKED:
                v = round2(wide(_kept(v, halves, limit)) * scale, dtype)
            else:
                v = tl.where((halves & 0x7FFF).to(tl.int32) >= limit, round2(wide(v) * scale, dtype), 0.0)
        else:
            v = wide(v)
        v = to_dtype(activation(v, KIND, dtype), dtype)
        if EVEN:
            tl.store(y + row * size + place, v, cache_modifier=".cs" if MANY else "")
        else:
            tl.store(y + row * size + place, v, place < size, cache_modifier=".cs" if MANY else "")


def layernorm_residual_dropout_gelu(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5,
    p: float = 0.0, seed: int = 0, approximate: str = "none", policy: RowPolicy = POLICY,
) -> torch.Tensor:  # fmt: skip
    """The op `layernorm_residual_dropout_gelu`. Takes row-strided matrices; copies other non-contiguous tensors.

    Raises:
        ValueError: p outside [0, 1], an unknown approximation, or rows of more than 32768 elements.
    """
    kind = gelu_kind(approximate)
    limit, scale = dropout_counts(p)
    size = x.shape[-1]
    block = max(8, next_power_of_2(size))  # a counter of dropout serves eight elements
    if block > _MAX_BLOCK:
        raise ValueError(f"x: expected rows of at most {_MAX_BLOCK} elements, not {size}")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    weight, bias = adjacent(weight), adjacent(bias)
    x, rows, x_stride = matrix_of(x)
    residual, _, residual_stride = matrix_of(residual)
    if rows:
        many = rows > policy.few_rows
        cut = cut_of_many(size, _MOST_PIECES) if many else cut_of_few(size)
        pieces, warps = cut or (1, warps_for(block, 16 if many else 8))
        block = block if pieces == 1 else size // pieces
        early = can_launch_early(x) and are_constant(weight, bias)
        packed = not INTERPRETED and x.element_size() == 2 and limit <= MOST_PACKED
        low = 0.0
        if packed and x.dtype == torch.bfloat16:
            scale, low = split_factor(scale)
        # Measured on an H200: 3 to 5 % faster for float32 rows of 1024, not for 16 bits: fewer programs are resident.
        ahead = limit > 0 and many and x.element_size() == 4 and pieces * block <= _MOST_AHEAD * 32 * warps
        _chain_kernel[(rows,)](
            x, residual, weight, bias, y, x_stride, residual_stride, size, eps, limit, scale, low,
            _signed(seed), _signed(seed >> 32), limit > 0, packed, low > 0, kind, block, pieces,
            pieces * block == size, many, ahead, early, num_warps=warps, launch_pdl=early,
        )  # fmt: skip
    return y


def split_factor(scale: float) -> tuple[float, float]:
    """A factor of at least 1 as the bfloat16 below it, and the rest, which the kernel rounds to bfloat16."""
    (bits,) = struct.unpack("I", struct.pack("f", scale))
    (high,) = struct.unpack("f", struct.pack("I", bits & 0xFFFF0000))
    return high, max(scale - high, 0.0)


def _signed(word: int) -> int:
    """The low 32 bits of an integer as int32, so that the kernel's signature is the same for all seeds."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word
