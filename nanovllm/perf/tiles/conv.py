"""Tiles of a convolution as an implicit matrix product, with halo: nothing is unfolded in memory.

Output pixels are the rows of the product (m = n P Q), output channels its columns, input channels times filter taps its k. A block has
`rows` x `columns` output pixels and `block_n` channels. For `block_c` input channels at a time it loads the input pixels under its output
pixels once, with the border that neighbouring blocks load too (the halo): each input value is used up to r s times from shared memory,
which unfolding would load r s times. A step multiplies with the weights of one filter row, which are all that is staged more than twice.

nanovllm has no convolution of its own: these plans are for a kernel to be written, and their registers, taken from the line of
`tile_kernel`, cannot be held against a compiler.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from nanovllm.perf.presets import DTYPE_BYTES, DeviceModel
from nanovllm.perf.tiles.gemm import L2_SHARE, GemmProblem, GemmTile
from nanovllm.perf.tiles.loop import Step, loaded_latency, loop_seconds, overlapped
from nanovllm.perf.tiles.registers import gemm_registers
from nanovllm.perf.tiles.resources import (
    SPILL_MARGIN,
    Plan,
    cdiv,
    nothing_fits,
    occupancy,
    positive,
    ranked,
    stages_needed,
    waves,
)

DTYPES = ("bfloat16", "float16", "float32", "tfloat32")


@dataclass(frozen=True)
class ConvProblem:
    """Input [batch, channels, height, width], channels innermost in memory; weights [filters, channels, filter_height, filter_width].

    Attributes:
        stride, dilation: of both dimensions; padding: zeros on each side.

    Raises:
        ValueError: a size is not positive, padding is negative, or the filter does not fit the padded image.
    """

    batch: int
    channels: int
    height: int
    width: int
    filters: int
    filter_height: int = 3
    filter_width: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        names = (
            "batch",
            "channels",
            "height",
            "width",
            "filters",
            "filter_height",
            "filter_width",
            "stride",
            "dilation",
        )
        positive(**{name: getattr(self, name) for name in names})
        if not isinstance(self.padding, int) or self.padding < 0:
            raise ValueError(f"padding: expected an integer of at least 0, not {self.padding!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, not {self.dtype!r}")
        for name, taps in (("height", self.filter_height), ("width", self.filter_width)):
            size = getattr(self, name)
            if size + 2 * self.padding < self.dilation * (taps - 1) + 1:
                raise ValueError(
                    f"filter_{name}: {taps} taps with dilation {self.dilation} need {self.dilation * (taps - 1) + 1} pixels, "
                    f"the padded image has {size + 2 * self.padding}"
                )

    def _output(self, size: int, taps: int) -> int:
        return (size + 2 * self.padding - self.dilation * (taps - 1) - 1) // self.stride + 1

    @property
    def out_height(self) -> int:
        return self._output(self.height, self.filter_height)

    @property
    def out_width(self) -> int:
        return self._output(self.width, self.filter_width)

    @property
    def taps(self) -> int:
        return self.filter_height * self.filter_width

    @property
    def flops(self) -> float:
        pixels = self.batch * self.out_height * self.out_width
        return 2.0 * pixels * self.filters * self.channels * self.taps

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Elements of the input, the weights and the output."""
        outputs = self.batch * self.filters * self.out_height * self.out_width
        return self.batch * self.channels * self.height * self.width, self.filters * self.channels * self.taps, outputs

    @property
    def least_bytes(self) -> float:
        """Input, weights and output once."""
        return sum(self._sizes) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class ConvTile:
    """rows x columns output pixels by block_n filters; block_c input channels a step."""

    rows: int
    columns: int
    block_n: int
    block_c: int
    warps: int
    stages: int

    @property
    def block_m(self) -> int:
        return self.rows * self.columns

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns} pixels x {self.block_n}, c{self.block_c} w{self.warps} s{self.stages}"


def patch(tile: ConvTile, problem: ConvProblem) -> int:
    """Input pixels under a tile of output pixels, halo included: ((rows - 1) stride + dilation (r - 1) + 1) times the same across."""
    p = problem
    height = (tile.rows - 1) * p.stride + p.dilation * (p.filter_height - 1) + 1
    return height * ((tile.columns - 1) * p.stride + p.dilation * (p.filter_width - 1) + 1)


def step_bytes(tile: ConvTile, problem: ConvProblem) -> tuple[float, float]:
    """(input, weights) that a step loads: its share of a patch, which serves all filter rows, and the weights of one filter row."""
    p, size = problem, DTYPE_BYTES[problem.dtype]
    return patch(tile, p) * tile.block_c * size / p.filter_height, tile.block_n * tile.block_c * p.filter_width * size


def intensity(tile: ConvTile, problem: ConvProblem) -> float:
    """Flops for each byte that a step loads: 2 BM BN BC s / ((patch BC / r + BN BC s) bytes)."""
    return 2.0 * tile.block_m * tile.block_n * tile.block_c * problem.filter_width / sum(step_bytes(tile, problem))


