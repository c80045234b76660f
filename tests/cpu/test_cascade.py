"""cascade_attention with features that see joined keys: one planned call over a joined page table, against the oracle."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import kernelgen
from kernelgen import PageTable, reference, settings
from kernelgen.errors import NoBackendError, ShapeError
from kernelgen.ops.joined import Joined, join_levels
from kernelgen.reference.masks import Variant, pack_mask
from kernelgen.reference.paged import split_cache
from kernelgen.reference.plain import cascade_attention_plain
from kernelgen.testing.data import FP8_DTYPES, PagedCase, cu_seqlens, make_paged_cache, poisoned_empty, random_tensor, seed_of
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


@pytest.mark.parametrize("name", MIXES)
def test_features_over_random_levels(name: str) -> None:
    mix = MIXES[name]
    for index in range(25):
        seed = seed_of("cascade", name, index)
        q, cache, levels, features = make_call(mix, seed)
        rounds = {"p_dtype": torch.bfloat16} if mix.dtype in FP8_DTYPES else {}
        exact = reference.cascade_attention(q, cache, levels, return_lse=True, **features)
        plain = cascade_attention_plain(q, cache, levels, return_lse=True, **features, **rounds)
        shape = (q.shape[0], q.shape[1], mix.dims[1])
        out = poisoned_empty(shape, torch.bfloat16 if mix.dtype in FP8_DTYPES else mix.dtype)
        lse = poisoned_empty(shape[:2])
        given = kernelgen.cascade_attention(q, cache, levels, **features, out=out, lse=lse, return_lse=True, backend="generated")
        assert given[0] is out and given[1] is lse
        what = f"{name}: {len(levels)} levels, page {levels[0][0].page_size}"
        # The heads of a group are rows of one tile.
        assert_close_to_reference(*(x.flatten(0, 1) for x in (out, exact[0], plain[0].to(out.dtype))), what=what, seed=seed)
        assert_lse_close(lse, exact[1], plain[1].float(), what=what, seed=seed)


def two_levels(cache: torch.Tensor, prefix: int, layout: str = "NHD") -> tuple[torch.Tensor, list[Any]]:
    size = cache.shape[1 if layout == "NHD" else 2] if cache.dim() == 4 else cache.shape[2 if layout == "NHD" else 3]
    tables = [PageTable.from_blocks(torch.tensor(pages, dtype=torch.int32), lens, size)
              for pages, lens in (([[0, 1]], [prefix]), ([[2, 3], [4, 5]], [5, 7]))]
    return random_tensor((5, 4, 16), torch.bfloat16, seed=1), [(tables[0], [0, 5]), (tables[1], [0, 2, 5])]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_are_the_largest_that_levels_allow(layout: str) -> None:
    shape = (6, 2, 8, 3, 16) if layout == "NHD" else (6, 2, 3, 8, 16)
    cache = torch.zeros(shape, dtype=torch.bfloat16)
    for prefix, small in ((8, 8), (16, 8), (12, 4), (6, 2), (7, 1), (0, 8)):
        _, levels = two_levels(cache, prefix, layout)
        found = join_levels(levels, 5, *split_cache(cache, layout))
        assert isinstance(found, Joined) and found.table.page_size == small == found.k_cache.shape[1]
        assert found.k_cache.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
        assert found.table.host_lengths() == [prefix + 5, prefix + 7]
        assert (found.per_page == 1) == (small == 8)


def test_a_last_level_may_end_anywhere_and_prefixes_of_nothing_too() -> None:
    """Only a level with keys behind it must end with a page: not one whose requests have no rows or no keys of their own."""
    cache = torch.zeros(6, 2, 8, 1, 16)
    table = lambda pages, lens: PageTable.from_blocks(torch.tensor(pages, dtype=torch.int32), lens, 8)  # noqa: E731
    levels = [(table([[0]], [5]), [0, 4]), (table([[1], [2]], [0, 3]), [0, 4, 4])]
    found = join_levels(levels, 4, *split_cache(cache, "NHD"))
    assert isinstance(found, Joined) and found.table.page_size == 8 and found.table.host_lengths() == [5, 3]


def test_irregular_pages_run_the_oracle_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    pair = tuple(random_tensor((6, 3 * 8 * 16 + 5), torch.bfloat16, seed=i)[:, :-5].unflatten(1, (8, 3, 16)) for i in (2, 3))
    q, levels = two_levels(pair[0], 6)
    q = q[:, :3]
    with pytest.raises(NoBackendError, match="window.*page stride.*got 389 and 48 and 389 and 48 elements"):
        kernelgen.cascade_attention(q, pair, levels, window=(3, 0), backend="generated")
    out = kernelgen.cascade_attention(q, pair, levels, window=(3, 0))
    torch.testing.assert_close(out, reference.cascade_attention(q, pair, levels, window=(3, 0)).to(torch.bfloat16))
    assert "float64 oracle" in caplog.text
    whole = two_levels(pair[0], 8)[1]  # whole pages need no others
    exact = reference.cascade_attention(q, pair, whole, window=(3, 0))
    out = kernelgen.cascade_attention(q, pair, whole, window=(3, 0), backend="generated")
    assert_close_to_reference(out, exact, cascade_attention_plain(q, pair, whole, window=(3, 0)), what="whole pages", tile_dim=-3)


def test_levels_that_do_not_fit_are_named() -> None:
    cache = torch.zeros(6, 2, 8, 2, 16, dtype=torch.bfloat16)
    q, levels = two_levels(cache, 8)
    inner = levels[1][0]
    other = PageTable.from_blocks(torch.zeros(1, 2, dtype=torch.int32), [3], 4)
    for wrong, words in (
        ([(inner, [0, 1, 5]), levels[1]], "rows 0 .. 1 of the innermost level lie in no single request of level 0"),
        ([levels[0], (inner, [0, 2, 4])], "got 5 rows, expected 4, the sum of the query lengths of level 1"),
        ([levels[0], (inner, [0, 3, 2])], "start at 0 and never fall"), ([(other, [0, 5]), levels[1]], "pages of 8 tokens, expected 4"),
        ([levels[0], (inner, [0, 5])], "got 1 query lengths, expected 2"),
    ):
        with pytest.raises(ShapeError, match=words):
            kernelgen.cascade_attention(q, cache, wrong, window=(3, 0))
    with settings.override(check=True), pytest.raises(ShapeError, match="got pages 0 .. 9, expected 0 .. 5"):
        junk = PageTable.from_blocks(torch.tensor([[0, 9]], dtype=torch.int32), [16], 8)
        kernelgen.cascade_attention(q, cache, [(junk, [0, 5]), levels[1]], window=(3, 0))


def test_70000_requests_are_joined_at_once() -> None:
    """70,000 requests of 8 groups behind one prefix, 20 pages each: well below a second beside the kernel."""
    batch, size = 70_000, 16
    cache = torch.zeros(64, 2, size, 1, 8, dtype=torch.bfloat16)
    blocks = torch.from_numpy(np.random.default_rng(1).integers(0, 64, (batch, 9)).astype(np.int32))
    levels: list[Any] = [(PageTable.from_blocks(blocks[:1], [8 * size], size), [0, batch]),
                         (PageTable.from_blocks(blocks[1:9], [4 * size] * 8, size), list(range(0, batch + 1, batch // 8))),
                         (PageTable.from_blocks(blocks, torch.full((batch,), 8 * size - 3, dtype=torch.int32), size),
                          torch.arange(batch + 1))]
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        found = join_levels(levels, batch, *split_cache(cache, "NHD"))
        times.append(time.perf_counter() - begin)
    assert isinstance(found, Joined) and found.table.kv_indices is not None and min(times) < 1, times
    b = 12_345
    assert found.table.kv_indices[20 * b:20 * b + 20].tolist() == [
        *blocks[0, :8].tolist(), *blocks[1 + b // (batch // 8), :4].tolist(), *blocks[b, :8].tolist()]
