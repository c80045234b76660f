"""Paged, cascade and latent attention and the cache writers, against attention over the same keys laid out flat."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.reference import (
    PageTable,
    append_kv,
    append_mla,
    attention,
    attention_varlen,
    cascade_attention,
    merge_states,
    mla_attention,
    pack_mask,
    paged_attention,
    quantize_attention,
    rope,
    rotate,
)
from kernelgen.reference.rotation import rotation_signs
from kernelgen.testing.data import (
    PagedCase,
    cu_seqlens,
    make_paged_cache,
    poisoned_empty,
    random_tensor,
    random_tensors,
)

NAN = float("nan")


def requests(lengths: list[int], heads: int, dim: int, dim_v: int, seed: int,
             dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs = [random_tensors([(n, heads, dim), (n, heads, dim_v)], dtype, seed=seed + b) for b, n in enumerate(lengths)]
    return [(k, v) for k, v in pairs]


def flat(keys: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.cat([k for k, _ in keys]), torch.cat([v for _, v in keys]), cu_seqlens([k.shape[0] for k, _ in keys])


def both_tables(case: PagedCase) -> list[PageTable]:
    return [PageTable.from_csr(case.kv_indptr, case.kv_indices, case.kv_last_page_len, case.page_size),
            PageTable.from_blocks(case.block_tables, case.seq_lens, case.page_size)]


@pytest.mark.parametrize("page_size", [1, 2, 3, 8, 16, 19, 64])
@pytest.mark.parametrize(("kv_layout", "pair"), [("NHD", False), ("HND", False), ("NHD", True), ("HND", True)])
def test_paged_equals_ragged_over_the_same_keys(page_size: int, kv_layout: str, pair: bool) -> None:
    """B12: lengths 1, page, page + 1; both tables with junk past the used entries, NaN in every unused slot."""
    keys = requests([1, page_size, page_size + 1, 0, 21], 2, 8, 16 if pair else 8, seed=1)
    case = make_paged_cache(keys, page_size, seed=2, kv_layout=kv_layout, pair=pair)
    q_lens = [1, 2, 0, 3, 4]
    q = random_tensor((10, 4, 8), torch.float64, seed=3)
    k, v, cu_k = flat(keys)
    mask = torch.rand(sum(a * b.shape[0] for a, (b, _) in zip(q_lens, keys)),
                      generator=torch.Generator().manual_seed(4)) < 0.8
    features: dict[str, Any] = {"causal": True, "window": (9, None), "sinks": torch.rand(4), "soft_cap": 2.0,
                                "alibi_slopes": torch.rand(5, 4), "mask": mask, "return_lse": True}
    expected = attention_varlen(q, k, v, cu_seqlens(q_lens), cu_k, **features)
    for table in [*both_tables(case), case]:
        result = paged_attention(q, case.kv_cache, table, q_lens=q_lens, kv_layout=kv_layout, **features)
        assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])
    packed = {**features, "mask": pack_mask(mask)}
    result = paged_attention(q, case.kv_cache, case, cu_seqlens_q=cu_seqlens(q_lens), kv_layout=kv_layout, **packed)
    assert torch.equal(result[0], expected[0])


def test_decode_is_one_query_per_request_and_causal_by_default() -> None:
    keys = requests([5, 9], 2, 8, 8, seed=5)
    case = make_paged_cache(keys, 4, seed=6)
    q = random_tensor((2, 4, 8), torch.float64, seed=7)
    k, v, cu_k = flat(keys)
    assert torch.equal(paged_attention(q, case.kv_cache, case), attention_varlen(q, k, v, [0, 1, 2], cu_k))
    two = torch.cat([q, q])
    assert torch.equal(paged_attention(two, case.kv_cache, case, q_lens=[2, 2]),
                       attention_varlen(two, k, v, [0, 2, 4], cu_k, causal=True))


@pytest.mark.parametrize("q_len", [5])
@pytest.mark.parametrize("kv_len", [0, 1, 3])
def test_more_queries_than_keys(q_len: int, kv_len: int) -> None:
    """B01, paged."""
    case = make_paged_cache(requests([kv_len], 2, 64, 64, seed=8), 16, seed=9)
    q = random_tensor((q_len, 4, 64), torch.float64, seed=10)
    out, lse = paged_attention(q, case.kv_cache, case, q_lens=[q_len], return_lse=True)
    assert torch.equal(out[: q_len - kv_len], torch.zeros(q_len - kv_len, 4, 64, dtype=torch.float64))
    assert (lse[: q_len - kv_len] == -float("inf")).all() and torch.isfinite(lse[q_len - kv_len :]).all()


def test_contiguous_cache_is_one_page_per_request() -> None:
    k, v = random_tensors([(3, 10, 2, 8), (3, 10, 2, 8)], torch.float64, seed=11)
    q = random_tensor((3, 1, 2, 8), torch.float64, seed=12)
    table = PageTable.contiguous([4, 10, 0], 10)
    result = paged_attention(q[:, 0], (k, v), table)
    assert torch.equal(result, attention(q, k, v, kv_lens=[4, 10, 0])[:, 0])


def test_bad_page_tables_are_refused() -> None:
    """B12, B43, B46: bad last lengths, wrong row counts and pages outside the cache are named."""
    indptr, indices = torch.tensor([0, 2, 2]), torch.tensor([0, 1], dtype=torch.int32)
    for last in (0, 5):
        with pytest.raises(ShapeError, match=rf"request 0 has {last}, expected 1 .. 4"):
            PageTable.from_csr(indptr, indices, torch.tensor([last, 0]), 4)
    assert PageTable.from_csr(indptr, indices, torch.tensor([3, 99]), 4).lengths == (7, 0)
    with pytest.raises(ShapeError, match="request 1 has length 9"):
        PageTable.from_blocks(torch.zeros(2, 2, dtype=torch.int32), [1, 9], 4)
    with pytest.raises(ShapeError, match="page_size"):
        PageTable.from_blocks(torch.zeros(2, 2, dtype=torch.int32), [0, 0], 0)
    cache = torch.zeros(6, 2, 4, 1, 8)
    q = torch.zeros(1, 1, 8)
    for page in (-1, 6, 2**31 - 1):
        table = PageTable.from_blocks(torch.tensor([[2, page]], dtype=torch.int32), [5], 4)
        with pytest.raises(ShapeError, match=rf"request 0, slot 1 holds page {page}"):
            paged_attention(q, cache, table)
        paged_attention(q, cache, PageTable.from_blocks(torch.tensor([[2, page]]), [4], 4))
    table = PageTable.from_blocks(torch.tensor([[2]]), [4], 4)
    with pytest.raises(ShapeError, match="got 2 rows, expected 1"):
        paged_attention(torch.zeros(2, 1, 8), cache, table)
    with pytest.raises(ShapeError, match="pages of 4, expected 2"):
        paged_attention(q, cache, PageTable.from_blocks(torch.tensor([[2]]), [2], 2))
    with pytest.raises(SettingsError, match="kv_layout"):
        paged_attention(q, cache, table, kv_layout="nhd")


@pytest.mark.parametrize("kind", ["tensor", "head", "request_head", "page"])
def test_fp8_cache_scales(kind: str) -> None:
    keys = requests([5, 9, 0], 2, 8, 8, seed=13, dtype=torch.bfloat16)
    keys = [(k.to(torch.float8_e4m3fn), v.to(torch.float8_e5m2).to(torch.float8_e4m3fn)) for k, v in keys]
    case = make_paged_cache(keys, 4, seed=14)
    shape = {"tensor": (), "head": (2,), "request_head": (3, 2), "page": (case.num_pages, 2)}[kind]
    k_scale, v_scale = torch.rand(shape) + 0.5, torch.rand(shape) + 0.5
    pages = both_tables(case)[0].pages

    def factor(scale: torch.Tensor, b: int, n: int) -> torch.Tensor:
        if kind == "page":
            return torch.stack([scale[pages[b][i // 4]] for i in range(n)]).double().unsqueeze(-1) if n else scale[:0, :, None]
        return (scale[b] if kind == "request_head" else scale.expand(2)).double().view(1, 2, 1)

    plain = [(k.double() * factor(k_scale, b, len(k)), v.double() * factor(v_scale, b, len(v)))
             for b, (k, v) in enumerate(keys)]
    q = random_tensor((3, 4, 8), torch.bfloat16, seed=15)
    k, v, cu_k = flat(plain)
    expected = attention_varlen(q.double(), k, v, [0, 1, 2, 3], cu_k)
    for named in (None, kind):
        result = paged_attention(q, case.kv_cache, case, k_scale=k_scale, v_scale=v_scale, kv_scales=named)
        torch.testing.assert_close(result, expected, atol=1e-14, rtol=1e-14)
    if kind != "tensor":
        with pytest.raises(ShapeError, match="k_scale"):
            paged_attention(q, case.kv_cache, case, k_scale=k_scale, kv_scales="tensor")


def test_a_scale_that_fits_requests_and_pages_must_be_named() -> None:
    cache = torch.zeros(2, 2, 4, 1, 8).to(torch.float8_e4m3fn)
    table = PageTable.from_blocks(torch.tensor([[1], [0]]), [4, 4], 4)
    with pytest.raises(ShapeError, match="fits requests and pages"):
        paged_attention(torch.zeros(2, 1, 8), cache, table, k_scale=torch.ones(2, 1))
    paged_attention(torch.zeros(2, 1, 8), cache, table, k_scale=torch.ones(2, 1), kv_scales="page")


def test_rotation_is_orthogonal_and_cancels_between_q_and_k() -> None:
    x = random_tensor((3, 2, 24), torch.float64, seed=16)
    turned = rotate(x, 7)
    torch.testing.assert_close(turned.square().sum(-1), x.square().sum(-1))
    assert not torch.allclose(turned, rotate(x, 8))
    # By hand for four entries: signs, then the 4 x 4 Hadamard matrix over 2.
    h2 = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    signs = torch.tensor(rotation_signs(5, 4), dtype=torch.float64)
    y = random_tensor((4,), torch.float64, seed=17)
    torch.testing.assert_close(rotate(y, 5), torch.kron(h2, h2) @ (signs * y) / 2)
    # splitmix64 from state 0 starts 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC.
    assert rotation_signs(0, 4) == [-1, 1, 1, -1]
    keys = requests([7], 2, 24, 24, seed=18)
    q = random_tensor((1, 2, 24), torch.float64, seed=19)
    plain = make_paged_cache(keys, 4, seed=20)
    turned_keys = make_paged_cache([(rotate(k, 9), v) for k, v in keys], 4, seed=20)
    torch.testing.assert_close(paged_attention(q, turned_keys.kv_cache, turned_keys, rotation=9),
                               paged_attention(q, plain.kv_cache, plain))


def test_append_then_read_back() -> None:
    lengths = [5, 9, 4]
    keys = requests(lengths, 2, 8, 8, seed=21)
    case = make_paged_cache(keys, 4, seed=22)
    assert isinstance(case.kv_cache, torch.Tensor)
    for layout in ("NHD", "HND"):
        shape = case.kv_cache.shape if layout == "NHD" else (case.num_pages, 2, 2, 4, 8)
        cache = poisoned_empty(shape, torch.float64)
        k, v, cu = flat(keys)
        owner = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
        place = torch.cat([torch.arange(n) for n in lengths])
        append_kv(cache, k[:10], v[:10], case, positions=place[:10], batch_indices=owner[:10], kv_layout=layout)
        append_kv(cache, k[10:], v[10:], case, batch_indices=owner[10:], kv_layout=layout)  # the last ones of each
        q = random_tensor((3, 2, 8), torch.float64, seed=23)
        result = paged_attention(q, cache, case, kv_layout=layout)
        assert torch.equal(result, attention_varlen(q, k, v, [0, 1, 2, 3], cu))
        written = (~torch.isnan(cache)).any(-1)
        assert int(written.sum()) == 18 * 2 * 2


def test_append_by_slot_and_skipped_tokens() -> None:
    k, v = random_tensors([(4, 1, 8), (4, 1, 8)], torch.float32, seed=24)
    cache = poisoned_empty((3, 2, 4, 1, 8))
    append_kv(cache, k, v, slot_mapping=torch.tensor([5, -1, 11, 0]))
    assert torch.equal(cache[1, 0, 1], k[0]) and torch.equal(cache[2, 1, 3], v[2]) and torch.equal(cache[0, 0, 0], k[3])
    assert int((~torch.isnan(cache)).sum()) == 3 * 2 * 8
    table = PageTable.from_blocks(torch.tensor([[2], [0]]), [3, 2], 4)
    cache = poisoned_empty((3, 2, 4, 1, 8))
    append_kv(cache, k[:2], v[:2], table)  # decode: one token per request, at its last position
    assert torch.equal(cache[2, 0, 2], k[0]) and torch.equal(cache[0, 1, 1], v[1])
    append_kv(cache, k, v, table, positions=[0, -1, 1, 0], batch_indices=[0, 0, -1, 1])
    assert torch.equal(cache[2, 0, 0], k[0]) and torch.equal(cache[0, 0, 0], k[3])
    assert int((~torch.isnan(cache)).sum()) == 4 * 2 * 8
    for wrong, match in (({"slot_mapping": [12, 0, 0, 0]}, "slot 12"), ({"slot_mapping": [0]}, "4 tokens"), ({}, "neither")):
        with pytest.raises(ShapeError, match=match):
            append_kv(cache, k, v, **wrong)
    with pytest.raises(ShapeError, match="token 0 has 4"):
        append_kv(cache, k[:1], v[:1], table, positions=[4], batch_indices=[0])
    with pytest.raises(DtypeError, match="convert explicitly"):
        append_kv(cache, k.bfloat16(), v.bfloat16(), slot_mapping=[0, 1, 2, 3])


@pytest.mark.parametrize("shape", [(), (2,), (2, 2), (3, 2)])
def test_append_to_an_fp8_cache_divides_by_the_scale(shape: tuple[int, ...]) -> None:
    k, v = random_tensors([(2, 2, 8), (2, 2, 8)], torch.bfloat16, seed=25, scale=30)
    k[0, 0, 0] = 1e5
    table = PageTable.from_blocks(torch.tensor([[2], [0]]), [1, 4], 4)
    cache = torch.zeros(3, 2, 4, 2, 8).to(torch.float8_e4m3fn)
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(26)) + 0.5
    append_kv(cache, k, v, table, k_scale=scale, v_scale=1.0)
    rows = {(): [scale, scale], (2,): [scale, scale]}.get(shape)
    rows = [scale[0], scale[1]] if shape == (2, 2) else [scale[2], scale[0]] if shape == (3, 2) else rows
    assert rows is not None
    for page, offset, t in ((2, 0, 0), (0, 3, 1)):
        divisor = rows[t].reshape(-1, 1)
        expected = (k[t].float() / divisor).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(cache[page, 0, offset].view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(cache[page, 1, offset].float(), v[t].float().to(torch.float8_e4m3fn).float())
    assert cache[2, 0, 0, 0, 0].float() == 448


def test_cascade_of_one_level_is_paged_attention() -> None:
    keys = requests([6, 3], 2, 8, 8, seed=27)
    case = make_paged_cache(keys, 4, seed=28)
    q = random_tensor((5, 4, 8), torch.float64, seed=29)
    result = cascade_attention(q, case.kv_cache, [(case, [0, 3, 5])], return_lse=True)
    expected = paged_attention(q, case.kv_cache, case, cu_seqlens_q=[0, 3, 5], return_lse=True)
    assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])


def test_cascade_joins_the_keys_of_its_levels() -> None:
    """Three levels; equal to ragged attention over joined keys, and to merging the levels by LSE."""
    keys = requests([6, 5, 0, 3, 2, 4], 2, 8, 8, seed=30)
    case = make_paged_cache(keys, 4, seed=31)
    pages, lengths = both_tables(case)[0].pages, [6, 5, 0, 3, 2, 4]

    def table(*members: int) -> PageTable:
        return PageTable(tuple(pages[b] for b in members), tuple(lengths[b] for b in members), 4)

    levels = [(table(0), [0, 6]), (table(1, 2), [0, 3, 6]), (table(3, 4, 5), [0, 2, 3, 6])]
    q = random_tensor((6, 4, 8), torch.float64, seed=32)
    chains = [(0, 1, 3), (0, 1, 4), (0, 2, 5)]
    joined = [(torch.cat([keys[b][0] for b in c]), torch.cat([keys[b][1] for b in c])) for c in chains]
    k, v, cu_k = flat(joined)
    for features in ({}, {"window": (7, None), "alibi_slopes": torch.rand(4), "sinks": torch.rand(4)}):
        out, lse = cascade_attention(q, case.kv_cache, levels, return_lse=True, **features)
        expected = attention_varlen(q, k, v, [0, 2, 3, 6], cu_k, causal=True, return_lse=True, **features)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    parts = [paged_attention(q, case.kv_cache, t, cu_seqlens_q=cu, causal=i == 2, return_lse=True)
             for i, (t, cu) in enumerate(levels)]
    merged = merge_states(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
    plain = cascade_attention(q, case.kv_cache, levels, return_lse=True)
    torch.testing.assert_close(merged[0], plain[0])
    torch.testing.assert_close(merged[1], plain[1])
    with pytest.raises(ShapeError, match="must nest"):
        cascade_attention(q, case.kv_cache, [(table(1, 2), [0, 1, 6]), (table(3, 4), [0, 2, 6])])


@pytest.mark.parametrize("joined", [False, True])
def test_mla_equals_attention_with_one_latent_head(joined: bool) -> None:
    lengths, q_lens = [3, 0, 9], [2, 1, 4]
    ckv = [random_tensor((n, 1, 32), torch.float64, seed=33 + b) for b, n in enumerate(lengths)]
    pe = [random_tensor((n, 1, 16), torch.float64, seed=43 + b) for b, n in enumerate(lengths)]
    case = make_paged_cache(list(zip(ckv, pe)), 4, seed=53, pair=True)
    c_cache, r_cache = (x.squeeze(2) for x in case.kv_cache)
    q_nope, q_rope = random_tensors([(7, 6, 32), (7, 6, 16)], torch.float64, seed=54)
    caches = (torch.cat([c_cache, r_cache], -1), None) if joined else (c_cache, r_cache)
    out, lse = mla_attention(q_nope, q_rope, *caches, case, scale=0.3, q_lens=q_lens, return_lse=True)
    q = torch.cat([q_nope, q_rope], -1)
    k, v = torch.cat([torch.cat(ckv), torch.cat(pe)], -1), torch.cat(ckv)
    expected = attention_varlen(q, k, v, cu_seqlens(q_lens), cu_seqlens(lengths), causal=True, scale=0.3, return_lse=True)
    assert out.shape == (7, 6, 32) and torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    with pytest.raises(ShapeError):
        mla_attention(q_nope, q_rope[..., :8], *caches, case, scale=0.3, q_lens=q_lens)


def test_mla_fp8_scale_covers_the_fp8_parts_only() -> None:
    ckv, pe = random_tensor((5, 1, 32), seed=55).to(torch.float8_e4m3fn), random_tensor((5, 1, 16), torch.bfloat16, seed=56)
    table = PageTable.from_blocks(torch.tensor([[0, 1]]), [5], 4)
    c_cache, r_cache = poisoned_empty((2, 4, 32), ckv.dtype), poisoned_empty((2, 4, 16), pe.dtype)
    append_mla(c_cache, r_cache, ckv[:, 0], pe[:, 0], table, positions=list(range(5)), batch_indices=[0] * 5)
    q_nope, q_rope = random_tensors([(1, 2, 32), (1, 2, 16)], torch.bfloat16, seed=57)
    result = mla_attention(q_nope, q_rope, c_cache, r_cache, table, scale=0.2, k_scale=torch.tensor(0.5))
    k = torch.cat([ckv.double() * 0.5, pe.double()], -1)
    q = torch.cat([q_nope, q_rope], -1).double()
    torch.testing.assert_close(result, attention_varlen(q, k, ckv.double() * 0.5, [0, 1], [0, 5], scale=0.2))


@pytest.mark.parametrize("recipe", ["tensor", "head", "request_head", "page"])
def test_quantized_attention_inputs_give_back_their_values(recipe: str) -> None:
    """Codes times scales are within half a code of the input, and every scale maps its amax to the largest code."""
    lengths = [5, 9]
    q, k, v = random_tensors([(14, 4, 16), (14, 2, 16), (14, 2, 16)], torch.bfloat16, seed=58)
    table = PageTable.from_blocks(torch.tensor([[3, 0, -1], [1, 4, 5]]), lengths, 4)
    cache = poisoned_empty((7, 2, 4, 2, 16), torch.float8_e4m3fn)
    paged: dict[str, Any] = {"page_table": table, "kv_cache": cache} if recipe == "page" else {}
    made = quantize_attention(q, k, v, recipe=recipe, cu_seqlens_q=[0, 5, 14], cu_seqlens_k=[0, 5, 14], **paged)
    for x, codes, scale in ((q, made.q, made.q_scale), (k, made.k, made.k_scale), (v, made.v, made.v_scale)):
        kind = "request_head" if recipe == "page" and x is q else recipe
        heads = x.shape[1]
        if kind == "page":
            assert scale.shape == (7, heads)
            full = torch.stack([scale[p] for p in (3, 3, 3, 3, 0, 1, 1, 1, 1, 4, 4, 4, 4, 5)]).unsqueeze(-1)
        else:
            assert scale.shape == {"tensor": (), "head": (heads,), "request_head": (2, heads)}[kind]
            full = scale.expand(heads).view(1, heads, 1) if kind != "request_head" else scale.repeat_interleave(
                torch.tensor(lengths), 0).unsqueeze(-1)
        error = (codes.float() * full - x.float()).abs()
        assert (error <= x.float().abs() / 16 + full * 2**-10).all()
        assert codes.float().abs().max() == 448
    if recipe == "page":
        rows = random_tensor((2, 4, 16), torch.bfloat16, seed=59)
        over_cache = paged_attention(rows, cache, table, k_scale=made.k_scale, v_scale=made.v_scale, kv_scales="page")
        owner = [3, 3, 3, 3, 0, 1, 1, 1, 1, 4, 4, 4, 4, 5]
        over_codes = [x.double() * s[owner].double().unsqueeze(-1) for x, s in ((made.k, made.k_scale), (made.v, made.v_scale))]
        torch.testing.assert_close(over_cache, attention_varlen(rows.double(), *over_codes, [0, 1, 2], [0, 5, 14]))
    wrong: dict[str, Any] = {"recipe": "head", "page_table": table} if recipe == "page" else {"recipe": "page"}
    with pytest.raises(ShapeError, match="page_table"):
        quantize_attention(q, k, v, **wrong)


def test_quantize_attention_turns_and_rotates_first() -> None:
    q, k, v = random_tensors([(6, 2, 16), (6, 2, 16), (6, 2, 16)], torch.float32, seed=60)
    positions = torch.arange(6)
    made = quantize_attention(q, k, v, recipe="head", positions=positions, rotation=3, theta=500.0)
    turned = [rotate(x, 3) for x in rope(q, k, positions, theta=500.0)]
    for codes, scale, expected in ((made.q, made.q_scale, turned[0]), (made.k, made.k_scale, turned[1])):
        back = codes.double() * scale.double().view(1, 2, 1)
        assert (back - expected).abs().max() <= expected.abs().max() / 16
