"""Configs of gemm/dense_sm90 and gemm/grouped_sm90, and what their tiles took on an H200: the tables that a first choice is made from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kernelgen.kernels.gemm.sm90 import MMA_ROWS


@dataclass(frozen=True)
class Config:
    """Tile shape and schedule.

    mma_m      64-row products of a consumer warpgroup, one below the other
    consumers  warpgroups that multiply; with the one that copies a block has 128 * (consumers + 1) threads
    block_n    columns of the tile
    stages     of the ring
    cluster_m, cluster_n  blocks that share a tile of b, and of a
    band_rows  rows of cluster tiles that are walked column by column
    pingpong   two consumers that own a tile each and take turns in multiplying
    slabs      of 64 rows of 128 bytes per consumer, through which the output leaves
    parts      of the columns, one promoted product each: two lie in as many registers as one whole, and the tensor core fills one
               while the other is added to the totals
    split_k    blocks of a cluster that share K, and add up in a fixed order; one tile each, for tiles that do not fill the chip
    resident   blocks of an SM, of one consumer each: the epilogue of one runs beside the products of another
    dealt      of groups of rows: blocks take tiles from a counter in memory as they come to them, not every so manieth
    """

    mma_m: int
    consumers: int
    block_n: int
    stages: int
    cluster_m: int = 1
    cluster_n: int = 1
    band_rows: int = 8
    pingpong: bool = False
    slabs: int = 2
    parts: int = 1
    split_k: int = 1
    resident: int = 1
    dealt: bool = False

    def __str__(self) -> str:
        words = f"{self.block_m}x{self.block_n} g{self.consumers} s{self.stages} c{self.cluster_m}x{self.cluster_n}"
        words += f" r{self.band_rows}" if self.band_rows != 8 else ""
        words += " pingpong" if self.pingpong else ""
        words += f" p{self.parts}" if self.parts != 1 else ""
        words += f" k{self.split_k}" if self.split_k != 1 else ""
        words += f" x{self.resident}" if self.resident != 1 else ""
        words += " dealt" if self.dealt else ""
        return words + (f" b{self.slabs}" if self.slabs != 2 else "")

    @property
    def block_m(self) -> int:
        return self.mma_m * (1 if self.pingpong else self.consumers) * MMA_ROWS

    @property
    def blocks(self) -> int:
        """Of a cluster."""
        return self.cluster_m * self.cluster_n * self.split_k

    def outputs(self, gated: bool) -> int:
        """Columns of the output in a tile."""
        return self.block_n // (2 if gated else 1)


@dataclass(frozen=True)
class Measured:
    """A config and what its tile took on an H200, in microseconds: 128 bytes of K (``step``), and what it takes beside its steps,
    mostly the epilogue, as far as the next tile's products do not run beside it (``finish``)."""

    config: Config
    step: float
    finish: float

    @cached_property
    def places(self) -> tuple[int, int, int, int, int, int]:
        """Rows and columns of a cluster's tile, rows of a block's; blocks of a cluster and of an SM, and those that share K. (Kept, as a
        choice asks it of every config.)"""
        c = self.config
        return c.block_m * c.cluster_m, c.block_n * c.cluster_n, c.block_m, c.blocks, c.resident, c.split_k


