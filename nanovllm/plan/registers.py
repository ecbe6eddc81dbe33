"""Registers a thread, predicted from what a thread holds: accumulators, the addresses of its copies, its elements,
and a rest.

Each kernel is a line over these counts. An accumulator's factor is 1 where a product accumulates in place, and above
where the epilogue holds values and their addresses at once; a 16-byte copy costs an address of two registers, and a
half for masks. FITTED: least sums of relative errors over some hundred configurations of each kernel compiled by
Triton 3.9, and for attention and rows also 3.6, for compute capability 9.0 and 8.0; how well the lines hold is tested
(tests/plan/test_plan_compile.py) and told in docs/planner.md. The assembler adds noise of its own: it gives up
registers to fit one block more, and takes more when there is room.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nanovllm.hardware.gpu_presets import DTYPE_BYTES, DeviceModel
from nanovllm.plan.resources import SPILL_MARGIN, padded, uses_wgmma

if TYPE_CHECKING:
    from nanovllm.plan.attention_tiles import AttentionProblem, AttentionTile
    from nanovllm.plan.elementwise_tiles import ElementwiseProblem, ElementwiseTile
    from nanovllm.plan.gemm_tiles import GemmProblem, GemmTile
    from nanovllm.plan.reduction_tiles import ReductionProblem, ReductionTile

_VECTOR = 16

TMA = (26.3, 1.01)
"""`tma_kernel`: (rest, per accumulator). One thread requests the copies, so addresses cost nothing."""
TMA_SPLIT = (39.4, 0.98)
"""The same where it stores partial sums, with an address for each."""
TMA_STAGE = (3.0, 5.0)
"""(rest, per stage) in the loop besides the accumulators, where the compiler keeps what each stage's barrier needs:
it shows from the fifth stage on, not with partial sums. Between what Triton 3.9 and, of a few tiles less, 3.6 take:
74 tiles of 64 x 32 to 128 x 128 each."""
TILE = {
    "wgmma": (20.7, 1.08, 2.12, 2.49),
    "mma": (29.8, 1.45, 0.86, 2.93),
    "mma 8.0": (27.9, 1.34, 3.31, 2.88),
    "tfloat32": (31.8, 1.27, 0.0, 2.95),
    "tfloat32 8.0": (22.6, 2.0, 4.73, 2.11),
    "float32": (40.8, 2.29, 2.19, 3.15),
}
"""`tile_kernel`: (rest, per accumulator, per 16-byte copy of x, per 16-byte copy of the weight)."""
UNALIGNED = {2: 3.9, 4: 2.4}
"""What an element that is not copied in vectors adds, by its bytes: address, mask, and the value if of 16 bits."""
PASSES = {"wgmma": 1.35, "tcgen05": 1.35, "mma": 1.125}
"""How far above the most registers there are the line for such elements of 16 bits may go before a tile spills more
than some ten bytes (100 in some for compute capability 8.0): the compiler then loads a step in several passes. From
16 tiles compiled by Triton 3.6 and 3.9."""
ATTENTION = {
    "wgmma": (0.6, 1.48, 2.25, 3.5, 22.0),
    "mma, narrow": (38.0, 1.51, 2.65, 1.6, 6.5),
    "mma, wide": (82.7, 0.96, 1.25, 5.4, 18.3),
    "mma, warps share rows": (40.0, 1.5, 2.86, 3.8, 2.7),
}
"""`prefill_kernel`: (rest, per output accumulator, per score, per 16-byte copy of keys, for query heads that share a
KV head in a batch of sequences). Narrow: a head_dim of at most 64. The output is held once as it is added to, and
half again as it is scaled for a new maximum; a score also as a probability of 16 bits, and where rows are fragments
(mma) so are those of keys and values, which the assembler loads as far ahead as there are registers. Of several
sequences with heads that share keys it keeps what finds a row's place."""
ATTENTION_MOST = 1.18
"""How far above the most registers there are these lines may go: up to there mostly 8 to 200 bytes are spilled, which
costs little (by Triton 3.6, of 128 x 128 with 8 warps for compute capability 8.0, 2 KB); beyond, hundreds and
thousands."""
ITEMS = (1, 2, 4, 8, 16, 32, 64)
ELEMENTWISE = {
    (1, 2): (16, 18, 22, 27, 32, 36, 53), (1, 4): (17, 19, 25, 32, 49, 86, 166),
    (2, 2): (15, 17, 21, 29, 34, 38, 56), (2, 4): (18, 21, 28, 40, 64, 123, 218),
    (3, 2): (21, 21, 23, 27, 32, 45, 66), (3, 4): (22, 24, 28, 32, 43, 62, 128),
}  # fmt: skip
"""By (inputs, bytes of an element), for each of `ITEMS` elements a thread: what four warps take, since it follows no
line: the compiler loads few elements ahead where it has many."""
ROW = {
    ("softmax", 2): (13.7, 1.17, 0.5), ("softmax", 4): (14.3, 1.21, 0.6),
    ("layer_norm", 2): (15.5, 2.1, 1.2), ("layer_norm", 4): (16.3, 3.98, 0.7),
    ("rms_norm", 2): (15.3, 1.42, 0.1), ("rms_norm", 4): (14.4, 1.9, 0.0),
}  # fmt: skip
"""Rows in registers, by bytes of an element: (rest, per element, more where rows are not aligned, so that each
element is a load with an address and a mask of its own). LayerNorm has a row, its weight and its bias at once, unless
one warp has all."""
PIECES = {
    ("softmax", 2): (14.0, 2.75, 0.5), ("softmax", 4): (15.2, 2.86, 0.2),
    ("layer_norm", 2): (16.1, 1.49, 1.6), ("layer_norm", 4): (9.7, 2.15, 1.6),
    ("rms_norm", 2): (14.0, 1.31, 0.8), ("rms_norm", 4): (-5.5, 2.18, 1.2),
}  # fmt: skip
"""The kernels for long rows, by elements of a piece."""
PIECES_LEAST = 32
"""What those of norms take at least: the assembler loads further ahead where few elements leave room."""
ROW_MOST = 1.125
"""As `ATTENTION_MOST`, of rows whose threads can have 128 registers or more (up to 100 bytes). In blocks of 32 warps,
where a thread can have 64, hundreds of bytes are spilled so soon that the margin is kept."""


