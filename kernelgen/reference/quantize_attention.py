"""Queries, keys and values to fp8 with the scales that attention takes, optionally rotated and written to a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernelgen.errors import ShapeError
from kernelgen.reference.append import write
from kernelgen.reference.checks import (
    FP8_DTYPES,
    as_boundaries,
    check_compute_dtype,
    check_float,
    check_option,
    check_rank,
    check_same_device,
    check_shape,
    to_compute,
)
from kernelgen.reference.paged import KV_SCALES, Cache, as_page_table, check_pages, split_cache
from kernelgen.reference.quant import fp8_scale, to_fp8
from kernelgen.reference.rope import rope
from kernelgen.reference.rotation import rotate


@dataclass(frozen=True)
class QuantizedAttention:
    """fp8 codes in the shapes of the inputs, and float32 scales in the form that the recipe names."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor


def quantize_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, positions: torch.Tensor | None = None,
                       recipe: str = "page", rotation: int | None = None, kv_cache: Cache | None = None,
                       page_table: Any = None, cu_seqlens_q: torch.Tensor | Sequence[int] | None = None,
                       cu_seqlens_k: torch.Tensor | Sequence[int] | None = None, kv_layout: str = "NHD",
                       dtype: torch.dtype = torch.float8_e4m3fn, compute_dtype: torch.dtype = torch.float64,
                       **rope_options: Any) -> QuantizedAttention:
    """Quantise ``q (Tq, Hq, D)``, ``k (Tk, Hkv, D)``, ``v (Tk, Hkv, Dv)`` by amax.

    recipe      "tensor": scales (); "head": (H); "request_head": (B, H) of the requests of ``cu_seqlens_*``; "page":
                k and v (pages, Hkv), each page's scale over its tokens, q as "request_head"
    positions   (Tq), needs Tq = Tk: q and k are turned by :func:`~kernelgen.reference.rope.rope` first, with
                ``rope_options`` (theta, cos_sin_cache, rotary_dim, interleaved, scaling)
    rotation    sign seed of :func:`~kernelgen.reference.rotation.rotate` for q and k, after rope
    page_table  with "page": k and v hold the requests' whole caches, token 0 first, one after another
    kv_cache    with "page": an fp8 cache that the codes are written to, in place; pages that no request uses keep
                their content and have scale 1

    Raises ShapeError, DtypeError, DeviceError, SettingsError.
    """
    check_compute_dtype(compute_dtype)
    check_option("recipe", recipe, KV_SCALES)
    check_option("dtype", dtype, FP8_DTYPES)
    check_float(q=q, k=k, v=v)
    check_same_device(q=q, k=k, v=v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rank(name, x, (3,), "(T, H, D)")
    check_shape("v", v, (*k.shape[:2], v.shape[2]), "(Tk, Hkv, Dv)")
    if (recipe == "page") != (page_table is not None) or (kv_cache is not None and page_table is None):
        raise ShapeError("page_table: expected with recipe 'page' and with it only")
    parts = {"q": to_compute(q, compute_dtype), "k": to_compute(k, compute_dtype), "v": to_compute(v, compute_dtype)}
    if positions is not None:
        parts["q"], parts["k"] = rope(q, k, positions, compute_dtype=compute_dtype, **rope_options)
    if rotation is not None:
        for name in ("q", "k"):
            parts[name] = rotate(parts[name], rotation, compute_dtype=compute_dtype)

    starts_q = [0, q.shape[0]] if cu_seqlens_q is None else as_boundaries("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    starts_k = [0, k.shape[0]] if cu_seqlens_k is None else as_boundaries("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    codes, scales = {}, {}
    for name, starts in (("q", starts_q), ("k", starts_k), ("v", starts_k)):
        kind = "request_head" if name == "q" and recipe == "page" else recipe
        if kind == "page":
            codes[name], scales[name] = _by_page(parts[name], page_table, kv_cache, kv_layout, name, dtype)
        else:
            codes[name], scales[name] = _by_request(parts[name], kind, starts, dtype)
    return QuantizedAttention(codes["q"], codes["k"], codes["v"], scales["q"], scales["k"], scales["v"])


def _amax(x: torch.Tensor) -> torch.Tensor:
    """Largest size per head of ``(T, H, D)``; 0 without tokens."""
    return x.abs().amax((0, 2)) if x.shape[0] else x.new_zeros(x.shape[1])


def _encode(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return to_fp8(x / scale.to(x.dtype), dtype)


def _by_request(x: torch.Tensor, kind: str, starts: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "tensor":
        scale = fp8_scale(_amax(x).amax(), dtype)
        return _encode(x, scale, dtype), scale
    if kind == "head":
        scale = fp8_scale(_amax(x), dtype)
        return _encode(x, scale[:, None], dtype), scale
    rows = [x[a:e] for a, e in zip(starts, starts[1:])]
    scales = [fp8_scale(_amax(r), dtype) for r in rows]
    codes = [_encode(r, s[:, None], dtype) for r, s in zip(rows, scales)]
    # Rows past the last request have no scale; their codes are zeros.
    codes.append(torch.zeros_like(x[starts[-1] :], dtype=dtype))
    stacked = torch.stack(scales) if scales else torch.ones(0, x.shape[1], device=x.device)
    return torch.cat([c.view(torch.uint8) for c in codes]).view(dtype), stacked


def _by_page(x: torch.Tensor, page_table: Any, kv_cache: Cache | None, kv_layout: str, name: str,
             dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    table = as_page_table(page_table)
    if sum(table.lengths) != x.shape[0]:
        raise ShapeError(f"{name}: got {x.shape[0]} tokens, expected {sum(table.lengths)}, the sum of the page table's "
                         "lengths")
    size = table.page_size
    cache, num_pages = None, 1 + max((p for pages in table.pages for p in pages), default=-1)
    if kv_cache is not None:
        cache = split_cache(kv_cache, kv_layout)[0 if name == "k" else 1]
        num_pages = cache.shape[0]
        check_pages(table, num_pages, cache.shape[1])
    scale = torch.ones(num_pages, x.shape[1], device=x.device)
    codes, first = torch.zeros_like(x, dtype=dtype), 0
    for pages, length in zip(table.pages, table.lengths):
        for i, page in enumerate(pages):
            rows = slice(first + i * size, first + min((i + 1) * size, length))
            scale[page] = fp8_scale(_amax(x[rows]), dtype)
            codes[rows] = _encode(x[rows], scale[page][:, None], dtype)
            if cache is not None:
                count = rows.stop - rows.start
                write(name, cache, codes[rows], [page * size + j for j in range(count)], None)
        first += length
    return codes, scale
