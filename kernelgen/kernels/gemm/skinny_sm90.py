"""Host side of gemm/skinny_sm90: products of few rows on Hopper, at the speed of reading b, and of few columns with K shared out.

The kernel and its data flow: templates/include/kernelgen/gemm/skinny_sm90.cuh; choices and measurements: docs/design/hopper.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm.activations import splits
from kernelgen.kernels.gemm.mma import RESERVED_SHARED_MEMORY
from kernelgen.kernels.gemm.requantize import Requantization
from kernelgen.kernels.gemm.sm90 import (
    BLOCK_RECIPES,
    MMA_ROWS,
    POINTERS,
    ROW_BYTES,
    addresses,
    depth,
    kind_of_sums,
    options,
    promotes,
    quantized,
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
from kernelgen.targets import Target
from kernelgen.tensors import GemmTensors
from kernelgen.verdicts import Verdict, first_no

# struct SkinnySm90Params of skinny_sm90.cuh.
PARAMS = ParamStruct((
    *((name, "ptr") for name in POINTERS), *((name, "i64") for name in (
        "c_batch", "c_row", "out_batch", "out_row", "bias_batch", "scale_a_batch", "scale_b_batch")),
    *((name, "i32") for name in (
        "m", "n", "k", "stages", "per_block", "batched_b", "scale_a_row", "scale_a_block", "scale_b_column", "scale_b_block")),
    *((name, "f32") for name in ("beta", "alpha", "limit")),
), tensor_maps=("map_a", "map_b"))
ENTRY = "gemm_skinny_sm90"
MAX_ROWS = 1024  # of a; above it tiles of 128 rows fill the chip without shares of K
_TOKENS = (8, 16, 32, 64, 128)
_MOST_TOKENS = 256  # what a box has
_MAX_SUMS = {1: 192, 2: 160, 4: 64}  # by warpgroups, which share the registers


@dataclass(frozen=True)
class Config:
    """Tile shape and schedule.

    mma_m     64-column parts of b that a block has
    tokens    rows of a, rounded up: the N of the WGMMA
    stages    of the ring
    blocks_k  boxes of 128 bytes of K in a stage
    groups    warpgroups, which take stages in turn
    split_k   blocks of a cluster that share K
    """

    mma_m: int
    tokens: int
    stages: int
    blocks_k: int = 1
    groups: int = 1
    split_k: int = 1

    def __str__(self) -> str:
        return f"{self.columns}x{self.tokens} s{self.stages} d{self.blocks_k} g{self.groups} k{self.split_k}"

    @property
    def columns(self) -> int:
        return self.mma_m * MMA_ROWS


def shared_memory(problem: GemmProblem, config: Config) -> int:
    """Dynamic shared memory in bytes of a launch: SkinnySm90::kSharedBytes of the header."""
    c = config
    scales = round_up(4 * (c.columns + c.tokens), 128) if problem.scales in BLOCK_RECIPES else 0
    ring = c.stages * c.blocks_k * ((c.columns + c.tokens) * ROW_BYTES + scales)
    sums = round_up(c.groups * c.tokens * (c.columns + 4) * 4, 128)
    return max(ring, sums) + round_up(2 * c.stages * 8, 128)


def _split(problem: GemmProblem, config: Config) -> tuple[int, int]:
    """Stages that K takes, and how many of them a block of a cluster takes at most."""
    stages = -(-problem.k // (depth(problem) * config.blocks_k))
    return stages, -(-stages // config.split_k)


def supports(problem: GemmProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    common = supports_common(p, target, "skinny_sm90")
    return common if not common else first_no(
        (p.m <= MAX_ROWS, f"{p.m} rows of a, skinny_sm90 has at most {MAX_ROWS}"),
        (p.a_order == "row", "a has M contiguous, skinny_sm90 needs K contiguous"),
        (p.batch < 65536, f"a batch of {p.batch}, the grid takes 65535"),
    )


def legal(problem: GemmProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target?"""
    c = config
    sums = c.mma_m * c.tokens // 2 * (2 if promotes(problem) else 1)
    sums += c.tokens // 4 if problem.scales in BLOCK_RECIPES else 0  # scales of a thread's rows of a
    shared = shared_memory(problem, c)
    return first_no(
        (c.tokens % 8 == 0 and 8 <= c.tokens <= _MOST_TOKENS, f"config {c}: expected a multiple of 8 rows, at most {_MOST_TOKENS}"),
        (c.mma_m in (1, 2) and c.blocks_k >= 1, f"config {c}: 1 or 2 parts of at least one box"),
        # A warpgroup gives a stage back once it has the next one: with fewer than two each the ring would stand still. And a stage
        # stays with one warpgroup: another, which did not wait for its last filling, could take that for the next.
        (c.groups in (1, 2, 4) and c.stages >= 2 * c.groups and c.stages % c.groups == 0,
         f"config {c}: 1, 2 or 4 warpgroups, each with the same number of stages, two or more"),
        (c.split_k in (1, 2, 4, 8), f"config {c}: clusters of 1, 2, 4 or 8"),
        (not splits(problem) or problem.b_order == "col" or c.mma_m == 2, f"config {c}: rows of gate and up are loaded by 64 columns"),
        (sums <= _MAX_SUMS.get(c.groups, 0),
         f"config {c} has {sums} accumulators per thread, expected at most {_MAX_SUMS.get(c.groups, 0)}"),
        (shared <= target.shared_memory_per_block, f"config {c} needs {shared} bytes of shared memory, {target} has "
                                                   f"{target.shared_memory_per_block}"),
    )


