"""One matrix product: kernelgen beside torch.matmul (cuBLAS on a GPU, oneDNN or MKL on a CPU)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import kernelgen
from kernelgen.bench.suites import GemmCase
from kernelgen.bench.workloads.base import Candidate, Workload, normal
from kernelgen.dtypes import DTYPES
from kernelgen.testing.tolerance import Comparison, compare

_SAMPLE_ROWS = 256  # rows of the output that the check looks at: the first and the last half of them


class Operands(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor


class GemmWorkload(Workload):
    def __init__(self, case: GemmCase, device: str) -> None:
        self.case, self.device = case, device
        self.problem = str(case)
        self._type = DTYPES[case.dtype]
        self.flops = 2.0 * case.m * case.n * case.k
        self.traffic = self.set_bytes = self._type.bytes * (case.m * case.k + case.k * case.n + case.m * case.n)

    def operands(self, generator: torch.Generator) -> Operands:
        case, dtype = self.case, self._type.torch
        a = normal((case.m, case.k), dtype, generator)
        b = normal((case.n, case.k), dtype, generator).t() if case.weight else normal((case.k, case.n), dtype, generator)
        return Operands(a, b, torch.empty((case.m, case.n), dtype=dtype, device=generator.device))

    def candidates(self) -> list[Candidate]:
        def ours(o: Operands) -> torch.Tensor:
            kernelgen.gemm(o.a, o.b, out=o.out, backend="generated")
            return o.out

        return [Candidate("kernelgen", ours, peer=False), Candidate("torch", lambda o: torch.matmul(o.a, o.b, out=o.out))]

    def check(self, operands: Operands, result: torch.Tensor) -> Comparison:
        from kernelgen import reference

        half = _SAMPLE_ROWS // 2
        rows = torch.arange(self.case.m, device=result.device)
        rows = rows if self.case.m <= _SAMPLE_ROWS else torch.cat([rows[:half], rows[-half:]])
        a = operands.a[rows]
        exact, plain = reference.gemm(a, operands.b), reference.gemm_plain(a, operands.b)
        assert isinstance(exact, torch.Tensor)
        return compare(result[rows], exact, plain, what=self.problem)

    def decision(self, operands: Operands) -> Any:
        return kernelgen.explain("gemm", operands.a, operands.b, out=operands.out, backend="generated")
