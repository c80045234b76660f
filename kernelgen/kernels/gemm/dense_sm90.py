"""Host side of gemm/dense_sm90: matrix products on Hopper with TMA and WGMMA, 16-bit and fp8, with a fused epilogue.

The kernel and its data flow: templates/include/kernelgen/gemm/dense_sm90.cuh; the device library it stands on and the choices
made here, with their measurements: docs/design/hopper.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels import counters
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm import row_totals
from kernelgen.kernels.gemm.activations import splits
from kernelgen.kernels.gemm.dense_configs import FITS, GATHERED, GROUPED, MEASURED, QUANTIZING, Config, Fit, Measured
from kernelgen.kernels.gemm.mma import RESERVED_SHARED_MEMORY
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
    *((name, "ptr") for name in (*POINTERS, "out_scale", "ends", "rows", "counter", "row_weights")), *((name, "i64") for name in (
        "c_batch", "c_row", "out_batch", "out_row", "bias_batch", "scale_a_batch", "scale_b_batch", "out_scale_batch", "out_scale_row",
        "out_scale_block")),
    *((name, "i32") for name in (
        "m", "n", "k", "tiles_m", "tiles_n", "tiles", "groups", "batched_a", "batched_b", "scale_a_row", "scale_a_block",
        "scale_b_column", "scale_b_block", "scales_by_tma", "a_row")), *((name, "f32") for name in ("beta", "alpha", "limit")),
), tensor_maps=("map_a", "map_b", "map_out", "map_rest", "map_scales"))
ENTRY = "gemm_dense_sm90"

_SLAB_BYTES = MMA_ROWS * ROW_BYTES
_TILE_SLOTS_BYTES = 128  # TileSlots::kBytes of dealt_tiles_sm90.cuh
# Accumulators that leave a consumer's 240, 232 or 160 registers room for addresses and the epilogue.
_MAX_SUMS = {1: 200, 2: 200, 3: 112}
_MAX_RESIDENT_SUMS = {1: 200, 2: 96}  # of two blocks in an SM: ptxas gives a thread 128 registers


def shared_memory(problem: GemmProblem, config: Config) -> int:
    """Dynamic shared memory in bytes of a launch: DenseSm90::kSharedBytes of the header."""
    p, c = problem, config
    slabs = c.consumers * c.slabs * _SLAB_BYTES if tma_out(p, c) else 0
    # Scales and biases of columns, for each consumer: DenseEpilogue::kStaged.
    arrays = (p.scales in ("tensor", "row")) + p.bias if c.split_k == 1 and p.scales not in BLOCK_RECIPES else 0
    staged = c.consumers * arrays * round_up(4 * c.block_n, 128)
    stage = (c.block_m + c.block_n) * ROW_BYTES + _bytes_of_scales(p, c)
    slots = _TILE_SLOTS_BYTES if c.dealt else 0
    return max(c.stages * stage + slabs + staged, _left_sums(p, c)) + round_up(2 * c.stages * 8, 128) + slots


def tma_out(problem: GemmProblem, config: Config) -> bool:
    """The output leaves in slabs of 128 bytes of a row, the last of a multiple of 16 columns; else threads write it, element by element."""
    return config.split_k == 1 and config.outputs(problem.gated) % 16 == 0 and problem.out_alignment == 16


def _left_sums(problem: GemmProblem, config: Config) -> int:
    """Bytes of the sums that blocks which share K leave for each other: in pieces of 64 rows of 16 outputs."""
    c, pair = config, 2 if problem.gated else 1
    return c.block_m * 4 * pair * round_up(c.block_n // pair, 16) if c.split_k > 1 else 0


def _box_of_scales(problem: GemmProblem, config: Config) -> int:
    """Rows of a box of scale_a; those of groups may begin anywhere within four."""
    rows = config.block_m if config.block_m <= 192 else config.block_m // 2
    return rows + (4 if problem.op == "grouped_gemm" and not problem.gathered else 0)


def _bytes_of_scales(problem: GemmProblem, config: Config) -> int:
    """What a stage holds of scales of blocks: of each row, and each run of columns that share one wherever a tile begins."""
    if problem.scales not in BLOCK_RECIPES:
        return 0
    c = config
    box = 4 * _box_of_scales(problem, c)
    rows = box if c.block_m <= 192 else round_up(box, 128) + box
    return round_up(rows + 4 * _runs(problem, c), 128)


def _runs(problem: GemmProblem, config: Config) -> int:
    """Of a tile's columns, that share a scale of blocks: BlockScales::kRuns of the header."""
    width = config.block_n // (2 if splits(problem) else 1)
    return config.block_n // math.gcd(width, BLOCK_RECIPES[problem.scales]) if problem.scales in BLOCK_RECIPES else 0


