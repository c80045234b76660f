"""Host side of gemm/packed_sm90: few rows of a times a packed 4-bit b on Hopper, at the speed of reading it.

The kernel and its data flow: templates/include/kernelgen/gemm/packed_sm90.cuh; choices and measurements: docs/design/hopper.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm import packed_skinny
from kernelgen.kernels.gemm.mma import PACKED, PARAMS, PARAMS_TYPE, ceil_div, closure, operand_parameters, spec_words
from kernelgen.problems.gemm import GemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import GemmTensors
from kernelgen.verdicts import Verdict, first_no, no

ENTRY = "gemm_packed_sm90"
MAX_ROWS = 16  # of a: beyond that gemm_mma, whose products are not repeated for each 8 of them
_STEP = 128  # elements of k of one warp and step
_SCALE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "e8m0": 2}  # in shared memory: an exponent is kept as a bf16


@dataclass(frozen=True)
class Config:
    """Tile shape and schedule.

    tiles    16-column parts of b that a warp has
    tokens   rows of a, rounded up to 8 or 16
    warps_n  warps beside each other, warps_k sets of them that take steps of k in turn
    stages   of each warp's ring
    split_k  blocks of a cluster that share K
    ahead    steps of k whose codes go to L2 while the kernel before ends
    """

    tiles: int
    tokens: int
    warps_n: int
    warps_k: int = 1
    stages: int = 6
    split_k: int = 1
    ahead: int = 8

    def __str__(self) -> str:
        return f"{self.block_n}x{self.tokens} w{self.warps_n}x{self.warps_k} s{self.stages} k{self.split_k} a{self.ahead}"

    @property
    def block_m(self) -> int:
        return self.tokens

    @property
    def block_n(self) -> int:
        return self.warps_n * self.tiles * 16

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_k


def _raised(problem: GemmProblem) -> bool:
    """PackedCodes::kRaised of the header."""
    return problem.weight_format == "int4" and problem.a_dtype == "bf16" and problem.out_dtype in ("bf16", "fp16")


def _groups(problem: GemmProblem) -> int:
    """Of a step."""
    return max(1, _STEP // (problem.group_size or _STEP))


def _steps(problem: GemmProblem, config: Config) -> int:
    """Of a block."""
    return ceil_div(ceil_div(problem.k, _STEP), config.split_k)


def shared_memory(problem: GemmProblem, config: Config) -> int:
    """Dynamic shared memory in bytes of a launch: PackedSm90::Layout of the header."""
    p, c = problem, config
    rings = c.threads // 32 * c.stages * c.tiles * 16 * _STEP // 2
    sums = c.warps_k * c.tokens * (c.block_n + 4) * 4
    row = c.block_n * _SCALE_BYTES[p.scale_dtype or "bf16"] + 4 + (c.block_n + 4 if p.zero_points else 0)
    step = c.tokens * _STEP * 2 + _groups(p) * (row + (c.tokens * 4 if _raised(p) else 0))
    return max(rings, sums) + _steps(p, c) * step


def supports(problem: GemmProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    if p.weight_format not in PACKED:
        return no(f"b is {p.b_dtype}, {ENTRY} takes packed weights")
    return first_no(
        (target.kind == "cuda" and target.capability == 90, f"{ENTRY} needs sm_90, got {target}"),
        (0 < p.m <= MAX_ROWS, f"{p.m} rows of a, {ENTRY} takes 1 to {MAX_ROWS}"),
    ) and packed_skinny.supports(replace(p, m=1), target) and first_no(
        (any(legal(p, target, c) for c in _configs(p)), f"an eighth of a, {p.m} rows of {p.k}, does not fit the shared memory of {target}"))


def _registers(problem: GemmProblem, config: Config) -> int:
    """Estimate per thread: a step's codes, two sets of sums, a's pairs, scales, addresses."""
    c = config
    return 8 * c.tiles + 2 * c.tiles * c.tokens // 2 + 6 * c.tokens // 8 + 4 * c.tiles + 40


def legal(problem: GemmProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target?"""
    c = config
    registers, limit, shared = _registers(problem, c), min(255, 65536 // c.threads), shared_memory(problem, c)
    return first_no(
        (1 <= c.tiles <= 4 and c.tokens in (8, 16) and 1 <= c.split_k <= 8,
         f"config {c}: expected 1 to 4 tiles, 8 or 16 rows and a cluster of 1 to 8"),
        (min(c.warps_n, c.warps_k) >= 1 and 64 <= c.threads <= 512 and c.stages >= 2 and c.ahead >= 0,
         f"config {c}: expected 2 to 16 warps and 2 stages or more"),
        (problem.m <= c.tokens, f"config {c}: {problem.m} rows of a do not fit {c.tokens}"),
        (registers <= limit, f"config {c} takes about {registers} registers, {limit} are there"),
        (shared <= target.shared_memory_per_block,
         f"config {c} needs {shared} bytes of shared memory, {target} has {target.shared_memory_per_block}"),
    )


def _waves(problem: GemmProblem, target: Target, config: Config) -> int:
    """Of clusters. Those of more than two blocks leave SMs of a GPC over: 30 of four and 15 of eight run at a time on an H200."""
    sms = target.sm_count or 132
    room = sms if config.split_k <= 2 else sms - sms % 40
    return ceil_div(ceil_div(problem.n, config.block_n), max(room // config.split_k, 1))


def _cost(problem: GemmProblem, target: Target, config: Config) -> float:
    """Microseconds, fitted by eye to tools/bench/results/tried/h200_packed_sm90.json. Reading a slice of a is part of a block's start."""
    p, c = problem, config
    codes = 3.1e-3 if p.weight_format == "mxfp4" else 1.85e-3
    work = _steps(p, c) * (codes * c.block_n + 9.4e-3 * p.m)
    return 5.5 + (0.3 if c.split_k > 1 else 0.0) + _waves(p, target, c) * work


def _measured(problem: GemmProblem, target: Target, config: Config) -> bool:
    """What the figures are of: one wave, clusters of at most two."""
    return config.split_k <= 2 and _waves(problem, target, config) == 1


def one_wave(problem: GemmProblem, target: Target) -> bool:
    """Is the first choice among what was measured? Blocks of a second wave would start when the first ones have ended."""
    return _measured(problem, target, next(iter(candidates(problem, target))))


# (warps_n, warps_k, tiles, stages, ahead), of equal columns the faster first.
_FORMS = {
    8: ((4, 4, 2, 3, 12), (8, 2, 1, 6, 12), (3, 4, 2, 3, 12), (4, 2, 1, 8, 16), (2, 4, 2, 4, 16), (3, 4, 1, 4, 24), (2, 4, 1, 4, 16)),
    16: ((8, 2, 1, 4, 8), (4, 2, 2, 4, 8), (3, 4, 2, 2, 8), (4, 2, 1, 6, 12), (2, 4, 2, 4, 16), (3, 4, 1, 4, 16), (2, 4, 1, 4, 16)),
}


def _configs(problem: GemmProblem) -> Iterator[Config]:
    tokens = 8 if problem.m <= 8 else 16
    for (warps_n, warps_k, tiles, stages, ahead), split_k in product(_FORMS[tokens], (2, 1, 4, 8)):
        yield Config(tiles, tokens, warps_n, warps_k, stages, split_k, ahead)


def candidates(problem: GemmProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first; what is like nothing that was measured comes last."""
    yield from sorted((c for c in _configs(problem) if legal(problem, target, c)),
                      key=lambda c: (not _measured(problem, target, c), _cost(problem, target, c)))


def spec(problem: GemmProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, group, epilogue and config; no extents."""
    p, c = problem, config
    parameters = operand_parameters(p) | dict(
        tiles=c.tiles, token_tiles=c.tokens // 8, warps_n=c.warps_n, warps_k=c.warps_k, stages=c.stages, split_k=c.split_k, ahead=c.ahead,
        zero=p.zero_points, group=p.group_size)
    return KernelSpec.make(
        f"gemm_packed_sm90_{spec_words(p, c)}", "gemm/packed_sm90.cu.jinja", "nvrtc", parameters, params=PARAMS, params_type=PARAMS_TYPE,
        entries=(ENTRY,), target=target)


def bind(problem: GemmProblem, config: Config, kernel: Any, tensors: GemmTensors) -> Callable[[GemmTensors], None]:
    """The closure of a repeated call: packs addresses, launches. Raises LayoutError as packed_skinny.check_reach()."""
    c = config
    packed_skinny.check_reach(problem, config, tensors, ENTRY, min(problem.n, c.block_n))  # from a block's first column on
    launch = kernel.prepare(
        tensors.a.device.index or 0, grid=(ceil_div(problem.n, c.block_n) * c.split_k, 1, 1), block=(c.threads, 1, 1),
        cluster=(c.split_k, 1, 1), programmatic=True, shared_memory=shared_memory(problem, c))
    return closure(problem, c, launch, tensors)


def coverage() -> Iterable[tuple[GemmProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = GemmProblem(1, 16, 8192, 8192, "bf16", "int4", "bf16", b_order="col", weight_format="int4", group_size=128, scale_dtype="bf16")
    half: dict[str, Any] = dict(a_dtype="fp16", out_dtype="fp16", scale_dtype="fp16")
    yield base, None
    yield replace(base, m=1), None
    yield replace(base, m=13, group_size=64, zero_points=True, **half), None
    yield replace(base, m=5, group_size=32, zero_points=True, bias=True, bias_dtype="bf16", activation="silu"), None
    yield replace(base, m=8, accumulate_c=True, c_dtype="fp32", out_dtype="fp32"), Config(2, 8, 4, 2, 4, 2)
    mxfp4 = replace(base, b_dtype="mxfp4", weight_format="mxfp4", group_size=32, scale_dtype="e8m0")
    yield mxfp4, None
    yield replace(mxfp4, m=1, a_dtype="fp16", out_dtype="bf16"), Config(1, 8, 4, 2, 3, 8, 0)


FAMILY = KernelFamily(
    name="gemm/packed_sm90", op="gemm", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage, capabilities=(90,),
)
