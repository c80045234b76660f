"""A call of every operator and every overload of it, by the public functions: what tests of kernelgen.library run, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernelgen
from kernelgen import GraphBounds, PageTable
from kernelgen.testing.data import random_tensor


class Call(NamedTuple):
    """``run(backend)`` makes the call with fresh written-to tensors; ``overload`` is the operator it is in a graph."""

    overload: str
    run: Callable[[str], Any]


class Recorder(TorchDispatchMode):
    """Keeps the operators of kernelgen that pass, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "kernelgen":
            self.seen.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def recorded(call: Callable[[], Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The one operator that a call is."""
    with Recorder() as recorder:
        call()
    (seen,) = recorder.seen
    return seen


def calls(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Call]:
    x = random_tensor((2, 11, 2, 16), dtype=dtype, device=device, seed=11)
    tokens = x[0, :, 0].contiguous()  # (11, 16)
    side = tokens[:, :8].contiguous()
    lens = torch.tensor([7, 11], dtype=torch.int32)
    table = PageTable.contiguous(lens, 11, device=device)
    q = x[:, 0].contiguous()
    starts = torch.tensor([0, 5, 11], dtype=torch.int32, device=device)
    positions = torch.arange(11, device=device)
    slots = torch.arange(2, device=device)
    weight = torch.ones(16, dtype=dtype, device=device)
    w13, w2 = random_tensor((4, 16, 16), dtype=dtype, device=device, seed=1), random_tensor((4, 16, 8), dtype=dtype, device=device, seed=2)
    ids = torch.tensor([[0, 3], [1, 2], [3, 3]] * 3 + [[2, 0], [1, 0]], dtype=torch.int32, device=device)
    weights = torch.full((11, 2), 0.5, device=device)
    ends = torch.tensor([2, 2, 6, 11], dtype=torch.int32, device=device)
    stack = random_tensor((4, 16, 8), dtype=dtype, device=device, seed=3)
    counts = torch.tensor([3, 3, 3, 3],  # other rows are unspecified
                          dtype=torch.int32, device=device)
    a3 = random_tensor((4, 3, 16), dtype=dtype, device=device, seed=4)
    sort = kernelgen.moe_sort(ids, 4, backend="reference")
    rows = random_tensor((22, 16), dtype=dtype, device=device, seed=5)

    def new(*shape: int, like: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=like, device=device)

    def f32(*shape: int) -> torch.Tensor:
        return new(*shape, like=torch.float32)

    def fp8(*shape: int) -> torch.Tensor:
        return new(*shape, like=torch.float8_e4m3fn)

    def plan(backend: str, bounds: GraphBounds | None = None, *, captured: bool = False, sinks: bool = False) -> Any:
        made = kernelgen.plan_attention(table, num_q_heads=2, num_kv_heads=2, head_dim=16, q_dtype=dtype, backend=backend,
                                        cuda_graph_bounds=bounds, sinks=sinks)
        return kept(made, captured)

    def mla(backend: str, bounds: GraphBounds | None = None, *, captured: bool = False) -> Any:
        made = kernelgen.plan_mla(table, num_heads=2, q_dtype=dtype, scale=0.3, head_dim_latent=8, head_dim_rope=8, backend=backend,
                                  cuda_graph_bounds=bounds)
        return kept(made, captured)

    q8, latent, bounds = q[..., :8].contiguous(), x[:, :, 0].contiguous(), GraphBounds(4, 11)
    levels = [(table, torch.tensor([0, 1, 2], dtype=torch.int32))]
    k = kernelgen
    cache, heads, there = (x, x), x.transpose(1, 2), PageTable.contiguous(lens.to(device), 11)
    listed: list[tuple[str, Callable[[str], Any]]] = [
        ("attention", lambda b: k.attention(x, x, x, causal=True, backend=b)),
        ("attention.full", lambda b: k.attention(x, x, x, sinks=f32(2), backend=b)),
        ("attention.lse", lambda b: k.attention(x, x, x, window=(3, None), scale=0.2, return_lse=True, backend=b)),
        ("attention.out", lambda b: k.attention(x, x, x, causal=True, out=torch.zeros_like(x), backend=b)),
        ("attention_varlen", lambda b: k.attention_varlen(x[0], x[0], x[0], starts, starts, max_seqlen_q=6, backend=b)),
        ("attention_varlen.full", lambda b: k.attention_varlen(x[0], x[0], x[0], starts, starts, soft_cap=2.0, backend=b)),
        ("attention_varlen.lse", lambda b: k.attention_varlen(x[0], x[0], x[0], starts, starts, return_lse=True, backend=b)),
        ("attention_varlen.out", lambda b: k.attention_varlen(x[0], x[0], x[0], starts, starts, lse=f32(11, 2), backend=b)),
        ("sdpa", lambda b: k.sdpa(heads, heads, heads, is_causal=True)),
        ("cascade_attention", lambda b: k.cascade_attention(q, cache, levels, backend=b)),
        ("cascade_attention.lse", lambda b: k.cascade_attention(q, cache, levels, return_lse=True, backend=b)),
        ("cascade_attention.out", lambda b: k.cascade_attention(q, cache, levels, out=torch.zeros_like(q), backend=b)),
        ("attention_run", lambda b: plan(b, bounds).run(q, cache)),
        ("attention_run.full", lambda b: plan(b, captured=True, sinks=True).run(q, cache, sinks=f32(2))),
        ("attention_run.lse", lambda b: plan(b, captured=True).run(q, cache, return_lse=True)),
        ("attention_run.out", lambda b: plan(b, captured=True).run(q, cache, out=torch.zeros_like(q))),
        ("attention_run.once", lambda b: plan(b).run(q, cache)),
        ("attention_run.once_full", lambda b: plan(b, sinks=True).run(q, cache, sinks=f32(2))),
        ("attention_run.once_lse", lambda b: plan(b).run(q, cache, return_lse=True)),
        ("attention_run.once_out", lambda b: plan(b).run(q, cache, out=torch.zeros_like(q), lse=f32(2, 2))),
        ("mla_run", lambda b: mla(b, bounds).run(q8, q8, latent)),
        ("mla_run.lse", lambda b: mla(b, captured=True).run(q8, q8, latent, return_lse=True)),
        ("mla_run.out", lambda b: mla(b, captured=True).run(q8, q8, latent, out=torch.zeros_like(q8))),
        ("mla_run.once", lambda b: mla(b).run(q8, q8, latent)),
        ("mla_run.once_lse", lambda b: mla(b).run(q8, q8, latent, return_lse=True)),
        ("mla_run.once_out", lambda b: mla(b).run(q8, q8, latent, out=torch.zeros_like(q8))),
        ("merge_states", lambda b: k.merge_states(x, x[..., 0].float(), backend=b)),
        ("merge_states.out", lambda b: k.merge_states(x, x[..., 0].float(), out=new(11, 2, 16), backend=b)),
        ("rope", lambda b: k.rope(x[0], x[0], positions, backend=b)),
        ("rope.full", lambda b: k.rope(x[0], x[0], positions, interleaved=True, backend=b)),
        ("rope.inplace", lambda b: k.rope(x[0].clone(), x[1].clone(), positions, inplace=True, backend=b)),
        ("rope.inplace_full", lambda b: k.rope(x[0].clone(), x[1].clone(), positions, interleaved=True, inplace=True, backend=b)),
        ("append_kv", lambda b: k.append_kv(new(3, 2, 4, 2, 16), q, q, slot_mapping=slots, backend=b)),
        ("append_kv.full", lambda b: k.append_kv(new(2, 2, 11, 2, 16), q, q, there, positions=slots, backend=b)),
        ("append_mla", lambda b: k.append_mla(new(3, 4, 16), None, q8[:, 0], q8[:, 1], slot_mapping=slots, backend=b)),
        ("append_mla.full", lambda b: k.append_mla(new(2, 11, 16), None, q8[:, 0], q8[:, 1], there, positions=slots, backend=b)),
        ("rope_append_kv", lambda b: k.rope_append_kv(q, q, q, new(3, 2, 4, 2, 16), positions=slots, slot_mapping=slots, backend=b)),
        ("rope_append_kv.full", lambda b: k.rope_append_kv(q, q, q, new(3, 2, 4, 2, 16), positions=slots, slot_mapping=slots, theta=5e5,
                                                           backend=b)),
        ("rope_append_kv.out", lambda b: k.rope_append_kv(q, q, q, (new(3, 4, 2, 16), new(3, 4, 2, 16)), positions=slots,
                                                         slot_mapping=slots, out=torch.zeros_like(q), backend=b)),
        ("gemm", lambda b: k.gemm(tokens, tokens.t(), backend=b)),
        ("gemm.full", lambda b: k.gemm(tokens, tokens.t(), c=new(11, 11), beta=0.5, backend=b)),
        ("gemm.scaled", lambda b: k.gemm(tokens, tokens.t(), out_scale="row", backend=b)),
        ("gemm.out", lambda b: k.gemm(tokens, tokens.t(), out=new(11, 11), backend=b)),
        ("grouped_gemm", lambda b: k.grouped_gemm(tokens, stack, ends, backend=b)),
        ("grouped_gemm.full", lambda b: k.grouped_gemm(tokens, stack, ends, out_dtype=torch.float32, backend=b)),
        ("grouped_gemm.scaled", lambda b: k.grouped_gemm(tokens, stack, [2, 2, 6, 11], out_scale="row", backend=b)),
        ("grouped_gemm.out", lambda b: k.grouped_gemm(tokens, stack, ends, out=new(11, 8), backend=b)),
        ("grouped_gemm_masked", lambda b: k.grouped_gemm_masked(a3, stack, counts, backend=b)),
        ("grouped_gemm_masked.full", lambda b: k.grouped_gemm_masked(a3, stack, counts, c=new(4, 3, 8), backend=b)),
        ("grouped_gemm_masked.scaled", lambda b: k.grouped_gemm_masked(a3, stack, [3, 3, 3, 3], out_scale="row", backend=b)),
        ("grouped_gemm_masked.out", lambda b: k.grouped_gemm_masked(a3, stack, counts, out=new(4, 3, 8), backend=b)),
        ("quantize_fp8", lambda b: k.quantize_fp8(tokens, "row", backend=b)),
        ("quantize_fp8.full", lambda b: k.quantize_fp8(tokens, "row", activation="swiglu", backend=b)),
        ("quantize_fp8.out", lambda b: k.quantize_fp8(tokens, "row", out=(fp8(11, 16), f32(11, 1)), backend=b)),
        ("route", lambda b: k.route(tokens, 2, backend=b)),
        ("route.full", lambda b: k.route(tokens, 2, scaling=2.0, backend=b)),
        ("route.counts", lambda b: k.route(tokens, 2, counts=new(16, like=torch.int32), backend=b)),
        ("route.counts_full", lambda b: k.route(tokens, 2, scaling=2.0, counts=new(16, like=torch.int32), backend=b)),
        ("moe_sort", lambda b: k.moe_sort(ids, 4, backend=b)),
        ("moe_permute", lambda b: k.moe_permute(tokens, sort, backend=b)),
        ("moe_unpermute", lambda b: k.moe_unpermute(rows, sort, weights, backend=b)),
        ("moe_unpermute.out", lambda b: k.moe_unpermute(rows, sort, weights, out=new(11, 16), backend=b)),
        ("moe", lambda b: k.moe(tokens, w13, w2, weights, ids, backend=b)),
        ("moe.full", lambda b: k.moe(tokens, w13, w2, weights, ids, weights_on_input=True, backend=b)),
        ("moe.out", lambda b: k.moe(tokens, w13, w2, weights, ids, out=new(11, 16), backend=b)),
        ("rmsnorm", lambda b: k.rmsnorm(x, weight, backend=b)),
        ("rmsnorm.out", lambda b: k.rmsnorm(tokens, weight, out=new(11, 16), backend=b)),
        ("rmsnorm.residual", lambda b: k.rmsnorm(tokens, weight, residual=tokens.clone(), backend=b)),
        ("rmsnorm.residual_out", lambda b: k.rmsnorm(tokens, weight, residual=tokens.clone(), out=new(11, 16), backend=b)),
        ("silu_and_mul", lambda b: k.silu_and_mul(tokens, backend=b)),
        ("silu_and_mul.out", lambda b: k.silu_and_mul(tokens, out=torch.zeros_like(side), backend=b)),
    ]
    return [Call(*one) for one in listed]


_plans: list[Any] = []


def kept(plan: Any, captured: bool) -> Any:
    """A recorded operator knows its plan by number alone: hold on to it. ``captured``: taken for one within bounds, which only a
    kernel of our own could be."""
    _plans.append(plan)
    if captured:
        vars(plan)["captured"] = True
    return plan
