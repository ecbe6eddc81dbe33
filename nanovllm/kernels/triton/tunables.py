"""What can be tuned: for each choice of a kernel, what it may depend on and what a plan must fulfil to launch at all.

The built-in choices stay where they are, beside the kernels; a kernel takes them for every key that was not measured.
What is a sensible plan, and so worth trying, is the business of `nanovllm.tune`. Classes and kernels are named, not
imported.

The same request must give the same bits where a kernel says so. Only prefill attention does, for a sequence whatever
is beside it: its key has nothing that counts a batch. Decode attention cuts a sequence by the lengths beside it, and
products and norms choose by the number of rows, with or without measurements. Elementwise kernels compute the same
bits whatever the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nanovllm.kernels.op.tunable import Tunable, bucket
from nanovllm.kernels.triton.launch_arguments import cdiv

Key = Mapping[str, Any]

_ROWWISE = "nanovllm.kernels.triton.rows"
_GEMM = "nanovllm.kernels.triton.gemm"
_ATTENTION = "nanovllm.kernels.triton.attention"
_MOST_ELEMENTS = 1 << 20
"""The most elements of a tile in Triton."""
# Of a program of the product for Hopper: columns of a tile, rows of the weight, and shared memory on such a GPU.
_HOPPER_TILE, _HOPPER_ROWS, _HOPPER_SHARED = 64, 64, 227 << 10


# --------------------------------------------------------------------------------------------------- rows in registers

_ROWS = {"rows": int, "size": int, "dtype": torch.dtype}


def _refuse_rows(plan: Any, key: Key) -> str | None:
    elements = plan.rows * bucket(key["size"])
    return f"rows: a program of {elements} elements, more than {_MOST_ELEMENTS}" if elements > _MOST_ELEMENTS else None


def _row_kernel(name: str, plan: str, *kernels: str) -> Tunable:
    refuse = _refuse_rows if plan == "RowPlan" else lambda plan, key: None
    return Tunable(
        name, _ROWS, (f"{_ROWWISE}.plans:{plan}",), tuple(f"{_ROWWISE}.{k}" for k in kernels), refuse, batch=("rows",),
        rounded={"rows": bucket},
    )  # fmt: skip


# of many rows, where a plan's warps and one row a program allow it; of few by layer_norm, with any plan
_PIECES = "pieces:norm_pieces_kernel"

RMS_NORM = _row_kernel("rms_norm", "RowPlan", "norm:_rms_norm_kernel", _PIECES)
ADD_RMS_NORM = _row_kernel("add_rms_norm", "WarpPlan", "norm:_add_rms_norm_kernel")
LAYER_NORM = _row_kernel("layer_norm", "WarpPlan", "norm:_layer_norm_kernel", _PIECES)
SOFTMAX = _row_kernel("softmax", "RowPlan", "softmax:_softmax_kernel")

# --------------------------------------------------------------------------------------------------------- elementwise

_ELEMENTS = {"elements": int, "width": int, "dtype": torch.dtype}
"""elements: of the result, as a bucket; width: of a row, as a bucket; all elements where rows make no difference."""


def _elementwise(name: str, kernel: str, *more: str) -> Tunable:
    """more: names of further texts in the key."""
    key = {**_ELEMENTS, **dict.fromkeys(more, str)}
    plans, kernels = (f"{_ROWWISE}.plans:BlockPlan",), (f"{_ROWWISE}.{kernel}",)
    rounded = {"elements": bucket, "width": bucket}
    return Tunable(name, key, plans, kernels, batch=("elements", "width"), rounded=rounded)


ACTIVATE_AND_MUL = _elementwise("activate_and_mul", "activation:activate_and_mul_kernel", "kind")
ACTIVATION = _elementwise("fused_activation", "activation:activation_kernel", "kind")
ADD_ACTIVATION = _elementwise("fused_add_gelu", "elementwise:_add_activation_kernel", "kind")
MUL_ADD = _elementwise("element_wise_mul_add", "elementwise:_mul_add_kernel")
EMBEDDING = _elementwise("embedding", "move_rows:_embedding_kernel")


def elements_key(rows: int, size: int, dtype: torch.dtype) -> tuple[int, int, torch.dtype]:
    return bucket(rows * size), bucket(size), dtype


# ----------------------------------------------------------------------------------------------------- heads of a token

_HEADS = {"tokens": int, "q_heads": int, "kv_heads": int, "head_dim": int, "dtype": torch.dtype, "norm": bool}


def _rotary(name: str) -> Tunable:
    kernels = tuple(f"{_ROWWISE}.rotary_kernels:{kernel}" for kernel in ("rotary_kernel", "rotary_tokens_kernel"))
    return Tunable(
        name, _HEADS, (f"{_ROWWISE}.plans:HeadPlan",), kernels, batch=("tokens",), rounded={"tokens": bucket}
    )


ROTARY = _rotary("rotary")
ROTARY_STORE = _rotary("rotary_store")

# ---------------------------------------------------------------------------------------- products


def _refuse_product(plan: Any, key: Key) -> str | None:
    if key["dtype"].itemsize != 2:
        return "dtype: only products of 16-bit numbers can be configured"
    if plan.splits > cdiv(key["k"], plan.block_k):
        return f"splits: more than the blocks of {plan.block_k} that k = {key['k']} has"
    if type(plan).__name__ == "StreamPlan":
        if plan.tokens < key["m"]:
            return f"tokens: fewer than m = {key['m']}"
        if plan.tokens > 1 and (plan.tokens < 16 or plan.rows < 16 or plan.block_k < 16):
            return "tokens, rows, block_k: tensor cores take 16 or more of each"
        if key["gated"] and plan.rows < 2:
            return "rows: a gate and its up projection are two"
        return None
    if plan.block_m < 16 or plan.block_n < 16 or plan.block_k < 16:
        return "block_m, block_n, block_k: tensor cores take 16 or more of each"
    if plan.tma and not key["tma"]:
        return "tma: these tensors are not aligned for it, or the GPU has none"
    if plan.tma and (plan.block_m > 256 or plan.block_n > (128 if key["gated"] else 256) or plan.block_k > 256):
        return "block_m, block_n, block_k: a box of the Tensor Memory Accelerator has at most 256 (gated: 2 x 128) rows"
    if plan.flatten and (not plan.tma or plan.splits > 1):
        return "flatten: needs tma and no splits"
    return None


PRODUCT = Tunable(
    "product",
    {"m": int, "n": int, "k": int, "dtype": torch.dtype, "gated": bool, "tma": bool},
    (f"{_GEMM}.product_plan:StreamPlan", f"{_GEMM}.product_plan:TilePlan"),
    tuple(f"{_GEMM}.{name}" for name in (
        "stream_kernel:stream_kernel", "stream_kernel:add_splits", "tiled_kernel:tile_kernel", "tiled_kernel:tma_kernel"
    )),
    _refuse_product,
    batch=("m",), rounded={"m": lambda m: bucket(m, steps=4)},
)  # fmt: skip
"""[m, k] x [n (gated: 2 n), k]^T with a row-major weight. m is a bucket, beyond 256 of a quarter of a power of two:
how the last wave of tiles fills the GPU decides there."""


def product_key(m: int, n: int, k: int, dtype: torch.dtype, gated: bool, tma: bool) -> tuple[Any, ...]:
    return bucket(m, steps=4), n, k, dtype, gated, tma


def _refuse_small_product(plan: Any, key: Key) -> str | None:
    if key["gated"] and plan.rows < 2:
        return "rows: a gate and its up projection are two"
    if type(plan).__name__ == "VectorPlan":
        lane = 16 // key["dtype"].itemsize
        return f"block: at least the {lane} elements of a 16-byte load" if plan.block < lane else None
    if key["dtype"].itemsize != 2 or key["tokens"] == 1:
        return "plan: tensor cores need 16-bit numbers and two tokens or more"
    if plan.rows < 8 or plan.depth < 16:
        return "rows, depth: tensor cores take 8 rows and 16 columns or more"
    if plan.late and key["dtype"] != torch.bfloat16:
        return "late: float16 could overflow before the norm"
    return "split: a warp each, at most 32" if plan.split > 32 else None


SMALL_PRODUCT = Tunable(
    "small_product",
    {"tokens": int, "outputs": int, "size": int, "dtype": torch.dtype, "gated": bool, "norm": bool},
    (f"{_GEMM}.small_product_plan:VectorPlan", f"{_GEMM}.small_product_plan:MatrixPlan"),
    (f"{_GEMM}.small_product_kernels:vector_kernel", f"{_GEMM}.small_product_kernels:matrix_kernel"),
    _refuse_small_product,
    batch=("tokens",),
)


def _refuse_hopper_product(plan: Any, key: Key) -> str | None:
    if key["dtype"] not in (torch.bfloat16, torch.float16) or key["size"] % _HOPPER_TILE:
        return f"dtype, size: only rows of whole tiles of {_HOPPER_TILE} 16-bit numbers"
    if key["gated"] and key["outputs"] % 8:
        return f"outputs: {key['outputs']} are not groups of eight, in which the gate and the up projection alternate"
    if plan.chunks & (plan.chunks - 1):
        return "chunks: expected a power of two"
    if plan.slots == 1 and plan.rounds > 1:
        return "slots: one that is filled again needs another beside it"
    if plan.splits > 1 and not key["split"]:
        return "splits: nothing adds the sums of parts for this call"
    columns = _HOPPER_TILE * plan.chunks * plan.slots * plan.rounds
    if plan.splits * columns < key["size"]:
        covered = f"{plan.splits} x {columns} columns of {key['size']}, the others are left out"
        return f"splits, chunks, slots, rounds: {covered}"
    if (plan.splits - 1) * columns >= key["size"]:
        return "splits: programs without columns"
    if plan.block not in (128, 256):
        return f"block: expected 128 or 256 tokens, not {plan.block}"
    tokens = hopper_product_tokens(key["tokens"], plan.block)
    # Rows of the weight and tokens, in lines of 128 bytes, and a barrier a slot.
    shared = plan.slots * (plan.chunks * (_HOPPER_ROWS + tokens) * 2 * _HOPPER_TILE + 8)
    if shared > _HOPPER_SHARED:
        return f"chunks, slots: more than the {_HOPPER_SHARED >> 10} KiB of shared memory that a program may have"
    return None


HOPPER_PRODUCT = Tunable(
    "hopper_product",
    {"tokens": int, "outputs": int, "size": int, "dtype": torch.dtype, "gated": bool, "split": bool},
    (f"{_GEMM}.hopper_product:HopperProductPlan",),
    (f"{_GEMM}.hopper_product_kernel:hopper_product_kernel", f"{_GEMM}.sum_norm:sum_norm_kernel"),
    _refuse_hopper_product,
    batch=("tokens",),
    rounded={"tokens": lambda tokens: hopper_product_tokens(tokens, 256)},
)
"""tokens: what a program that may have all of them is compiled for. split: whether float32 sums of parts of the
columns are wanted, which the next kernel adds."""


def hopper_product_tokens(tokens: int, block: int) -> int:
    """What programs are compiled for that share up to 256 tokens, each at most `block` of them.

    Up to 128 it is a power of two, one tile; up to 256 the least of 8, 16, 32, 64, 96, 128, 160, 192 and 256, some of
    them two tiles.
    """
    if block == 128 or tokens <= 64:
        return min(128, max(8, bucket(tokens)))
    return cdiv(tokens, 32) * 32 if tokens <= 192 else 256


def hopper_product_key(
    tokens: int, outputs: int, size: int, dtype: torch.dtype, gated: bool, split: bool
) -> tuple[Any, ...]:
    return hopper_product_tokens(tokens, 256), outputs, size, dtype, gated, split


def packed_tokens(tokens: int) -> int:
    """Numbers of tokens that share a plan: 8, 16, 32, 64 and multiples of 128."""
    return cdiv(tokens, 128) * 128 if tokens > 64 else max(8, bucket(tokens))


def _refuse_packed(plan: Any, key: Key) -> str | None:
    if key["dtype"] not in (torch.bfloat16, torch.float16):
        return "dtype: only products of 16-bit numbers"
    if plan.rows < 16 or plan.rows < 8 * plan.warps:
        return "rows: tensor cores take 16, and no two warps have the same"
    return None


PACKED_PRODUCT = Tunable(
    "packed_product",
    {"tokens": int, "outputs": int, "size": int, "dtype": torch.dtype, "storage": str, "bits": int, "parts": bool},
    (f"{_GEMM}.packed_plan:PackedPlan",),
    tuple(f"{_GEMM}.{n}" for n in (
        "packed_kernels:group_kernel", "packed_kernels:part_kernel", "stream_kernel:add_splits"
    )),
    _refuse_packed,
    batch=("tokens",), rounded={"tokens": packed_tokens},
)  # fmt: skip
"""storage: "fp8", "int4", "int8", or a type of GGUF. parts: whether scales are of fewer columns than a tile has."""

# --------------------------------------------------------------------------------------- attention


def _refuse_tile(plan: Any, key: Key) -> str | None:
    if plan.tile < 16:
        return "tile: tensor cores take 16 or more"
    if plan.tile <= key["block_size"] and key["block_size"] % plan.tile:
        return f"tile: does not divide the cache's blocks of {key['block_size']}"
    return None


ATTENTION_DECODE = Tunable(
    "attention_decode",
    {
        "num_seqs": int, "kv_heads": int, "group": int, "head_dim": int, "dtype": torch.dtype,
        "cache_dtype": torch.dtype,
        "block_size": int, "rotate": bool,
    },
    (f"{_ATTENTION}.decode_plan:DecodePlan",),
    (f"{_ATTENTION}.decode_kernel:decode_kernel",),
    _refuse_tile,
    batch=("num_seqs",), rounded={"num_seqs": bucket},
)  # fmt: skip
"""No lengths: a captured graph replays with any.

