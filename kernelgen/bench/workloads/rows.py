"""rmsnorm and silu_and_mul: kernelgen beside torch. Bytes are what counts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import kernelgen
from kernelgen.bench.suites import RowsCase
from kernelgen.bench.workloads.base import Candidate, Workload, normal
from kernelgen.dtypes import DTYPES
from kernelgen.testing.tolerance import Comparison, compare

_SAMPLE_ROWS = 512


class Operands(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor


class RowsWorkload(Workload):
    def __init__(self, case: RowsCase, device: str) -> None:
        self.case, self.device = case, device
        self.problem = str(case)
        self.flops = 0.0
        self._type = DTYPES[case.dtype]
        self._inputs = 2 * case.width if case.op == "silu_and_mul" else case.width
        self.traffic = self.set_bytes = self._type.bytes * case.rows * (self._inputs + case.width)

    def operands(self, generator: torch.Generator) -> Operands:
        case, dtype = self.case, self._type.torch
        x = normal((case.rows, self._inputs), dtype, generator)
        return Operands(x, normal((case.width,), dtype, generator), x.new_empty(case.rows, case.width))

    def candidates(self) -> list[Candidate]:
        width = self.case.width

        def rmsnorm(o: Operands) -> torch.Tensor:
            return kernelgen.rmsnorm(o.x, o.weight, out=o.out, backend="generated")

        def silu_and_mul(o: Operands) -> torch.Tensor:
            return kernelgen.silu_and_mul(o.x, out=o.out, backend="generated")

        if self.case.op == "rmsnorm":
            return [Candidate("kernelgen", rmsnorm, peer=False),
                    Candidate("torch", lambda o: F.rms_norm(o.x, (width,), o.weight, 1e-6))]
        return [Candidate("kernelgen", silu_and_mul, peer=False),
                Candidate("torch", lambda o: F.silu(o.x[:, :width]) * o.x[:, width:])]

    def check(self, operands: Operands, result: torch.Tensor) -> Comparison:
        from kernelgen import reference

        x, dtype = operands.x[-_SAMPLE_ROWS:], self._type.torch
        if self.case.op == "rmsnorm":
            exact, plain = (reference.rmsnorm(x, operands.weight, compute_dtype=c) for c in (torch.float64, torch.float32))
        else:
            exact, plain = (reference.silu_and_mul(x, compute_dtype=c) for c in (torch.float64, torch.float32))
        assert isinstance(exact, torch.Tensor) and isinstance(plain, torch.Tensor)
        return compare(result[-_SAMPLE_ROWS:], exact, plain.to(dtype), what=self.problem)

    def decision(self, operands: Operands) -> Any:
        if self.case.op == "rmsnorm":
            return kernelgen.explain("rmsnorm", operands.x, operands.weight, out=operands.out, backend="generated")
        return kernelgen.explain("silu_and_mul", operands.x, out=operands.out, backend="generated")
