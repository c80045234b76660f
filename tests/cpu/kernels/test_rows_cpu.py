"""norm/rmsnorm_cpu and activation/silu_and_mul_cpu through the public calls, against the reference."""

from __future__ import annotations

import pytest
import torch

import kernelgen
from kernelgen.testing.data import layouts, padded_rows, random_tensor
from kernelgen.testing.rows import check_rmsnorm, check_silu_and_mul
from kernelgen.testing.tolerance import assert_bits_equal

F32, F64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
# Around the vector lengths, the four chains of the sum, and wide enough for several tasks.
WIDTHS = (1, 7, 16, 64, 65, 1000, 5001)


@pytest.mark.parametrize("dtype, weight_dtype, with_residual", (
    (F32, F32, False), (BF16, BF16, False), (BF16, F32, True), (FP16, FP16, True), (F64, F64, True),
), ids=str)
def test_rmsnorm(dtype: torch.dtype, weight_dtype: torch.dtype, with_residual: bool) -> None:
    for width in WIDTHS:
        for rows in (0, 1, 13):
            check_rmsnorm(rows, width, dtype, weight_dtype, with_residual=with_residual, device="cpu")


def test_rmsnorm_layouts_and_leading_dimensions() -> None:
    x, weight = random_tensor((6, 100), BF16, seed=1), random_tensor((100,), BF16, seed=2)
    expected = kernelgen.rmsnorm(x, weight, backend="generated")
    for name, view in layouts(x).items():
        assert_bits_equal(kernelgen.rmsnorm(view, weight, backend="generated"), expected, what=name)
        out, residual = padded_rows(torch.zeros_like(x), 3), padded_rows(torch.zeros_like(x), 5)
        kernelgen.rmsnorm(view, weight, residual=residual, out=out, backend="generated")
        assert_bits_equal(out, expected, what=f"{name} to padded rows")
        assert_bits_equal(residual, x, what=f"{name} residual")
    assert_bits_equal(kernelgen.rmsnorm(x.view(2, 3, 100), weight, backend="generated"), expected.view(2, 3, 100), what="3-D")


def test_rmsnorm_eps_is_this_call_s() -> None:
    x, weight = torch.full((2, 8), 1e-3), torch.ones(8)
    for eps in (1e-6, 1.0, 1e-6):
        got = kernelgen.rmsnorm(x, weight, eps, backend="generated")
        torch.testing.assert_close(got, torch.full((2, 8), 1e-3 / (1e-6 + eps) ** 0.5))


@pytest.mark.parametrize("dtype", (F32, BF16, FP16, F64), ids=str)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    for width in (*WIDTHS, 40000):
        for rows in (0, 1, 9):
            check_silu_and_mul(rows, width, dtype, device="cpu")
    x = random_tensor((5, 66), dtype, seed=1)
    expected = kernelgen.silu_and_mul(x, backend="generated")
    for name, view in layouts(x).items():
        out = padded_rows(torch.zeros(5, 33, dtype=dtype), 1)
        kernelgen.silu_and_mul(view, out=out, backend="generated")
        assert_bits_equal(out, expected, what=name)


def test_silu_at_infinities() -> None:
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([inf, -inf, nan, -1e30, -88.0, 0.0, 1e30])
    y = kernelgen.silu_and_mul(torch.cat([gate, torch.ones(7)])[None], backend="generated")[0]
    assert y[0] == inf and y[1] == 0 and y[2].isnan() and y[3] == 0 and y[4].abs() < 1e-30 and y[5] == 0 and y[6] == 1e30
