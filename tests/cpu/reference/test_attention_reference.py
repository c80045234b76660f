"""The attention oracle against torch's SDPA, against scalar loops written from the contract, and on its edge rules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.reference import (
    BlockMask,
    Variant,
    alibi_slopes,
    attention,
    attention_varlen,
    merge_states,
    pack_mask,
)
from kernelgen.reference import attend as attend_module
from kernelgen.testing.data import cu_seqlens, layouts, packed_qkv, poisoned_empty, random_tensor, random_tensors
from kernelgen.variants import sigmoid

INF, NAN = float("inf"), float("nan")


def inputs(batch: int, q_len: int, kv_len: int, heads: int, kv_heads: int, dim: int, dim_v: int, seed: int,
           dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    shapes = [(batch, q_len, heads, dim), (batch, kv_len, kv_heads, dim), (batch, kv_len, kv_heads, dim_v)]
    return random_tensors(shapes, dtype, seed=seed)


def by_loops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool = False,
             window: tuple[int | None, int | None] = (None, None), soft_cap: float | None = None,
             slopes: list[float] | None = None, sinks: list[float] | None = None,
             mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """One request ``q (Sq, Hq, D)``, scalar Python arithmetic, each rule of the contract spelled out."""
    q_len, heads, _ = q.shape
    kv_len, kv_heads, dim_v = v.shape
    out, lse = torch.zeros(q_len, heads, dim_v, dtype=torch.float64), torch.full((heads, q_len), -INF).double()
    for h in range(heads):
        g = h // (heads // kv_heads)
        for i in range(q_len):
            p = i + kv_len - q_len
            logits: dict[int, float] = {}
            for j in range(kv_len):
                hidden = (causal and j > p) or (window[0] is not None and j < p - window[0])
                hidden = hidden or (window[1] is not None and j > p + window[1])
                if hidden or (mask is not None and not bool(mask[h, i, j])):
                    continue
                s = scale * float(q[i, h] @ k[j, g])
                s = soft_cap * math.tanh(s / soft_cap) if soft_cap else s
                logits[j] = s - (slopes[h] * abs(j - p) if slopes else 0.0)
            total = sum(math.exp(s) for s in logits.values()) + (math.exp(sinks[h]) if sinks else 0.0)
            if total > 0:
                lse[h, i] = math.log(total)
            for j, s in logits.items():
                out[i, h] += math.exp(s) / total * v[j, g]
    return out, lse


def check(result: Any, out: torch.Tensor, lse: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(result[0], out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(result[1], lse, atol=tolerance, rtol=tolerance)


def test_two_keys_by_hand() -> None:
    # Logits log(3) and 0: weights 3/4 and 1/4, LSE log(4).
    q = torch.tensor([1.0]).view(1, 1, 1, 1)
    k = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64).view(1, 2, 1, 1)
    v = torch.tensor([8.0, 4.0]).double().view(1, 2, 1, 1)
    out, lse = attention(q.double(), k, v, scale=1.0, return_lse=True)
    assert out.item() == pytest.approx(7.0, abs=1e-14)
    assert lse.item() == pytest.approx(math.log(4.0), abs=1e-14)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "dim_v"), [(4, 4, 16, 16), (6, 2, 24, 40), (5, 1, 8, 8)])
def test_equals_torch_sdpa(causal: bool, heads: int, kv_heads: int, dim: int, dim_v: int) -> None:
    q, k, v = inputs(2, 9, 9, heads, kv_heads, dim, dim_v, seed=1)
    t = [x.transpose(1, 2) for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*t, is_causal=causal, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(attention(q, k, v, causal=causal), expected, atol=1e-13, rtol=1e-13)


def test_compute_dtype_is_the_type_of_the_results() -> None:
    q, k, v = inputs(1, 3, 5, 2, 2, 8, 8, seed=2, dtype=torch.bfloat16)
    exact, exact_lse = attention(q, k, v, return_lse=True)
    single, single_lse = attention(q, k, v, return_lse=True, compute_dtype=torch.float32)
    assert (exact.dtype, exact_lse.dtype, single.dtype, single_lse.dtype) == (torch.float64,) * 2 + (torch.float32,) * 2
    torch.testing.assert_close(single.double(), exact, atol=1e-6, rtol=1e-6)
    assert not torch.equal(single.double(), exact)
    with pytest.raises(DtypeError, match="compute_dtype"):
        attention(q, k, v, compute_dtype=torch.bfloat16)


FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "left window": {"window": (3, None), "causal": True},
    "right window": {"window": (None, 0)},
    "soft cap": {"soft_cap": 0.7, "causal": True},
    "alibi": {"slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": [-2.0, 0.0, 3.0, 20.0], "window": (1, 0)},
    "all": {"causal": True, "window": (4, None), "soft_cap": 1.3, "slopes": [0.3, 0.2, 0.1, 0.0],
            "sinks": [0.5, -1.0, 0.0, 2.0]},
}


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 5), (2, 7), (6, 3), (1, 4)])
@pytest.mark.parametrize("name", FEATURES)
def test_equals_loops(name: str, q_len: int, kv_len: int) -> None:
    features = dict(FEATURES[name])
    q, k, v = inputs(1, q_len, kv_len, 4, 2, 8, 16, seed=3)
    mask = torch.rand(4, q_len, kv_len, generator=torch.Generator().manual_seed(4)) < 0.7 if name == "all" else None
    out, lse = by_loops(q[0], k[0], v[0], scale=0.4, mask=mask, **features)
    slopes, sinks = features.pop("slopes", None), features.pop("sinks", None)
    result = attention(q, k, v, scale=0.4, return_lse=True, mask=None if mask is None else mask[None],
                       alibi_slopes=None if slopes is None else torch.tensor(slopes),
                       sinks=None if sinks is None else torch.tensor(sinks), **features)
    if slopes is not None or sinks is not None:
        check(result, out[None], lse[None], 1e-7)  # slopes and sinks are float32 by contract
    else:
        check(result, out[None], lse[None])


@pytest.mark.parametrize("keys", [64, 65, 1300])
def test_many_like_terms_add_up_to_float64(keys: int) -> None:
    """One running sum is off by 120 ulps at 1,300 keys; the exact sum of v is a whole number here."""
    q, k, v = (torch.zeros(1, n, 1, 8, dtype=torch.float64) for n in (2, keys, keys))
    v[:] = 1 + torch.arange(keys).view(1, -1, 1, 1) % 3
    weight = 0.1192029220221175559  # sigmoid(-2)
    out = attention(q, k, v, scale=0.0, variant=sigmoid(-2.0))
    exact = math.fsum(weight * x for x in v[0, :, 0, 0].tolist())
    torch.testing.assert_close(out, torch.full_like(out, exact), rtol=30 * 2**-53, atol=0)


def test_default_scale_is_one_over_root_of_head_dim() -> None:
    q, k, v = inputs(1, 2, 3, 1, 1, 16, 8, seed=5)
    assert torch.equal(attention(q, k, v), attention(q, k, v, scale=0.25))
    assert not torch.equal(attention(q, k, v), attention(q, k, v, scale=0.24))


def test_causal_is_aligned_at_the_bottom_right() -> None:
    """B02: with 2 queries and 6 keys row 0 sees keys 0 .. 4, row 1 all of them."""
    q, k, _ = inputs(1, 2, 6, 1, 1, 8, 8, seed=6)
    one_hot = torch.eye(6, dtype=torch.float64).view(1, 6, 1, 6)
    seen = attention(q, k, one_hot, causal=True)[0, :, 0] > 0
    assert seen.tolist() == [[True] * 5 + [False], [True] * 6]


@pytest.mark.parametrize("width", [0, 1, 2, 15, 16, 17, 39, 40, 41])
def test_window_counts_keys_inclusively(width: int) -> None:
    """B07: window (W, 0) sees the own key and W before it; a decode row equals the last row of a prefill."""
    q, k, _ = inputs(1, 40, 40, 1, 1, 8, 8, seed=7)
    one_hot = torch.eye(40, dtype=torch.float64).view(1, 40, 1, 40)
    used = attention(q, k, one_hot, window=(width, 0))[0, :, 0] > 0
    i, j = torch.arange(40)[:, None], torch.arange(40)
    assert torch.equal(used, (j <= i) & (j >= i - width))
    decode = attention(q[:, -1:], k, one_hot, window=(width, 0))
    torch.testing.assert_close(decode[0, 0], attention(q, k, one_hot, window=(width, 0))[0, -1])


@pytest.mark.parametrize("kv_len", [0, 1, 3])
def test_rows_without_keys_give_zero_and_minus_infinity(kv_len: int) -> None:
    """B01: causal with more queries than keys leaves the first rows empty, even those with a NaN query."""
    q, k, v = inputs(2, 5, kv_len, 4, 2, 64, 64, seed=8)
    q[0, 0, 0, 0] = NAN
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    empty = 5 - kv_len
    assert torch.equal(out[:, :empty], torch.zeros_like(out[:, :empty]))
    assert torch.equal(lse[:, :, :empty], torch.full_like(lse[:, :, :empty], -INF))
    assert torch.isfinite(out).all() and torch.isfinite(lse[:, :, empty:]).all()
    sinks = torch.tensor([-2.0, 0.0, 3.0, -INF])
    out, lse = attention(q, k, v, causal=True, return_lse=True, sinks=sinks)
    assert torch.equal(out[:, :empty], torch.zeros_like(out[:, :empty]))
    assert torch.equal(lse[0, :, 0], sinks.double())


@pytest.mark.parametrize("level", [-1e3, -6e4, -1e6])
def test_very_low_logits_are_not_minus_infinity(level: float) -> None:
    """B03: the best key wins however low all the logits are, and a masked key never gets weight."""
    q = torch.ones(1, 1, 1, 128, dtype=torch.float64)
    raw = torch.full((64,), level, dtype=torch.float64)
    raw[17] = level + 5000
    k = (raw / 128).view(1, 64, 1, 1).expand(1, 64, 1, 128)
    v = torch.arange(64, dtype=torch.float64).view(1, 64, 1, 1).expand(1, 64, 1, 8)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out, torch.full_like(out, 17.0))
    assert lse.item() == pytest.approx((level + 5000) / math.sqrt(128), rel=1e-12)
    keep = torch.zeros(64, dtype=torch.bool)
    keep[3] = True
    out, _ = attention(q, k, v, mask=keep, return_lse=True)
    assert torch.equal(out, torch.full_like(out, 3.0))


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("how", ["kv_lens", "mask", "causal", "window"])
def test_keys_and_values_out_of_reach_never_matter(poison: float, how: str) -> None:
    """B09: what a row may not attend to leaves no trace, bit for bit."""
    q, k, v = inputs(2, 3, 8, 2, 1, 8, 8, seed=9)
    features: dict[str, Any] = {"kv_lens": {"kv_lens": torch.tensor([5, 6], dtype=torch.int32)},
                                "mask": {"mask": torch.arange(8) < 5},
                                "causal": {"causal": True},
                                "window": {"window": (1, None)}}[how]
    reach = {"kv_lens": [range(5, 8), range(6, 8)], "mask": [range(5, 8)] * 2, "causal": [range(6, 8)] * 2,
             "window": [range(4)] * 2}[how]
    clean = attention(q, k, v, return_lse=True, **features)
    for b, bad in enumerate(reach):
        for j in bad:
            k[b, j], v[b, j] = poison, poison
    out, lse = attention(q, k, v, return_lse=True, **features)
    rows = slice(0, 1) if how == "causal" else slice(None)  # later causal rows may see the poisoned keys
    if how == "causal":
        assert not torch.isfinite(out[:, 1:]).any()
    assert torch.equal(out[:, rows], clean[0][:, rows])
    assert torch.equal(lse[:, :, rows], clean[1][:, :, rows])


def test_non_finite_inputs_propagate_exactly_where_they_are_seen() -> None:
    """B41: NaN appears where IEEE arithmetic puts it and nowhere else."""
    q, k, v = inputs(1, 4, 4, 2, 2, 8, 8, seed=10)
    clean = attention(q, k, v, causal=True)
    q2 = q.clone()
    q2[0, 1, 0, 3] = NAN
    bad = torch.isnan(attention(q2, k, v, causal=True))
    assert bad[0, 1, 0].all() and int(bad.sum()) == 8
    k2 = k.clone()
    k2[0, 2, 1, 0] = NAN
    out = attention(q, k2, v, causal=True)
    assert torch.isnan(out[0, 2:, 1]).all() and int(torch.isnan(out).sum()) == 16
    v2 = v.clone()
    v2[0, 2, 0, 5], v2[0, 3, 0, 6] = INF, NAN
    out = attention(q, k, v2, causal=True)
    assert (out[0, 2:, 0, 5] == INF).all() and torch.isnan(out[0, 3, 0, 6])
    changed = ~torch.isfinite(out)
    assert int(changed.sum()) == 3
    torch.testing.assert_close(out[~changed], clean[~changed], atol=1e-14, rtol=1e-14)


def test_soft_cap_applies_before_the_mask() -> None:
    """B33, and the tanh of -inf is finite: capping a masked logit would let its key in."""
    q, k, v = inputs(1, 3, 6, 1, 1, 8, 8, seed=11)
    q = q * 40
    capped = attention(q, k, v, soft_cap=5.0, causal=True)
    assert not torch.allclose(capped, attention(q, k, v, causal=True), atol=1e-3)
    assert not torch.allclose(capped, attention(q, k, v, soft_cap=50.0, causal=True), atol=1e-3)
    assert torch.equal(attention(q, k, v, soft_cap=0.0), attention(q, k, v))
    v[0, -1] = 1e6
    assert attention(q, k, v, soft_cap=5.0, causal=True)[0, :-1].abs().max() < 10


def test_sink_enters_the_denominator_once() -> None:
    """B35: the output shrinks by p / (p + sink); -inf changes nothing."""
    q, k, v = inputs(1, 3, 5, 5, 5, 8, 8, seed=12)
    sinks = torch.tensor([-2.0, 0.0, 3.0, -INF, 20.0])
    out, lse = attention(q, k, v, return_lse=True)
    with_sink, lse_sink = attention(q, k, v, sinks=sinks, return_lse=True)
    torch.testing.assert_close(lse_sink, torch.logaddexp(lse, sinks.double().view(1, 5, 1)), atol=1e-13, rtol=1e-13)
    share = torch.exp(lse - lse_sink).transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(with_sink, out * share, atol=1e-13, rtol=1e-13)
    assert torch.equal(with_sink[:, :, 3], out[:, :, 3])


def test_alibi_slopes_of_the_published_algorithm() -> None:
    """B37: powers of two are a geometric series; other counts take every second slope of the next series."""
    assert alibi_slopes(1).tolist() == [2.0**-8]
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    expected = [2.0**-i for i in range(1, 9)] + [2.0 ** (-(2 * i + 1) / 2) for i in range(4)]
    torch.testing.assert_close(alibi_slopes(12), torch.tensor(expected))
    torch.testing.assert_close(alibi_slopes(3), torch.tensor([2.0**-4, 2.0**-8, 2.0**-2]))
    sizes = {n: alibi_slopes(n).shape[0] for n in (1, 2, 3, 5, 6, 7, 8, 12, 16, 40, 71)}
    assert all(n == size for n, size in sizes.items())
    assert torch.equal(alibi_slopes(12), alibi_slopes(12)) and alibi_slopes(16)[0] == pytest.approx(2.0**-0.5)


def test_alibi_slopes_per_request() -> None:
    q, k, v = inputs(2, 3, 4, 2, 2, 8, 8, seed=13)
    slopes = torch.tensor([[0.5, 0.1], [0.0, 2.0]])
    both = attention(q, k, v, alibi_slopes=slopes)
    for b in range(2):
        assert torch.equal(both[b : b + 1], attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], alibi_slopes=slopes[b]))


@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (4, 3, 5), (3, 5), (1, 5), (5,), (2, 1, 1, 5), (2, 4, 3, 1)])
def test_dense_masks_broadcast(shape: tuple[int, ...]) -> None:
    q, k, v = inputs(2, 3, 5, 4, 2, 8, 8, seed=14)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(15)) < 0.6
    full = mask.expand(2, 4, 3, 5)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=full, enable_gqa=True)
    expected = torch.where(full.any(-1, keepdim=True), expected, 0.0).transpose(1, 2)
    torch.testing.assert_close(attention(q, k, v, mask=mask), expected, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("mask", [torch.ones(10, 15), torch.ones(20, 10), torch.ones(10, 21), torch.ones(9, 20),
                                  torch.ones(200)])
def test_masks_of_a_wrong_size_are_refused(mask: torch.Tensor) -> None:
    """B23: the error names the given and the expected shape."""
    q, k, v = inputs(1, 10, 20, 1, 1, 8, 8, seed=16)
    with pytest.raises(ShapeError, match=r"mask: got shape .*\(1, 1, 10, 20\)"):
        attention(q, k, v, mask=mask.bool())
    with pytest.raises(DtypeError, match="expected bool"):
        attention(q, k, v, mask=torch.ones(10, 20, dtype=torch.int32))
    turned = torch.ones(20, 10, dtype=torch.bool).t()
    assert torch.equal(attention(q, k, v, mask=turned), attention(q, k, v))


def test_block_mask_lists_key_blocks() -> None:
    q, k, v = inputs(2, 5, 7, 2, 2, 8, 8, seed=17)
    counts = torch.tensor([1, 2, 0], dtype=torch.int32)
    indices = torch.tensor([[2, -9, 99], [0, 1, 99], [-1, -1, -1]], dtype=torch.int32)
    keep = torch.zeros(5, 7, dtype=torch.bool)
    keep[0:2, 6:7], keep[2:4, 0:6] = True, True
    block_mask = BlockMask(counts, indices, (2, 3))
    result = attention(q, k, v, block_mask=block_mask, return_lse=True)
    expected = attention(q, k, v, mask=keep, return_lse=True)
    assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])
    per_head = BlockMask(counts.expand(2, 2, 3), indices.expand(2, 2, 3, 3), (2, 3))
    assert torch.equal(attention(q, k, v, block_mask=per_head, causal=True), attention(q, k, v, mask=keep, causal=True))
    with pytest.raises(ShapeError, match="nQ >= 5"):
        attention(q, k, v, block_mask=BlockMask(counts, indices, 1))


def test_variant_score_and_mask() -> None:
    q, k, v = inputs(2, 4, 6, 4, 2, 8, 8, seed=18)
    bias = random_tensor((4, 6), torch.float32, seed=19)
    variant = Variant(score=lambda s, ctx: s * ctx.factor + ctx.bias[ctx.head, ctx.k_pos] + ctx.batch,
                      mask=lambda ctx: (ctx.k_pos // 2 == ctx.q_pos // 2) | (ctx.kv_head == 1),
                      tensors={"bias": bias}, scalars={"factor": 2.0})
    out, lse = attention(q, k, v, variant=variant, causal=True, soft_cap=3.0, return_lse=True)
    s = 3 * torch.tanh(torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / math.sqrt(8) / 3)
    s = s * 2 + bias.double()[None, :, None] + torch.arange(2).view(2, 1, 1, 1)
    position, j = torch.arange(4)[:, None] + 2, torch.arange(6)
    keep = (j // 2 == position // 2) | (torch.arange(4).view(4, 1, 1) >= 2)
    s = s.masked_fill(~(keep & (j <= position)), -INF)
    torch.testing.assert_close(out, torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v.repeat_interleave(2, 2)))
    torch.testing.assert_close(lse, s.logsumexp(-1))
    with pytest.raises(SettingsError, match="hides a field"):
        attention(q, k, v, variant=Variant(mask=lambda ctx: ctx.head >= 0, scalars={"head": 1}))
    with pytest.raises(AttributeError, match="has no 'slope'"):
        attention(q, k, v, variant=Variant(mask=lambda ctx: ctx.slope > 0))


def test_kv_lens_equal_shorter_tensors() -> None:
    q, k, v = inputs(4, 3, 16, 4, 2, 8, 8, seed=20)
    k, v = (torch.where(torch.arange(16).view(1, 16, 1, 1) < torch.tensor([3, 0, 16, 2]).view(4, 1, 1, 1), x, NAN)
            for x in (k, v))
    out, lse = attention(q, k, v, causal=True, window=(4, None), kv_lens=torch.tensor([3, 0, 16, 2]), return_lse=True)
    for b, n in enumerate([3, 0, 16, 2]):
        one = attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], causal=True, window=(4, None), return_lse=True)
        check(one, out[b : b + 1], lse[b : b + 1], 1e-14)
    with pytest.raises(ShapeError, match="request 1 has length 17"):
        attention(q, k, v, kv_lens=[0, 17, 0, 0])


@pytest.mark.parametrize("k_scale", [0.25, torch.tensor(0.25), torch.tensor([0.25, 0.5]),
                                     torch.tensor([[0.25, 0.5], [2.0, 1.0]])])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_scales_equal_attention_over_dequantised_tensors(dtype: torch.dtype, k_scale: Any) -> None:
    """B38: every form of scale, dense and ragged."""
    q, k, v = inputs(2, 3, 5, 4, 2, 16, 16, seed=21, dtype=torch.bfloat16)
    k8, v8 = k.to(dtype), v.to(dtype)
    v_scale = torch.tensor([0.5, 4.0])
    q_scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    factor = torch.as_tensor(k_scale, dtype=torch.float64)
    factor = factor.view(2, 1, 2, 1) if factor.dim() == 2 else factor.view(1, 1, -1, 1)
    dense = [q.double() * q_scale.view(1, 1, 4, 1), k8.double() * factor, v8.double() * v_scale.view(1, 1, 2, 1)]
    expected = attention(*dense, return_lse=True)
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    result = attention(q, k8, v8, return_lse=True, **scales)
    check(result, *expected)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k8, v8)]
    out, lse = attention_varlen(*flat, [0, 3, 6], [0, 5, 10], return_lse=True, **scales)
    check((out, lse), expected[0].reshape(out.shape), expected[1].transpose(1, 2).reshape(lse.shape))


def test_wrong_scales_and_dtypes_are_refused() -> None:
    q, k, v = inputs(2, 3, 5, 4, 2, 16, 16, seed=22, dtype=torch.bfloat16)
    for wrong in (torch.ones(3), torch.ones(2, 4), torch.ones(2, 1, 1)):
        with pytest.raises(ShapeError, match="k_scale"):
            attention(q, k, v, k_scale=wrong)
    with pytest.raises(DtypeError, match="expected float32"):
        attention(q, k, v, k_scale=torch.tensor(1.0, dtype=torch.float16))
    with pytest.raises(DtypeError, match=r"bfloat16.*float16"):
        attention(q, k.half(), v)
    with pytest.raises(ShapeError, match="Hq = 4 and Hkv = 3"):
        attention(q, k[:, :, :1].expand(-1, -1, 3, -1), v[:, :, :1].expand(-1, -1, 3, -1))
    with pytest.raises(SettingsError, match="window"):
        attention(q, k, v, window=(-1, 0))
    with pytest.raises(SettingsError, match="soft_cap"):
        attention(q, k, v, soft_cap=-1.0)


def test_layouts_do_not_matter() -> None:
    """B22: views of a fused projection, transposed, padded and misaligned tensors hold the same values."""
    q, k, v = packed_qkv((2, 5), 4, 2, 16, torch.float64, seed=23)
    expected = attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert torch.equal(attention(q, k, v, causal=True), expected)
    for name, strided in layouts(q).items():
        assert torch.equal(attention(strided, k, v, causal=True), expected), name


def test_blocks_of_work_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(3, 7, 9, 4, 2, 8, 8, seed=24)
    mask = torch.rand(3, 1, 7, 9, generator=torch.Generator().manual_seed(25)) < 0.7
    common: dict[str, Any] = {"mask": mask, "causal": True, "kv_lens": [9, 4, 0], "return_lse": True,
                              "alibi_slopes": torch.rand(3, 4)}
    whole = attention(q, k, v, **common)
    for limit in (1, 4 * 9 * 3, 4 * 9 * 7 * 2):
        monkeypatch.setattr(attend_module, "BLOCK_ELEMENTS", limit)
        check(attention(q, k, v, **common), *whole, tolerance=1e-14)


def test_varlen_equals_requests_one_by_one() -> None:
    q_lens, kv_lens = [3, 0, 5, 1, 4], [7, 2, 5, 0, 1]
    q = random_tensor((14, 4, 8), torch.float64, seed=26)
    k, v = random_tensors([(16, 2, 8), (16, 2, 24)], torch.float64, seed=27)
    k[15:], v[15:] = NAN, NAN
    masks = [torch.rand(a, b, generator=torch.Generator().manual_seed(28 + a)) < 0.7 for a, b in zip(q_lens, kv_lens)]
    flat = torch.cat([m.reshape(-1) for m in masks])
    features: dict[str, Any] = {"causal": True, "window": (3, None), "soft_cap": 2.0, "sinks": torch.rand(4),
                                "alibi_slopes": torch.rand(5, 4)}
    cu_q, cu_k = cu_seqlens(q_lens), cu_seqlens(kv_lens)
    out, lse = attention_varlen(q, k, v, cu_q, cu_k, mask=flat, return_lse=True, **features)
    assert out.shape == (14, 4, 24) and lse.shape == (14, 4)
    packed = attention_varlen(q, k, v, cu_q.long(), cu_k.long(), mask=pack_mask(flat), return_lse=True, **features)
    assert torch.equal(torch.nan_to_num(packed[0]), torch.nan_to_num(out)) and torch.equal(packed[1][:13], lse[:13])
    for b, (a, e) in enumerate(zip(cu_q, cu_q[1:])):
        keys = slice(int(cu_k[b]), int(cu_k[b + 1]))
        one = attention(q[None, a:e], k[None, keys], v[None, keys], mask=masks[b], return_lse=True,
                        **{**features, "alibi_slopes": features["alibi_slopes"][b]})
        check((out[a:e], lse[a:e]), one[0][0], one[1][0].t(), 1e-14)
    assert torch.isnan(out[13]).all() and torch.isnan(lse[13]).all()  # the row past the last request is unwritten


def test_varlen_prefixes_and_block_masks() -> None:
    q = random_tensor((5, 2, 8), torch.float64, seed=29)
    k, v = random_tensors([(12, 2, 8), (12, 2, 8)], torch.float64, seed=30)
    out = attention_varlen(q, k, v, [0, 2, 5], [0, 6, 12], kv_lens=[4, 3], causal=True)
    keys = torch.cat([torch.arange(4), torch.arange(6, 9)])
    assert torch.equal(out, attention_varlen(q, k[keys], v[keys], [0, 2, 5], [0, 4, 7], causal=True))
    block_mask = BlockMask(torch.tensor([1, 1]), torch.tensor([[0], [1]]), (2, 2))
    blocked = attention_varlen(q, k, v, [0, 2, 5], [0, 6, 12], kv_lens=[4, 3], block_mask=block_mask)
    keep = [torch.tensor([[1, 1, 0, 0]] * 2), torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]])]
    flat = torch.cat([m.flatten() for m in keep]).bool()
    assert torch.equal(blocked, attention_varlen(q, k, v, [0, 2, 5], [0, 6, 12], kv_lens=[4, 3], mask=flat))


@pytest.mark.parametrize("bad", [[1, 3], [0, 3, 2], [0, 9], []])
def test_bad_cumulative_lengths_are_refused(bad: list[int]) -> None:
    q, k, v = (random_tensor((4, 1, 8), seed=31 + i) for i in range(3))
    with pytest.raises(ShapeError, match="cu_seqlens_q"):
        attention_varlen(q, k, v, bad, [0, 4])
    with pytest.raises(ShapeError, match="2 requests in cu_seqlens_q and 1"):
        attention_varlen(q, k, v, [0, 1, 4], [0, 4])


def test_ragged_mask_sizes() -> None:
    q, k, v = (random_tensor((4, 1, 8), seed=34 + i) for i in range(3))
    assert pack_mask(torch.tensor([1, 0, 0, 0, 0, 0, 0, 1, 0, 1]).bool()).tolist() == [0b10000001, 0b10]
    for mask in (torch.ones(15, dtype=torch.bool), torch.ones(3, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)):
        with pytest.raises(ShapeError, match="mask"):
            attention_varlen(q, k, v, [0, 4], [0, 4], mask=mask)
    full = attention_varlen(q, k, v, [0, 4], [0, 4])
    assert torch.equal(attention_varlen(q, k, v, [0, 4], [0, 4], mask=torch.tensor([255, 255], dtype=torch.uint8)), full)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_dense_calls(shape: tuple[int, int, int]) -> None:
    """C02: every output has its shape."""
    batch, q_len, kv_len = shape
    q, k, v = (poisoned_empty((batch, n, 2, 8)) for n in (q_len, kv_len, kv_len))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == (batch, q_len, 2, 8) and lse.shape == (batch, 2, q_len)
    assert torch.equal(out, torch.zeros_like(out)) and (lse == -INF).all()
    out, lse = attention_varlen(q.reshape(-1, 2, 8), k.reshape(-1, 2, 8), v.reshape(-1, 2, 8), [0, batch * q_len],
                                [0, batch * kv_len], return_lse=True)
    assert out.shape == (batch * q_len, 2, 8) and lse.shape == (batch * q_len, 2)
    none = attention_varlen(q.reshape(-1, 2, 8)[:0], k.reshape(-1, 2, 8)[:0], v.reshape(-1, 2, 8)[:0], [0], [0])
    assert none.shape == (0, 2, 8)


def test_merging_parts_equals_one_pass() -> None:
    """B06: three parts of the keys, merged by natural-log LSE."""
    q, k, v = inputs(1, 6, 300, 4, 2, 16, 16, seed=37)
    whole, lse = attention(q, k, v, return_lse=True)
    parts = [attention(q, k[:, a:e], v[:, a:e], return_lse=True) for a, e in ((0, 1), (1, 120), (120, 300))]
    outs, lses = torch.stack([p[0][0] for p in parts]), torch.stack([p[1][0].t() for p in parts])
    check(merge_states(outs, lses), whole[0], lse[0].t(), 1e-13)
    torch.testing.assert_close(lse[0], torch.logsumexp(
        torch.einsum("ihd,jhd->hij", q[0], k[0].repeat_interleave(2, 1)) / 4, -1), atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("shape", [(1, 1, 64), (7, 5, 192)])
def test_empty_sides_are_neutral_when_merging(shape: tuple[int, int, int]) -> None:
    """B04: empty + empty is empty, and an empty side changes no bit, whatever its output holds."""
    junk, zero = poisoned_empty(shape, torch.float16), torch.zeros(shape, dtype=torch.float16)
    value, state = random_tensor(shape, torch.float16, seed=38), random_tensor(shape[:2], seed=39)
    nothing = torch.full(shape[:2], -INF)
    for outs, lses in (((zero, junk), (nothing, nothing)), ((junk,), (nothing,)), ((zero,) * 5, (nothing,) * 5)):
        out, lse = merge_states(torch.stack(outs), torch.stack(lses), compute_dtype=torch.float32)
        assert torch.equal(out, torch.zeros(shape)) and (lse == -INF).all()
    for order in ((0, 1), (1, 0)):
        outs = torch.stack([(value, junk)[i] for i in order])
        lses = torch.stack([(state, nothing)[i] for i in order])
        out, lse = merge_states(outs, lses, compute_dtype=torch.float32)
        assert torch.equal(out, value.float()) and torch.equal(lse, state)
    out, lse = merge_states(torch.zeros(0, *shape), torch.zeros(0, *shape[:2]))
    assert out.shape == shape and torch.equal(out, torch.zeros(shape, dtype=torch.float64)) and (lse == -INF).all()
    with pytest.raises(ShapeError, match="lses"):
        merge_states(torch.zeros(2, *shape), torch.zeros(1, *shape[:2]))


def test_gradients_of_every_differentiable_input() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(1, 4, 3, 2, 1, 8, 8, seed=40))
    sinks = torch.tensor([0.3, -0.5], dtype=torch.float64, requires_grad=True)
    bias = random_tensor((2, 3), torch.float64, seed=41).requires_grad_()

    def call(q: Any, k: Any, v: Any, sinks: Any, bias: Any) -> Any:
        variant = Variant(score=lambda s, ctx: s + ctx.bias[ctx.head, ctx.k_pos], tensors={"bias": bias})
        return attention(q, k, v, causal=True, soft_cap=2.0, sinks=sinks, variant=variant, return_lse=True)

    assert torch.autograd.gradcheck(call, (q, k, v, sinks, bias))


def test_gradients_with_empty_rows_and_unused_nan_keys_are_finite() -> None:
    q, k, v = inputs(2, 4, 5, 2, 1, 8, 8, seed=42)
    k[:, 3:], v[:, 3:] = NAN, NAN
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, causal=True, kv_lens=[3, 0], return_lse=True)
    grads = torch.autograd.grad(out.sum() + lse[torch.isfinite(lse)].sum(), leaves)
    assert all(bool(torch.isfinite(g).all()) for g in grads)
    assert torch.equal(grads[1][:, 3:], torch.zeros_like(grads[1][:, 3:])) and grads[0][0, 1:].abs().sum() > 0
