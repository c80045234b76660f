"""Host side of gemm/grouped_gemm_mma: one product per group of rows or of K, sizes on the device, for sm_80 and later.

How blocks find their group is described in templates/include/kernelgen/gemm/grouped_gemm_mma.cuh; the product itself, its
operands and its epilogue are those of gemm/gemm_mma.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm.mma import (
    MAX_BLOCKS,
    PARAMS,
    PARAMS_TYPE,
    Config,
    ceil_div,
    closure,
    form_of,
    legal_config,
    spec_parameters,
    spec_words,
    supports_operands,
    tiles,
)
from kernelgen.kernels.gemm.mma_configs import candidates_by_cost
from kernelgen.kernels.gemm.requantize import TEMPLATE, Requantization
from kernelgen.problems.gemm import GroupedGemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target, target_of
from kernelgen.tensors import GroupedGemmTensors
from kernelgen.verdicts import Verdict, first_no

ENTRY = "grouped_gemm_mma"

_GROUPINGS = {"rows": "kRows", "masked": "kMasked", "k": "kDepth"}


def supports(problem: GroupedGemmProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return supports_operands(p, target, ENTRY) and first_no(
        (p.grouping in _GROUPINGS, f"grouping {p.grouping} is not one of {', '.join(_GROUPINGS)}"),
        (p.grouping != "k" or p.weight_format is None, f"K in groups of a packed {p.weight_format} weight is not in {ENTRY}"),
    )


def _most_tiles(problem: GroupedGemmProblem, config: Config) -> int:
    """Of all groups together, however rows are divided among them."""
    p = problem
    tiles_m, tiles_n = tiles(p, config)
    if p.grouping == "rows":
        tiles_m = (p.m + min(p.batch, p.m) * (config.block_m - 1)) // config.block_m if p.batch else 0
        return tiles_m * tiles_n
    return p.batch * tiles_m * tiles_n


def legal(problem: GroupedGemmProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target?"""
    most = _most_tiles(problem, config)
    return legal_config(problem, target, config) and first_no(
        (most <= MAX_BLOCKS, f"config {config} may need {most} tiles, at most {MAX_BLOCKS} are counted"))


def _expected(p: GroupedGemmProblem) -> GroupedGemmProblem:
    """The product of one group, as far as it can be known: equal groups, masks of which a quarter is in use."""
    if p.grouping == "rows":
        return replace(p, m=max(1, ceil_div(p.m, max(p.batch, 1))))
    if p.grouping == "masked":
        return replace(p, m=max(1, min(p.m, max(32, p.m // 4))))
    return replace(p, k=max(1, ceil_div(p.k, max(p.batch, 1))))


def candidates(problem: GroupedGemmProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first."""
    return (c for c in candidates_by_cost(_expected(problem), target, problem.batch) if legal(problem, target, c))


def _requantization(p: GroupedGemmProblem, target: Target) -> Requantization | None:
    if p.out_scale is None:
        return None
    return Requantization.of(p, target, 1 if p.grouping == "rows" else p.batch, p.m, limited=p.grouping != "k")


def spec(problem: GroupedGemmProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: grouping, dtypes, orders, scales, alignment class, epilogue and config; no extents."""
    p, quantize, template = problem, _requantization(problem, target), "gemm/grouped_gemm_mma.cu.jinja"
    name, parameters = f"{ENTRY}_{p.grouping}_{spec_words(p, config)}", spec_parameters(p, config, _GROUPINGS[p.grouping])
    if quantize:
        name, parameters = f"{name}_{quantize.words}", parameters | quantize.parameters(template)
    return KernelSpec.make(
        name, TEMPLATE if quantize else template, "nvrtc", parameters, params=PARAMS, params_type=PARAMS_TYPE,
        entries=(ENTRY, *(quantize.entries if quantize else ())), target=target)


def bind(
    problem: GroupedGemmProblem, config: Config, kernel: Any, tensors: GroupedGemmTensors,
) -> Callable[[GroupedGemmTensors], None]:
    """The closure of a repeated call: packs addresses, launches; never looks at the groups' sizes."""
    p, device = problem, tensors.a.device
    blocks = _most_tiles(p, config)
    if p.grouping != "k":
        blocks = min(blocks, config.blocks_per_sm * max(1, target_of(device).sm_count))
    launch = kernel.prepare(
        device.index or 0, grid=(blocks, 1, 1), block=(config.threads, 1, 1), shared_memory=config.shared_memory(form_of(p)))
    quantize = _requantization(p, kernel.spec.target) if p.batch else None
    last_group = p.batch - 1 if p.grouping == "rows" else 0
    return closure(p, config, launch, tensors, quantize.bind(kernel, tensors, last_group) if quantize else None)


def coverage() -> Iterable[tuple[GroupedGemmProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = GroupedGemmProblem(64, 4096, 4096, 7168, "bf16", "bf16", "bf16", b_order="col", batched_b=True)
    blocks = replace(base, a_dtype="e4m3", b_dtype="e4m3", scales="block_128x128")
    yield base, None
    yield replace(base, grouping="masked", activation="swiglu", bias=True, bias_dtype="bf16"), None
    depth = replace(base, grouping="k", batched_b=False)
    yield replace(depth, a_order="col", b_order="row", out_dtype="fp32", accumulate_c=True, c_dtype="fp32"), None
    yield replace(depth, a_dtype="fp16", b_dtype="fp16"), None
    yield blocks, None
    yield replace(blocks, grouping="masked", activation="swiglu", out_dtype="e4m3", out_scale="block_1x128"), None
    yield replace(blocks, scales="row", alignment=1), None
    yield replace(blocks, grouping="k", batched_b=False, scales="block_1x128"), None
    yield replace(base, b_dtype="int4", weight_format="int4", group_size=128, scale_dtype="bf16", zero_points=True), None
    four = replace(base, b_dtype="mxfp4", weight_format="mxfp4", group_size=32, scale_dtype="e8m0")
    yield replace(four, grouping="masked", m=64), None
    yield replace(four, activation="swiglu_oai", gate_up="interleaved", bias=True, bias_dtype="bf16"), None


FAMILY = KernelFamily(
    name="gemm/grouped_gemm_mma", op="grouped_gemm", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage,
)
