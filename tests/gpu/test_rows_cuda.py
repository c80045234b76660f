"""norm/rmsnorm_cuda and activation/silu_and_mul_cuda through the public calls, against the reference."""

from __future__ import annotations

import pytest
import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.testing.data import layouts, padded_rows, random_tensor
from kernelgen.testing.rows import check_rmsnorm, check_silu_and_mul
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CUDA = "cuda"
# One per config: a warp per row, blocks of 128 to 1024 threads, rows kept in registers or read twice, scalar access.
WIDTHS = (1, 7, 8, 250, 256, 1000, 1001, 2048, 4096, 8200, 16384, 40000, 131072)


@pytest.mark.parametrize("dtype, weight_dtype, with_residual", (
    (F32, F32, False), (BF16, BF16, False), (BF16, F32, True), (FP16, FP16, True),
), ids=str)
def test_rmsnorm(dtype: torch.dtype, weight_dtype: torch.dtype, with_residual: bool) -> None:
    for width in WIDTHS:
        for rows in (0, 1, 13):
            check_rmsnorm(rows, width, dtype, weight_dtype, with_residual=with_residual, device=CUDA)


def test_rmsnorm_layouts() -> None:
    x, weight = random_tensor((6, 104), BF16, seed=1, device=CUDA), random_tensor((104,), BF16, seed=2, device=CUDA)
    exact, plain = ref.rmsnorm(x, weight), ref.rmsnorm(x, weight, compute_dtype=F32).to(BF16)
    for name, view in layouts(x).items():
        out, residual = padded_rows(torch.zeros_like(x), 3), padded_rows(torch.zeros_like(x), 5)
        kernelgen.rmsnorm(view, weight, residual=residual, out=out, backend="generated")
        assert_close_to_reference(out, exact, plain, what=name, seed=1)
        assert_bits_equal(residual, x, what=f"{name} residual")


@pytest.mark.parametrize("dtype", (F32, BF16, FP16), ids=str)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    for width in WIDTHS:
        for rows in (0, 1, 70):
            check_silu_and_mul(rows, width, dtype, device=CUDA)
    x = random_tensor((5, 208), dtype, seed=1, device=CUDA)
    expected = kernelgen.silu_and_mul(x, backend="generated")
    for name, view in layouts(x).items():
        out = padded_rows(torch.zeros(5, 104, dtype=dtype, device=CUDA), 1)
        kernelgen.silu_and_mul(view, out=out, backend="generated")
        assert_bits_equal(out, expected, what=name)


def test_silu_at_infinities() -> None:
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([inf, -inf, nan, -1e30, -88.0, 0.0, 1e30, 2.0], device=CUDA)
    y = kernelgen.silu_and_mul(torch.cat([gate, torch.ones(8, device=CUDA)])[None], backend="generated")[0]
    assert y[0] == inf and y[1] == 0 and y[2].isnan() and y[3] == 0 and y[4].abs() < 1e-30 and y[5] == 0 and y[6] == 1e30
