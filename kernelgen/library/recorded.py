"""Calls of the operators, with the signatures of the public functions. Written by write.py: change the table, then run it."""

from __future__ import annotations

from typing import Any

import torch

from kernelgen.library import forms, helpers, shapes


def attention(
    q: Any, k: Any, v: Any, *, causal: Any = False, window: Any = None, scale: Any = None, soft_cap: Any = None, alibi_slopes: Any = None,
    sinks: Any = None, mask: Any = None, block_mask: Any = None, variant: Any = None, kv_lens: Any = None, q_scale: Any = None,
    k_scale: Any = None, v_scale: Any = None, return_lse: Any = False, out: Any = None, lse: Any = None, deterministic: Any = True,
    batch_invariant: Any = False, backend: Any = "auto",
) -> Any:
    writes = out is not None or lse is not None
    if writes:
        made = shapes.attention(q=q, v=v, return_lse=return_lse, lse=lse)
        out, lse = helpers.filled((out, lse), made)
    window_left, window_right = forms.split_window(window)
    block_mask_counts, block_mask_indices, block_mask_size = forms.split_block_mask(block_mask)
    variant, variant_tensors, variant_scalars = forms.split_variant(variant)
    q_scale, q_scale_value = forms.split_scale(q_scale)
    k_scale, k_scale_value = forms.split_scale(k_scale)
    v_scale, v_scale_value = forms.split_scale(v_scale)
    tail = helpers.trimmed((
        causal, window_left, window_right, scale, soft_cap, alibi_slopes, sinks, mask, block_mask_counts, block_mask_indices,
        block_mask_size, variant, variant_tensors, variant_scalars, kv_lens, q_scale, q_scale_value, k_scale, k_scale_value, v_scale,
        v_scale_value, deterministic, batch_invariant, backend,
    ), (
        False, None, None, None, None, None, None, None, None, None, None, 0, None, None, None, None, None, None, None, None, None, True,
        False, "auto",
    ))
    if writes:
        torch.ops.kernelgen.attention.out(q, k, v, out, lse, *tail)
        return (out, lse) if return_lse else out
    if return_lse:
        return torch.ops.kernelgen.attention.lse(q, k, v, *tail)
    if len(tail) > 4:
        return torch.ops.kernelgen.attention.full(q, k, v, *tail)
    return torch.ops.kernelgen.attention.default(q, k, v, *tail)


def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
    causal: Any = False, window: Any = None, scale: Any = None, soft_cap: Any = None, alibi_slopes: Any = None, sinks: Any = None,
    mask: Any = None, block_mask: Any = None, variant: Any = None, kv_lens: Any = None, q_scale: Any = None, k_scale: Any = None,
    v_scale: Any = None, return_lse: Any = False, out: Any = None, lse: Any = None, deterministic: Any = True,
    batch_invariant: Any = False, backend: Any = "auto",
) -> Any:
    writes = out is not None or lse is not None
    if writes:
        made = shapes.attention_varlen(q=q, v=v, return_lse=return_lse, lse=lse)
        out, lse = helpers.filled((out, lse), made)
    window_left, window_right = forms.split_window(window)
    block_mask_counts, block_mask_indices, block_mask_size = forms.split_block_mask(block_mask)
    variant, variant_tensors, variant_scalars = forms.split_variant(variant)
    q_scale, q_scale_value = forms.split_scale(q_scale)
    k_scale, k_scale_value = forms.split_scale(k_scale)
    v_scale, v_scale_value = forms.split_scale(v_scale)
    tail = helpers.trimmed((
        causal, window_left, window_right, scale, soft_cap, alibi_slopes, sinks, mask, block_mask_counts, block_mask_indices,
        block_mask_size, variant, variant_tensors, variant_scalars, kv_lens, q_scale, q_scale_value, k_scale, k_scale_value, v_scale,
        v_scale_value, deterministic, batch_invariant, backend,
    ), (
        False, None, None, None, None, None, None, None, None, None, None, 0, None, None, None, None, None, None, None, None, None, True,
        False, "auto",
    ))
    if writes:
        torch.ops.kernelgen.attention_varlen.out(q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, *tail)
        return (out, lse) if return_lse else out
    if return_lse:
        return torch.ops.kernelgen.attention_varlen.lse(q, k, v, cu_seqlens_q, cu_seqlens_k, *tail)
    if len(tail) > 4:
        return torch.ops.kernelgen.attention_varlen.full(q, k, v, cu_seqlens_q, cu_seqlens_k, *tail)
    return torch.ops.kernelgen.attention_varlen.default(q, k, v, cu_seqlens_q, cu_seqlens_k, *tail)


