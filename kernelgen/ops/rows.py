"""rmsnorm and silu_and_mul."""

from __future__ import annotations

from typing import Any

import torch

from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import choose, prepare
from kernelgen.dtypes import dtype_name
from kernelgen.errors import LayoutError, SettingsError, ShapeError
from kernelgen.guard import address_of, check_backend, check_required, needs_torch, operator, record, through_torch
from kernelgen.library.written import wrote
from kernelgen.ops.checks import (
    check_apart,
    check_last_contiguous,
    check_no_output_with_grad,
    check_output,
    check_tensors,
    number,
    shape_text,
)
from kernelgen.problems.common import alignment_of
from kernelgen.problems.rows import RmsNormProblem, SiluAndMulProblem
from kernelgen.targets import Target, target_of
from kernelgen.tensors import RmsNormTensors, SiluAndMulTensors


@operator("rmsnorm")
def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None, backend: str = "auto",
) -> torch.Tensor:
    """x / sqrt(mean(x ** 2) + eps) * weight over the last dimension, computed in float32 (Zhang and Sennrich 2019).

    x (.., H), weight (H). With ``residual`` (shape of x) x + residual is written back to residual and normalised.
    Returns (.., H) in x's dtype. ``out`` may be x itself, and must not overlap anything else.
    Raises ShapeError, DtypeError, DeviceError, LayoutError, SettingsError, NoBackendError.
    """
    if through_torch(x, weight):
        recorded: torch.Tensor = record("rmsnorm", locals())
        return recorded
    check_backend(backend)
    problem, tensors = _describe_rmsnorm(x, weight, eps, residual, out)
    _, run = prepare(problem, target_of(x.device), backend, tensors)
    value = run(tensors)
    if residual is not None:
        wrote(residual)
    if out is None:
        return (tensors.out if value is None else value).view(x.shape)
    wrote(out)
    return out


@operator("silu_and_mul")
def silu_and_mul(x: torch.Tensor, *, out: torch.Tensor | None = None, backend: str = "auto") -> torch.Tensor:
    """silu(x[.., :I]) * x[.., I:] for x (.., 2 I), computed in float32. Returns (.., I) in x's dtype.

    ``out`` may be either half of x, and must not overlap it in another way.
    Raises ShapeError for an odd last dimension, DtypeError, DeviceError, LayoutError, NoBackendError.
    """
    if through_torch(x):
        recorded: torch.Tensor = record("silu_and_mul", locals())
        return recorded
    check_backend(backend)
    problem, tensors = _describe_silu(x, out)
    _, run = prepare(problem, target_of(x.device), backend, tensors)
    value = run(tensors)
    if out is None:
        return (tensors.out if value is None else value).view(*x.shape[:-1], problem.width)
    wrote(out)
    return out


def explain_rmsnorm(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for an rmsnorm call, without running it."""
    values = dict(weight=None, eps=1e-6, residual=None, out=None) | dict(zip(("x", "weight", "eps"), args)) | kwargs
    if values["weight"] is None:
        values["weight"] = torch.empty(values["x"].shape[-1], dtype=values["x"].dtype, device=values["x"].device)
    return choose(_describe_rmsnorm(**values)[0], target, backend, live=live)


def explain_silu_and_mul(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for a silu_and_mul call, without running it."""
    values = dict(out=None) | dict(zip(("x",), args)) | kwargs
    return choose(_describe_silu(**values)[0], target, backend, live=live)


def _rows(name: str, t: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    """(.., W) as (rows, W); where the leading dimensions do not fold, a copy if that may be made."""
    if t.dim() == 0:
        raise ShapeError(f"{name}: got a scalar, expected (.., H)")
    check_last_contiguous(**{name: t})
    if t.dim() == 2:
        return t
    try:
        return t.view(-1, t.shape[-1]) if t.numel() else t.reshape(t.shape[:-1].numel(), t.shape[-1])
    except RuntimeError as error:
        if copy:
            return t.reshape(-1, t.shape[-1])
        raise LayoutError(
            f"{name}: got strides {t.stride()} of {shape_text(t)}, whose leading dimensions do not fold into one; "
            f"call {name}.contiguous()"
        ) from error


def _output(x: torch.Tensor, out: torch.Tensor | None, rows: int, width: int, **read: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return torch.empty((rows, width), dtype=x.dtype, device=x.device)
    check_output("out", out, (*x.shape[:-1], width), x.dtype, x.device)
    check_apart("out", out, x=None if _in_place(out, x) else x, **read)
    return _rows("out", out)


def _in_place(out: torch.Tensor, x: torch.Tensor) -> bool:
    """Every element lies where one is that it alone is made of: out is x itself, or one half of its columns."""
    between = address_of(out) - address_of(x)
    return out.stride()[:-1] == x.stride()[:-1] and between in (0, (x.shape[-1] - out.shape[-1]) * x.element_size())


def _describe_rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, out: torch.Tensor | None,
) -> tuple[RmsNormProblem, RmsNormTensors]:
    check_required(x=x, weight=weight)
    check_tensors(x=x, weight=weight, residual=residual, out=out)
    eps = number("eps", eps)
    if not eps >= 0:
        raise SettingsError(f"eps: got {eps}, expected a number >= 0")
    if residual is not None and out is not None and residual.data_ptr() == out.data_ptr() != 0:
        raise LayoutError("got one tensor as residual and out, expected two: both are written; leave out= away")
    flat = _rows("x", x, copy=True)
    rows, width = flat.shape
    grad = needs_torch(x, weight, residual)
    if grad:
        check_no_output_with_grad(out=out, residual=residual)
    if tuple(weight.shape) != (width,):
        raise ShapeError(f"weight: got shape {shape_text(weight)}, expected ({width}), the last dimension of x")
    check_last_contiguous(weight=weight)
    if residual is not None:
        check_output("residual", residual, tuple(x.shape), x.dtype, x.device)
        residual = _rows("residual", residual)
    result = _output(x, out, rows, width, weight=weight, residual=residual)
    problem = RmsNormProblem(
        rows, width, dtype_name(x.dtype), dtype_name(weight.dtype), residual is not None, alignment_of(flat, weight, residual, result),
        grad)
    return problem, RmsNormTensors(flat, weight, result, residual, float(eps))


def _describe_silu(x: torch.Tensor, out: torch.Tensor | None) -> tuple[SiluAndMulProblem, SiluAndMulTensors]:
    check_required(x=x)
    check_tensors(x=x, out=out)
    flat = _rows("x", x, copy=True)
    rows, double = flat.shape
    grad = needs_torch(x)
    if grad:
        check_no_output_with_grad(out=out)
    if double % 2:
        raise ShapeError(f"x: got {double} in the last dimension of {shape_text(x)}, expected an even number (gate and up)")
    result = _output(x, out, rows, double // 2)
    problem = SiluAndMulProblem(rows, double // 2, dtype_name(x.dtype), alignment_of(flat, result), grad)
    return problem, SiluAndMulTensors(flat, result)