def supports(problem: GemmProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    return supports_common(problem, target, "dense_sm90") and scales_verdict(problem)


# Of outputs, that a tile of some config of MEASURED has no scale's end within: 160 columns, 80 of each half; of codes 128.
_OUTPUTS_OF_A_SCALE, _OUTPUTS_OF_CODES = 16, 128


def scales_verdict(problem: GemmProblem) -> Verdict:
    """Do scales of 128 x 128 end between tiles? Halves of a gate begin where they do."""
    p = problem
    columns = _OUTPUTS_OF_CODES if quantizes(p) else _OUTPUTS_OF_A_SCALE
    return first_no((not (splits(p) and p.scales == "block_128x128") or p.n // 2 % columns == 0,
                     f"the up half of b begins at column {p.n // 2}, scales of 128 columns want a multiple of {columns}"))


def legal(problem: GemmProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target: registers, shared memory, boxes?"""
    c = config
    # Promoted, two products have sums of their own.
    sums = c.mma_m * c.block_n // 2 + (c.block_n // c.parts if promotes(problem) else 0)
    sums += c.block_n // 8 if problem.scales == "block_1x128" else 0  # scales of columns, read while sums are added
    half = problem.n // 2
    shared = shared_memory(problem, c)
    limit = min(_MAX_SUMS.get(c.consumers, 0), _MAX_RESIDENT_SUMS.get(c.resident, 0))
    per_block = (target.shared_memory_per_block + RESERVED_SHARED_MEMORY) // c.resident - RESERVED_SHARED_MEMORY
    boxes_b = max(c.cluster_m, 2 if splits(problem) else 1)
    mn_boxes = (c.block_n // MMA_ROWS, boxes_b) if problem.b_order == "row" else (c.block_n // 8, boxes_b)
    return first_no(
        (c.mma_m >= 1 and c.consumers in _MAX_SUMS and c.stages >= 2, f"config {c}: expected 1 to 3 consumers and 2 stages or more"),
        (not c.pingpong or c.consumers == 2, f"config {c}: two consumers take turns"),
        (c.parts == 1 or promotes(problem) and c.block_n % (8 * c.parts) == 0,
         f"config {c}: only promoted sums are taken in parts, of a multiple of 8 columns"),
        (c.slabs in (1, 2, 4), f"config {c}: 1, 2 or 4 slabs"),
        (c.cluster_m in (1, 2) and c.cluster_n in (1, 2), f"config {c}: clusters of up to 2 x 2"),
        (not c.dealt or problem.op == "grouped_gemm", f"config {c}: only tiles of groups are dealt out"),
        (c.split_k in (1, 2, 4, 8), f"config {c}: 1, 2, 4 or 8 blocks share K"),
        (c.split_k == 1 or c.blocks == c.split_k and not c.pingpong,
         f"config {c}: blocks that share K have one tile, and nothing to multicast or to take turns in"),
        (c.split_k == 1 or not quantizes(problem), f"config {c}: blocks that share K write no codes"),
        (c.split_k == 1 or not row_totals.reduces(problem), f"config {c}: blocks that share K do not reduce rows, as epilogue asks for"),
        (c.split_k == 1 or problem.out_alignment == 16 or problem.out_dtype == "fp32",
         f"config {c}: blocks that share K write 16 bytes at a time, rows of c or out are aligned to {problem.out_alignment}"),
        (c.split_k <= -(-problem.k // depth(problem)),
         f"config {c}: a K of {problem.k} has less than a step of {depth(problem)} for each of the blocks that share it"),
        (c.resident == 1 or c.resident in _MAX_RESIDENT_SUMS and c.consumers == 1,
         f"config {c}: up to 2 blocks of an SM, of one consumer each"),
        (c.block_n % 8 == 0 and 8 <= c.block_n <= 256, f"block_n {c.block_n}: WGMMA has 8 to 256 columns in steps of 8"),
        (c.consumers < 3 or c.block_n <= 192, f"block_n {c.block_n}: ptxas gives a product of three consumers 128 registers"),
        (problem.a_order == "row" or c.block_m % (MMA_ROWS * c.cluster_n) == 0, f"config {c}: columns of a are loaded by 64 rows"),
        (problem.b_order == "col" or c.block_n % MMA_ROWS == 0, f"block_n {c.block_n}: rows of b are loaded by 64 columns"),
        (mn_boxes[0] % mn_boxes[1] == 0, f"block_n {c.block_n} does not fall into {boxes_b} boxes"),
        (c.block_m // c.cluster_n <= 256, f"config {c}: a box has at most 256 rows"),
        (not problem.gated or c.block_n % 16 == 0, f"block_n {c.block_n}: a gate needs a multiple of 16"),
        (not quantizes(problem) or c.outputs(problem.gated) % 128 == 0,
         f"config {c}: a tile's {c.outputs(problem.gated)} outputs are no multiple of the 128 that share a scale"),
        (not (splits(problem) and problem.scales == "block_128x128") or half % math.gcd(c.block_n // 2, 128) == 0,
         f"block_n {c.block_n}: a scale's columns would end within a tile's of the up half, which begins at {half}"),
        (problem.scales != "block_128x128" or _runs(problem, c) <= 8,  # 9 - 13 of them: 16 - 48 bytes spilled
         f"config {c}: columns with {_runs(problem, c)} scales, of which a thread keeps 8 at most"),
        (sums <= limit, f"config {c} has {sums} accumulators per thread, at most {limit} leave room for the rest"),
        (shared <= per_block, f"config {c} needs {shared} bytes of shared memory, {target} has {per_block} per block"),
    )


_BYTES_PER_US = 4.4e6  # of an H200's memory
_ONE_PRODUCT_ROWS = 128  # so few rows in a batch were not searched
_UNMEASURED = 3.0  # how much longer steps are assumed to take that nobody timed with gathered rows


def _fit(problem: GemmProblem) -> Fit | None:
    """Of a search of problems with about so many rows; sums that are not promoted were searched for 16 bits alone."""
    p, kind = problem, kind_of_sums(problem)
    if p.op != "gemm" or (p.batch > 1 and p.m <= _ONE_PRODUCT_ROWS) or (kind == "plain" and depth(p) != 64):
        return None
    return next((fit for fit in FITS[kind] if p.m in fit.rows), None)


def _measured(problem: GemmProblem) -> tuple[Measured, ...]:
    """Of the problem's kind."""
    kind, fit = kind_of_sums(problem), _fit(problem)
    known = fit.measured if fit else MEASURED[kind]
    if problem.gathered and kind in GATHERED:  # others only where none of them is legal
        timed = {m.config for m in GATHERED[kind]}
        others = (m for m in (*MEASURED[kind], *QUANTIZING.get(kind, ())) if m.config not in timed)
        return (*GATHERED[kind], *(replace(m, step=_UNMEASURED * m.step) for m in others))
    if not quantizes(problem):
        return (*GROUPED.get(kind, ()), *known) if problem.op == "grouped_gemm" else known
    codes = QUANTIZING.get(kind, ())
    tiles = {(m.config.block_m, m.config.block_n, m.config.parts) for m in codes}
    return (*codes, *(m for m in known if (m.config.block_m, m.config.block_n, m.config.parts) not in tiles))


def tiles_of(problem: GemmProblem, config: Config) -> tuple[int, int]:
    """Cluster tiles along M and N."""
    return -(-problem.m // (config.block_m * config.cluster_m)), -(-problem.n // (config.block_n * config.cluster_n))


def _at_once(blocks: int, resident: int, sms: int) -> int:
    """Clusters of so many blocks that run at a time. Those of four and more do not fill the groups of SMs: 116 blocks ran at once, 128 did
    not (H200, 2026-11-30)."""
    return (sms * 10 // 11 if blocks > 2 else sms) * resident // blocks or 1


def _cost(problem: GemmProblem, target: Target) -> Callable[[Measured], float]:
    """Estimated microseconds of a problem by config: waves of tiles, and no faster than memory."""
    p, fit, sms, deep = problem, _fit(problem), target.sm_count or 132, depth(problem)
    moved = p.batch * (ROW_BYTES // deep * (p.m * p.k + p.k * p.n) + DTYPES[p.out_dtype].bytes * p.m * p.outputs)
    steps, m, n, batch = -(-p.k // deep), p.m, p.n, p.batch

    def cost(measured: Measured) -> float:  # of every config, in every choice
        rows, columns, block_m, blocks, resident, split_k = measured.places
        tiles_m = -(-m // rows)
        clusters, tiles = _at_once(blocks, resident, sms), tiles_m * -(-n // columns) * batch
        waves = -(-tiles // clusters)
        tiles_time = waves * (-(-steps // split_k) * measured.step + measured.finish)
        # Where memory is the limit, less work is still the better bet.
        if fit is None:
            return max(tiles_time, moved / _BYTES_PER_US) + tiles_time / 10
        tiles_time *= 1 + fit.beyond * (1 - m / (-(-m // block_m) * block_m))
        idle = 1 - tiles / (waves * clusters)  # the share of all places that stays empty
        memory = moved / fit.bytes_per_us * (1 + fit.again * (1 - 1 / tiles_m)) * (1 + (fit.uneven * idle if waves > 1 else 0))
        return max(tiles_time, memory + fit.start) + tiles_time / 50

    return cost


@lru_cache(maxsize=1024)
def _fits(form: GemmProblem, target: Target, config: Config) -> bool:
    """``legal`` of a problem of one row: it does not look at how many there are, so a size that is new costs no second look."""
    return bool(legal(form, target, config))


def _ranked(problem: GemmProblem, target: Target) -> Iterator[Measured]:
    """Legal ones, best guess first; judged one by one, as who asks mostly wants the first."""
    form = replace(problem, m=1)
    return (m for m in sorted(_measured(problem), key=_cost(problem, target)) if _fits(form, target, m.config))


def estimate(problem: GemmProblem, target: Target) -> float:
    """Microseconds that the first candidate is expected to take; infinite where there is none."""
    first = next(_ranked(problem, target), None)
    return _cost(problem, target)(first) if first else math.inf


def candidates(problem: GemmProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first."""
    return (m.config for m in _ranked(problem, target))


# What a search looks at: (mma_m, consumers, pingpong, columns from, to, in steps of) by kind of sums.
_GRID: dict[str, tuple[tuple[int, int, bool, int, int, int], ...]] = {
    "plain": ((1, 1, False, 48, 256, 16), (1, 2, False, 48, 256, 16), (2, 2, False, 64, 176, 16), (1, 3, False, 48, 192, 16),
              (2, 2, True, 96, 176, 16), (1, 2, True, 128, 256, 32)),
    "promoted": ((1, 1, False, 48, 128, 16), (1, 2, False, 48, 192, 16), (2, 2, False, 64, 128, 16), (1, 3, False, 48, 96, 16)),
    "blocks": ((1, 1, False, 48, 128, 16), (1, 2, False, 48, 192, 16), (2, 2, False, 64, 128, 16), (1, 3, False, 48, 96, 16)),
}
_SUMS_AT_ONCE = 128  # columns of promoted sums that two buffers of whole tiles have room for
_MAX_STAGES = 10
# Cycles a microsecond at full load, bytes that an SM takes from L2 in one, and what promotion adds to a step (H200, 2026-11-30).
_CYCLES, _INGEST, _ADDING = 1500, 100_000, {"plain": 1.0, "promoted": 1.1, "blocks": 1.4}


def _guess(problem: GemmProblem, target: Target, config: Config) -> float:
    """Microseconds by what the tensor core, the way from L2 and the exchange of sums take, for configs that nobody measured."""
    p, c, kind = problem, config, kind_of_sums(problem)
    tensor = c.block_m * c.block_n / 32 / _CYCLES * _ADDING[kind]
    step = max(tensor, (c.block_m + c.block_n) * ROW_BYTES / _INGEST) + 0.02
    exchange = 0.8 + c.block_m * c.block_n * 4 * (1 - 1 / c.split_k) / 50_000 if c.split_k > 1 else 0.0
    finish = 0.3 if c.pingpong or c.resident > 1 else 0.4 + c.block_m * c.block_n / 32768
    multicast = 1.03 if c.cluster_m * c.cluster_n > 1 else 1.0  # worth nothing where it was measured
    waves = -(-math.prod(tiles_of(p, c)) * p.batch // _at_once(c.blocks, c.resident, target.sm_count or 132))
    return 2.0 + multicast * waves * (-(-p.k // depth(p)) / c.split_k * step * c.resident + finish + exchange)


def grid(problem: GemmProblem, target: Target) -> Iterator[Config]:
    """What tools/tune.py searches beside the candidates: tiles of every width, shares of K, two blocks of an SM; with as many stages as
    fit, best guess first, and nothing that is expected to take half as long again as the first."""
    found: dict[Config, float] = {}
    for mma_m, consumers, pingpong, first, last, by in _GRID[kind_of_sums(problem)]:
        for block_n in range(first, last + 1, by):
            parts = 2 if promotes(problem) and mma_m * block_n > _SUMS_AT_ONCE else 1
            shared = (1, 2) if mma_m * consumers * MMA_ROWS >= block_n else (2, 1)  # by two blocks: the larger operand
            for split_k, resident, multicast in ((1, 1, (1, 1)), (2, 1, (1, 1)), (4, 1, (1, 1)), (8, 1, (1, 1)), (1, 2, (1, 1)),
                                                 (2, 2, (1, 1)), (4, 2, (1, 1)), (1, 1, shared)):
                stages = range(_MAX_STAGES, 1, -1)
                configs = (Config(mma_m, consumers, block_n, n, *multicast, pingpong=pingpong, parts=parts, split_k=split_k,
                                  resident=resident, slabs=1 if consumers == 3 else 2) for n in stages)
                config = next((c for c in configs if legal(problem, target, c)), None)
                if config and config.block_m - MMA_ROWS < round_up(problem.m, MMA_ROWS):
                    found[config] = _guess(problem, target, config)
    best = min(found.values(), default=0.0)
    yield from (c for c in sorted(found, key=lambda c: found[c]) if found[c] < 1.5 * best)


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
        cluster_m=c.cluster_m, cluster_n=c.cluster_n, split_k=c.split_k, resident=c.resident, band_rows=c.band_rows,
        pingpong=c.pingpong, slabs=c.slabs, tma_out=tma_out(p, c), quantize=quantizes(p), gather=p.gathered, scatter=p.scattered,
        dealt=c.dealt,
        shared_memory=shared_memory(p, c),
        entry=entry, grouping=grouping)
    return KernelSpec.make(
        "_".join([entry, *words(p), *str(c).split()]), "gemm/dense_sm90.cu.jinja", "nvrtc", parameters,
        params=PARAMS, params_type="kernelgen::DenseSm90Params", entries=(entry, *row_totals.entries(p)), target=target,
    )


def _maps(problem: GemmProblem, config: Config, t: Any, box_a: int) -> list[Any]:
    """TMA descriptors of a, b and, where it leaves through shared memory, out."""
    p, c = problem, config
    k = depth(p)
    boxes_b = max(c.cluster_m, 2 if splits(p) else 1)
    major_a, major_b = p.a_order == "row", p.b_order == "col"
    maps = []
    if not p.gathered:
        maps.append(tensor_map("map_a", "a", t.a if major_a else t.a.mT, (k, box_a) if major_a else (MMA_ROWS, k)))
    maps.append(tensor_map("map_b", "b", t.b.mT if major_b else t.b, (k, c.block_n // boxes_b) if major_b else (MMA_ROWS, k)))
    out_bytes = DTYPES[p.out_dtype].bytes
    if tma_out(p, c) and not p.scattered:
        columns, outputs = ROW_BYTES // out_bytes, c.block_n // (2 if p.gated else 1)
        maps.append(tensor_map("map_out", "out", t.out, (columns, MMA_ROWS)))
        maps.append(tensor_map("map_rest", "out", t.out, (outputs % columns or columns, MMA_ROWS), swizzled=outputs % columns == 0))
    return maps


def bind(problem: GemmProblem, config: Config, kernel: Any, tensors: GemmTensors) -> Callable[[GemmTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    p, c = problem, config
    tiles_m, tiles_n = tiles_of(p, c)
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
    clusters = tiles if c.split_k > 1 else min(tiles, max(1, target_of(t.a.device).sm_count * c.resident // c.blocks))
    by_tma = _scales_fit_tma(p, t)
    maps = [*_maps(p, c, t, box_a), *([_map_of_scales(p, c, t)] if by_tma else [])]
    launch = kernel.prepare(
        t.a.device.index or 0, grid=(clusters * c.blocks, 1, 1), block=(128 * (c.consumers + 1), 1, 1), cluster=(c.blocks, 1, 1),
        programmatic=True, shared_memory=shared_memory(p, c), tensor_maps=maps)
    tail = PARAMS.pack_scalars(scalars(p, t) | {
        "tiles_m": tiles_m, "tiles_n": tiles_n, "tiles": tiles, "groups": p.batch, "batched_a": int(t.a.shape[0] > 1),
        "scales_by_tma": int(by_tma), "a_row": t.a.stride(1) * DTYPES[p.a_dtype].bytes // 16 if p.gathered else 0,
        **dict(zip(("out_scale_batch", "out_scale_row", "out_scale_block"), t.out_scale.stride() if p.out_scale else (0, 0, 0)))})
    blank, pack, pointers = bytes(128 * len(PARAMS.tensor_maps)), PARAMS.pointer_packer.pack, addresses(p)
    grouped, with_rows, scattered, codes = p.op == "grouped_gemm", p.gathered or p.scattered, p.scattered, p.out_scale is not None
    dealt, device = c.dealt, t.a.device.index or 0
    if dealt and t.a.device.type == "cuda":
        counters.provide(device)

    def run(t: Any, parts: Any = None) -> None:
        if parts is not None:
            t = t._replace(c=parts)
        counter, memory = counters.counter(device) if dealt else (0, None)
        launch(blank + pack(*pointers(t), t.out_scale.data_ptr() if codes else 0, t.ends.data_ptr() if grouped else 0,
                            t.rows.data_ptr() if with_rows else 0, counter, t.row_weights.data_ptr() if scattered else 0) + tail)
        del memory

    return row_totals.with_totals(p, -(-p.outputs // c.outputs(p.gated)), run, kernel, device, programmatic=True)


def _scales_fit_tma(problem: GemmProblem, t: Any) -> bool:
    """May the copy engine bring scale_a: rows one behind the other, everything else at multiples of 16 bytes? A prepared call is found by
    strides and by the address' place within 16 bytes (ops/memo.py), so that the first call says it for all."""
    if problem.scales != "block_128x128" or problem.gathered:
        return False
    batch, rows, blocks = t.scale_a.shape
    strides = [stride for stride, extent in zip(t.scale_a.stride(), (batch, 0, blocks)) if extent > 1]
    return (t.scale_a.stride(1) == 1 or rows == 1) and t.scale_a.data_ptr() % 16 == 0 and all(s > 0 and s % 4 == 0 for s in strides)


def _map_of_scales(problem: GemmProblem, config: Config, t: Any) -> Any:
    return tensor_map("map_scales", "scale_a", t.scale_a.mT, (_box_of_scales(problem, config), 1), swizzled=False)


def coverage() -> Iterable[tuple[GemmProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = GemmProblem(1, 4096, 4096, 4096, "bf16", "bf16", "bf16", b_order="col")
    half = replace(base, a_dtype="fp16", b_dtype="fp16", out_dtype="fp16")
    yield base, None
    yield half, Config(2, 2, 128, 4, 1, 2)
    yield half, Config(2, 2, 128, 5, pingpong=True)
    yield base, Config(1, 3, 176, 4, slabs=1)
    yield base, Config(1, 1, 128, 4, resident=2)
    yield replace(base, m=512, n=576), Config(1, 2, 144, 5, split_k=8)
    yield replace(base, activation="swiglu", out_dtype="fp32", accumulate_c=True, c_dtype="bf16"), Config(1, 2, 208, 4, split_k=4)
    yield replace(base, b_order="row", a_order="col"), Config(2, 2, 128, 4, 2, 1)
    yield replace(half, b_order="row", out_dtype="fp32"), Config(1, 2, 128, 4)
    yield replace(base, bias=True, bias_dtype="bf16", activation="silu"), Config(1, 2, 160, 5)
    yield replace(base, activation="swiglu"), Config(1, 2, 256, 4, 2, 1)
    yield replace(base, activation="geglu", gate_up="up_first", b_order="row"), Config(1, 2, 256, 4)
    yield replace(half, activation="swiglu", gate_up="interleaved", bias=True, bias_dtype="fp32"), Config(1, 2, 128, 4)
    yield replace(base, accumulate_c=True, c_dtype="bf16"), Config(1, 1, 64, 8)
    yield replace(base, bias=True, bias_dtype="bf16", activation="gelu", out_alignment=2), Config(2, 2, 128, 5, pingpong=True)
    fp8 = replace(base, a_dtype="e4m3", b_dtype="e4m3", scales="row")
    yield fp8, Config(1, 2, 128, 6)
    yield replace(fp8, accumulate="fast", scales="tensor"), Config(1, 2, 256, 4, 2, 1)
    yield replace(fp8, a_dtype="e5m2", b_dtype="e5m2", out_dtype="fp32"), Config(1, 2, 128, 4)
    yield replace(fp8, scales="block_128x128"), Config(1, 2, 192, 4, parts=2)
    yield replace(fp8, scales="block_128x128", activation="swiglu"), Config(2, 2, 128, 3, parts=2)
    yield replace(fp8, scales="block_128x128", activation="swiglu", gate_up="interleaved"), Config(1, 2, 128, 4, split_k=2)
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
    legal=legal, spec=spec, bind=bind, coverage=coverage, capabilities=(90,), grid=grid,
)