def sdpa(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = None, is_causal: Any = False, scale: Any = None,
    enable_gqa: Any = False,
) -> Any:
    dropout_p = 0.0 if dropout_p is None else dropout_p
    query, key, value = helpers.as_autocast(query, key, value)
    tail = helpers.trimmed((attn_mask, dropout_p, is_causal, scale, enable_gqa), (None, 0.0, False, None, False))
    made = torch.ops.kernelgen.sdpa.default(query, key, value, *tail)
    return helpers.heads_first(made)


def cascade_attention(
    q: Any, kv_cache: Any, levels: Any, *, kv_layout: Any = "NHD", causal: Any = True, window: Any = None, scale: Any = None,
    soft_cap: Any = None, alibi_slopes: Any = None, sinks: Any = None, mask: Any = None, variant: Any = None, q_scale: Any = None,
    k_scale: Any = None, v_scale: Any = None, kv_scales: Any = None, rotation: Any = None, batch_invariant: Any = False,
    deterministic: Any = True, return_lse: Any = False, out: Any = None, lse: Any = None, backend: Any = "auto", features: Any = None,
) -> Any:
    features, causal, window, scale, soft_cap, variant, kv_scales, rotation, batch_invariant = helpers.from_features(
        features, causal, window, scale, soft_cap, variant, kv_scales, rotation, batch_invariant,
    )
    writes = out is not None or lse is not None
    if writes:
        made = shapes.over_cache(q=q, kv_cache=kv_cache, return_lse=return_lse, lse=lse)
        out, lse = helpers.filled((out, lse), made)
    kv_cache, kv_cache_values = forms.split_cache(kv_cache)
    starts, page_sizes, tables = forms.split_levels(levels)
    window_left, window_right = forms.split_window(window)
    variant, variant_tensors, variant_scalars = forms.split_variant(variant)
    q_scale, q_scale_value = forms.split_scale(q_scale)
    k_scale, k_scale_value = forms.split_scale(k_scale)
    v_scale, v_scale_value = forms.split_scale(v_scale)
    tail = helpers.trimmed((
        kv_cache_values, kv_layout, causal, window_left, window_right, scale, soft_cap, alibi_slopes, sinks, mask, variant,
        variant_tensors, variant_scalars, q_scale, q_scale_value, k_scale, k_scale_value, v_scale, v_scale_value, kv_scales, rotation,
        batch_invariant, deterministic, backend,
    ), (
        None, "NHD", True, None, None, None, None, None, None, None, 0, None, None, None, None, None, None, None, None, None, None, False,
        True, "auto",
    ))
    if writes:
        torch.ops.kernelgen.cascade_attention.out(q, kv_cache, starts, page_sizes, tables, out, lse, *tail)
        return (out, lse) if return_lse else out
    if return_lse:
        return torch.ops.kernelgen.cascade_attention.lse(q, kv_cache, starts, page_sizes, tables, *tail)
    return torch.ops.kernelgen.cascade_attention.default(q, kv_cache, starts, page_sizes, tables, *tail)


