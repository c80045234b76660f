"""The float64 oracle for the runs of plans, paged and MLA."""

from __future__ import annotations

from typing import Any

import torch

from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.tensors import PagedTensors


def run_reference(problem: PagedAttentionProblem, t: PagedTensors) -> None:
    """The float64 oracle; fills out and lse. Lengths and pages are read back to the host."""
    from kernelgen import reference

    a, size = t.arrays, problem.page_size
    lengths, begin = a.kv_lens.tolist(), a.page_begin.tolist()
    numbers = a.page_indices.cpu()
    pages = tuple(tuple(numbers[first : first - (-length // size)].tolist()) for first, length in zip(begin, lengths))
    common: dict[str, Any] = dict(
        cu_seqlens_q=a.q_indptr, causal=problem.causal, scale=t.scale, return_lse=True, k_scale=t.k_scale, kv_scales=problem.kv_scales,
    )
    table = reference.PageTable(pages, tuple(lengths), size)
    if problem.kv_scales != "page":
        common |= {"kv_scales": None if t.k_scale is None and t.v_scale is None else "request_head"}
    if problem.rope_dim:
        assert t.q_rope is not None and t.k_rope_cache is not None
        if t.k_factor != 1:  # the oracle scales values, too
            common |= {"k_scale": t.k_factor, "kv_scales": None}
        out, lse = reference.mla_attention(t.q, t.q_rope, t.k_cache[:, :, 0], t.k_rope_cache[:, :, 0], table, **common)
        out = out if t.k_factor != 1 else out * t.v_factor
    else:
        v_scale = t.v_scale if t.v_factor == 1 else t.v_factor if t.v_scale is None else t.v_scale * t.v_factor
        if t.v_scale is None and t.v_factor != 1 and problem.kv_scales == "page":
            v_scale = torch.full((t.v_cache.shape[0], problem.num_kv_heads), t.v_factor, device=t.q.device)
        if t.v_scale is None and t.v_factor != 1 and common["kv_scales"] == "request_head":
            v_scale = torch.full((len(lengths), problem.num_kv_heads), t.v_factor, device=t.q.device)
        out, lse = reference.paged_attention(
            t.q, (t.k_cache, t.v_cache), table, window=problem.window if problem.windowed else None, soft_cap=t.soft_cap,
            alibi_slopes=t.alibi_slopes, sinks=t.sinks, mask=t.mask, variant=t.variant, q_scale=t.q_scale, v_scale=v_scale,
            rotation=t.rotation, **common,
        )
    t.out.copy_(out)
    if t.lse is not None:
        t.lse.copy_(lse)
