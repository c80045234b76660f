"""Host side of gemm/packed_skinny: few rows of a times a packed 4-bit b at the speed of reading it, for sm_80 and later.

The kernel and its data flow: templates/include/kernelgen/gemm/packed_skinny.cuh; measurements: docs/design/gemm_portable.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kernelgen.errors import LayoutError
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm.mma import (
    PACKED,
    PARAMS,
    PARAMS_TYPE,
    RESERVED_SHARED_MEMORY,
    TileShape,
    ceil_div,
    closure,
    operand_parameters,
    scalars,
    spec_words,
    supports_operands,
)
from kernelgen.problems.gemm import GemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import GemmTensors
from kernelgen.verdicts import Verdict, first_no, no

ENTRY = "gemm_packed_skinny"
MAX_ROWS = 32  # of a: beyond that gemm_mma, whose products are not repeated for each 8 of them
_WARP_DEPTH = 128  # elements of k of one warp and step


@dataclass(frozen=True)
class Config:
    """Tile shape and schedule.

    tiles    16-column parts of b that a block has
    tokens   rows of a, rounded up to 8, 16 or 32
    warps    that take k in turn
    stages   of a's ring
    """

    tiles: int
    tokens: int
    warps: int = 8
    stages: int = 3

    def __str__(self) -> str:
        return f"{self.block_n}x{self.tokens} w{self.warps} s{self.stages}"

    @property
    def block_m(self) -> int:
        return self.tokens

    @property
    def block_n(self) -> int:
        return self.tiles * 16

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_memory(self) -> int:
        """Dynamic shared memory in bytes: PackedSkinny::kSharedBytes of the header."""
        slot = self.tokens * (self.warps * _WARP_DEPTH * 2 + 64)
        return max(self.stages * slot, self.warps * self.tokens * (self.block_n + 4) * 4)


def supports(problem: GemmProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    if p.weight_format not in PACKED:
        return no(f"b is {p.b_dtype}, {ENTRY} takes packed weights")
    return supports_operands(p, target, ENTRY) and first_no(
        (0 < p.m <= MAX_ROWS, f"{p.m} rows of a, {ENTRY} takes 1 to {MAX_ROWS}"),
        (p.batch == 1, f"a batch of {p.batch}, {ENTRY} takes one product"),
        (p.a_order == "row", f"a has M contiguous, {ENTRY} needs K contiguous"),
        (p.alignment == 16, f"rows of a or codes are aligned to {p.alignment} bytes, {ENTRY} needs 16"),
        (p.k > 0 and p.k % 32 == 0, f"K is {p.k}, {ENTRY} takes a multiple of 32"),
        (p.n * p.k < 2**31, f"b has {p.n * p.k} codes, {ENTRY} counts to 2^31"),
        (p.n > 0, f"N is 0, {ENTRY} has nothing to do"),
        (not p.gated, f"a gate is not in {ENTRY}"),
        (p.out_scale is None, f"a quantised output is not in {ENTRY}"),
        (p.group_size in (32, 64) or (p.group_size or 1) % 128 == 0, f"groups of {p.group_size}, {ENTRY} takes 32, 64 and 128s"),
    )


def _registers(problem: GemmProblem, config: Config) -> int:
    """Estimate per thread: two sets of codes and scales, two sets of sums, a's pairs, addresses."""
    c, groups = config, max(1, _WARP_DEPTH // (problem.group_size or 128))
    piece = c.tiles * 2 * (4 + groups * (2 if problem.zero_points else 1))
    return 2 * piece + 2 * c.tiles * c.tokens // 8 * 4 + c.tokens // 8 * 4 + 50 + (10 * c.tiles if groups > 1 else 0)


def legal(problem: GemmProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target?"""
    c = config
    registers, limit = _registers(problem, c), min(255, 65536 // c.threads)
    return first_no(
        (c.tiles in (1, 2, 4) and c.tokens in (8, 16, 32) and c.warps in (4, 8, 16) and c.stages >= 2,
         f"config {c}: expected 1, 2 or 4 tiles, 8, 16 or 32 rows, 4, 8 or 16 warps and 2 stages or more"),
        (problem.m <= c.tokens, f"config {c}: {problem.m} rows of a do not fit {c.tokens}"),
        (registers <= limit, f"config {c} takes about {registers} registers, {limit} are there"),
        (c.shared_memory <= target.shared_memory_per_block, f"config {c} needs {c.shared_memory} bytes of shared memory, {target} has "
                                                            f"{target.shared_memory_per_block}"),
    )


def _cost(problem: GemmProblem, target: Target, config: Config) -> float:
    """Waves of blocks: the columns that an SM has in each, and 40 for its start and end. Chooses within 0.2 % of the best in the mean,
    2 % at worst, of 16 problems on an H200 (2026-11-30, tools/bench/results/tried/h200_tune_int4.json)."""
    c, sms = config, target.sm_count or 108
    resident = max(1, min(65536 // (c.threads * _registers(problem, c)),
                          (target.shared_memory_per_block + RESERVED_SHARED_MEMORY) // (c.shared_memory + RESERVED_SHARED_MEMORY)))
    full, rest = divmod(ceil_div(problem.n, c.block_n), sms * resident)

    def wave(blocks: int) -> float:
        return blocks * (c.block_n + 4) * problem.k / 8192 + 40

    return full * wave(resident) + (wave(ceil_div(rest, sms)) if rest else 0.0)


def candidates(problem: GemmProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first."""
    tokens = next((t for t in (8, 16, 32) if t >= problem.m), MAX_ROWS)
    configs = (Config(tiles, tokens, warps, stages) for warps in (8, 16, 4) for tiles in (4, 2, 1) for stages in (3, 2))
    yield from sorted((c for c in configs if legal(problem, target, c)), key=lambda c: _cost(problem, target, c))


def spec(problem: GemmProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, group, epilogue and config; no extents."""
    p, c = problem, config
    parameters = operand_parameters(p) | dict(
        tiles=c.tiles, token_tiles=c.tokens // 8, warps=c.warps, stages=c.stages, zero=p.zero_points, group=p.group_size,
        shared_memory=c.shared_memory)
    return KernelSpec.make(
        f"gemm_packed_skinny_{spec_words(p, c)}", "gemm/packed_skinny.cu.jinja", "nvrtc", parameters, params=PARAMS,
        params_type=PARAMS_TYPE, entries=(ENTRY,), target=target)


def check_reach(problem: GemmProblem, config: TileShape, tensors: GemmTensors, entry: str, rows: int) -> None:
    """Raises LayoutError for a view of codes, scales or zero points of which ``rows`` reach over 4 GB: kernels count in 32 bits."""
    assert tensors.scale_b is not None, "a packed weight has scales"
    strides = scalars(problem, config, tensors)
    scale = strides["scale_b_column"] * tensors.scale_b.element_size()
    for name, stride in (("codes", strides["b_stride"]), ("scale", scale), ("zero", strides["zero_column"])):
        if rows * stride >= 1 << 32:
            raise LayoutError(f"{name} of the packed weight: got {problem.n} rows {stride} bytes apart, expected {rows} rows within 4 GB "
                              f"by {entry}; make {name} contiguous")


def bind(problem: GemmProblem, config: Config, kernel: Any, tensors: GemmTensors) -> Callable[[GemmTensors], None]:
    """The closure of a repeated call: packs addresses, launches. Raises LayoutError as check_reach()."""
    check_reach(problem, config, tensors, ENTRY, problem.n)
    launch = kernel.prepare(
        tensors.a.device.index or 0, grid=(ceil_div(problem.n, config.block_n), 1, 1), block=(config.threads, 1, 1),
        shared_memory=config.shared_memory)
    return closure(problem, config, launch, tensors)


def coverage() -> Iterable[tuple[GemmProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = GemmProblem(1, 16, 8192, 8192, "bf16", "int4", "bf16", b_order="col", weight_format="int4", group_size=128, scale_dtype="bf16")
    half: dict[str, Any] = dict(a_dtype="fp16", out_dtype="fp16", scale_dtype="fp16")
    yield base, None
    yield replace(base, m=1), None
    yield replace(base, m=32, group_size=64, zero_points=True, **half), None
    yield replace(base, m=5, group_size=32, zero_points=True, bias=True, bias_dtype="bf16", activation="silu"), None
    yield replace(base, m=8, accumulate_c=True, c_dtype="fp32", out_dtype="fp32"), Config(2, 8, 4, 2)
    mxfp4 = replace(base, b_dtype="mxfp4", weight_format="mxfp4", group_size=32, scale_dtype="e8m0")
    yield mxfp4, None
    yield replace(mxfp4, m=1, a_dtype="fp16", out_dtype="bf16"), Config(1, 8, 16, 3)


FAMILY = KernelFamily(
    name="gemm/packed_skinny", op="gemm", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage,
)