rotate: whether the kernel also norms, rotates and stores the new token.
"""

ATTENTION_DECODE_HOPPER = Tunable(
    "attention_decode_hopper",
    {
        "num_seqs": int, "kv_heads": int, "group": int, "head_dim": int, "dtype": torch.dtype,
        "cache_dtype": torch.dtype,
        "block_size": int, "new": bool,
    },
    (f"{_ATTENTION}.decode_hopper_plan:HopperDecodePlan",),
    (f"{_ATTENTION}.decode_hopper_kernel:decode_hopper_kernel",),
    lambda plan, key: plan.refused(key["head_dim"], key["block_size"], key["cache_dtype"].itemsize, key["group"]),
    batch=("num_seqs",), rounded={"num_seqs": bucket},
)  # fmt: skip
"""As `ATTENTION_DECODE`, for what the kernel for Hopper takes there.

new: whether the last token comes with the call.
"""

_PREFILL = {"group": int, "head_dim": int, "dtype": torch.dtype, "cache_dtype": torch.dtype, "block_size": int}


def _refuse_prefill(plan: Any, key: Key) -> str | None:
    if plan.rows < max(16, bucket(key["group"])):
        return f"rows: fewer than 16 or than the {key['group']} query heads of a KV head"
    return "tile: tensor cores take 16 or more" if plan.tile < 16 else None


ATTENTION_PREFILL = Tunable(
    "attention_prefill", {**_PREFILL, "few_rows": int}, (f"{_ATTENTION}.prefill_plan:PrefillPlan",),
    (f"{_ATTENTION}.prefill_kernel:prefill_kernel",), _refuse_prefill,
    rounded={"few_rows": lambda rows: rows and min(64, max(16, bucket(rows)))},
)  # fmt: skip
"""few_rows: the query rows of the longest run where these are at most 64, as a bucket, since such runs have always
had plans of their own; else 0."""


def _refuse_hopper(plan: Any, key: Key) -> str | None:
    if plan.pack > 64 or key["group"] % plan.pack:
        return f"pack: does not divide the {key['group']} query heads of a KV head, or is above 64"
    if plan.tile not in (64, 128) or plan.stages < 2:
        return "tile, stages: expected tiles of 64 or 128 and at least 2 stages"
    return None


ATTENTION_PREFILL_HOPPER = Tunable(
    "attention_prefill_hopper", _PREFILL, (f"{_ATTENTION}.prefill_plan:HopperPrefillPlan",),
    (f"{_ATTENTION}.prefill_hopper_kernel:prefill_hopper_kernel",), _refuse_hopper,
)  # fmt: skip

ALL: Mapping[str, Tunable] = {
    t.name: t
    for t in (
        RMS_NORM, ADD_RMS_NORM, LAYER_NORM, SOFTMAX, ACTIVATE_AND_MUL, ACTIVATION, ADD_ACTIVATION, MUL_ADD, EMBEDDING,
        ROTARY,
        ROTARY_STORE, PRODUCT, SMALL_PRODUCT, HOPPER_PRODUCT, PACKED_PRODUCT, ATTENTION_DECODE, ATTENTION_DECODE_HOPPER,
        ATTENTION_PREFILL,
        ATTENTION_PREFILL_HOPPER,
    )
}  # fmt: skip