# Of many rows (M = 4096), one problem at a time beside its peer, as tools/bench/gemm_hopper.py does it: 2026-11-30,
# results/tried/h200_gemm_clusters.json; those that are not there scaled from older runs. "promoted": fp8 sums added to float32
# totals at each step; "blocks": times their scales.
MEASURED: dict[str, tuple[Measured, ...]] = {
    "plain": (
        Measured(Config(1, 2, 256, 4, band_rows=16), 0.652, 1.85),
        Measured(Config(2, 2, 128, 4, 1, 2), 0.653, 1.9),
        Measured(Config(1, 2, 224, 4), 0.592, 1.5),
        Measured(Config(1, 3, 176, 4, slabs=1), 0.700, 1.6),
        Measured(Config(1, 2, 208, 4), 0.550, 1.25),
        Measured(Config(1, 2, 192, 4), 0.510, 1.2),
        Measured(Config(1, 2, 160, 5), 0.430, 1.1),
        Measured(Config(1, 2, 144, 5), 0.395, 1.1),  # four of them are 576 columns
        Measured(Config(2, 2, 176, 4, pingpong=True), 0.470, 0.4),
        Measured(Config(2, 2, 128, 5, pingpong=True), 0.344, 0.5),
        Measured(Config(1, 2, 128, 6), 0.355, 1.1),
        Measured(Config(1, 1, 128, 8), 0.213, 0.8),
        Measured(Config(1, 2, 64, 8), 0.260, 0.8),
        Measured(Config(1, 1, 64, 10), 0.184, 0.6),
    ),
    "promoted": (
        Measured(Config(2, 2, 128, 4, 1, 2, parts=2), 0.710, 1.87),
        Measured(Config(2, 2, 128, 4, parts=2), 0.725, 1.9),
        Measured(Config(1, 2, 256, 4, parts=4), 0.730, 2.0),
        Measured(Config(1, 2, 192, 4, parts=2), 0.514, 1.87),
        Measured(Config(1, 2, 176, 4, parts=2), 0.503, 1.9),
        Measured(Config(1, 2, 160, 5, parts=2), 0.500, 1.9),
        Measured(Config(1, 2, 128, 6), 0.374, 1.31),
        Measured(Config(1, 1, 128, 8), 0.260, 1.2),
        Measured(Config(1, 2, 64, 8), 0.270, 0.9),
        Measured(Config(1, 1, 64, 10), 0.180, 1.1),
    ),
    "blocks": (  # the second for groups, which have no clusters
        Measured(Config(1, 2, 256, 4, 2, 1, parts=4), 0.745, 1.5),
        Measured(Config(1, 2, 256, 4, band_rows=16, parts=4), 0.755, 1.6),
        Measured(Config(1, 2, 192, 4, parts=2), 0.560, 1.85),
        Measured(Config(1, 2, 160, 5, parts=2), 0.530, 1.3),
        Measured(Config(1, 2, 128, 5), 0.409, 1.07),
        Measured(Config(1, 1, 128, 8), 0.270, 0.8),
        Measured(Config(1, 1, 64, 10), 0.190, 0.7),
    ),
}

# Beside them, for an output with a scale for 128 of a row, which a tile must hold: 256 columns of b where it is gated. In groups, with
# swiglu (2026-11-30, results/tried/h200_moe_codes.json); the last, for scales of single columns, is estimated.
QUANTIZING: dict[str, tuple[Measured, ...]] = {
    "blocks": (Measured(Config(1, 2, 256, 4, parts=4), 1.00, 1.4), Measured(Config(1, 2, 256, 4, parts=8, slabs=1), 1.27, 2.4),
               Measured(Config(1, 1, 256, 5, parts=4), 0.55, 2.7), Measured(Config(1, 2, 128, 5, parts=2), 0.53, 0.7)),
}


# Groups alone (H200, 2026-11-30, experts of Qwen3-30B and DeepSeek-V3 under random routing, docs/design/moe.md), so that a short K, which
# nothing hides the epilogue of, does not decide for other products.
GROUPED: dict[str, tuple[Measured, ...]] = {
    "plain": (Measured(Config(2, 2, 192, 4, pingpong=True), 0.490, 0.1), Measured(Config(2, 2, 128, 6, pingpong=True), 0.338, 0.1)),
    "blocks": (Measured(Config(1, 2, 256, 4, parts=4, pingpong=True), 0.55, 0.5), Measured(Config(1, 2, 256, 4, parts=4), 0.86, 1.5)),
}


# With gathered rows of a: 16 KB of them take at least 0.6 us of an SM, whatever is beside them. Of fewer rows than a tile has less comes.
GATHERED: dict[str, tuple[Measured, ...]] = {
    "plain": (Measured(Config(1, 2, 256, 4), 0.670, 1.6), Measured(Config(1, 2, 192, 4), 0.85, 1.2),
              Measured(Config(2, 2, 128, 5, pingpong=True), 0.62, 0.1), Measured(Config(1, 1, 128, 8), 0.25, 0.8),
              Measured(Config(1, 1, 64, 10), 0.22, 0.6)),
    "blocks": (Measured(Config(1, 1, 256, 5, parts=4), 0.55, 2.7), Measured(Config(1, 2, 256, 4, parts=4), 1.24, 1.6)),
}


