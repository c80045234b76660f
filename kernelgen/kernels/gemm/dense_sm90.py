"""Host side of gemm/dense_sm90: matrix products on Hopper with TMA and WGMMA, 16-bit and fp8, with a fused epilogue.

The kernel and its data flow: templates/include/kernelgen/gemm/dense_sm90.cuh; the device library it stands on and the choices
made here, with their measurements: docs/design/hopper.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm.requantize import Requantization
from kernelgen.kernels.gemm.sm90 import (
    BLOCK_RECIPES,
    MMA_ROWS,
    POINTERS,
    ROW_BYTES,
    Quantize,
    addresses,
    depth,
    kind_of_sums,
    options,
    promotes,
    quantized,
    quantizes,
    requantized,
    round_up,
    scalars,
    splits,
    supports_common,
    unquantized,
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
    *((name, "ptr") for name in (*POINTERS, "out_scale", "ends")), *((name, "i64") for name in (
        "c_batch", "c_row", "out_batch", "out_row", "bias_batch", "scale_a_batch", "scale_b_batch", "out_scale_batch", "out_scale_row",
        "out_scale_block")),
    *((name, "i32") for name in (
        "m", "n", "k", "tiles_m", "tiles_n", "tiles", "groups", "batched_a", "batched_b", "scale_a_row", "scale_a_block",
        "scale_b_column", "scale_b_block")), *((name, "f32") for name in ("beta", "alpha", "limit")),
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
    parts      of the columns, one promoted product each: two lie in as many registers as one whole, and the tensor core fills one
               while the other is added to the totals
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

    def __str__(self) -> str:
        words = f"{self.block_m}x{self.block_n} g{self.consumers} s{self.stages} c{self.cluster_m}x{self.cluster_n}"
        words += f" r{self.band_rows}" if self.band_rows != 8 else ""
        words += " pingpong" if self.pingpong else ""
        words += f" p{self.parts}" if self.parts != 1 else ""
        return words + (f" b{self.slabs}" if self.slabs != 2 else "")

    @property
    def block_m(self) -> int:
        return self.mma_m * (1 if self.pingpong else self.consumers) * MMA_ROWS

    @property
    def blocks(self) -> int:
        return self.cluster_m * self.cluster_n

    def tma_out(self, gated: bool) -> bool:
        """The output leaves in slabs of 128 bytes of a row, the last of a multiple of 16 columns."""
        return self.outputs(gated) % 16 == 0

    def outputs(self, gated: bool) -> int:
        """Columns of the output in a tile."""
        return self.block_n // (2 if gated else 1)


def shared_memory(problem: GemmProblem, config: Config) -> int:
    """Dynamic shared memory in bytes of a launch: DenseSm90::kSharedBytes of the header."""
    p, c = problem, config
    slabs = c.consumers * c.slabs * _SLAB_BYTES if c.tma_out(p.gated) else 0
    stage = (c.block_m + c.block_n) * ROW_BYTES + round_up(4 * _scales_of_stage(p, c), 128)
    return c.stages * stage + slabs + round_up(2 * c.stages * 8, 128)


def _scales_of_stage(problem: GemmProblem, config: Config) -> int:
    """Scales of blocks that a stage holds: of each row, and each run of columns that share one wherever a tile begins."""
    if problem.scales not in BLOCK_RECIPES:
        return 0
    width = config.block_n // (2 if splits(problem) else 1)
    return config.block_m + config.block_n // math.gcd(width, BLOCK_RECIPES[problem.scales])


def supports(problem: GemmProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    return supports_common(problem, target, "dense_sm90")


def legal(problem: GemmProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target: registers, shared memory, boxes?"""
    c = config
    # Promoted, two products have sums of their own.
    sums = c.mma_m * c.block_n // 2 + (c.block_n // c.parts if promotes(problem) else 0)
    sums += c.block_n // 8 if problem.scales == "block_1x128" else 0  # scales of columns, read while sums are added
    half = problem.n // 2
    shared = shared_memory(problem, c)
    boxes_b = max(c.cluster_m, 2 if splits(problem) else 1)
    mn_boxes = (c.block_n // MMA_ROWS, boxes_b) if problem.b_order == "row" else (c.block_n // 8, boxes_b)
    return first_no(
        (c.mma_m >= 1 and c.consumers in _MAX_SUMS and c.stages >= 2, f"config {c}: expected 1 to 3 consumers and 2 stages or more"),
        (not c.pingpong or c.consumers == 2, f"config {c}: two consumers take turns"),
        (c.parts == 1 or promotes(problem) and c.block_n % (8 * c.parts) == 0,
         f"config {c}: only promoted sums are taken in parts, of a multiple of 8 columns"),
        (c.slabs in (1, 2, 4), f"config {c}: 1, 2 or 4 slabs"),
        (c.cluster_m in (1, 2) and c.cluster_n in (1, 2), f"config {c}: clusters of up to 2 x 2"),
        (c.block_n % 8 == 0 and 8 <= c.block_n <= 256, f"block_n {c.block_n}: WGMMA has 8 to 256 columns in steps of 8"),
        (problem.b_order == "col" or c.block_n % MMA_ROWS == 0, f"block_n {c.block_n}: rows of b are loaded by 64 columns"),
        (mn_boxes[0] % mn_boxes[1] == 0, f"block_n {c.block_n} does not fall into {boxes_b} boxes"),
        (c.block_m // c.cluster_n <= 256, f"config {c}: a box has at most 256 rows"),
        (not problem.gated or c.block_n % 16 == 0, f"block_n {c.block_n}: a gate needs a multiple of 16"),
        (not quantizes(problem) or c.outputs(problem.gated) % 128 == 0,
         f"config {c}: a tile's {c.outputs(problem.gated)} outputs are no multiple of the 128 that share a scale"),
        (not (splits(problem) and problem.scales == "block_128x128") or half % math.gcd(c.block_n // 2, 128) == 0,
         f"block_n {c.block_n}: a scale's columns would end within a tile's of the up half, which begins at {half}"),
        (sums <= _MAX_SUMS[c.consumers], f"config {c} has {sums} accumulators per thread, at most {_MAX_SUMS[c.consumers]} leave room "
                                         "for the rest"),
        (shared <= target.shared_memory_per_block, f"config {c} needs {shared} bytes of shared memory, {target} has "
                                                   f"{target.shared_memory_per_block}"),
    )


class Measured(NamedTuple):
    """A config and what its tile took on an H200, in microseconds: 128 bytes of K (``step``), and what it takes beside its steps,
    mostly the epilogue, as far as the next tile's products do not run beside it (``finish``)."""

    config: Config
    step: float
    finish: float


_BYTES_PER_US = 4.4e6  # of an H200's memory
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
        Measured(Config(2, 2, 176, 4, pingpong=True), 0.472, 0.1),
        Measured(Config(2, 2, 128, 5, pingpong=True), 0.343, 0.1),
        Measured(Config(1, 2, 128, 6), 0.361, 1.1),
        Measured(Config(1, 1, 128, 8), 0.213, 0.8),
        Measured(Config(1, 2, 64, 8), 0.260, 0.8),
        Measured(Config(1, 1, 64, 10), 0.184, 0.6),
    ),
    "promoted": (
        Measured(Config(2, 2, 128, 4, parts=2), 0.858, 2.56),
        Measured(Config(1, 2, 192, 4, parts=2), 0.623, 2.10),
        Measured(Config(1, 2, 176, 4, parts=2), 0.570, 2.61),
        Measured(Config(1, 2, 160, 5, parts=2), 0.524, 2.34),
        Measured(Config(1, 2, 128, 6), 0.397, 2.15),
        Measured(Config(1, 1, 128, 8), 0.297, 1.39),
        Measured(Config(1, 2, 64, 8), 0.318, 0.87),
        Measured(Config(1, 1, 64, 10), 0.186, 1.18),
    ),
    "blocks": (
        Measured(Config(2, 2, 128, 4, parts=2, slabs=1), 1.094, 0.75),
        Measured(Config(1, 2, 192, 4, parts=2), 0.746, 0.44),
        Measured(Config(1, 2, 160, 5, parts=2), 0.685, 0.46),
        Measured(Config(1, 2, 128, 5), 0.497, 0.66),
        Measured(Config(1, 1, 128, 8), 0.329, 0.37),
        Measured(Config(1, 1, 64, 10), 0.243, 0.27),
    ),
}

# Beside them, for an output with a scale for 128 of a row, which a tile must hold: 256 columns of b where it is gated. In groups, with
# swiglu (2026-11-30, results/tried/h200_moe_codes.json); the last, for scales of single columns, is estimated.
QUANTIZING: dict[str, tuple[Measured, ...]] = {
    "blocks": (Measured(Config(1, 2, 256, 4, parts=4), 1.00, 1.4), Measured(Config(1, 2, 256, 4, parts=8, slabs=1), 1.27, 2.4),
               Measured(Config(1, 1, 256, 5, parts=4), 0.55, 2.7), Measured(Config(1, 2, 128, 5, parts=2), 0.53, 0.7)),
}


def _measured(problem: GemmProblem) -> tuple[Measured, ...]:
    """Of the problem's kind."""
    kind = kind_of_sums(problem)
    return (*MEASURED[kind], *(QUANTIZING.get(kind, ()) if quantizes(problem) else ()))


def _tiles(problem: GemmProblem, config: Config) -> tuple[int, int]:
    """Cluster tiles along M and N."""
    return -(-problem.m // (config.block_m * config.cluster_m)), -(-problem.n // (config.block_n * config.cluster_n))


def _cost(problem: GemmProblem, target: Target, measured: Measured) -> float:
    """Estimated microseconds: waves of tiles, and no faster than memory."""
    tiles_m, tiles_n = _tiles(problem, measured.config)
    clusters = max(1, (target.sm_count or 132) // measured.config.blocks)
    waves = -(-tiles_m * tiles_n * problem.batch // clusters)
    tiles_time = waves * (-(-problem.k // depth(problem)) * measured.step + measured.finish)
    p, size = problem, ROW_BYTES // depth(problem)
    memory = p.batch * size * (p.m * p.k + p.k * p.n + p.m * p.n) / _BYTES_PER_US
    # Where memory is the limit, less work is still the better bet.
    return max(tiles_time, memory) + tiles_time / 10


def estimate(problem: GemmProblem, target: Target) -> float:
    """Microseconds that the first candidate is expected to take."""
    return min((_cost(problem, target, m) for m in _measured(problem) if legal(problem, target, m.config)), default=math.inf)


def candidates(problem: GemmProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first."""
    fitting = [m for m in _measured(problem) if legal(problem, target, m.config)]
    yield from (m.config for m in sorted(fitting, key=lambda m: _cost(problem, target, m)))


def _requantization(problem: GemmProblem, target: Target) -> Requantization | None:
    if problem.out_scale is None or quantizes(problem):
        return None
    return Requantization.of(problem, target, problem.batch, problem.m)


def spec(problem: GemmProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, orders, epilogue and config; no extents."""
    quantize = _requantization(problem, target)
    made = spec_of(unquantized(problem) if quantize else problem, target, config, ENTRY, "kNone")
    return requantized(made, quantize) if quantize else made


def spec_of(problem: GemmProblem, target: Target, config: Config, entry: str, grouping: str) -> KernelSpec:
    """That of a dense or grouped product; ``grouping``: of grouping.cuh."""
    p, c = problem, config
    parameters = options(
        p, c.block_n // c.parts, mma_m=c.mma_m, consumers=c.consumers, block_n=c.block_n, parts=c.parts, stages=c.stages,
        cluster_m=c.cluster_m, cluster_n=c.cluster_n, band_rows=c.band_rows, pingpong=c.pingpong, slabs=c.slabs, tma_out=c.tma_out(p.gated),
        quantize=quantizes(p), shared_memory=shared_memory(p, c), entry=entry, grouping=grouping)
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
    if c.tma_out(p.gated):
        columns, outputs = ROW_BYTES // out_bytes, c.block_n // (2 if p.gated else 1)
        maps.append(tensor_map("map_out", "out", t.out, (columns, MMA_ROWS)))
        maps.append(tensor_map("map_rest", "out", t.out, (outputs % columns or columns, MMA_ROWS), swizzled=outputs % columns == 0))
    return maps


def bind(problem: GemmProblem, config: Config, kernel: Any, tensors: GemmTensors) -> Callable[[GemmTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    p, c = problem, config
    tiles_m, tiles_n = _tiles(p, c)
    quantize = _requantization(p, kernel.spec.target)
    return closure(p, c, kernel, tensors, tiles_m, tiles_n, tiles_m * tiles_n * p.batch, c.block_m // c.cluster_n,
                   quantize.bind(kernel, tensors, pitch=round_up(p.outputs, 4)) if quantize else None)


def closure(problem: GemmProblem, config: Config, kernel: Any, tensors: Any, tiles_m: int, tiles_n: int, tiles: int,
            box_a: int, quantize: Quantize | None) -> Callable[[Any], None]:
    """That of a dense or grouped product. ``tiles``: of all batch entries, at most; ``box_a``: rows of a box of a; ``quantize``: what
    follows, on a float32 workspace."""
    if quantize is not None:
        return quantized(problem, tensors, quantize, lambda p, t: closure(p, config, kernel, t, tiles_m, tiles_n, tiles, box_a, None))
    p, c, t = problem, config, tensors
    clusters = min(tiles, max(1, target_of(t.a.device).sm_count // c.blocks))
    launch = kernel.prepare(
        t.a.device.index or 0, grid=(clusters * c.blocks, 1, 1), block=(128 * (c.consumers + 1), 1, 1), cluster=(c.blocks, 1, 1),
        programmatic=True, shared_memory=shared_memory(p, c), tensor_maps=_maps(p, c, t, box_a))
    tail = PARAMS.pack_scalars(scalars(p, t) | {
        "tiles_m": tiles_m, "tiles_n": tiles_n, "tiles": tiles, "groups": p.batch, "batched_a": int(t.a.shape[0] > 1),
        **dict(zip(("out_scale_batch", "out_scale_row", "out_scale_block"), t.out_scale.stride() if p.out_scale else (0, 0, 0)))})
    blank, pack, pointers = bytes(128 * len(PARAMS.tensor_maps)), PARAMS.pointer_packer.pack, addresses(p)
    grouped, codes = p.op == "grouped_gemm", p.out_scale is not None

    def run(t: Any) -> None:
        launch(blank + pack(*pointers(t), t.out_scale.data_ptr() if codes else 0, t.ends.data_ptr() if grouped else 0) + tail)

    return run


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
    yield replace(fp8, scales="block_128x128"), Config(1, 2, 192, 4, parts=2)
    yield replace(fp8, scales="block_128x128", activation="swiglu"), Config(2, 2, 128, 3, parts=2)
    yield replace(fp8, scales="block_1x128", bias=True, bias_dtype="bf16"), Config(1, 2, 160, 5, parts=2)
    quantized = replace(fp8, out_dtype="e4m3", out_scale="block_1x128")
    yield quantized, Config(1, 2, 128, 6)
    yield replace(quantized, scales="block_128x128", out_dtype="e5m2", bias=True, bias_dtype="fp32"), Config(2, 2, 128, 4, parts=2, slabs=1)
    yield replace(base, activation="swiglu", out_dtype="e4m3", out_scale="block_1x128"), Config(1, 2, 256, 4)
    yield replace(base, out_dtype="e4m3", out_scale="block_1x128"), Config(2, 2, 128, 5, pingpong=True)
    for recipe in ("tensor", "row"):
        yield replace(quantized, out_scale=recipe), Config(1, 2, 160, 5, parts=2)


FAMILY = KernelFamily(
    name="gemm/dense_sm90", op="gemm", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage, capabilities=(90,),
)