def attention_run(
    plan: Any, q: Any, kv_cache: Any, *, alibi_slopes: Any = None, sinks: Any = None, mask: Any = None, q_scale: Any = None,
    k_scale: Any = None, v_scale: Any = None, variant_args: Any = None, return_lse: Any = False, out: Any = None, lse: Any = None,
) -> Any:
    writes = out is not None or lse is not None
    if writes:
        made = shapes.over_cache(q=q, kv_cache=kv_cache, return_lse=return_lse, lse=lse)
        out, lse = helpers.filled((out, lse), made)
    also = not plan.captured
    plan, = forms.split_plan(plan)
    kv_cache, kv_cache_values = forms.split_cache(kv_cache)
    q_scale, q_scale_value = forms.split_scale(q_scale)
    k_scale, k_scale_value = forms.split_scale(k_scale)
    v_scale, v_scale_value = forms.split_scale(v_scale)
    forms.split_arguments(variant_args)
    tail = helpers.trimmed((
        kv_cache_values, alibi_slopes, sinks, mask, q_scale, q_scale_value, k_scale, k_scale_value, v_scale, v_scale_value,
    ), (None, None, None, None, None, None, None, None, None, None))
    if writes:
        if also:
            torch.ops.kernelgen.attention_run.once_out(plan, q, kv_cache, out, lse, *tail)
        else:
            torch.ops.kernelgen.attention_run.out(plan, q, kv_cache, out, lse, *tail)
        return (out, lse) if return_lse else out
    if return_lse:
        if also:
            return torch.ops.kernelgen.attention_run.once_lse(plan, q, kv_cache, *tail)
        else:
            return torch.ops.kernelgen.attention_run.lse(plan, q, kv_cache, *tail)
    if len(tail) > 1:
        if also:
            return torch.ops.kernelgen.attention_run.once_full(plan, q, kv_cache, *tail)
        else:
            return torch.ops.kernelgen.attention_run.full(plan, q, kv_cache, *tail)
    if also:
        return torch.ops.kernelgen.attention_run.once(plan, q, kv_cache, *tail)
    else:
        return torch.ops.kernelgen.attention_run.default(plan, q, kv_cache, *tail)


def mla_run(
    plan: Any, q_nope: Any, q_rope: Any, ckv_cache: Any, k_rope_cache: Any = None, *, k_scale: Any = None, return_lse: Any = False,
    out: Any = None, lse: Any = None,
) -> Any:
    writes = out is not None or lse is not None
    if writes:
        made = shapes.latent(q_nope=q_nope, return_lse=return_lse, lse=lse)
        out, lse = helpers.filled((out, lse), made)
    also = not plan.captured
    plan, = forms.split_plan(plan)
    k_scale, k_scale_value = forms.split_scale(k_scale)
    tail = helpers.trimmed((k_rope_cache, k_scale, k_scale_value), (None, None, None))
    if writes:
        if also:
            torch.ops.kernelgen.mla_run.once_out(plan, q_nope, q_rope, ckv_cache, out, lse, *tail)
        else:
            torch.ops.kernelgen.mla_run.out(plan, q_nope, q_rope, ckv_cache, out, lse, *tail)
        return (out, lse) if return_lse else out
    if return_lse:
        if also:
            return torch.ops.kernelgen.mla_run.once_lse(plan, q_nope, q_rope, ckv_cache, *tail)
        else:
            return torch.ops.kernelgen.mla_run.lse(plan, q_nope, q_rope, ckv_cache, *tail)
    if also:
        return torch.ops.kernelgen.mla_run.once(plan, q_nope, q_rope, ckv_cache, *tail)
    else:
        return torch.ops.kernelgen.mla_run.default(plan, q_nope, q_rope, ckv_cache, *tail)


def merge_states(outs: Any, lses: Any, *, out: Any = None, lse: Any = None, backend: Any = "auto") -> Any:
    writes = out is not None or lse is not None
    if writes:
        made = shapes.merge_states(outs=outs, lses=lses)
        out, lse = helpers.filled((out, lse), made)
    tail = helpers.trimmed((backend,), ("auto",))
    if writes:
        torch.ops.kernelgen.merge_states.out(outs, lses, out, lse, *tail)
        return (out, lse)
    return torch.ops.kernelgen.merge_states.default(outs, lses, *tail)


