"""Rows of a that lie anywhere into the stages of a ring, as the copy engine would have put them: it has no gather on Hopper.

WARPS warps bring 128 bytes of each row of a tile by cp.async, 16 bytes a lane and four rows an instruction. A thread's arrival at the
stage's full barrier comes when its copies are done. They are writes of threads, behind which consumers fence (products.wait).
"""

import cutlass
from cutlass import Int32, Int64, cute
from kernelgen_cute import layouts, pipelines, schedulers

WARPS = 2
FILLS = 32 * WARPS  # arrivals at a stage's full barrier, beside that of the copy engine
ROWS = 4  # of an instruction


def places(tile_rows):
    """Where this lane's bytes of its rows of a tile begin, in units of 16 bytes."""
    return cute.make_rmem_tensor(cute.make_layout(tile_rows // WARPS // ROWS), Int32)


@cute.jit
def find(at: cute.Tensor, rows: cute.Tensor, first: Int32, left: Int32, row_units: Int32, warp: Int32):
    """Into ``at``, for the tile whose rows of the product begin at ``first``, ``left`` of which are its; ``rows`` names those of a.
    Gives how many copies of this warp have rows of the tile."""
    lane, mine = cute.arch.lane_idx(), cute.size(at) * ROWS * warp
    for i in cutlass.range_constexpr(cute.size(at)):
        row = mine + ROWS * i + lane // 8
        # Behind the group any row will do.
        at[i] = rows[first + schedulers.smaller(row, left - 1)] * row_units + lane % 8
    return schedulers.smaller((left - mine + (ROWS - 1)) // ROWS, Int32(cute.size(at)))


@cute.jit
def copy(tile: Int32, a: cute.Pointer, at: cute.Tensor, copies: Int32, column: Int32, width: Int32, warp: Int32):
    """128 bytes of each row from byte ``column`` on to a tile's shared address; zeros behind the ``width`` bytes that a row has."""
    lane = cute.arch.lane_idx()
    row, chunk = lane // 8, lane % 8
    left = width - column - chunk * 16
    count = schedulers.larger(schedulers.smaller(left, Int32(16)), Int32(0))
    from_column = column // 16
    if left <= 0:
        from_column = Int32(0)  # nothing is read, of an address within the row
    to = tile + (cute.size(at) * ROWS * warp + row) * layouts.SWIZZLED_BYTES
    even, odd = to + ((chunk ^ row) << 4), to + ((chunk ^ row ^ 4) << 4)
    base = a.toint() + Int64(from_column) * 16
    for i in cutlass.range_constexpr(cute.size(at)):
        if i < copies:
            cute.arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
                read_only_args=[(odd if i % 2 else even) + i * ROWS * layouts.SWIZZLED_BYTES, base + Int64(at[i]) * 16, count])


@cute.jit
def fill(
    barriers: cute.Pointer, stage: Int32, phase: Int32, tiles: cute.Pointer, a: cute.Pointer, at: cute.Tensor, copies: Int32, width: Int32,
    warp: Int32, stages: cutlass.Constexpr, stage_bytes: cutlass.Constexpr,
):
    """The stages of a tile's steps, by one of the warps; the position behind them. ``tiles``: the first stage's, ``stage_bytes`` apart."""
    for k in cutlass.range((width + layouts.SWIZZLED_BYTES - 1) // layouts.SWIZZLED_BYTES, unroll=1):
        cute.arch.mbarrier_wait(pipelines.empty(barriers, stage, stages), phase ^ 1)
        copy(tiles.toint() + stage * stage_bytes, a, at, copies, k * layouts.SWIZZLED_BYTES, width, warp)
        cute.arch.cp_async_mbarrier_arrive_noinc(pipelines.full(barriers, stage))
        stage, phase = pipelines.advance(stage, phase, stages)
    return stage, phase
