"""A ring of stages between the warp that copies and the warpgroups that multiply: a full and an empty barrier for each stage.

A position is (stage, phase), two numbers that loops carry. A barrier's wait names a phase by its parity alone, so who waits for a filling
must know that the one before is complete: consumers that take turns hand the turn over behind their last wait.
"""

import cutlass
from cutlass import cute


def full(barriers, stage):
    return barriers + stage


def empty(barriers, stage, stages):
    return barriers + stages + stage


@cute.jit
def init(barriers: cute.Pointer, stages: cutlass.Constexpr, releases: cutlass.Constexpr, fills: cutlass.Constexpr = 1):
    """By one thread. ``releases``: arrivals that make a stage empty, of all blocks that its copies may come from; ``fills``: that make it
    full, that of who acquires it and those of threads that write into it."""
    for stage in cutlass.range_constexpr(stages):
        cute.arch.mbarrier_init(full(barriers, stage), fills)
        cute.arch.mbarrier_init(empty(barriers, stage, stages), releases)


@cute.jit
def advance(stage: cutlass.Int32, phase: cutlass.Int32, stages: cutlass.Constexpr):
    """The next position."""
    stage = stage + 1
    if stage == stages:
        stage = cutlass.Int32(0)
        phase = phase ^ 1
    return stage, phase


def position(count, stages):
    """That of the count-th step."""
    return count % stages, (count // stages) & 1


@cute.jit
def acquire(barriers: cute.Pointer, stage: cutlass.Int32, phase: cutlass.Int32, stages: cutlass.Constexpr, size):
    """By the warp that copies: wait until a stage is empty, and say how many bytes will come. A fresh ring counts as empty."""
    cute.arch.mbarrier_wait(empty(barriers, stage, stages), phase ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full(barriers, stage), size)


def wait(barriers, stage, phase):
    """By a consumer: until the stage is full."""
    cute.arch.mbarrier_wait(full(barriers, stage), phase)


@cute.jit
def release(barriers: cute.Pointer, stage: cutlass.Int32, stages: cutlass.Constexpr, blocks: cutlass.Constexpr):
    """By every warp of a consumer, to each block of the cluster, since any may have copied into the stage."""
    lane = cute.arch.lane_idx()
    if lane < blocks:
        if cutlass.const_expr(blocks > 1):
            cute.arch.mbarrier_arrive(empty(barriers, stage, stages), lane)
        else:
            cute.arch.mbarrier_arrive(empty(barriers, stage, stages))
