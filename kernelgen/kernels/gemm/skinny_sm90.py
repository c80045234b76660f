"""Host side of gemm/skinny_sm90: products of up to 128 rows on Hopper, at the speed of reading b.

The kernel and its data flow: templates/include/kernelgen/gemm/skinny_sm90.cuh; choices and measurements: docs/design/hopper.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

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
from kernelgen.targets import Target
from kernelgen.tensors import GemmTensors
from kernelgen.verdicts import Verdict, first_no

# struct SkinnySm90Params of skinny_sm90.cuh.
PARAMS = ParamStruct((
    *((name, "ptr") for name in POINTERS), *((name, "i64") for name in (
        "c_batch", "c_row", "out_batch", "out_row", "bias_batch", "scale_a_batch", "scale_b_batch")),
    *((name, "i32") for name in (
        "m", "n", "k", "stages", "per_block", "batched_b", "scale_a_row", "scale_a_block", "scale_b_column", "scale_b_block")),
    ("beta", "f32"),
), tensor_maps=("map_a", "map_b"))
ENTRY = "gemm_skinny_sm90"
MAX_ROWS = 128  # of a
_MAX_SUMS = 192
_RESERVED_SHARED_MEMORY = 1024  # per block, taken by the driver


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

    @property
    def shared_memory(self) -> int:
        """Dynamic shared memory in bytes: SkinnySm90::kSharedBytes of the header."""
        ring = self.stages * self.blocks_k * (self.columns + self.tokens) * ROW_BYTES
        sums = -(-self.groups * self.tokens * (self.columns + 4) * 4 // 128) * 128
        return max(ring, sums) + -(-2 * self.stages * 8 // 128) * 128


def _split(problem: GemmProblem, config: Config) -> tuple[int, int]:
    """Stages that K takes, and how many of them a block of a cluster takes at most."""
    stages = -(-problem.k // (depth(problem) * config.blocks_k))
    return stages, -(-stages // config.split_k)


def _staged_scales(problem: GemmProblem, config: Config) -> int:
    """Bytes of a's scales of blocks in shared memory, where it has many rows: kStaged of skinny_scales_sm90.cuh."""
    c = config
    return _split(problem, c)[1] * c.blocks_k * c.tokens * 4 if problem.scales in BLOCK_RECIPES and c.tokens >= 32 else 0


def _shared_memory(problem: GemmProblem, config: Config) -> int:
    """Dynamic shared memory in bytes of a launch."""
    return config.shared_memory + _staged_scales(problem, config)


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
    shared = _shared_memory(problem, c)
    return first_no(
        (problem.m <= c.tokens <= MAX_ROWS and c.tokens % 8 == 0, f"config {c}: {problem.m} rows of a do not fit {c.tokens}"),
        (c.mma_m in (1, 2) and c.blocks_k >= 1, f"config {c}: 1 or 2 parts of at least one box"),
        # A warpgroup gives a stage back once it has the next one: with fewer than two each the ring would stand still. And a stage
        # stays with one warpgroup: another, which did not wait for its last filling, could take that for the next.
        (c.groups in (1, 2, 4) and c.stages >= 2 * c.groups and c.stages % c.groups == 0,
         f"config {c}: 1, 2 or 4 warpgroups, each with the same number of stages, two or more"),
        (c.split_k in (1, 2, 4, 8), f"config {c}: clusters of 1, 2, 4 or 8"),
        (not splits(problem) or problem.b_order == "col" or c.mma_m == 2, f"config {c}: rows of gate and up are loaded by 64 columns"),
        (sums <= _MAX_SUMS, f"config {c} has {sums} accumulators per thread, expected at most {_MAX_SUMS}"),
        (shared <= target.shared_memory_per_block, f"config {c} needs {shared} bytes of shared memory, {target} has "
                                                   f"{target.shared_memory_per_block}"),
    )


