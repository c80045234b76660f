"""cuBLAS and cuBLASLt, and the grouped products beside them, through torch: matmul, addmm, _scaled_mm, _grouped_mm, _scaled_grouped_mm.

What they can take and what not; how they are called: cublaslt_calls.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kernelgen.dispatch.backends.base import Backend, Properties
from kernelgen.dispatch.backends.cublaslt_calls import PREPARE, Run, fuses, odd_blocks
from kernelgen.dispatch.backends.product_steps import BLOCKS, FLOATS, FP8, INT32, empty, plain
from kernelgen.problems.gemm import ACTIVATIONS
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no, no

# Compute capabilities of torch's fp8 products by recipe; grouped ones are CUTLASS kernels for Hopper and Blackwell of data centres.
_SCALED_ON = {"tensor": (89, 90, 100, 103, 110, 120, 121), "row": (89, 90, 100, 103, 110, 120, 121), **dict.fromkeys(BLOCKS, (90,))}
_GROUPED_ON = (90, 100, 103)
_MOST_GROUPS = 1023  # it refuses 1,024, the threads of the kernel that lays out their descriptors


def _common(p: Any, target: Target, what: str) -> tuple[tuple[bool, str], ...]:
    return (
        (target.kind == "cuda", f"{what} is CUDA's, got {target}; backend='torch' serves the CPU"),
        (not p.gathered, f"{what} takes rows of a where they lie, not gathered ones"),
        (p.activation in (None, *ACTIVATIONS) or (p.op == "gemm" and p.epilogue is not None),
         f"activation {p.activation} is one of moe's own"),
        (p.weight_format is None, f"packed {p.weight_format} weights: {what} reads none"),
        (p.out_scale is None, f"{what} gives no scales beside its output, got out_scale={p.out_scale}"),
        (max(p.batch, p.m, p.n, p.k) <= INT32, f"an extent of {max(p.batch, p.m, p.n, p.k)} exceeds {INT32}"),
    )


def _listed(capabilities: tuple[int, ...]) -> str:
    return ", ".join(f"sm_{c}" for c in capabilities)


def _matmul_verdict(p: Any, target: Target) -> Verdict:
    return first_no(
        *_common(p, target, "cuBLAS"),
        (p.a_dtype in FLOATS and p.a_dtype == p.b_dtype, f"needs one of {', '.join(FLOATS)} for a and b; got {p.a_dtype}/{p.b_dtype}"),
        (not p.requires_grad or fuses(p) and not p.activation,
         f"a gradient is asked for through activation={p.activation}, bias of {p.bias_dtype}, c of {p.c_dtype}, out of {p.out_dtype}: "
         "only what cuBLAS adds itself has one; backend='torch' has the rest"),
    )


def _scaled_verdict(p: Any, target: Target) -> Verdict:
    what = "_scaled_mm"
    verdict = first_no(
        *_common(p, target, what),
        (target.capability in (on := _SCALED_ON.get(p.scales, ())), f"scales={p.scales} need {_listed(on)}, got {target}"),
        (not p.requires_grad, f"{what} has no backward"),
        (p.batch <= 1 or not p.batched_b, f"a batch of {p.batch} matrices b, {what} takes one"),
    )
    if not verdict or empty(p):
        return verdict
    return first_no(
        ((p.a_dtype, p.b_dtype) != ("e5m2", "e5m2"), "a and b are both e5m2, cuBLASLt needs an e4m3 among the two"),
        ((p.a_order, p.b_order) == ("row", "col"), f"operands in orders {(p.a_order, p.b_order)}, {what} needs K contiguous in both"),
        (p.k % 16 == 0, f"K = {p.k} is not a multiple of 16"),
        (p.n % 16 == 0, f"N = {p.n} is not a multiple of 16"),
        (p.alignment == 16, f"rows of a or b are aligned to {p.alignment} bytes, cuBLASLt needs 16"),
        (not odd_blocks(p) or p.a_dtype == p.b_dtype == "e4m3",
         f"K = {p.k} has {-(-p.k // 128)} blocks, no multiple of 4: torch takes such scales of 128 x 128 for e4m3 alone, got "
         f"{p.a_dtype}/{p.b_dtype}"),
    )


def _grouped_verdict(p: Any, target: Target) -> Verdict:
    """Of rows and K in groups, by kernels that read the groups' ends on the device."""
    scaled = p.scales is not None
    what = "_scaled_grouped_mm" if scaled else "_grouped_mm"
    orders = (p.a_order, p.b_order)
    return first_no(
        *_common(p, target, what),
        (target.capability in _GROUPED_ON, f"{what} runs on the device alone on {_listed(_GROUPED_ON)}, got {target}: "
         "elsewhere it waits for the ends"),
        (plain(p), f"{what} has no epilogue, got bias={p.bias} activation={p.activation} c={p.accumulate_c}: it would round twice"),
        (p.out_dtype == "bf16", f"out dtype {p.out_dtype}, {what} writes bf16"),
        ((p.a_dtype, p.b_dtype) == (("e4m3", "e4m3") if scaled else ("bf16", "bf16")),
         f"a and b are {p.a_dtype} and {p.b_dtype}, {what} takes {'e4m3' if scaled else 'bf16'}"),
        (p.scales in (None, "tensor", "row"), f"scales={p.scales}, {what} takes those of rows"),
        (p.batch <= _MOST_GROUPS, f"{p.batch} groups, {what} takes {_MOST_GROUPS}"),
        (p.alignment == 16, f"rows of a or b are aligned to {p.alignment} bytes, TMA needs 16"),
        (not scaled or p.grouping == "rows" and orders == ("row", "col"),
         f"{p.grouping} in groups of operands in orders {orders}: {what} needs rows in groups, K contiguous in both"),
        (p.grouping != "rows" or p.a_order == "row", "a has M contiguous: a group would have to begin at a multiple of 16 bytes"),
        (p.grouping != "k" or orders == ("col", "row"),
         f"K in groups of operands in orders {orders}: groups would have to begin at multiples of 16 bytes; a needs M and b N contiguous"),
        (not scaled or (p.k % 16 == 0 and p.n % 16 == 0), f"N = {p.n}, K = {p.k}: {what} needs multiples of 16"),
        (not p.requires_grad or not scaled and p.grouping == "rows" and not empty(p) and p.n % 8 == 0,
         f"a gradient is asked for of {p.grouping} in groups, N = {p.n}: there is one of rows in bf16 with N a multiple of 8"),
    )


