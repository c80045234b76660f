"""The order of tiles of persistent blocks."""

from cutlass import Int32


def tile_of(index, tiles_m, tiles_n, band):
    """(m, n, batch) of the index-th tile: bands of ``band`` tiles along M, each walked along N, so that what runs at a time shares rows of
    a and of b in L2."""
    in_batch = tiles_m * tiles_n
    batch, rest = index // in_batch, index % in_batch
    of_band = band * tiles_n
    first = rest // of_band * band
    height = smaller(tiles_m - first, band)
    within = rest % of_band
    return first + within % height, within // height, batch


def smaller(a, b):
    """min, of numbers that are known at run time only."""
    less = Int32(a < b)
    return b + less * (a - b)