def shared_bytes(tile: ConvTile, problem: ConvProblem) -> int:
    """Two patches, one in use and one on its way (a 1 x 1 filter: one a stage), and the weights of a filter row a stage."""
    x, weight = step_bytes(tile, problem)
    patches = tile.stages if problem.filter_height == 1 else 2
    return math.ceil(patches * x * problem.filter_height + tile.stages * weight)


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


def _tiles(problem: ConvProblem) -> list[ConvTile]:
    """What is not much larger than the problem."""
    size = DTYPE_BYTES[problem.dtype]
    found = []
    for rows, columns, bn in itertools.product((1, 2, 4, 8, 16), (8, 16, 32, 64), (32, 64, 128, 256)):
        if not 16 <= rows * columns <= 256 or bn >= 2 * max(32, problem.filters):
            continue
        if rows >= 2 * problem.out_height or columns >= 2 * max(16, problem.out_width):
            continue
        for bc, warps, stages in itertools.product((16, 32, 64), (4, 8), (2, 3, 4)):
            if (
                bc * size > 128
                or bc >= 2 * max(16, problem.channels)
                or stages > max(2, cdiv(problem.channels, bc) * problem.filter_height)
            ):
                continue
            found.append(ConvTile(rows, columns, bn, bc, warps, stages))
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

    tiles = _tiles(problem)
    if found := [tile for tile in tiles if needs(tile) <= 1]:
        return found
    least = min(tiles, key=needs)
    raise nothing_fits("conv", least, shared_bytes(least, problem), registers(least, problem, device), device)


def dram_bytes(tile: ConvTile, problem: ConvProblem, device: DeviceModel, resident: int) -> float:
    """Bytes through device memory, the blocks of one spot of the image being neighbours.

    What fits the L2 cache comes from memory once. Otherwise the blocks of one wave share the input under their output, with the
    halo around all of it, and the weights that they need.
    """
    p, size = problem, DTYPE_BYTES[problem.dtype]
    image, weights, output = (n * size for n in p._sizes)
    if image + weights <= L2_SHARE * device.l2_bytes:
        return image + weights + output
    down, across, filters = cdiv(p.out_height, tile.rows), cdiv(p.out_width, tile.columns), cdiv(p.filters, tile.block_n)
    blocks = p.batch * down * across * filters
    per_wave = min(blocks, max(1, resident * device.sms))
    spots = cdiv(per_wave, filters)
    # Part of a row of tiles, else whole rows, of one image after the other.
    high = min(p.height, (cdiv(spots, across) * tile.rows - 1) * p.stride + p.dilation * (p.filter_height - 1) + 1)
    wide = min(p.width, (min(spots, across) * tile.columns - 1) * p.stride + p.dilation * (p.filter_width - 1) + 1)
    needed = p.channels * size * max(high * wide, spots * p.height * p.width / (down * across))
    needed += weights * min(1.0, per_wave / filters)
    return max(image + weights, needed * blocks / per_wave) + output


def predict(tile: ConvTile, problem: ConvProblem, device: DeviceModel) -> Plan:
    """The plan of one configuration."""
    p, size = problem, DTYPE_BYTES[problem.dtype]
    fit = occupancy(device, shared_bytes(tile, p), registers(tile, p, device), tile.warps)
    spots = p.batch * cdiv(p.out_height, tile.rows) * cdiv(p.out_width, tile.columns)
    blocks = spots * cdiv(p.filters, tile.block_n)
    steps = cdiv(p.channels, tile.block_c) * p.filter_height
    wave = waves(blocks, max(1, fit.blocks), device.sms)
    rate = device.rate(p.dtype)
    x, weight = step_bytes(tile, p)
    step_flops = 2.0 * tile.block_m * tile.block_n * tile.block_c * p.filter_width
    dram = dram_bytes(tile, p, device, max(1, fit.blocks))
    plan = Plan(
        tile, blocks, intensity(tile, p), shared_bytes(tile, p), registers(tile, p, device), fit,
        stages_needed(loaded_latency(device), step_flops / (rate / device.sms)), wave, math.inf, {"shared memory": math.inf}, 0.0, p.flops, dram,
    )  # fmt: skip
    if not fit.blocks:
        return plan
    on_tensor_cores = p.dtype != "float32"
    wgmma = device.matrix_unit == "wgmma" and tile.block_m >= 64 and on_tensor_cores
    # Every tap reads its own window of the patch.
    step = Step(step_flops, x, weight, tile.block_m, tile.block_m * tile.block_c * p.filter_width * size, weight, wgmma)
    parts, fixed = loop_seconds(
        device,
        step,
        steps,
        blocks,
        fit,
        wave,
        tile.warps,
        tile.stages,
        rate,
        tile.block_m * tile.block_n * size,
        on_tensor_cores,
    )
    parts["memory"] = dram / device.bandwidth
    return replace(plan, parts=parts, fixed=fixed, seconds=overlapped(parts, fixed))


def plan_conv(problem: ConvProblem, device: DeviceModel) -> list[Plan]:
    """Every configuration that fits, the fastest by prediction first.

    Raises:
        ValueError: the device does not multiply the dtype, or nothing fits (a filter so large that two patches fill shared memory).
    """
    return ranked([predict(tile, problem, device) for tile in candidates(problem, device)])
