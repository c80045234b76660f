"""One check of a matrix product through the public call, for tests of every backend and device."""

from __future__ import annotations

from typing import Any

import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.testing.data import poison_, random_tensor
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference


def operands(
    m: int, n: int, k: int, dtype: torch.dtype, *, seed: int, device: str = "cpu", batch: int | None = None,
    batched_b: bool = False, order: str = "rr", pad: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """a (batch, m, k) and b (k, n), or (batch, k, n). ``order``: "r" or "c" for each; ``pad`` poisoned elements between
    stored rows, so that 1, 2 and 4 leave an alignment of so many elements.
    """

    def make(shape: tuple[int, ...], kind: str, seed: int) -> torch.Tensor:
        x = random_tensor(shape, dtype, seed=seed, device=device)
        if kind == "c":
            x = x.mT
        buffer = poison_(torch.empty(*x.shape[:-1], x.shape[-1] + pad, dtype=dtype, device=device))[..., : x.shape[-1]]
        buffer.copy_(x)
        return buffer.mT if kind == "c" else buffer

    lead = () if batch is None else (batch,)
    return make((*lead, m, k), order[0], seed), make((*(lead if batched_b else ()), k, n), order[1], seed + 1)


def check_gemm(
    a: torch.Tensor, b: torch.Tensor, *, seed: int, what: str, out_dtype: torch.dtype | None = None, out_pad: int = 0,
    c: torch.Tensor | None = None, beta: float = 1.0, **features: Any,
) -> torch.Tensor:
    """Run twice into poisoned outputs, compare with the float64 reference and with itself. Returns the result.

    Nothing of the buffer around the output may change.
    """
    dtype = out_dtype or a.dtype
    exact, plain = (ref.gemm(a, b, compute_dtype=kind, **features) for kind in (torch.float64, torch.float32))
    if c is not None and beta != 0:
        exact, plain = (x + beta * c.to(x.dtype) for x in (exact, plain))
    results = []
    for _ in range(2):
        buffer = poison_(torch.empty(*exact.shape[:-1], exact.shape[-1] + out_pad, dtype=dtype, device=a.device))
        out = buffer[..., : exact.shape[-1]]
        got = kernelgen.gemm(a, b, out=out, c=c, beta=beta, backend="generated", out_dtype=out_dtype, **features)
        assert got.data_ptr() == out.data_ptr() and got.shape == exact.shape, what
        if out_pad and not bool(buffer[..., exact.shape[-1]:].isnan().all()):
            raise AssertionError(f"{what}: wrote behind the rows of out")
        results.append(out)
    assert_bits_equal(results[1], results[0], what=f"{what}, second run")
    assert_close_to_reference(results[0], exact, plain.to(dtype), what=what, seed=seed)
    return results[0]
