"""Tiles of a matrix product [m, k] x [n, k]^T, also with packed weights: what fits, and what is fastest by prediction.

The kernels are those of `kernels/triton/gemm/tiled_kernel.py`: `tma_kernel` on Hopper, whose blocks each take several
tiles, and `tile_kernel` anywhere.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from nanovllm.hardware.gpu_presets import DTYPE_BYTES, DeviceModel
from nanovllm.plan.loop import LoopStep, loaded_latency, loop_seconds, overlapped
from nanovllm.plan.registers import copies, gemm_registers
from nanovllm.plan.resources import (
    SPILL_MARGIN,
    Plan,
    cdiv,
    occupancy,
    one_of,
    positive,
    ranked,
    stages_needed,
    that_fit,
    uses_wgmma,
    waves,
)

if TYPE_CHECKING:
    from nanovllm.kernels.triton.gemm.product_plan import StreamPlan, TilePlan

DTYPES = ("bfloat16", "float16", "float32", "tfloat32", "float8")
WEIGHTS = ("int4", "int8", "float8")
BARRIER_BYTES = 8
_SCRATCH_BYTES = 128
"""Bytes of each thread in which Triton rearranges 4-byte outputs."""
_STAGED = {
    "mma": {
        2: {
            (64, 128, 8): 16, (128, 64, 4): 16, (128, 64, 8): 16, (128, 128, 8): 32, (256, 64, 8): 32,
            (256, 128, 8): 64,
        },
        4: {
            (32, 64, 8): 8, (64, 32, 4): 8, (64, 32, 8): 8, (64, 64, 8): 16, (64, 128, 8): 16, (128, 32, 4): 16,
            (128, 32, 8): 16, (128, 64, 8): 32, (128, 256, 8): 32, (256, 32, 8): 32, (256, 64, 8): 32,
            (256, 128, 8): 32,
        },
    },
    "wgmma": {
        2: {(64, 128, 8): 16, (128, 64, 8): 16, (128, 128, 8): 32, (128, 256, 8): 32, (256, 128, 8): 32},
        4: {
            (64, 32, 8): 8, (64, 64, 4): 16, (64, 64, 8): 16, (64, 128, 4): 32, (64, 128, 8): 32, (64, 256, 4): 64,
            (64, 256, 8): 64, (128, 32, 4): 16, (128, 32, 8): 16, (128, 64, 4): 16, (128, 64, 8): 32, (128, 128, 8): 64,
            (256, 32, 8): 32, (256, 64, 8): 64,
        },
    },
}  # fmt: skip
"""KiB in which `tile_kernel` rearranges an output tile for its stores once the loop has ended: by instruction, bytes
of an element, rows, columns and warps, wherever it can be more than the loop takes. It depends on how Triton arranges
warps and registers over both layouts, so this is what Triton 3.6 and 3.9 compile."""
SMALL_TILE = 64 * 64
WANTED_BLOCKS = 4
"""Blocks a multiprocessor should have room for if its tiles are small, so that their latencies and tails overlap."""
_CONVERT_LANES = 64
"""Integer and conversion instructions a cycle and SM (CUDA C++ Programming Guide, "Arithmetic Instructions")."""
CONVERT = {"int4": 1.25, "int8": 1.0, "float8": 1.0}
"""Instructions that unpack and scale one weight, two at a time as in `triton_attention.attend.fp8_pair`. ASSUMED."""
L2_SHARE = 0.8
"""Share of the L2 cache that holds operands until they are read again. ASSUMED."""


@dataclass(frozen=True)
class GemmProblem:
    """The product of x [m, k] in `dtype` with a weight [n, k].

    Attributes:
        dtype: of x, of the output, and of what is multiplied. float32 is multiplied on the ordinary units, tfloat32
            on tensor cores.
        weight: the packed type of the weight, converted to `dtype` on the way to the product; None: `dtype` itself.
        group: weights of a row that share one 16-bit scale, if packed.

    Raises:
        ValueError: a size is not positive, a dtype is unknown, or the packed weights of a row do not fill whole groups.
    """

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    weight: str | None = None
    group: int = 128

    def __post_init__(self) -> None:
        positive(m=self.m, n=self.n, k=self.k, group=self.group)
        one_of("dtype", self.dtype, DTYPES)
        if self.weight is not None:
            one_of("weight", self.weight, WEIGHTS)
            if self.dtype not in ("bfloat16", "float16"):
                raise ValueError(f"dtype: packed weights are converted to bfloat16 or float16, not {self.dtype!r}")
            if self.k % self.group:
                raise ValueError(f"k: expected a multiple of the group of {self.group} weights, not {self.k}")

    @property
    def bytes_x(self) -> float:
        return DTYPE_BYTES[self.dtype]

    @property
    def aligned(self) -> bool:
        """Whether Triton can prove rows aligned to 16 bytes, and so copies them in vectors: whether 16 divides k."""
        return self.k % 16 == 0

    @property
    def bytes_weight(self) -> float:
        """Bytes a weight, its share of a scale included."""
        return self.bytes_x if self.weight is None else DTYPE_BYTES[self.weight] + 2 / self.group

    @property
    def least_bytes(self) -> float:
        """Both operands and the result once."""
        return (self.m * self.k + self.m * self.n) * self.bytes_x + self.n * self.k * self.bytes_weight


@dataclass(frozen=True)
class GemmTile:
    """A configuration. `splits`: programs that share a tile's k. `tma`: for `tma_kernel`, else `tile_kernel`."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 8
    splits: int = 1
    tma: bool = False

    @property
    def flatten(self) -> bool:
        """Whether a program of `tma_kernel` loads its next tile before it stores the last: for the widest tiles."""
        return self.tma and self.splits == 1 and self.block_n == 256

    def __str__(self) -> str:
        text = f"{self.block_m}x{self.block_n}x{self.block_k} w{self.warps} s{self.stages}"
        text += (f" split {self.splits}" if self.splits > 1 else "") + (" tma" if self.tma else "")
        return text + (f" group {self.group_m}" if self.group_m != 8 else "")


