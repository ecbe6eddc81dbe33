"""The scheduler of the prefill kernel for Hopper: a warp that takes work items and says what they are.

Which item is next, of which sequence it is, and where its last keys lie are an atomic and three loads, each of which waits for
the one before: about 2 us that neither the producer nor the consumers have to spare between two items.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from nanovllm.kernels.triton_ops._gluon import reinterpret, warps_barrier

DESCRIPTIONS = gl.constexpr(4)
"""In shared memory at a time: of the items that the consumers and the producer are at, and of those found ahead of them."""
WORDS = gl.constexpr(32)
"""Of a description: the eight of `find_item` in its order, and entries of the block table, which so are in the first-level cache."""


@gluon.jit
def decode_item(item, starts_ptr, lens_ptr, num_seqs, items_per_head, TOKENS: gl.constexpr):
    """Work item -> (head group, sequence, first query of the run, queries in the run, tokens of the sequence).

    One head group after the other, so that what the items in flight read stays in L2. Sequence s owns the items from
    starts[s] // TOKENS + s on, at least as many as it needs (a first query below zero: not needed); its last queries, which
    see the most, come first.
    """
    head = item // items_per_head
    index = item % items_per_head
    seq = -1
    offs = gl.arange(0, 256, layout=gl.BlockedLayout([1], [32], [1], [0]))
    for base in range(0, num_seqs, 256):
        seqs = base + offs
        firsts = gl.load(starts_ptr + seqs, mask=seqs < num_seqs, other=2**30) // TOKENS + seqs
        seq += gl.sum((firsts <= index).to(gl.int32), 0)
    start = gl.load(starts_ptr + seq)
    count = gl.load(starts_ptr + seq + 1) - start
    length = gl.load(lens_ptr + seq)
    first_query = (gl.cdiv(count, TOKENS) - 1 - (index - start // TOKENS - seq)) * TOKENS
    return head, seq, start, first_query, count, length


@gluon.jit
def tile_range(first_position, last_position, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """The tiles that the queries at [first_position, last_position] see: [first, end), at least one."""
    first = 0
    if WINDOW > 0:
        first = gl.maximum(first_position - WINDOW + 1, 0) // TILE
    # At least one, also for a sequence without tokens: its queries see nothing of it.
    return first, gl.maximum(last_position, 0) // TILE + 1


@gluon.jit
def find_item(
    item, counter_ptr, starts_ptr, lens_ptr, num_seqs, items_per_head, num_items, TOKENS: gl.constexpr,
    TILE: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The first item that is needed, of this one and those of the counter -> (head group, sequence, its tokens, first row of the
    queries, queries, position of the first, first tile, last tile); no queries, and -1 as the last tile: there is none."""
    group = 0
    seq = 0
    length = 0
    begin = 0
    num_tokens = 0
    first_position = 0
    first = 0
    last = -1
    while (num_tokens == 0) & (item < num_items):
        group, seq, start, first_query, count, length = decode_item(
            item, starts_ptr, lens_ptr, num_seqs, items_per_head, TOKENS
        )
        if first_query >= 0:
            begin = start + first_query
            num_tokens = gl.minimum(TOKENS, count - first_query)
            first_position = length - count + first_query
            first, end = tile_range(first_position, first_position + num_tokens - 1, TILE, WINDOW)
            last = end - 1
        else:
            item = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
    return group, seq, length, begin, num_tokens, first_position, first, last


@gluon.jit
def describe(
    items, described, count_items, table_ptr, table_stride, group, seq, length, begin, num_tokens, first_position, first, last,
    BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Write the description of an item, for one warp."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    word = gl.arange(0, WORDS, layout=layout)
    # The blocks from the one of the item's first keys back; the producer starts at the lower end of a tile.
    block = gl.minimum((last * TILE + TILE - 1) // BLOCK_SIZE, (length - 1) // BLOCK_SIZE) - (word - 8)
    is_block = (word >= 8) & (block >= 0) & (num_tokens > 0)
    words = gl.load(table_ptr + seq.to(gl.int64) * table_stride + block, mask=is_block, other=0)
    words = gl.where(word == 0, group, words)
    words = gl.where(word == 1, seq, words)
    words = gl.where(word == 2, length, words)
    words = gl.where(word == 3, begin, words)
    words = gl.where(word == 4, num_tokens, words)
    words = gl.where(word == 5, first_position, words)
    words = gl.where(word == 6, first, words)
    words = gl.where(word == 7, last, words)
    slot = count_items % DESCRIPTIONS
    reinterpret(items, gl.int32, [DESCRIPTIONS, WORDS], items.layout).index(slot).store(words)
    warps_barrier()
    mbarrier.arrive(described.index(slot), count=1)


@gluon.jit
def read_word(items, count_items, word: gl.constexpr, layout: gl.constexpr):
    return gl.sum(items.index(count_items % DESCRIPTIONS * WORDS + word).load(layout), 0)


@gluon.jit
def schedule(
    items, described, wanted, table_ptr, starts_ptr, lens_ptr, counter_ptr, num_seqs, table_stride, items_per_head, num_items,
    TOKENS: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, WINDOW: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The scheduler: finds an item whenever the producer wants one, up to EARLY items before it does, until there are none."""
    count_items = 0
    item = gl.program_id(0)
    num_tokens = 1
    while num_tokens > 0:
        if count_items > EARLY:
            mbarrier.wait(wanted, (count_items - 1 - EARLY) & 1)
        if count_items > 0:
            item = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
        group, seq, length, begin, num_tokens, first_position, first, last = find_item(
            item, counter_ptr, starts_ptr, lens_ptr, num_seqs, items_per_head, num_items, TOKENS, TILE, WINDOW
        )
        describe(
            items, described, count_items, table_ptr, table_stride, group, seq, length, begin, num_tokens, first_position, first, last,
            BLOCK_SIZE, TILE,
        )  # fmt: skip
        count_items += 1
    # The last program leaves the counters zero for the next launch.
    if gl.atomic_add(counter_ptr + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)
        gl.store(counter_ptr + 1, 0)