def rope(
    q: Any, k: Any, positions: Any, *, theta: Any = None, cos_sin_cache: Any = None, rotary_dim: Any = None, interleaved: Any = False,
    scaling: Any = None, inplace: Any = False, backend: Any = "auto",
) -> Any:
    theta = 10000.0 if theta is None else theta
    also = inplace
    scaling, = forms.split_scaling(scaling)
    tail = helpers.trimmed((theta, cos_sin_cache, rotary_dim, interleaved, scaling, backend), (10000.0, None, None, False, None, "auto"))
    if len(tail) > 2:
        if also:
            made = torch.ops.kernelgen.rope.inplace_full(q, k, positions, *tail)
        else:
            made = torch.ops.kernelgen.rope.full(q, k, positions, *tail)
    else:
        if also:
            made = torch.ops.kernelgen.rope.inplace(q, k, positions, *tail)
        else:
            made = torch.ops.kernelgen.rope.default(q, k, positions, *tail)
    return helpers.both_turned(made, q, k, inplace)


def append_kv(
    kv_cache: Any, k: Any, v: Any, page_table: Any = None, *, positions: Any = None, batch_indices: Any = None, slot_mapping: Any = None,
    kv_layout: Any = "NHD", k_scale: Any = None, v_scale: Any = None, kv_scales: Any = None, backend: Any = "auto",
) -> Any:
    kv_cache, kv_cache_values = forms.split_cache(kv_cache)
    page_size, kv_indptr, kv_indices, kv_last_page_len, block_tables, seq_lens = forms.split_table(page_table)
    k_scale, k_scale_value = forms.split_scale(k_scale)
    v_scale, v_scale_value = forms.split_scale(v_scale)
    tail = helpers.trimmed((
        slot_mapping, kv_cache_values, page_size, kv_indptr, kv_indices, kv_last_page_len, block_tables, seq_lens, positions,
        batch_indices, kv_layout, k_scale, k_scale_value, v_scale, v_scale_value, kv_scales, backend,
    ), (None, None, 0, None, None, None, None, None, None, None, "NHD", None, None, None, None, None, "auto"))
    if len(tail) > 2:
        return torch.ops.kernelgen.append_kv.full(kv_cache, k, v, *tail)
    return torch.ops.kernelgen.append_kv.default(kv_cache, k, v, *tail)


def append_mla(
    ckv_cache: Any, k_rope_cache: Any, ckv: Any, k_rope: Any, page_table: Any = None, *, positions: Any = None, batch_indices: Any = None,
    slot_mapping: Any = None, k_scale: Any = None, backend: Any = "auto",
) -> Any:
    page_size, kv_indptr, kv_indices, kv_last_page_len, block_tables, seq_lens = forms.split_table(page_table)
    k_scale, k_scale_value = forms.split_scale(k_scale)
    tail = helpers.trimmed((
        slot_mapping, page_size, kv_indptr, kv_indices, kv_last_page_len, block_tables, seq_lens, positions, batch_indices, k_scale,
        k_scale_value, backend,
    ), (None, 0, None, None, None, None, None, None, None, None, None, "auto"))
    if len(tail) > 1:
        return torch.ops.kernelgen.append_mla.full(ckv_cache, k_rope_cache, ckv, k_rope, *tail)
    return torch.ops.kernelgen.append_mla.default(ckv_cache, k_rope_cache, ckv, k_rope, *tail)


def rope_append_kv(
    q: Any, k: Any, v: Any, kv_cache: Any, page_table: Any = None, *, positions: Any, batch_indices: Any = None, slot_mapping: Any = None,
    theta: Any = None, cos_sin_cache: Any = None, rotary_dim: Any = None, interleaved: Any = False, scaling: Any = None,
    kv_layout: Any = "NHD", k_scale: Any = None, v_scale: Any = None, kv_scales: Any = None, out: Any = None, backend: Any = "auto",
) -> Any:
    theta = 10000.0 if theta is None else theta
    writes = out is not None
    kv_cache, kv_cache_values = forms.split_cache(kv_cache)
    page_size, kv_indptr, kv_indices, kv_last_page_len, block_tables, seq_lens = forms.split_table(page_table)
    scaling, = forms.split_scaling(scaling)
    k_scale, k_scale_value = forms.split_scale(k_scale)
    v_scale, v_scale_value = forms.split_scale(v_scale)
    tail = helpers.trimmed((
        slot_mapping, kv_cache_values, page_size, kv_indptr, kv_indices, kv_last_page_len, block_tables, seq_lens, batch_indices, theta,
        cos_sin_cache, rotary_dim, interleaved, scaling, kv_layout, k_scale, k_scale_value, v_scale, v_scale_value, kv_scales, backend,
    ), (None, None, 0, None, None, None, None, None, None, 10000.0, None, None, False, None, "NHD", None, None, None, None, None, "auto"))
    if writes:
        torch.ops.kernelgen.rope_append_kv.out(q, k, v, kv_cache, positions, out, *tail)
        return out
    if len(tail) > 2:
        return torch.ops.kernelgen.rope_append_kv.full(q, k, v, kv_cache, positions, *tail)
    return torch.ops.kernelgen.rope_append_kv.default(q, k, v, kv_cache, positions, *tail)


