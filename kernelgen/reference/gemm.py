"""Matrix products: plain, batched, grouped and masked, with the whole epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernelgen.errors import DtypeError, ShapeError
from kernelgen.reference.activation import GATED, PLAIN, apply_activation
from kernelgen.reference.checks import (
    FP8_DTYPES,
    as_index_list,
    check_compute_dtype,
    check_float,
    check_option,
    check_rank,
    check_same_device,
    check_shape,
    is_fp8,
    to_compute,
)
from kernelgen.reference.quant import RECIPES, Scale, dequantize, expand_scale_a, expand_scale_b, quantize_fp8
from kernelgen.reference.weights import Quantized

Weight = torch.Tensor | Quantized
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
OUT_SCALES = (None, *RECIPES[:3])


def operands(a: torch.Tensor, b: Weight, scale_a: Scale | None, scale_b: Scale | None,
             compute_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands dequantised in the compute dtype; a packed weight ``(.., N, K)`` becomes ``b (.., K, N)``."""
    check_compute_dtype(compute_dtype)
    if not isinstance(b, torch.Tensor):
        check_float(a=a)
        if scale_b is not None:
            raise DtypeError("scale_b: given with a packed weight, expected None; the weight carries its scales")
        check_same_device(a=a, b=b.codes)
        value_b = b.dequantize(compute_dtype).mT
    else:
        check_float(a=a, b=b)
        check_same_device(a=a, b=b)
        if a.dtype != b.dtype and not (is_fp8(a) and is_fp8(b)):
            raise DtypeError(f"got a {a.dtype} and b {b.dtype}, expected one dtype or two fp8 ones; convert "
                             "explicitly, nothing is cast silently")
        full_b = None if scale_b is None else expand_scale_b("scale_b", scale_b, b.shape, b.device, compute_dtype)
        value_b = dequantize(b, full_b, compute_dtype)
    full_a = None if scale_a is None else expand_scale_a("scale_a", scale_a, a.shape, a.device, compute_dtype)
    return dequantize(a, full_a, compute_dtype), value_b


def epilogue(product: torch.Tensor, *, bias: torch.Tensor | None, activation: str | None, gate_up: str,
             c: torch.Tensor | None, beta: float, compute_dtype: torch.dtype) -> torch.Tensor:
    """``activation(product + bias) + beta * c``; c is not read where beta is 0, as in BLAS.

    c comes after the activation, so that it serves both as a residual and as an accumulator.
    """
    check_float(bias=bias, c=c)
    if bias is not None:
        product = product + to_compute(bias, compute_dtype)
    out = apply_activation(product, activation, gate_up=gate_up)
    if c is not None:
        check_shape("c", c, out.shape, "the shape of the output")
        if beta != 0:
            out = out + beta * to_compute(c, compute_dtype)
    return out


def finish(out: torch.Tensor, out_dtype: torch.dtype | None, out_scale: str | None) -> Result:
    """The result in the compute dtype, or fp8 codes and their scale where ``out_scale`` asks for them."""
    check_option("out_scale", out_scale, OUT_SCALES)
    if out_scale is None:
        return out
    dtype = torch.float8_e4m3fn if out_dtype is None else out_dtype
    check_option("out_dtype with out_scale", dtype, FP8_DTYPES)
    return quantize_fp8(out, out_scale, dtype=dtype, compute_dtype=out.dtype)


def check_epilogue(activation: str | None, accumulate: str) -> None:
    check_option("activation", activation, (None, "none", *PLAIN, *GATED))
    check_option("accumulate", accumulate, ("float32", "fast"))


