"""The calls of the demo: parts of a Llama-style layer on random input, each with an independent check.

A check holds a result against float64 and a plain PyTorch evaluation with the roundings of a kernel (see
:mod:`kernelgen.testing.tolerance`). Rows that the oracle itself runs (route, moe), and decode, are checked against a
different evaluation: torch's own operators over the keys before they were paged, and loops over experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

import kernelgen
from kernelgen import reference
from kernelgen.dispatch.decision import Decision
from kernelgen.testing.data import cu_seqlens, make_paged_cache, random_tensor, random_tensors, seed_of
from kernelgen.testing.tolerance import Comparison, compare


@dataclass(frozen=True)
class Sizes:
    """Llama 3.1 8B's attention and norms, one of its projections, and a small MoE; tests pass smaller ones."""

    tokens: int = 512
    requests: tuple[int, ...] = (173, 1, 97, 241)
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    decode_lengths: tuple[int, ...] = (517, 1033, 64, 250)
    page_size: int = 16
    hidden: int = 4096
    intermediate: int = 14336
    experts: int = 8
    experts_per_token: int = 2
    moe_tokens: int = 64
    moe_hidden: int = 512
    moe_intermediate: int = 1024

    @property
    def qkv_heads(self) -> tuple[int, int, int]:
        return self.num_q_heads, self.num_kv_heads, self.num_kv_heads


@dataclass(frozen=True)
class Case:
    """One row: what to run, how dispatch decides it, and the check of its result."""

    name: str
    decide: Callable[[], Decision]
    run: Callable[[], torch.Tensor]
    check: Callable[[torch.Tensor], Comparison]


def cases(sizes: Sizes, device: torch.device, seed: int) -> Iterator[Case]:
    """The rows in order; each draws its input when it is reached, so that only one row's tensors live at a time."""
    yield _prefill(sizes, device, seed)
    yield _ragged(sizes, device, seed)
    yield _decode(sizes, device, seed)
    yield _rmsnorm(sizes, device, seed)
    yield from _gemm(sizes, device, seed)
    yield _silu_and_mul(sizes, device, seed)
    yield from _moe(sizes, device, seed)


def _bf16(name: str, device: torch.device, seed: int, *shapes: tuple[int, ...], scale: float = 1.0) -> list[torch.Tensor]:
    return random_tensors(shapes, torch.bfloat16, seed=seed_of(name, seed), device=device, scale=scale)


def _prefill(s: Sizes, device: torch.device, seed: int) -> Case:
    q, k, v = _bf16("prefill", device, seed, *((1, s.tokens, heads, s.head_dim) for heads in s.qkv_heads))

    def check(out: torch.Tensor) -> Comparison:
        exact, plain = reference.attention(q, k, v, causal=True), reference.attention_plain(q, k, v, causal=True)
        return compare(out, _tensor(exact), _tensor(plain), what="attention", tile_dim=-3)

    return Case("attention prefill", lambda: kernelgen.explain("attention", q, k, v, causal=True),
                lambda: _tensor(kernelgen.attention(q, k, v, causal=True)), check)


def _ragged(s: Sizes, device: torch.device, seed: int) -> Case:
    total, starts = sum(s.requests), cu_seqlens(s.requests, device)
    q, k, v = _bf16("ragged", device, seed, *((total, heads, s.head_dim) for heads in s.qkv_heads))
    arguments = (q, k, v, starts, starts)

    def check(out: torch.Tensor) -> Comparison:
        exact = _tensor(reference.attention_varlen(*arguments, causal=True))
        plain = _tensor(reference.attention_varlen_plain(*arguments, causal=True))
        return compare(out, exact, plain, what="attention_varlen", tile_dim=-3)

    return Case("attention ragged", lambda: kernelgen.explain("attention_varlen", *arguments, causal=True),
                lambda: _tensor(kernelgen.attention_varlen(*arguments, causal=True)), check)


def _decode(s: Sizes, device: torch.device, seed: int) -> Case:
    batch = len(s.decode_lengths)
    (q,) = _bf16("decode", device, seed, (batch, s.num_q_heads, s.head_dim))
    keys = [_request_keys(s, device, seed, b, n) for b, n in enumerate(s.decode_lengths)]
    paged = make_paged_cache(keys, s.page_size, seed=seed)  # NaN in every slot that is not in use
    table = kernelgen.PageTable.from_blocks(paged.block_tables, list(s.decode_lengths), s.page_size)
    plan = kernelgen.plan_attention(
        table, num_q_heads=s.num_q_heads, num_kv_heads=s.num_kv_heads, head_dim=s.head_dim, q_dtype=q.dtype)

    def evaluate(dtype: torch.dtype) -> torch.Tensor:
        """One query over all of each request's keys, by torch."""
        rows = []
        for b, (k, v) in enumerate(keys):
            k, v = (t.to(dtype).transpose(0, 1) for t in (k, v))
            rows.append(F.scaled_dot_product_attention(q[b].to(dtype).unsqueeze(1), k, v, enable_gqa=True).squeeze(1))
        return torch.stack(rows)

    def check(out: torch.Tensor) -> Comparison:
        return compare(out, evaluate(torch.float64), evaluate(torch.float32).to(out.dtype), what="paged_attention", tile_dim=-3)

    return Case("attention decode, paged", lambda: plan.decision, lambda: _tensor(plan.run(q, paged.kv_cache)), check)


