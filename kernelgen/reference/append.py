"""Writing new keys and values into paged caches, in place."""

from __future__ import annotations

from typing import Any

import torch

from kernelgen.errors import DtypeError, ShapeError
from kernelgen.reference.checks import (
    as_index_list,
    as_scale,
    check_rank,
    check_same_device,
    check_shape,
    is_fp8,
)
from kernelgen.reference.paged import Cache, PageTable, as_page_table, check_pages, split_cache
from kernelgen.reference.quant import Scale, to_fp8

IndexLike = torch.Tensor | list[int] | None


def target_slots(tokens: int, num_pages: int, page_size: int, page_table: Any, positions: IndexLike,
                 batch_indices: IndexLike, slot_mapping: IndexLike) -> tuple[list[int], list[int]]:
    """For each token its slot ``page * page_size + offset`` and its request, -1 for a token that is not written.

    Either ``slot_mapping (T)`` (negative = skip; the request is unknown, -1), or a page table: token t goes to
    position ``positions[t]`` of request ``batch_indices[t]`` (a negative one of either = skip). Without
    ``batch_indices`` there is one token for each request. Without ``positions`` the table's lengths already count the
    new tokens: those of a request, in order, are its last ones.
    """
    if slot_mapping is not None:
        if page_table is not None or positions is not None or batch_indices is not None:
            raise ShapeError("slot_mapping: got it together with a page table, positions or batch_indices; give one")
        slots = _per_token("slot_mapping", slot_mapping, tokens)
        for t, slot in enumerate(slots):
            if slot >= num_pages * page_size:
                raise ShapeError(f"slot_mapping: token {t} has slot {slot}, expected below {num_pages * page_size}")
        return [max(slot, -1) for slot in slots], [-1] * tokens
    if page_table is None:
        raise ShapeError("got neither page_table nor slot_mapping, expected one of them")
    table = as_page_table(page_table)
    check_pages(table, num_pages, page_size)
    batch = len(table.lengths)
    requests = list(range(batch)) if batch_indices is None else _per_token("batch_indices", batch_indices, tokens)
    if len(requests) != tokens:
        raise ShapeError(f"got {tokens} tokens for {batch} requests, expected batch_indices where they differ")
    if any(b >= batch for b in requests):
        raise ShapeError(f"batch_indices: got {max(requests)}, expected below {batch}")
    places = _last_positions(table, requests) if positions is None else _per_token("positions", positions, tokens)
    slots = []
    for t, (b, place) in enumerate(zip(requests, places)):
        if b < 0 or place < 0:
            slots.append(-1)
        elif place >= len(table.pages[b]) * page_size:
            raise ShapeError(f"positions: token {t} has {place}, expected below {len(table.pages[b]) * page_size}, the "
                             f"room of the pages of request {b}")
        else:
            slots.append(table.pages[b][place // page_size] * page_size + place % page_size)
    return slots, requests


def _per_token(name: str, x: torch.Tensor | list[int], tokens: int) -> list[int]:
    values = as_index_list(name, x)
    if len(values) != tokens:
        raise ShapeError(f"{name}: got {len(values)} entries, expected one for each of {tokens} tokens")
    return values


def _last_positions(table: PageTable, requests: list[int]) -> list[int]:
    counts = {b: requests.count(b) for b in set(requests)}
    seen: dict[int, int] = {}
    places = []
    for b in requests:
        if b >= 0 and counts[b] > table.lengths[b]:
            raise ShapeError(f"request {b} gets {counts[b]} tokens, expected at most {table.lengths[b]}, its length in "
                             "the page table, which counts them")
        places.append(table.lengths[b] - counts[b] + seen.get(b, 0) if b >= 0 else -1)
        seen[b] = seen.get(b, 0) + 1
    return places


def write(name: str, cache: torch.Tensor, x: torch.Tensor, slots: list[int], scale: torch.Tensor | None) -> None:
    """Write ``x (T, ..)`` into ``cache (pages, page_size, ..)``; an fp8 cache takes ``round(x / scale)``, saturating.

    ``scale`` broadcasts to x and must be float32 for codes that a float32 kernel gives.
    """
    page_size = cache.shape[1]
    if not is_fp8(cache):
        if x.dtype != cache.dtype or scale is not None:
            raise DtypeError(f"{name}: got {x.dtype} {'with a scale ' if scale is not None else ''}for a cache of "
                             f"{cache.dtype}, expected the cache's dtype without a scale; convert explicitly")
        codes = x
    elif x.dtype == cache.dtype:
        codes = x
    else:
        value = x.to(torch.float32)
        codes = to_fp8(value if scale is None else value / scale, cache.dtype)
    for t, slot in enumerate(slots):
        if slot >= 0:
            cache[slot // page_size, slot % page_size] = codes[t]


def append_kv(kv_cache: Cache, k: torch.Tensor, v: torch.Tensor, page_table: Any = None, *,
              positions: IndexLike = None, batch_indices: IndexLike = None, slot_mapping: IndexLike = None,
              kv_layout: str = "NHD", k_scale: Scale | None = None, v_scale: Scale | None = None,
              kv_scales: str | None = None) -> None:
    """Write ``k (T, Hkv, D)`` and ``v (T, Hkv, Dv)`` into a paged cache, in place.

    Where each token goes: see :func:`target_slots`. An fp8 cache stores ``round(x / scale)`` in float32, saturating;
    scales: scalar, (Hkv), (B, Hkv) or (pages, Hkv), named by ``kv_scales`` where two fit, and per request only with a
    page table. fp8 tokens of the cache's dtype are copied as codes. Raises ShapeError, DtypeError, DeviceError.
    """
    k_cache, v_cache = split_cache(kv_cache, kv_layout)
    check_rank("k", k, (3,), "(T, Hkv, D)")
    check_same_device(kv_cache=k_cache, k=k, v=v)
    num_pages, page_size, heads, head_dim = k_cache.shape
    check_shape("k", k, (k.shape[0], heads, head_dim), "(T, Hkv, D)")
    check_shape("v", v, (k.shape[0], heads, v_cache.shape[3]), "(T, Hkv, Dv)")
    slots, requests = target_slots(k.shape[0], num_pages, page_size, page_table, positions, batch_indices,
                                   slot_mapping)
    batch = None if page_table is None else len(as_page_table(page_table).lengths)
    for name, cache, x, scale in (("k", k_cache, k, k_scale), ("v", v_cache, v, v_scale)):
        factor = None
        if scale is not None:
            factor = _token_scale(f"{name}_scale", scale, kv_scales, slots, requests, batch, num_pages, page_size,
                                  heads, x.device)
        write(name, cache, x, slots, factor)


def _token_scale(name: str, scale: Scale, kind: str | None, slots: list[int], requests: list[int], batch: int | None,
                 num_pages: int, page_size: int, heads: int, device: torch.device) -> torch.Tensor:
    """A cache scale as one that broadcasts to ``(T, Hkv, D)``."""
    value = as_scale(name, scale, device, torch.float32)
    shape = tuple(value.shape)
    if value.dim() <= 1 and value.numel() == 1:
        return value.reshape(())
    if shape == (heads,):
        return value.view(1, heads, 1)
    by_request = batch is not None and shape == (batch, heads) and kind in (None, "request_head")
    by_page = shape == (num_pages, heads) and kind in (None, "page")
    if by_request == by_page:
        raise ShapeError(f"{name}: got shape {shape} for {batch} requests, {num_pages} pages and {heads} heads, "
                         "expected exactly one of (B, Hkv) and (pages, Hkv); kv_scales= names the form")
    rows = requests if by_request else [slot // page_size for slot in slots]
    # Tokens that are not written look up row 0; their scale is never used.
    return value[[max(r, 0) for r in rows]].unsqueeze(-1)


def append_mla(ckv_cache: torch.Tensor, k_rope_cache: torch.Tensor | None, ckv: torch.Tensor, k_rope: torch.Tensor,
               page_table: Any = None, *, positions: IndexLike = None, batch_indices: IndexLike = None,
               slot_mapping: IndexLike = None, k_scale: Scale | None = None) -> None:
    """Write ``ckv (T, R)`` and ``k_rope (T, P)`` into an MLA cache, in place.

    ``ckv_cache (pages, page_size, R)`` and ``k_rope_cache (pages, page_size, P)``, or one ``(pages, page_size, R + P)``
    tensor with ``k_rope_cache=None``. Where each token goes: see :func:`target_slots`. ``k_scale``: a scalar for the
    fp8 parts of the cache. Raises ShapeError, DtypeError, DeviceError.
    """
    check_rank("ckv_cache", ckv_cache, (3,), "(pages, page_size, R)")
    check_rank("ckv", ckv, (2,), "(T, R)")
    check_same_device(ckv_cache=ckv_cache, k_rope_cache=k_rope_cache, ckv=ckv, k_rope=k_rope)
    latent = ckv.shape[1]
    if k_rope_cache is None:
        ckv_cache, k_rope_cache = ckv_cache[..., :latent], ckv_cache[..., latent:]
    check_shape("ckv", ckv, (ckv.shape[0], ckv_cache.shape[2]), "(T, R)")
    check_shape("k_rope", k_rope, (ckv.shape[0], k_rope_cache.shape[2]), "(T, P)")
    check_shape("k_rope_cache", k_rope_cache, (*ckv_cache.shape[:2], k_rope.shape[1]), "(pages, page_size, P)")
    slots, _ = target_slots(ckv.shape[0], ckv_cache.shape[0], ckv_cache.shape[1], page_table, positions, batch_indices,
                            slot_mapping)
    factor = None if k_scale is None else as_scale("k_scale", k_scale, ckv.device, torch.float32).reshape(())
    for name, cache, x in (("ckv", ckv_cache, ckv), ("k_rope", k_rope_cache, k_rope)):
        write(name, cache, x, slots, factor if is_fp8(cache) else None)
