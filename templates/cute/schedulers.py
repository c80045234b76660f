"""The order of tiles of persistent blocks."""

import cutlass
from cutlass import Boolean, Int32, cute


def tile_of(index, tiles_m, tiles_n, band):
    """(m, n, batch) of the index-th tile: bands of ``band`` tiles along M, each walked along N, so that what runs at a time shares rows of
    a and of b in L2."""
    in_batch = tiles_m * tiles_n
    batch, rest = index // in_batch, index % in_batch
    first, height, within = _in_bands(rest, tiles_m, tiles_n, band)
    return first + within % height, within // height, batch


def _in_bands(index, tiles_m, tiles_n, band):
    """(first row of its band, rows of it, the index within it)."""
    of_band = band * tiles_n
    first = index // of_band * band
    return first, smaller(tiles_m - first, band), index % of_band


def smaller(a, b):
    """min, of numbers that are known at run time only."""
    less = Int32(a < b)
    return b + less * (a - b)


@cute.jit
def group_of(
    ends: cute.Tensor, limit: Int32, index: Int32, group: Int32, first: Int32, begin: Int32, rows: Int32, tiles_n: Int32,
    tile_rows: cutlass.Constexpr, masked: cutlass.Constexpr,
):
    """(group, its first tile, its first row, its rows) of the index-th tile of groups of rows, one behind the other, whose ends are known
    here alone; from those that were found last, or zeros. Behind the last tile a group that does not exist.

    By all lanes of a warp together, each of which looks at one of 32 groups; indices never fall. Ends that fall or leave the matrix of
    ``limit`` rows are cut off. ``masked``: each group has so many rows, and ``ends`` how many of them are in use.
    """
    groups, lane = Int32(cute.size(ends)), cute.arch.lane_idx()
    before, window = first, group
    searching = index >= first + tiles_of(rows, tile_rows) * tiles_n
    while searching:
        mine = window + lane
        there = smaller(mine, groups - 1)
        start = Int32(0)
        if (there > 0) & Boolean(not masked):
            start = larger(smaller(ends[there - 1], limit), Int32(0))
        end = larger(smaller(ends[there], limit), start)
        own = tiles_of(end - start, tile_rows) * tiles_n
        if mine >= groups:
            own = Int32(0)
        through = own
        for i in cutlass.range_constexpr(5):
            left = cute.arch.shuffle_sync_up(through, 1 << i, mask_and_clamp=0)
            if lane >= 1 << i:
                through = through + left
        total = cute.arch.shuffle_sync(through, 31)
        if index - before < total:
            source = cute.arch.popc(cute.arch.vote_ballot_sync(through <= index - before))
            group = window + source
            first = before + cute.arch.shuffle_sync(through - own, source)
            begin = cute.arch.shuffle_sync(start, source)
            rows = cute.arch.shuffle_sync(end, source) - begin
            searching = Boolean(False)
        else:
            before = before + total
            window = window + 32
            if window >= groups:
                group = groups
                searching = Boolean(False)
    return group, first, begin, rows


def tile_of_group(index, first, rows, tiles_n, tile_rows, band, grid=None):
    """(m, n) of the index-th tile of all, one of a group whose first is ``first``; in bands as above.

    With ``grid`` a column's tiles are turned by one in each round of it: else of equal groups of two tiles, the second of few rows, every
    other block would have all the full ones.
    """
    at, height, within = _in_bands(index - first, tiles_of(rows, tile_rows), tiles_n, band)
    m = within % height
    turned = m if grid is None else (m + (index - m) // grid) % height
    return at + turned, within // height


def tiles_of(rows, tile_rows):
    return (rows + (tile_rows - 1)) // tile_rows


def larger(a, b):
    """max, of numbers that are known at run time only."""
    return a + b - smaller(a, b)
