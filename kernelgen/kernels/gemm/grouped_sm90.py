"""Host side of gemm/grouped_sm90: one product per group on Hopper, the groups' sizes on the device.

The kernel is that of gemm/dense_sm90 with the tiles of templates/include/kernelgen/gemm/tiles_sm90.cuh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm import dense_sm90
from kernelgen.kernels.gemm.activations import splits
from kernelgen.kernels.gemm.dense_sm90 import Config, closure, spec_of
from kernelgen.kernels.gemm.requantize import Requantization
from kernelgen.kernels.gemm.sm90 import (
    BLOCK_RECIPES,
    kind_of_sums,
    most_tiles,
    promotes,
    quantizes,
    requantized,
    round_up,
    supports_common,
    unquantized,
)
from kernelgen.problems.gemm import GatheredGemmProblem, GroupedGemmProblem, ScatteredGemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import GroupedGemmTensors
from kernelgen.verdicts import Verdict, first_no

ENTRY = "grouped_gemm_sm90"
GROUPINGS = {"rows": "kRows", "masked": "kMasked", "k": "kDepth"}
_SMS = 132  # of an H200, where a target does not say
_DEALT_ROWS = 2  # tiles of a group, if all are equal
_BOX_ROWS = 32  # of a, so that groups of few rows load few: kBoxA of dense_sm90.cuh


def supports(problem: GroupedGemmProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return supports_common(p, target, "grouped_sm90") and dense_sm90.scales_verdict(p) and first_no(
        (p.grouping in GROUPINGS, f"grouping {p.grouping} is not one of {', '.join(GROUPINGS)}"),
        (p.grouping != "rows" or p.a_order == "row", "a has M contiguous: a group may begin at any row, TMA needs a multiple of 16 bytes"),
        (not p.gathered or p.grouping == "rows" and p.scales != "block_1x128" and p.weight_format is None,
         f"gathered rows of grouping {p.grouping} with scales={p.scales} are not in grouped_sm90"),
        (not isinstance(p, GatheredGemmProblem) or p.tokens * max(p.k * DTYPES[p.a_dtype].bytes, 16) < 1 << 35,
         "gathered rows begin beyond 32 GB"),
        (not p.scattered or p.grouping == "rows" and p.out_dtype in ("bf16", "fp16") and p.out_alignment == 16 and p.outputs % 8 == 0
         and not p.accumulate_c, "rows are scattered in groups of rows, 16 bytes of 16-bit values at a time, and added to what is there"),
        (p.grouping != "k" or p.scales not in BLOCK_RECIPES, f"groups of k may begin within a block of scales={p.scales}"),
    )


def legal(problem: GroupedGemmProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target?"""
    c = config
    return dense_sm90.legal(problem, target, config) and first_no(
        (not problem.gathered or c.block_m <= (64 if problem.scales in BLOCK_RECIPES and not c.dealt else 128),
         f"config {c}: lanes that gather have registers for 128 rows, for 64 beside scales and a count of tiles"),  # 12 - 48 bytes
        (c.blocks == 1, f"config {c}: neighbouring tiles of groups share nothing to multicast, and K of each may differ"),
        # Two tiles' addresses and groups beside the sums: 92 - 336 bytes spilled with an epilogue.
        (not c.pingpong or c.mma_m * c.block_n <= 256 or not (problem.activation or problem.bias or problem.accumulate_c),
         f"config {c}: an epilogue leaves too few registers for {c.mma_m * c.block_n // 2} sums"),
        (not c.pingpong or not (problem.gate_up == "interleaved" and problem.gated and problem.bias),
         f"config {c}: biases of neighbours leave too few registers"),  # 4 bytes, of 256 sums
        # 68 - 76 bytes.
        (c.mma_m == 1 or promotes(problem) or not quantizes(problem),
         f"config {c}: results on their way to codes do not fit beside the sums"),
        (not (splits(problem) and problem.scales in BLOCK_RECIPES and c.block_n == 192),
         f"config {c}: halves of a gate have 6 scales of columns, which do not fit beside the sums"),  # 20 bytes
        (not problem.scattered or c.dealt and c.outputs(problem.gated) % 64 == 0,
         f"config {c}: rows are scattered from tiles of multiples of 64 columns that are dealt out"),
        (not c.dealt or problem.grouping != "k", f"config {c}: groups of k have equal tiles"),
        (problem.grouping != "k" or not c.pingpong, f"config {c}: consumers that take turns need the same depth"),
    )