def gemm(a: torch.Tensor, b: Weight, *, bias: torch.Tensor | None = None, activation: str | None = None,
         gate_up: str = "gate_first", c: torch.Tensor | None = None, beta: float = 1.0, scale_a: Scale | None = None,
         scale_b: Scale | None = None, accumulate: str = "float32", out_dtype: torch.dtype | None = None,
         out_scale: str | None = None, compute_dtype: torch.dtype = torch.float64) -> Result:
    """``activation(dequant(a) @ dequant(b) + bias) + beta * c``.

    ``a (.., M, K)`` with ``b (K, N)``, or batched ``(.., M, K) @ (.., K, N)`` with equal leading dimensions;
    ``bias (N)``; ``c``: the shape of the output, added after the activation, not read where beta is 0. A gated activation
    halves N, see :mod:`kernelgen.reference.activation`. ``b`` may be a packed weight of ``(N, K)``. K = 0 gives the
    epilogue of zeros.

    fp8 scales, float32: ``scale_a`` scalar, (M, 1), (M, ceil(K/128)); ``scale_b`` scalar, (1, N), (ceil(K/128),
    ceil(N/128)), (ceil(K/128), N); leading dimensions as the operand's or none. ``accumulate`` changes no exact value.
    ``out_dtype`` only names the fp8 type of a quantised result: with ``out_scale`` ("tensor", "row", "block_1x128")
    the result is (codes, scale) as from :func:`~kernelgen.reference.quant.quantize_fp8`. Raises ShapeError,
    DtypeError, DeviceError, SettingsError.
    """
    check_epilogue(activation, accumulate)
    check_rank("a", a, tuple(range(2, 9)), "(.., M, K)")
    value_a, value_b = operands(a, b, scale_a, scale_b, compute_dtype)
    if value_b.dim() < 2 or value_a.shape[-1] != value_b.shape[-2] or (
            value_b.dim() > 2 and value_a.shape[:-2] != value_b.shape[:-2]):
        raise ShapeError(f"got a {tuple(a.shape)} and b {tuple(value_b.shape)}, expected (.., M, K) and (K, N) or "
                         "(.., K, N) with the same leading dimensions")
    if bias is not None:
        check_shape("bias", bias, value_b.shape[-1:], "(N)")
    check_same_device(a=a, bias=bias, c=c)
    out = epilogue(value_a @ value_b, bias=bias, activation=activation, gate_up=gate_up, c=c, beta=beta,
                   compute_dtype=compute_dtype)
    return finish(out, out_dtype, out_scale)


