"""Which plans of each tunable are worth trying, and why others are not.

A space is a generator of (class of the plans, values by field, rules). The kernel itself refuses what it cannot launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nanovllm.kernels.op.tunable import Key, Tunable, bucket
from nanovllm.kernels.triton.launch_arguments import cdiv
from nanovllm.tune.space import Candidates, Space, candidates_of, powers

if TYPE_CHECKING:
    from nanovllm.hardware.gpu_presets import DeviceModel

Rules = dict[str, Callable[[Any], Any]]
Number = Callable[[Any], float]
Spaces = Iterator[tuple[str, Mapping[str, Sequence[Any]], Rules]]
_BARRIERS = 1024
"""Bytes of shared memory for barriers and alignment."""


def candidates(tunable: Tunable, key: Key, builtin: Any, device: DeviceModel) -> Candidates:
    """The plans that may be tried for a key on a device, those near the built-in plan first."""
    named = tunable.named(key)
    return candidates_of(
        (
            Space(
                _with_rounds(tunable, named) or tunable.classes[plan], values, rules, lambda p: tunable.refuse(p, named)
            )
            for plan, values, rules in _SPACES[tunable.name](SimpleNamespace(**named), device)
        ),
        builtin,
    )


def _with_rounds(tunable: Tunable, key: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Makes plans of the product for Hopper, whose rounds follow from the rest: all columns are covered."""
    if tunable.name != "hopper_product":
        return None

    def make(splits: int, chunks: int, slots: int, block: int) -> Any:
        rounds = cdiv(cdiv(cdiv(key["size"], 64), splits), chunks * slots)
        return tunable.classes["HopperProductPlan"](splits, chunks, slots, rounds, block)

    return make


def _registers(elements: Number, most: int = 64, what: str = "values") -> Rules:
    """most: 32-bit registers of a thread, of 255. Addresses, masks and copies of another dtype need the rest."""
    return {f"more than {most} {what} a thread: registers spill": lambda p: elements(p) > most * 32 * p.warps}


def _idle(elements: Number) -> Rules:
    return {"fewer elements than threads": lambda p: elements(p) < 32 * p.warps}


def _shared(needed: Number, gpu: DeviceModel) -> Rules:
    most = gpu.shared_per_block
    return {f"more than {most >> 10} KiB of shared memory": lambda p: needed(p) > most}


def _steps(k: int) -> Rules:
    reason = "more stages than steps to fill them"
    return {reason: lambda p: p.stages > 1 + cdiv(cdiv(k, p.splits), p.block_k)}


def _splits(programs: Number, gpu: DeviceModel, most: int = 8) -> Rules:
    """most: programs a multiprocessor, with splits."""
    reason = "splits where the programs already fill the GPU"
    return {reason: lambda p: p.splits > 1 and programs(p) * p.splits > most * gpu.sms}


# ------------------------------------------------------------------------------------------------------ rows, elements


def _row(k: Any, gpu: DeviceModel) -> Spaces:
    width = bucket(k.size)
    yield "WarpPlan", {"warps": powers(1, 32)}, _registers(lambda p: width) | _idle(lambda p: width)


def _rows(k: Any, gpu: DeviceModel) -> Spaces:
    width = bucket(k.size)
    rules: Rules = {"more rows than there are": lambda p: p.rows > bucket(k.rows)}
    rules |= _registers(lambda p: p.rows * width) | _idle(lambda p: p.rows * width)
    yield "RowPlan", {"rows": powers(1, 32), "warps": powers(1, 32)}, rules


def _elementwise(k: Any, gpu: DeviceModel) -> Spaces:
    rules: Rules = {
        "a block longer than a row": lambda p: p.block > max(128, k.width),
        "fewer than 2 elements a thread": lambda p: p.block < 64 * p.warps,
    }
    yield "BlockPlan", {"block": powers(128, 8192), "warps": powers(1, 16)}, rules | _registers(lambda p: p.block)


