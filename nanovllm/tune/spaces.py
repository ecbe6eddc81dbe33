"""Which plans of each tunable are worth trying, and why others are not. The kernel refuses what cannot launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.kernels.op.tunable import Tunable, bucket
from nanovllm.kernels.triton.launch_arguments import cdiv
from nanovllm.tune.space import Space, powers

if TYPE_CHECKING:
    from nanovllm.hardware.gpu_presets import DeviceModel

Key = Mapping[str, Any]
Rules = dict[str, Callable[[Any], Any]]
Number = Callable[[Any], float]
_MOST_VALUES = 64
"""32-bit registers of a thread for one tile: with addresses, masks and copies of another type, more would spill."""
_MOST_SUMS = 128
"""Accumulators of a thread, of its 255 registers."""
_BARRIERS = 1024
"""Bytes of shared memory for barriers and alignment."""


def spaces_of(tunable: Tunable, key: Key, device: DeviceModel) -> list[Space]:
    """The plans of a tunable for a key on a device, one space for each class of plans.

    Raises:
        ValueError: no space is declared for this tunable.
    """
    if tunable.name not in _SPACES:
        raise ValueError(f"no tuning space for {tunable.name!r}; there are some for {', '.join(_SPACES)}")
    return _SPACES[tunable.name](tunable, key, device)


def _space(
    tunable: Tunable, plan: str, key: Key, values: Mapping[str, Sequence[Any]], *rules: Rules, make: Any = None
) -> Space:
    """make: the values -> a plan, where they are not its fields."""

    def refused_by_kernel(plan: Any) -> str | None:
        reason = tunable.refuse(plan, key)
        return reason and f"the kernel: {reason}"

    every: Rules = {"the kernel cannot launch it": refused_by_kernel}
    for more in rules:
        every |= more
    return Space(make or tunable.classes[plan], values, every)


def _registers(elements: Number, most: int = _MOST_VALUES, what: str = "values") -> Rules:
    return {f"more than {most} {what} a thread: registers spill": lambda p: elements(p) > most * 32 * p.warps}


def _idle(elements: Number) -> Rules:
    return {"fewer elements than threads": lambda p: elements(p) < 32 * p.warps}


def _shared(needed: Number, device: DeviceModel) -> Rules:
    most = device.shared_per_block
    return {f"more than {most >> 10} KiB of shared memory": lambda p: needed(p) > most}


def _steps(k: int) -> Rules:
    reason = "more stages than steps to fill them"
    return {reason: lambda p: p.stages > 1 + cdiv(cdiv(k, p.splits), p.block_k)}


def _splits(programs: Number, device: DeviceModel, most: int = 8) -> Rules:
    """most: programs a multiprocessor, with splits."""
    reason = "splits where the programs already fill the GPU"
    return {reason: lambda p: p.splits > 1 and programs(p) * p.splits > most * device.sms}


# ------------------------------------------------------------------------------------------------------ rows, elements


def _rows(tunable: Tunable, key: Key, device: DeviceModel) -> list[Space]:
    width = bucket(key["size"])
    warps = {"warps": (1, 2, 4, 8, 16, 32)}

    def tile(p: Any) -> int:
        return getattr(p, "rows", 1) * width

    if "WarpPlan" in tunable.classes:
        return [_space(tunable, "WarpPlan", key, warps, _registers(tile), _idle(tile))]
    more: Rules = {"more rows than there are": lambda p: p.rows > bucket(key["rows"])}
    return [_space(tunable, "RowPlan", key, {"rows": powers(1, 32), **warps}, more, _registers(tile), _idle(tile))]


def _elementwise(tunable: Tunable, key: Key, device: DeviceModel) -> list[Space]:
    rules: Rules = {
        "a block longer than a row": lambda p: p.block > max(128, key["width"]),
        "fewer than 2 elements a thread": lambda p: p.block < 64 * p.warps,
    }
    values = {"block": powers(128, 8192), "warps": (1, 2, 4, 8, 16)}
    return [_space(tunable, "BlockPlan", key, values, rules, _registers(lambda p: p.block))]


def _heads(tunable: Tunable, key: Key, device: DeviceModel) -> list[Space]:
    half = bucket(key["head_dim"] // 2)
    values = {"heads": powers(1, bucket(max(key["q_heads"], key["kv_heads"]))), "warps": (1, 2, 4, 8)}

    def tile(p: Any) -> int:
        return p.heads * half

    return [_space(tunable, "HeadPlan", key, values, _registers(tile, 32), _idle(tile))]


# ------------------------------------------------------------------------------------------------------------- products


def _product(tunable: Tunable, key: Key, device: DeviceModel) -> list[Space]:
    m, sums = key["m"], key["n"] * (2 if key["gated"] else 1)
    splits = _splits(lambda p: cdiv(sums, p.rows), device)
    spaces = []
    if m == 1:

        def tile(p: Any) -> int:
            return p.rows * p.block_k

        values: dict[str, Sequence[Any]] = {
            "tokens": (1,), "rows": (1, 2, 4, 8), "block_k": powers(128, 4096), "splits": (1, 2, 4),
            "warps": (2, 4, 8), "stages": (1, 2, 3),
        }  # fmt: skip
        longer: Rules = {"a block longer than a row": lambda p: p.block_k >= 2 * bucket(key["k"])}
        rules = longer, _steps(key["k"]), splits, _registers(tile), _idle(tile)
        spaces.append(_space(tunable, "StreamPlan", key, values, *rules))
    elif m <= 64:
        values = {
            "tokens": (max(16, bucket(m)),), "rows": (32, 64, 128), "block_k": (32, 64, 128, 256),
            "splits": (1, 2, 4, 8, 16), "warps": (4, 8), "stages": (2, 3, 4, 5, 6),
        }  # fmt: skip
        shared = _shared(lambda p: 2 * (p.stages - 1) * (p.rows + p.tokens) * p.block_k, device)
        spaces.append(_space(tunable, "StreamPlan", key, values, splits, _steps(key["k"]), shared))
    if m > 16:
        spaces.append(_product_tiles(tunable, key, sums, device))
    return spaces


def _product_tiles(tunable: Tunable, key: Key, sums: int, device: DeviceModel) -> Space:
    wide = 2 if key["gated"] else 1
    values = {
        "block_m": (16, 32, 64, 128), "block_n": (16, 32, 64, 128, 256), "block_k": (32, 64, 128), "group_m": (8, 16),
        "splits": (1, 2, 4), "warps": (4, 8), "stages": (2, 3, 4, 5, 6, 8),
        "tma": (True, False) if key["tma"] else (False,), "flatten": (False, True) if key["tma"] else (False,),
    }  # fmt: skip

    def tiles(p: Any) -> int:
        return cdiv(key["m"], p.block_m) * cdiv(sums, wide * p.block_n)

    def shared(p: Any) -> int:
        loaded = 2 * p.block_k * (p.block_m + wide * p.block_n)
        output = 2 * p.block_m * p.block_n if p.tma and p.splits == 1 else 0
        return max(1, p.stages - (not p.tma)) * loaded + output

    rules: Rules = {
        "a tile higher than x": lambda p: p.block_m >= 2 * max(16, bucket(key["m"])),
        "a tile wider than the weight": lambda p: p.block_n >= 2 * max(16, bucket(key["n"])),
        "a group of more rows of tiles than there are": lambda p: p.group_m > max(8, cdiv(key["m"], p.block_m)),
        "flatten without a second tile a program": lambda p: p.flatten and tiles(p) <= device.sms,
        "a tile too small for its warps": lambda p: p.block_m * p.block_n * wide < 256 * p.warps,
    }
    sums_of_a_thread = _registers(lambda p: p.block_m * p.block_n * wide, _MOST_SUMS, "sums")
    more = _splits(tiles, device), _steps(key["k"]), _shared(shared, device), sums_of_a_thread
    return _space(tunable, "TilePlan", key, values, rules, *more)


def _small_product(tunable: Tunable, key: Key, device: DeviceModel) -> list[Space]:
    size, itemsize, tokens = key["size"], key["dtype"].itemsize, key["tokens"]
    lane = 16 // itemsize

    def columns(step: int) -> int:
        return cdiv(size, step) * step

    values: dict[str, Sequence[Any]] = {
        "rows": powers(2 if key["gated"] else 1, 16), "block": powers(32 * lane, 1024 * lane), "warps": (1, 2, 4, 8),
    }  # fmt: skip
    rules: Rules = {
        "not 16 or 32 bytes a lane": lambda p: p.block not in (32 * lane * p.warps, 64 * lane * p.warps),
        "a block longer than a row": lambda p: p.block >= 2 * max(32 * lane, bucket(size)),
        "more than 96 registers a thread for weights": (
            lambda p: p.rows * columns(p.block) * itemsize / 4 > 96 * 32 * p.warps
        ),
        "more than 64 registers a thread for a token": lambda p: columns(p.block) > 64 * 32 * p.warps,
    }
    vector = _space(tunable, "VectorPlan", key, values, rules)
    if itemsize != 2 or tokens == 1:
        return [vector]
    values = {
        "rows": (8, 16, 32, 64), "split": (2, 4, 8, 16), "depth": (16, 32, 64, 128, 256),
        "late": (False, True) if key["norm"] else (False,),
    }  # fmt: skip

    def block(p: Any) -> int:
        return p.split * p.depth

    rules = {
        "a block longer than a row": lambda p: block(p) >= 2 * max(64, bucket(size)),
        "more than 128 registers a thread for weights": lambda p: p.rows * columns(block(p)) > 256 * 32 * p.split,
        "more than 128 registers a thread for the input": (
            lambda p: not p.late and bucket(tokens) * columns(block(p)) > 128 * 32 * p.split
        ),
        **_shared(lambda p: 2 * (p.rows + bucket(tokens)) * columns(block(p)) + _BARRIERS, device),
    }
    return [vector, _space(tunable, "MatrixPlan", key, values, rules)]


def _hopper_product(tunable: Tunable, key: Key, device: DeviceModel) -> list[Space]:
    tiles, tokens = cdiv(key["size"], 64), key["tokens"]
    sums = key["outputs"] * (2 if key["gated"] else 1)

    def make(splits: int, chunks: int, slots: int, block: int) -> Any:
        """With the rounds that cover all columns."""
        rounds = cdiv(cdiv(tiles, splits), chunks * slots)
        return tunable.classes["HopperProductPlan"](splits, chunks, slots, rounds, block)

    values = {
        "splits": range(1, 17) if key["split"] else (1,), "chunks": (1, 2, 4, 8), "slots": range(1, 17),
        "block": (128, 256) if tokens > 64 else (128,),
    }  # fmt: skip
    reason = "more slots than groups of columns"
    more: Rules = {reason: lambda p: p.chunks * (p.slots - 1) >= cdiv(tiles, p.splits)}
    splits = _splits(lambda p: cdiv(sums, 64) * cdiv(tokens, p.block), device, 4)
    return [_space(tunable, "HopperProductPlan", key, values, more, splits, make=make)]


# ------------------------------------------------------------------------------------------------------------ attention


def _attention_decode(tunable: Tunable, key: Key, device: DeviceModel) -> list[Space]:
    dim, itemsize = bucket(key["head_dim"]), key["cache_dtype"].itemsize
    rows = max(16, bucket(key["group"]))
    values = {
        "pieces": sorted({max(1, int(n * device.sms) // key["kv_heads"]) for n in (1, 2, 3, 4, 6, 7.5)}),
        "tile": (16, 32, 64, 128), "warps": (1, 2, 4, 8), "stages": (2, 3, 4, 5), "merge_registers": (16, 32, 64),
        "early": (False, True) if key["rotate"] else (False,), "least": (1, 2, 3),
    }  # fmt: skip
    rules: Rules = {
        "more than 128 registers a thread for output and scores": (
            lambda p: rows * (dim + 2 * p.tile) > 128 * 32 * p.warps
        ),
        "more than 128 registers a thread for the tile that is loaded early": (
            lambda p: p.early and 2 * p.tile * dim * itemsize > 128 * 4 * 32 * p.warps
        ),
        "warps without tokens of their own": lambda p: p.tile < 8 * p.warps,
    }
    shared = _shared(lambda p: 2 * (p.stages - 1) * p.tile * dim * itemsize + 2 * rows * dim, device)
    return [_space(tunable, "DecodePlan", key, values, rules, shared)]


def _attention_decode_hopper(tunable: Tunable, key: Key, device: DeviceModel) -> list[Space]:
    row = 2 * key["head_dim"] * key["cache_dtype"].itemsize  # bytes of a key and its value
    seqs = key["num_seqs"]
    values = {
        "pieces": sorted({max(1, int(n * device.sms) // key["kv_heads"]) for n in (0.5, 1, 1.7, 1.85, 2, 3, 4)}),
        "least": (1, 2, 4, 8), "warps": (1, 2, 4, 8), "slots": (1, 2, 3, 4, 5, 6), "box": (16, 32, 64),
        "chunk": (2, 4, 8), "empty_last": (False, True), "cluster": (0, 2, 4, 8, 16),
    }  # fmt: skip

    def asked(p: Any) -> int:
        """Bytes of keys and values that a program asks for at a time."""
        return 16 * p.warps * p.slots * row

    rules: Rules = {
        "less than 16 KiB asked for at a time, or more than 192": lambda p: not 16 << 10 <= asked(p) <= 192 << 10,
        **_shared(lambda p: asked(p) + _BARRIERS, device),
        "a cluster where most sequences are not cut": lambda p: p.cluster and p.pieces < 2 * seqs,
        "a cluster of fewer programs than a sequence has": lambda p: seqs > 1 and 0 < p.cluster * seqs < p.pieces,
    }
    return [_space(tunable, "HopperDecodePlan", key, values, rules)]


def _attention_prefill(tunable: Tunable, key: Key, device: DeviceModel) -> list[Space]:
    dim, itemsize, few = bucket(key["head_dim"]), key["dtype"].itemsize, key["few_rows"]
    values = {
        "rows": (few,) if few else (32, 64, 128, 256), "tile": (16, 32, 64, 128), "warps": (2, 4, 8),
        "stages": (1, 2, 3, 4),
    }  # fmt: skip

    def shared(p: Any) -> int:
        return itemsize * dim * (p.rows + 2 * max(1, p.stages - 1) * p.tile) + _BARRIERS

    idle: Rules = {"warps without query rows": lambda p: 16 * p.warps > max(64, p.rows)}
    sums = _registers(lambda p: p.rows * (dim + p.tile), 192, "sums and scores")
    return [_space(tunable, "PrefillPlan", key, values, idle, sums, _shared(shared, device))]


def _attention_prefill_hopper(tunable: Tunable, key: Key, device: DeviceModel) -> list[Space]:
    dim = max(64, bucket(key["head_dim"]))
    packs = [p for p in powers(1, 64) if key["group"] % p == 0]
    values = {"pack": packs, "tile": (64, 128), "stages": (2, 3, 4), "programs": (0,)}
    shared = _shared(lambda p: 2 * dim * (128 + 2 * p.stages * p.tile) + _BARRIERS, device)
    return [_space(tunable, "HopperPrefillPlan", key, values, shared)]


_ELEMENTWISE = ("activate_and_mul", "fused_activation", "fused_add_gelu", "element_wise_mul_add", "embedding")
_SPACES: dict[str, Callable[[Tunable, Key, Any], list[Space]]] = {
    **dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm", "softmax"), _rows),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(("rotary", "rotary_store"), _heads),
    "product": _product,
    "small_product": _small_product,
    "hopper_product": _hopper_product,
    "attention_decode": _attention_decode,
    "attention_decode_hopper": _attention_decode_hopper,
    "attention_prefill": _attention_prefill,
    "attention_prefill_hopper": _attention_prefill_hopper,
}