def grouped_gemm(a: torch.Tensor, b: Weight, offsets: torch.Tensor | Sequence[int], *,
                 bias: torch.Tensor | None = None, activation: str | None = None, gate_up: str = "gate_first",
                 c: torch.Tensor | None = None, beta: float = 1.0, scale_a: Scale | None = None,
                 scale_b: Scale | None = None, accumulate: str = "float32", out_dtype: torch.dtype | None = None,
                 out_scale: str | None = None, initial: torch.Tensor | None = None,
                 compute_dtype: torch.dtype = torch.float64) -> Result:
    """One product per group; ``offsets (E)`` are end offsets, never falling, as in ``torch._grouped_mm``.

    2-D x 3-D: rows are grouped, ``a (T, K)``, ``b (E, K, N)``, to ``(T, N)``; row r of group e is ``a[r] @ b[e]``. Rows
    past the last offset belong to no group: they are never read, and in the result they are ``initial``'s (what a
    caller's ``out`` held before) or NaN. 2-D x 2-D: K is grouped, ``a (M, T)``, ``b (T, N)``, to ``(E, M, N)``; an
    empty group gives the epilogue of zeros, columns past the last offset are never read.

    ``bias``: (N) or (E, N). ``c``: shape of the result. Scales as in :func:`gemm` for the whole
    of a and of b; ``scale_b`` of a 3-D b also (E); blocks along a grouped K count from its start, not from the
    group's. Otherwise as :func:`gemm`.
    """
    check_epilogue(activation, accumulate)
    check_rank("a", a, (2,), "(T, K) or (M, T)")
    value_a, value_b = operands(a, b, scale_a, scale_b, compute_dtype)
    by_rows = value_b.dim() == 3
    total = a.shape[0] if by_rows else a.shape[1]
    if value_b.dim() not in (2, 3) or value_a.shape[1] != value_b.shape[-2]:
        raise ShapeError(f"got a {tuple(a.shape)} and b {tuple(value_b.shape)}, expected (T, K) and (E, K, N), or "
                         "(M, T) and (T, N)")
    ends = _end_offsets(offsets, total, value_b.shape[0] if by_rows else None)
    groups, columns = len(ends), value_b.shape[-1]
    if bias is not None and tuple(bias.shape) not in ((columns,), (groups, columns)):
        raise ShapeError(f"bias: got shape {tuple(bias.shape)}, expected (N) = ({columns},) or (E, N) = "
                         f"({groups}, {columns})")
    halved = columns // 2 if activation in GATED else columns
    if c is not None:
        check_shape("c", c, (total, halved) if by_rows else (groups, a.shape[0], halved), "the shape of the result")
    check_same_device(a=a, bias=bias, c=c, initial=initial)
    parts = []
    for e, (start, end) in enumerate(zip([0, *ends], ends)):
        left, right = ((value_a[start:end], value_b[e]) if by_rows else
                       (value_a[:, start:end], value_b[start:end]))
        addend = None if c is None else c[start:end] if by_rows else c[e]
        row = bias[e] if bias is not None and bias.dim() == 2 else bias
        parts.append(epilogue(left @ right, bias=row, activation=activation, gate_up=gate_up, c=addend, beta=beta,
                              compute_dtype=compute_dtype))
    if not by_rows:
        return finish(torch.stack(parts) if parts else value_a.new_zeros(0, a.shape[0], halved), out_dtype, out_scale)
    used = torch.arange(total, device=a.device) < (ends[-1] if ends else 0)
    return _finish_rows(parts, used, initial, (total, halved), value_a, out_dtype, out_scale)