def staged(tile: GemmTile, problem: GemmProblem) -> bool:
    """Whether stages have an effect.

    Rows that are not aligned are loaded element by element, and what is smaller than 4 bytes cannot be copied to shared
    memory while a product runs: it goes through registers, and Triton compiles the same loop for any number of stages.
    """
    return tile.tma or problem.aligned or problem.bytes_x >= 4


def intensity(tile: GemmTile, problem: GemmProblem) -> float:
    """Flops for each byte of the operands that a step loads: 2 BM BN BK / ((BM BK + BK BN) bytes)."""
    loaded = tile.block_k * (tile.block_m * problem.bytes_x + tile.block_n * problem.bytes_weight)
    return 2 * tile.block_m * tile.block_n * tile.block_k / loaded


def shared_bytes(tile: GemmTile, problem: GemmProblem, device: DeviceModel) -> int:
    """Shared memory of a block.

    `tile_kernel` copies `stages` tiles ahead where the product reads shared memory (wgmma), one less where fragments
    are loaded to registers first; 16-bit elements of rows that are not aligned come through registers, into one
    buffer. The output tile is rearranged there once the loop has ended, a part at a time if layouts allow.
    `tma_kernel` also has a barrier a stage and gathers the output tile.
    """
    p = problem
    loaded = tile.block_k * (tile.block_m * p.bytes_x + tile.block_n * p.bytes_weight)
    output = tile.block_m * tile.block_n * (4 if tile.splits > 1 else p.bytes_x)
    if tile.tma:
        return math.ceil(tile.stages * (loaded + BARRIER_BYTES) + (0 if tile.splits > 1 else output))
    wgmma = uses_wgmma(device, tile.block_m, tile.warps, p.dtype) or device.matrix_unit == "tcgen05"
    stages = max(1, tile.stages if wgmma else tile.stages - 1) if staged(tile, p) else 1
    if p.n % 16 == 0:
        size = 4 if tile.splits > 1 else int(p.bytes_x)
        kind = "wgmma" if wgmma else "mma"
        output = (
            0
            if p.dtype == "float32" or size < 2
            else 1024 * _STAGED[kind][size].get((tile.block_m, tile.block_n, tile.warps), 0)
        )
    elif tile.splits > 1 or p.bytes_x == 4:
        output = min(output, _SCRATCH_BYTES * 32 * tile.warps)
    return math.ceil(max(stages * loaded, output))