def gemm(
    a: Any, b: Any, *, bias: Any = None, activation: Any = None, gate_up: Any = "gate_first", c: Any = None, beta: Any = None,
    scale_a: Any = None, scale_b: Any = None, accumulate: Any = "float32", out_dtype: Any = None, out_scale: Any = None, out: Any = None,
    epilogue: Any = None, deterministic: Any = True, backend: Any = "auto",
) -> Any:
    beta = 1.0 if beta is None else beta
    totals = helpers.totals_of(epilogue, out)
    writes = out is not None
    out, out_scales = helpers.as_pair(out)
    if writes:
        made = shapes.gemm(a=a, b=b, activation=activation, out_dtype=out_dtype, out_scale=out_scale, epilogue=epilogue)
        out, out_scales = helpers.filled((out, out_scales), made)
    b, b_scales, b_zero, b_format, b_columns, b_group_size = forms.split_weight(b)
    epilogue, epilogue_tensors, epilogue_scalars = forms.split_variant(epilogue)
    tail = helpers.trimmed((
        bias, activation, gate_up, c, beta, scale_a, scale_b, accumulate, out_dtype, out_scale, epilogue, epilogue_tensors,
        epilogue_scalars, deterministic, backend, b_scales, b_zero, b_format, b_columns, b_group_size,
    ), (None, None, "gate_first", None, 1.0, None, None, "float32", None, None, 0, None, None, True, "auto", None, None, None, 0, 0))
    if writes:
        torch.ops.kernelgen.gemm.out(a, b, out, out_scales, *tail)
        return (out, out_scales) if out_scale is not None else out
    if out_scale is not None or totals:
        made = torch.ops.kernelgen.gemm.scaled(a, b, *tail)
        return helpers.by_name(made, totals)
    if len(tail) > 3:
        return torch.ops.kernelgen.gemm.full(a, b, *tail)
    return torch.ops.kernelgen.gemm.default(a, b, *tail)


def grouped_gemm(
    a: Any, b: Any, offsets: Any, *, bias: Any = None, activation: Any = None, gate_up: Any = "gate_first", c: Any = None,
    beta: Any = None, scale_a: Any = None, scale_b: Any = None, accumulate: Any = "float32", out_dtype: Any = None, out_scale: Any = None,
    out: Any = None, deterministic: Any = True, backend: Any = "auto",
) -> Any:
    beta = 1.0 if beta is None else beta
    writes = out is not None
    out, out_scales = helpers.as_pair(out)
    if writes:
        made = shapes.grouped_gemm(a=a, b=b, offsets=offsets, activation=activation, out_dtype=out_dtype, out_scale=out_scale)
        out, out_scales = helpers.filled((out, out_scales), made)
    b, b_scales, b_zero, b_format, b_columns, b_group_size = forms.split_weight(b)
    offsets, offsets_list = forms.split_numbers(offsets)
    tail = helpers.trimmed((
        offsets, offsets_list, bias, activation, gate_up, c, beta, scale_a, scale_b, accumulate, out_dtype, out_scale, deterministic,
        backend, b_scales, b_zero, b_format, b_columns, b_group_size,
    ), (None, None, None, None, "gate_first", None, 1.0, None, None, "float32", None, None, True, "auto", None, None, None, 0, 0))
    if writes:
        torch.ops.kernelgen.grouped_gemm.out(a, b, out, out_scales, *tail)
        return (out, out_scales) if out_scale is not None else out
    if out_scale is not None:
        return torch.ops.kernelgen.grouped_gemm.scaled(a, b, *tail)
    if len(tail) > 5:
        return torch.ops.kernelgen.grouped_gemm.full(a, b, *tail)
    return torch.ops.kernelgen.grouped_gemm.default(a, b, *tail)