class Fit(NamedTuple):
    """What was fitted to searches of problems with fewer rows, where the clock is higher, tiles are few and bytes count.

    beyond   how much longer tiles take for the share of their rows that lies beyond the matrix, which the copy engine fills with zeros
    bytes_per_us, start  of memory, and what a product takes beside its bytes
    again    the share of the bytes' time that is added where many rows of tiles read b, each by itself: half of it for two
    uneven   and for the share of the SMs that has no tile in the last of several waves
    """

    rows: range
    measured: tuple[Measured, ...]
    beyond: float = 1.4
    bytes_per_us: float = 4.4e6
    start: float = 0.0
    again: float = 0.0
    uneven: float = 0.0


# 16 bits, 49 - 64 rows, where the estimates of skinny_sm90 are as optimistic (results/tried/h200_tune_few_rows.json).
_SINGLES: tuple[Measured, ...] = (
    Measured(Config(1, 1, 48, 10), 0.149, 1.15),
    Measured(Config(1, 1, 64, 10), 0.172, 1.20),
    Measured(Config(1, 1, 112, 9), 0.200, 1.30),
    Measured(Config(1, 1, 128, 8), 0.210, 1.32),
    Measured(Config(1, 1, 64, 10, split_k=2), 0.170, 3.60),
    Measured(Config(1, 1, 112, 10, split_k=2), 0.238, 3.89),
)

# 16 bits, 65 - 128 rows: two blocks of 64 rows, to which one copy brings the tile of b (results/tried/h200_tune_few_rows.json).
_PAIRS: tuple[Measured, ...] = (
    Measured(Config(1, 1, 48, 10, 2, 1), 0.158, 1.30),
    Measured(Config(1, 1, 64, 10, 2, 1), 0.176, 1.30),
    Measured(Config(1, 1, 80, 10, 2, 1), 0.196, 1.30),
    Measured(Config(1, 1, 96, 10, 2, 1), 0.214, 1.30),
    Measured(Config(1, 1, 112, 9, 2, 1), 0.233, 1.36),
    Measured(Config(1, 1, 128, 8, 2, 1), 0.265, 1.40),
    Measured(Config(1, 2, 96, 8, split_k=2), 0.386, 5.0),
    Measured(Config(1, 2, 112, 7, split_k=2), 0.450, 5.0),
    Measured(Config(1, 2, 128, 7, split_k=2), 0.505, 5.0),
    Measured(Config(1, 2, 48, 8), 0.247, 1.4),
    Measured(Config(1, 2, 64, 8), 0.285, 1.4),
    Measured(Config(1, 2, 128, 6), 0.390, 1.53),
    Measured(Config(1, 2, 192, 4), 0.560, 1.69),
    Measured(Config(1, 2, 224, 4), 0.660, 1.60),
    Measured(Config(2, 2, 128, 6, pingpong=True), 0.390, 0.90),
)

# 16 bits, 129 - 1023 rows: 30 problems of M 192 - 768, whose choices are within 0.5 % of the best of what was searched in the mean, 5 at
# worst (docs/design/hopper.md; tools/tune.py).
MIDDLE: tuple[Measured, ...] = (
    Measured(Config(1, 2, 256, 4), 0.733, 2.04),
    Measured(Config(2, 2, 128, 4), 0.733, 1.94),
    Measured(Config(1, 2, 224, 4), 0.652, 1.60),
    Measured(Config(1, 3, 176, 4, slabs=1), 0.666, 2.28),
    Measured(Config(1, 2, 208, 4), 0.592, 1.73),
    Measured(Config(1, 2, 192, 4), 0.541, 1.69),
    Measured(Config(1, 2, 160, 5), 0.449, 1.39),
    Measured(Config(2, 2, 176, 4, pingpong=True), 0.498, 1.15),
    Measured(Config(2, 2, 128, 6, pingpong=True), 0.365, 0.90),
    Measured(Config(1, 2, 128, 6), 0.354, 1.53),
    Measured(Config(1, 1, 128, 8), 0.203, 1.24),
    Measured(Config(1, 2, 64, 8), 0.230, 0.87),
    Measured(Config(1, 1, 64, 10), 0.157, 0.64),
    Measured(Config(1, 1, 96, 10, split_k=4), 0.215, 4.18),
    Measured(Config(1, 3, 112, 5, slabs=1, split_k=2), 0.519, 2.83),
    Measured(Config(2, 2, 176, 5, pingpong=True), 0.530, 0.66),
    Measured(Config(1, 2, 192, 6, pingpong=True), 0.293, 1.80),
    Measured(Config(1, 1, 192, 7, split_k=4), 0.332, 4.90),
    Measured(Config(1, 1, 64, 10, split_k=4), 0.176, 3.57),
    Measured(Config(1, 3, 128, 5, slabs=1), 0.548, 2.28),
    Measured(Config(1, 3, 80, 6, slabs=1, split_k=4), 0.457, 2.88),
    Measured(Config(1, 3, 64, 7, slabs=1, split_k=2), 0.324, 3.57),
    Measured(Config(2, 2, 160, 5, pingpong=True), 0.477, 0.60),
    Measured(Config(1, 3, 192, 4, slabs=1), 0.681, 6.40),
    Measured(Config(1, 2, 112, 6), 0.324, 1.22),
    Measured(Config(1, 3, 112, 5, 1, 2, slabs=1), 0.464, 3.45),
)

