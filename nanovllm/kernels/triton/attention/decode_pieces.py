"""The pieces of the decode kernel, found on the device: which tokens of which sequence a program attends to.

Each sequence is cut into pieces of about the same size over the whole batch, so that a long sequence beside short ones
leaves no multiprocessor idle. Every program derives the whole plan from context_lens: a captured graph replays with any
lengths.
"""

import triton
import triton.language as tl


@triton.jit
def find_piece(
    piece, lens_ptr, shared_lens_ptr, num_seqs, PIECES: tl.constexpr, LEAST: tl.constexpr, SEQS_PAD: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr, NEW: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """-> (seq, its length, its first piece, tiles in a piece at most); seq is -1 for a piece that there is not.

    No piece has more than `share` tiles, total / PIECES rounded up or LEAST, so there are fewer than num_seqs + PIECES
    of them. The pieces of the sequences that are cut come first, since they are the largest. FRESH: lengths past the
    first-level cache.
    """
    CACHE: tl.constexpr = ".cg" if FRESH else ""
    if SEQS_PAD == 1:
        shared = tl.load(shared_lens_ptr) if SHARED else 0
        length = tl.load(lens_ptr, cache_modifier=CACHE)
        share = tl.maximum(tl.cdiv(planned_tiles(length, shared, NEW, TILE, WINDOW), PIECES), LEAST)
        seq = 0
        first_piece = 0
    else:
        offs = tl.arange(0, SEQS_PAD)
        lens = tl.load(lens_ptr + offs, mask=offs < num_seqs, other=0, cache_modifier=CACHE)
        shared = 0
        if SHARED:
            shared = tl.load(shared_lens_ptr + offs, mask=offs < num_seqs, other=0)
        tiles = planned_tiles(lens, shared, NEW, TILE, WINDOW)
        tiles = tl.where(offs < num_seqs, tiles, 0)
        share = tl.maximum(tl.cdiv(tl.sum(tiles, 0), PIECES), LEAST)
        pieces = tl.cdiv(tiles, share)
        cut = tl.where(pieces > 1, pieces, 0)
        whole = tl.where(pieces == 1, 1, 0)
        starts = tl.where(pieces > 1, tl.cumsum(cut, 0) - cut, tl.sum(cut, 0) + tl.cumsum(whole, 0) - whole)
        mine = (starts <= piece) & (piece < starts + pieces)
        found = tl.sum(tl.where(mine, (starts.to(tl.int64) << 32) | (offs + 1), 0), 0)
        seq = (found & 0xFFFFFFFF).to(tl.int32) - 1
        first_piece = (found >> 32).to(tl.int32)
        length = tl.sum(tl.where(offs == seq, lens, 0), 0)
    return seq, length, first_piece, share


@triton.jit
def num_tiles(length, shared, NEW: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Tiles that hold a token to attend to.

    NEW: how many of `length` tokens, the last ones, are attended to apart from them.
    """
    tiles = tl.cdiv(tl.maximum(length - NEW, 0), TILE) - shared // TILE
    if WINDOW > 0:
        tiles -= tl.maximum(length - WINDOW, 0) // TILE
    return tiles


@triton.jit
def planned_tiles(length, shared, NEW: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """At least one, so that some program writes the zeros of a sequence without tokens, or attends to the new token."""
    return tl.maximum(num_tiles(length, shared, NEW, TILE, WINDOW), 1)
