"""Host side of gemm/dense_sm90: matrix products on Hopper with TMA and WGMMA, 16-bit and fp8, with a fused epilogue.

The kernel and its data flow: templates/include/kernelgen/gemm/dense_sm90.cuh; the device library it stands on and the choices
made here, with their measurements: docs/design/hopper.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm.sm90 import (
    BLOCK_RECIPES,
    MMA_ROWS,
    POINTERS,
    ROW_BYTES,
    addresses,
    depth,
    options,
    promotes,
    scalars,
    splits,
    supports_common,
    words,
)
from kernelgen.kernels.tensor_map import tensor_map
from kernelgen.params import ParamStruct
from kernelgen.problems.gemm import GemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target, target_of
from kernelgen.tensors import GemmTensors
from kernelgen.verdicts import Verdict, first_no

# struct DenseSm90Params of dense_params.cuh.
PARAMS = ParamStruct((
    *((name, "ptr") for name in (*POINTERS, "ends")), *((name, "i64") for name in (
        "c_batch", "c_row", "out_batch", "out_row", "bias_batch", "scale_a_batch", "scale_b_batch")),
    *((name, "i32") for name in (
        "m", "n", "k", "tiles_m", "tiles_n", "tiles", "groups", "batched_a", "batched_b", "scale_a_row", "scale_a_block",
        "scale_b_column", "scale_b_block")), ("beta", "f32"),
), tensor_maps=("map_a", "map_b", "map_out", "map_rest"))
ENTRY = "gemm_dense_sm90"

_SLAB_BYTES = MMA_ROWS * ROW_BYTES
# Accumulators that leave a consumer's 240, 232 or 160 registers room for addresses and the epilogue.
_MAX_SUMS = {1: 200, 2: 200, 3: 112}


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

    def __str__(self) -> str:
        words = f"{self.block_m}x{self.block_n} g{self.consumers} s{self.stages} c{self.cluster_m}x{self.cluster_n}"
        words += f" r{self.band_rows}" if self.band_rows != 8 else ""
        words += " pingpong" if self.pingpong else ""
        return words + (f" b{self.slabs}" if self.slabs != 2 else "")

    @property
    def block_m(self) -> int:
        return self.mma_m * (1 if self.pingpong else self.consumers) * MMA_ROWS

    @property
    def blocks(self) -> int:
        return self.cluster_m * self.cluster_n

    def tma_out(self, out_bytes: int, gated: bool) -> bool:
        """The output leaves in slabs of 128 bytes of a row, the last of a multiple of 16 columns."""
        return self.block_n // (2 if gated else 1) % 16 == 0

    def shared_memory(self, out_bytes: int, gated: bool) -> int:
        """Dynamic shared memory in bytes: DenseSm90::kSharedBytes of the header."""
        slabs = self.consumers * self.slabs * _SLAB_BYTES if self.tma_out(out_bytes, gated) else 0
        return self.stages * (self.block_m + self.block_n) * ROW_BYTES + slabs + -(-2 * self.stages * 8 // 128) * 128


def supports(problem: GemmProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    return supports_common(problem, target, "dense_sm90")


def legal(problem: GemmProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target: registers, shared memory, boxes?"""
    c = config
    # Promoted, 64 rows at a time have sums of their own.
    sums = (c.mma_m + (1 if promotes(problem) else 0)) * c.block_n // 2
    sums += c.block_n // 4 if problem.scales == "block_1x128" else 0  # a scale for each of a thread's columns
    half = problem.n // 2
    shared = c.shared_memory(DTYPES[problem.out_dtype].bytes, problem.gated)
    boxes_b = max(c.cluster_m, 2 if splits(problem) else 1)
    mn_boxes = (c.block_n // MMA_ROWS, boxes_b) if problem.b_order == "row" else (c.block_n // 8, boxes_b)
    return first_no(
        (c.mma_m >= 1 and c.consumers in _MAX_SUMS and c.stages >= 2, f"config {c}: expected 1 to 3 consumers and 2 stages or more"),
        (not c.pingpong or c.consumers == 2, f"config {c}: two consumers take turns"),
        (c.slabs in (1, 2, 4), f"config {c}: 1, 2 or 4 slabs"),
        (c.cluster_m in (1, 2) and c.cluster_n in (1, 2), f"config {c}: clusters of up to 2 x 2"),
        (c.block_n % 8 == 0 and 8 <= c.block_n <= 256, f"block_n {c.block_n}: WGMMA has 8 to 256 columns in steps of 8"),
        (problem.b_order == "col" or c.block_n % MMA_ROWS == 0, f"block_n {c.block_n}: rows of b are loaded by 64 columns"),
        (mn_boxes[0] % mn_boxes[1] == 0, f"block_n {c.block_n} does not fall into {boxes_b} boxes"),
        (c.block_m // c.cluster_n <= 256, f"config {c}: a box has at most 256 rows"),
        (not problem.gated or c.block_n % 16 == 0, f"block_n {c.block_n}: a gate needs a multiple of 16"),
        (not (splits(problem) and problem.scales == "block_128x128") or half % math.gcd(c.block_n // 2, 128) == 0,
         f"block_n {c.block_n}: a scale's columns would end within a tile's of the up half, which begins at {half}"),
        (sums <= _MAX_SUMS[c.consumers], f"config {c} has {sums} accumulators per thread, at most {_MAX_SUMS[c.consumers]} leave room "
                                         "for the rest"),
        (shared <= target.shared_memory_per_block, f"config {c} needs {shared} bytes of shared memory, {target} has "
                                                   f"{target.shared_memory_per_block}"),
    )


@dataclass(frozen=True)
class _Measured:
    """A config and what its tile took on an H200 (2026-11-30, docs/design/hopper.md), in microseconds.

    step      128 bytes of K; promoted: with fp8 sums added to float32 totals at each; blocks: times the scales of blocks
    finish    what a tile takes beside its steps: the epilogue, as far as the next tile's products do not run beside it
    """

    config: Config
    step: float
    promoted: float | None
    blocks: float | None
    finish: float

    def step_of(self, problem: GemmProblem) -> float | None:
        return self.blocks if problem.scales in BLOCK_RECIPES else self.promoted if promotes(problem) else self.step


_BYTES_PER_US = 4.4e6  # of an H200's memory
_MEASURED = (
    _Measured(Config(1, 2, 256, 4), 0.688, None, None, 1.6),
    _Measured(Config(2, 2, 128, 4), 0.695, 0.75, 0.82, 1.6),
    _Measured(Config(1, 2, 224, 4), 0.596, None, None, 1.4),
    _Measured(Config(1, 3, 176, 4, slabs=1), 0.710, None, None, 1.6),
    _Measured(Config(1, 2, 208, 4), 0.545, None, None, 1.3),
    _Measured(Config(1, 2, 192, 4), 0.511, 0.605, 0.62, 1.2),
    _Measured(Config(1, 2, 160, 5), 0.440, 0.527, 0.63, 1.1),
    _Measured(Config(2, 2, 176, 4, pingpong=True), 0.472, None, None, 0.1),
    _Measured(Config(2, 2, 128, 5, pingpong=True), 0.343, None, None, 0.1),
    _Measured(Config(1, 2, 128, 6), 0.361, 0.437, 0.51, 1.1),
    _Measured(Config(1, 1, 128, 8), 0.213, 0.300, 0.36, 0.8),
    _Measured(Config(1, 2, 64, 8), 0.311, 0.350, 0.39, 0.8),
    _Measured(Config(1, 1, 64, 10), 0.184, 0.240, 0.27, 0.6),
)


def _tiles(problem: GemmProblem, config: Config) -> tuple[int, int]:
    """Cluster tiles along M and N."""
    return -(-problem.m // (config.block_m * config.cluster_m)), -(-problem.n // (config.block_n * config.cluster_n))


def _cost(problem: GemmProblem, target: Target, measured: _Measured) -> float:
    """Estimated microseconds: waves of tiles, and no faster than memory."""
    tiles_m, tiles_n = _tiles(problem, measured.config)
    clusters = max(1, (target.sm_count or 132) // measured.config.blocks)
    waves = -(-tiles_m * tiles_n * problem.batch // clusters)
    step = measured.step_of(problem)
    assert step is not None
    tiles_time = waves * (-(-problem.k // depth(problem)) * step + measured.finish)
    p, size = problem, ROW_BYTES // depth(problem)
    memory = p.batch * size * (p.m * p.k + p.k * p.n + p.m * p.n) / _BYTES_PER_US
    # Where memory is the limit, less work is still the better bet.
    return max(tiles_time, memory) + tiles_time / 10


def candidates(problem: GemmProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first."""
    fitting = [m for m in _MEASURED if legal(problem, target, m.config) and m.step_of(problem) is not None]
    yield from (m.config for m in sorted(fitting, key=lambda m: _cost(problem, target, m)))


def spec(problem: GemmProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, orders, epilogue and config; no extents."""
    return spec_of(problem, target, config, ENTRY, "kNone")


def spec_of(problem: GemmProblem, target: Target, config: Config, entry: str, grouping: str) -> KernelSpec:
    """That of a dense or grouped product; ``grouping``: of grouping.cuh."""
    p, c, out_bytes = problem, config, DTYPES[problem.out_dtype].bytes
    parameters = options(
        p, c.block_n, mma_m=c.mma_m, consumers=c.consumers, block_n=c.block_n, stages=c.stages, cluster_m=c.cluster_m,
        cluster_n=c.cluster_n, band_rows=c.band_rows, pingpong=c.pingpong, slabs=c.slabs, tma_out=c.tma_out(out_bytes, p.gated),
        shared_memory=c.shared_memory(out_bytes, p.gated), entry=entry, grouping=grouping)
    return KernelSpec.make(
        "_".join([entry, *words(p), *str(c).split()]), "gemm/dense_sm90.cu.jinja", "nvrtc", parameters,
        params=PARAMS, params_type="kernelgen::DenseSm90Params", entries=(entry,), target=target,
    )


def _maps(problem: GemmProblem, config: Config, t: Any, box_a: int) -> list[Any]:
    """TMA descriptors of a, b and, where it leaves through shared memory, out."""
    p, c = problem, config
    k = depth(p)
    boxes_b = max(c.cluster_m, 2 if splits(p) else 1)
    major_a, major_b = p.a_order == "row", p.b_order == "col"
    maps = [
        tensor_map("map_a", "a", t.a if major_a else t.a.mT, (k, box_a) if major_a else (MMA_ROWS, k)),
        tensor_map("map_b", "b", t.b.mT if major_b else t.b, (k, c.block_n // boxes_b) if major_b else (MMA_ROWS, k)),
    ]
    out_bytes = DTYPES[p.out_dtype].bytes
    if c.tma_out(out_bytes, p.gated):
        columns, outputs = ROW_BYTES // out_bytes, c.block_n // (2 if p.gated else 1)
        maps.append(tensor_map("map_out", "out", t.out, (columns, MMA_ROWS)))
        maps.append(tensor_map("map_rest", "out", t.out, (outputs % columns or columns, MMA_ROWS), swizzled=outputs % columns == 0))
    return maps


def bind(problem: GemmProblem, config: Config, kernel: Any, tensors: GemmTensors) -> Callable[[GemmTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    p, c = problem, config
    tiles_m, tiles_n = _tiles(p, c)
    return closure(p, c, kernel, tensors, tiles_m, tiles_n, tiles_m * tiles_n * p.batch, c.block_m // c.cluster_n)


def closure(problem: GemmProblem, config: Config, kernel: Any, tensors: Any, tiles_m: int, tiles_n: int, tiles: int,
            box_a: int) -> Callable[[Any], None]:
    """That of a dense or grouped product. ``tiles``: of all batch entries, at most; ``box_a``: rows of a box of a."""
    p, c, t = problem, config, tensors
    clusters = min(tiles, max(1, target_of(t.a.device).sm_count // c.blocks))
    launch = kernel.prepare(
        t.a.device.index or 0, grid=(clusters * c.blocks, 1, 1), block=(128 * (c.consumers + 1), 1, 1), cluster=(c.blocks, 1, 1),
        programmatic=True, shared_memory=c.shared_memory(DTYPES[p.out_dtype].bytes, p.gated), tensor_maps=_maps(p, c, t, box_a))
    tail = PARAMS.pack_scalars(scalars(p, t) | {
        "tiles_m": tiles_m, "tiles_n": tiles_n, "tiles": tiles, "groups": p.batch, "batched_a": int(t.a.shape[0] > 1)})
    blank, pack, pointers = bytes(128 * len(PARAMS.tensor_maps)), PARAMS.pointer_packer.pack, addresses(p)
    if p.op == "grouped_gemm":
        return lambda t: launch(blank + pack(*pointers(t), t.ends.data_ptr()) + tail)
    return lambda t: launch(blank + pack(*pointers(t), 0) + tail)


def coverage() -> Iterable[tuple[GemmProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = GemmProblem(1, 4096, 4096, 4096, "bf16", "bf16", "bf16", b_order="col")
    half = replace(base, a_dtype="fp16", b_dtype="fp16", out_dtype="fp16")
    yield base, None
    yield half, Config(2, 2, 128, 4, 1, 2)
    yield half, Config(2, 2, 128, 5, pingpong=True)
    yield base, Config(1, 3, 176, 4, slabs=1)
    yield replace(base, b_order="row", a_order="col"), Config(2, 2, 128, 4, 2, 1)
    yield replace(half, b_order="row", out_dtype="fp32"), Config(1, 2, 128, 4)
    yield replace(base, bias=True, bias_dtype="bf16", activation="silu"), Config(1, 2, 160, 5)
    yield replace(base, activation="swiglu"), Config(1, 2, 256, 4, 2, 1)
    yield replace(base, activation="geglu", gate_up="up_first", b_order="row"), Config(1, 2, 256, 4)
    yield replace(half, activation="swiglu", gate_up="interleaved", bias=True, bias_dtype="fp32"), Config(1, 2, 128, 4)
    yield replace(base, accumulate_c=True, c_dtype="bf16"), Config(1, 1, 64, 8)
    fp8 = replace(base, a_dtype="e4m3", b_dtype="e4m3", scales="row")
    yield fp8, Config(1, 2, 128, 6)
    yield replace(fp8, accumulate="fast", scales="tensor"), Config(1, 2, 256, 4, 2, 1)
    yield replace(fp8, a_dtype="e5m2", b_dtype="e5m2", out_dtype="fp32"), Config(1, 2, 128, 4)
    yield replace(fp8, scales="block_128x128"), Config(1, 2, 192, 4)
    yield replace(fp8, scales="block_128x128", activation="swiglu"), Config(2, 2, 128, 4)
    yield replace(fp8, scales="block_1x128", bias=True, bias_dtype="bf16"), Config(1, 2, 128, 6)


FAMILY = KernelFamily(
    name="gemm/dense_sm90", op="gemm", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage, capabilities=(90,),
)
