"""One check of quantize_fp8 through the public call, for tests of every backend and device."""

from __future__ import annotations

import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.testing.data import FP8_NAN, poison_
from kernelgen.testing.gemm import fp8_values
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference


def check_quantize(
    x: torch.Tensor, recipe: str, *, what: str, seed: int, code: torch.dtype = torch.float8_e4m3fn, activation: str | None = None,
    gate_up: str = "gate_first", pad: int = 0, columns_first: bool = False,
) -> None:
    """Codes and scales into poisoned outputs. Without an activation every bit is that of float32 arithmetic; with one, values
    may round to the neighbouring code where the activation is off by an ulp, so what the codes mean is compared.

    pad            codes behind every row, which must stay
    columns_first  the scale is written with its rows contiguous
    """
    near = ref.quantize_fp8(x, recipe, dtype=code, activation=activation, gate_up=gate_up, compute_dtype=torch.float32)
    buffer = poison_(torch.empty(*near[0].shape[:-1], near[0].shape[-1] + pad, dtype=code, device=x.device))
    scale = poison_(torch.empty_like(near[1]))
    if columns_first and scale.dim():
        scale = scale.mT.contiguous().mT
    out = (buffer[..., : near[0].shape[-1]], scale)
    got = kernelgen.quantize_fp8(x, recipe, dtype=code, activation=activation, gate_up=gate_up, out=out, backend="generated")
    assert got[0] is out[0] and got[1] is out[1], what
    if pad and not bool((buffer[..., -pad:].view(torch.uint8) == FP8_NAN).all()):
        raise AssertionError(f"{what}: wrote behind the rows of the codes")
    if activation is None:
        assert_bits_equal(got[1].contiguous(), near[1], what=f"{what} scale")
        assert_bits_equal(got[0].contiguous().view(torch.uint8), near[0].view(torch.uint8), what=f"{what} codes")
        return
    torch.testing.assert_close(got[1], near[1], rtol=1e-5, atol=0)
    exact = ref.apply_activation(x.double(), activation, gate_up=gate_up)
    assert_close_to_reference(fp8_values(*got, rows_in_blocks=recipe == "block_128x128"), exact,
                              fp8_values(*near, rows_in_blocks=recipe == "block_128x128"), what=what, seed=seed)
