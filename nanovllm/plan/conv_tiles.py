"""Tiles of a convolution as an implicit matrix product, with halo: nothing is unfolded in memory.

Output pixels are the rows of the product (m = n P Q), output channels its columns, input channels times filter taps
its k. A block has `rows` x `columns` output pixels and `block_n` channels. For `block_c` input channels at a time it
loads the input pixels under its output pixels once, with the border that neighbouring blocks load too (the halo):
each input value is used up to r s times from shared memory, which unfolding would load r s times. A step multiplies
with the weights of one filter row, which are all that is staged more than twice.

If each input value is under one tap only (a stride of at least the filter: patches of an image, 1 x 1 filters), there
is no halo to share, and a block gathers: its rows are any output pixels, and each step loads `block_c` of the
channels x taps values under each of them. So does a block of an input of few channels, which would fill a step with
zeros, and of a filter whose patch does not fit.

nanovllm has no convolution kernel. The registers of these plans are those of `tile_kernel`, not compared with a
compiler.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from nanovllm.hardware.gpu_presets import DTYPE_BYTES, DeviceModel
from nanovllm.plan.conv_problem import ConvProblem, positions_read
from nanovllm.plan.gemm_tiles import L2_SHARE, GemmProblem, GemmTile
from nanovllm.plan.loop import LoopStep, loaded_latency, loop_seconds, overlapped
from nanovllm.plan.registers import gemm_registers
from nanovllm.plan.resources import SPILL_MARGIN, Plan, cdiv, nothing_fits, occupancy, ranked, stages_needed, waves

_FEW_CHANNELS = 16
"""Below which a step of one tap's channels would be filled up with zeros."""


@dataclass(frozen=True)
class ConvTile:
    """rows x columns output pixels by block_n filters; block_c input channels a step.

    Without `halo` the pixels are any `columns` that follow each other (rows is 1), and block_c counts channels x taps.
    """

    rows: int
    columns: int
    block_n: int
    block_c: int
    warps: int
    stages: int
    halo: bool = True

    @property
    def block_m(self) -> int:
        return self.rows * self.columns

    def __str__(self) -> str:
        if not self.halo:
            return f"{self.columns} pixels x {self.block_n}, k{self.block_c} w{self.warps} s{self.stages}"
        return f"{self.rows}x{self.columns} pixels x {self.block_n}, c{self.block_c} w{self.warps} s{self.stages}"


def patch(tile: ConvTile, problem: ConvProblem) -> int:
    """Input pixels that a tile of output pixels reads, halo included; if no row is left out, ((rows - 1) stride +
    dilation (r - 1) + 1) times the same across. Without halo: taps of each pixel."""
    p = problem
    if not tile.halo:
        return tile.block_m * p.taps
    down, across = ((tile.rows, p.filter_height), (tile.columns, p.filter_width))
    return positions_read(*down, p.stride, p.dilation) * positions_read(*across, p.stride, p.dilation)


def _taps_of_a_step(tile: ConvTile, problem: ConvProblem) -> int:
    return problem.filter_width if tile.halo else 1


def step_bytes(tile: ConvTile, problem: ConvProblem) -> tuple[float, float]:
    """(input, weights) that a step loads: its share of a patch, which serves all filter rows, and the weights of one
    filter row; without halo `block_c` values of each pixel and of each filter."""
    p, size = problem, DTYPE_BYTES[problem.dtype]
    pixels = patch(tile, p) / p.filter_height if tile.halo else tile.block_m
    return pixels * tile.block_c * size, tile.block_n * tile.block_c * _taps_of_a_step(tile, p) * size


def _step_flops(tile: ConvTile, problem: ConvProblem) -> float:
    return 2.0 * tile.block_m * tile.block_n * tile.block_c * _taps_of_a_step(tile, problem)


def intensity(tile: ConvTile, problem: ConvProblem) -> float:
    """Flops for each byte that a step loads: 2 BM BN BC s / ((patch BC / r + BN BC s) bytes)."""
    return _step_flops(tile, problem) / sum(step_bytes(tile, problem))


