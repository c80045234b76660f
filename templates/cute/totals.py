"""Reductions over rows in an epilogue: a thread's terms, those of its quad, the partial of each row and tile of columns, and the pass that
adds partials up. ``kinds``: "sum" or "max" of each."""

import cutlass
from cutlass import Float32, cute
from kernelgen_cute import functions, layouts

ROWS = 2  # of 64, that a thread has terms of
AHEAD = 16


def none(kind):
    return Float32(float("-inf") if kind == "max" else 0.0)


def both(kind, a, b):
    return functions.maximum(a, b) if kind == "max" else a + b


def begin(parts, kinds):
    for i, kind in enumerate(kinds):
        for half in range(ROWS):
            parts[ROWS * i + half] = none(kind)


def add(parts, kinds, v, terms, pair, exists):
    """Terms of the v-th sum of a thread (layouts.place): of two neighbours at once, of which both exist or none, as rows have eights of
    columns. ``pair``: a list that holds the first's."""
    if v % 2 == 0:
        pair[:] = terms
        return
    for i, kind in enumerate(kinds):
        at = ROWS * i + v // 2 % 2
        parts[at] = both(kind, parts[at], functions.where(exists, both(kind, pair[i], terms[i]), none(kind)))


@cute.jit
def leave(
    parts: cute.Tensor, kinds: cutlass.Constexpr, partials: cute.Tensor, row: cutlass.Int32, column: cutlass.Int32, batch: cutlass.Int32,
):
    """Those of 64 rows from ``row`` on, by their warpgroup, to (rows, tiles of columns, batch, totals)."""
    thread = cute.arch.thread_idx()[0] % layouts.WARPGROUP
    for i in cutlass.range_constexpr(len(kinds)):
        for half in cutlass.range_constexpr(ROWS):
            part = parts[ROWS * i + half]
            for offset in cutlass.range_constexpr(1, 3):
                part = both(kinds[i], part, cute.arch.shuffle_sync_bfly(part, offset=offset))
            at = row + layouts.place(thread, 2 * half)[0]
            if (thread % 4 == 0) & (at < cute.size(partials, mode=[0])) & (column < cute.size(partials, mode=[1])):
                partials[at, column, batch, i] = part


@cute.jit
def total(kind: cutlass.Constexpr, partials: cute.Tensor, row: cutlass.Int32, batch: cutlass.Int32, i: cutlass.Constexpr, to: cute.Tensor):
    """One row's, in the order of its columns; so many loads are on their way at a time, past the last tile that of the last."""
    tiles, part = cute.size(partials, mode=[1]), none(kind)
    for first in cutlass.range(0, tiles, AHEAD, unroll=1):
        loaded = [partials[row, functions.smaller(first + ahead, tiles - 1), batch, i] for ahead in range(AHEAD)]
        for ahead in cutlass.range_constexpr(AHEAD):
            part = both(kind, part, functions.where(first + ahead < tiles, loaded[ahead], none(kind)))
    to[batch, row] = part
