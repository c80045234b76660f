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
from kernelgen.kernels.gemm.mma import PARAMS, PARAMS_TYPE, RESERVED_SHARED_MEMORY, ceil_div, closure, operand_parameters, spec_words
from kernelgen.problems.gemm import GemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import GemmTensors
from kernelgen.verdicts import Verdict, first_no

ENTRY = "gemm_packed_sm90"
MAX_ROWS = 64  # of a
_STEP = 128  # elements of k of one warp and step
_SCALE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "e8m0": 2}  # in shared memory: an exponent is kept as a bf16


@dataclass(frozen=True)
class Config:
    """Tile shape and schedule.

    tiles    16-column parts of b that a warp has
    tokens   rows of a, rounded up to 8, 16, 32 or 64
    warps_n  warps beside each other, warps_k sets of them that take steps of k in turn
    stages   of each warp's ring
    panel    steps of k that a is copied for at a time
    split_k  blocks of a cluster that share K
    ahead    steps of k whose codes go to L2 while the kernel before ends
    blocks   of an SM: bounds the registers so that as many fit
    """

    tiles: int
    tokens: int
    warps_n: int
    warps_k: int = 1
    stages: int = 6
    panel: int = 16
    split_k: int = 1
    ahead: int = 8
    blocks: int = 1

    def __str__(self) -> str:
        words = f"{self.block_n}x{self.tokens} w{self.warps_n}x{self.warps_k} s{self.stages} p{self.panel} k{self.split_k} a{self.ahead}"
        return words + (f" b{self.blocks}" if self.blocks > 1 else "")

    @property
    def block_m(self) -> int:
        return self.tokens

    @property
    def block_n(self) -> int:
        return self.warps_n * self.tiles * 16

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_k


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
    kept = [_SCALE_BYTES[p.scale_dtype or "bf16"], *([1] if p.zero_points else [])]
    row = sum(c.block_n * _groups(p) * size + max(4, _groups(p) * size) for size in kept)
    panel = c.panel * c.tokens * (_STEP * 2 + (4 if p.weight_format == "mxfp4" else 0))
    steps = _steps(p, c)
    return max(rings, sums) + (2 if steps > c.panel else 1) * panel + steps * row


def supports(problem: GemmProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cuda" and target.capability == 90, f"{ENTRY} needs sm_90, got {target}"),
        (0 < p.m <= MAX_ROWS, f"{p.m} rows of a, {ENTRY} takes 1 to {MAX_ROWS}"),
    ) and packed_skinny.supports(replace(p, m=1), target) and first_no(
        (any(legal(p, target, c) for c in _configs(p)), f"K is {p.k}: scales of an eighth of it do not fit the shared memory of {target}"))


def _registers(problem: GemmProblem, config: Config) -> int:
    """Estimate per thread: a step's codes, two sets of sums, a's pairs, scales, addresses."""
    c = config
    return 8 * c.tiles + 2 * c.tiles * c.tokens // 2 + 6 * c.tokens // 8 + 4 * c.tiles + 40


def legal(problem: GemmProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target?"""
    c = config
    registers, limit, shared = _registers(problem, c), min(255, 65536 // (c.threads * c.blocks)), shared_memory(problem, c)
    per_sm = target.shared_memory_per_block + RESERVED_SHARED_MEMORY
    return first_no(
        (1 <= c.tiles <= 4 and c.tokens in (8, 16, 32, 64) and 1 <= c.split_k <= 8,
         f"config {c}: expected 1 to 4 tiles, 8, 16, 32 or 64 rows and a cluster of 1 to 8"),
        (min(c.warps_n, c.warps_k) >= 1 and 64 <= c.threads <= 512 and c.stages >= 2 and c.ahead >= 0 and c.panel % c.warps_k == 0,
         f"config {c}: expected 2 to 16 warps, 2 stages or more, and panels of as many steps for each set of warps"),
        (problem.m <= c.tokens, f"config {c}: {problem.m} rows of a do not fit {c.tokens}"),
        (registers <= limit, f"config {c} takes about {registers} registers, {limit} are there"),
        ((shared + RESERVED_SHARED_MEMORY) * c.blocks <= per_sm,
         f"config {c} needs {c.blocks} x {shared} bytes of shared memory, {target} has {target.shared_memory_per_block}"),
    )


def _cost(problem: GemmProblem, target: Target, config: Config) -> float:
    """Waves of blocks, each by the bytes that an SM reads; a guess that no measurement has seen."""
    c, sms = config, target.sm_count or 132
    waves = ceil_div(ceil_div(problem.n, c.block_n) * c.split_k, sms * c.blocks) * c.blocks
    return waves * (_steps(problem, c) * (c.block_n + 2 * c.tokens) + 2000 + 300 * c.split_k)


def _configs(problem: GemmProblem) -> Iterator[Config]:
    tokens = next((t for t in (8, 16, 32) if t >= problem.m), MAX_ROWS)
    warps = ((8, 1), (4, 2), (4, 1), (8, 2), (2, 4), (2, 2))
    for (warps_n, warps_k), tiles, split_k, stages in product(warps, (2, 1, 4), (4, 2, 8, 1), (6, 4, 3)):
        yield Config(tiles, tokens, warps_n, warps_k, stages, 8 * warps_k if tokens > 8 else 32, split_k, stages * warps_k)


def candidates(problem: GemmProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first."""
    yield from sorted((c for c in _configs(problem) if legal(problem, target, c)), key=lambda c: _cost(problem, target, c))


def spec(problem: GemmProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, group, epilogue and config; no extents."""
    p, c = problem, config
    parameters = operand_parameters(p) | dict(
        tiles=c.tiles, token_tiles=c.tokens // 8, warps_n=c.warps_n, warps_k=c.warps_k, stages=c.stages, panel=c.panel, split_k=c.split_k,
        ahead=c.ahead, blocks_per_sm=c.blocks, zero=p.zero_points, group=p.group_size)
    return KernelSpec.make(
        f"gemm_packed_sm90_{spec_words(p, c)}", "gemm/packed_sm90.cu.jinja", "nvrtc", parameters, params=PARAMS, params_type=PARAMS_TYPE,
        entries=(ENTRY,), target=target)


def bind(problem: GemmProblem, config: Config, kernel: Any, tensors: GemmTensors) -> Callable[[GemmTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    c = config
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
    yield replace(base, m=64), None
    yield replace(base, m=32, group_size=64, zero_points=True, **half), None
    yield replace(base, m=5, group_size=32, zero_points=True, bias=True, bias_dtype="bf16", activation="silu"), None
    yield replace(base, m=8, accumulate_c=True, c_dtype="fp32", out_dtype="fp32"), Config(2, 8, 4, 2, 4, 8, 2)
    mxfp4 = replace(base, b_dtype="mxfp4", weight_format="mxfp4", group_size=32, scale_dtype="e8m0")
    yield mxfp4, None
    yield replace(mxfp4, m=1, a_dtype="fp16", out_dtype="bf16"), Config(1, 8, 4, 2, 3, 8, 8, 0)


FAMILY = KernelFamily(
    name="gemm/packed_sm90", op="gemm", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage, capabilities=(90,),
)
