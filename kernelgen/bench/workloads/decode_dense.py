"""Decode over dense keys: kernelgen beside torch's kernels, which are given the keys in use as a slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernelgen
from kernelgen.bench.suites import DenseDecodeCase
from kernelgen.bench.workloads.base import Candidate, Workload, normal
from kernelgen.dtypes import DTYPES
from kernelgen.testing.tolerance import Comparison, compare


class Operands(NamedTuple):
    q: torch.Tensor  # (B, 1, Hq, D)
    k: torch.Tensor  # (B, capacity, Hkv, D)
    v: torch.Tensor
    kv_lens: torch.Tensor | None
    out: torch.Tensor


class DenseDecodeWorkload(Workload):
    def __init__(self, case: DenseDecodeCase, device: str) -> None:
        self.case, self.device, self.problem = case, device, str(case)
        self._type = DTYPES[case.dtype]
        row = case.batch * case.head_dim * self._type.bytes
        rows, token = 2 * row * case.heads, 2 * row * case.kv_heads
        self.flops = 0.0
        self.traffic = token * case.keys + rows
        self.set_bytes = token * (case.capacity or case.keys) + rows

    def operands(self, generator: torch.Generator) -> Operands:
        c, dtype = self.case, self._type.torch
        q = normal((c.batch, 1, c.heads, c.head_dim), dtype, generator)
        k, v = (normal((c.batch, c.capacity or c.keys, c.kv_heads, c.head_dim), dtype, generator) for _ in range(2))
        lens = torch.full((c.batch,), c.keys, dtype=torch.int32, device=generator.device) if c.capacity else None
        return Operands(q, k, v, lens, torch.empty_like(q))

    def _kernelgen(self, o: Operands) -> torch.Tensor:
        kernelgen.attention(o.q, o.k, o.v, kv_lens=o.kv_lens, out=o.out, backend="generated")
        return o.out

    def _torch(self, o: Operands) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (o.q, o.k[:, : self.case.keys], o.v[:, : self.case.keys]))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=self.case.heads != self.case.kv_heads).transpose(1, 2)

    def _torch_with(self, backend: Any) -> Callable[[Operands], torch.Tensor]:
        def call(o: Operands) -> torch.Tensor:
            with sdpa_kernel([backend]):
                return self._torch(o)

        return call

    def candidates(self) -> list[Candidate]:
        found = [Candidate("kernelgen", self._kernelgen, peer=False)]
        if self.device == "cpu":
            return [*found, Candidate("torch", self._torch)]
        return [*found, Candidate("torch-fa2", self._torch_with(SDPBackend.FLASH_ATTENTION)),
                Candidate("torch-cudnn", self._torch_with(SDPBackend.CUDNN_ATTENTION))]

    def check(self, operands: Operands, result: torch.Tensor) -> Comparison:
        """All heads of the first and the last request, as rows of one tile."""
        from kernelgen import reference

        few = sorted({0, self.case.batch - 1})
        q, k, v = operands.q[few], operands.k[few, : self.case.keys], operands.v[few, : self.case.keys]
        exact, plain = reference.attention(q, k, v), reference.attention_plain(q, k, v)
        assert isinstance(exact, torch.Tensor) and isinstance(plain, torch.Tensor)
        return compare(result[few].flatten(0, 2), exact.flatten(0, 2), plain.flatten(0, 2), what=self.problem)

    def decision(self, operands: Operands) -> Any:
        return kernelgen.explain("attention", *operands[:3], kv_lens=operands.kv_lens, out=operands.out, backend="generated")
