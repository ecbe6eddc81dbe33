"""Products of blocks of many pairs with their expert's weight, on Hopper.

Each multiprocessor has one program, which takes tiles of TOKENS pairs and ROWS rows of a weight, one after the other.
Some of its warps only load. They fill a ring of slots in shared memory, and go on to the next tile while the other
warps finish and store the last one. Two groups of four warps multiply, each for half of a tile's pairs. One of them can
store while the other multiplies. In a block of few pairs the second one multiplies nothing.

The kernel is in Gluon, Triton's lower level, in which warps can have different tasks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.triton.gemm.hopper_product_kernel import silu_and_mul
from nanovllm.kernels.triton.gluon_compat import copy_async, reinterpret, tma_load, warps_barrier


@gluon.jit
def load_tiles(
    x, weight, order, blocks, max_blocks, eighths, x_tiles, w_tiles, full, empty, TOP_K: gl.constexpr,
    GATED: gl.constexpr, SIZE: gl.constexpr, PIECES: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr,
    SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warps. GATED: each thread copies pieces of tokens' rows; else the copy engine brings all."""
    if PDL:
        gdc_wait()
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    BYTES: gl.constexpr = (ROWS if GATED else ROWS + TOKENS) * 128  # that the copy engine brings
    row = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout))
    col = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), max_blocks * PIECES, gl.num_programs(0)):
        block = tile // PIECES
        piece = tile % PIECES
        expert = gl.load(blocks + block)
        first = gl.load(blocks + max_blocks + block)
        if GATED:
            end = gl.load(blocks + 2 * max_blocks + block)
            # Rows of the tile without a pair are those of token 0. They are not stored.
            token = gl.load(order + first + row, first + row < end, other=0) // TOP_K
            # Eight elements are 16 bytes: by the factor the compiler sees that every copy can be of as many.
            lines = x + (token.to(gl.int64) * eighths * 8)[:, None]
        for step in range(gl.where(expert >= 0, SIZE // 64, 0)):
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), BYTES)
            w_box = reinterpret(w_tiles.index(slot), weight.dtype, weight.block_shape, weight.layout)
            if GATED:
                tma_load(weight, [expert, 0, piece * (ROWS // 2), step * 64], full.index(slot), w_box)
                copy_async(x_tiles.index(slot), lines + (step * 64 + col)[None, :])
                async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            else:
                tma_load(weight, [expert, piece * ROWS, step * 64], full.index(slot), w_box)
                tma_load(x, [first, step * 64], full.index(slot), x_tiles.index(slot))
            slot += 1
            phase = gl.where(slot == SLOTS, phase ^ 1, phase)
            slot = gl.where(slot == SLOTS, 0, slot)


@gluon.jit
def store_outputs(y, outputs, line, live, first, num_rows, layout: gl.constexpr):
    """Store [rows, outputs] in lines of y, from output `first` on."""
    col = first + gl.arange(0, outputs.shape[1], layout=gl.SliceLayout(0, layout))
    target = y + (line.to(gl.int64) * num_rows)[:, None] + col[None, :]
    gl.store(target, gl.convert_layout(outputs, layout), live[:, None] & (col < num_rows)[None, :])


@gluon.jit
def multiply_tiles(
    y, order, blocks, max_blocks, num_rows, x_tiles, w_tiles, full, empty, PART: gl.constexpr, GATED: gl.constexpr,
    SIZE: gl.constexpr, PIECES: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Four of the multiplying warps: half PART of the pairs of every tile."""
    if PDL:
        gdc_wait()
    dtype: gl.constexpr = y.dtype.element_ty
    HALF: gl.constexpr = TOKENS // 2
    OUTPUTS: gl.constexpr = ROWS // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [256 // OUTPUTS, OUTPUTS // 8], [4, 1], [1, 0])
    row = PART * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, stored))
    slot = 0
    phase = 0
    block = gl.minimum(gl.program_id(0) // PIECES, max_blocks - 1)
    next_expert = gl.load(blocks + block)
    next_first = gl.load(blocks + max_blocks + block)
    next_end = gl.load(blocks + 2 * max_blocks + block)
    for tile in range(gl.program_id(0), max_blocks * PIECES, gl.num_programs(0)):
        piece = tile % PIECES
        first = next_first
        end = gl.where(next_expert >= 0, next_end, first)
        steps = gl.where(next_expert >= 0, SIZE // 64, 0)
        without = gl.where(first + PART * HALF < end, 0, steps)  # this half has no pair
        steps -= without
        # What is needed later is on its way while this tile is multiplied.
        if not GATED:
            pair = gl.load(order + first + row, first + row < end, other=0)
        block = gl.minimum((tile + gl.num_programs(0)) // PIECES, max_blocks - 1)
        next_expert = gl.load(blocks + block)
        next_first = gl.load(blocks + max_blocks + block)
        next_end = gl.load(blocks + 2 * max_blocks + block)
        for _ in range(without):
            mbarrier.wait(full.index(slot), phase)
            warps_barrier()
            mbarrier.arrive(empty.index(slot), count=1)
            slot += 1
            phase = gl.where(slot == SLOTS, phase ^ 1, phase)
            slot = gl.where(slot == SLOTS, 0, slot)
        sums = gl.zeros([HALF, ROWS], gl.float32, layout)
        for step in range(steps):
            mbarrier.wait(full.index(slot), phase)
            if GATED:
                fence_async_shared()  # the tensor cores read what threads have copied
            x_tile = x_tiles.index(slot).slice(PART * HALF, HALF)
            sums = warpgroup_mma(x_tile, w_tiles.index(slot).permute([1, 0]), sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
            warps_barrier()
            # The product of the step before has ended in all four warps.
            mbarrier.arrive(empty.index(gl.where(slot == 0, SLOTS - 1, slot - 1)), count=1, pred=step > 0)
            slot += 1
            phase = gl.where(slot == SLOTS, phase ^ 1, phase)
            slot = gl.where(slot == SLOTS, 0, slot)
        sums = warpgroup_mma_wait(0, deps=[sums])
        warps_barrier()
        mbarrier.arrive(empty.index(gl.where(slot == 0, SLOTS - 1, slot - 1)), count=1, pred=steps > 0)
        live = first + row < end
        # A thread has the sums of a column of the first half, and of the same one of the second half.
        low, high = gl.split(gl.permute(gl.reshape(sums, [HALF, 2, OUTPUTS]), [0, 2, 1]))
        if GATED:
            store_outputs(y, silu_and_mul(low, high, dtype), first + row, live, piece * OUTPUTS, num_rows, stored)
        else:
            store_outputs(y, low.to(dtype), pair, live, piece * ROWS, num_rows, stored)
            store_outputs(y, high.to(dtype), pair, live, piece * ROWS + OUTPUTS, num_rows, stored)


@gluon.jit(do_not_specialize=["max_blocks"])
def hopper_experts_kernel(
    x,  # GATED: [tokens, SIZE], rows 8 * `eighths` apart; else boxes of [TOKENS, 64] of [pairs, SIZE], by `order`
    # GATED: boxes of [1, 2, ROWS / 2, 64] of [num_experts, 2, num_rows, SIZE]; else of [1, ROWS, 64] of [num_experts,
    # num_rows, SIZE]
    weight,
    order, blocks, max_blocks,  # `SortedPairs`
    y,  # [pairs, num_rows]: GATED: by `order`; else by pair
    num_rows, eighths,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    SIZE: gl.constexpr,  # a multiple of 64
    PIECES: gl.constexpr,  # tiles of a block: ROWS rows each; GATED: ROWS / 2 of the gate, as many of the up projection
    TOKENS: gl.constexpr, ROWS: gl.constexpr,
    SLOTS: gl.constexpr,  # of the ring: 64 columns of x and of the weight each
    LOADERS: gl.constexpr,  # warps that load
    REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,  # of a thread that multiplies, and of one that loads
    PDL: gl.constexpr,
):  # fmt: skip
    """Grid [multiprocessors]: y = x W^T with the weight of each block's expert; GATED: silu(gate) * up."""
    dtype: gl.constexpr = y.dtype.element_ty
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_tiles = gl.allocate_shared_memory(dtype, [SLOTS, TOKENS, 64], tile_layout)
    w_tiles = gl.allocate_shared_memory(dtype, [SLOTS, ROWS, 64], tile_layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1 + (32 * LOADERS if GATED else 0))
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    warps_barrier()
    if PDL:
        gdc_launch_dependents()
    gl.warp_specialize(
        [
            (multiply_tiles, (y, order, blocks, max_blocks, num_rows, x_tiles, w_tiles, full, empty, gl.constexpr(0),
                              GATED, SIZE, PIECES, TOKENS, ROWS, SLOTS, PDL)),
            (multiply_tiles, (y, order, blocks, max_blocks, num_rows, x_tiles, w_tiles, full, empty, gl.constexpr(1),
                              GATED, SIZE, PIECES, TOKENS, ROWS, SLOTS, PDL)),
            (load_tiles, (x, weight, order, blocks, max_blocks, eighths, x_tiles, w_tiles, full, empty, TOP_K, GATED,
                          SIZE, PIECES, TOKENS, ROWS, SLOTS, PDL)),
        ],
        [4, LOADERS],
        [REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