def _configs(problem: GemmProblem) -> Iterator[Config]:
    tokens = next((n for n in (8, 16, 32, 64, 128) if n >= problem.m), MAX_ROWS)
    for mma_m, split_k, blocks_k, groups in product((1, 2), (1, 2, 4, 8), (2, 1), (1, 2)):
        stage = blocks_k * (mma_m * MMA_ROWS + tokens) * ROW_BYTES
        staged = _staged_scales(problem, Config(mma_m, tokens, 0, blocks_k, groups, split_k))
        for budget in (109 << 10, 220 << 10):  # two blocks per SM, or one
            yield Config(mma_m, tokens, min((budget - staged) // stage, 12) // groups * groups, blocks_k, groups, split_k)


@dataclass(frozen=True)
class _Model:
    """Microseconds, fitted to 16 problems x 9 - 11 configs on an H200 (2026-11-30); its choices are within 3.5 % of the best of them.

    step        128 bytes of K in one block, whatever the tile; row: for each row of the two tiles more
    pace        (rows of a, 128 bytes of K, the same with a ring of 160 KB or more): what one warpgroup takes at least; with few
                rows as its products wait for each other, with 64 and more for shared memory, which blocks of an SM share
    wave        from one set of resident blocks to the next
    split       per block of a cluster
    sum         a float32 sum of the tile: leaving, collecting and finishing it
    bytes_per_us  of b from memory
    """

    step: float = 0.069
    row: float = 0.00056
    wave: float = 1.66
    split: float = 0.26
    sum: float = 0.00098
    bytes_per_us: float = 4.4e6
    pace: tuple[tuple[int, float, float], ...] = (
        (8, 0.155, 0.155), (16, 0.225, 0.225), (32, 0.27, 0.27), (64, 0.33, 0.24), (128, 0.4, 0.25))


_MODEL = _Model()


def _cost(problem: GemmProblem, target: Target, config: Config) -> float:
    """Estimated microseconds: waves of blocks, each at its own pace or at that of memory."""
    c, model, sms = config, _MODEL, target.sm_count or 132
    blocks = -(-problem.n // c.columns) * problem.batch * c.split_k
    shared = _shared_memory(problem, c)
    resident = max(1, (target.shared_memory_per_block + _RESERVED_SHARED_MEMORY) // (shared + _RESERVED_SHARED_MEMORY))
    slots = sms * resident
    waves = -(-blocks // slots)
    steps = _split(problem, c)[1] * c.blocks_k
    pace = 0.0
    if not promotes(problem):
        _, short, deep = next(row for row in model.pace if row[0] >= c.tokens)
        beside = -(-min(blocks, slots) // sms) if c.tokens >= 64 else 1
        pace = (deep if shared >= 160 << 10 else short) * beside
    alone = steps * max(model.step + model.row * (c.columns + c.tokens), pace)
    memory = steps * c.columns * ROW_BYTES / model.bytes_per_us  # per block
    full, last = max(alone, memory * min(blocks, slots)), max(alone, memory * (blocks - (waves - 1) * slots))
    ends = waves * (model.wave + model.sum * c.tokens * c.columns) + model.split * (c.split_k if c.split_k > 1 else 0)
    return (waves - 1) * full + last + ends


def candidates(problem: GemmProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first."""
    fitting = {c: None for c in _configs(problem) if legal(problem, target, c)}
    yield from sorted(fitting, key=lambda c: _cost(problem, target, c))


def spec(problem: GemmProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, orders, epilogue and config; no extents."""
    p, c = problem, config
    parameters = options(
        p, c.tokens, mma_m=c.mma_m, tokens=c.tokens, stages=c.stages, blocks_k=c.blocks_k, groups=c.groups, split_k=c.split_k,
        vector_out=True, shared_memory=c.shared_memory)
    return KernelSpec.make(
        "_".join(["gemm_skinny_sm90", *words(p), *str(c).split()]), "gemm/skinny_sm90.cu.jinja", "nvrtc", parameters,
        params=PARAMS, params_type="kernelgen::SkinnySm90Params", entries=(ENTRY,), target=target,
    )


def bind(problem: GemmProblem, config: Config, kernel: Any, tensors: GemmTensors) -> Callable[[GemmTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    p, c, t = problem, config, tensors
    k, major_b = depth(p), p.b_order == "col"
    stages, per_block = _split(p, c)
    box_b = (k, c.columns // 2 if splits(p) else c.columns) if major_b else (MMA_ROWS, k)
    maps = [tensor_map("map_a", "a", t.a, (k, c.tokens)), tensor_map("map_b", "b", t.b.mT if major_b else t.b, box_b)]
    tiles = -(-p.n // c.columns)
    launch = kernel.prepare(
        t.a.device.index or 0, grid=(tiles * c.split_k, p.batch, 1), block=(128 * c.groups + 32, 1, 1), cluster=(c.split_k, 1, 1),
        programmatic=True, shared_memory=_shared_memory(p, c), tensor_maps=maps)
    tail = PARAMS.pack_scalars(scalars(p, t) | {"stages": stages, "per_block": per_block})
    blank, pack, pointers = bytes(128 * len(PARAMS.tensor_maps)), PARAMS.pointer_packer.pack, addresses(p)

    def run(t: GemmTensors) -> None:
        launch(blank + pack(*pointers(t)) + tail)

    return run


def coverage() -> Iterable[tuple[GemmProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = GemmProblem(1, 16, 4096, 4096, "bf16", "bf16", "bf16", b_order="col")
    yield base, None
    yield replace(base, m=1), Config(1, 8, 6, 2, 2, 2)
    yield replace(base, m=128, b_order="row", bias=True, bias_dtype="bf16", activation="silu"), Config(2, 128, 4, 1, 1, 4)
    yield replace(base, activation="swiglu", a_dtype="fp16", b_dtype="fp16", out_dtype="fp32"), Config(1, 16, 8, 2, 4, 2)
    yield replace(base, activation="geglu", gate_up="up_first", b_order="row"), Config(2, 16, 4, 2, 1, 1)
    yield replace(base, activation="swiglu", gate_up="interleaved", accumulate_c=True, c_dtype="bf16"), Config(1, 32, 6, 1, 2, 8)
    fp8 = replace(base, a_dtype="e4m3", b_dtype="e4m3", scales="row")
    yield fp8, Config(1, 16, 6, 2, 2, 2)
    yield replace(fp8, accumulate="fast", scales="tensor"), Config(2, 64, 4, 1, 2, 1)
    yield replace(fp8, scales="block_128x128", activation="swiglu"), Config(1, 16, 6, 2, 2, 2)
    yield replace(fp8, scales="block_1x128", m=64), Config(2, 64, 4, 1, 1, 4)


FAMILY = KernelFamily(
    name="gemm/skinny_sm90", op="gemm", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage, capabilities=(90,),
)
