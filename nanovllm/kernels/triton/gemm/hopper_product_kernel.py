"""y = x W^T for up to 256 tokens on Hopper: the weights stream once through shared memory into the tensor cores.

A program has 64 rows of the weight (M of the tensor-core instruction) and up to 256 tokens (N) in one tile or two. The
last tile of tokens may overlap the one before, so that it ends where the tokens end: the copy engine takes more than
twice as long for rows that do not exist. One thread asks it for the first tiles of the weight before the program waits
for the kernel in front, and for the tokens after the wait. So two kernels are apart by about one read of the tokens.

With SPLITS the programs share the columns of the weight too. Each leaves float32 sums for `sum_norm_kernel`.

The kernel is in Gluon, Triton's lower level. Triton would move the weights through registers, or wait before it loads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.triton.gluon_compat import reinterpret, tma_load, warps_barrier


@gluon.jit
def silu_and_mul(gate, up, dtype: gl.constexpr):
    """The op: gate, up and silu(gate) are each rounded before their use."""
    gate = gate.to(dtype).to(gl.float32)
    silu = gate / (1.0 + gl.exp(-gate))
    return (silu.to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)).to(dtype)


@gluon.jit
def load_weights(descriptor, tiles, full, chunk, tile, BYTES: gl.constexpr):
    """Ask for a group of tiles of the weight, from `chunk` on. `full` waits for BYTES: these and the tokens."""
    mbarrier.expect(full, BYTES)
    box = reinterpret(tiles, tiles.dtype, descriptor.block_shape, descriptor.layout)
    if len(descriptor.block_shape) == 5:
        tma_load(descriptor, [chunk, tile * 4, 0, 0, 0], full, box)
    else:
        tma_load(descriptor, [chunk, tile * 64, 0], full, box)


@gluon.jit
def load_tokens(descriptor, tiles, full, chunk, first_token):
    box = reinterpret(tiles, tiles.dtype, descriptor.block_shape, descriptor.layout)
    tma_load(descriptor, [chunk, first_token, 0], full, box)


@gluon.jit
def store(
    sums, bias, y, tile, split, first_token, num_tokens, dtype: gl.constexpr, TOKENS: gl.constexpr,
    OUTPUTS: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Store the outputs of sums [64, TOKENS] of the tokens from `first_token` on."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    if GATED:
        # A thread has the gate and the up projection of an output, eight rows apart.
        gate, up = gl.split(gl.permute(gl.reshape(sums, [4, 2, 8, TOKENS]), [0, 2, 3, 1]))
        half_layout: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [1, 4], [0, 1])
        result = gl.convert_layout(gl.reshape(silu_and_mul(gate, up, dtype), [32, TOKENS]), half_layout)
        output = tile * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, half_layout))
        token = first_token + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, half_layout))
    else:
        output = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        token = first_token + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))
        if BIAS:
            sums += gl.load(bias + output, output < OUTPUTS, other=0.0).to(gl.float32)[:, None]
        result = sums.to(y.dtype.element_ty)
    row = split * num_tokens + token
    live = (output < OUTPUTS)[:, None] & (token < num_tokens)[None, :]
    gl.store(y + row.to(gl.int64)[None, :] * OUTPUTS + output[:, None], result, live)


@gluon.jit(do_not_specialize=["num_tokens"])
def hopper_product_kernel(
    # boxes of [CHUNKS, 64, 64] of [SIZE / 64, rows, 64]; if GATED of [CHUNKS, 4, 2, 8, 64] of [SIZE / 64, rows / 16,
    # 2, 8, 64]
    weight,
    x,  # boxes of [CHUNKS, TOKENS, 64] of [SIZE / 64, num_tokens, 64]
    x_more,  # boxes of [CHUNKS, MORE, 64] of the same, if MORE
    bias,  # [OUTPUTS], if BIAS
    y,  # [num_tokens, OUTPUTS]; with SPLITS > 1 [SPLITS, num_tokens, OUTPUTS] float32
    num_tokens,
    OUTPUTS: gl.constexpr,
    TOKENS: gl.constexpr,
    MORE: gl.constexpr,  # tokens beside these, in a tile of their own; or 0
    CHUNKS: gl.constexpr,  # tiles of 64 columns that are loaded and multiplied at a time
    SLOTS: gl.constexpr,  # of CHUNKS tiles, in shared memory
    ROUNDS: gl.constexpr,  # of SLOTS x CHUNKS tiles; columns that do not exist are zeros
    SPLITS: gl.constexpr,
    GATED: gl.constexpr,  # eight rows of the gate and the eight of the up projection alternate
    BIAS: gl.constexpr,
):
    """Grid [tiles of 64 rows, SPLITS, blocks of TOKENS + MORE]. Launched with programmatic dependent launch."""
    gl.static_assert(SLOTS > 1 or ROUNDS == 1, "a slot is filled again while the one after it is used")
    dtype: gl.constexpr = weight.dtype
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    BYTES: gl.constexpr = CHUNKS * (64 + TOKENS + MORE) * 128
    PRODUCTS: gl.constexpr = CHUNKS * (2 if MORE else 1)  # of a group, each waited for by itself
    w_tiles = gl.allocate_shared_memory(dtype, [SLOTS, CHUNKS * 64, 64], tile_layout)
    x_tiles = gl.allocate_shared_memory(dtype, [SLOTS, CHUNKS * TOKENS, 64], tile_layout)
    if MORE > 0:
        more_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE, 16])
        more_tiles = gl.allocate_shared_memory(dtype, [SLOTS, CHUNKS * MORE, 64], tile_layout)
        more_sums = gl.zeros([64, MORE], gl.float32, more_layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
    fence_async_shared()
    warps_barrier()
    gdc_launch_dependents()
    tile = gl.program_id(0)
    split = gl.program_id(1)
    # Tokens that two tiles have get the same bits from both.
    first_token = gl.minimum(gl.program_id(2) * (TOKENS + MORE), gl.maximum(num_tokens - TOKENS - MORE, 0))
    more_first = gl.maximum(gl.minimum(first_token + TOKENS, num_tokens - MORE), 0)
    first_chunk = split * (ROUNDS * SLOTS * CHUNKS)
    for slot in gl.static_range(SLOTS):
        load_weights(weight, w_tiles.index(slot), full.index(slot), first_chunk + slot * CHUNKS, tile, BYTES)
    gdc_wait()  # weights never change; everything below depends on earlier kernels
    for slot in gl.static_range(SLOTS):
        load_tokens(x, x_tiles.index(slot), full.index(slot), first_chunk + slot * CHUNKS, first_token)
        if MORE > 0:
            load_tokens(x_more, more_tiles.index(slot), full.index(slot), first_chunk + slot * CHUNKS, more_first)
    sums = gl.zeros([64, TOKENS], gl.float32, layout)
    for round in range(ROUNDS):
        for slot in gl.static_range(SLOTS):
            mbarrier.wait(full.index(slot), round & 1)
            for i in gl.static_range(CHUNKS):
                w_tile = w_tiles.index(slot).slice(i * 64, 64)
                x_tile = x_tiles.index(slot).slice(i * TOKENS, TOKENS).permute([1, 0])
                sums = warpgroup_mma(w_tile, x_tile, sums, is_async=True)
                if MORE > 0:
                    more_tile = more_tiles.index(slot).slice(i * MORE, MORE).permute([1, 0])
                    more_sums = warpgroup_mma(w_tile, more_tile, more_sums, is_async=True)
            if MORE > 0:
                sums, more_sums = warpgroup_mma_wait(PRODUCTS, deps=[sums, more_sums])
            else:
                sums = warpgroup_mma_wait(PRODUCTS, deps=[sums])
            if ROUNDS > 1:
                # When all warps are here the slot before is used up. It is filled with the next round's tiles.
                warps_barrier()
                refilled = round + (1 if slot > 0 else 0)
                if (refilled > 0) & (refilled < ROUNDS):
                    chunk = first_chunk + (refilled * SLOTS + (slot + SLOTS - 1) % SLOTS) * CHUNKS
                    its_full = full.index((slot + SLOTS - 1) % SLOTS)
                    load_weights(weight, w_tiles.index((slot + SLOTS - 1) % SLOTS), its_full, chunk, tile, BYTES)
                    load_tokens(x, x_tiles.index((slot + SLOTS - 1) % SLOTS), its_full, chunk, first_token)
                    if MORE > 0:
                        load_tokens(x_more, more_tiles.index((slot + SLOTS - 1) % SLOTS), its_full, chunk, more_first)
    if MORE > 0:
        sums, more_sums = warpgroup_mma_wait(0, deps=[sums, more_sums])
    else:
        sums = warpgroup_mma_wait(0, deps=[sums])
    store(sums, bias, y, tile, split, first_token, num_tokens, dtype, TOKENS, OUTPUTS, GATED, BIAS)
    if MORE > 0:
        store(more_sums, bias, y, tile, split, more_first, num_tokens, dtype, MORE, OUTPUTS, GATED, BIAS)
