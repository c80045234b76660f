"""Configs of the kernels with mma.sync and what they cost: tables per form of the operands, and the order they give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernelgen.kernels.gemm.mma import Config, Form, ceil_div, form_of, legal_config, tiles
from kernelgen.problems.gemm import GemmProblem
from kernelgen.targets import Target


@dataclass(frozen=True)
class Measured:
    """A config and what it took on an H200 (2026-11-29, docs/design/gemm_portable.md), in nanoseconds per element of k.

    alone  a block that has its SM for itself
    full   an SM with blocks_per_sm blocks on it, wave after wave
    """

    config: Config
    alone: float
    full: float


MEASURED = (
    Measured(Config(256, 128, 64, 4, 2, stages=3), 16.0, 17.8),
    Measured(Config(128, 256, 64, 2, 4, stages=3), 16.2, 17.9),
    Measured(Config(128, 128, 64, 2, 2, stages=3, blocks_per_sm=2), 9.5, 18.1),
    Measured(Config(128, 64, 128, 2, 2, 2, stages=4), 5.5, 5.6),
    Measured(Config(128, 64, 64, 4, 1, stages=4, blocks_per_sm=2), 6.0, 10.6),
    Measured(Config(64, 64, 128, 2, 2, 2, stages=5), 3.7, 3.7),
    Measured(Config(64, 64, 64, 2, 2, stages=4, blocks_per_sm=3), 5.1, 9.5),
    Measured(Config(64, 32, 128, 2, 1, 4, stages=6), 2.5, 2.3),
    Measured(Config(32, 32, 256, 1, 1, 4, stages=5), 1.5, 1.45),
    Measured(Config(16, 64, 128, 1, 1, 4, stages=8), 1.6, 1.6),
    Measured(Config(16, 32, 256, 1, 1, 4, stages=6), 1.06, 1.3),
    Measured(Config(16, 16, 256, 1, 1, 8, stages=8), 0.78, 1.05),
    # Of the 99 KB parts. Not measured there: the costs are those of the nearest tile above, plus a tenth.
    Measured(Config(128, 128, 32, 2, 2, stages=4), 12.0, 12.0),
    Measured(Config(64, 64, 64, 2, 2, stages=4), 5.6, 5.6),
    Measured(Config(32, 64, 128, 1, 2, 2, stages=4), 3.3, 3.3),
    Measured(Config(16, 64, 128, 1, 1, 4, stages=4), 2.5, 2.5),
)


def _estimated(*configs: Config, tile_ns: float) -> tuple[Measured, ...]:
    """Not measured: ``tile_ns`` per 16 x 16 of an SM's tiles and element of k once a tile is large, more where it is small."""
    rows = []
    for c in configs:
        area = c.block_m * c.block_n / 256
        alone = tile_ns * area + 0.35 * (c.block_m + c.block_n) / 64
        rows.append(Measured(c, alone, alone * c.blocks_per_sm * 0.95))
    return tuple(rows)


# 16-bit tiles of 128 x 128 take 0.14 ns per 16 x 16. Widening fp8 and the second set of sums are taken to cost half as much
# again, decoding and scaling 4-bit codes as much again.
FP8 = _estimated(
    Config(128, 128, 128, 2, 4, stages=4), Config(128, 64, 128, 2, 2, stages=4, blocks_per_sm=2), Config(64, 128, 128, 1, 4, stages=4),
    Config(64, 64, 128, 2, 2, stages=4, blocks_per_sm=3), Config(64, 64, 256, 2, 2, 2, stages=4), Config(64, 32, 256, 2, 1, 4, stages=5),
    Config(32, 32, 512, 1, 1, 4, stages=4), Config(16, 64, 256, 1, 1, 4, stages=6), Config(16, 32, 512, 1, 1, 4, stages=5),
    Config(16, 16, 512, 1, 1, 8, stages=6),
    Config(128, 64, 128, 2, 2, stages=3), Config(64, 64, 128, 2, 2, stages=4), Config(32, 64, 256, 1, 2, 2, stages=3),
    Config(16, 64, 256, 1, 1, 4, stages=4), tile_ns=0.21)
FOUR_BIT = _estimated(
    Config(128, 64, 128, 4, 2, stages=4), Config(64, 128, 128, 2, 4, stages=4),
    Config(64, 64, 128, 2, 2, stages=4, blocks_per_sm=2), Config(32, 64, 256, 1, 2, 2, stages=4), Config(16, 64, 256, 1, 1, 4, stages=6),
    Config(16, 32, 512, 1, 1, 4, stages=5), Config(16, 128, 256, 1, 2, 2, stages=5),
    Config(64, 64, 128, 2, 2, stages=3), Config(16, 64, 256, 1, 1, 4, stages=3), tile_ns=0.28)

# Start and end of a block, in nanoseconds: fits 1024^3 over all configs within 15 %. A full H200 copies 4300 bytes in one.
_BLOCK_NS, _BLOCK_NS_PER_OUTPUT = 1200.0, 3000.0 / 32768
_SM_BYTES_PER_NS = 4300 / 132


def table_of(form: Form) -> tuple[Measured, ...]:
    return {16: MEASURED, 8: FP8, 4: FOUR_BIT}[form.bits_b]


def cost(problem: GemmProblem, target: Target, measured: Measured, products: int) -> float:
    """Estimated nanoseconds of ``products`` of the problem's shape: waves of blocks, and no faster than memory brings a and b."""
    p, c, form = problem, measured.config, form_of(problem)
    tiles_m, tiles_n = tiles(p, c)
    per_sm = ceil_div(tiles_m * tiles_n * products, target.sm_count or 1)
    waves, rest = divmod(per_sm, c.blocks_per_sm)
    if waves == 1 and c.blocks_per_sm == 1:
        waves, rest = 0, 1
    share = (rest - 1) / max(c.blocks_per_sm - 1, 1)
    per_k = waves * measured.full + (measured.alone + share * (measured.full - measured.alone) if rest else 0.0)
    memory = products * (p.m * form.bits_a + p.n * form.bits_b) / 8 / (_SM_BYTES_PER_NS * (target.sm_count or 1))
    ends = _BLOCK_NS + _BLOCK_NS_PER_OUTPUT * c.block_m * c.block_n  # those between two waves are part of `full`
    # Where memory is the limit, less work is still the better bet.
    return p.k * (max(per_k, memory) + per_k / 10) + ends


def candidates_by_cost(problem: GemmProblem, target: Target, products: int) -> Iterator[Config]:
    """Legal configs, the cheapest first."""
    fitting = [m for m in table_of(form_of(problem)) if legal_config(problem, target, m.config)]
    for measured in sorted(fitting, key=lambda m: cost(problem, target, m, products)):
        yield measured.config
