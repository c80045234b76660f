"""Paged caches: page tables, gathering, appending, paged and cascade attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernelgen.errors import ShapeError
from kernelgen.reference.attend import make_rules
from kernelgen.reference.attention import Result, attend_requests, check_heads
from kernelgen.reference.checks import (
    as_boundaries,
    as_index_list,
    as_scale,
    check_attention_dtypes,
    check_option,
    check_rank,
    check_same_device,
    is_fp8,
    to_compute,
)
from kernelgen.reference.masks import VariantLike, Window
from kernelgen.reference.quant import Scale, head_scale
from kernelgen.reference.rotation import rotate

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
KV_SCALES = ("tensor", "head", "request_head", "page")


@dataclass(frozen=True)
class PageTable:
    """Pages and lengths of each request, on the host. The oracles take any object with the public table's fields.

    ``pages[b]`` names the pages of request b in order, no more than its ``lengths[b]`` tokens need.
    """

    pages: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    page_size: int

    @classmethod
    def from_csr(cls, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_last_page_len: torch.Tensor,
                 page_size: int) -> PageTable:
        """``kv_indptr (B + 1)``, ``kv_indices (>= kv_indptr[-1])`` page numbers, ``kv_last_page_len (B)``.

        A request with pages needs a last length of 1 .. page_size; that of a request without pages is not looked at.
        """
        _check_page_size(page_size)
        indices = as_index_list("kv_indices", kv_indices)
        ends = as_boundaries("kv_indptr", kv_indptr, len(indices))
        last = as_index_list("kv_last_page_len", kv_last_page_len)
        if len(last) != len(ends) - 1:
            raise ShapeError(f"kv_last_page_len: got {len(last)} values, expected one for each of {len(ends) - 1} "
                             "requests")
        lengths = []
        for b, (a, e) in enumerate(zip(ends, ends[1:])):
            if e > a and not 1 <= last[b] <= page_size:
                raise ShapeError(f"kv_last_page_len: request {b} has {last[b]}, expected 1 .. {page_size}")
            lengths.append((e - a - 1) * page_size + last[b] if e > a else 0)
        return cls(tuple(tuple(indices[a:e]) for a, e in zip(ends, ends[1:])), tuple(lengths), page_size)

    @classmethod
    def from_blocks(cls, block_tables: torch.Tensor, seq_lens: torch.Tensor | Sequence[int],
                    page_size: int) -> PageTable:
        """``block_tables (B, max_pages)``, ``seq_lens (B)``. Entries past a request's pages are never read."""
        _check_page_size(page_size)
        check_rank("block_tables", block_tables, (2,), "(B, max_pages)")
        lengths = as_index_list("seq_lens", seq_lens)
        batch, width = block_tables.shape
        if len(lengths) != batch:
            raise ShapeError(f"seq_lens: got {len(lengths)} values, expected one for each of {batch} requests")
        pages = []
        for b, length in enumerate(lengths):
            if not 0 <= length <= width * page_size:
                raise ShapeError(f"seq_lens: request {b} has length {length}, expected 0 .. {width * page_size} "
                                 f"({width} pages of {page_size})")
            pages.append(tuple(as_index_list("block_tables", block_tables[b, : -(-length // page_size)])))
        return cls(tuple(pages), tuple(lengths), page_size)

    @classmethod
    def contiguous(cls, seq_lens: torch.Tensor | Sequence[int], capacity: int) -> PageTable:
        """A dense cache (B, capacity, Hkv, D), each request one page."""
        lengths = as_index_list("seq_lens", seq_lens)
        return cls.from_blocks(torch.arange(len(lengths), dtype=torch.int32, device="cpu")[:, None], lengths, capacity)


def _check_page_size(page_size: int) -> None:
    if page_size < 1:
        raise ShapeError(f"page_size: got {page_size}, expected at least 1")


def as_page_table(table: Any) -> PageTable:
    """The host form of any page table that has the fields of one of the two constructors."""
    if isinstance(table, PageTable):
        return table
    if getattr(table, "kv_indptr", None) is not None:
        return PageTable.from_csr(table.kv_indptr, table.kv_indices, table.kv_last_page_len, table.page_size)
    return PageTable.from_blocks(table.block_tables, table.seq_lens, table.page_size)


def split_cache(kv_cache: Cache, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(k, v) as views ``(pages, page_size, Hkv, D)`` of either form of cache in either layout."""
    check_option("kv_layout", kv_layout, ("NHD", "HND"))
    if isinstance(kv_cache, torch.Tensor):
        if kv_cache.dim() != 5 or kv_cache.shape[1] != 2:
            raise ShapeError(f"kv_cache: got shape {tuple(kv_cache.shape)}, expected (pages, 2, page_size, Hkv, D) or "
                             "(pages, 2, Hkv, page_size, D), or a pair of 4-D tensors")
        k, v = kv_cache[:, 0], kv_cache[:, 1]
    else:
        k, v = kv_cache
        check_rank("k cache", k, (4,), "(pages, page_size, Hkv, D)")
        if v.dim() != 4 or k.shape[:3] != v.shape[:3]:
            raise ShapeError(f"kv_cache: got k {tuple(k.shape)} and v {tuple(v.shape)}, expected equal sizes but for D")
    return (k.transpose(1, 2), v.transpose(1, 2)) if kv_layout == "HND" else (k, v)


def check_pages(table: PageTable, num_pages: int, page_size: int) -> None:
    """Raise ShapeError unless every used page exists and the sizes agree."""
    if page_size != table.page_size:
        raise ShapeError(f"kv_cache: has pages of {page_size}, expected {table.page_size} as in the page table")
    for b, pages in enumerate(table.pages):
        for slot, page in enumerate(pages):
            if not 0 <= page < num_pages:
                raise ShapeError(f"page table: request {b}, slot {slot} holds page {page}, expected 0 .. "
                                 f"{num_pages - 1}")


def gather(cache: torch.Tensor, pages: Sequence[int], length: int) -> torch.Tensor:
    """The first ``length`` tokens of the named pages: ``(pages, page_size, ..)`` to ``(length, ..)``."""
    index = torch.tensor(pages, dtype=torch.int64, device=cache.device)
    picked = cache.view(torch.uint8)[index].view(cache.dtype) if is_fp8(cache) else cache[index]
    return picked.reshape(-1, *cache.shape[2:])[:length]


def page_scale(name: str, scale: Scale | None, kind: str | None, table: PageTable, num_pages: int, heads: int,
               device: torch.device, compute_dtype: torch.dtype) -> list[torch.Tensor | None]:
    """For each request the scale of its keys or values, broadcastable to ``(length, heads, D)``.

    ``kind`` names the form; without it a 2-D scale is per request or per page by its first size, and an error where
    both fit. A page's scale holds for all its tokens.
    """
    batch = len(table.lengths)
    if scale is None:
        return [None] * batch
    if kind is not None:
        check_option("kv_scales", kind, KV_SCALES)
    value = as_scale(name, scale, device, compute_dtype)
    shape = tuple(value.shape)
    if kind is None and value.dim() == 2:
        if num_pages == batch and shape[0] == batch:
            raise ShapeError(f"{name}: got shape {shape}, which fits requests and pages; say kv_scales='request_head' "
                             "or 'page'")
        kind = "page" if shape == (num_pages, heads) else "request_head"
    expected = {"tensor": ((), (1,)), "head": ((heads,),), "request_head": ((batch, heads),),
                "page": ((num_pages, heads),)}
    if kind is not None and shape not in expected[kind]:
        raise ShapeError(f"{name}: got shape {shape}, expected {expected[kind][-1]} for kv_scales={kind!r}")
    if kind != "page":
        full = head_scale(name, scale, batch, heads, device, compute_dtype)
        return [full[b if full.shape[0] > 1 else 0] for b in range(batch)]
    return [value[list(pages)].repeat_interleave(table.page_size, 0)[:length].unsqueeze(-1)
            for pages, length in zip(table.pages, table.lengths)]


def gather_requests(table: PageTable, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: Scale | None,
                    v_scale: Scale | None, kv_scales: str | None,
                    compute_dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Dequantised ``(k (Sk, Hkv, D), v (Sk, Hkv, Dv))`` of every request of a table."""
    sides = []
    for name, cache, given in (("k_scale", k_cache, k_scale), ("v_scale", v_cache, v_scale)):
        scales = page_scale(name, given, kv_scales, table, cache.shape[0], cache.shape[2], cache.device, compute_dtype)
        rows = []
        for pages, length, factor in zip(table.pages, table.lengths, scales):
            value = to_compute(gather(cache, pages, length), compute_dtype)
            rows.append(value if factor is None else value * factor)
        sides.append(rows)
    return list(zip(*sides))


def query_starts(table: PageTable, num_rows: int, q_lens: torch.Tensor | Sequence[int] | None,
                 cu_seqlens_q: torch.Tensor | Sequence[int] | None) -> list[int]:
    """Cumulative query lengths; one query per request unless lengths are given in one of the two forms."""
    batch = len(table.lengths)
    if cu_seqlens_q is not None:
        starts = as_boundaries("cu_seqlens_q", cu_seqlens_q, num_rows)
    else:
        lengths = [1] * batch if q_lens is None else as_index_list("q_lens", q_lens)
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        starts = as_boundaries("q_lens", starts, num_rows)
    if len(starts) - 1 != batch:
        raise ShapeError(f"got {len(starts) - 1} query lengths for a page table of {batch} requests")
    if starts[-1] != num_rows:
        raise ShapeError(f"q: got {num_rows} rows, expected {starts[-1]}, the sum of the query lengths")
    return starts


def paged_attention(q: torch.Tensor, kv_cache: Cache, page_table: Any, *,
                    q_lens: torch.Tensor | Sequence[int] | None = None,
                    cu_seqlens_q: torch.Tensor | Sequence[int] | None = None, kv_layout: str = "NHD",
                    causal: bool = True, window: Window | None = None, scale: float | None = None,
                    soft_cap: float | None = None, alibi_slopes: torch.Tensor | None = None,
                    sinks: torch.Tensor | None = None, mask: torch.Tensor | None = None,
                    variant: VariantLike | None = None, q_scale: Scale | None = None, k_scale: Scale | None = None,
                    v_scale: Scale | None = None, kv_scales: str | None = None, rotation: int | None = None,
                    return_lse: bool = False, compute_dtype: torch.dtype = torch.float64,
                    p_dtype: torch.dtype | None = None) -> Result:
    """Plan and run in one call: ``q (Tq, Hq, D)`` over a paged cache to ``out (Tq, Hq, Dv)``, ``lse (Tq, Hq)``.

    ``kv_cache``: ``(pages, 2, page_size, Hkv, D)`` "NHD", ``(pages, 2, Hkv, page_size, D)`` "HND", or a pair of 4-D
    tensors. ``page_table``: :class:`PageTable` or an object with the public one's fields. ``mask``: flat bool or
    packed bits as in :func:`~kernelgen.reference.attention.attention_varlen`. ``k_scale``, ``v_scale``: scalar,
    (Hkv), (B, Hkv) or (pages, Hkv); ``kv_scales`` ("tensor", "head", "request_head", "page") names the form where two
    fit. ``rotation``: sign seed with which the cached keys were rotated; q is rotated alike. Unused slots and unused
    table entries are never read. Raises ShapeError (also for a used page that does not exist), DtypeError,
    DeviceError, SettingsError.
    """
    table = as_page_table(page_table)
    check_rank("q", q, (3,), "(Tq, Hq, D)")
    k_cache, v_cache = split_cache(kv_cache, kv_layout)
    check_same_device(q=q, k=k_cache, v=v_cache, mask=mask, alibi_slopes=alibi_slopes, sinks=sinks)
    check_attention_dtypes(q, k_cache, v_cache)
    num_pages, page_size, heads, head_dim = k_cache.shape
    check_heads(q.shape[1], heads, q.shape[2], head_dim)
    check_pages(table, num_pages, page_size)
    starts = query_starts(table, q.shape[0], q_lens, cu_seqlens_q)
    batch = len(table.lengths)
    rules = make_rules(batch=batch, num_heads=q.shape[1], head_dim=head_dim, causal=causal, window=window, scale=scale,
                       soft_cap=soft_cap, alibi_slopes=alibi_slopes, sinks=sinks, variant=variant,
                       compute_dtype=compute_dtype, p_dtype=p_dtype)
    keys = gather_requests(table, k_cache, v_cache, k_scale, v_scale, kv_scales, compute_dtype)
    value = to_compute(q, compute_dtype)
    if rotation is not None:
        value = rotate(value, rotation, compute_dtype=compute_dtype)
    return attend_requests(value, starts, keys, rules, mask=mask, q_scale=q_scale, head_dim_v=v_cache.shape[3],
                           return_lse=return_lse)
