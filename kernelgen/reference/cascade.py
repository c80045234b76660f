"""Cascade attention: requests that share prefixes in one paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernelgen.errors import ShapeError
from kernelgen.reference.attend import make_rules
from kernelgen.reference.attention import Result, attend_requests, check_heads
from kernelgen.reference.checks import check_attention_dtypes, check_option, check_rank, check_same_device, to_compute
from kernelgen.reference.masks import VariantLike, Window
from kernelgen.reference.paged import (
    KV_SCALES,
    Cache,
    as_page_table,
    check_pages,
    gather_requests,
    page_scale,
    query_starts,
    split_cache,
)
from kernelgen.reference.quant import Scale
from kernelgen.reference.rotation import rotate

Level = tuple[Any, torch.Tensor | Sequence[int]]


def cascade_attention(q: torch.Tensor, kv_cache: Cache, levels: Sequence[Level], *, kv_layout: str = "NHD",
                      causal: bool = True, window: Window | None = None, scale: float | None = None,
                      soft_cap: float | None = None, alibi_slopes: torch.Tensor | None = None,
                      sinks: torch.Tensor | None = None, mask: torch.Tensor | None = None,
                      variant: VariantLike | None = None, q_scale: Scale | None = None, k_scale: Scale | None = None,
                      v_scale: Scale | None = None, kv_scales: str | None = None, rotation: int | None = None,
                      return_lse: bool = False, compute_dtype: torch.dtype = torch.float64,
                      p_dtype: torch.dtype | None = None) -> Result:
    """Attention of ``q (Tq, Hq, D)`` over shared prefixes and own keys, all in one cache.

    ``levels``: (page table, cu_seqlens_q) from the outermost prefix to the requests' own keys. Each level's lengths
    cut the same Tq rows, and a request of an inner level lies within one request of every outer level. A row attends
    to the keys of its levels one after another as if they were one cache: bottom-right positions, causality, window
    and ALiBi count over the joined keys, so causality only ever hides own keys. "Request" in ``alibi_slopes``,
    ``q_scale``, ``mask``, a variant's ``batch`` and a scale of ``kv_scales="request_head"`` is one of the innermost
    level with all its keys. ``k_scale`` and ``v_scale``: scalar, (Hkv), (pages, Hkv) or, if ``kv_scales`` says so,
    (B, Hkv). Everything else as in :func:`~kernelgen.reference.paged.paged_attention`. Raises ShapeError for levels
    that do not nest.
    """
    if not levels:
        raise ShapeError("levels: got none, expected at least one (page table, cu_seqlens_q)")
    check_rank("q", q, (3,), "(Tq, Hq, D)")
    check_option("kv_scales", kv_scales, (None, *KV_SCALES))
    k_cache, v_cache = split_cache(kv_cache, kv_layout)
    check_same_device(q=q, k=k_cache, v=v_cache, mask=mask, alibi_slopes=alibi_slopes, sinks=sinks)
    check_attention_dtypes(q, k_cache, v_cache)
    num_pages, page_size, heads, head_dim = k_cache.shape
    check_heads(q.shape[1], heads, q.shape[2], head_dim)
    if kv_scales is None and any(isinstance(s, torch.Tensor) and s.dim() == 2 for s in (k_scale, v_scale)):
        kv_scales = "page"
    of_request = kv_scales == "request_head"
    own = (k_scale, v_scale, kv_scales) if not of_request else (None, None, None)
    starts, parts = [], []
    for page_table, cu_seqlens_q in levels:
        table = as_page_table(page_table)
        check_pages(table, num_pages, page_size)
        starts.append(query_starts(table, q.shape[0], None, cu_seqlens_q))
        parts.append(gather_requests(table, k_cache, v_cache, *own, compute_dtype))
    keys = []
    for b, (first, last) in enumerate(zip(starts[-1], starts[-1][1:])):
        outer = [parts[i][owner(s, first, last, i)] for i, s in enumerate(starts[:-1])] if last > first else []
        chain = [*outer, parts[-1][b]]
        keys.append((torch.cat([k for k, _ in chain]), torch.cat([v for _, v in chain])))
    if of_request:  # of the innermost requests, for the keys of all their levels
        factors = [page_scale(name, given, kv_scales, table, num_pages, heads, k_cache.device, compute_dtype)
                   for name, given in (("k_scale", k_scale), ("v_scale", v_scale))]
        keys = [(k if fk is None else k * fk, v if fv is None else v * fv) for (k, v), fk, fv in zip(keys, *factors)]
    rules = make_rules(batch=len(keys), num_heads=q.shape[1], head_dim=head_dim, causal=causal, window=window,
                       scale=scale, soft_cap=soft_cap, alibi_slopes=alibi_slopes, sinks=sinks, variant=variant,
                       compute_dtype=compute_dtype, p_dtype=p_dtype)
    value = to_compute(q, compute_dtype)
    if rotation is not None:
        value = rotate(value, rotation, compute_dtype=compute_dtype)
    return attend_requests(value, starts[-1], keys, rules, mask=mask, q_scale=q_scale, head_dim_v=v_cache.shape[3],
                           return_lse=return_lse)


def owner(starts: list[int], first: int, last: int, level: int) -> int:
    """The request of an outer level whose rows hold ``first .. last - 1``."""
    for b, (a, e) in enumerate(zip(starts, starts[1:])):
        if a <= first and last <= e and e > a:
            return b
    raise ShapeError(f"levels: rows {first} .. {last - 1} of the innermost level lie in no single request of level "
                     f"{level} (its cu_seqlens_q: {starts}); levels must nest")