def _request_keys(s: Sizes, device: torch.device, seed: int, request: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = _bf16(f"decode {request}", device, seed, *[(length, s.num_kv_heads, s.head_dim)] * 2)
    return k, v


def _tensor(result: Any) -> torch.Tensor:
    assert isinstance(result, torch.Tensor)
    return result


def _rmsnorm(s: Sizes, device: torch.device, seed: int) -> Case:
    x, weight = _bf16("rmsnorm", device, seed, (s.tokens, s.hidden), (s.hidden,))

    def check(out: torch.Tensor) -> Comparison:
        exact, plain = (reference.rmsnorm(x, weight, 1e-6, compute_dtype=dtype) for dtype in (torch.float64, torch.float32))
        return compare(out, _tensor(exact), _tensor(plain).to(out.dtype), what="rmsnorm")

    return Case("rmsnorm", lambda: kernelgen.explain("rmsnorm", x, weight), lambda: kernelgen.rmsnorm(x, weight), check)


def _gemm(s: Sizes, device: torch.device, seed: int) -> Iterator[Case]:
    """A projection as nn.Linear stores it: x (tokens, hidden) by w (hidden, hidden) transposed."""
    (x,) = _bf16("gemm x", device, seed, (s.tokens, s.hidden))
    (w,) = _bf16("gemm w", device, seed, (s.hidden, s.hidden), scale=s.hidden**-0.5)
    b = w.t()

    @lru_cache(maxsize=1)
    def expected() -> tuple[torch.Tensor, torch.Tensor]:
        return x.double() @ b.double(), (x.float() @ b.float()).to(x.dtype)

    def check(out: torch.Tensor) -> Comparison:
        return compare(out, *expected(), what="gemm")

    for backend in ("generated", "auto"):
        yield Case(f"gemm, {backend}", lambda backend=backend: kernelgen.explain("gemm", x, b, backend=backend),  # type: ignore[misc]
                   lambda backend=backend: kernelgen.gemm(x, b, backend=backend), check)  # type: ignore[misc]


def _silu_and_mul(s: Sizes, device: torch.device, seed: int) -> Case:
    (x,) = _bf16("silu_and_mul", device, seed, (s.tokens, 2 * s.intermediate))

    def check(out: torch.Tensor) -> Comparison:
        exact, plain = (reference.silu_and_mul(x, compute_dtype=dtype) for dtype in (torch.float64, torch.float32))
        return compare(out, exact, plain.to(out.dtype), what="silu_and_mul")

    return Case("silu_and_mul", lambda: kernelgen.explain("silu_and_mul", x), lambda: kernelgen.silu_and_mul(x), check)


def _moe(s: Sizes, device: torch.device, seed: int) -> Iterator[Case]:
    x, w13, w2 = _bf16("moe", device, seed, (s.moe_tokens, s.moe_hidden), (s.experts, 2 * s.moe_intermediate, s.moe_hidden),
                       (s.experts, s.moe_hidden, s.moe_intermediate), scale=0.1)
    logits = random_tensor((s.moe_tokens, s.experts), seed=seed_of("route", seed), device=device)
    weights, ids = kernelgen.route(logits, s.experts_per_token)

    def dense_weights(dtype: torch.dtype) -> torch.Tensor:
        """(tokens, experts): each expert's weight, 0 where it is not chosen."""
        top = logits.to(dtype).topk(s.experts_per_token, 1)
        return torch.zeros_like(logits, dtype=dtype).scatter(1, top.indices, top.values.softmax(1))

    def check_route(out: torch.Tensor) -> Comparison:
        full = torch.zeros_like(out.new_empty(logits.shape)).scatter(1, ids.long(), out)
        return compare(full, dense_weights(torch.float64), dense_weights(torch.float32), what="route")

    def evaluate(dtype: torch.dtype, mid: torch.dtype) -> torch.Tensor:
        """Every expert on every token, weighted; ``mid``: the type in which the hidden activation is kept."""
        per_expert = dense_weights(dtype)
        total = torch.zeros_like(x, dtype=dtype)
        for e in range(s.experts):
            gate, up = (x.to(dtype) @ w13[e].to(dtype).t()).chunk(2, 1)
            total += per_expert[:, e, None] * ((F.silu(gate) * up).to(mid).to(dtype) @ w2[e].to(dtype).t())
        return total

    def check_moe(out: torch.Tensor) -> Comparison:
        return compare(out, evaluate(torch.float64, torch.float64), evaluate(torch.float32, x.dtype).to(out.dtype), what="moe")

    yield Case("route", lambda: kernelgen.explain("route", logits, s.experts_per_token),
               lambda: kernelgen.route(logits, s.experts_per_token)[0], check_route)
    yield Case("moe", lambda: kernelgen.explain("moe", x, w13, w2, weights, ids), lambda: kernelgen.moe(x, w13, w2, weights, ids),
               check_moe)
