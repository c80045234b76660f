"""Checks of the small ops around attention that the CPU and the GPU tests share."""

from __future__ import annotations

from typing import Any

import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.testing.data import layouts, offset_by_one, padded_rows, poison_, poisoned_empty, random_lengths, random_tensor, seed_of
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference, assert_lse_close

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def make_table(form: str, lengths: list[int], page_size: int, spare: int, *, seed: int, device: str) -> tuple[kernelgen.PageTable, int]:
    """A public page table over shuffled pages, with junk behind each request's, and the number of pages of the cache."""
    counts = [-(-n // page_size) for n in lengths]
    pages = sum(counts) + spare
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist()
    used = [[order.pop() for _ in range(count)] for count in counts]
    if form == "csr":
        indptr = [sum(counts[:b]) for b in range(len(counts) + 1)]
        last = [n - (count - 1) * page_size if count else -7 for n, count in zip(lengths, counts)]
        indices = [page for row in used for page in row] + [-1, 2**31 - 1]
        indptr_, indices_, last_ = (torch.tensor(x, dtype=torch.int32, device=device) for x in (indptr, indices, last))
        return kernelgen.PageTable.from_csr(indptr_, indices_, last_, page_size), pages
    width = max(counts, default=0) + 2
    rows = [(row + [-1, 2**31 - 1] * width)[:width] for row in used]
    blocks = torch.tensor(rows, dtype=torch.int32, device=device).view(-1, width)
    return kernelgen.PageTable.from_blocks(blocks, torch.tensor(lengths, dtype=torch.int32, device=device), page_size), pages


def sentinel_cache(pages: int, page_size: int, heads: int, width: int, dtype: torch.dtype, layout: str, device: str) -> torch.Tensor:
    """A 4-D cache that holds NaN, inside a padded buffer that does too."""
    inner = (heads, page_size) if layout == "HND" else (page_size, heads)
    return padded_rows(poisoned_empty((pages, *inner, width), dtype, device), 16)


def buffer_of(view: torch.Tensor) -> torch.Tensor:
    """All memory behind a view, the gaps between its rows included, as bytes."""
    return torch.tensor([], dtype=torch.uint8, device=view.device).set_(view.untyped_storage())


def assert_only_slots_written(before: torch.Tensor, cache: torch.Tensor, slots: list[int], layout: str, what: str) -> None:
    """Bit for bit what it was, except for the rows of the slots; the gaps of the buffer too."""
    after = buffer_of(cache).clone().view(cache.dtype).as_strided(cache.shape, cache.stride(), cache.storage_offset())
    restored = after.transpose(1, 2) if layout == "HND" else after
    page_size = restored.shape[1]
    for slot in slots:
        poison_(restored[slot // page_size, slot % page_size])
    assert_bits_equal(buffer_of(after), buffer_of(before), what=f"{what}: outside the written slots")


def scale_of(kind: str | None, batch: int, pages: int, heads: int, *, seed: int, device: str) -> Any:
    shape: dict[str, tuple[int, ...]] = {"tensor": (), "head": (heads,), "request_head": (batch, heads), "page": (pages, heads)}
    if kind is None:
        return None
    return 0.37 if kind == "number" else (random_tensor((1, *shape[kind]), seed=seed)[0].abs() + 0.1).to(device)


def check_append(
    form: str, layout: str, page_size: int, dtype: torch.dtype, cache_dtype: torch.dtype, *, heads: int, dim: int, dim_v: int,
    scales: str | None = None, pair: bool = True, mode: str = "positions", index: torch.dtype = torch.int32, odd: bool = False,
    device: str = "cpu",
) -> None:
    """One random append against the oracle on a copy: written slots equal in bits, everything else untouched."""
    what = f"{form} {layout} page {page_size} {dtype} to {cache_dtype} h={heads} d={dim}/{dim_v} {scales} pair={pair} {mode} odd={odd}"
    seed = seed_of(what)
    lengths = random_lengths(5, 40, seed=seed)
    table, pages = make_table("csr" if form == "slots" else form, lengths, page_size, 3, seed=seed, device=device)
    requests, positions = _tokens(lengths, mode, seed)
    tokens = len(requests)
    drawn = torch.float32 if dtype in FP8 else dtype
    k, v = (random_tensor((tokens, heads, d), drawn, seed=seed + i, scale=40, device=device).to(dtype) for i, d in ((1, dim), (2, dim_v)))
    if odd:
        k, v = offset_by_one(k), padded_rows(v, 1)
    if pair:
        cache: Any = tuple(sentinel_cache(pages, page_size, heads, d, cache_dtype, layout, device) for d in (dim, dim_v))
    else:
        inner = (heads, page_size) if layout == "HND" else (page_size, heads)
        cache = poisoned_empty((pages, 2, *inner, dim), cache_dtype, device)
    views = cache if pair else (cache[:, 0], cache[:, 1])
    k_scale, v_scale = (scale_of(scales, len(lengths), pages, heads, seed=seed + i, device=device) for i in (3, 4))
    host = ref.PageTable.from_csr(*_csr(table), page_size) if table.form == "csr" else ref.PageTable.from_blocks(
        table.block_tables.cpu(), table.seq_lens.cpu(), page_size)  # type: ignore[union-attr]
    places: dict[str, Any] = {}
    slots = [-1 if b < 0 or p < 0 else host.pages[b][p // page_size] * page_size + p % page_size for b, p in zip(requests, positions)]
    int_tensor = lambda values: torch.tensor(values, dtype=index, device=device)  # noqa: E731
    if form == "slots":
        places["slot_mapping"] = int_tensor(slots)
    else:
        places["page_table"] = table
        if mode != "one":
            places["batch_indices"] = int_tensor(requests)
        if mode == "positions":
            places["positions"] = int_tensor(positions)
    named = dict(kv_layout=layout, k_scale=k_scale, v_scale=v_scale)
    if scales in ("request_head", "page"):
        named["kv_scales"] = scales
    before = [buffer_of(t).clone().view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset()) for t in views]
    expected = before[0].clone(), before[1].clone()
    ref.append_kv(expected, k, v, slot_mapping=slots, **_by_token(named, requests, slots, pages, page_size))
    for _ in range(2):  # the second call is the remembered one
        kernelgen.append_kv(cache, k, v, backend="generated", **places, **named)
        for name, want, got in zip("kv", expected, views):
            assert_bits_equal(got, want, what=f"{what}: {name}")
    written = [s for s in slots if s >= 0]
    if pair:
        for was, got in zip(before, views):
            assert_only_slots_written(was, got, written, layout, what)


def _csr(table: kernelgen.PageTable) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert table.kv_indptr is not None and table.kv_indices is not None and table.kv_last_page_len is not None
    return table.kv_indptr.cpu(), table.kv_indices.cpu(), table.kv_last_page_len.cpu()


def _tokens(lengths: list[int], mode: str, seed: int) -> tuple[list[int], list[int]]:
    """(request, position) of each token. "one": the last of each request; "last": the last few, mixed; else any, some skipped."""
    generator = torch.Generator().manual_seed(seed)
    if mode == "one":
        return list(range(len(lengths))), [n - 1 for n in lengths]
    if mode == "last":
        counts = [min(n, int(torch.randint(0, 6, (), generator=generator))) for n in lengths]
        order = [b for b, count in enumerate(counts) for _ in range(count)]
        order = [order[i] for i in torch.randperm(len(order), generator=generator).tolist()]
        order.insert(len(order) // 2, -1)
        seen = dict.fromkeys(range(len(lengths)), 0)
        positions = []
        for b in order:
            positions.append(lengths[b] - counts[b] + seen[b] if b >= 0 else -1)
            seen[b] = seen.get(b, 0) + 1
        return order, positions
    places = [(b, p) for b, n in enumerate(lengths) for p in range(n)]
    chosen = [places[i] for i in torch.randperm(len(places), generator=generator).tolist()[:23]]
    chosen[3], chosen[5] = (-1, 4), (chosen[5][0], -1)
    return [b for b, _ in chosen], [p for _, p in chosen]


def _by_token(named: dict[str, Any], requests: list[int], slots: list[int], pages: int, page_size: int) -> dict[str, Any]:
    """The oracle knows no request of a slot: scales per request become scales per page, each page having one request."""
    if named.get("kv_scales") != "request_head":
        return named
    out = dict(named, kv_scales="page")
    for name in ("k_scale", "v_scale"):
        by_page = torch.ones((pages, named[name].shape[1]), device=named[name].device)
        for b, slot in zip(requests, slots):
            if slot >= 0:
                by_page[slot // page_size] = named[name][b]
        out[name] = by_page
    return out


def check_rope(
    shape: tuple[int, ...], k_heads: int, dtype: torch.dtype, *, rotary: int | None = None, interleaved: bool = False,
    cache_dtype: torch.dtype | None = None, scaling: dict[str, Any] | None = None, top: int = 4000, device: str = "cpu",
) -> None:
    """One random rotation against the float64 oracle, in every layout and in place."""
    kind = scaling["rope_type"] if scaling else None
    what = f"rope {shape} hk={k_heads} {dtype} rotary={rotary} interleaved={interleaved} cos={cache_dtype} {kind}"
    seed = seed_of(what)
    dim = rotary or shape[-1]
    positions = torch.randint(0, top, shape[:-2], generator=torch.Generator().manual_seed(seed), dtype=torch.int64).to(device)
    q, k = (random_tensor(s, dtype, seed=seed + i, device=device) for i, s in ((1, shape), (2, (*shape[:-2], k_heads, shape[-1]))))
    cache = None if cache_dtype is None else ref.make_cos_sin_cache(top, dim, scaling=scaling, dtype=cache_dtype).to(device)
    named: dict[str, Any] = dict(
        interleaved=interleaved, rotary_dim=rotary, cos_sin_cache=cache, scaling=None if cache is not None else scaling)
    exact = ref.rope(q, k, positions, **named)
    plain = ref.rope(q, k, positions, **named, compute_dtype=torch.float32)
    first = kernelgen.rope(q, k, positions, **named, backend="generated")
    for name, got, want, near in zip("qk", first, exact, plain):
        assert_close_to_reference(got, want, near.to(dtype), what=f"{what}: {name}", seed=seed)
    for name in layouts(q):
        view, other = layouts(q.clone())[name], layouts(k.clone())[name]  # of their own: they are overwritten
        for index in (positions, positions.int()):
            again = kernelgen.rope(view, other, index, **named, backend="generated")
            for a, b in zip(again, first):
                assert_bits_equal(a, b, what=f"{what}: {name} {index.dtype}")
        kept = kernelgen.rope(view, other, positions, **named, inplace=True, backend="generated")
        assert kept[0] is view and kept[1] is other
        for a, b in zip(kept, first):
            assert_bits_equal(a, b, what=f"{what}: {name} in place")


def check_merge(sides: int, tokens: int, heads: int, dim: int, dtype: torch.dtype, *, device: str = "cpu") -> None:
    """One random merge against the float64 oracle: empty sides hold NaN, some rows have no side at all."""
    what = f"merge n={sides} t={tokens} h={heads} d={dim} {dtype}"
    seed = seed_of(what)
    outs = random_tensor((sides, tokens, heads, dim), dtype, seed=seed, device=device)
    lses = random_tensor((sides, tokens, heads), seed=seed + 1, scale=6, device=device)
    empty = random_tensor((sides, tokens, heads), seed=seed + 2, device=device) > 0.5
    if tokens:
        empty[:, 0] = True
    lses[empty] = -torch.inf
    outs[empty] = float("nan")
    exact, plain = ref.merge_states(outs, lses), ref.merge_states(outs, lses, compute_dtype=torch.float32)
    for name, view in layouts(outs).items():
        strided = lses.transpose(1, 2).contiguous().transpose(1, 2)
        out = padded_rows(poisoned_empty((tokens, heads, dim), dtype, device), 3)
        lse = poisoned_empty((tokens, heads), torch.float32, device)
        kernelgen.merge_states(view, strided, out=out, lse=lse, backend="generated")
        assert_close_to_reference(out, exact[0], plain[0].to(dtype), what=f"{what}: {name}", seed=seed)
        assert_lse_close(lse, exact[1], plain[1].float(), what=f"{what}: {name}", seed=seed)
        for got in (kernelgen.merge_states(view, lses, backend="generated") for _ in range(2)):
            assert_bits_equal(got[0], out, what=f"{what}: {name} fresh")
            assert_bits_equal(got[1], lse, what=f"{what}: {name} fresh lse")


def check_mla(combined: bool, dtype: torch.dtype, cache_dtype: torch.dtype, *, device: str) -> None:
    """append_mla against the oracle, into two caches or one, by a table and by slots."""
    latent, rotary, page_size = 72, 24, 3
    what = f"mla combined={combined} {dtype} to {cache_dtype}"
    seed = seed_of(what)
    table, pages = make_table("blocks", [4, 0, 9], page_size, 2, seed=seed, device=device)
    ckv, k_rope = (random_tensor((4, d), dtype, seed=seed + i, device=device) for i, d in ((1, latent), (2, rotary)))
    rope_dtype = cache_dtype if combined else dtype
    whole = poisoned_empty((pages, page_size, latent + rotary), cache_dtype, device)
    caches: tuple[torch.Tensor, torch.Tensor | None] = (whole, None) if combined else (
        whole[..., :latent], poisoned_empty((pages, page_size, rotary), rope_dtype, device))
    scale = 0.7 if cache_dtype in FP8 else None
    requests, positions = torch.tensor([2, 0, -1, 2], device=device), torch.tensor([8, 3, 0, 0], device=device)
    expected = tuple(None if c is None else c.clone() for c in caches)
    ref.append_mla(expected[0], expected[1], ckv, k_rope, table, positions=positions, batch_indices=requests, k_scale=scale)  # type: ignore
    for _ in range(2):
        kernelgen.append_mla(*caches, ckv, k_rope, table, positions=positions, batch_indices=requests, k_scale=scale, backend="generated")
        for got, want in zip(caches, expected):
            if got is not None and want is not None:
                assert_bits_equal(got, want, what=what)


def check_rope_append(
    form: str, dtype: torch.dtype, cache_dtype: torch.dtype, *, rotary: int = 32, interleaved: bool = False,
    cos: torch.dtype | None = None, device: str,
) -> None:
    """The fused call against the oracles in sequence: keys in float32 to the cache's type, values and q as apart."""
    what = f"rope_append {form} {dtype} to {cache_dtype} rotary={rotary} interleaved={interleaved} cos={cos}"
    seed, dim, page_size, lengths = seed_of(what), 40, 3, [5, 0, 11, 7]
    table, pages = make_table("csr" if form == "slots" else form, lengths, page_size, 2, seed=seed, device=device)
    requests, positions = _tokens(lengths, "positions", seed)
    positions = [max(p, 0) for p in positions]  # a negative one has no row in a cos_sin_cache
    host = ref.PageTable.from_csr(*_csr(table), page_size) if table.form == "csr" else ref.PageTable.from_blocks(
        table.block_tables.cpu(), table.seq_lens.cpu(), page_size)  # type: ignore[union-attr]
    placed: dict[tuple[int, int], int] = {}
    for t, place in enumerate(zip(requests, positions)):  # one token per slot: another would be a race
        if placed.setdefault(place, t) != t:
            requests[t] = -1
    slots = [-1 if b < 0 else host.pages[b][p // page_size] * page_size + p % page_size for b, p in zip(requests, positions)]
    index = torch.tensor(positions, device=device)
    places: dict[str, Any] = dict(slot_mapping=torch.tensor(slots, device=device)) if form == "slots" else dict(
        page_table=table, batch_indices=torch.tensor(requests, device=device))
    tokens = len(requests)
    q, k, v = (random_tensor((tokens, h, dim), dtype, seed=seed + h, scale=3, device=device) for h in (6, 2, 2))
    cache = poisoned_empty((pages, 2, page_size, 2, dim), cache_dtype, device)
    turn: dict[str, Any] = dict(interleaved=interleaved, rotary_dim=rotary)
    if cos is not None:
        turn["cos_sin_cache"] = ref.make_cos_sin_cache(64, rotary, dtype=cos).to(device)
    scales: dict[str, Any] = dict(k_scale=0.11, v_scale=torch.tensor([0.5, 0.2], device=device)) if cache_dtype in FP8 else {}
    exact = ref.rope(q, k, index, **turn)
    plain = ref.rope(q, k, index, **turn, compute_dtype=torch.float32)
    expected = cache.clone()
    ref.append_kv(expected, k, v, slot_mapping=slots, **scales)
    for out in (None, q.clone()):
        fresh = cache.clone()
        got_q = kernelgen.rope_append_kv(q if out is None else out, k, v, fresh, **places, positions=index, **turn, **scales, out=out,
                                         backend="generated")
        assert_close_to_reference(got_q, exact[0], plain[0].to(dtype), what=f"{what}: q", seed=seed)
        assert_bits_equal(fresh[:, 1], expected[:, 1], what=f"{what}: v")
        written = [s for s in slots if s >= 0]
        keys = torch.stack([fresh[s // page_size, 0, s % page_size].view(torch.uint8) for s in written]).view(cache_dtype)
        rows = [t for t, s in enumerate(slots) if s >= 0]
        want, near = exact[1][rows], plain[1][rows]
        if cache_dtype in FP8:
            limit = torch.finfo(cache_dtype).max
            want, near = want / torch.tensor(0.11).double(), (near / torch.tensor(0.11)).clamp(-limit, limit)
        assert_close_to_reference(keys.double(), want, near.to(cache_dtype).double(), what=f"{what}: k", seed=seed, out_dtype=cache_dtype)
        left = fresh.clone()
        for s in written:
            poison_(left[s // page_size, :, s % page_size])
        assert_bits_equal(left, cache, what=f"{what}: outside the written slots")
