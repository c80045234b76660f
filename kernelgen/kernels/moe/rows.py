"""What permute and unpermute share on the host: access widths, weights, and problems that reach every branch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from kernelgen.dtypes import DTYPES
from kernelgen.moe_tensors import PermuteTensors
from kernelgen.problems.moe import MoePermuteProblem, MoeUnpermuteProblem
from kernelgen.verdicts import Verdict, first_no

HALF_OR_MORE = ("fp32", "bf16", "fp16", "fp64")


def copied_bytes(problem: MoePermuteProblem) -> int:
    """Bytes of one access of a copy: a power of two up to 16 that alignment and width of a row allow."""
    width = problem.width * DTYPES[problem.dtype].bytes
    bits = max(problem.alignment, DTYPES[problem.dtype].bytes) | (width or 16)
    return min(16, bits & -bits)


def elements(alignment: int, width: int, *dtypes: str) -> int:
    """Elements of one access to rows of all these dtypes: up to 16 bytes of the largest type."""
    size = max(DTYPES[d].bytes for d in dtypes)
    most = max(1, min(16, alignment) // size)
    bits = most | (width or most)
    return bits & -bits


def address(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


STRIDES_OF_SCALES = ("scale_token", "scale_block", "scale_rows_row", "scale_rows_block")


def strides_of_scales(t: PermuteTensors) -> dict[str, int]:
    """Of the scales that move along; 0 without them."""
    strides = (0,) * 4 if t.scale is None or t.scale_rows is None else (*t.scale.stride(), *t.scale_rows.stride())
    return dict(zip(STRIDES_OF_SCALES, strides))


def permute_verdict(p: MoePermuteProblem, floats: tuple[str, ...]) -> Verdict:
    """What both permute kernels take; ``floats``: types that a weight may multiply and have."""
    return first_no(
        (p.dtype in DTYPES, f"dtype {p.dtype} is not one of {', '.join(DTYPES)}"),
        (p.copies or p.dtype in floats, f"dtype {p.dtype} with weights is not one of {', '.join(floats)}"),
        (p.weight_dtype in (None, *floats), f"weights of {p.weight_dtype} are not one of {', '.join(floats)}"),
        (p.tokens * p.k < 1 << 31, f"{p.tokens * p.k} rows exceed int32"),
    )


def unpermute_verdict(p: MoeUnpermuteProblem, floats: tuple[str, ...]) -> Verdict:
    """What both unpermute kernels take."""
    kinds = (("rows", p.dtype), ("out", p.out_dtype), ("weights", p.weight_dtype), ("addend", p.addend))
    return first_no(
        *((d is None or d in floats, f"{name} of {d} are not one of {', '.join(floats)}") for name, d in kinds),
        (p.tokens * p.k < 1 << 31, f"{p.tokens * p.k} rows exceed int32"),
    )


def permute_coverage(floats: tuple[str, ...]) -> Iterable[tuple[MoePermuteProblem, Any]]:
    base = MoePermuteProblem(64, 8, 4096, "bf16")
    yield base, None
    yield replace(base, dtype="e4m3", scales=32), None
    yield replace(base, dtype="e4m3", scales=1, weight_dtype="fp32", width=1001, alignment=1), None
    for dtype in floats:
        yield replace(base, dtype=dtype, weight_dtype="fp32"), None
    yield replace(base, weight_dtype="bf16", width=1001, alignment=2), None


def unpermute_coverage(floats: tuple[str, ...]) -> Iterable[tuple[MoeUnpermuteProblem, Any]]:
    base = MoeUnpermuteProblem(64, 8, 4096, "bf16", "bf16")
    for dtype in floats:
        yield replace(base, dtype=dtype, out_dtype=dtype), None
    yield replace(base, weight_dtype=None, addend="bf16"), None
    yield replace(base, weight_dtype="bf16", width=1001, alignment=2), None