def _heads(k: Any, gpu: DeviceModel) -> Spaces:
    half = bucket(k.head_dim // 2)
    values = {"heads": powers(1, bucket(max(k.q_heads, k.kv_heads))), "warps": powers(1, 8)}
    yield "HeadPlan", values, _registers(lambda p: p.heads * half, 32) | _idle(lambda p: p.heads * half)


# ------------------------------------------------------------------------------------------------------------- products


def _product(k: Any, gpu: DeviceModel) -> Spaces:
    wide = 2 if k.gated else 1
    splits = _splits(lambda p: cdiv(wide * k.n, p.rows), gpu)
    if k.m == 1:
        rules: Rules = {"a block longer than a row": lambda p: p.block_k >= 2 * bucket(k.k)}
        rules |= _steps(k.k) | splits | _registers(lambda p: p.rows * p.block_k) | _idle(lambda p: p.rows * p.block_k)
        yield "StreamPlan", {
            "tokens": (1,), "rows": powers(1, 8), "block_k": powers(128, 4096), "splits": (1, 2, 4), "warps": (2, 4, 8),
            "stages": (1, 2, 3),
        }, rules  # fmt: skip
    elif k.m <= 64:
        shared = _shared(lambda p: 2 * (p.stages - 1) * (p.rows + p.tokens) * p.block_k, gpu)
        yield "StreamPlan", {
            "tokens": (max(16, bucket(k.m)),), "rows": (32, 64, 128), "block_k": powers(32, 256),
            "splits": powers(1, 16), "warps": (4, 8), "stages": (2, 3, 4, 5, 6),
        }, splits | _steps(k.k) | shared  # fmt: skip
    if k.m > 16:
        yield _product_tiles(k, wide, gpu)


def _product_tiles(k: Any, wide: int, gpu: DeviceModel) -> tuple[str, Mapping[str, Sequence[Any]], Rules]:
    values = {
        "block_m": powers(16, 128), "block_n": powers(16, 256), "block_k": (32, 64, 128), "group_m": (8, 16),
        "splits": (1, 2, 4), "warps": (4, 8), "stages": (2, 3, 4, 5, 6, 8),
        "tma": (True, False) if k.tma else (False,), "flatten": (False, True) if k.tma else (False,),
    }  # fmt: skip

    def tiles(p: Any) -> int:
        return cdiv(k.m, p.block_m) * cdiv(wide * k.n, wide * p.block_n)

    def shared(p: Any) -> int:
        loaded = 2 * p.block_k * (p.block_m + wide * p.block_n)
        output = 2 * p.block_m * p.block_n if p.tma and p.splits == 1 else 0
        return max(1, p.stages - (not p.tma)) * loaded + output

    rules: Rules = {
        "a tile higher than x": lambda p: p.block_m >= 2 * max(16, bucket(k.m)),
        "a tile wider than the weight": lambda p: p.block_n >= 2 * max(16, bucket(k.n)),
        "a group of more rows of tiles than there are": lambda p: p.group_m > max(8, cdiv(k.m, p.block_m)),
        "flatten without a second tile a program": lambda p: p.flatten and tiles(p) <= gpu.sms,
        "a tile too small for its warps": lambda p: p.block_m * p.block_n * wide < 256 * p.warps,
    }
    sums = _registers(lambda p: p.block_m * p.block_n * wide, 128, "sums")
    return "TilePlan", values, rules | _splits(tiles, gpu) | _steps(k.k) | _shared(shared, gpu) | sums


def _small_product(k: Any, gpu: DeviceModel) -> Spaces:
    itemsize = k.dtype.itemsize
    lane = 16 // itemsize

    def columns(step: int) -> int:
        return cdiv(k.size, step) * step

    yield "VectorPlan", {
        "rows": powers(2 if k.gated else 1, 16), "block": powers(32 * lane, 1024 * lane), "warps": powers(1, 8),
    }, {
        "not 16 or 32 bytes a lane": lambda p: p.block not in (32 * lane * p.warps, 64 * lane * p.warps),
        "a block longer than a row": lambda p: p.block >= 2 * max(32 * lane, bucket(k.size)),
        **_registers(lambda p: p.rows * columns(p.block) * itemsize / 4, 96, "registers for weights"),
        **_registers(lambda p: columns(p.block), 64, "registers for a token"),
    }  # fmt: skip
    if itemsize != 2 or k.tokens == 1:
        return
    tokens = bucket(k.tokens)
    yield "MatrixPlan", {
        "rows": powers(8, 64), "split": powers(2, 16), "depth": powers(16, 256),
        "late": (False, True) if k.norm else (False,),
    }, {
        "a block longer than a row": lambda p: p.split * p.depth >= 2 * max(64, bucket(k.size)),
        "more than 128 registers a thread for weights: registers spill": (
            lambda p: p.rows * columns(p.split * p.depth) > 256 * 32 * p.split
        ),
        "more than 128 registers a thread for the input: registers spill": (
            lambda p: not p.late and tokens * columns(p.split * p.depth) > 128 * 32 * p.split
        ),
        **_shared(lambda p: 2 * (p.rows + tokens) * columns(p.split * p.depth) + _BARRIERS, gpu),
    }  # fmt: skip


def _hopper_product(k: Any, gpu: DeviceModel) -> Spaces:
    """The plans have rounds as well: `_with_rounds`."""
    tiles, rows = cdiv(k.size, 64), k.outputs * (2 if k.gated else 1)
    rules: Rules = {
        "more slots than groups of columns": lambda p: p.chunks * (p.slots - 1) >= cdiv(tiles, p.splits),
        **_splits(lambda p: cdiv(rows, 64) * cdiv(k.tokens, p.block), gpu, 4),
    }
    yield "HopperProductPlan", {
        "splits": range(1, 17) if k.split else (1,), "chunks": powers(1, 8), "slots": range(1, 17),
        "block": (128, 256) if k.tokens > 64 else (128,),
    }, rules  # fmt: skip


def _packed_product(k: Any, gpu: DeviceModel) -> Spaces:
    from nanovllm.kernels.triton.gemm.packed_plan import columns_of_a_tile, has_shared_operands, tokens_of_a_program

    tokens = tokens_of_a_program(k.tokens, has_shared_operands(gpu.capability // 10))
    columns = columns_of_a_tile(tokens, k.bits, k.parts)
    tiles = cdiv(k.size, columns)
    yield "PackedPlan", {
        "rows": powers(16, 128), "warps": powers(1, 8), "stages": range(2, 8), "splits": (1, 2, 3, 4, 6, 8, 12, 16),
    }, {
        "more stages than tiles to fill them": lambda p: p.stages > 1 + cdiv(tiles, p.splits),
        "more splits than tiles": lambda p: p.splits > tiles,
        **_splits(lambda p: cdiv(k.outputs, p.rows) * cdiv(k.tokens, tokens), gpu),
        # A thread also has its weights of a tile, as packed and as decoded, and the tokens.
        **_registers(lambda p: p.rows * (tokens + columns * (k.bits + 16) // 32), 128),
        **_shared(lambda p: p.stages * (p.rows * columns * k.bits // 8 + 2 * tokens * columns) + _BARRIERS, gpu),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ attention


def _pieces(k: Any, gpu: DeviceModel, *factors: float) -> list[int]:
    """Pieces of a KV head that make these multiples of the GPU's multiprocessors."""
    return sorted({max(1, int(n * gpu.sms) // k.kv_heads) for n in factors})


def _attention_decode(k: Any, gpu: DeviceModel) -> Spaces:
    dim, itemsize, rows = bucket(k.head_dim), k.cache_dtype.itemsize, max(16, bucket(k.group))
    yield "DecodePlan", {
        "pieces": _pieces(k, gpu, 1, 2, 3, 4, 6, 7.5), "tile": powers(16, 128), "warps": powers(1, 8),
        "stages": (2, 3, 4, 5), "merge_registers": (16, 32, 64), "early": (False, True) if k.rotate else (False,),
        "least": (1, 2, 3),
    }, {
        **_registers(lambda p: rows * (dim + 2 * p.tile), 128, "registers for output and scores"),
        "more than 128 registers a thread for the tile that is loaded early: registers spill": (
            lambda p: p.early and 2 * p.tile * dim * itemsize > 128 * 4 * 32 * p.warps
        ),
        "warps without tokens of their own": lambda p: p.tile < 8 * p.warps,
        **_shared(lambda p: 2 * (p.stages - 1) * p.tile * dim * itemsize + 2 * rows * dim, gpu),
    }  # fmt: skip


def _attention_decode_hopper(k: Any, gpu: DeviceModel) -> Spaces:
    row = 2 * k.head_dim * k.cache_dtype.itemsize  # bytes of a key and its value

    def requested(p: Any) -> int:
        """Bytes of keys and values that a program requests at a time."""
        return 16 * p.warps * p.slots * row

    yield "HopperDecodePlan", {
        "pieces": _pieces(k, gpu, 0.5, 1, 1.7, 1.85, 2, 3, 4), "least": powers(1, 8), "warps": powers(1, 8),
        "slots": (1, 2, 3, 4, 5, 6), "box": (16, 32, 64), "chunk": (2, 4, 8), "empty_last": (False, True),
        "cluster": (0, 2, 4, 8, 16),
    }, {
        "less than 16 KiB requested at a time, or more than 192": lambda p: not 16 << 10 <= requested(p) <= 192 << 10,
        **_shared(lambda p: requested(p) + _BARRIERS, gpu),
        "a cluster where most sequences are not cut": lambda p: p.cluster and p.pieces < 2 * k.num_seqs,
        "a cluster of fewer programs than a sequence has": (
            lambda p: k.num_seqs > 1 and 0 < p.cluster * k.num_seqs < p.pieces
        ),
    }  # fmt: skip


def _attention_prefill(k: Any, gpu: DeviceModel) -> Spaces:
    dim, itemsize = bucket(k.head_dim), k.dtype.itemsize
    yield "PrefillPlan", {
        "rows": (k.few_rows,) if k.few_rows else powers(32, 256), "tile": powers(16, 128), "warps": (2, 4, 8),
        "stages": (1, 2, 3, 4),
    }, {
        "warps without query rows": lambda p: 16 * p.warps > max(64, p.rows),
        **_registers(lambda p: p.rows * (dim + p.tile), 192, "sums and scores"),
        **_shared(lambda p: itemsize * dim * (p.rows + 2 * max(1, p.stages - 1) * p.tile) + _BARRIERS, gpu),
    }  # fmt: skip


def _attention_prefill_hopper(k: Any, gpu: DeviceModel) -> Spaces:
    dim, packs = max(64, bucket(k.head_dim)), [p for p in powers(1, 64) if k.group % p == 0]
    values = {"pack": packs, "tile": (64, 128), "stages": (2, 3, 4), "programs": (0,)}
    yield "HopperPrefillPlan", values, _shared(lambda p: 2 * dim * (128 + 2 * p.stages * p.tile) + _BARRIERS, gpu)


_ELEMENTWISE = ("activate_and_mul", "fused_activation", "fused_add_gelu", "element_wise_mul_add", "embedding")
_SPACES: Mapping[str, Callable[[Any, Any], Spaces]] = {
    **dict.fromkeys(("add_rms_norm", "layer_norm"), _row),
    **dict.fromkeys(("rms_norm", "softmax"), _rows),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(("rotary", "rotary_store"), _heads),
    "product": _product,
    "small_product": _small_product,
    "hopper_product": _hopper_product,
    "packed_product": _packed_product,
    "attention_decode": _attention_decode,
    "attention_decode_hopper": _attention_decode_hopper,
    "attention_prefill": _attention_prefill,
    "attention_prefill_hopper": _attention_prefill_hopper,
}
