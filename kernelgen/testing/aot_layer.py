"""The layers of a model by the public functions alone, for steps of several sizes: what a live service calls.

    python -m kernelgen.testing.aot_layer cpu config.json tiny
    python -m kernelgen.testing.aot_layer cuda config.json served

Device, config.json and one of STEPS; the page size is that of the steps. Random weights. Prints the artifacts that it loaded, as JSON; the
process fails if it compiled one. None of the numbers of tokens is one that prebuild lists.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kernelgen
from kernelgen import PageTable, build
from kernelgen.aot.models import Experts, Latent, Model, read_model
from kernelgen.dtypes import DTYPES

# Page size, and queries and keys of each request.
STEPS: dict[str, tuple[int, tuple[tuple[list[int], list[int]], ...]]] = {
    "tiny": (8, (([7, 11, 3], [7, 19, 40]), ([1, 1, 1], [8, 20, 41]), ([19], [19]), ([1], [5]), ([2, 1], [6, 8]))),
    "served": (16, (([1] * 67, [1 + 37 * i for i in range(67)]), ([2071], [2071]),
                    ([1] * 9 + [517, 1201], [3000 + i for i in range(9)] + [517, 4099]), ([1], [11]))),
}


@dataclass(frozen=True)
class Places:
    """Where the tokens of a step lie: request and position of each, and the plan's page table, lengths and bounds."""

    table: PageTable
    positions: torch.Tensor
    request: torch.Tensor
    plan: dict[str, Any]


