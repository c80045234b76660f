"""Quantisation calls without the public op, for the tests of one kernel on a device or on what stands in for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernelgen import reference
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.problems.common import alignment_of
from kernelgen.problems.quantize import QuantizeProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import QuantizeTensors
from kernelgen.testing.data import padded_rows, poisoned_empty, random_tensor, seed_of
from kernelgen.testing.tolerance import assert_bits_equal


@dataclass(frozen=True)
class Case:
    """``shape`` of the codes, (rows, width) or (batch, rows, width); ``pad``: poisoned elements behind every row of x."""

    recipe: str
    shape: tuple[int, ...]
    dtype: str = "bf16"
    code_dtype: str = "e4m3"
    activation: str | None = None
    gate_up: str = "gate_first"
    pad: int = 0
    special: tuple[float, ...] = ()  # put into some elements
    scale: float = 3.0               # of the random values; rows differ by up to 2^8 beside it

    @property
    def seed(self) -> int:
        return seed_of(self)


CASES = {
    "tensor": Case("tensor", (37, 1000)),
    "tensor narrow fp32": Case("tensor", (2, 50, 3), "fp32", "e5m2", pad=1),
    "tensor empty": Case("tensor", (0, 16)),
    "row": Case("row", (9, 264)),
    "row wide fp16": Case("row", (3, 4104), "fp16", activation="relu"),
    "row odd": Case("row", (2, 5, 77), "fp32", pad=1),
    "row without columns": Case("row", (4, 0)),
    "block": Case("block_1x128", (21, 1024)),
    "block swiglu": Case("block_1x128", (5, 328), activation="swiglu"),
    "block odd halves": Case("block_1x128", (5, 131), activation="geglu", gate_up="up_first"),
    "block interleaved": Case("block_1x128", (2, 3, 136), "fp16", "e5m2", activation="swiglu", gate_up="interleaved"),
    "square": Case("block_128x128", (2, 200, 264)),
    "square fp32 odd": Case("block_128x128", (129, 127), "fp32", pad=3),
    "special": Case("block_1x128", (6, 256), "fp32", special=(float("nan"), float("inf"), 0.0)),
    "tiny": Case("row", (4, 40), "fp32", scale=1e-38),
}


def input_of(case: Case, device: torch.device | str = "cpu") -> torch.Tensor:
    """x (.., M, K or 2 K): a block of zeros in the first row, rows of different size, the special values."""
    *lead, width = case.shape
    x = random_tensor((*lead, width * (2 if case.activation in ("swiglu", "geglu") else 1)), seed=case.seed) * case.scale
    if x.numel():
        rows = x.view(-1, x.shape[-1])
        rows *= torch.exp2(torch.arange(rows.shape[0]) % 9 - 4.0).unsqueeze(1)
        rows[0, :128] = 0
        for i, value in enumerate(case.special):
            rows[1 + i, 3::40] = value
    return padded_rows(x.to(DTYPES[case.dtype].torch).to(device), case.pad)


def run_case(case: Case, family: KernelFamily, target: Target, load: Callable[[KernelSpec], Any], config: Any = None,
             device: torch.device | str = "cpu") -> None:
    """Run into poisoned outputs twice; codes and scales are those of the reference in float32, bit for bit, where the
    activation is, too: an approximated one may move a code by one where a quotient lies near a tie.
    """
    x = input_of(case, device)
    x3 = x if x.dim() == 3 else x.unsqueeze(0)
    expected, expected_scale = reference.quantize_fp8(
        x, case.recipe, dtype=DTYPES[case.code_dtype].torch, activation=case.activation, gate_up=case.gate_up,
        compute_dtype=torch.float32)
    batch, (rows, width) = x3.shape[0], case.shape[-2:]
    shapes = {"tensor": (1, 1, 1), "row": (batch, rows, 1), "block_1x128": (batch, rows, -(-width // 128)),
              "block_128x128": (batch, -(-rows // 128), -(-width // 128))}
    for transposed in (False, True):
        shape = shapes[case.recipe]
        scale = poisoned_empty((shape[0], shape[2], shape[1]), device=device).mT if transposed else poisoned_empty(shape, device=device)
        codes = poisoned_empty((batch, rows, width), DTYPES[case.code_dtype].torch, device)
        problem = QuantizeProblem(batch, rows, width, case.dtype, case.code_dtype, case.recipe, case.activation, case.gate_up,
                                  alignment_of(x3, codes))
        assert family.supports(problem, target), family.supports(problem, target)
        chosen = config or next(iter(family.candidates(problem, target)))
        assert family.legal(problem, target, chosen)
        tensors = QuantizeTensors(x3, codes, scale)
        family.bind(problem, chosen, load(family.spec(problem, target, chosen)), tensors)(tensors)
        _compare(case, codes, scale, expected.view(codes.shape), expected_scale.view(shape))


def _compare(case: Case, codes: torch.Tensor, scale: torch.Tensor, expected: torch.Tensor, expected_scale: torch.Tensor) -> None:
    what = f"{case}, seed {case.seed}"
    if case.activation in (None, "relu"):
        assert_bits_equal(scale, expected_scale.to(scale), what=f"{what}: scale")
        both_nan = codes.float().isnan() & expected.float().isnan()
        assert bool((both_nan | (codes.view(torch.uint8) == expected.view(torch.uint8))).all()), what
        return
    assert bool(((scale - expected_scale).abs() <= 2e-6 * expected_scale).all()), what
    got, want = (x.view(torch.uint8).short() for x in (codes, expected))
    same_sign = (got & 128) == (want & 128)
    # 1 + tanh cancels for negative inputs: what is left is exact to some float32 ulps of the input, which may be many of e5m2's codes.
    near = (codes.float() - expected.float()).abs() <= torch.finfo(codes.dtype).max * 2.0**-22
    assert bool((same_sign & ((got - want).abs() <= 1) | near).all()), what
    assert (got != want).float().mean() < 1e-2, f"{what}: {int((got != want).sum())} codes differ"