# fp8, 33 - 1023 rows: 36 problems each of M 64 - 512, whose choices are within 1 % in the mean, 10 at worst
# (results/tried/h200_tune_few_rows.json).
FITS: dict[str, tuple[Fit, ...]] = {
    "plain": (Fit(range(49, 65), _SINGLES, 1.1, 4.5e6, 3.0, 0.48, 0.4), Fit(range(65, 129), _PAIRS, 1.1, 4.2e6, 3.5, 0.48, 0.4),
              Fit(range(129, 1024), MIDDLE)),  # of 16 bits
    "promoted": (Fit(range(33, 1024), (
        Measured(Config(2, 2, 128, 4, parts=2), 0.695, 2.64),
        Measured(Config(1, 2, 192, 4, parts=2), 0.553, 1.89),
        Measured(Config(1, 2, 128, 6), 0.364, 1.39),
        Measured(Config(1, 2, 112, 6), 0.340, 1.60),
        Measured(Config(1, 2, 96, 6), 0.282, 1.60),
        Measured(Config(1, 1, 128, 8), 0.217, 1.31),
        Measured(Config(1, 2, 64, 8), 0.237, 1.60),
        Measured(Config(1, 1, 112, 9, 2, 1), 0.234, 1.40),
        Measured(Config(1, 1, 112, 9), 0.234, 1.33),
        Measured(Config(1, 1, 96, 10, 2, 1), 0.199, 1.27),
        Measured(Config(1, 1, 80, 10, split_k=4), 0.197, 3.91),
        Measured(Config(1, 1, 64, 10), 0.161, 1.17),
        Measured(Config(1, 1, 48, 10), 0.154, 1.16),
    ), 1.31, 4.04e6, 3.27, 0.41, 0.4),),
    "blocks": (Fit(range(33, 1024), (
        Measured(Config(1, 2, 256, 4, parts=4), 0.757, 2.22),
        Measured(Config(1, 2, 192, 4, parts=2), 0.559, 2.33),
        Measured(Config(1, 2, 128, 5), 0.399, 1.37),
        Measured(Config(1, 2, 112, 6), 0.378, 1.63),
        Measured(Config(1, 2, 96, 6), 0.342, 1.72),
        Measured(Config(1, 1, 128, 8), 0.233, 1.31),
        Measured(Config(1, 1, 128, 8, 2, 1), 0.257, 1.38),
        Measured(Config(1, 2, 64, 7), 0.264, 1.35),
        Measured(Config(1, 2, 64, 9, split_k=2), 0.267, 4.13),
        Measured(Config(1, 1, 112, 9), 0.251, 1.36),
        Measured(Config(1, 1, 96, 10, 2, 1), 0.219, 1.19),
        Measured(Config(1, 1, 80, 10, split_k=4), 0.196, 3.87),
        Measured(Config(1, 1, 64, 10), 0.173, 1.18),
        Measured(Config(1, 1, 64, 10, split_k=2), 0.189, 4.56),
    ), 1.17, 4.11e6, 3.21, 0.31, 0.4),),
}
