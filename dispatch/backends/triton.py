"""Products by a Triton kernel of our own, portable and slow: what has no template. Those are grouped products of float32 and float64 on a
GPU, which torch multiplies only after waiting for the groups' ends; other products are taken too, for comparison.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from kernelgen.dispatch.backends.base import Backend, Properties
from kernelgen.dispatch.backends.product_steps import FLOATS, on_device_of
from kernelgen.dispatch.libraries import Library
from kernelgen.problems.gemm import ACTIVATIONS
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no, no, yes

LIBRARY = Library("triton", "triton", at_least="3.2", checked="3.6.0")
_OLDEST = 80
_MOST_BLOCKS = (1 << 31) - 1  # grid x
_MOST_EXTENT = (1 << 31) - (1 << 10)  # tile indices past the end stay within int32
_ACTIVATION_OF_GATE = {"swiglu": "silu", "geglu": "gelu"}
_WARPS = 8


def _tile(p: Any) -> tuple[int, int, int]:
    """Rows, columns and depth: as much as fits in registers (sm_90, Triton 3.6, no spills; 64 x 64 x 32 of float32 by 4 warps spilled
    484 bytes). A gate has two tiles of sums."""
    if p.a_dtype == "fp64":
        return 32, 32, 16
    return (64, 32 if p.gated else 64, 16) if p.a_dtype == "fp32" else (64, 64, 32)


def _grid(p: Any) -> tuple[int, int, int]:
    """Tiles of rows, of columns, entries of the batch. Rows in groups take up to one part of a tile more per group."""
    block_m, block_n, _ = _tile(p)
    grouping = getattr(p, "grouping", "")
    tiles_m = -(-p.m // block_m) + (p.batch if grouping == "rows" else 0)
    return tiles_m, -(-p.outputs // block_n), 1 if grouping == "rows" else p.batch


def _verdict(p: Any, target: Target) -> Verdict:
    tiles_m, tiles_n, entries = _grid(p)
    return first_no(
        (target.kind == "cuda" and target.capability >= _OLDEST, f"Triton's kernels are for sm_{_OLDEST} and later, got {target}"),
        (not p.gathered, "rows of a are taken where they lie, not gathered"),
        (p.weight_format is None, f"packed {p.weight_format} weights are not in this kernel"),
        (p.scales is None and p.out_scale is None, f"no scales, got scales={p.scales} out_scale={p.out_scale}"),
        (p.a_dtype in FLOATS and p.a_dtype == p.b_dtype, f"needs one of {', '.join(FLOATS)} for a and b; got {p.a_dtype}/{p.b_dtype}"),
        (p.activation in (None, *ACTIVATIONS), f"activation {p.activation} is one of moe's own"),
        (p.a_dtype != "fp64" or not p.accumulate_c, "beta * c of float64: Triton hands numbers over as float32"),
        (not p.requires_grad, "a gradient is asked for, and the kernel has no backward"),
        (max(p.m, p.n, p.k, p.batch) <= _MOST_EXTENT, f"an extent of {max(p.m, p.n, p.k, p.batch)} exceeds {_MOST_EXTENT}"),
        (tiles_m * tiles_n * entries <= _MOST_BLOCKS, f"{tiles_m * tiles_n * entries} tiles, a grid has {_MOST_BLOCKS}"),
    )


def _compiler() -> Verdict:
    """Triton builds its launcher with the host's C compiler."""
    found = bool(os.environ.get("CC")) or any(map(shutil.which, ("cc", "gcc", "clang")))
    return yes() if found else no("Triton needs a C compiler for its launcher: none of cc, gcc, clang is in PATH, and CC is not set")


class Triton(Backend):
    name = "triton"

    def candidates(self, problem: Any, target: Target, live: bool) -> Iterator[tuple[str, Any, Verdict]]:
        if problem.op not in ("gemm", "grouped_gemm"):
            yield "", None, no(f"there is no Triton kernel for {problem.op}")
            return
        verdict = _verdict(problem, target)
        if verdict and live:
            verdict = LIBRARY.verdict() and _compiler()
        yield "product", None, verdict

    def prepare(self, problem: Any, target: Target, kernel: str, config: Any, tensors: Any) -> Callable[[Any], Any]:
        return bind(problem)

    def properties(self, problem: Any, kernel: str) -> Properties:
        """A tile's sums run along K in one order, whatever the other rows are."""
        return Properties(batch_invariant=True)


def bind(p: Any) -> Callable[[Any], Any]:
    """The closure of a problem; the kernel is compiled at its first run, by Triton, which keeps it."""
    import triton.language as tl

    from kernelgen.dispatch.backends.triton_products import product

    tiles_m, tiles_n, entries = _grid(p)
    block_m, block_n, block_k = _tile(p)
    blocks = tiles_m * tiles_n * entries
    grouping = getattr(p, "grouping", "")
    words: dict[str, Any] = dict(
        SUMS=tl.float64 if p.a_dtype == "fp64" else tl.float32, EXACT=p.a_dtype in ("fp32", "fp64"), GROUPING=grouping,
        ACTIVATION=_ACTIVATION_OF_GATE.get(p.activation, p.activation or ""), GATES=p.gate_up if p.gated else "", BIAS=p.bias,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=_WARPS)

    def run(t: Any) -> None:
        if not blocks:
            return
        bias, c = t.bias, t.c if t.beta != 0 else None  # as in BLAS, a zero beta does not read c
        strides = (
            t.a.stride(0) if t.a.shape[0] > 1 else 0, t.a.stride(1), t.a.stride(2), t.b.stride(0) if t.b.shape[0] > 1 else 0, t.b.stride(1),
            t.b.stride(2), t.out.stride(0), t.out.stride(1), bias.stride(0) if bias is not None and bias.dim() == 2 else 0,
            c.stride(0) if c is not None else 0, c.stride(1) if c is not None else 0)
        with on_device_of(t.out):
            product[(blocks,)](t.a, t.b, t.out, getattr(t, "ends", None), bias, c, p.batch, p.m, p.n, p.k, tiles_m, tiles_n, *strides,
                               float(t.beta), ADDEND=c is not None, **words)

    return run


BACKEND = Triton()
