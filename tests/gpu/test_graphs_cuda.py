"""CUDA graphs: calls are captured as they are, nothing inside waits or allocates past the graph, and replays follow new values.

The thousand replays compare with float64 attention by torch on the device; a row's error is at most twice that of torch's own in bfloat16
plus two units in the last place at the row's maximum (DESIGN.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kernelgen
from kernelgen import GraphBounds, PageTable
from kernelgen.testing.data import random_tensor
from kernelgen.testing.tolerance import assert_bits_equal, ulp

BF16, CUDA = torch.bfloat16, "cuda"
REPLAYS = 1000
BATCH, HEADS, KV_HEADS, DIM, PAGE, PAGES_EACH, MOST_ROWS = 8, 8, 2, 64, 16, 24, 4
CAPACITY = PAGE * PAGES_EACH


def draw(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return random_tensor(shape, BF16, seed=seed, device=CUDA, scale=scale)


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of a call that has run once, and what it gives."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def _prefill() -> tuple[list[torch.Tensor], Callable[[torch.Tensor], Any], torch.Tensor]:
    q, k, v = draw(2, 300, 8, 128, seed=1), draw(2, 300, 2, 128, seed=2), draw(2, 300, 2, 128, seed=3)
    return [q, k, v], lambda out: kernelgen.attention(q, k, v, causal=True, out=out), torch.empty_like(q)


def _ragged() -> tuple[list[torch.Tensor], Callable[[torch.Tensor], Any], torch.Tensor]:
    q, k, v = draw(500, 8, 64, seed=1), draw(500, 2, 64, seed=2), draw(500, 2, 64, seed=3)
    starts = torch.tensor([0, 120, 121, 500], dtype=torch.int32, device=CUDA)
    return [q, k, v], lambda out: kernelgen.attention_varlen(q, k, v, starts, starts, causal=True, out=out), torch.empty_like(q)


def _gemm(m: int) -> tuple[list[torch.Tensor], Callable[[torch.Tensor], Any], torch.Tensor]:
    a, b, bias = draw(m, 512, seed=1), draw(768, 512, seed=2), draw(768, seed=3)
    return [a, bias], lambda out: kernelgen.gemm(a, b.t(), bias=bias, activation="swiglu", out=out), a.new_empty(m, 384)


def _fp8_gemm() -> tuple[list[torch.Tensor], Callable[[torch.Tensor], Any], torch.Tensor]:
    a, b = draw(64, 512, seed=1), draw(256, 512, seed=2)
    (codes, scale), (codes_b, scale_b) = kernelgen.quantize_fp8(a, "block_1x128"), kernelgen.quantize_fp8(b, "block_128x128")

    def call(out: torch.Tensor) -> Any:
        kernelgen.quantize_fp8(a, "block_1x128", out=(codes, scale))
        return kernelgen.gemm(codes, codes_b.t(), scale_a=scale, scale_b=scale_b.t(), out=out)

    return [a], call, a.new_empty(64, 256)


def _moe() -> tuple[list[torch.Tensor], Callable[[torch.Tensor], Any], torch.Tensor]:
    x, logits = draw(96, 256, seed=1), draw(96, 16, seed=2)
    w13, w2 = draw(16, 2 * 128, 256, seed=3, scale=256**-0.5), draw(16, 256, 128, seed=4, scale=128**-0.5)

    def call(out: torch.Tensor) -> Any:
        weights, ids = kernelgen.route(logits, 4)
        return kernelgen.moe(x, w13, w2, weights, ids, out=out)

    return [x, logits], call, torch.empty_like(x)


def _rows() -> tuple[list[torch.Tensor], Callable[[torch.Tensor], Any], torch.Tensor]:
    x, weight, cache = draw(64, 8, 64, seed=1), draw(64, seed=2), draw(8, 2, 16, 8, 64, seed=3)
    positions = torch.arange(64, device=CUDA)

    def call(out: torch.Tensor) -> Any:
        kernelgen.rmsnorm(x, weight, out=out)
        kernelgen.rope_append_kv(out, x, x, cache, positions=positions, slot_mapping=positions, out=out)
        return out

    return [x, weight], call, torch.empty_like(x)


CALLS: dict[str, Callable[[], Any]] = {
    "prefill": _prefill, "ragged prefill": _ragged, "gemm of few rows": lambda: _gemm(4), "gemm": lambda: _gemm(300), "fp8 gemm": _fp8_gemm,
    "moe": _moe, "rows": _rows,
}


@pytest.mark.parametrize("name", CALLS)
def test_captured_as_it_is(name: str) -> None:
    """Replayed on other values the bits are those of an eager call; memory that is given back meanwhile is none of the graph's."""
    inputs, call, out = CALLS[name]()
    graph, _ = capture(lambda: call(out))
    for step in range(3):
        for i, x in enumerate(inputs):
            x.copy_(draw(*x.shape, seed=10 * step + i))
        torch.cuda.empty_cache()
        junk = [torch.full((1 << 20,), float("nan"), device=CUDA) for _ in range(4)]
        out.fill_(float("nan"))
        graph.replay()
        eager = torch.empty_like(out)
        call(eager)
        assert_bits_equal(out, eager, what=f"{name}, replay {step}")
        assert torch.isfinite(eager).all()
        del junk


