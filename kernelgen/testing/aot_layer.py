"""One decoder layer of a tiny model by the public functions alone, for steps of several sizes: what a live service calls.

    python -m kernelgen.testing.aot_layer cpu float32 16 [moe]

Device, dtype and head dim; with ``moe`` the layer has experts. Prints the artifacts that it loaded, as JSON; the process fails if it
compiled one. The sizes are those of kernelgen.testing.aot_configs; none of the numbers of tokens is one that prebuild lists.
"""

from __future__ import annotations

import json
import sys

import torch

import kernelgen
from kernelgen import PageTable, build

HIDDEN, HEADS, KV_HEADS, WIDTH, VOCAB, PAGE, EXPERTS, K, EXPERT_WIDTH = 64, 4, 2, 96, 128, 8, 8, 2, 32
STEPS = (([7, 11, 3], [7, 19, 40]), ([1, 1, 1], [8, 20, 41]), ([19], [19]), ([1], [5]), ([2, 1], [6, 8]))


class Layer:
    """Weights, and a cache of 24 pages."""

    def __init__(self, device: str, dtype: torch.dtype, head_dim: int) -> None:
        torch.manual_seed(3)
        self.device, self.dtype, self.head_dim = device, dtype, head_dim
        heads = (HEADS + 2 * KV_HEADS) * head_dim
        self.qkv, self.o = self.random(heads, HIDDEN), self.random(HIDDEN, HEADS * head_dim)
        self.up, self.down, self.head = self.random(2 * WIDTH, HIDDEN), self.random(HIDDEN, WIDTH), self.random(VOCAB, HIDDEN)
        self.router, self.norms = self.random(EXPERTS, HIDDEN), (self.random(HIDDEN), self.random(HIDDEN))
        self.w13, self.w2 = self.random(EXPERTS, 2 * EXPERT_WIDTH, HIDDEN), self.random(EXPERTS, HIDDEN, EXPERT_WIDTH)
        self.cache = self.random(24, 2, PAGE, KV_HEADS, head_dim)

    def random(self, *shape: int) -> torch.Tensor:
        return (torch.randn(*shape) / 8).to(self.device, self.dtype)

    def step(self, q_lens: list[int], kv_lens: list[int], *, moe: bool, on_device: str = "") -> torch.Tensor:
        """Queries of each request at the end of its keys. ``on_device``: the plan gets the lengths of "keys", or of "all", there."""
        tokens, batch, width = sum(q_lens), len(q_lens), -(-max(kv_lens) // PAGE)  # one column where all are short
        ints = [torch.tensor(values, dtype=torch.int32) for values in (q_lens, kv_lens)]
        plan_q = ints[0].to(self.device) if on_device == "all" else ints[0]
        plan_kv = ints[1].to(self.device) if on_device else ints[1]
        # The number of query rows sizes the launch: without their lengths on the host it has to be bounded.
        bounds = kernelgen.GraphBounds(max_q_tokens=tokens, max_seq_k=max(kv_lens)) if on_device == "all" else None
        pages = torch.arange(batch * width, dtype=torch.int32).view(batch, width).to(self.device)
        table = PageTable.from_blocks(pages, plan_kv, PAGE)
        request = torch.repeat_interleave(torch.arange(batch), ints[0]).int().to(self.device)
        positions = torch.cat([torch.arange(n - m, n) for m, n in zip(q_lens, kv_lens)]).int().to(self.device)
        x, residual = self.random(tokens, HIDDEN), self.random(tokens, HIDDEN)
        h = kernelgen.rmsnorm(x, self.norms[0], residual=residual)
        sizes = [n * self.head_dim for n in (HEADS, KV_HEADS, KV_HEADS)]
        q, k, v = (part.view(tokens, -1, self.head_dim) for part in kernelgen.gemm(h, self.qkv.t()).split(sizes, dim=1))
        kernelgen.append_kv(self.cache, k, v, table, positions=positions, batch_indices=request)
        q = kernelgen.rope_append_kv(q, k, v, self.cache, table, positions=positions, batch_indices=request)
        plan = kernelgen.plan_attention(table, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=self.head_dim, q_lens=plan_q,
                                        q_dtype=self.dtype, cuda_graph_bounds=bounds)
        seen = plan.run(q, self.cache)
        assert isinstance(seen, torch.Tensor)
        h = kernelgen.rmsnorm(kernelgen.gemm(seen.view(tokens, -1), self.o.t()), self.norms[1], residual=residual)
        if moe:
            weights, ids = kernelgen.route(kernelgen.gemm(h, self.router.t()), K)
            return kernelgen.moe(h, self.w13, self.w2, weights, ids)
        fused = kernelgen.gemm(h, self.up.t(), activation="swiglu")
        apart = kernelgen.silu_and_mul(kernelgen.gemm(h, self.up.t()))
        if self.dtype is torch.float32:
            torch.testing.assert_close(apart, fused)
        return kernelgen.gemm(kernelgen.gemm(fused, self.down.t()), self.head.t())

    def without_cache(self) -> None:
        """Prefill of whole requests, and a rotation alone."""
        starts = torch.tensor([0, 5, 17], dtype=torch.int32, device=self.device)
        q, kv = self.random(17, HEADS, self.head_dim), self.random(17, KV_HEADS, self.head_dim)
        kernelgen.attention_varlen(q, kv, kv, starts, starts, causal=True)
        kernelgen.rope(q, kv, torch.arange(17, device=self.device))


def main(device: str, dtype: str, head_dim: str, *words: str) -> None:
    layer = Layer(device, getattr(torch, dtype), int(head_dim))
    for q_lens, kv_lens in STEPS:
        assert layer.step(q_lens, kv_lens, moe="moe" in words).isfinite().all(), (q_lens, kv_lens)
    for where in ("keys", "all") if device == "cuda" else ():
        assert layer.step(*STEPS[0], moe="moe" in words, on_device=where).isfinite().all(), where
    layer.without_cache()
    compiled = [report.spec for report in build.reports() if report.compiled]
    assert not compiled, f"compiled {compiled}"
    print(json.dumps([report.artifact for report in build.reports()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