def _masked_verdict(p: Any, target: Target) -> Verdict:
    return first_no(
        *_common(p, target, "cuBLAS"),
        (p.a_dtype in FLOATS and p.a_dtype == p.b_dtype, f"needs one of {', '.join(FLOATS)} for a and b; got {p.a_dtype}/{p.b_dtype}"),
        (not p.requires_grad, "a gradient is asked for: rows that no group has would reach that of b"),
    )


_VERDICTS: dict[str, Callable[[Any, Target], Verdict]] = {
    "matmul": _matmul_verdict, "scaled_mm": _scaled_verdict, "grouped_mm": _grouped_verdict, "scaled_grouped_mm": _grouped_verdict,
    "bmm": _masked_verdict,
}


def _kernel_of(p: Any) -> str:
    """torch's operator for the problem."""
    scaled = p.a_dtype in FP8 and p.scales is not None
    if p.op == "gemm":
        return "scaled_mm" if scaled else "matmul"
    if p.grouping == "masked":
        return "bmm"
    return "scaled_grouped_mm" if scaled else "grouped_mm"


class CublasLt(Backend):
    name = "cublaslt"

    def candidates(self, problem: Any, target: Target, live: bool) -> Iterator[tuple[str, Any, Verdict]]:
        if problem.op not in ("gemm", "grouped_gemm"):
            yield "", None, no(f"cuBLASLt has products only, not {problem.op}")
            return
        kernel = _kernel_of(problem)
        yield kernel, None, _VERDICTS[kernel](problem, target)

    def prepare(self, problem: Any, target: Target, kernel: str, config: Any, tensors: Any) -> Run:
        return PREPARE[kernel](problem, tensors)

    def properties(self, problem: Any, kernel: str) -> Properties:
        """cuBLAS picks an algorithm by the shape: equal calls give equal bits, other numbers of rows may not."""
        return Properties(backward=kernel in ("matmul", "grouped_mm"))


BACKEND = CublasLt()