@pytest.mark.parametrize("name", ["prefill", "gemm of few rows", "gemm", "fp8 gemm", "rows"])
def test_nothing_waits_or_allocates(name: str) -> None:
    """With ``out=`` a repeated call asks torch's allocator for nothing, and torch sees no call that waits."""
    _, call, out = CALLS[name]()
    call(out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


class Decode:
    """A captured run of a bounded plan, and the same attention by torch."""

    def __init__(self, on_device: bool) -> None:
        self.random, self.on_device = np.random.default_rng(7), on_device
        self.cache = draw(BATCH * PAGES_EACH, 2, PAGE, KV_HEADS, DIM, seed=1)
        self.q = draw(BATCH * MOST_ROWS, HEADS, DIM, seed=2)
        self.out, self.lse = torch.empty_like(self.q), torch.empty(BATCH * MOST_ROWS, HEADS, device=CUDA)
        bounds = GraphBounds(BATCH * MOST_ROWS, CAPACITY, BATCH * PAGES_EACH)
        self.plan: Any = kernelgen.plan_attention(
            self.table([CAPACITY] * BATCH), num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, q_dtype=BF16,
            q_lens=self.lengths([MOST_ROWS] * BATCH), cuda_graph_bounds=bounds)
        self.graph, _ = capture(lambda: self.plan.run(self.q, self.cache, out=self.out, lse=self.lse))

    def table(self, lens: Any) -> PageTable:
        self.pages = torch.randperm(BATCH * PAGES_EACH, device=CUDA).to(torch.int32).view(BATCH, PAGES_EACH)[: len(lens)]
        return PageTable.from_blocks(self.pages, self.lengths(lens), PAGE)

    def lengths(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=CUDA if self.on_device else "cpu")

    def step(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """One replay on a random batch: (our largest error, torch's, what a row's is above its limit, the largest of the LSE), on the
        device."""
        batch = int(self.random.integers(1, BATCH + 1))
        q_lens = self.random.integers(0, MOST_ROWS + 1, batch)
        lens = np.minimum(CAPACITY, q_lens + self.random.integers(0, CAPACITY, batch) * self.random.integers(0, 2, batch))
        table = self.table(lens.tolist())
        self.plan.update(table, q_lens=self.lengths(q_lens))
        self.q.normal_()
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        self.graph.replay()
        starts = np.concatenate([[0], np.cumsum(q_lens)])
        index = torch.from_numpy(starts[:-1, None] + np.arange(MOST_ROWS)).clamp_(max=BATCH * MOST_ROWS - 1).to(CUDA)
        q_len, kv_len = (torch.from_numpy(x.astype(np.int64)).to(CUDA).view(-1, 1, 1) for x in (q_lens, lens))
        row, key = torch.arange(MOST_ROWS, device=CUDA).view(1, -1, 1), torch.arange(CAPACITY, device=CUDA).view(1, 1, -1)
        seen = ((row < q_len) & (key <= row + kv_len - q_len)).unsqueeze(1)
        k, v = self.cache[self.pages.long()].transpose(1, 2).flatten(2, 3).unbind(1)  # (B, capacity, Hkv, D)
        given = [x.transpose(1, 2) for x in (self.q[index], k, v)]
        exact, log = attended([x.double() for x in given], seen)
        plain = torch.nn.functional.scaled_dot_product_attention(*given, seen, enable_gqa=True).transpose(1, 2)
        used = (seen.any(-1).squeeze(1) & (row.squeeze(-1) < q_len.squeeze(-1))).unsqueeze(-1)
        ours, logs = self.out[index], self.lse[index]
        zero = torch.zeros((), dtype=torch.float64, device=CUDA)
        wrong = [torch.where(used.unsqueeze(-1), (x.double() - exact).abs(), zero).amax(-1) for x in (ours, plain)]
        unit = ulp(torch.where(used, exact.abs().amax(-1), zero), BF16)
        over = torch.where(used, wrong[0] - 2 * wrong[1] - 2 * unit, -1.0)
        return wrong[0].amax(), wrong[1].amax(), over.amax(), torch.where(used, (logs - log).abs(), zero).amax()


def attended(given: list[torch.Tensor], seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out (B, S, Hq, D), LSE (B, S, Hq)) of q (B, Hq, S, D), k, v (B, Hkv, capacity, D) in their own dtype."""
    q, k, v = given
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    log = scores.logsumexp(-1)
    return ((scores - log.unsqueeze(-1)).exp() @ v).transpose(1, 2), log.transpose(1, 2)


@pytest.mark.parametrize("on_device", [False, True], ids=["lengths on the host", "lengths on the device"])
def test_a_thousand_replays_with_random_lengths(on_device: bool) -> None:
    """Batch, query lengths, key lengths and pages change between replays; the graph stays. NaN would be the largest error."""
    decode = Decode(on_device)
    ours, plain, over, logs = (torch.stack(errors) for errors in zip(*(decode.step() for _ in range(REPLAYS))))
    assert torch.isfinite(ours).all() and torch.isfinite(logs).all()
    bad = (over > 0).nonzero().flatten().tolist()
    assert not bad, f"replays {bad[:5]}: {ours[bad[:5]].tolist()} against torch's {plain[bad[:5]].tolist()}"
    assert float(ours.max()) <= 2 * float(plain.max())
    assert float(logs.max()) < 1e-4
