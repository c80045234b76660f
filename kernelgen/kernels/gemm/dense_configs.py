"""Configs of gemm/dense_sm90 and gemm/grouped_sm90, and what their tiles took on an H200: the tables that a first choice is made from."""

from __future__ import annotations

from dataclasses import dataclass
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

    def __str__(self) -> str:
        words = f"{self.block_m}x{self.block_n} g{self.consumers} s{self.stages} c{self.cluster_m}x{self.cluster_n}"
        words += f" r{self.band_rows}" if self.band_rows != 8 else ""
        words += " pingpong" if self.pingpong else ""
        words += f" p{self.parts}" if self.parts != 1 else ""
        words += f" k{self.split_k}" if self.split_k != 1 else ""
        words += f" x{self.resident}" if self.resident != 1 else ""
        return words + (f" b{self.slabs}" if self.slabs != 2 else "")

    @property
    def block_m(self) -> int:
        return self.mma_m * (1 if self.pingpong else self.consumers) * MMA_ROWS

    @property
    def blocks(self) -> int:
        """Of a cluster."""
        return self.cluster_m * self.cluster_n * self.split_k

    def tma_out(self, gated: bool) -> bool:
        """The output leaves in slabs of 128 bytes of a row, the last of a multiple of 16 columns."""
        return self.split_k == 1 and self.outputs(gated) % 16 == 0

    def outputs(self, gated: bool) -> int:
        """Columns of the output in a tile."""
        return self.block_n // (2 if gated else 1)


class Measured(NamedTuple):
    """A config and what its tile took on an H200, in microseconds: 128 bytes of K (``step``), and what it takes beside its steps,
    mostly the epilogue, as far as the next tile's products do not run beside it (``finish``)."""

    config: Config
    step: float
    finish: float


# 2026-11-30, docs/design/hopper.md. "promoted": fp8 sums added to float32 totals at each step; "blocks": times their scales.
MEASURED: dict[str, tuple[Measured, ...]] = {
    "plain": (
        Measured(Config(1, 2, 256, 4), 0.688, 1.6),
        Measured(Config(2, 2, 128, 4), 0.695, 1.6),
        Measured(Config(1, 2, 224, 4), 0.596, 1.4),
        Measured(Config(1, 3, 176, 4, slabs=1), 0.710, 1.6),
        Measured(Config(1, 2, 208, 4), 0.545, 1.3),
        Measured(Config(1, 2, 192, 4), 0.511, 1.2),
        Measured(Config(1, 2, 160, 5), 0.440, 1.1),
        Measured(Config(1, 2, 144, 5), 0.400, 1.1),  # between its neighbours; four of them are 576 columns
        Measured(Config(2, 2, 176, 4, pingpong=True), 0.472, 0.1),
        Measured(Config(2, 2, 128, 5, pingpong=True), 0.343, 0.1),
        Measured(Config(1, 2, 128, 6), 0.361, 1.1),
        Measured(Config(1, 1, 128, 8), 0.213, 0.8),
        Measured(Config(1, 2, 64, 8), 0.260, 0.8),
        Measured(Config(1, 1, 64, 10), 0.184, 0.6),
    ),
    "promoted": (
        Measured(Config(2, 2, 128, 4, parts=2), 0.800, 2.56),
        Measured(Config(1, 2, 192, 4, parts=2), 0.600, 2.10),
        Measured(Config(1, 2, 176, 4, parts=2), 0.545, 2.61),
        Measured(Config(1, 2, 160, 5, parts=2), 0.505, 2.34),
        Measured(Config(1, 2, 128, 6), 0.397, 2.15),
        Measured(Config(1, 1, 128, 8), 0.297, 1.39),
        Measured(Config(1, 2, 64, 8), 0.318, 0.87),
        Measured(Config(1, 1, 64, 10), 0.186, 1.18),
    ),
    "blocks": (  # the first three by the run of results/tried/h200_gemm_blocks.json, the others scaled like them
        Measured(Config(2, 2, 128, 4, parts=2, slabs=1), 0.870, 2.2),
        Measured(Config(1, 2, 192, 4, parts=2), 0.630, 1.5),
        Measured(Config(1, 2, 128, 5), 0.430, 1.0),
        Measured(Config(1, 2, 160, 5, parts=2), 0.600, 1.3),
        Measured(Config(1, 1, 128, 8), 0.286, 0.6),
        Measured(Config(1, 1, 64, 10), 0.210, 0.5),
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
    "blocks": (Measured(Config(1, 1, 256, 5, parts=4), 0.55, 2.7), Measured(Config(1, 2, 256, 4, parts=4), 1.25, 1.4)),
}


# The same for 129 - 1023 rows of 16 bits, where the clock is higher and tiles are few: a fit to 30 problems of M 192 - 768, whose choices
# are within 0.5 % of the best of what was searched in the mean, 5 at worst (docs/design/hopper.md; tools/tune.py).
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