def copies(rows: int, tile: GemmTile, itemsize: float) -> float:
    """Copies of 16 bytes that a thread makes of `rows` rows in a step."""
    return max(1.0, rows * tile.block_k * itemsize / _VECTOR / (32 * tile.warps))


def gemm_registers(tile: GemmTile, problem: GemmProblem, device: DeviceModel) -> int:
    """Registers a thread of `tma_kernel` or `tile_kernel`; above 255 means that it spills."""
    threads = 32 * tile.warps
    accumulators = tile.block_m * tile.block_n / threads
    if tile.tma:
        if tile.splits > 1:
            return math.ceil(TMA_SPLIT[0] + TMA_SPLIT[1] * accumulators)
        in_loop = TMA_STAGE[0] + TMA_STAGE[1] * tile.stages + accumulators
        return math.ceil(max(TMA[0] + TMA[1] * accumulators, in_loop))
    copies_x, copies_w = copies(tile.block_m, tile, problem.bytes_x), copies(tile.block_n, tile, problem.bytes_weight)
    ampere = " 8.0" if device.capability < 90 else ""
    if problem.dtype in ("float32", "tfloat32"):
        kind = "float32" if problem.dtype == "float32" else "tfloat32" + ampere
    else:
        kind = "wgmma" if uses_wgmma(device, tile.block_m, tile.warps, problem.dtype) else "mma" + ampere
    rest, per_sum, per_x, per_w = TILE[kind]
    registers = rest + per_sum * accumulators + per_x * copies_x + per_w * copies_w
    if not problem.aligned:
        elements = (tile.block_m + tile.block_n) * tile.block_k / threads
        registers += UNALIGNED[4 if problem.bytes_x == 4 else 2] * elements
        most = device.registers_per_thread
        if problem.bytes_x < 4 and registers <= most * PASSES[device.matrix_unit]:
            registers = min(registers, most - SPILL_MARGIN)
    if problem.weight is not None:
        # The converted weights of a step wait for their product in registers, two in each.
        registers += tile.block_n * min(tile.block_k, 64) / 2 / threads
    return math.ceil(registers)


def attention_registers(tile: AttentionTile, problem: AttentionProblem, device: DeviceModel) -> int:
    """Registers a thread of `prefill_kernel`; above 255 it spills."""
    threads = 32 * tile.warps
    dim = padded(problem.head_dim)
    if uses_wgmma(device, tile.rows, tile.warps):
        kind = "wgmma"
    elif 16 * tile.warps > tile.rows:
        kind = "mma, warps share rows"
    else:
        kind = "mma, narrow" if dim <= 64 else "mma, wide"
    rest, per_output, per_score, per_copy, grouped = ATTENTION[kind]
    copies = max(1.0, tile.tile * dim * DTYPE_BYTES[problem.dtype] / _VECTOR / threads)
    held = per_output * tile.rows * dim + per_score * tile.rows * tile.tile
    rest += grouped * (problem.batch > 1 and problem.group > 1)
    return math.ceil(rest + held / threads + per_copy * copies)


def elementwise_registers(tile: ElementwiseTile, problem: ElementwiseProblem) -> int:
    """Registers a thread; inputs beyond three hold their elements as well."""
    few = ELEMENTWISE[min(3, problem.inputs), 4 if problem.itemsize == 4 else 2][ITEMS.index(tile.items)]
    return few + math.ceil(max(0, problem.inputs - 3) * tile.items * problem.itemsize / 4)


def reduction_registers(tile: ReductionTile, problem: ReductionProblem) -> int:
    """Registers a thread of a row kernel; above what its threads can have it spills."""
    # One warp has no barrier to pass: LayerNorm's weight and bias are loaded after the sums.
    wide = problem.itemsize == 4 and not (problem.kind == "layer_norm" and tile.one_pass and tile.warps == 1)
    rest, per_item, single = (ROW if tile.one_pass else PIECES)[problem.kind, 4 if wide else 2]
    least = 0 if tile.one_pass or problem.kind == "softmax" else PIECES_LEAST
    return math.ceil(max(least, rest + tile.items * (per_item + single * (not problem.aligned))))
