"""Multi-head latent attention (DeepSeek-V2, section 2.1) over a paged latent cache, in its absorbed form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernelgen.errors import DtypeError, ShapeError
from kernelgen.reference.attend import make_rules
from kernelgen.reference.attention import Result, attend_requests
from kernelgen.reference.checks import check_float, check_rank, check_same_device, check_shape, is_fp8, to_compute
from kernelgen.reference.paged import as_page_table, check_pages, gather, page_scale, query_starts
from kernelgen.reference.quant import Scale


def mla_attention(q_nope: torch.Tensor, q_rope: torch.Tensor, ckv_cache: torch.Tensor,
                  k_rope_cache: torch.Tensor | None, page_table: Any, *, scale: float,
                  q_lens: torch.Tensor | Sequence[int] | None = None,
                  cu_seqlens_q: torch.Tensor | Sequence[int] | None = None, causal: bool = True,
                  k_scale: Scale | None = None, kv_scales: str | None = None, return_lse: bool = False,
                  compute_dtype: torch.dtype = torch.float64, p_dtype: torch.dtype | None = None) -> Result:
    """``softmax(scale * (q_nope ckv^T + q_rope k_rope^T)) ckv``, one latent head for all query heads.

    ``q_nope (T, Hq, R)``, ``q_rope (T, Hq, P)``; ``ckv_cache (pages, page_size, R)`` with ``k_rope_cache (pages,
    page_size, P)``, or one ``(pages, page_size, R + P)`` tensor with ``k_rope_cache=None``; to ``out (T, Hq, R)`` and
    ``lse (T, Hq)``. Models have R = 512 and P = 64; any sizes work here. ``k_scale`` multiplies the fp8 parts of the
    cache: scalar, (B, 1) or (pages, 1), named by ``kv_scales`` where two fit. Page table, query lengths, positions and
    errors as in :func:`~kernelgen.reference.paged.paged_attention`.
    """
    table = as_page_table(page_table)
    check_rank("q_nope", q_nope, (3,), "(T, Hq, R)")
    check_shape("q_rope", q_rope, (*q_nope.shape[:2], q_rope.shape[-1]), "(T, Hq, P)")
    check_rank("ckv_cache", ckv_cache, (3,), "(pages, page_size, R)")
    check_float(q_nope=q_nope, q_rope=q_rope, ckv_cache=ckv_cache, k_rope_cache=k_rope_cache)
    check_same_device(q_nope=q_nope, q_rope=q_rope, ckv_cache=ckv_cache, k_rope_cache=k_rope_cache)
    latent, rope = q_nope.shape[2], q_rope.shape[2]
    if k_rope_cache is None:
        if ckv_cache.shape[2] != latent + rope:
            raise ShapeError(f"ckv_cache: got width {ckv_cache.shape[2]}, expected R + P = {latent + rope} without a "
                             "k_rope_cache")
        ckv_cache, k_rope_cache = ckv_cache[..., :latent], ckv_cache[..., latent:]
    check_shape("ckv_cache", ckv_cache, (*ckv_cache.shape[:2], latent), "(pages, page_size, R)")
    check_shape("k_rope_cache", k_rope_cache, (*ckv_cache.shape[:2], rope), "(pages, page_size, P)")
    if q_nope.dtype != q_rope.dtype or not (is_fp8(ckv_cache) or q_nope.dtype == ckv_cache.dtype):
        raise DtypeError(f"got q_nope {q_nope.dtype}, q_rope {q_rope.dtype}, ckv_cache {ckv_cache.dtype}, expected one "
                         "dtype, or an fp8 cache")
    if k_scale is not None and not is_fp8(ckv_cache):
        raise DtypeError(f"k_scale: given for a cache of {ckv_cache.dtype}, expected an fp8 one")
    num_pages, page_size = ckv_cache.shape[:2]
    check_pages(table, num_pages, page_size)
    starts = query_starts(table, q_nope.shape[0], q_lens, cu_seqlens_q)
    scales = page_scale("k_scale", k_scale, kv_scales, table, num_pages, 1, q_nope.device, compute_dtype)
    keys = []
    for pages, length, factor in zip(table.pages, table.lengths, scales):
        parts = []
        for cache in (ckv_cache, k_rope_cache):
            value = to_compute(gather(cache, pages, length), compute_dtype)[:, None]
            parts.append(value if factor is None or not is_fp8(cache) else value * factor)
        keys.append((torch.cat(parts, -1), parts[0]))
    rules = make_rules(batch=len(keys), num_heads=q_nope.shape[1], head_dim=latent + rope, causal=causal, window=None,
                       scale=scale, soft_cap=None, alibi_slopes=None, sinks=None, variant=None,
                       compute_dtype=compute_dtype, p_dtype=p_dtype)
    q = torch.cat([to_compute(q_nope, compute_dtype), to_compute(q_rope, compute_dtype)], -1)
    return attend_requests(q, starts, keys, rules, mask=None, q_scale=None, head_dim_v=latent, return_lse=return_lse)