def grouped_gemm_masked(a: torch.Tensor, b: Weight, counts: torch.Tensor | Sequence[int], *,
                        bias: torch.Tensor | None = None, activation: str | None = None, gate_up: str = "gate_first",
                        c: torch.Tensor | None = None, beta: float = 1.0, scale_a: Scale | None = None,
                        scale_b: Scale | None = None, accumulate: str = "float32",
                        out_dtype: torch.dtype | None = None, out_scale: str | None = None,
                        initial: torch.Tensor | None = None, compute_dtype: torch.dtype = torch.float64) -> Result:
    """``a (E, Mmax, K) @ b (E, K, N)`` for the first ``counts[e]`` rows of each e, to ``(E, Mmax, N)``.

    The other rows are never read, and in the result they are ``initial``'s or NaN. ``bias``: (N) or (E, N).
    ``scale_b`` also (E). Otherwise as :func:`gemm`.
    """
    check_epilogue(activation, accumulate)
    check_rank("a", a, (3,), "(E, Mmax, K)")
    value_a, value_b = operands(a, b, scale_a, scale_b, compute_dtype)
    if value_b.dim() != 3 or value_a.shape[0] != value_b.shape[0] or value_a.shape[2] != value_b.shape[1]:
        raise ShapeError(f"got a {tuple(a.shape)} and b {tuple(value_b.shape)}, expected (E, Mmax, K) and (E, K, N)")
    (groups, rows, _), columns = a.shape, value_b.shape[2]
    lengths = as_index_list("counts", counts)
    if len(lengths) != groups or any(not 0 <= n <= rows for n in lengths):
        raise ShapeError(f"counts: got {lengths}, expected {groups} values of 0 .. {rows}")
    if bias is not None and tuple(bias.shape) not in ((columns,), (groups, columns)):
        raise ShapeError(f"bias: got shape {tuple(bias.shape)}, expected (N) = ({columns},) or (E, N) = "
                         f"({groups}, {columns})")
    if c is not None:
        check_shape("c", c, (groups, rows, columns // 2 if activation in GATED else columns), "the shape of the result")
    check_same_device(a=a, bias=bias, c=c, initial=initial)
    parts = []
    for e, n in enumerate(lengths):
        row = bias[e] if bias is not None and bias.dim() == 2 else bias
        parts.append(epilogue(value_a[e, :n] @ value_b[e], bias=row, activation=activation, gate_up=gate_up,
                              c=None if c is None else c[e, :n], beta=beta, compute_dtype=compute_dtype))
    used = torch.arange(rows, device=a.device) < torch.tensor(lengths, device=a.device).view(-1, 1)
    halved = columns // 2 if activation in GATED else columns
    return _finish_rows(parts, used, initial, (groups, rows, halved), value_a, out_dtype, out_scale)


def _finish_rows(parts: list[torch.Tensor], used: torch.Tensor, initial: torch.Tensor | None, shape: tuple[int, ...],
                 like: torch.Tensor, out_dtype: torch.dtype | None, out_scale: str | None) -> Result:
    """The rows of all groups in their places, ``used``; the others are ``initial``'s or NaN, and take no part in quantising."""
    value = finish(torch.cat(parts) if parts else like.new_zeros(0, shape[-1]), out_dtype, out_scale)
    if not isinstance(value, tuple):
        full = _unwritten(initial, shape, like).clone()
        full[used] = value
        return full
    codes, scale = value
    full_codes = torch.full(shape, float("nan"), device=like.device).to(codes.dtype)
    full_codes.view(torch.uint8)[used] = codes.view(torch.uint8)
    if out_scale == "tensor":
        return full_codes, scale
    full_scale = scale.new_full((*shape[:-1], scale.shape[-1]), float("nan"))
    full_scale[used] = scale
    return full_codes, full_scale


def _end_offsets(offsets: torch.Tensor | Sequence[int], total: int, groups: int | None) -> list[int]:
    ends = as_index_list("offsets", offsets)
    if groups is not None and len(ends) != groups:
        raise ShapeError(f"offsets: got {len(ends)} values, expected one end offset for each of {groups} groups")
    if any(x > y for x, y in zip([0, *ends], [*ends, total])):
        raise ShapeError(f"offsets: got {ends}, expected end offsets that never fall, from 0 up to {total}")
    return ends


def _unwritten(initial: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """What rows outside any group hold: the caller's former content, or NaN so that comparing them fails."""
    if initial is None:
        return like.new_full(shape, float("nan"))
    check_shape("initial", initial, shape, "the shape of the result")
    return to_compute(initial, like.dtype)


def as_weight(name: str, w: Any, scale: Scale | None, compute_dtype: torch.dtype) -> torch.Tensor:
    """A stack of expert weights ``(E, N, K)`` dequantised; its scale is scalar, (E), (E, N, 1), (E, N) or blocks
    ``(E, ceil(N/128), ceil(K/128))``. Raises ShapeError.
    """
    if not isinstance(w, torch.Tensor):
        if scale is not None:
            raise DtypeError(f"{name}: got a scale beside a packed weight, expected None")
        return w.dequantize(compute_dtype)
    check_float(**{name: w})
    check_rank(name, w, (3,), "(E, N, K)")
    if scale is None:
        return to_compute(w, compute_dtype)
    if isinstance(scale, torch.Tensor) and tuple(scale.shape) == tuple(w.shape[:2]):
        scale = scale.unsqueeze(-1)
    if isinstance(scale, torch.Tensor) and scale.dim() >= 2:
        # b of a product is the transpose of a stored weight, and so is its scale.
        scale = scale.mT
    full = expand_scale_b(f"scale of {name}", scale, w.mT.shape, w.device, compute_dtype)
    return dequantize(w, full if full.dim() < 2 else full.mT, compute_dtype)
