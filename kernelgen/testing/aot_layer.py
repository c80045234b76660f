"""One decoder layer by the public functions alone, for steps of several sizes: what a live service calls.

    python -m kernelgen.testing.aot_layer cpu float32 tiny_16
    python -m kernelgen.testing.aot_layer cuda bfloat16 qwen3_8b

Device, dtype and one of MODELS. Prints the artifacts that it loaded, as JSON; the process fails if it compiled one. The sizes of the tiny
ones are those of kernelgen.testing.aot_configs; none of the numbers of tokens is one that prebuild lists.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import torch

import kernelgen
from kernelgen import PageTable, build

Step = tuple[list[int], list[int]]  # queries, keys of each request


@dataclass(frozen=True)
class Sizes:
    """Of a model's layer, and the steps to run. ``experts``: how many, k, their width; None: a dense feed-forward network."""

    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    width: int = 96
    vocab: int = 128
    page: int = 8
    qk_norm: bool = False
    experts: tuple[int, int, int] | None = None
    steps: tuple[Step, ...] = (
        ([7, 11, 3], [7, 19, 40]), ([1, 1, 1], [8, 20, 41]), ([19], [19]), ([1], [5]), ([2, 1], [6, 8]))


_EXPERTS = (8, 2, 32)
_SERVED: tuple[Step, ...] = (
    ([1] * 67, [1 + 37 * i for i in range(67)]), ([2071], [2071]),
    ([1] * 9 + [517, 1201], [3000 + i for i in range(9)] + [517, 4099]), ([1], [11]))
MODELS = {
    "tiny_16": Sizes(), "tiny_16_moe": Sizes(experts=_EXPERTS), "tiny_64": Sizes(head_dim=64),
    "tiny_64_moe": Sizes(head_dim=64, experts=_EXPERTS),
    "qwen3_8b": Sizes(4096, 32, 8, 128, 12288, 151936, 16, True, steps=_SERVED),
    "qwen3_30b_a3b": Sizes(2048, 32, 4, 128, 0, 151936, 16, True, (128, 8, 768), _SERVED),
}


class Layer:
    """Weights, and a cache of as many pages as the longest step takes."""

    def __init__(self, device: str, dtype: torch.dtype, sizes: Sizes) -> None:
        torch.manual_seed(3)
        self.device, self.dtype, self.z = device, dtype, sizes
        z, hidden = sizes, sizes.hidden
        self.qkv = self.random((z.heads + 2 * z.kv_heads) * z.head_dim, hidden)
        self.o, self.head = self.random(hidden, z.heads * z.head_dim), self.random(z.vocab, hidden)
        self.norms = (self.random(hidden), self.random(hidden), self.random(z.head_dim))
        if z.experts is None:
            self.up, self.down = self.random(2 * z.width, hidden), self.random(hidden, z.width)
        else:
            count, _, width = z.experts
            self.router = self.random(count, hidden)
            self.w13, self.w2 = self.random(count, 2 * width, hidden), self.random(count, hidden, width)
        pages = max(len(keys) * -(-max(keys) // z.page) for _, keys in z.steps)
        self.cache = self.random(pages, 2, z.page, z.kv_heads, z.head_dim)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).div_(shape[-1] ** 0.5 if len(shape) > 1 else 8).to(self.dtype)

    def step(self, q_lens: list[int], kv_lens: list[int], *, on_device: str = "") -> torch.Tensor:
        """Queries of each request at the end of its keys. ``on_device``: the plan gets the lengths of "keys", or of "all", there."""
        z = self.z
        tokens, batch, width = sum(q_lens), len(q_lens), -(-max(kv_lens) // z.page)  # one column where all are short
        ints = [torch.tensor(values, dtype=torch.int32) for values in (q_lens, kv_lens)]
        plan_q = ints[0].to(self.device) if on_device == "all" else ints[0]
        plan_kv = ints[1].to(self.device) if on_device else ints[1]
        # The number of query rows sizes the launch: without their lengths on the host it has to be bounded.
        bounds = kernelgen.GraphBounds(max_q_tokens=tokens, max_seq_k=max(kv_lens)) if on_device == "all" else None
        pages = torch.arange(batch * width, dtype=torch.int32).view(batch, width).to(self.device)
        table = PageTable.from_blocks(pages, plan_kv, z.page)
        request = torch.repeat_interleave(torch.arange(batch), ints[0]).int().to(self.device)
        positions = torch.cat([torch.arange(n - m, n) for m, n in zip(q_lens, kv_lens)]).int().to(self.device)
        x, residual = self.random(tokens, z.hidden), self.random(tokens, z.hidden)
        h = kernelgen.rmsnorm(x, self.norms[0], residual=residual)
        sizes = [n * z.head_dim for n in (z.heads, z.kv_heads, z.kv_heads)]
        q, k, v = (part.view(tokens, -1, z.head_dim) for part in kernelgen.gemm(h, self.qkv.t()).split(sizes, dim=1))
        if z.qk_norm:
            q, k = (kernelgen.rmsnorm(part.reshape(-1, z.head_dim), self.norms[2]).view(part.shape) for part in (q, k))
        kernelgen.append_kv(self.cache, k, v, table, positions=positions, batch_indices=request)
        q = kernelgen.rope_append_kv(q, k, v, self.cache, table, positions=positions, batch_indices=request)
        plan = kernelgen.plan_attention(table, num_q_heads=z.heads, num_kv_heads=z.kv_heads, head_dim=z.head_dim, q_lens=plan_q,
                                        q_dtype=self.dtype, cuda_graph_bounds=bounds)
        seen = plan.run(q, self.cache)
        assert isinstance(seen, torch.Tensor)
        h = kernelgen.rmsnorm(kernelgen.gemm(seen.view(tokens, -1), self.o.t()), self.norms[1], residual=residual)
        if z.experts is not None:
            weights, ids = kernelgen.route(kernelgen.gemm(h, self.router.t()), z.experts[1])
            return kernelgen.gemm(kernelgen.moe(h, self.w13, self.w2, weights, ids)[-batch:], self.head.t())
        fused = kernelgen.gemm(h, self.up.t(), activation="swiglu")
        apart = kernelgen.silu_and_mul(kernelgen.gemm(h, self.up.t()))
        if self.dtype is torch.float32:
            torch.testing.assert_close(apart, fused)
        return kernelgen.gemm(kernelgen.gemm(fused, self.down.t())[-batch:], self.head.t())

    def without_cache(self) -> None:
        """Prefill of whole requests, and a rotation alone."""
        z = self.z
        starts = torch.tensor([0, 5, 17], dtype=torch.int32, device=self.device)
        q, kv = self.random(17, z.heads, z.head_dim), self.random(17, z.kv_heads, z.head_dim)
        kernelgen.attention_varlen(q, kv, kv, starts, starts, causal=True)
        kernelgen.rope(q, kv, torch.arange(17, device=self.device))


def main(device: str, dtype: str, model: str) -> None:
    layer = Layer(device, getattr(torch, dtype), MODELS[model])
    for queries, keys in layer.z.steps:
        assert layer.step(queries, keys).isfinite().all(), (queries, keys)
    for where in ("keys", "all") if device == "cuda" else ():
        assert layer.step(*layer.z.steps[0], on_device=where).isfinite().all(), where
    layer.without_cache()
    compiled = [report.spec for report in build.reports() if report.compiled]
    assert not compiled, f"compiled {compiled}"
    print(json.dumps([report.artifact for report in build.reports()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
