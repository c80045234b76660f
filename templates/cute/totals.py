"""Reductions over rows in an epilogue, ``kinds`` "sum" or "max": partials (rows, tiles of columns, batch, totals); adding them up."""

import cutlass
from cutlass import Float32, cute
from kernelgen_cute import functions, layouts

AHEAD = 16  # loads on their way


def none(kind):
    return Float32(float("-inf") if kind == "max" else 0.0)


def both(kind, a, b):
    return functions.maximum(a, b) if kind == "max" else a + b


def begin(parts, kinds):
    for i, kind in enumerate(kinds):
        parts[2 * i] = parts[2 * i + 1] = none(kind)


def add(parts, kinds, v, terms, pair, exists):
    """Terms of the v-th sum of a thread (layouts.place), which has two rows: of two neighbours at once, of which both exist or none.
    ``pair``: a list that holds the first's."""
    if v % 2 == 0:
        pair[:] = terms
        return
    for i, kind in enumerate(kinds):
        at = 2 * i + v // 2 % 2
        parts[at] = both(kind, parts[at], functions.where(exists, both(kind, pair[i], terms[i]), none(kind)))


@cute.jit
def leave(
    parts: cute.Tensor, kinds: cutlass.Constexpr, partials: cute.Tensor, row: cutlass.Int32, column: cutlass.Int32, batch: cutlass.Int32,
):
    """Of 64 rows from ``row`` on, by their warpgroup."""
    thread = cute.arch.thread_idx()[0] % layouts.WARPGROUP
    for i in cutlass.range_constexpr(2 * len(kinds)):
        part = parts[i]
        for offset in cutlass.range_constexpr(1, 3):
            part = both(kinds[i // 2], part, cute.arch.shuffle_sync_bfly(part, offset=offset))
        at = row + layouts.place(thread, i % 2 * 2)[0]
        if (thread % 4 == 0) & (at < cute.size(partials, mode=[0])) & (column < cute.size(partials, mode=[1])):
            partials[at, column, batch, i // 2] = part


@cute.kernel
def add_up(partials: cute.Tensor, to: cute.Tensor, kinds: cutlass.Constexpr):
    """A row of a batch entry to a thread; past the last tile it loads that of the last. to (totals, batch, rows)"""
    cute.arch.griddepcontrol_wait()
    block, batch, _ = cute.arch.block_idx()
    row, tiles = block * 128 + cute.arch.thread_idx()[0], cute.size(partials, mode=[1])
    if row < cute.size(partials, mode=[0]):
        for i in cutlass.range_constexpr(len(kinds)):
            part = none(kinds[i])
            for first in cutlass.range(0, tiles, AHEAD, unroll=1):
                loaded = [partials[row, functions.smaller(first + ahead, tiles - 1), batch, i] for ahead in range(AHEAD)]
                for ahead in cutlass.range_constexpr(AHEAD):
                    part = both(kinds[i], part, functions.where(first + ahead < tiles, loaded[ahead], none(kinds[i])))
            to[i, batch, row] = part
