"""Decode over a paged cache: kernelgen beside what plain torch offers, a gather of the pages and SDPA."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import kernelgen
from kernelgen import PageTable
from kernelgen.bench.suites import DecodeCase
from kernelgen.bench.workloads.base import Candidate, Workload, normal, not_installed
from kernelgen.dtypes import DTYPES
from kernelgen.testing.tolerance import Comparison, compare


class Operands(NamedTuple):
    q: torch.Tensor
    cache: torch.Tensor  # (pages, 2, page_size, Hkv, D)
    blocks: torch.Tensor  # (B, pages of a request)
    out: torch.Tensor


class DecodeWorkload(Workload):
    def __init__(self, case: DecodeCase, device: str) -> None:
        self.case, self.device, self.problem = case, device, str(case)
        self._type, self._kv = DTYPES[case.dtype], DTYPES[case.kv_dtype or case.dtype]
        self._pages = case.batch * case.keys // case.page_size
        values = 2 * case.batch * case.keys * case.kv_heads * case.head_dim
        rows = 2 * case.batch * case.heads * case.head_dim * self._type.bytes
        self.flops = 0.0
        self.traffic = self.set_bytes = values * self._kv.bytes + rows
        self._plans: dict[int, Any] = {}

    def operands(self, generator: torch.Generator) -> Operands:
        c = self.case
        q = normal((c.batch, c.heads, c.head_dim), self._type.torch, generator)
        cache = normal((self._pages, 2, c.page_size, c.kv_heads, c.head_dim), self._type.torch, generator).to(self._kv.torch)
        order = torch.randperm(self._pages, device=generator.device, generator=generator).to(torch.int32)
        return Operands(q, cache, order.view(c.batch, -1), torch.empty_like(q))

    def _arguments(self, o: Operands) -> tuple[PageTable, dict[str, Any]]:
        c = self.case
        table = PageTable.from_blocks(o.blocks, [c.keys] * c.batch, c.page_size)
        return table, dict(num_q_heads=c.heads, num_kv_heads=c.kv_heads, head_dim=c.head_dim, q_dtype=o.q.dtype, kv_dtype=o.cache.dtype,
                           backend="generated")

    def _kernelgen(self, o: Operands) -> torch.Tensor:
        """``run`` alone: one plan serves every layer of a step."""
        plan = self._plans.get(o.blocks.data_ptr())
        if plan is None:
            table, named = self._arguments(o)
            plan = self._plans[o.blocks.data_ptr()] = kernelgen.plan_attention(table, **named)
        plan.run(o.q, o.cache, out=o.out)
        return o.out

    def _gather(self, o: Operands) -> torch.Tensor:
        c = self.case
        kv = o.cache[o.blocks.flatten()].view(c.batch, -1, 2, c.page_size, c.kv_heads, c.head_dim)
        k, v = (kv[:, :, i].flatten(1, 2).transpose(1, 2) for i in (0, 1))
        return F.scaled_dot_product_attention(o.q.unsqueeze(2), k, v, enable_gqa=c.heads != c.kv_heads).squeeze(2)

    def candidates(self) -> list[Candidate]:
        found = [Candidate("kernelgen", self._kernelgen, peer=False)]
        missing = "torch has no operator over an fp8 cache" if self._kv is not self._type else ""
        found.append(Candidate("torch-gather", self._gather, missing=missing))
        return [*found, Candidate("flashinfer", self._gather, missing=not_installed("flashinfer") or "no adapter yet")]

    def check(self, operands: Operands, result: torch.Tensor) -> Comparison:
        """All heads of the first and the last request, as rows of one tile."""
        from kernelgen import reference
        from kernelgen.reference.plain import paged_attention_plain

        few = sorted({0, self.case.batch - 1})
        table = PageTable.from_blocks(operands.blocks[few], [self.case.keys] * len(few), self.case.page_size)
        exact = reference.paged_attention(operands.q[few], operands.cache, table)
        plain = paged_attention_plain(operands.q[few], operands.cache, table)
        assert isinstance(exact, torch.Tensor) and isinstance(plain, torch.Tensor)
        return compare(result[few].flatten(0, 1), exact.flatten(0, 1), plain.flatten(0, 1), what=self.problem)

    def decision(self, operands: Operands) -> Any:
        table, named = self._arguments(operands)
        return kernelgen.explain("paged_attention", table, **{k: v for k, v in named.items() if k != "backend"}, backend="generated",
                                 target=None)