def _expected(p: GroupedGemmProblem) -> GroupedGemmProblem:
    """The product of one group, as far as it can be known: equal groups, masks of which a quarter is in use, but no tile of 64 rows:
    a tile of 128 costs few rows nothing, as only what they fill is loaded (32 x 20 rows: 361 us with 128x192, 410 with 64x128)."""
    if p.grouping == "rows":
        return replace(p, m=max(1, -(-p.m // p.batch)))
    if p.grouping == "masked":
        return replace(p, m=max(1, min(p.m, max(128, p.m // 4))))
    return replace(p, k=max(1, -(-p.k // p.batch)))


def _deals(problem: GroupedGemmProblem, target: Target, config: Config) -> bool:
    """Whether tiles are dealt out: of groups of few tiles of rows, of which the last is as good as empty more often than not, where blocks
    come by more than one. Equal groups lose by it (masked, 6 x 1024 rows: 532 us instead of 418; H200, 2026-11-30)."""
    p = problem
    rows, columns = dense_sm90.tiles_of(_expected(p), config)
    few = p.grouping == "rows" and rows <= _DEALT_ROWS and rows * columns * min(p.batch, p.m) > (target.sm_count or _SMS)
    return p.scattered or few and kind_of_sums(p) != "promoted"  # scales of rows or none: not measured


def candidates(problem: GroupedGemmProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first."""
    every = (replace(c, dealt=_deals(problem, target, c)) for c in dense_sm90.candidates(_expected(problem), target))
    return (c for c in every if legal(problem, target, c))


def _requantization(p: GroupedGemmProblem, target: Target) -> Requantization | None:
    if p.out_scale is None or quantizes(p):
        return None
    return Requantization.of(p, target, 1 if p.grouping == "rows" else p.batch, p.m, limited=p.grouping != "k")


def spec(problem: GroupedGemmProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: grouping, dtypes, orders, epilogue and config; no extents."""
    p, quantize = problem, _requantization(problem, target)
    entry = f"{ENTRY}_{'gathered' if p.gathered else 'scattered' if p.scattered else p.grouping}"
    made = spec_of(unquantized(p) if quantize else p, target, config, entry, GROUPINGS[p.grouping])
    return requantized(made, quantize) if quantize else made


def bind(
    problem: GroupedGemmProblem, config: Config, kernel: Any, tensors: GroupedGemmTensors,
) -> Callable[[GroupedGemmTensors], None]:
    """The closure of a repeated call: packs addresses, launches; never looks at the groups' sizes."""
    p, c = problem, config
    tiles_m, tiles_n = -(-p.m // c.block_m), -(-p.n // c.block_n)
    tiles = most_tiles(p, c.block_m, tiles_n)
    box_a = c.block_m if p.grouping == "k" else min(c.block_m, _BOX_ROWS)
    quantize, last_group = _requantization(p, kernel.spec.target), p.batch - 1 if p.grouping == "rows" else 0
    return closure(p, c, kernel, tensors, tiles_m, tiles_n, tiles, box_a,
                   quantize.bind(kernel, tensors, last_group, round_up(p.outputs, 4)) if quantize else None)


def coverage() -> Iterable[tuple[GroupedGemmProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = GroupedGemmProblem(64, 4096, 4096, 7168, "bf16", "bf16", "bf16", b_order="col", batched_b=True)
    fp8 = replace(base, a_dtype="e4m3", b_dtype="e4m3", scales="block_128x128")
    yield base, None
    yield replace(base, grouping="masked", activation="swiglu", bias=True, bias_dtype="bf16"), Config(1, 2, 192, 4)
    depth = replace(base, grouping="k", batched_b=False)
    yield replace(depth, a_order="col", b_order="row", out_dtype="fp32", accumulate_c=True, c_dtype="fp32"), Config(1, 2, 128, 4)
    yield replace(depth, a_dtype="fp16", b_dtype="fp16"), Config(1, 1, 64, 8)
    yield replace(base, grouping="masked", a_order="col", b_order="row"), Config(2, 2, 128, 5, pingpong=True)
    oai = replace(base, activation="swiglu_oai", bias=True, bias_dtype="bf16")
    for gate_up in ("gate_first", "up_first", "interleaved"):
        yield replace(oai, gate_up=gate_up), Config(1, 2, 192, 4)
    yield replace(base, activation="relu2"), Config(1, 2, 128, 5)
    yield fp8, Config(1, 2, 192, 4, parts=2)
    yield replace(fp8, scales="block_1x128", grouping="masked"), Config(1, 2, 128, 5, parts=2)
    yield replace(fp8, scales="row"), Config(2, 2, 128, 4, parts=2)
    quantized = replace(fp8, activation="swiglu", out_dtype="e4m3", out_scale="block_1x128")
    yield quantized, Config(1, 2, 256, 4, parts=4)
    yield replace(quantized, grouping="masked", gate_up="interleaved"), Config(1, 2, 256, 4, parts=4)
    yield replace(quantized, activation=None, scales="block_1x128"), Config(1, 2, 128, 5, parts=2)
    yield replace(quantized, out_scale="row"), Config(1, 2, 128, 5, parts=2)
    yield replace(fp8, scales="tensor", grouping="k", batched_b=False), Config(1, 2, 128, 6)
    for problem, config in ((base, Config(2, 2, 128, 5, pingpong=True)), (replace(base, activation="swiglu"), Config(1, 2, 256, 4)),
                            (fp8, Config(1, 1, 128, 8)), (quantized, Config(1, 1, 256, 5, parts=4)),
                            (replace(fp8, scales="row"), Config(1, 1, 128, 8))):
        yield GatheredGemmProblem(**vars(problem), tokens=512), config
    yield replace(base, grouping="masked"), Config(2, 2, 128, 5, pingpong=True, dealt=True)
    for problem, config in ((base, Config(2, 2, 128, 5, pingpong=True, dealt=True)),
                            (fp8, Config(1, 2, 256, 4, parts=4, pingpong=True, dealt=True)),
                            (replace(base, a_dtype="fp16", b_dtype="fp16", out_dtype="fp16", bias=True, bias_dtype="fp32"),
                             Config(1, 2, 256, 4, dealt=True))):
        yield ScatteredGemmProblem(**vars(problem), tokens=512), config
    for config in (Config(1, 1, 256, 5, parts=4, dealt=True), Config(1, 2, 256, 4, parts=4, dealt=True)):
        yield GatheredGemmProblem(**vars(quantized), tokens=512), config


FAMILY = KernelFamily(
    name="gemm/grouped_sm90", op="grouped_gemm", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage, capabilities=(90,),
)
