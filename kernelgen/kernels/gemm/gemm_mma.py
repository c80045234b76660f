"""Host side of gemm/gemm_mma: 16-bit, fp8 and packed 4-bit matrix products with mma.sync and a fused epilogue, for sm_80 and later.

The kernel and its data flow are described in templates/include/kernelgen/gemm/gemm_mma.cuh; what it shares with grouped
products is in mma.py, the choice of a config in mma_configs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm import row_totals
from kernelgen.kernels.gemm.mma import (
    MAX_BLOCKS,
    PARAMS,
    PARAMS_TYPE,
    Config,
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
from kernelgen.problems.gemm import GemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import GemmTensors
from kernelgen.verdicts import Verdict, first_no

ENTRY = "gemm_mma"


def supports(problem: GemmProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    return supports_operands(problem, target, ENTRY)


def _blocks(problem: GemmProblem, config: Config) -> int:
    tiles_m, tiles_n = tiles(problem, config)
    return tiles_m * tiles_n * problem.batch


def legal(problem: GemmProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target?"""
    blocks = _blocks(problem, config)
    return legal_config(problem, target, config) and first_no(
        (blocks <= MAX_BLOCKS, f"config {config} needs {blocks} blocks, the grid takes {MAX_BLOCKS}"))


def candidates(problem: GemmProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first."""
    return (c for c in candidates_by_cost(problem, target, problem.batch) if legal(problem, target, c))


def _requantization(problem: GemmProblem, target: Target) -> Requantization | None:
    return Requantization.of(problem, target, problem.batch, problem.m) if problem.out_scale else None


def spec(problem: GemmProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, orders, scales, alignment class, epilogue and config; no extents."""
    quantize, template = _requantization(problem, target), "gemm/gemm_mma.cu.jinja"
    name, parameters = f"gemm_mma_{spec_words(problem, config)}", spec_parameters(problem, config)
    if quantize:
        name, parameters = f"{name}_{quantize.words}", parameters | quantize.parameters(template)
    return KernelSpec.make(
        name, TEMPLATE if quantize else template, "nvrtc", parameters, params=PARAMS, params_type=PARAMS_TYPE,
        entries=(ENTRY, *(quantize.entries if quantize else row_totals.entries(problem))), target=target)


def bind(problem: GemmProblem, config: Config, kernel: Any, tensors: GemmTensors) -> Callable[[GemmTensors], None]:
    """The closure of a repeated call: packs addresses, launches. An empty output launches nothing."""
    launch = kernel.prepare(
        tensors.a.device.index or 0, grid=(_blocks(problem, config), 1, 1), block=(config.threads, 1, 1),
        shared_memory=config.shared_memory(form_of(problem)))
    quantize = _requantization(problem, kernel.spec.target)
    run = closure(problem, config, launch, tensors, quantize.bind(kernel, tensors) if quantize else None)
    # Of a row in a warp, which leaves one partial: PartsOf::leave of the header.
    pieces = config.warp_tile[1] // (16 if problem.gated else 8)
    tiles = -(-problem.outputs // (8 * (pieces if pieces & (pieces - 1) == 0 else 1)))
    return row_totals.with_totals(problem, tiles, run, kernel, tensors.a.device.index or 0)


def coverage() -> Iterable[tuple[GemmProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = GemmProblem(1, 4096, 4096, 4096, "bf16", "bf16", "bf16")
    half = replace(base, a_dtype="fp16", b_dtype="fp16", out_dtype="fp16")
    small = Config(64, 64, 64, 2, 2, stages=3)
    yield base, None
    yield replace(half, b_order="col"), None
    yield replace(base, a_order="col"), None
    yield replace(base, a_order="col", b_order="col", out_dtype="fp32"), None
    yield replace(base, m=16, b_order="col"), None
    yield replace(base, m=16, n=1000, bias=True, bias_dtype="bf16", activation="silu"), None
    for alignment, activation in ((8, "relu"), (4, "gelu"), (2, "gelu_tanh")):
        yield replace(base, alignment=alignment, out_alignment=alignment, activation=activation, bias=True, bias_dtype="fp32"), small
    yield replace(base, activation="swiglu", b_order="col"), None
    yield replace(base, activation="geglu", gate_up="up_first", bias=True, bias_dtype="bf16"), small
    yield replace(half, activation="swiglu", gate_up="interleaved", bias=True, bias_dtype="fp16"), small
    yield replace(half, out_dtype="fp32", accumulate_c=True, c_dtype="fp32"), small
    yield replace(base, out_alignment=2, b_order="col", activation="swiglu", accumulate_c=True, c_dtype="bf16"), small
    yield from _packed_coverage(replace(base, b_dtype="int4", b_order="col", weight_format="int4", group_size=128, scale_dtype="bf16"))
    yield from _fp8_coverage(replace(base, a_dtype="e4m3", b_dtype="e4m3", b_order="col", scales="row"))


def _fp8_coverage(base: GemmProblem) -> Iterable[tuple[GemmProblem, Config | None]]:
    deep = Config(16, 32, 512, 1, 1, 4, stages=4)
    yield base, None
    yield replace(base, scales="block_128x128"), None
    yield replace(base, scales="block_1x128", m=16), deep
    yield replace(base, accumulate="fast", scales="tensor", a_dtype="e5m2"), None
    yield replace(base, a_order="col", b_order="row", b_dtype="e5m2", scales="block_128x128", bias=True, bias_dtype="bf16"), None
    yield replace(base, scales="block_128x128", activation="swiglu"), None
    yield replace(base, scales="row", activation="swiglu", b_order="row", alignment=8), None
    yield replace(base, scales="block_128x128", alignment=1, out_alignment=2, accumulate_c=True, c_dtype="bf16"), None
    for recipe in ("tensor", "row", "block_1x128"):
        yield replace(base, m=16, out_dtype="e4m3", out_scale=recipe), None


def _packed_coverage(base: GemmProblem) -> Iterable[tuple[GemmProblem, Config | None]]:
    few = replace(base, m=16)
    half: dict[str, Any] = dict(a_dtype="fp16", out_dtype="fp16")
    yield base, None
    yield few, None
    yield replace(few, group_size=64, zero_points=True, scale_dtype="fp32", activation="swiglu"), None
    yield replace(few, b_dtype="mxfp4", weight_format="mxfp4", group_size=32, scale_dtype="e8m0"), None
    yield replace(base, b_dtype="mxfp4", weight_format="mxfp4", group_size=32, scale_dtype="e8m0", **half), None
    yield replace(few, group_size=32, zero_points=True, scale_dtype="fp16", a_order="col", alignment=2, **half), None


FAMILY = KernelFamily(
    name="gemm/gemm_mma", op="gemm", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage,
)