def wanted_blocks(tile: GemmTile, problem: GemmProblem, device: DeviceModel) -> int:
    """Blocks that a multiprocessor should have room for: as many as the grid has for it, at most 4, if tiles are small.

    Tiles without stages need more registers than that leaves; few blocks show in their time, since nothing else hides
    a load.
    """
    if tile.block_m * tile.block_n > SMALL_TILE or not staged(tile, problem):
        return 1
    tiles = cdiv(problem.m, tile.block_m) * cdiv(problem.n, tile.block_n) * tile.splits
    return min(WANTED_BLOCKS, cdiv(tiles, device.sms))


def engine_plan(problem: GemmProblem, device: DeviceModel) -> StreamPlan | TilePlan | None:
    """The choice of the engine's own rule; None if no kernel takes the problem, or without Triton."""
    p = problem
    if p.weight is not None or p.dtype == "float8":
        return None
    try:
        from nanovllm.kernels.triton.gemm.product_plan import plan_product
        from nanovllm.kernels.triton.gemm.tiled_products import TMA_SHARED
    except ImportError:  # no Triton
        return None
    size = int(p.bytes_x)
    tma = size == 2 and p.n % 8 == 0 and p.k % 8 == 0
    tma = tma and device.capability >= 90 and device.shared_per_block >= TMA_SHARED
    return plan_product(p.m, p.n, p.k, size, False, True, tma, device.sms)


def engine_tile(problem: GemmProblem, device: DeviceModel) -> GemmTile | None:
    """The engine's choice, if it is for a kernel that is planned here."""
    chosen = engine_plan(problem, device)
    if not hasattr(chosen, "block_m"):  # none, or for few rows
        return None
    return GemmTile(**{f.name: getattr(chosen, f.name) for f in fields(GemmTile)})


def _fits(tile: GemmTile, problem: GemmProblem, device: DeviceModel) -> bool:
    if shared_bytes(tile, problem, device) > device.shared_per_block:
        return False
    margin: float = SPILL_MARGIN
    if device.matrix_unit == "mma" and problem.bytes_x == 2 and problem.aligned:
        # Fragments of x are held for a whole step, which the line tells too little of: what has many of them spills
        # first.
        margin += 2 * copies(tile.block_m, tile, problem.bytes_x)
    return gemm_registers(tile, problem, device) <= device.registers_per_thread - margin


def candidates(problem: GemmProblem, device: DeviceModel) -> list[GemmTile]:
    """Every configuration that fits a block of the device: shared memory, registers without spilling.

    Tiles of more than twice a size of the problem are left out, and so are splits where tiles alone fill the device.
    What the engine's own rule chooses is among them whatever its sizes, if it fits.
    """
    device.rate(problem.dtype)
    # The kernel multiplies 32-bit operands on the ordinary units only.
    tma = device.capability >= 90 and device.shared_per_block >= 227 << 10 and problem.bytes_x <= 2
    aligned = all(size * problem.bytes_x % 16 == 0 for size in (problem.n, problem.k))
    found = []
    for bm, bn in itertools.product((16, 32, 64, 128, 256), (32, 64, 128, 256)):
        if bm >= 2 * max(16, problem.m) or bn >= 2 * max(32, problem.n):
            continue
        tiles = cdiv(problem.m, bm) * cdiv(problem.n, bn)
        splits = [s for s in (1, 2, 4, 8) if s == 1 or (tiles * s <= 2 * device.sms and problem.k >= 256 * s)]
        for bk, warps, stages, split in itertools.product((32, 64, 128), (4, 8), (2, 3, 4, 5, 6, 8), splits):
            if bk * problem.bytes_x > 256 or bk >= 2 * max(32, problem.k):
                continue
            if stages > max(2, cdiv(cdiv(problem.k, split), bk)):
                continue
            kind = tma and aligned and bm >= 64 and problem.weight is None
            tile = GemmTile(bm, bn, bk, warps, stages, splits=split, tma=kind)
            if (stages == 2 or staged(tile, problem)) and _fits(tile, problem, device):
                found.append(tile)
    own = engine_tile(problem, device)
    if own is not None and own not in found and _fits(own, problem, device):
        if not staged(own, problem):  # instead of the same kernel
            found = [tile for tile in found if tile != replace(own, stages=2)]
        found.append(own)
    return found


