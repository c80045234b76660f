"""Cascades whose features see joined keys, at random levels, pages and layouts: inputs, and one call against the oracle."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch

import kernelgen
from kernelgen import PageTable, reference
from kernelgen.ops.joined import Joined, join_levels
from kernelgen.reference.masks import Variant, pack_mask
from kernelgen.reference.paged import split_cache
from kernelgen.reference.plain import cascade_attention_plain
from kernelgen.testing.data import FP8_DTYPES, PagedCase, cu_seqlens, make_paged_cache, poisoned_empty, random_tensor
from kernelgen.testing.tolerance import assert_close_to_reference, assert_lse_close

E4M3, E5M2 = FP8_DTYPES


@dataclass(frozen=True)
class Mix:
    """The features of a call. ``window``, ``soft_cap``: given; ``mask``: "flat" or "packed"; ``scales``: kv_scales."""

    dtype: torch.dtype = torch.bfloat16
    kv: torch.dtype = torch.bfloat16
    dims: tuple[int, int] = (16, 16)
    pages: tuple[int, ...] = (1, 4, 16)
    window: tuple[int | None, int | None] | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    mask: str | None = None
    variant: bool = False
    scales: str | None = None
    q_scale: bool = False
    causal: bool = True


MIXES = {
    "window alibi": Mix(window=(9, None), alibi=True),
    "packed mask, odd pages": Mix(torch.float32, torch.float32, (24, 8), (3, 6, 10), mask="packed", soft_cap=2.0, causal=False),
    "variant": Mix(variant=True, sinks=True),
    "request scales": Mix(kv=E4M3, scales="request_head"),
    "page scales": Mix(kv=E5M2, scales="page", alibi=True),
    "all": Mix(E4M3, E4M3, (32, 16), (8,), (20, 5), 3.0, True, True, "flat", True, "head", True),
}


def nested(rng: random.Random) -> tuple[list[list[int]], list[list[int]]]:
    """(query lengths, key lengths) of the requests of 1 to 4 levels, outermost first. Inner requests share outer ones."""
    q_lens = [[rng.choice((0, 1, 1, 3, 7)) for _ in range(rng.randint(1, 6))]]
    for _ in range(rng.randint(0, 3)):
        inner, outer = list(q_lens[0]), []
        while inner:
            count = rng.randint(1, len(inner))
            outer.append(sum(inner[:count]))
            inner = inner[count:]
        q_lens.insert(0, outer)
    return q_lens, [[rng.choice((0, 4, 6, 16, rng.randint(1, 40))) for _ in level] for level in q_lens]


def level_tables(case: PagedCase, sizes: list[int], rng: random.Random) -> list[PageTable]:
    """The table of each level: the case's requests are those of the levels one after another."""
    tables, first = [], 0
    for size in sizes:
        last = first + size
        if rng.random() < 0.5:
            tables.append(PageTable.from_blocks(case.block_tables[first:last], case.seq_lens[first:last], case.page_size))
        else:
            begin = case.kv_indptr[first:last + 1]
            tables.append(PageTable.from_csr(begin - begin[0], case.kv_indices[int(begin[0]):], case.kv_last_page_len[first:last],
                                             case.page_size))
        first = last
    return tables