def _rounded(rows: int) -> int:
    """Rows of a tile."""
    return next((n for n in _TOKENS if n >= rows), _TOKENS[-1])


def _configs(problem: GemmProblem, tokens: int) -> Iterator[Config]:
    for mma_m, split_k, blocks_k, groups in product((1, 2), (1, 2, 4, 8), (2, 1), (1, 2)):
        one, two = (shared_memory(problem, Config(mma_m, tokens, stages, blocks_k, groups, split_k)) for stages in (32, 64))
        for budget in (109 << 10, 220 << 10):  # two blocks per SM, or one
            yield Config(mma_m, tokens, min(budget * 32 // (two - one), 12) // groups * groups, blocks_k, groups, split_k)


@dataclass(frozen=True)
class _Model:
    """Microseconds, fitted to all legal configs of 43, 20 and 20 problems on an H200 (2026-11-30, tools/tune.py). Choices among all of them
    are within 2, 4 and 10 % of the best in the mean, at worst 13, 10 and 57: see WINNERS.

    step        128 bytes of K in one block, whatever the tile; row: for each row of the two tiles more
    pace        (rows of a, 128 bytes of K, the same with a ring of 160 KB or more): what one warpgroup takes at least; with few
                rows as its products wait for each other, with 64 and more for shared memory, which blocks of an SM share
    groups, parts  times that, with several warpgroups and with two parts of b
    latency     from a request to its stage: what the stages that are not being multiplied have to bridge
    wave        from one set of resident blocks to the next
    cluster     sharing K at all, split: per block of a cluster
    sum         a float32 sum of the tile: leaving, collecting and finishing it
    bytes_per_us  of b from memory; from_l2: of both operands, where several rows of tiles read them
    """

    step: float
    row: float
    wave: float
    cluster: float
    split: float
    sum: float
    bytes_per_us: float
    from_l2: float
    pace: tuple[tuple[int, float, float], ...]
    latency: float
    groups: float
    parts: float


# By kind of sums, as in dense_sm90.
_MODELS = {
    "plain": _Model(0.054, 0.0001, 0.82, 0.84, 0.222, 0.00040, 4.00e6, 12.0e6, latency=1.15, groups=0.97, parts=1.71, pace=(
        (8, 0.135, 0.090), (16, 0.132, 0.095), (32, 0.141, 0.096), (64, 0.114, 0.094), (128, 0.178, 0.093))),
    "promoted": _Model(0.076, 0.0004, 1.53, 0.45, 0.183, 0.00050, 3.90e6, 13.7e6, latency=0.64, groups=1.00, parts=1.48, pace=(
        (8, 0.117, 0.103), (16, 0.135, 0.107), (32, 0.083, 0.056), (64, 0.166, 0.124), (128, 0.213, 0.152))),
    "blocks": _Model(0.098, 0.0007, 1.08, 0.77, 0.155, 0.00060, 3.82e6, 21.5e6, latency=0.63, groups=0.97, parts=1.51, pace=(
        (8, 0.163, 0.151), (16, 0.184, 0.154), (32, 0.202, 0.192), (64, 0.200, 0.074), (128, 0.229, 0.084))),
}


# Of each kind of sums and each number of rows, the few configs of which one is near the best of every problem that was searched; mma_m,
# tokens, stages, blocks_k, groups, split_k. The model only has to choose among these, and among all where nothing was searched. Its choices
# are within 4, 13 and 3 % of the best at worst (test_skinny_choices_are_those_of_the_search).
WINNERS: dict[str, tuple[Config, ...]] = {kind: tuple(Config(*row) for row in rows) for kind, rows in {
    "plain": (
        (1, 8, 12, 2, 2, 2), (1, 8, 6, 2, 1, 8), (1, 8, 6, 2, 2, 1), (1, 8, 12, 2, 2, 1),
        (1, 16, 10, 2, 2, 2), (1, 16, 5, 2, 1, 1), (1, 16, 11, 2, 1, 4), (1, 16, 10, 2, 2, 1),
        (1, 32, 9, 2, 1, 2), (1, 32, 9, 2, 1, 4), (1, 32, 8, 1, 2, 1),
        (1, 64, 6, 2, 1, 2), (2, 64, 9, 1, 1, 1), (1, 64, 6, 2, 1, 4), (1, 64, 6, 2, 2, 1),
        (1, 128, 9, 1, 1, 2), (1, 128, 9, 1, 1, 1), (1, 128, 4, 2, 1, 8), (2, 128, 6, 1, 1, 1),
    ),
    "promoted": (
        (1, 8, 6, 2, 2, 2), (1, 8, 12, 1, 2, 8), (1, 8, 12, 1, 2, 1),
        (1, 16, 10, 1, 2, 2), (1, 16, 4, 2, 2, 1), (1, 16, 5, 2, 1, 4), (1, 16, 10, 2, 2, 1),
        (1, 64, 6, 1, 1, 2), (1, 64, 6, 1, 1, 8), (1, 64, 6, 1, 2, 1), (1, 64, 12, 1, 2, 2), (1, 64, 6, 2, 2, 1),
        (1, 128, 4, 1, 1, 2), (1, 128, 9, 1, 1, 8), (1, 128, 8, 1, 2, 1), (1, 128, 4, 1, 1, 1), (1, 128, 8, 1, 2, 2),
    ),
    "blocks": (
        (1, 8, 10, 1, 2, 2), (1, 8, 11, 1, 1, 8), (1, 8, 4, 2, 2, 1),
        (1, 16, 10, 1, 2, 2), (1, 16, 12, 1, 1, 8), (1, 16, 4, 2, 2, 1),
        (1, 64, 3, 2, 1, 2), (1, 64, 12, 1, 1, 8), (1, 64, 6, 2, 2, 1), (1, 64, 3, 2, 1, 1), (1, 64, 6, 2, 2, 2),
        (1, 128, 4, 2, 1, 2), (1, 128, 8, 1, 2, 1), (1, 128, 8, 1, 1, 8),
    ),
}.items()}


def _pace(model: _Model, config: Config, shared: int, beside: int) -> float:
    """Microseconds that 128 bytes of K take a warpgroup at least; ``beside``: blocks of an SM."""
    c = config
    _, short, deep = next(row for row in model.pace if row[0] >= c.tokens)
    pace = (deep if shared >= 160 << 10 else short) * (beside if c.tokens >= 64 else 1)
    pace *= (model.groups if c.groups > 1 else 1) * (model.parts if c.mma_m > 1 else 1)
    return max(pace, model.latency / ((c.stages - c.groups) * c.blocks_k))


def _cost(problem: GemmProblem, target: Target, config: Config) -> float:
    """Estimated microseconds: waves of blocks, each at its own pace or at that of memory."""
    c, model, sms = config, _MODELS[kind_of_sums(problem)], target.sm_count or 132
    row_tiles = -(-problem.m // c.tokens)
    blocks = row_tiles * -(-problem.n // c.columns) * problem.batch * c.split_k
    shared = shared_memory(problem, c)
    resident = max(1, (target.shared_memory_per_block + RESERVED_SHARED_MEMORY) // (shared + RESERVED_SHARED_MEMORY))
    slots = sms * resident
    waves = -(-blocks // slots)
    steps = _split(problem, c)[1] * c.blocks_k
    alone = steps * max(model.step + model.row * (c.columns + c.tokens), _pace(model, c, shared, -(-min(blocks, slots) // sms)))
    # Per block.
    memory = steps * ROW_BYTES * (c.columns / model.bytes_per_us if row_tiles == 1 else (c.columns + c.tokens) / model.from_l2)
    full, last = max(alone, memory * min(blocks, slots)), max(alone, memory * (blocks - (waves - 1) * slots))
    ends = waves * (model.wave + model.sum * c.tokens * c.columns) + (model.cluster + model.split * c.split_k if c.split_k > 1 else 0)
    return (waves - 1) * full + last + ends


def many_products(problem: GemmProblem, target: Target) -> bool:
    """A batch of products that are not deep, 16 times 128 bytes of K at most, and which fill the chip. (As measured: of 16 bits.)"""
    p = problem
    plain = p.a_dtype in ("bf16", "fp16") and p.weight_format is None
    return plain and p.batch > 1 and -(-p.k // depth(p)) <= 16 and p.batch * -(-p.n // MMA_ROWS) >= (target.sm_count or 132)


def _short_ring(problem: GemmProblem) -> Config:
    """That of many small products: what hides the latency is blocks beside each other, so a ring has no more stages than K takes, and
    four at most (results/tried/h200_batched.json: within 2 % of the best; the longest ring that leaves room for a second block took up to
    1.6 x the time)."""
    steps = -(-problem.k // depth(problem))
    tokens = _rounded(problem.m)
    return Config(1, tokens, 2, 2) if steps == 2 and tokens == 8 else Config(1, tokens, min(4, max(2, steps)))


@lru_cache(maxsize=256)
def _legal_configs(form: GemmProblem, target: Target, tokens: int) -> tuple[list[Config], list[Config]]:
    """Winners and others; ``form``: a problem as far as legality sees it, so that a size that is new to a service costs no second look."""
    winners = [c for c in WINNERS[kind_of_sums(form)] if c.tokens == tokens and legal(form, target, c)]
    return winners, [c for c in dict.fromkeys(_configs(form, tokens)) if c not in winners and legal(form, target, c)]


def candidates(problem: GemmProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first: winners in front of others, each by cost. Others are put in order when they are reached."""
    def in_order(configs: list[Config]) -> list[Config]:
        return sorted(configs, key=lambda c: _cost(problem, target, c)) if len(configs) > 1 else configs

    winners, others = _legal_configs(replace(problem, batch=1, m=1, n=2, k=1), target, _rounded(problem.m))
    if many_products(problem, target) and legal(problem, target, _short_ring(problem)):
        short = _short_ring(problem)
        yield short
        yield from in_order([c for c in winners if c != short])
        return
    yield from in_order(winners)
    yield from in_order(others)


@lru_cache(maxsize=64)
def estimate(problem: GemmProblem, target: Target) -> float:
    """Microseconds that the first candidate is expected to take; infinite where there is none. Asked for by rules of several kernels."""
    first = next(candidates(problem, target), None)
    return _cost(problem, target, first) if first else math.inf


def grid(problem: GemmProblem, target: Target) -> Iterator[Config]:
    """What tools/tune.py searches beside the candidates: tiles of other numbers of rows, in one row of tiles or a few."""
    for rows in range(1, 5):
        tokens = round_up(-(-problem.m // rows), 32 if problem.m > 64 else 8)
        if tokens <= _MOST_TOKENS and tokens != _rounded(problem.m) and (rows == 1 or tokens >= 64):
            yield from (c for c in dict.fromkeys(_configs(problem, tokens)) if legal(problem, target, c))


def _requantization(problem: GemmProblem, target: Target) -> Requantization | None:
    return Requantization.of(problem, target, problem.batch, problem.m) if problem.out_scale else None


def spec(problem: GemmProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, orders, epilogue and config; no extents."""
    quantize = _requantization(problem, target)
    if quantize:
        return requantized(spec(unquantized(problem), target, config), quantize)
    p, c = problem, config
    parameters = options(
        p, c.tokens, mma_m=c.mma_m, tokens=c.tokens, stages=c.stages, blocks_k=c.blocks_k, groups=c.groups, split_k=c.split_k,
        vector_out=p.out_alignment == 16, shared_memory=shared_memory(p, c))
    return KernelSpec.make(
        "_".join(["gemm_skinny_sm90", *words(p), *str(c).split()]), "gemm/skinny_sm90.cu.jinja", "nvrtc", parameters,
        params=PARAMS, params_type="kernelgen::SkinnySm90Params", entries=(ENTRY,), target=target,
    )


def bind(problem: GemmProblem, config: Config, kernel: Any, tensors: GemmTensors) -> Callable[[GemmTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    quantize = _requantization(problem, kernel.spec.target)
    if quantize:
        return quantized(problem, tensors, quantize.bind(kernel, tensors, pitch=round_up(problem.outputs, 4)),
                         lambda p, t: bind(p, config, kernel, t))
    p, c, t = problem, config, tensors
    k, major_b = depth(p), p.b_order == "col"
    stages, per_block = _split(p, c)
    box_b = (k, c.columns // 2 if splits(p) else c.columns) if major_b else (MMA_ROWS, k)
    maps = [tensor_map("map_a", "a", t.a, (k, c.tokens)), tensor_map("map_b", "b", t.b.mT if major_b else t.b, box_b)]
    tiles = -(-p.n // c.columns) * -(-p.m // c.tokens)
    threads = 128 * c.groups + (64 if p.scales in BLOCK_RECIPES else 32)
    launch = kernel.prepare(
        t.a.device.index or 0, grid=(tiles * c.split_k, p.batch, 1), block=(threads, 1, 1), cluster=(c.split_k, 1, 1),
        programmatic=True, shared_memory=shared_memory(p, c), tensor_maps=maps)
    tail = PARAMS.pack_scalars(scalars(p, t) | {"stages": stages, "per_block": per_block})
    blank, pack, pointers = bytes(128 * len(PARAMS.tensor_maps)), PARAMS.pointer_packer.pack, addresses(p)

    def run(t: GemmTensors) -> None:
        launch(blank + pack(*pointers(t)) + tail)

    return run


def coverage() -> Iterable[tuple[GemmProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = GemmProblem(1, 16, 4096, 4096, "bf16", "bf16", "bf16", b_order="col")
    yield base, None
    yield replace(base, m=1, out_alignment=2), Config(1, 8, 6, 2, 2, 2)
    yield replace(base, m=128, b_order="row", bias=True, bias_dtype="bf16", activation="silu"), Config(2, 128, 4, 1, 1, 4)
    yield replace(base, activation="swiglu", a_dtype="fp16", b_dtype="fp16", out_dtype="fp32"), Config(1, 16, 8, 2, 4, 2)
    yield replace(base, activation="geglu", gate_up="up_first", b_order="row"), Config(2, 16, 4, 2, 1, 1)
    yield replace(base, activation="swiglu", gate_up="interleaved", accumulate_c=True, c_dtype="bf16"), Config(1, 32, 6, 1, 2, 8)
    yield replace(base, activation="swiglu_oai", gate_up="interleaved", bias=True, bias_dtype="bf16"), Config(1, 16, 8, 2, 2, 2)
    fp8 = replace(base, a_dtype="e4m3", b_dtype="e4m3", scales="row")
    yield fp8, Config(1, 16, 6, 2, 2, 2)
    yield replace(fp8, accumulate="fast", scales="tensor"), Config(2, 64, 4, 1, 2, 1)
    yield replace(fp8, scales="block_128x128", activation="swiglu"), Config(1, 16, 6, 2, 2, 2)
    yield replace(fp8, scales="block_1x128", m=64), Config(2, 64, 4, 1, 1, 4)
    yield replace(fp8, out_dtype="e4m3", out_scale="row"), Config(1, 16, 6, 2, 2, 2)


FAMILY = KernelFamily(
    name="gemm/skinny_sm90", op="gemm", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage, capabilities=(90,), grid=grid,
)
