"""rmsnorm and silu_and_mul."""

from __future__ import annotations

import torch

from kernelgen.reference.activation import apply_activation
from kernelgen.reference.checks import check_compute_dtype, check_float, check_same_device, check_shape, to_compute


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, residual: torch.Tensor | None = None,
            compute_dtype: torch.dtype = torch.float64) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension (Zhang and Sennrich 2019).

    ``x (.., H)``, ``weight (H)``. With ``residual`` (shape of x) the norm is taken of ``x + residual``, and that sum is
    returned as a second result. Raises ShapeError, DtypeError, DeviceError.
    """
    check_compute_dtype(compute_dtype)
    check_float(x=x, weight=weight, residual=residual)
    check_same_device(x=x, weight=weight, residual=residual)
    check_shape("weight", weight, x.shape[-1:], "(H)")
    value = to_compute(x, compute_dtype)
    if residual is not None:
        check_shape("residual", residual, x.shape, "the shape of x")
        value = value + to_compute(residual, compute_dtype)
    out = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * to_compute(weight, compute_dtype)
    return out if residual is None else (out, value)


def silu_and_mul(x: torch.Tensor, *, compute_dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """``silu(x[.., :I]) * x[.., I:]`` of ``x (.., 2I)``. Raises ShapeError for an odd last dimension."""
    check_compute_dtype(compute_dtype)
    check_float(x=x)
    return apply_activation(to_compute(x, compute_dtype), "swiglu")
