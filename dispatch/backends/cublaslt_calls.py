"""The calls behind the backend cublaslt: torch's operators, and what brings a problem into their form and their result into the contract's.

What the library can write in one rounding it writes itself: the product, with a bias, with beta * c, with relu or gelu_tanh. Every other
epilogue follows in float32 on a float32 product, and is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernelgen.dispatch.backends.product_steps import (
    BLOCKS,
    at_16_bytes,
    cut_ends,
    empty,
    epilogue,
    folds,
    row_scales,
    rows_contiguous,
    used_rows,
    write_rows,
    zeros,
)
from kernelgen.dtypes import DTYPES

Run = Callable[[Any], Any]

HALVES = ("bf16", "fp16")
_FUSED_ACTIVATIONS = {"relu": False, "gelu_tanh": True}  # -> use_gelu of _addmm_activation
_ROWS_OF_BLOCKS = 4  # the scales of a, whose rows lie contiguous, begin each block of K at a multiple of 16 bytes


def fuses(p: Any) -> bool:
    """Does cuBLAS write the result itself, rounded once?"""
    if p.out_dtype != p.a_dtype or (p.bias and p.bias_dtype != p.a_dtype) or (p.accumulate_c and p.c_dtype != p.a_dtype):
        return False
    if p.n == 1 and (p.bias or p.accumulate_c) and p.a_dtype in HALVES:
        return False  # a product with a vector, which rounds before it adds
    if p.activation:
        # Of odd extents torch rounds before it activates: a third of gelu_tanh's values of 13 x 17 were others (H200, torch 2.11).
        even = p.n % 8 == 0 and p.k % 8 == 0 and p.alignment == 16
        return p.activation in _FUSED_ACTIVATIONS and not p.accumulate_c and p.a_dtype in HALVES and even
    return not (p.bias and p.accumulate_c)


def float32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b of two or three dimensions, its float32 sums unrounded; of wider types in their own."""
    product = torch.mm if a.dim() == 2 else torch.bmm
    return product(a, b) if a.dtype.itemsize > 2 else product(a, b, out_dtype=torch.float32)


def _operands(p: Any, t: Any, flat: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, K) and (K, N), or both with the batch."""
    if flat:
        return t.a.flatten(0, 1), t.b[0]
    return t.a, t.b if p.batched_b else t.b.expand(p.batch, p.k, p.n)


def _matmul(p: Any, sample: Any) -> Run:
    flat = p.batch == 1 or (not p.batched_b and folds(sample.a, sample.out, sample.c))
    fused = fuses(p) and (not p.activation or flat and not empty(p))
    # _addmm_activation wants a bias; a line of zeros stands in for none.
    lane = torch.zeros(p.n, dtype=sample.a.dtype, device=sample.a.device) if fused and p.activation and not p.bias else None

    def run(t: Any) -> Any:
        a, b = _operands(p, t, flat)
        out = t.out.flatten(0, 1) if flat else t.out
        if not fused:
            x = zeros(p, t) if empty(p) else float32_product(a, b).view((*t.out.shape[:-1], p.n))
            return _deliver(t, epilogue(p, t, x))
        if p.activation:  # without out=: another layout than a fresh one would end the fusion
            bias = at_16_bytes(t.bias) if lane is None else lane
            return _deliver(t, torch._addmm_activation(bias, a, b, use_gelu=_FUSED_ACTIVATIONS[p.activation]).view(t.out.shape))
        into: dict[str, Any] = {} if p.requires_grad else {"out": out}
        if p.bias or p.accumulate_c:
            addend = at_16_bytes(t.bias) if p.bias else t.c.flatten(0, 1) if flat else t.c
            add = torch.addmm if flat else torch.baddbmm
            value = add(addend, a, b, beta=1 if p.bias else t.beta, **into)
        else:
            value = (torch.mm if flat else torch.bmm)(a, b, **into)
        return value if p.requires_grad else None

    return run


def _deliver(t: Any, x: torch.Tensor) -> None:
    t.out.copy_(x)


def _scaled_mm(p: Any, sample: Any) -> Run:
    rows, out_dtype, blocks = p.batch * p.m, DTYPES[p.out_dtype].torch, p.scales in BLOCKS
    fused = not p.activation and not p.accumulate_c and (not p.bias or p.bias_dtype == p.out_dtype in HALVES) and p.out_dtype != "fp64"
    whole = -(-rows // _ROWS_OF_BLOCKS) * _ROWS_OF_BLOCKS if blocks else rows
    direct = fused and p.out_alignment == 16 and sample.out.is_contiguous() and whole == rows
    scales, fast, multiply = _scales_of(p, whole), p.accumulate == "fast" and not blocks, _product_of(p)

    def run(t: Any) -> None:
        if empty(p):
            return _deliver(t, epilogue(p, t, zeros(p, t)))
        a = _with_rows(t.a.reshape(rows, p.k), whole)
        if rows == 1:  # whose stride is never stepped over, and may be any number
            a = a.as_strided((whole, p.k), (p.k, 1))
        bias = at_16_bytes(t.bias) if fused and p.bias else None
        x = multiply(a, t.b[0], *scales(t), bias, out_dtype if fused else torch.float32, fast, t.out.view(rows, p.n) if direct else None)
        if not direct:
            x = x[:rows].view(t.out.shape[0], p.m, p.n)
            _deliver(t, x if fused else epilogue(p, t, x))
        return None

    return run


def _product_of(p: Any) -> Callable[..., torch.Tensor]:
    """By recipe. Of blocks of 128 x 128 cuBLASLt reads scales whose columns are a multiple of four apart. _scaled_mm takes no others than
    close ones, and multiplies by wrong scales where those are no such multiple (H200, torch 2.11): the newer interface takes them."""

    def scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, dtype: torch.dtype, fast: bool, out: Any) -> torch.Tensor:
        into = {} if out is None else {"out": out}
        return torch._scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast, **into)

    def newer(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, dtype: torch.dtype, fast: bool, out: Any) -> torch.Tensor:
        from torch.nn.functional import ScalingType, scaled_mm

        value = scaled_mm(a, b, scale_a, ScalingType.BlockWise1x128, scale_b, ScalingType.BlockWise128x128, bias=bias, output_dtype=dtype)
        return value if out is None else out.copy_(value)

    return newer if odd_blocks(p) else scaled_mm


def odd_blocks(p: Any) -> bool:
    return p.scales == "block_128x128" and -(-p.k // 128) % 4 != 0


def _with_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x with rows of no meaning behind its own."""
    if len(x) == rows:
        return x
    more = x.new_empty((rows, x.shape[1]))
    more[: len(x)].copy_(x)
    return more