def grouped_gemm_masked(
    a: Any, b: Any, counts: Any, *, bias: Any = None, activation: Any = None, gate_up: Any = "gate_first", c: Any = None, beta: Any = None,
    scale_a: Any = None, scale_b: Any = None, accumulate: Any = "float32", out_dtype: Any = None, out_scale: Any = None, out: Any = None,
    deterministic: Any = True, backend: Any = "auto",
) -> Any:
    beta = 1.0 if beta is None else beta
    writes = out is not None
    out, out_scales = helpers.as_pair(out)
    if writes:
        made = shapes.grouped_gemm(a=a, b=b, activation=activation, out_dtype=out_dtype, out_scale=out_scale)
        out, out_scales = helpers.filled((out, out_scales), made)
    b, b_scales, b_zero, b_format, b_columns, b_group_size = forms.split_weight(b)
    counts, counts_list = forms.split_numbers(counts)
    tail = helpers.trimmed((
        counts, counts_list, bias, activation, gate_up, c, beta, scale_a, scale_b, accumulate, out_dtype, out_scale, deterministic,
        backend, b_scales, b_zero, b_format, b_columns, b_group_size,
    ), (None, None, None, None, "gate_first", None, 1.0, None, None, "float32", None, None, True, "auto", None, None, None, 0, 0))
    if writes:
        torch.ops.kernelgen.grouped_gemm_masked.out(a, b, out, out_scales, *tail)
        return (out, out_scales) if out_scale is not None else out
    if out_scale is not None:
        return torch.ops.kernelgen.grouped_gemm_masked.scaled(a, b, *tail)
    if len(tail) > 5:
        return torch.ops.kernelgen.grouped_gemm_masked.full(a, b, *tail)
    return torch.ops.kernelgen.grouped_gemm_masked.default(a, b, *tail)


def quantize_fp8(
    x: Any, recipe: Any = "tensor", *, dtype: Any = None, activation: Any = None, gate_up: Any = "gate_first", out: Any = None,
    backend: Any = "auto",
) -> Any:
    writes = out is not None
    out, out_scales = helpers.as_pair(out)
    if writes:
        made = shapes.quantize_fp8(x=x, recipe=recipe, dtype=dtype, activation=activation)
        out, out_scales = helpers.filled((out, out_scales), made)
    dtype, = forms.split_code_type(dtype)
    tail = helpers.trimmed((recipe, dtype, activation, gate_up, backend), ("tensor", None, None, "gate_first", "auto"))
    if writes:
        torch.ops.kernelgen.quantize_fp8.out(x, out, out_scales, *tail)
        return (out, out_scales)
    if len(tail) > 2:
        return torch.ops.kernelgen.quantize_fp8.full(x, *tail)
    return torch.ops.kernelgen.quantize_fp8.default(x, *tail)


def route(
    logits: Any, k: Any, *, method: Any = "softmax", renormalize: Any = True, bias: Any = None, num_groups: Any = None,
    topk_groups: Any = None, scaling: Any = None, counts: Any = None, backend: Any = "auto",
) -> Any:
    scaling = 1.0 if scaling is None else scaling
    also = counts is not None
    tail = helpers.trimmed((
        method, renormalize, bias, num_groups, topk_groups, scaling, backend,
    ), ("softmax", True, None, None, None, 1.0, "auto"))
    if len(tail) > 2:
        if also:
            return torch.ops.kernelgen.route.counts_full(logits, k, counts, *tail)
        else:
            return torch.ops.kernelgen.route.full(logits, k, *tail)
    if also:
        return torch.ops.kernelgen.route.counts(logits, k, counts, *tail)
    else:
        return torch.ops.kernelgen.route.default(logits, k, *tail)


def moe_sort(ids: Any, num_experts: Any, *, expert_map: Any = None, backend: Any = "auto") -> Any:
    expert_map, expert_map_range, expert_map_list = forms.split_map(expert_map)
    tail = helpers.trimmed((expert_map, expert_map_range, expert_map_list, backend), (None, None, None, "auto"))
    made = torch.ops.kernelgen.moe_sort.default(ids, num_experts, *tail)
    return helpers.sort_in(made, ids, num_experts)


