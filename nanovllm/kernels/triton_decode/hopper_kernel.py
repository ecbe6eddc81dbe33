"""y = x W^T for up to a few hundred tokens, for Hopper: the weights stream through shared memory once, into its tensor cores.

A program has 64 rows of the weight, the M of the tensor-core instruction, and up to 128 tokens, its N. One thread asks the copy engine
for the first tiles of the weight before the program waits for the kernel before it, and for the tokens after that; tiles
that are used up make room for later ones. So while a kernel waits, the next one's weights are on their way, and what
remains between two kernels is about the latency of one read of the tokens.

With SPLITS the columns of the weight are dealt out to programs too. Each leaves float32 sums, which `sum_norm_kernel` adds up.

It is written in Gluon, Triton's lower level: Triton itself would take the weights through registers, or wait before it asks for them.
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

from nanovllm.kernels.triton_ops._gluon import reinterpret, tma_load, warps_barrier


@gluon.jit
def silu_and_mul(gate, up, dtype: gl.constexpr):
    """As the op: gate, up and silu(gate) are each rounded before they are used."""
    gate = gate.to(dtype).to(gl.float32)
    silu = gate / (1.0 + gl.exp(-gate))
    return (silu.to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)).to(dtype)


@gluon.jit
def load_weights(descriptor, tiles, full, chunk, tile, CHUNKS: gl.constexpr, TOKENS: gl.constexpr):
    """Ask for CHUNKS tiles of the weight, from `chunk` on; `full` will also wait for the tokens."""
    mbarrier.expect(full, CHUNKS * (64 + TOKENS) * 128)
    box = reinterpret(tiles, tiles.dtype, descriptor.block_shape, descriptor.layout)
    if len(descriptor.block_shape) == 5:
        tma_load(descriptor, [chunk, tile * 4, 0, 0, 0], full, box)
    else:
        tma_load(descriptor, [chunk, tile * 64, 0], full, box)


@gluon.jit
def load_tokens(descriptor, tiles, full, chunk, first_token):
    box = reinterpret(tiles, tiles.dtype, descriptor.block_shape, descriptor.layout)
    tma_load(descriptor, [chunk, first_token, 0], full, box)


@gluon.jit(do_not_specialize=["num_tokens"])
def hopper_kernel(
    weight,  # boxes of [CHUNKS, 64, 64] of [SIZE / 64, rows, 64]; if GATED of [CHUNKS, 4, 2, 8, 64] of [SIZE / 64, rows / 16, 2, 8, 64]
    x,  # boxes of [CHUNKS, TOKENS, 64] of [SIZE / 64, num_tokens, 64]
    bias,  # [OUTPUTS], if BIAS
    y,  # [num_tokens, OUTPUTS]; with SPLITS > 1 [SPLITS, num_tokens, OUTPUTS] float32
    num_tokens,
    OUTPUTS: gl.constexpr,
    TOKENS: gl.constexpr,
    CHUNKS: gl.constexpr,  # 64 columns each, that are loaded and multiplied at a time
    SLOTS: gl.constexpr,  # of CHUNKS tiles, in shared memory at a time
    ROUNDS: gl.constexpr,  # of SLOTS x CHUNKS tiles, that a program has; columns that do not exist are zeros
    SPLITS: gl.constexpr,
    GATED: gl.constexpr,  # eight rows of the gate and the eight of the up projection alternate
    BIAS: gl.constexpr,
):
    """Grid [tiles of 64 rows, SPLITS, blocks of TOKENS]. Launched with programmatic dependent launch."""
    gl.static_assert(SLOTS > 1 or ROUNDS == 1, "a slot is filled again while the one after it is used")
    dtype: gl.constexpr = weight.dtype
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    w_tiles = gl.allocate_shared_memory(dtype, [SLOTS, CHUNKS * 64, 64], tile_layout)
    x_tiles = gl.allocate_shared_memory(dtype, [SLOTS, CHUNKS * TOKENS, 64], tile_layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
    fence_async_shared()
    warps_barrier()
    gdc_launch_dependents()
    tile = gl.program_id(0)
    split = gl.program_id(1)
    first_token = gl.program_id(2) * TOKENS
    first_chunk = split * (ROUNDS * SLOTS * CHUNKS)
    for slot in gl.static_range(SLOTS):
        chunk = first_chunk + slot * CHUNKS
        load_weights(weight, w_tiles.index(slot), full.index(slot), chunk, tile, CHUNKS, TOKENS)
    gdc_wait()  # what was asked for so far never changes; everything below depends on earlier kernels
    for slot in gl.static_range(SLOTS):
        load_tokens(x, x_tiles.index(slot), full.index(slot), first_chunk + slot * CHUNKS, first_token)
    sums = gl.zeros([64, TOKENS], gl.float32, layout)
    for round in range(ROUNDS):
        for slot in gl.static_range(SLOTS):
            mbarrier.wait(full.index(slot), round & 1)
            for i in gl.static_range(CHUNKS):
                w_tile = w_tiles.index(slot).slice(i * 64, 64)
                x_tile = x_tiles.index(slot).slice(i * TOKENS, TOKENS).permute([1, 0])
                sums = warpgroup_mma(w_tile, x_tile, sums, is_async=True)
            sums = warpgroup_mma_wait(CHUNKS, deps=[sums])
            if ROUNDS > 1:
                # The slot before is used up, once every warp is here. It takes what comes a round later.
                warps_barrier()
                if slot == 0:
                    if round > 0:
                        chunk = first_chunk + (round * SLOTS + SLOTS - 1) * CHUNKS
                        load_weights(weight, w_tiles.index(SLOTS - 1), full.index(SLOTS - 1), chunk, tile, CHUNKS, TOKENS)
                        load_tokens(x, x_tiles.index(SLOTS - 1), full.index(SLOTS - 1), chunk, first_token)
                elif round < ROUNDS - 1:
                    chunk = first_chunk + ((round + 1) * SLOTS + slot - 1) * CHUNKS
                    load_weights(weight, w_tiles.index(slot - 1), full.index(slot - 1), chunk, tile, CHUNKS, TOKENS)
                    load_tokens(x, x_tiles.index(slot - 1), full.index(slot - 1), chunk, first_token)
    sums = warpgroup_mma_wait(0, deps=[sums])
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
