"""What the Hopper products share on the host: verdicts, the epilogue's constants, addresses and scalars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from kernelgen.dtypes import DTYPES
from kernelgen.errors import LayoutError
from kernelgen.kernels.gemm import row_totals
from kernelgen.kernels.gemm.activations import ACTIVATION_NAMES, activation_words, added, function_parameters, gate_name, splits
from kernelgen.kernels.gemm.requantize import TEMPLATE, Requantization
from kernelgen.problems.gemm import FUNCTION, MORE_ACTIVATIONS, GemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

ROW_BYTES = 128  # of a tile in shared memory: kSwizzleRowBytes of smem_tile.cuh
MMA_ROWS = 64
POINTERS = ("a", "b", "out", "bias", "c", "scale_a", "scale_b")
BLOCK_RECIPES = {"block_128x128": 128, "block_1x128": 1}  # columns of b that share a scale

_HALVES, _FP8 = ("bf16", "fp16"), ("e4m3", "e5m2")
_OUTPUTS = ("bf16", "fp16", "fp32")
_MAX_EXTENT = (1 << 31) - (1 << 10)  # tile indices past the end of m, n and k stay within int32
Problem = TypeVar("Problem", bound=GemmProblem)
Quantize = Callable[[torch.Tensor, Any, int], None]  # workspace, tensors of the product, address of ends


def promotes(problem: GemmProblem) -> bool:
    """fp8 sums are added to float32 totals every 128 of K, where scales of blocks change too."""
    return problem.a_dtype in _FP8 and (problem.accumulate == "float32" or problem.scales in BLOCK_RECIPES)


def kind_of_sums(problem: GemmProblem) -> str:
    """What is done with the tensor core's sums, by which kernels are measured: "plain", "promoted" or, times scales, "blocks"."""
    return "blocks" if problem.scales in BLOCK_RECIPES else "promoted" if promotes(problem) else "plain"


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def most_tiles(problem: GemmProblem, block_m: int, tiles_n: int) -> int:
    """Tiles that groups can have at most, whatever their sizes: each of rows may begin a tile of its own."""
    p = problem
    if getattr(p, "grouping", "") == "rows":
        return (p.m + min(p.batch, p.m) * (block_m - 1)) // block_m * tiles_n
    return p.batch * -(-p.m // block_m) * tiles_n


def depth(problem: GemmProblem) -> int:
    """Elements of K in 128 bytes."""
    return ROW_BYTES // DTYPES[problem.a_dtype].bytes


def quantizes(problem: GemmProblem) -> bool:
    """dense_sm90 finds codes and their scales itself, where a row's 128 columns lie in one warpgroup's registers, and TMA writes them.
    (Beside promoted sums of 256 columns those of a gate find no room if scales of rows or columns come too: 24 - 364 bytes spilled; beside
    the tensor core's own those of a clamped gate with biases: 12 - 24.)"""
    p = problem
    if p.out_scale != "block_1x128" or p.out_alignment < 16:
        return False
    kind = kind_of_sums(p)
    return not (p.gated and (kind == "promoted" or kind == "plain" and p.clamped and p.bias))


def unquantized(problem: Problem) -> Problem:
    """The product whose float32 results, in rows of whole 16 bytes, other kernels quantise, where scales need more than one tile."""
    return replace(problem, out_dtype="fp32", out_scale=None, out_alignment=16)


def requantized(spec: KernelSpec, quantize: Requantization) -> KernelSpec:
    """The binary with both."""
    return KernelSpec.make(
        f"{spec.name}_{quantize.words}", TEMPLATE, spec.toolchain, dict(spec.parameters) | quantize.parameters(spec.template),
        params=spec.params, params_type=spec.params_type, entries=(*spec.entries, *quantize.entries), target=spec.target)


# Of the kernels whose verdicts ask here, those that call a user's epilogue.
_WITH_FUNCTIONS = ("dense_sm90", "dense_sm90_cute")


def supports_common(problem: GemmProblem, target: Target, name: str) -> Verdict:
    """What TMA, WGMMA and the epilogue need."""
    p = problem
    orders = (p.a_order, p.b_order)
    return first_no(
        (target.kind == "cuda" and target.capability == 90, f"{name} needs sm_90a, got {target}"),
        (p.a_dtype in _HALVES + _FP8 and p.a_dtype == p.b_dtype,
         f"a and b are {p.a_dtype} and {p.b_dtype}, {name} takes one 16-bit or fp8 type"),
        (p.a_dtype in _HALVES or orders == ("row", "col"),
         f"fp8 operands in orders {orders}, expected K contiguous in both, as WGMMA reads 8-bit tiles no other way"),
        (p.out_dtype in (_FP8 if p.out_scale else _OUTPUTS),
         f"out dtype {p.out_dtype} with out_scale={p.out_scale} is not one of {', '.join(_FP8 if p.out_scale else _OUTPUTS)}"),
        (p.bias_dtype in (None, *_OUTPUTS), f"bias dtype {p.bias_dtype} is not one of {', '.join(_OUTPUTS)}"),
        (p.c_dtype in (None, *_OUTPUTS), f"c dtype {p.c_dtype} is not one of {', '.join(_OUTPUTS)}"),
        (p.activation in (None, *MORE_ACTIVATIONS) or (p.activation == FUNCTION and name in _WITH_FUNCTIONS),
         f"activation {p.activation} is not in {name}"),
        (p.scales in (None, "tensor", "row", *BLOCK_RECIPES), f"scales={p.scales} are not in {name}"),
        (p.weight_format is None, f"packed {p.weight_format} weights are not in {name}"),
        (max(p.m, p.n, p.k) <= _MAX_EXTENT, f"an extent of {max(p.m, p.n, p.k)} exceeds {_MAX_EXTENT}"),
        (min(p.m, p.n, p.k, p.batch) > 0, "an extent is 0: there is nothing for TMA to load"),
        (not splits(p) or p.b_order == "col" or p.n // 2 * DTYPES[p.b_dtype].bytes % 16 == 0,
         f"the second half of b's columns begins at {p.n // 2}, TMA needs a multiple of 16 bytes"),
        (p.alignment == 16, f"rows of a or b are aligned to {p.alignment} bytes, TMA needs 16"),
    )


def options(problem: GemmProblem, columns: int, **config: Any) -> dict[str, Any]:
    """Parameters of templates/gemm/options_sm90.cuh.jinja; ``columns``: N of the WGMMA."""
    p = problem
    out = f"kernelgen::{p.out_dtype}" if p.out_scale else DTYPES[p.out_dtype].cuda
    return dict(
        element=p.a_dtype, out=out, bias_type=DTYPES[p.bias_dtype].cuda if p.bias_dtype else out,
        c_type=DTYPES[p.c_dtype].cuda if p.c_dtype else out, activation=ACTIVATION_NAMES[p.activation], gate=gate_name(p),
        **function_parameters(p), **row_totals.parameters(p), clamped=p.clamped,
        row_a=p.a_order == "row", row_b=p.b_order == "row", bias=p.bias, accumulate=p.accumulate_c,
        scales=p.scales in ("tensor", "row"), block_scales=p.scales in BLOCK_RECIPES, scale_columns=BLOCK_RECIPES.get(p.scales or "", 1),
        promote=promotes(p),
        mma_columns=str(columns),
    ) | config


def words(problem: GemmProblem) -> list[str]:
    """The parts of a spec's name that the problem decides."""
    p = problem
    parts = [p.a_dtype, p.out_dtype, ("r" if p.a_order == "row" else "c") + ("r" if p.b_order == "row" else "c")]
    parts += [f"bias_{p.bias_dtype or p.out_dtype}"] if p.bias else []
    parts += activation_words(p)
    parts += [f"c_{p.c_dtype or p.out_dtype}"] if p.accumulate_c else []
    parts += [f"out_{p.out_scale}"] if p.out_scale else []
    parts += [p.scales] if p.scales in BLOCK_RECIPES else ["scales"] if p.scales else []
    parts += ["scalar_out"] if p.out_alignment < 16 else []
    return parts + (["promote"] if promotes(p) else [])


def scalars(problem: GemmProblem, t: Any) -> dict[str, int | float]:
    """Everything of Params that the kernels take from shapes and strides.

    Raises LayoutError for a view of scales whose entries are 2^31 or more apart: the kernels have 32 bits for all but the batch's stride.
    """
    p = problem
    for name, scale in (("scale_a", t.scale_a), ("scale_b", t.scale_b)):
        if scale is not None and max(_stride(scale, 1), _stride(scale, 2)) >= 1 << 31:
            raise LayoutError(f"{name}: got strides {scale.stride()}, expected entries fewer than 2^31 apart on Hopper; call "
                              f"{name}.contiguous()")
    return {
        "c_batch": _stride(t.c, 0), "c_row": t.c.stride(1) if t.c is not None else 0, "out_batch": t.out.stride(0),
        "out_row": t.out.stride(1), "bias_batch": _stride(t.bias, 0) if t.bias is not None and t.bias.dim() == 2 else 0,
        "m": p.m, "n": p.n, "k": p.k, "batched_b": int(t.b.shape[0] > 1), "beta": t.beta, "alpha": t.alpha,
        "limit": t.limit,
        "scale_a_batch": _stride(t.scale_a, 0), "scale_a_row": _stride(t.scale_a, 1), "scale_a_block": _stride(t.scale_a, 2),
        "scale_b_batch": _stride(t.scale_b, 0), "scale_b_block": _stride(t.scale_b, 1), "scale_b_column": _stride(t.scale_b, 2),
    }


def _stride(t: torch.Tensor | None, dim: int) -> int:
    """0 where there is one entry."""
    return 0 if t is None or t.shape[dim] == 1 else t.stride(dim)


def workspace(problem: GemmProblem, shape: tuple[int, ...], device: Any) -> torch.Tensor:
    """Float32 results of the shape of out, in rows of whole 16 bytes, which other kernels quantise."""
    return torch.empty((*shape[:2], round_up(problem.outputs, 4)), dtype=torch.float32, device=device)[..., : problem.outputs]


def quantized(problem: Problem, sample: Any, quantize: Quantize,
              bind: Callable[[Problem, Any], Callable[[Any], None]]) -> Callable[[Any], None]:
    """The closure of a product by ``bind``, of float32 results, and of what quantises them."""
    p, grouped, shape = problem, problem.op == "grouped_gemm", tuple(sample.out.shape)
    product = bind(unquantized(p), sample._replace(out=workspace(p, shape, "meta"), out_scale=None))
    device = sample.out.device

    def run(t: Any) -> None:
        made = workspace(p, shape, device)
        product(t._replace(out=made, out_scale=None))
        quantize(made, t, t.ends.data_ptr() if grouped else 0)

    return run


def addresses(problem: GemmProblem) -> Callable[[Any], tuple[int, ...]]:
    """The pointers of Params, in order, of the tensors of a call."""
    with_bias, scaled = problem.bias or problem.epilogue is not None, problem.scales is not None
    with_c = problem.accumulate_c or row_totals.reduces(problem)  # partials of totals, which dense_sm90 has in c's place

    def of(t: Any) -> tuple[int, ...]:
        return (
            t.a.data_ptr(), t.b.data_ptr(), t.out.data_ptr(), added(problem, t).data_ptr() if with_bias else 0,
            t.c.data_ptr() if with_c else 0, t.scale_a.data_ptr() if scaled else 0, t.scale_b.data_ptr() if scaled else 0,
        )

    return of
