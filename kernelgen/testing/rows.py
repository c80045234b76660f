"""Checks of the row-wise kernels that the CPU and the GPU tests share."""

from __future__ import annotations

import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.testing.data import poisoned_empty, random_tensor, seed_of
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference


def check_rmsnorm(rows: int, width: int, dtype: torch.dtype, weight_dtype: torch.dtype, *, with_residual: bool, device: str) -> None:
    """One random problem against the float64 oracle: a poisoned output, the residual's new value, and out = x."""
    seed, what = seed_of(rows, width), f"{rows}x{width}"
    x = random_tensor((rows, width), dtype, seed=seed, scale=3, device=device)
    r = random_tensor((rows, width), dtype, seed=seed + 1, device=device)
    weight = random_tensor((width,), weight_dtype, seed=seed + 2, device=device)
    residual = r.clone() if with_residual else None
    exact = ref.rmsnorm(x, weight, 1e-5, residual=residual)
    plain = ref.rmsnorm(x, weight, 1e-5, residual=residual, compute_dtype=torch.float32)
    out = kernelgen.rmsnorm(x, weight, 1e-5, residual=residual, out=poisoned_empty((rows, width), dtype, device), backend="generated")
    if isinstance(exact, tuple) and isinstance(plain, tuple) and residual is not None:
        assert_close_to_reference(residual, exact[1], plain[1].to(dtype), what=f"{what} residual", seed=seed)
        exact, plain = exact[0], plain[0]
    assert isinstance(exact, torch.Tensor) and isinstance(plain, torch.Tensor)
    assert_close_to_reference(out, exact, plain.to(dtype), what=what, seed=seed)
    again = x.clone()
    kernelgen.rmsnorm(again, weight, 1e-5, residual=r.clone() if with_residual else None, out=again, backend="generated")
    assert_bits_equal(again, out, what=f"{what} in place")


def check_silu_and_mul(rows: int, width: int, dtype: torch.dtype, *, device: str) -> None:
    """One random problem against the float64 oracle, into a poisoned output."""
    seed = seed_of(rows, width)
    x = random_tensor((rows, 2 * width), dtype, seed=seed, scale=8, device=device)
    out = kernelgen.silu_and_mul(x, out=poisoned_empty((rows, width), dtype, device), backend="generated")
    plain = ref.silu_and_mul(x, compute_dtype=torch.float32).to(dtype)
    assert_close_to_reference(out, ref.silu_and_mul(x), plain, what=f"{rows}x{width}", seed=seed)