class Layers:
    """One layer of each kind that a model has: of every window, with a dense network, with experts."""

    def __init__(self, device: str, model: Model, steps: str) -> None:
        torch.manual_seed(3)
        self.device, self.dtype, self.m = device, DTYPES[model.dtype].torch, model
        self.page, self.steps = STEPS[steps]
        self.pages = max(len(keys) * -(-max(keys) // self.page) for _, keys in self.steps)
        self.weights: dict[tuple[Any, ...], torch.Tensor] = {}

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).div_(shape[-1] ** 0.5).to(dtype or self.dtype)

    def weight(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Of so many rows and columns; layers that agree in shape share it."""
        key = (*shape, dtype)
        if key not in self.weights:
            self.weights[key] = self.random(*shape, dtype=dtype)
        return self.weights[key]

    def linear(self, x: torch.Tensor, rows: int, *, bias: bool = False, **more: Any) -> torch.Tensor:
        out = kernelgen.gemm(x, self.weight(rows, x.shape[-1]).t(), bias=self.weight(rows) if bias else None, **more)
        assert isinstance(out, torch.Tensor)
        return out

    def places(self, q_lens: list[int], kv_lens: list[int], on_device: str) -> Places:
        tokens, batch, width = sum(q_lens), len(q_lens), -(-max(kv_lens) // self.page)  # one column where all are short
        queries, keys = (torch.tensor(values, dtype=torch.int32) for values in (q_lens, kv_lens))
        pages = torch.arange(batch * width, dtype=torch.int32).view(batch, width).to(self.device)
        # The number of query rows sizes the launch: without their lengths on the host it has to be bounded.
        bounds = kernelgen.GraphBounds(max_q_tokens=tokens, max_seq_k=max(kv_lens)) if on_device == "all" else None
        return Places(
            PageTable.from_blocks(pages, keys.to(self.device) if on_device else keys, self.page),
            torch.cat([torch.arange(n - m, n) for m, n in zip(q_lens, kv_lens)]).int().to(self.device),
            torch.repeat_interleave(torch.arange(batch), queries).int().to(self.device),
            dict(q_lens=queries.to(self.device) if on_device == "all" else queries, q_dtype=self.dtype, cuda_graph_bounds=bounds))

    def step(self, q_lens: list[int], kv_lens: list[int], *, on_device: str = "") -> None:
        """Queries of each request at the end of its keys. ``on_device``: the plans get the lengths of "keys", or of "all", there."""
        m, tokens = self.m, sum(q_lens)
        where = self.places(q_lens, kv_lens, on_device)
        x, residual = self.random(tokens, m.hidden), self.random(tokens, m.hidden)
        h = kernelgen.rmsnorm(x, self.weight(m.hidden), residual=residual)
        for window in m.windows:
            seen = self.latent(h, m.latent, where) if m.latent else self.attention(h, window, where)
            after = self.linear(seen.view(tokens, -1), m.hidden, bias=m.out_bias)
            for out in self.networks(kernelgen.rmsnorm(after, self.weight(m.hidden), residual=residual)):
                assert self.linear(out[-len(q_lens):], m.vocab).isfinite().all(), (q_lens, kv_lens, on_device)

    # -- attention

    def attention(self, h: torch.Tensor, window: int | None, where: Places) -> torch.Tensor:
        m, d, tokens = self.m, self.m.head_dim, h.shape[0]
        joined = self.linear(h, (m.heads + 2 * m.kv_heads) * d, bias=m.qkv_bias)
        q, k, v = (part.view(tokens, -1, d) for part in joined.split([n * d for n in (m.heads, m.kv_heads, m.kv_heads)], dim=1))
        if m.qk_norm:
            q, k = (kernelgen.rmsnorm(part.reshape(-1, d), self.weight(d)).view(part.shape) for part in (q, k))
        cache = self.weight(self.pages, 2, self.page, m.kv_heads, d)
        at: dict[str, Any] = dict(positions=where.positions, batch_indices=where.request)
        kernelgen.append_kv(cache, k, v, where.table, **at)
        q = kernelgen.rope_append_kv(q, k, v, cache, where.table, **at)
        plan = kernelgen.plan_attention(
            where.table, num_q_heads=m.heads, num_kv_heads=m.kv_heads, head_dim=d, window=None if window is None else (window - 1, 0),
            soft_cap=50.0 if m.soft_cap else None, sinks=m.sinks, **where.plan)
        seen = plan.run(q, cache, sinks=self.weight(m.heads, dtype=torch.float32) if m.sinks else None)
        assert isinstance(seen, torch.Tensor)
        return seen

    def latent(self, h: torch.Tensor, x: Latent, where: Places) -> torch.Tensor:
        """MLA with the up-projections absorbed into the queries and the outputs."""
        m, tokens = self.m, h.shape[0]
        if x.q_rank is not None:
            h_q = kernelgen.rmsnorm(self.linear(h, x.q_rank), self.weight(x.q_rank))
        q = self.linear(h if x.q_rank is None else h_q, m.heads * (x.nope + x.rope)).view(tokens, m.heads, -1)
        q_nope, q_rope = q.split([x.nope, x.rope], dim=2)
        latent, k_rope = self.linear(h, x.kv_rank + x.rope).split([x.kv_rank, x.rope], dim=1)
        latent = kernelgen.rmsnorm(latent, self.weight(x.kv_rank))
        q_rope, k_rope = kernelgen.rope(q_rope, k_rope.unsqueeze(1), where.positions, interleaved=m.interleaved)
        cache = self.weight(self.pages, self.page, x.kv_rank + x.rope)
        kernelgen.append_mla(cache, None, latent, k_rope.squeeze(1), where.table, positions=where.positions, batch_indices=where.request)
        absorbed = kernelgen.gemm(q_nope.transpose(0, 1), self.weight(m.heads, x.nope, x.kv_rank))
        plan = kernelgen.plan_mla(where.table, num_heads=m.heads, scale=(x.nope + x.rope) ** -0.5, head_dim_latent=x.kv_rank,
                                  head_dim_rope=x.rope, **where.plan)
        seen = plan.run(absorbed.transpose(0, 1).contiguous(), q_rope, cache)
        assert isinstance(seen, torch.Tensor)
        out = kernelgen.gemm(seen.transpose(0, 1), self.weight(m.heads, x.value, x.kv_rank).transpose(1, 2))
        return out.transpose(0, 1).reshape(tokens, -1)

    def without_cache(self) -> None:
        """Prefill of whole requests, and a rotation alone."""
        m, x = self.m, self.m.latent
        starts = torch.tensor([0, 5, 17], dtype=torch.int32, device=self.device)
        kv_heads, width = (m.heads, x.value) if x else (m.kv_heads, m.head_dim)
        q, k = self.random(17, m.heads, m.head_dim), self.random(17, kv_heads, m.head_dim)
        for window in m.windows:
            kernelgen.attention_varlen(
                q, k, self.random(17, kv_heads, width), starts, starts, causal=True, window=None if window is None else (window - 1, 0),
                soft_cap=50.0 if m.soft_cap else None, sinks=self.weight(m.heads, dtype=torch.float32) if m.sinks else None)
        if x is None:
            kernelgen.rope(q, k, torch.arange(17, device=self.device), rotary_dim=m.rotary_dim)

    # -- feed-forward networks

    def networks(self, h: torch.Tensor) -> list[torch.Tensor]:
        m = self.m
        return [*([self.dense(h, m.intermediate)] if m.intermediate else []), *([self.experts(h, m.experts)] if m.experts else [])]

    def dense(self, h: torch.Tensor, width: int) -> torch.Tensor:
        _, joined, alone = self.m.activations
        separate = self.linear(h, width, activation=alone) * self.linear(h, width)
        if not joined:
            return self.linear(separate, self.m.hidden)
        fused = self.linear(h, 2 * width, activation=joined)
        if joined == "swiglu":
            apart = kernelgen.silu_and_mul(self.linear(h, 2 * width))
            if self.dtype is torch.float32:
                torch.testing.assert_close(apart, fused)
        return self.linear(fused, self.m.hidden)

    def experts(self, h: torch.Tensor, e: Experts) -> torch.Tensor:
        hidden = self.m.hidden
        logits = self.linear(h, e.count, bias=e.router_bias)
        weights, ids = kernelgen.route(
            logits, e.top_k, method=e.method, renormalize=e.renormalize, num_groups=e.groups, topk_groups=e.kept_groups,
            bias=self.weight(e.count, dtype=torch.float32) if e.select_bias else None)
        args = (h, self.weight(e.count, 2 * e.intermediate, hidden), self.weight(e.count, hidden, e.intermediate), weights, ids)
        kwargs: dict[str, Any] = dict(activation=e.activation, gate_up=e.gate_up)
        if e.biases:
            kwargs |= dict(bias13=self.weight(e.count, 2 * e.intermediate), bias2=self.weight(e.count, hidden))
        out = kernelgen.moe(*args, **kwargs)
        if not e.shared:
            return out
        both = kernelgen.moe(*args, **kwargs, shared=(self.weight(2 * e.shared, hidden), self.weight(hidden, e.shared)))
        apart = out + self.dense(h, e.shared)
        if self.dtype is torch.float32:
            torch.testing.assert_close(both, apart)
        return both


def main(device: str, config: str, steps: str) -> None:
    layers = Layers(device, read_model(Path(config)), steps)
    for queries, keys in layers.steps:
        layers.step(queries, keys)
    for where in ("keys", "all") if device == "cuda" else ():
        layers.step(*layers.steps[0], on_device=where)
    layers.without_cache()
    compiled = [report.spec for report in build.reports() if report.compiled]
    assert not compiled, f"compiled {compiled}"
    print(json.dumps([report.artifact for report in build.reports()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
