"""Tiles dealt out to persistent blocks: the copying warp takes the next of all from a counter in memory and hands it to the other warps of
its block, which read it from a ring of slots; an SM whose tiles are full takes fewer of them.

The counter is asked for a few steps before the tile is needed. It is two words, which every launch finds and leaves at zero: the second
counts blocks that found no more tiles, and the last one clears both. A launch that depends on this one touches them when it has ended.
"""

from cutlass import Int32, cute
from kernelgen_cute import pipelines

SLOTS = 4  # an even number, so that each stays with one of two consumers that take turns
WORDS = 4  # of a slot: group, n, first row, rows from there on that are the group's
AHEAD = 6  # steps before the end of a tile that the next one is asked for


@cute.jit
def hand_out(barriers: cute.Pointer, slots: cute.Pointer, slot: Int32, phase: Int32, group: Int32, n: Int32, row: Int32, rows: Int32):
    """By the warp that copies; the next slot's position."""
    cute.arch.mbarrier_wait(pipelines.empty(barriers, slot, SLOTS), phase ^ 1)
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        words = cute.make_tensor(slots + WORDS * slot, cute.make_layout(WORDS))
        words[0], words[1], words[2], words[3] = group, n, row, rows
        cute.arch.mbarrier_arrive(pipelines.full(barriers, slot))
    slot, phase = pipelines.advance(slot, phase, SLOTS)
    return slot, phase


@cute.jit
def take(barriers: cute.Pointer, slots: cute.Pointer, slot: Int32, phase: Int32):
    """(group, n, first row, rows) of a slot, by all lanes of a warp that reads it."""
    pipelines.wait(barriers, slot, phase)
    cute.arch.sync_warp()  # no lane waits any more when one gives the slot back
    group, n, row, rows = Int32(0), Int32(0), Int32(0), Int32(0)
    if cute.arch.lane_idx() == 0:  # which gives the slot back
        words = cute.make_tensor(slots + WORDS * slot, cute.make_layout(WORDS))
        group, n, row, rows = words[0], words[1], words[2], words[3]
    pipelines.release(barriers, slot, SLOTS, 1)
    return (cute.arch.shuffle_sync(group, 0), cute.arch.shuffle_sync(n, 0), cute.arch.shuffle_sync(row, 0),
            cute.arch.shuffle_sync(rows, 0))


@cute.jit
def ask(counter: cute.Pointer, grid: Int32):
    """The next index, for all lanes."""
    index = Int32(0)
    if cute.arch.lane_idx() == 0:
        index = grid + cute.arch.atomic_add(counter, Int32(1))
    return cute.arch.shuffle_sync(index, 0)


@cute.jit
def finish(counter: cute.Pointer, grid: Int32):
    """Behind the last tile: this block asks no more."""
    if cute.arch.lane_idx() == 0:
        words = cute.make_tensor(counter, cute.make_layout(2))
        if cute.arch.atomic_add(counter + 1, Int32(1)) + 1 == grid:
            words[0], words[1] = Int32(0), Int32(0)