def moe_permute(x: Any, sort: Any, *, weights: Any = None, backend: Any = "auto") -> Any:
    row_of_slot, = forms.split_sort(sort)
    tail = helpers.trimmed((weights, backend), (None, "auto"))
    return torch.ops.kernelgen.moe_permute.default(x, row_of_slot, *tail)


def moe_unpermute(rows: Any, sort: Any, weights: Any, *, addend: Any = None, out: Any = None, backend: Any = "auto") -> Any:
    writes = out is not None
    row_of_slot, = forms.split_sort(sort)
    tail = helpers.trimmed((addend, backend), (None, "auto"))
    if writes:
        torch.ops.kernelgen.moe_unpermute.out(rows, row_of_slot, weights, out, *tail)
        return out
    return torch.ops.kernelgen.moe_unpermute.default(rows, row_of_slot, weights, *tail)


def moe(
    x: Any, w13: Any, w2: Any, weights: Any, ids: Any, *, activation: Any = "swiglu", alpha: Any = None, limit: Any = None,
    gate_up: Any = "gate_first", bias13: Any = None, bias2: Any = None, scale13: Any = None, scale2: Any = None, shared: Any = None,
    expert_map: Any = None, weights_on_input: Any = False, out: Any = None, deterministic: Any = True, backend: Any = "auto",
) -> Any:
    writes = out is not None
    w13, w13_scales, w13_zero, w13_format, w13_columns, w13_group_size = forms.split_weight(w13)
    w2, w2_scales, w2_zero, w2_format, w2_columns, w2_group_size = forms.split_weight(w2)
    scale13, scale13_value = forms.split_scale(scale13)
    scale2, scale2_value = forms.split_scale(scale2)
    shared13, shared2 = forms.split_pair(shared)
    expert_map, expert_map_range, expert_map_list = forms.split_map(expert_map)
    tail = helpers.trimmed((
        activation, alpha, limit, gate_up, bias13, bias2, scale13, scale13_value, scale2, scale2_value, shared13, shared2, expert_map,
        expert_map_range, expert_map_list, weights_on_input, deterministic, backend, w13_scales, w13_zero, w13_format, w13_columns,
        w13_group_size, w2_scales, w2_zero, w2_format, w2_columns, w2_group_size,
    ), (
        "swiglu", None, None, "gate_first", None, None, None, None, None, None, None, None, None, None, None, False, True, "auto", None,
        None, None, 0, 0, None, None, None, 0, 0,
    ))
    if writes:
        torch.ops.kernelgen.moe.out(x, w13, w2, weights, ids, out, *tail)
        return out
    if len(tail) > 6:
        return torch.ops.kernelgen.moe.full(x, w13, w2, weights, ids, *tail)
    return torch.ops.kernelgen.moe.default(x, w13, w2, weights, ids, *tail)


def rmsnorm(x: Any, weight: Any, eps: Any = None, *, residual: Any = None, out: Any = None, backend: Any = "auto") -> Any:
    eps = 1e-06 if eps is None else eps
    writes = out is not None
    also = residual is not None
    tail = helpers.trimmed((eps, backend), (1e-06, "auto"))
    if writes:
        if also:
            torch.ops.kernelgen.rmsnorm.residual_out(x, weight, residual, out, *tail)
        else:
            torch.ops.kernelgen.rmsnorm.out(x, weight, out, *tail)
        return out
    if also:
        return torch.ops.kernelgen.rmsnorm.residual(x, weight, residual, *tail)
    else:
        return torch.ops.kernelgen.rmsnorm.default(x, weight, *tail)


def silu_and_mul(x: Any, *, out: Any = None, backend: Any = "auto") -> Any:
    writes = out is not None
    tail = helpers.trimmed((backend,), ("auto",))
    if writes:
        torch.ops.kernelgen.silu_and_mul.out(x, out, *tail)
        return out
    return torch.ops.kernelgen.silu_and_mul.default(x, *tail)
