"""Dense attention forward: kernelgen beside torch's kernels and FlashAttention-4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernelgen
from kernelgen.bench.suites import AttentionCase
from kernelgen.bench.workloads.base import Candidate, Workload, normal, not_installed
from kernelgen.dtypes import DTYPES
from kernelgen.targets import Target
from kernelgen.tensors import AttentionTensors
from kernelgen.testing.tolerance import Comparison, compare


class Operands(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor


class AttentionWorkload(Workload):
    def __init__(self, case: AttentionCase, device: str) -> None:
        self.case, self.device = case, device
        self.problem = str(case)
        self._type = DTYPES[case.dtype]
        self._shape = (case.batch, case.seq, case.heads, case.head_dim)
        pairs = case.batch * case.heads * case.seq * case.seq
        # The convention of the field: a causal mask halves the arithmetic.
        self.flops = 4.0 * pairs * case.head_dim * (0.5 if case.causal else 1.0)
        self.traffic = self.set_bytes = 4 * self._type.bytes * case.batch * case.seq * case.heads * case.head_dim

    def operands(self, generator: torch.Generator) -> Operands:
        q, k, v = (normal(self._shape, self._type.torch, generator) for _ in range(3))
        return Operands(q, k, v, torch.empty_like(q))

    def _kernelgen(self, o: Operands) -> torch.Tensor:
        kernelgen.attention(o.q, o.k, o.v, causal=self.case.causal, out=o.out, backend="generated")
        return o.out

    def _torch(self, o: Operands) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (o.q, o.k, o.v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.case.causal).transpose(1, 2)

    def _torch_with(self, backend: Any) -> Callable[[Operands], torch.Tensor]:
        def call(o: Operands) -> torch.Tensor:
            with sdpa_kernel([backend]):
                return self._torch(o)

        return call

    def _flash_attn_4(self) -> Callable[[Operands], torch.Tensor]:
        from flash_attn.cute import flash_attn_func

        def call(o: Operands) -> torch.Tensor:
            out: torch.Tensor = flash_attn_func(o.q, o.k, o.v, causal=self.case.causal)[0]
            return out

        return call

    def candidates(self) -> list[Candidate]:
        found = [Candidate("kernelgen", self._kernelgen, peer=False)]
        if self.device == "cpu":
            return [*found, Candidate("torch", self._torch)]
        found += [
            Candidate("torch-fa2", self._torch_with(SDPBackend.FLASH_ATTENTION)),
            Candidate("torch-cudnn", self._torch_with(SDPBackend.CUDNN_ATTENTION)),
        ]
        missing = not_installed("flash_attn.cute")
        found.append(Candidate("flash-attn-4", self._torch if missing else self._flash_attn_4(), missing=missing))
        return found

    def check(self, operands: Operands, result: torch.Tensor) -> Comparison:
        """All rows of the first and the last head of the first and the last request."""
        from kernelgen import reference

        batch, heads = sorted({0, self.case.batch - 1}), sorted({0, self.case.heads - 1})
        part = [t[batch][:, :, heads] for t in operands[:3]]
        exact = reference.attention(*part, causal=self.case.causal)
        plain = reference.attention_plain(*part, causal=self.case.causal)
        assert isinstance(exact, torch.Tensor) and isinstance(plain, torch.Tensor)
        return compare(result[batch][:, :, heads], exact, plain, what=self.problem, tile_dim=-3)

    def tensors(self, o: Operands) -> AttentionTensors:
        """As a kernel takes them."""
        return AttentionTensors(o.q, o.k, o.v, o.out, None, self.case.head_dim**-0.5)

    def decision_without_operands(self, target: Target) -> Any:
        """That of a call with contiguous operands, for a machine that may not be there."""
        shapes = (self._shape,) * 3
        return kernelgen.explain("attention", *shapes, causal=self.case.causal, dtype=self.case.dtype, target=target, backend="generated")

    def decision(self, operands: Operands) -> Any:
        return kernelgen.explain("attention", *operands[:3], causal=self.case.causal, out=operands.out, backend="generated")