def shared_bytes(tile: ConvTile, problem: ConvProblem) -> int:
    """Two patches (one in use) and for each stage the weights of a filter row; without halo, one of both a stage."""
    x, weight = step_bytes(tile, problem)
    if not tile.halo or problem.filter_height == 1:
        return math.ceil(tile.stages * (x + weight))
    return math.ceil(2 * x * problem.filter_height + tile.stages * weight)


def _as_gemm(tile: ConvTile, problem: ConvProblem) -> tuple[GemmTile, GemmProblem]:
    k = problem.channels * problem.taps
    pixels = problem.batch * problem.out_height * problem.out_width
    return (
        GemmTile(tile.block_m, tile.block_n, tile.block_c, tile.warps, tile.stages),
        GemmProblem(pixels, problem.filters, max(16, 16 * (k // 16)), problem.dtype),
    )


def registers(tile: ConvTile, problem: ConvProblem, device: DeviceModel) -> int:
    """As a `tile_kernel` of the same accumulators, plus an address for each further copy of a patch or a tap."""
    base = gemm_registers(*_as_gemm(tile, problem), device)
    per_tap = (tile.block_m + tile.block_n) * tile.block_c * DTYPE_BYTES[problem.dtype]
    more = max(0.0, (sum(step_bytes(tile, problem)) - per_tap) / 16 / (32 * tile.warps))
    return math.ceil(base + 2 * more)


def _steps(tile: ConvTile, problem: ConvProblem) -> int:
    p = problem
    if not tile.halo:
        return cdiv(p.channels * p.taps, tile.block_c)
    return cdiv(p.channels, tile.block_c) * p.filter_height


def _tiles(problem: ConvProblem, halo: bool) -> list[ConvTile]:
    """What is not much larger than the problem."""
    p, size = problem, DTYPE_BYTES[problem.dtype]
    pixels = p.batch * p.out_height * p.out_width
    deep = p.channels if halo else p.channels * p.taps
    spots = (
        itertools.product((1, 2, 4, 8, 16), (4, 8, 16, 32, 64)) if halo else ((1, m) for m in (16, 32, 64, 128, 256))
    )
    found = []
    for (rows, columns), bn in itertools.product(spots, (32, 64, 128, 256)):
        if not 16 <= rows * columns <= 256 or bn >= 2 * max(32, p.filters):
            continue
        if halo and (rows >= 2 * p.out_height or columns >= 2 * max(16, p.out_width)):
            continue
        if not halo and columns >= 2 * max(16, pixels):
            continue
        for bc, warps, stages in itertools.product((16, 32, 64), (4, 8), (2, 3, 4)):
            tile = ConvTile(rows, columns, bn, bc, warps, stages, halo)
            if bc * size > 128 or bc >= 2 * max(16, deep) or stages > max(2, _steps(tile, p)):
                continue
            found.append(tile)
    return found


def candidates(problem: ConvProblem, device: DeviceModel) -> list[ConvTile]:
    """Every configuration that fits a block of the device.

    Raises:
        ValueError: the device does not multiply the dtype, or nothing fits.
    """
    device.rate(problem.dtype)

    def needs(tile: ConvTile) -> float:
        """The largest share of what there is."""
        most = device.registers_per_thread - SPILL_MARGIN
        return max(shared_bytes(tile, problem) / device.shared_per_block, registers(tile, problem, device) / most)

    tiles = _tiles(problem, True) if problem.shares else []
    found = [tile for tile in tiles if needs(tile) <= 1]
    if not found or problem.channels < _FEW_CHANNELS:
        tiles = _tiles(problem, False)
        found += [tile for tile in tiles if needs(tile) <= 1]
    if found:
        return found
    least = min(tiles, key=needs)
    raise nothing_fits("conv", least, shared_bytes(least, problem), registers(least, problem, device), device)


def _spots(tile: ConvTile, problem: ConvProblem) -> int:
    """Tiles of output pixels."""
    p = problem
    if not tile.halo:
        return cdiv(p.batch * p.out_height * p.out_width, tile.columns)
    return p.batch * cdiv(p.out_height, tile.rows) * cdiv(p.out_width, tile.columns)


def dram_bytes(tile: ConvTile, problem: ConvProblem, device: DeviceModel, resident: int) -> float:
    """Bytes through device memory, the blocks of one spot of the image being neighbours.

    What fits the L2 cache comes from memory once. Otherwise the blocks of one wave share the input under their
    output, with the halo around all of it, and the weights that they need.
    """
    p, size = problem, DTYPE_BYTES[problem.dtype]
    image, weights, output = (n * size for n in p.sizes)
    if image + weights <= L2_SHARE * device.l2_bytes:
        return image + weights + output
    filters = cdiv(p.filters, tile.block_n)
    blocks = _spots(tile, p) * filters
    per_wave = min(blocks, max(1, resident * device.sms))
    spots = cdiv(per_wave, filters)
    inputs = spots * image / _spots(tile, p)
    if tile.halo:
        across = cdiv(p.out_width, tile.columns)
        # Part of a row of tiles, else whole rows, of one image after the other.
        high = min(
            p.read_height, positions_read(cdiv(spots, across) * tile.rows, p.filter_height, p.stride, p.dilation)
        )
        wide = min(
            p.read_width, positions_read(min(spots, across) * tile.columns, p.filter_width, p.stride, p.dilation)
        )
        inputs = max(p.channels * size * high * wide, inputs)
    elif p.shares:
        # The rows of pixels that begin or end within the wave, and what the filters read around them.
        rows = cdiv(spots * tile.columns, p.out_width) + 1
        high = min(p.read_height, positions_read(rows, p.filter_height, p.stride, p.dilation))
        inputs = max(p.channels * size * high * p.read_width, inputs)
    needed = inputs
    needed += weights * min(1.0, per_wave / filters)
    return max(image + weights, needed * blocks / per_wave) + output


def predict(tile: ConvTile, problem: ConvProblem, device: DeviceModel) -> Plan:
    """The plan of one configuration."""
    p, size = problem, DTYPE_BYTES[problem.dtype]
    fit = occupancy(device, shared_bytes(tile, p), registers(tile, p, device), tile.warps)
    blocks = _spots(tile, p) * cdiv(p.filters, tile.block_n)
    steps = _steps(tile, p)
    wave = waves(blocks, max(1, fit.blocks), device.sms)
    rate = device.rate(p.dtype)
    x, weight = step_bytes(tile, p)
    step_flops = _step_flops(tile, p)
    dram = dram_bytes(tile, p, device, max(1, fit.blocks))
    plan = Plan(
        tile, blocks, intensity(tile, p), shared_bytes(tile, p), registers(tile, p, device), fit,
        stages_needed(loaded_latency(device), step_flops / (rate / device.sms)), wave, math.inf,
        {"shared memory": math.inf}, 0.0, p.flops, dram,
    )  # fmt: skip
    if not fit.blocks:
        return plan
    on_tensor_cores = p.dtype != "float32"
    wgmma = device.matrix_unit == "wgmma" and tile.block_m >= 64 and on_tensor_cores
    # Every tap reads its own window of the patch.
    x_read = tile.block_m * tile.block_c * _taps_of_a_step(tile, p) * size
    step = LoopStep(step_flops, x, weight, tile.block_m, x_read, weight, wgmma, tensor_cores=on_tensor_cores)
    store = tile.block_m * tile.block_n * size
    parts, fixed = loop_seconds(device, step, steps, blocks, fit, wave, tile.warps, tile.stages, rate, store)
    parts["memory"] = dram / device.bandwidth
    return replace(plan, parts=parts, fixed=fixed, seconds=overlapped(parts, fixed))


def plan_conv(problem: ConvProblem, device: DeviceModel) -> list[Plan]:
    """Every configuration that fits, the fastest by prediction first.

    Raises:
        ValueError: the device does not multiply the dtype, or nothing fits.
    """
    return ranked([predict(tile, problem, device) for tile in candidates(problem, device)])
