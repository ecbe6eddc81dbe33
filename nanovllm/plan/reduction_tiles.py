"""Blocks of row kernels: softmax, LayerNorm, RMSNorm. One pass if a block holds its row in registers, else the row is
read again.

The kernels are those of `kernels/triton/rows/norm.py` and `softmax.py`. A row in registers takes a register an
element for its thread; several short rows share a block, and a row that is no power of two may be several equal
blocks. A longer row goes by in pieces, once for the sums (LayerNorm: mean, then variance; softmax: maximum and sum
together, online) and once for the results.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from nanovllm.hardware.gpu_presets import DTYPE_BYTES, DeviceModel
from nanovllm.plan.elementwise_tiles import BLOCK_CYCLES, START_CYCLES
from nanovllm.plan.registers import ROW_MOST, reduction_registers
from nanovllm.plan.resources import (
    LOADED,
    SPILL_MARGIN,
    VECTOR_BYTES,
    Plan,
    bytes_needed,
    cdiv,
    combine,
    next_power_of_2,
    occupancy,
    one_of,
    positive,
    ranked,
    that_fit,
    waves,
)

DTYPES = ("bfloat16", "float16", "float32")
KINDS = ("softmax", "layer_norm", "rms_norm")
REDUCTIONS = {"softmax": 2, "layer_norm": 2, "rms_norm": 1}
"""Sums or maxima over a row, one after the other."""
LONG_READS = {"softmax": 2, "layer_norm": 3, "rms_norm": 2}
"""How often the kernels for long rows read a row."""
WEIGHTS = {"softmax": 0, "layer_norm": 2, "rms_norm": 1}
"""Rows of parameters that every block reads, from the cache."""
_OPERATIONS = {"softmax": 8, "layer_norm": 8, "rms_norm": 6}
_LONG_OPERATIONS = {"softmax": 20, "layer_norm": 10, "rms_norm": 7}
"""Instructions an element besides loads and stores. ASSUMED."""
_SHUFFLE_CYCLES = 30
_BARRIER_CYCLES = 120
"""Cycles of one reduction step within a warp, and of the exchange between warps. ASSUMED."""
MOST_ITEMS = 64
HELD_ITEMS = 8
"""Elements that a thread has of each block where several make up a row (`norm_pieces_kernel`)."""
LONG_PIECES = (1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class ReductionProblem:
    """`rows` rows of `size` elements.

    Attributes:
        kind: "softmax", "layer_norm" (weight and bias) or "rms_norm" (weight).

    Raises:
        ValueError: a size is not positive, or kind or dtype is unknown.
    """

    kind: str
    rows: int
    size: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        one_of("kind", self.kind, KINDS)
        positive(rows=self.rows, size=self.size)
        one_of("dtype", self.dtype, DTYPES)

    @property
    def itemsize(self) -> float:
        return DTYPE_BYTES[self.dtype]

    @property
    def least_bytes(self) -> float:
        """Every row read and written once."""
        return 2 * self.rows * self.size * self.itemsize

    @property
    def aligned(self) -> bool:
        """Whether Triton, which knows of a size whether 16 divides it, loads vectors."""
        return self.size % 16 == 0


@dataclass(frozen=True)
class ReductionTile:
    """rows: of a program; block: columns that it holds at a time, all of a row if `one_pass`. held: such blocks that
    make up a row, all of them in registers, so that a row of 3 x 4096 is not padded to 16384."""

    rows: int
    block: int
    warps: int
    one_pass: bool = True
    held: int = 1

    @property
    def items(self) -> int:
        """Elements a thread holds."""
        return max(1, self.rows * self.held * self.block // (32 * self.warps))

    def __str__(self) -> str:
        many = f" x {self.held}" if self.held > 1 else ""
        return f"{self.rows}x{self.block}{many} w{self.warps}" + ("" if self.one_pass else " in pieces")


def shared_bytes(tile: ReductionTile, problem: ReductionProblem) -> int:
    """What warps that share rows exchange, a 4-byte value each for each row (LayerNorm of 16-bit elements: two); and
    the weight, where it is loaded otherwise than it is used.

    That of RMSNorm is loaded by all warps, and rearranged for those of one row if they have rows of their own, as
    4-byte values (by Triton 3.6, and sometimes 3.9, before it is converted: half of that if it is of 2 bytes). Where
    rows are not aligned, and so lie across threads element by element, weights are still loaded in vectors, and
    rearranged a vector of each thread at a time (two in long rows of 2 bytes).
    """
    p, threads = problem, 32 * tile.warps
    vector = int(VECTOR_BYTES / p.itemsize)
    alone = tile.rows == 1
    across = tile.warps if alone else min(tile.warps, max(1, tile.block // (32 * (vector if p.aligned else 1))))
    exchanged = 4 * tile.rows * across if across > 1 else 0
    if p.kind == "layer_norm" and tile.one_pass and p.itemsize == 2:
        exchanged *= 2
    rearranged = 0
    if p.aligned:
        if p.kind == "rms_norm" and tile.one_pass and across < tile.warps and tile.block >= 128:
            rearranged = 4 * tile.block
    elif p.kind != "softmax" and tile.items > 1:
        vectors = 1 if tile.one_pass or p.itemsize == 4 else 2
        rearranged = min(int(tile.block * p.itemsize), threads * VECTOR_BYTES * vectors)
    return max(exchanged, rearranged)


def most_registers(tile: ReductionTile, device: DeviceModel) -> int:
    """The most registers that a thread can have if the block is to fit at all."""
    return min(device.registers_per_thread, device.registers_per_sm // (32 * tile.warps))


def candidates(problem: ReductionProblem, device: DeviceModel) -> list[ReductionTile]:
    """Whole rows in registers where they fit without spilling, short ones several a program, or made up of equal
    blocks where a power of two would be padded; else pieces of a row."""
    width = next_power_of_2(problem.size)
    # LayerNorm's kernel takes one row.
    most = 1 if problem.kind == "layer_norm" else next_power_of_2(problem.rows)
    found = []
    for warps, rows in itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32)):
        if (
            rows <= most
            and 32 * warps <= rows * width <= 32 * warps * MOST_ITEMS
            or (rows == warps == 1 and width < 32)
        ):
            found.append(ReductionTile(rows, width, warps))
    if problem.kind != "softmax" and width != problem.size:
        for warps in (1, 2, 4, 8, 16):
            block = 32 * HELD_ITEMS * warps
            held = problem.size // block
            if problem.size % block == 0 and 2 <= held <= MOST_ITEMS // HELD_ITEMS:
                found.append(ReductionTile(1, block, warps, held=held))
    if problem.size > 1024:
        found += [
            ReductionTile(1, piece, warps, False) for piece in LONG_PIECES for warps in (4, 8, 16) if piece < width
        ]

    def fits(tile: ReductionTile) -> bool:
        most = most_registers(tile, device)
        return reduction_registers(tile, problem) <= (ROW_MOST * most if most >= 128 else most - SPILL_MARGIN)

    return [tile for tile in found if fits(tile)]


def predict(tile: ReductionTile, problem: ReductionProblem, device: DeviceModel) -> Plan:
    """The plan of one configuration."""
    p = problem
    registers, shared = min(reduction_registers(tile, p), most_registers(tile, device)), shared_bytes(tile, p)
    fit = occupancy(device, shared, registers, tile.warps)
    blocks = cdiv(p.rows, tile.rows)
    wave = waves(blocks, max(1, fit.blocks), device.sms)
    resident = max(1, min(fit.blocks, wave.busiest))
    row_bytes = p.size * p.itemsize
    once = p.rows * row_bytes
    reads = 1 if tile.one_pass else LONG_READS[p.kind]
    pieces = 1 if tile.one_pass else cdiv(p.size, tile.block)
    width = tile.held * tile.block
    # What is read again is still in the L2 cache if the rows in progress fit there.
    in_cache = min(blocks, resident * device.sms) * tile.rows * row_bytes <= 0.8 * device.l2_bytes
    dram = once * (1 if in_cache else reads) + once
    loaded = once * reads + blocks * WEIGHTS[p.kind] * row_bytes
    in_flight = resident * tile.rows * min(width, p.size) * p.itemsize
    threads = 32 * tile.warps
    elements = tile.rows * pieces * width  # with padding
    vectors = math.ceil(elements / threads / max(1.0, min(tile.items, VECTOR_BYTES / p.itemsize)))
    operations = (_OPERATIONS if tile.one_pass else _LONG_OPERATIONS)[p.kind]
    reduction = (5 * _SHUFFLE_CYCLES + (_BARRIER_CYCLES if tile.warps > 1 else 0)) * REDUCTIONS[p.kind]
    instructions = 40 + 4 * vectors * (reads + 1 + WEIGHTS[p.kind]) + operations * elements / threads + 10 * tile.rows
    wait = LOADED * device.dram_latency + (pieces * reads - 1) * (
        LOADED * device.l2_latency if in_cache else LOADED * device.dram_latency
    )
    turns = max(1.0, wave.busiest / resident)
    parts = {
        "memory": dram / device.bandwidth,
        "latency": turns * (wait + (START_CYCLES + reduction) / device.clock),
        "compute": wave.busiest * threads * instructions / (device.lanes * device.clock),
        "blocks": wave.busiest * BLOCK_CYCLES / device.clock,
        "L2": (loaded + once) / device.l2_bandwidth,
    }
    fixed = device.launch + device.dram_latency
    flops = float(operations * p.rows * p.size)
    return Plan(
        tile, blocks, flops / (2 * once), shared, registers, fit, 0, wave,
        combine(parts, fixed) if fit.blocks else math.inf, parts, fixed, flops, dram, in_flight, bytes_needed(device),
    )  # fmt: skip


def plan_reduction(problem: ReductionProblem, device: DeviceModel) -> list[Plan]:
    """Every configuration that fits, the fastest by prediction first."""
    least, predicted = (
        ReductionTile(1, next_power_of_2(problem.size), 1),
        (predict(tile, problem, device) for tile in candidates(problem, device)),
    )
    plans = that_fit(
        "reduction", predicted, device, least, shared_bytes(least, problem), reduction_registers(least, problem)
    )
    # A row once, without padding, two vectors a thread: enough to load at a time, few enough for other rows beside it.
    some = 2 * VECTOR_BYTES / problem.itemsize

    def preferred(tile: ReductionTile) -> tuple[float, ...]:
        padding = tile.held * tile.block > problem.size
        # Of such blocks four warps, as the engine's own rule.
        return not tile.one_pass, padding, abs(math.log2(tile.warps / 4 if tile.held > 1 else tile.items / some))

    return ranked(plans, preferred)