def _scales_of(p: Any, whole: int) -> Callable[[Any], tuple[torch.Tensor, torch.Tensor]]:
    """scale_a and scale_b in the shapes and strides by which _scaled_mm tells recipes apart; ``whole``: rows of a."""
    rows, blocks = p.batch * p.m, -(-p.k // 128)

    def of_rows(t: Any) -> torch.Tensor:
        return rows_contiguous(_with_rows(t.scale_a.reshape(rows, blocks), whole))

    def of_blocks(t: Any) -> torch.Tensor:
        scale = t.scale_b[0]
        return rows_contiguous(_with_rows(scale, -(-blocks // 4) * 4) if odd_blocks(p) else scale)

    table: dict[str, Callable[[Any], tuple[torch.Tensor, torch.Tensor]]] = {
        "tensor": lambda t: (t.scale_a[0, 0], t.scale_b[0, 0, :1]),
        "row": lambda t: (row_scales(t.scale_a, rows).view(rows, 1), row_scales(t.scale_b, p.n).view(1, p.n)),
        "block_128x128": lambda t: (of_rows(t), of_blocks(t)),
        "block_1x128": lambda t: (of_rows(t), at_16_bytes(t.scale_b[0].contiguous())),
    }
    return table[p.scales]


def _for_tma(x: torch.Tensor, column_major: bool) -> torch.Tensor:
    """x, or where it overlaps itself or strides that nobody steps over are odd, a copy with rows of whole 16 bytes."""
    if column_major:
        return _for_tma(x.mT, False).mT
    unit, columns = 16 // x.element_size(), x.shape[-1]
    if x.stride(-1) == 1 and x.stride(-2) >= columns and x.stride(-2) % unit == 0 and x.data_ptr() % 16 == 0:
        return x
    room = x.new_empty((*x.shape[:-1], -(-columns // unit) * unit))[..., :columns]
    return room.copy_(x)


def _grouped_mm(p: Any, sample: Any) -> Run:
    rows_grouped, scaled = p.grouping == "rows", p.scales is not None

    def product(t: Any, a: torch.Tensor) -> torch.Tensor:
        b = _for_tma(t.b if rows_grouped else t.b[0], p.b_order == "col")
        ends = cut_ends(t.ends, p.m if rows_grouped else p.k)
        if not scaled:
            return torch._grouped_mm(a, b, offs=ends, out_dtype=torch.bfloat16)
        scale_b = at_16_bytes(t.scale_b.expand(p.batch, 1, p.n).reshape(p.batch, p.n).contiguous())
        return torch._scaled_grouped_mm(a, b, row_scales(t.scale_a.expand(1, p.m, 1), p.m), scale_b, offs=ends, out_dtype=torch.bfloat16,
                                        use_fast_accum=p.accumulate == "fast")

    def run(t: Any) -> Any:
        if p.requires_grad:  # rows of no group have neither a value nor a gradient; where() also lays out the result's gradient
            used = used_rows(p, t)[0]
            return torch.where(used, product(t, _for_tma(torch.where(used, t.a[0], 0), False)), 0)
        if p.batch == 0:
            return None
        value = zeros(p, t) if empty(p) else product(t, _for_tma(t.a[0], not rows_grouped))
        return write_rows(p, t, value) if rows_grouped else _deliver(t, value)

    return run


def _masked(p: Any, sample: Any) -> Run:
    def run(t: Any) -> None:
        write_rows(p, t, epilogue(p, t, zeros(p, t) if empty(p) else float32_product(t.a, t.b)))

    return run


PREPARE: dict[str, Callable[[Any, Any], Run]] = {
    "matmul": _matmul, "scaled_mm": _scaled_mm, "grouped_mm": _grouped_mm, "scaled_grouped_mm": _grouped_mm, "bmm": _masked,
}
