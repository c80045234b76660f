"""Kernels of operators: from flat arguments to the public function. Written by write.py: change the table, then run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernelgen.library import forms


def attention(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(q: Any, k: Any, v: Any, causal: Any = False, window_left: Any = None, window_right: Any = None, scale: Any = None) -> Any:
        return call(q, k, v, causal=causal, window=forms.join_window(window_left, window_right), scale=scale)

    return kernel


def attention_varlen(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, causal: Any = False, window_left: Any = None,
        window_right: Any = None, scale: Any = None,
    ) -> Any:
        return call(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, window=forms.join_window(window_left, window_right), scale=scale)

    return kernel


def sdpa(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False, scale: Any = None,
        enable_gqa: Any = False,
    ) -> Any:
        return call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    return kernel


def attention_run(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(plan: Any, q: Any, kv_cache: Any, kv_cache_values: Any = None) -> Any:
        return call(forms.plans.get(plan), q, kv_cache if kv_cache_values is None else forms.join_cache(kv_cache, kv_cache_values))

    return kernel


def attention_run_once(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(plan: Any, q: Any, kv_cache: Any, kv_cache_values: Any = None) -> Any:
        return call(forms.plans.get(plan), q, kv_cache if kv_cache_values is None else forms.join_cache(kv_cache, kv_cache_values))

    return kernel


def mla_run(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        plan: Any, q_nope: Any, q_rope: Any, ckv_cache: Any, k_rope_cache: Any = None, k_scale: Any = None, k_scale_value: Any = None,
    ) -> Any:
        return call(
            forms.plans.get(plan), q_nope, q_rope, ckv_cache, k_rope_cache,
            k_scale=k_scale if k_scale_value is None else forms.join_scale(k_scale, k_scale_value),
        )

    return kernel


def mla_run_lse(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        plan: Any, q_nope: Any, q_rope: Any, ckv_cache: Any, k_rope_cache: Any = None, k_scale: Any = None, k_scale_value: Any = None,
    ) -> Any:
        return call(
            forms.plans.get(plan), q_nope, q_rope, ckv_cache, k_rope_cache,
            k_scale=k_scale if k_scale_value is None else forms.join_scale(k_scale, k_scale_value), return_lse=True,
        )

    return kernel


def mla_run_out(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        plan: Any, q_nope: Any, q_rope: Any, ckv_cache: Any, out: Any, lse: Any, k_rope_cache: Any = None, k_scale: Any = None,
        k_scale_value: Any = None,
    ) -> Any:
        call(
            forms.plans.get(plan), q_nope, q_rope, ckv_cache, k_rope_cache,
            k_scale=k_scale if k_scale_value is None else forms.join_scale(k_scale, k_scale_value), out=out, lse=lse,
        )

    return kernel


def mla_run_once(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        plan: Any, q_nope: Any, q_rope: Any, ckv_cache: Any, k_rope_cache: Any = None, k_scale: Any = None, k_scale_value: Any = None,
    ) -> Any:
        return call(
            forms.plans.get(plan), q_nope, q_rope, ckv_cache, k_rope_cache,
            k_scale=k_scale if k_scale_value is None else forms.join_scale(k_scale, k_scale_value),
        )

    return kernel


def mla_run_once_lse(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        plan: Any, q_nope: Any, q_rope: Any, ckv_cache: Any, k_rope_cache: Any = None, k_scale: Any = None, k_scale_value: Any = None,
    ) -> Any:
        return call(
            forms.plans.get(plan), q_nope, q_rope, ckv_cache, k_rope_cache,
            k_scale=k_scale if k_scale_value is None else forms.join_scale(k_scale, k_scale_value), return_lse=True,
        )

    return kernel


def mla_run_once_out(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        plan: Any, q_nope: Any, q_rope: Any, ckv_cache: Any, out: Any, lse: Any, k_rope_cache: Any = None, k_scale: Any = None,
        k_scale_value: Any = None,
    ) -> Any:
        call(
            forms.plans.get(plan), q_nope, q_rope, ckv_cache, k_rope_cache,
            k_scale=k_scale if k_scale_value is None else forms.join_scale(k_scale, k_scale_value), out=out, lse=lse,
        )

    return kernel


def merge_states(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(outs: Any, lses: Any, backend: Any = "auto") -> Any:
        return call(outs, lses, backend=backend)

    return kernel


def merge_states_out(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(outs: Any, lses: Any, out: Any, lse: Any, backend: Any = "auto") -> Any:
        call(outs, lses, backend=backend, out=out, lse=lse)

    return kernel


def rope(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(q: Any, k: Any, positions: Any, theta: Any = 10000.0, cos_sin_cache: Any = None) -> Any:
        return call(q, k, positions, theta=theta, cos_sin_cache=cos_sin_cache)

    return kernel


def rope_full(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        q: Any, k: Any, positions: Any, theta: Any = 10000.0, cos_sin_cache: Any = None, rotary_dim: Any = None, interleaved: Any = False,
        scaling: Any = None, backend: Any = "auto",
    ) -> Any:
        return call(
            q, k, positions, theta=theta, cos_sin_cache=cos_sin_cache, rotary_dim=rotary_dim, interleaved=interleaved,
            scaling=forms.join_scaling(scaling), backend=backend,
        )

    return kernel


def rope_inplace(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(q: Any, k: Any, positions: Any, theta: Any = 10000.0, cos_sin_cache: Any = None) -> Any:
        call(q, k, positions, theta=theta, cos_sin_cache=cos_sin_cache, inplace=True)

    return kernel


def rope_inplace_full(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        q: Any, k: Any, positions: Any, theta: Any = 10000.0, cos_sin_cache: Any = None, rotary_dim: Any = None, interleaved: Any = False,
        scaling: Any = None, backend: Any = "auto",
    ) -> Any:
        call(
            q, k, positions, theta=theta, cos_sin_cache=cos_sin_cache, rotary_dim=rotary_dim, interleaved=interleaved,
            scaling=forms.join_scaling(scaling), backend=backend, inplace=True,
        )

    return kernel


def append_kv(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(kv_cache: Any, k: Any, v: Any, slot_mapping: Any = None, kv_cache_values: Any = None) -> Any:
        call(kv_cache if kv_cache_values is None else forms.join_cache(kv_cache, kv_cache_values), k, v, slot_mapping=slot_mapping)

    return kernel


def append_mla(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(ckv_cache: Any, k_rope_cache: Any, ckv: Any, k_rope: Any, slot_mapping: Any = None) -> Any:
        call(ckv_cache, k_rope_cache, ckv, k_rope, slot_mapping=slot_mapping)

    return kernel


def rope_append_kv(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(q: Any, k: Any, v: Any, kv_cache: Any, positions: Any, slot_mapping: Any = None, kv_cache_values: Any = None) -> Any:
        return call(
            q, k, v, kv_cache if kv_cache_values is None else forms.join_cache(kv_cache, kv_cache_values), positions=positions,
            slot_mapping=slot_mapping,
        )

    return kernel


def gemm(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(a: Any, b: Any, bias: Any = None, activation: Any = None, gate_up: Any = "gate_first") -> Any:
        return call(a, b, bias=bias, activation=activation, gate_up=gate_up)

    return kernel


def grouped_gemm(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        a: Any, b: Any, offsets: Any = None, offsets_list: Any = None, bias: Any = None, activation: Any = None,
        gate_up: Any = "gate_first",
    ) -> Any:
        return call(
            a, b, offsets if offsets_list is None else forms.join_numbers(offsets, offsets_list), bias=bias, activation=activation,
            gate_up=gate_up,
        )

    return kernel


def grouped_gemm_masked(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        a: Any, b: Any, counts: Any = None, counts_list: Any = None, bias: Any = None, activation: Any = None, gate_up: Any = "gate_first",
    ) -> Any:
        return call(
            a, b, counts if counts_list is None else forms.join_numbers(counts, counts_list), bias=bias, activation=activation,
            gate_up=gate_up,
        )

    return kernel


def quantize_fp8(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(x: Any, recipe: Any = "tensor", dtype: Any = None) -> Any:
        return call(x, recipe, dtype=forms.join_code_type(dtype))

    return kernel


def quantize_fp8_full(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        x: Any, recipe: Any = "tensor", dtype: Any = None, activation: Any = None, gate_up: Any = "gate_first", backend: Any = "auto",
    ) -> Any:
        return call(x, recipe, dtype=forms.join_code_type(dtype), activation=activation, gate_up=gate_up, backend=backend)

    return kernel


def quantize_fp8_out(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        x: Any, out: Any, out_scales: Any, recipe: Any = "tensor", dtype: Any = None, activation: Any = None, gate_up: Any = "gate_first",
        backend: Any = "auto",
    ) -> Any:
        call(
            x, recipe, dtype=forms.join_code_type(dtype), activation=activation, gate_up=gate_up, backend=backend,
            out=out if out_scales is None else (out, out_scales),
        )

    return kernel


def route(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(logits: Any, k: Any, method: Any = "softmax", renormalize: Any = True) -> Any:
        return call(logits, k, method=method, renormalize=renormalize)

    return kernel


def route_full(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        logits: Any, k: Any, method: Any = "softmax", renormalize: Any = True, bias: Any = None, num_groups: Any = None,
        topk_groups: Any = None, scaling: Any = 1.0, backend: Any = "auto",
    ) -> Any:
        return call(
            logits, k, method=method, renormalize=renormalize, bias=bias, num_groups=num_groups, topk_groups=topk_groups, scaling=scaling,
            backend=backend,
        )

    return kernel


def route_counts(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(logits: Any, k: Any, counts: Any, method: Any = "softmax", renormalize: Any = True) -> Any:
        return call(logits, k, method=method, renormalize=renormalize, counts=counts)

    return kernel


def route_counts_full(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        logits: Any, k: Any, counts: Any, method: Any = "softmax", renormalize: Any = True, bias: Any = None, num_groups: Any = None,
        topk_groups: Any = None, scaling: Any = 1.0, backend: Any = "auto",
    ) -> Any:
        return call(
            logits, k, method=method, renormalize=renormalize, bias=bias, num_groups=num_groups, topk_groups=topk_groups, scaling=scaling,
            counts=counts, backend=backend,
        )

    return kernel


def moe_sort(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        ids: Any, num_experts: Any, expert_map: Any = None, expert_map_range: Any = None, expert_map_list: Any = None,
        backend: Any = "auto",
    ) -> Any:
        return call(ids, num_experts, expert_map=forms.join_map(expert_map, expert_map_range, expert_map_list), backend=backend)

    return kernel


def moe_permute(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(x: Any, row_of_slot: Any, weights: Any = None, backend: Any = "auto") -> Any:
        return call(x, forms.join_sort(row_of_slot), weights=weights, backend=backend)

    return kernel


def moe_unpermute(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(rows: Any, row_of_slot: Any, weights: Any, addend: Any = None, backend: Any = "auto") -> Any:
        return call(rows, forms.join_sort(row_of_slot), weights, addend=addend, backend=backend)

    return kernel


def moe_unpermute_out(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(rows: Any, row_of_slot: Any, weights: Any, out: Any, addend: Any = None, backend: Any = "auto") -> Any:
        call(rows, forms.join_sort(row_of_slot), weights, addend=addend, backend=backend, out=out)

    return kernel


def moe(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(
        x: Any, w13: Any, w2: Any, weights: Any, ids: Any, activation: Any = "swiglu", alpha: Any = None, limit: Any = None,
        gate_up: Any = "gate_first", bias13: Any = None, bias2: Any = None,
    ) -> Any:
        return call(x, w13, w2, weights, ids, activation=activation, alpha=alpha, limit=limit, gate_up=gate_up, bias13=bias13, bias2=bias2)

    return kernel


def rmsnorm(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(x: Any, weight: Any, eps: Any = 1e-06, backend: Any = "auto") -> Any:
        return call(x, weight, eps, backend=backend)

    return kernel


def rmsnorm_out(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(x: Any, weight: Any, out: Any, eps: Any = 1e-06, backend: Any = "auto") -> Any:
        call(x, weight, eps, backend=backend, out=out)

    return kernel


def rmsnorm_residual(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(x: Any, weight: Any, residual: Any, eps: Any = 1e-06, backend: Any = "auto") -> Any:
        return call(x, weight, eps, residual=residual, backend=backend)

    return kernel


def rmsnorm_residual_out(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(x: Any, weight: Any, residual: Any, out: Any, eps: Any = 1e-06, backend: Any = "auto") -> Any:
        call(x, weight, eps, residual=residual, backend=backend, out=out)

    return kernel


def silu_and_mul(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(x: Any, backend: Any = "auto") -> Any:
        return call(x, backend=backend)

    return kernel


def silu_and_mul_out(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(x: Any, out: Any, backend: Any = "auto") -> Any:
        call(x, backend=backend, out=out)

    return kernel
