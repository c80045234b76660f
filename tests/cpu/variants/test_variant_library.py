"""The ready variants through the oracle: against the arguments of attention that say the same, or a direct definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernelgen import reference, variants
from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.testing.data import random_tensor, random_tensors
from kernelgen.variants.library import t5_buckets

B, SQ, SK, HQ, HKV, D = 2, 13, 21, 4, 2, 16
Q, K, V = random_tensors([(B, SQ, HQ, D), (B, SK, HKV, D), (B, SK, HKV, D)], seed=31)
POSITIONS = torch.arange(SQ)[:, None] + SK - SQ
KEYS = torch.arange(SK)[None, :]
IDS = torch.tensor([0] * 5 + [3] * 9 + [1] * 7)


def _same(variant: Any, **other: Any) -> None:
    extra = {"causal": other.get("causal", False)}
    ours = reference.attention(Q, K, V, variant=variant, return_lse=True, **extra)
    theirs = reference.attention(Q, K, V, return_lse=True, **other)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(HQ,), (B, HQ)])
def test_alibi(shape: tuple[int, ...]) -> None:
    slopes = random_tensor(shape, seed=1)
    _same(variants.alibi(slopes), alibi_slopes=slopes)


@pytest.mark.parametrize("bounds", [(0, 0), (3, None), (None, 4), (2, 5), (0, None)])
def test_window(bounds: tuple[int | None, int | None]) -> None:
    _same(variants.window(*bounds), window=bounds)


def test_no_left_keys() -> None:
    _same(variants.no_left_keys(), window=(0, None))


@pytest.mark.parametrize("ids", [IDS, torch.stack([IDS, IDS.flip(0)]).int()])
def test_document_mask(ids: torch.Tensor) -> None:
    ids2 = ids.expand(B, SK)
    mask = ids2[:, SK - SQ :, None] == ids2[:, None, :]
    _same(variants.document_mask(ids), mask=mask[:, None], causal=True)


def test_document_mask_covers_a_cache_longer_than_its_ids() -> None:
    lens = torch.tensor([9, 12], dtype=torch.int32)
    out = reference.attention(Q, K, V, kv_lens=lens, variant=variants.document_mask(IDS[:12]))
    for b, n in enumerate(lens.tolist()):
        ids = IDS[:n]
        rows = ids[(torch.arange(SQ) + n - SQ).clamp(min=0)]
        alone = reference.attention(Q[b:b + 1], K[b:b + 1, :n], V[b:b + 1, :n], mask=rows[:, None] == ids[None])
        torch.testing.assert_close(out[b:b + 1], alone)


@pytest.mark.parametrize("lens", [7, torch.tensor([3, 15])])
def test_prefix_lm(lens: Any) -> None:
    prefix = torch.as_tensor(lens).expand(B)[:, None, None]
    _same(variants.prefix_lm(lens), mask=((KEYS <= POSITIONS) | (prefix > KEYS))[:, None])


@pytest.mark.parametrize("size", [1, 4, 7, 64])
def test_chunked(size: int) -> None:
    _same(variants.chunked(size), mask=POSITIONS // size == KEYS // size, causal=True)


def _with_bias(bias: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale q k + bias) v, bias (Hq, Sq, Sk)."""
    k, v = (x.double().repeat_interleave(HQ // HKV, 2) for x in (K, V))
    scores = torch.einsum("bihd,bjhd->bhij", Q.double(), k) * scale + bias
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def test_relative_bias() -> None:
    table = random_tensor((HQ, 11), seed=5)
    bias = table[:, (KEYS - POSITIONS).clamp(-5, 5) + 5].double()
    torch.testing.assert_close(reference.attention(Q, K, V, variant=variants.relative_bias(table, 5)), _with_bias(bias, D**-0.5))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_bias(bidirectional: bool) -> None:
    table = random_tensor((8, HQ), seed=6)
    buckets = t5_buckets(8, 12, bidirectional)
    bias = table[buckets[(KEYS - POSITIONS).clamp(-12, 12).long() + 12].long()].permute(2, 0, 1).double()
    v = variants.t5_bias(table, 12, bidirectional)
    torch.testing.assert_close(reference.attention(Q, K, V, scale=1.0, variant=v), _with_bias(bias, 1.0))


def test_t5_buckets() -> None:
    """By hand, with 32 buckets and a maximum of 128: distances below 8 each have one, then 8 more up to 128."""
    both = t5_buckets(32, 128, True)
    assert both[128 - 7:128 + 1].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]  # keys before the query
    assert both[129:129 + 7].tolist() == [17, 18, 19, 20, 21, 22, 23]  # keys after it
    assert both[0] == 15 and both[256] == 31 and both[128 - 8] == 8 and both[128 - 127] == 15
    edges = [d for d in range(9, 129) if both[128 - d] != both[128 - d + 1]]
    expected = [math.ceil(8 * 16 ** (i / 8) - 1e-9) for i in range(1, 8)]
    assert [abs(a - b) <= 1 for a, b in zip(edges, expected)] == [True] * 7
    causal = t5_buckets(32, 128, False)
    assert causal[129:].tolist() == [0] * 128 and causal[128 - 15] == 15 and causal[0] == 31


def test_sigmoid() -> None:
    """No softmax: the weights are the sigmoids themselves; masked keys weigh nothing and a NaN behind a mask stays there."""
    k, v = K.clone(), V.clone()
    k[:, -1], v[:, -1] = float("nan"), float("inf")
    out, lse = reference.attention(Q, k, v, variant=variants.sigmoid(-3.0), kv_lens=[SK - 1] * B, causal=True, return_lse=True)
    kk, vv = (x.double()[:, :-1].repeat_interleave(HQ // HKV, 2) for x in (K, V))
    weights = torch.sigmoid(torch.einsum("bihd,bjhd->bhij", Q.double(), kk) * D**-0.5 - 3.0)
    weights = weights * (KEYS[:, :-1] <= POSITIONS - 1)
    torch.testing.assert_close(out, torch.einsum("bhij,bjhd->bihd", weights, vv))
    assert out.shape == Q.shape and lse.shape == (B, HQ, SQ) and bool(lse.isnan().all())
    with pytest.raises(SettingsError, match="sink"):
        reference.attention(Q, K, V, variant=variants.sigmoid(), sinks=torch.zeros(HQ))
    rows = reference.attention(Q, K, V, variant=variants.sigmoid(), mask=torch.zeros(SQ, SK, dtype=torch.bool))
    assert bool((rows == 0).all())


def test_gradients_reach_extra_tensors() -> None:
    table = random_tensor((HQ, 11), torch.float64, seed=7).requires_grad_()
    reference.attention(Q, K, V, variant=variants.relative_bias(table)).sum().backward()
    assert table.grad is not None and bool(table.grad.isfinite().all())


@pytest.mark.parametrize(("make", "kind", "words"), [
    (lambda: variants.alibi([1.0]), DtypeError, ["slopes", "list"]),
    (lambda: variants.alibi(torch.zeros(1, 2, 3)), ShapeError, ["slopes", "(1, 2, 3)", "(Hq)"]),
    (lambda: variants.document_mask(torch.zeros(3)), DtypeError, ["document_ids", "float32", "int32"]),
    (lambda: variants.prefix_lm(torch.zeros(2, 2).int()), ShapeError, ["prefix_lens", "(B)"]),
    (lambda: variants.chunked(0), SettingsError, ["chunk_size", "0", ">= 1"]),
    (lambda: variants.chunked(2.5), SettingsError, ["chunk_size", "2.5"]),
    (lambda: variants.window(), SettingsError, ["(None, None)"]),
    (lambda: variants.window(-1), SettingsError, ["left", "-1"]),
    (lambda: variants.relative_bias(torch.zeros(4, 8)), ShapeError, ["(4, 8)", "2 * max_distance + 1"]),
    (lambda: variants.relative_bias(torch.zeros(4, 9), 3), ShapeError, ["(4, 9)", "(Hq, 7)"]),
    (lambda: variants.t5_bias(torch.zeros(2, 4)), SettingsError, ["2 buckets", "at least 4"]),
    (lambda: variants.t5_bias(torch.zeros(32, 4), 8), SettingsError, ["max_distance 8", "above 8"]),
])
def test_errors(make: Callable[[], Any], kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
