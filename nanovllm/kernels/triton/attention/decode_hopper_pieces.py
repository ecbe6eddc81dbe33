"""The pieces of the decode kernel for Hopper, found on the device: which tokens of which sequence a program has."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nanovllm.kernels.triton.attention.decode_pieces import planned_tiles

MOST_MERGED: gl.constexpr = gl.constexpr(16)
"""Tiles of a piece up to which few pieces and no merge through global memory are faster than more pieces."""


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def find_piece(
    program, num_programs, lens_ptr, num_seqs, most_pieces, least, NEW: gl.constexpr, SEQS_PAD: gl.constexpr,
    TILE: gl.constexpr, EMPTY_LAST: gl.constexpr, CLUSTER: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """-> (seq, its length, its first piece, this program's, tiles in a piece at most); seq is -1 for a program without
    a piece.

    Pieces are cut as in `decode_pieces.py`: into about `most_pieces`, of `least` tiles or more. With clusters, one
    sequence is cut into as many pieces as a cluster merges, if these are then short. The first programs, or with
    EMPTY_LAST the last, are those without one. First, they end while others still wait for the kernel before this one;
    last, where they are most of the grid, they delay no other. Every warp finds its piece by itself. The lengths are
    read past the first-level cache, which may hold what was there before an earlier kernel wrote.
    """
    if SEQS_PAD == 1:
        length = gl.load(lens_ptr, cache_modifier=".cg")
        tiles = planned_tiles(length, 0, NEW, TILE, WINDOW)
        share = gl.cdiv(tiles, most_pieces)
        if CLUSTER:
            merged = gl.cdiv(tiles, CLUSTER)
            share = gl.where(merged <= MOST_MERGED, gl.maximum(merged, share), share)
        share = gl.maximum(share, least)
        piece = program if EMPTY_LAST else program - num_programs + gl.cdiv(tiles, share)
        return gl.where((piece < 0) | (piece >= gl.cdiv(tiles, share)), -1, 0), length, 0, piece, share
    else:
        gl.static_assert(SEQS_PAD <= 1023, "what is packed into 32 bits, with fewer than 2^14 pieces")
        each: gl.constexpr = max(1, SEQS_PAD // 32)
        layout: gl.constexpr = gl.BlockedLayout([each], [32], [gl.num_warps()], [0])
        offs = gl.arange(0, SEQS_PAD, layout=layout)
        if SEQS_PAD > 64:
            # Each once, and side by side: warps that load them all, sixteen in a row a lane, would move half as much as
            # keys.
            spread: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
            once = gl.arange(0, SEQS_PAD, layout=spread)
            lens = gl.load(lens_ptr + once, mask=once < num_seqs, other=0, cache_modifier=".cg")
            lens = gl.convert_layout(lens, layout)
        else:
            lens = gl.load(lens_ptr + offs, mask=offs < num_seqs, other=0, cache_modifier=".cg")
        tiles = gl.where(offs < num_seqs, planned_tiles(lens, 0, NEW, TILE, WINDOW), 0)
        share = gl.maximum(gl.cdiv(gl.sum(tiles, 0), most_pieces), least)
        pieces = gl.cdiv(tiles, share)
        # Those of the sequences that are cut come first, since they are the largest. Two sums at a time: of these, and
        # of the others.
        both = gl.where(pieces > 1, pieces << 16, pieces)
        before = gl.associative_scan(both, 0, _plus) - both
        all = gl.sum(both, 0)
        starts = gl.where(pieces > 1, before >> 16, (all >> 16) + (before & 0xFFFF))
        piece = program if EMPTY_LAST else program - num_programs + (all >> 16) + (all & 0xFFFF)
        mine = (starts <= piece) & (piece < starts + pieces)
        found = gl.sum(gl.where(mine, starts * 1024 + offs + 1, 0), 0)
        length = gl.sum(gl.where(mine, lens, 0), 0)
        return found % 1024 - 1, length, found // 1024, piece, share