def padded_pages(cache: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    """The cache with ``rows`` poisoned ones behind the last of each page."""
    shape = list(cache.shape)
    shape[dim] += rows
    buffer = poisoned_empty(shape, cache.dtype).narrow(dim, 0, cache.shape[dim])
    bits = torch.uint8 if cache.dtype in FP8_DTYPES else cache.dtype
    buffer.view(bits).copy_(cache.view(bits))
    return buffer


def scale_of(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return random_tensor(shape or (1,), seed=seed).abs().reshape(shape) * 0.3 + 0.4


def make_call(mix: Mix, seed: int) -> tuple[torch.Tensor, Any, list[Any], dict[str, Any]]:
    """(q, cache, levels, features) at random sizes; unused slots hold NaN."""
    rng = random.Random(seed)
    q_lens, kv_lens = nested(rng)
    heads, group, (d, dv) = rng.choice((1, 2)), rng.choice((1, 3)), mix.dims
    lens, layout = [n for level in kv_lens for n in level], rng.choice(("NHD", "HND"))
    wide = [(random_tensor((n, heads, d), seed=seed + i), random_tensor((n, heads, dv), seed=seed + 99 + i)) for i, n in enumerate(lens)]
    case = make_paged_cache([(k.to(mix.kv), v.to(mix.kv)) for k, v in wide], rng.choice(mix.pages), seed=seed, kv_layout=layout,
                            pair=d != dv or rng.random() < 0.5)
    cache: Any = case.kv_cache
    if isinstance(cache, tuple) and rng.random() < 0.5:
        cache = tuple(padded_pages(c, 1 if layout == "NHD" else 2, 2) for c in cache)
    levels = list(zip(level_tables(case, [len(level) for level in kv_lens], rng), map(cu_seqlens, q_lens)))
    rows, batch, hq = sum(q_lens[-1]), len(q_lens[-1]), heads * group
    features: dict[str, Any] = {"kv_layout": layout, "causal": mix.causal, "window": mix.window, "soft_cap": mix.soft_cap,
                                "kv_scales": mix.scales}
    if mix.alibi:
        features["alibi_slopes"] = scale_of((batch, hq) if rng.random() < 0.5 else (hq,), seed + 1) * 0.1
    if mix.sinks:
        features["sinks"] = random_tensor((hq,), seed=seed + 2)
    if mix.variant:
        bias = random_tensor((batch,), seed=seed + 3)
        features["variant"] = Variant(lambda s, c: s * 0.9 + c.bias[c.batch] * 0.1 * ((c.q_pos - c.k_pos) % 5),
                                      lambda c: (c.k_pos + c.q_pos + c.head) % 4 != 2, {"bias": bias})
    if mix.scales:
        shape = {"head": (heads,), "request_head": (batch, heads), "page": (case.num_pages, heads)}[mix.scales]
        features |= {"k_scale": scale_of(shape, seed + 4), "v_scale": scale_of(shape, seed + 5)}
    if mix.q_scale:
        features["q_scale"] = scale_of((batch, hq), seed + 6)
    if mix.mask:
        joined = join_levels(levels, rows, *split_cache(cache, layout))
        assert isinstance(joined, Joined)
        lengths = joined.table.host_lengths()
        assert lengths is not None
        mask = random_tensor((sum(a * b for a, b in zip(q_lens[-1], lengths)),), seed=seed + 7) > -0.6
        features["mask"] = pack_mask(mask) if mix.mask == "packed" else mask
    return random_tensor((rows, hq, d), seed=seed + 8).to(mix.dtype), cache, levels, features


def check(mix: Mix, seed: int, what: str, device: str = "cpu", lengths_on_device: bool = False) -> None:
    """One random call into poisoned outputs against the oracle."""
    q, cache, levels, features = make_call(mix, seed)
    q, cache, features = _moved((q, cache, features), device)
    levels = [_on_device(level, device, lengths_on_device) for level in levels]
    rounds: dict[str, Any] = {"p_dtype": torch.bfloat16} if mix.dtype in FP8_DTYPES else {}
    exact = reference.cascade_attention(q, cache, levels, return_lse=True, **features)
    plain = cascade_attention_plain(q, cache, levels, return_lse=True, **features, **rounds)
    shape = (q.shape[0], q.shape[1], mix.dims[1])
    out = poisoned_empty(shape, torch.bfloat16 if mix.dtype in FP8_DTYPES else mix.dtype, device)
    lse = poisoned_empty(shape[:2], device=device)
    given = kernelgen.cascade_attention(q, cache, levels, **features, out=out, lse=lse, return_lse=True, backend="generated")
    assert given[0] is out and given[1] is lse
    what = f"{what}: {len(levels)} levels, page {levels[0][0].page_size}"
    # The heads of a group are rows of one tile.
    assert_close_to_reference(*(x.flatten(0, 1) for x in (out, exact[0], plain[0].to(out.dtype))), what=what, seed=seed)
    assert_lse_close(lse, exact[1], plain[1].float(), what=what, seed=seed)


def _moved(value: Any, device: str) -> Any:
    """Tensors among a call's arguments on the device; slices of larger buffers keep their strides."""
    if isinstance(value, torch.Tensor):
        whole = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        bits = torch.uint8 if value.dtype in FP8_DTYPES else value.dtype
        whole.view(bits).copy_(value.view(bits))
        return whole
    if isinstance(value, (tuple, dict)):
        return {k: _moved(v, device) for k, v in value.items()} if isinstance(value, dict) else tuple(_moved(v, device) for v in value)
    return replace(value, tensors=_moved(dict(value.tensors), device)) if isinstance(value, Variant) else value


def _on_device(level: Any, device: str, lengths: bool) -> Any:
    table, starts = level
    names = ("kv_indices", "block_tables", *(("kv_indptr", "kv_last_page_len", "seq_lens") if lengths else ()))
    moved = {name: t.to(device) for name in names if (t := getattr(table, name)) is not None}
    return replace(table, **moved), starts.to(device) if lengths else starts
