"""Which plans of each kernel are worth trying, and why others are not. What cannot launch at all, the kernel itself refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.kernels.op.tunable import Tunable, bucket
from nanovllm.kernels.triton.launch import cdiv
from nanovllm.tune.space import Constraint, Parameter, TuningSpace, powers

if TYPE_CHECKING:
    from nanovllm.hardware.gpu_presets import DeviceModel

Key = Mapping[str, Any]
_MOST_VALUES = 64
"""32-bit registers of a thread for one tile: with addresses, masks and copies of another type, more would spill."""
_MOST_SUMS = 128
"""Accumulators of a thread, of its 255 registers."""
_BARRIERS = 1024
"""Bytes of shared memory for barriers and alignment."""


def spaces_of(tunable: Tunable, key: Key, device: DeviceModel) -> list[TuningSpace[Any]]:
    """The plans of a tunable for a key on a device, one space for each class of plans.

    Raises:
        ValueError: nothing is known to try for this tunable.
    """
    if tunable.name not in _SPACES:
        raise ValueError(f"no tuning space for {tunable.name!r}; there are some for {', '.join(_SPACES)}")
    return _SPACES[tunable.name](tunable, key, device)


def _space(
    tunable: Tunable, plan: str, key: Key, parameters: Sequence[Parameter], *rules: Constraint,
    make: Callable[..., Any] | None = None,
) -> TuningSpace[Any]:  # fmt: skip
    """make: the parameters -> a plan, where they are not its fields."""
    make = make or tunable.classes[plan]

    def refused_by_kernel(values: Mapping[str, Any]) -> str | None:
        reason = tunable.refuse(make(**values), key)
        return reason and f"the kernel: {reason}"

    return TuningSpace(make, parameters, [Constraint("the kernel cannot launch it", refused_by_kernel), *rules])


def _values(
    elements: Callable[[Mapping[str, Any]], float], most: int = _MOST_VALUES, what: str = "values"
) -> Constraint:
    return Constraint(
        f"more than {most} {what} a thread: registers spill", lambda c: elements(c) > most * 32 * c["warps"]
    )


def _idle(elements: Callable[[Mapping[str, Any]], float]) -> Constraint:
    return Constraint("fewer elements than threads", lambda c: elements(c) < 32 * c["warps"])


def _shared(needed: Callable[[Mapping[str, Any]], float], device: DeviceModel) -> Constraint:
    most = device.shared_per_block
    return Constraint(f"more than {most >> 10} KiB of shared memory", lambda c: needed(c) > most)


def _rows(tunable: Tunable, key: Key, device: DeviceModel) -> list[TuningSpace[Any]]:
    width = bucket(key["size"])
    warps = Parameter("warps", (1, 2, 4, 8, 16, 32))
    if "WarpPlan" in tunable.classes:
        return [_space(tunable, "WarpPlan", key, [warps], _values(lambda c: width), _idle(lambda c: width))]
    more = Constraint("more rows than there are", lambda c: c["rows"] > bucket(key["rows"]))
    tile = lambda c: c["rows"] * width  # noqa: E731
    parameters = [Parameter("rows", powers(1, 32)), warps]
    return [_space(tunable, "RowPlan", key, parameters, more, _values(tile), _idle(tile))]


def _elementwise(tunable: Tunable, key: Key, device: DeviceModel) -> list[TuningSpace[Any]]:
    longer = Constraint("a block longer than a row", lambda c: c["block"] > max(128, key["width"]))
    narrow = Constraint("fewer than 2 elements a thread", lambda c: c["block"] < 64 * c["warps"])
    parameters = [Parameter("block", powers(128, 8192)), Parameter("warps", (1, 2, 4, 8, 16))]
    return [_space(tunable, "BlockPlan", key, parameters, longer, narrow, _values(lambda c: c["block"]))]


def _heads(tunable: Tunable, key: Key, device: DeviceModel) -> list[TuningSpace[Any]]:
    most = bucket(max(key["q_heads"], key["kv_heads"]))
    half = bucket(key["head_dim"] // 2)
    tile = lambda c: c["heads"] * half  # noqa: E731
    parameters = [Parameter("heads", powers(1, most)), Parameter("warps", (1, 2, 4, 8))]
    return [_space(tunable, "HeadPlan", key, parameters, _values(tile, 32), _idle(tile))]


def _product(tunable: Tunable, key: Key, device: DeviceModel) -> list[TuningSpace[Any]]:
    m, k, sums = key["m"], key["k"], key["n"] * (2 if key["gated"] else 1)
    spaces = []
    if m == 1:
        spaces.append(_product_vector(tunable, key, sums, device))
    elif m <= 64:
        parameters = [
            Parameter("tokens", (max(16, bucket(m)),)), Parameter("rows", (32, 64, 128)), Parameter("block_k", (32, 64, 128, 256)),
            Parameter("splits", (1, 2, 4, 8, 16)), Parameter("warps", (4, 8)), Parameter("stages", (2, 3, 4, 5, 6)),
        ]  # fmt: skip
        spaces.append(
            _space(
                tunable, "StreamPlan", key, parameters, _splits(lambda c: cdiv(sums, c["rows"]), device),
                _steps(k), _shared(lambda c: 2 * (c["stages"] - 1) * (c["rows"] + c["tokens"]) * c["block_k"], device),
            )
        )  # fmt: skip
    if m > 16:
        spaces.append(_product_tiles(tunable, key, sums, device))
    return spaces


def _steps(k: int) -> Constraint:
    return Constraint(
        "more stages than steps to fill them", lambda c: c["stages"] > 1 + cdiv(cdiv(k, c["splits"]), c["block_k"])
    )


def _splits(programs: Callable[[Mapping[str, Any]], int], device: DeviceModel, most: int = 8) -> Constraint:
    """most: programs a multiprocessor, with splits."""
    return Constraint(
        "splits where the programs already fill the GPU",
        lambda c: c["splits"] > 1 and programs(c) * c["splits"] > most * device.sms,
    )


def _product_vector(tunable: Tunable, key: Key, sums: int, device: DeviceModel) -> TuningSpace[Any]:
    parameters = [
        Parameter("tokens", (1,)), Parameter("rows", (1, 2, 4, 8)), Parameter("block_k", powers(128, 4096)),
        Parameter("splits", (1, 2, 4)), Parameter("warps", (2, 4, 8)), Parameter("stages", (1, 2, 3)),
    ]  # fmt: skip
    tile = lambda c: c["rows"] * c["block_k"]  # noqa: E731
    return _space(
        tunable, "StreamPlan", key, parameters, Constraint("a block longer than a row", lambda c: c["block_k"] >= 2 * bucket(key["k"])),
        _steps(key["k"]), _splits(lambda c: cdiv(sums, c["rows"]), device), _values(tile), _idle(tile),
    )  # fmt: skip


def _product_tiles(tunable: Tunable, key: Key, sums: int, device: DeviceModel) -> TuningSpace[Any]:
    wide = 2 if key["gated"] else 1
    parameters = [
        Parameter("block_m", (16, 32, 64, 128)), Parameter("block_n", (16, 32, 64, 128, 256)), Parameter("block_k", (32, 64, 128)),
        Parameter("group_m", (8, 16)), Parameter("splits", (1, 2, 4)), Parameter("warps", (4, 8)),
        Parameter("stages", (2, 3, 4, 5, 6, 8)), Parameter("tma", (True, False) if key["tma"] else (False,)),
        Parameter("flatten", (False, True), when=lambda c: c["tma"] and c["splits"] == 1, otherwise=False),
    ]  # fmt: skip

    def tiles(c: Mapping[str, Any]) -> int:
        return cdiv(key["m"], c["block_m"]) * cdiv(sums, wide * c["block_n"])

    def shared(c: Mapping[str, Any]) -> int:
        loaded = 2 * c["block_k"] * (c["block_m"] + wide * c["block_n"])
        output = 2 * c["block_m"] * c["block_n"] if c["tma"] and c["splits"] == 1 else 0
        return max(1, c["stages"] - (not c["tma"])) * loaded + output

    return _space(
        tunable, "TilePlan", key, parameters,
        Constraint("a tile higher than x", lambda c: c["block_m"] >= 2 * max(16, bucket(key["m"]))),
        Constraint("a tile wider than the weight", lambda c: c["block_n"] >= 2 * max(16, bucket(key["n"]))),
        Constraint("a group of more rows of tiles than there are", lambda c: c["group_m"] > max(8, cdiv(key["m"], c["block_m"]))),
        Constraint("flatten without a second tile a program", lambda c: c["flatten"] and tiles(c) <= device.sms),
        Constraint("a tile too small for its warps", lambda c: c["block_m"] * c["block_n"] * wide < 256 * c["warps"]),
        _splits(tiles, device), _steps(key["k"]), _shared(shared, device),
        _values(lambda c: c["block_m"] * c["block_n"] * wide, _MOST_SUMS, "sums"),
    )  # fmt: skip


def _small_product(tunable: Tunable, key: Key, device: DeviceModel) -> list[TuningSpace[Any]]:
    size, itemsize, tokens = key["size"], key["dtype"].itemsize, key["tokens"]
    lane = 16 // itemsize
    least = 2 if key["gated"] else 1

    def columns(step: int) -> int:
        return cdiv(size, step) * step

    vector = _space(
        tunable, "VectorPlan", key,
        [Parameter("rows", powers(least, 16)), Parameter("block", powers(32 * lane, 1024 * lane)), Parameter("warps", (1, 2, 4, 8))],
        Constraint("not 16 or 32 bytes a lane", lambda c: c["block"] not in (32 * lane * c["warps"], 64 * lane * c["warps"])),
        Constraint("a block longer than a row", lambda c: c["block"] >= 2 * max(32 * lane, bucket(size))),
        Constraint("more than 96 registers a thread for weights",
                   lambda c: c["rows"] * columns(c["block"]) * itemsize / 4 > 96 * 32 * c["warps"]),
        Constraint("more than 64 registers a thread for a token", lambda c: columns(c["block"]) > 64 * 32 * c["warps"]),
    )  # fmt: skip
    if itemsize != 2 or tokens == 1:
        return [vector]

    def block(c: Mapping[str, Any]) -> int:
        return c["split"] * c["depth"]

    matrix = _space(
        tunable, "MatrixPlan", key,
        [Parameter("rows", (8, 16, 32, 64)), Parameter("split", (2, 4, 8, 16)), Parameter("depth", (16, 32, 64, 128, 256)),
         Parameter("late", (False, True), when=lambda c: key["norm"], otherwise=False)],
        Constraint("a block longer than a row", lambda c: block(c) >= 2 * max(64, bucket(size))),
        Constraint("more than 128 registers a thread for weights", lambda c: c["rows"] * columns(block(c)) > 256 * 32 * c["split"]),
        Constraint("more than 128 registers a thread for the input",
                   lambda c: not c["late"] and bucket(tokens) * columns(block(c)) > 128 * 32 * c["split"]),
        _shared(lambda c: 2 * (c["rows"] + bucket(tokens)) * columns(block(c)) + _BARRIERS, device),
    )  # fmt: skip
    return [vector, matrix]


def _hopper_product(tunable: Tunable, key: Key, device: DeviceModel) -> list[TuningSpace[Any]]:
    tiles, tokens = cdiv(key["size"], 64), key["tokens"]
    sums = key["outputs"] * (2 if key["gated"] else 1)
    hopper_plan = tunable.classes["HopperProductPlan"]

    def columns(splits: int) -> int:
        """Tiles of 64 that a program has."""
        return cdiv(tiles, splits)

    def make(splits: int, chunks: int, slots: int, block: int) -> Any:
        return hopper_plan(splits, chunks, slots, cdiv(columns(splits), chunks * slots), block)

    parameters = [
        Parameter("splits", tuple(range(1, 17)) if key["split"] else (1,)), Parameter("chunks", (1, 2, 4, 8)),
        Parameter("slots", tuple(range(1, 17))), Parameter("block", (128, 256) if tokens > 64 else (128,)),
    ]  # fmt: skip
    return [
        _space(
            tunable, "HopperProductPlan", key, parameters,
            Constraint("more slots than groups of columns", lambda c: c["chunks"] * (c["slots"] - 1) >= columns(c["splits"])),
            _splits(lambda c: cdiv(sums, 64) * cdiv(tokens, c["block"]), device, 4), make=make,
        )
    ]  # fmt: skip


def _attention_decode(tunable: Tunable, key: Key, device: DeviceModel) -> list[TuningSpace[Any]]:
    dim, itemsize = bucket(key["head_dim"]), key["cache_dtype"].itemsize
    rows = max(16, bucket(key["group"]))
    pieces = sorted({max(1, int(n * device.sms) // key["kv_heads"]) for n in (1, 2, 3, 4, 6, 7.5)})
    parameters = [
        Parameter("pieces", tuple(pieces)), Parameter("tile", (16, 32, 64, 128)), Parameter("warps", (1, 2, 4, 8)),
        Parameter("stages", (2, 3, 4, 5)), Parameter("merge_registers", (16, 32, 64)),
        Parameter("early", (False, True), when=lambda c: key["rotate"], otherwise=False), Parameter("least", (1, 2, 3)),
    ]  # fmt: skip
    held = Constraint(
        "more than 128 registers a thread for the tile that is loaded early",
        lambda c: c["early"] and 2 * c["tile"] * dim * itemsize > 128 * 4 * 32 * c["warps"],
    )
    sums = Constraint(
        "more than 128 registers a thread for output and scores",
        lambda c: rows * (dim + 2 * c["tile"]) > 128 * 32 * c["warps"],
    )
    narrow = Constraint("warps without tokens of their own", lambda c: c["tile"] < 8 * c["warps"])
    shared = _shared(lambda c: 2 * (c["stages"] - 1) * c["tile"] * dim * itemsize + 2 * rows * dim, device)
    return [_space(tunable, "DecodePlan", key, parameters, sums, held, narrow, shared)]


def _attention_decode_hopper(tunable: Tunable, key: Key, device: DeviceModel) -> list[TuningSpace[Any]]:
    row = 2 * key["head_dim"] * key["cache_dtype"].itemsize  # bytes of a key and its value
    pieces = sorted({max(1, int(n * device.sms) // key["kv_heads"]) for n in (0.5, 1, 1.7, 1.85, 2, 3, 4)})
    parameters = [
        Parameter("pieces", tuple(pieces)), Parameter("least", (1, 2, 4, 8)), Parameter("warps", (1, 2, 4, 8)),
        Parameter("slots", (1, 2, 3, 4, 5, 6)), Parameter("box", (16, 32, 64)), Parameter("chunk", (2, 4, 8)),
        Parameter("empty_last", (False, True)), Parameter("cluster", (0, 2, 4, 8, 16)),
    ]  # fmt: skip
    seqs = key["num_seqs"]
    whole = Constraint("a cluster where most sequences are not cut", lambda c: c["cluster"] and c["pieces"] < 2 * seqs)
    far = Constraint(
        "a cluster of fewer programs than a sequence has", lambda c: seqs > 1 and 0 < c["cluster"] * seqs < c["pieces"]
    )
    few = Constraint(
        "less than 16 KiB asked for at a time, or more than 192",
        lambda c: not 16 << 10 <= 16 * c["warps"] * c["slots"] * row <= 192 << 10,
    )
    shared = _shared(lambda c: 16 * c["warps"] * c["slots"] * row + _BARRIERS, device)
    return [_space(tunable, "HopperDecodePlan", key, parameters, few, shared, whole, far)]


def _attention_prefill(tunable: Tunable, key: Key, device: DeviceModel) -> list[TuningSpace[Any]]:
    dim, itemsize = bucket(key["head_dim"]), key["dtype"].itemsize
    few = key["few_rows"]
    parameters = [
        Parameter("rows", (few,) if few else (32, 64, 128, 256)), Parameter("tile", (16, 32, 64, 128)), Parameter("warps", (2, 4, 8)),
        Parameter("stages", (1, 2, 3, 4)),
    ]  # fmt: skip
    idle = Constraint("warps without query rows", lambda c: 16 * c["warps"] > max(64, c["rows"]))
    sums = _values(lambda c: c["rows"] * (dim + c["tile"]), 192, "sums and scores")
    shared = _shared(
        lambda c: itemsize * dim * (c["rows"] + 2 * max(1, c["stages"] - 1) * c["tile"]) + _BARRIERS, device
    )
    return [_space(tunable, "PrefillPlan", key, parameters, idle, sums, shared)]


def _attention_prefill_hopper(tunable: Tunable, key: Key, device: DeviceModel) -> list[TuningSpace[Any]]:
    dim = max(64, bucket(key["head_dim"]))
    packs = tuple(p for p in powers(1, 64) if key["group"] % p == 0)
    parameters = [
        Parameter("pack", packs), Parameter("tile", (64, 128)), Parameter("stages", (2, 3, 4)), Parameter("programs", (0,)),
    ]  # fmt: skip
    shared = _shared(lambda c: 2 * dim * (128 + 2 * c["stages"] * c["tile"]) + _BARRIERS, device)
    return [_space(tunable, "HopperPlan", key, parameters, shared)]


_SPACES: dict[str, Callable[[Tunable, Key, Any], list[TuningSpace[Any]]]] = {
    **dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm", "softmax"), _rows),
    **dict.fromkeys(
        ("activate_and_mul", "fused_activation", "fused_add_gelu", "element_wise_mul_add", "embedding"), _elementwise
    ),
    **dict.fromkeys(("rotary", "rotary_store"), _heads),
    "product": _product,
    "small_product": _small_product,
    "hopper_product": _hopper_product,
    "attention_decode": _attention_decode,
    "attention_decode_hopper": _attention_decode_hopper,
    "attention_prefill": _attention_prefill,
    "attention_prefill_hopper": _attention_prefill_hopper,
}