def predict(tile: GemmTile, problem: GemmProblem, device: DeviceModel) -> Plan:
    """The plan of one configuration; `occupancy.blocks` may be 0, and the time is then infinite."""
    p, bm, bn, bk = problem, tile.block_m, tile.block_n, tile.block_k
    shared, registers = shared_bytes(tile, p, device), gemm_registers(tile, p, device)
    fit = occupancy(device, shared, registers, tile.warps)
    blocks = cdiv(p.m, bm) * cdiv(p.n, bn) * tile.splits
    steps = cdiv(cdiv(p.k, tile.splits), bk)
    wave = waves(blocks, max(1, fit.blocks), device.sms)
    dram = dram_bytes(tile, p, device, max(1, fit.blocks))
    rate = device.rate(p.dtype)
    step_flops = 2.0 * bm * bn * bk
    min_stages = stages_needed(loaded_latency(device), step_flops / (rate / device.sms))
    plan = Plan(
        tile, blocks, intensity(tile, p), shared, registers, fit, min_stages, wave, math.inf,
        {"shared memory": math.inf}, 0.0, 2.0 * p.m * p.n * p.k, dram,
    )  # fmt: skip
    if not fit.blocks:
        return plan
    x, weight = bm * bk * p.bytes_x, bn * bk * p.bytes_weight
    # Packed weights are unpacked in registers and multiplied from there, or by wgmma from shared memory again.
    convert = 0.0 if p.weight is None else bn * bk * CONVERT[p.weight] / (_CONVERT_LANES * device.clock)
    step = LoopStep(
        step_flops, x, weight, bm, x, bn * bk * p.bytes_x, uses_wgmma(device, tile.block_m, tile.warps, p.dtype),
        convert, p.dtype != "float32",
    )  # fmt: skip
    store = bm * bn * (4 if tile.splits > 1 else p.bytes_x)
    stages = tile.stages if staged(tile, p) else 1
    parts, fixed = loop_seconds(device, step, steps, blocks, fit, wave, tile.warps, stages, rate, store)
    parts["memory"] = dram / device.bandwidth
    if tile.splits > 1:
        fixed += device.launch + 2 * tile.splits * 4 * p.m * p.n / device.l2_bandwidth
    return replace(plan, parts=parts, fixed=fixed, seconds=overlapped(parts, fixed))


def dram_bytes(tile: GemmTile, problem: GemmProblem, device: DeviceModel, resident: int) -> float:
    """Bytes through device memory, with tiles in groups of `group_m` rows.

    The tiles of one wave share the rows of x and of the weight that they need, once each. What the next wave needs
    again comes from the L2 cache if both operands fit there.
    """
    p = problem
    x, weight, out = p.m * p.k * p.bytes_x, p.n * p.k * p.bytes_weight, p.m * p.n * p.bytes_x
    tiles_m, tiles_n = cdiv(p.m, tile.block_m), cdiv(p.n, tile.block_n)
    if x + weight <= L2_SHARE * device.l2_bytes:
        return x + weight + out
    per_wave = max(1, resident * device.sms // tile.splits)
    rows = min(tile.group_m, tiles_m)
    columns = min(tiles_n, cdiv(per_wave, rows))
    rows = min(tiles_m, max(rows, cdiv(per_wave, tiles_n)))
    needed = p.k * (rows * tile.block_m * p.bytes_x + columns * tile.block_n * p.bytes_weight)
    return max(x + weight, needed * tiles_m * tiles_n / min(per_wave, tiles_m * tiles_n)) + out


def plan_gemm(problem: GemmProblem, device: DeviceModel) -> list[Plan]:
    """Every configuration that fits and leaves room for the wanted blocks, and the engine's own, the fastest by
    prediction first.

    Raises:
        ValueError: the device does not multiply the dtype, or nothing fits.
    """
    least, own = GemmTile(16, 32, 32, 4, 2), engine_tile(problem, device)
    predicted = (predict(tile, problem, device) for tile in candidates(problem, device))
    wanted = (p for p in predicted if p.config == own or p.occupancy.blocks >= wanted_blocks(p.config, problem, device))
    shared, registers = shared_bytes(least, problem, device), gemm_registers(least, problem, device)
    return ranked(that_fit("gemm", wanted, device, least, shared, registers))
