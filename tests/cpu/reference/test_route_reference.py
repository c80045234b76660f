"""Routing: each method against torch, and the rules for ties, NaN, infinities and groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.reference import route
from kernelgen.testing.data import random_tensor

NAN, INF = float("nan"), float("inf")
METHODS = ["softmax", "topk_softmax", "sigmoid", "deepseek_v3", "llama4"]


@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_methods_equal_torch(dtype: torch.dtype, k: int) -> None:
    logits = torch.stack([random_tensor((16,), dtype, seed=s)[torch.randperm(16)] for s in range(20)])
    logits = (logits.double() + torch.arange(16) * 1e-9).float() if dtype == torch.float32 else logits
    x = logits.double()
    weights, ids = route(logits, k, renormalize=False)
    assert weights.dtype == torch.float64 and ids.dtype == torch.int32 and weights.shape == ids.shape == (20, k)
    chosen = torch.topk(x, k).values
    torch.testing.assert_close(x.gather(1, ids.long()), chosen)
    torch.testing.assert_close(weights, torch.topk(x.softmax(1), k).values)
    torch.testing.assert_close(route(logits, k)[0], chosen.softmax(1))
    torch.testing.assert_close(route(logits, k, method="topk_softmax", scaling=2.5)[0], 2.5 * chosen.softmax(1))
    torch.testing.assert_close(route(logits, k, method="llama4")[0], chosen.sigmoid())
    torch.testing.assert_close(route(logits, k, method="sigmoid", renormalize=False)[0], chosen.sigmoid())
    for method in ("sigmoid", "deepseek_v3"):
        torch.testing.assert_close(route(logits, k, method=method)[0], chosen.sigmoid() / chosen.sigmoid().sum(1, True))
    for method in METHODS:
        assert torch.equal(route(logits, k, method=method)[1], ids)


def test_softmax_by_hand() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]], dtype=torch.float64).log1p()  # probabilities 1, 4, 2, 3 of 10
    weights, ids = route(logits, 2, renormalize=False)
    assert ids.tolist() == [[1, 3]] and weights[0].tolist() == pytest.approx([0.4, 0.3])
    assert route(logits, 2)[0][0].tolist() == pytest.approx([4 / 7, 3 / 7])


def test_deepseek_bias_selects_but_does_not_weigh() -> None:
    logits = torch.tensor([[0.0, 2.0, -1.0, 1.0]])
    bias = torch.tensor([0.0, -1.0, 0.6, 0.0])
    s = logits.double().sigmoid()[0]
    weights, ids = route(logits, 2, method="deepseek_v3", bias=bias, scaling=2.5)
    # s + bias: 0.5, -0.119, 0.869, 0.731
    assert ids.tolist() == [[2, 3]]
    torch.testing.assert_close(weights[0], 2.5 * s[[2, 3]] / s[[2, 3]].sum())
    torch.testing.assert_close(route(logits, 2, method="sigmoid", bias=bias, renormalize=False)[0][0], s[[2, 3]])


def by_groups(logits: torch.Tensor, bias: torch.Tensor, k: int, groups: int, kept: int) -> list[list[int]]:
    """The published selection, one row and one comparison at a time."""
    rows = []
    for row in (logits.double().sigmoid() + bias.double()).tolist():
        size = len(row) // groups
        rank = sorted(range(groups), key=lambda g: (-sum(sorted(row[g * size : (g + 1) * size])[-2:]), g))
        inside = [e for g in rank[:kept] for e in range(g * size, (g + 1) * size)]
        rows.append(sorted(inside, key=lambda e: (-row[e], e))[:k])
    return rows


@pytest.mark.parametrize(("experts", "groups", "kept", "k"), [(16, 4, 2, 3), (256, 8, 4, 8), (8, 8, 3, 3), (6, 1, 1, 6), (8, 2, 1, 4)])
def test_grouped_selection(experts: int, groups: int, kept: int, k: int) -> None:
    """C12: also one expert per group, and k equal to the room in the kept groups."""
    logits, bias = random_tensor((30, experts), seed=1), random_tensor((experts,), seed=2) * 0.2
    arguments: dict[str, Any] = {"method": "deepseek_v3", "bias": bias, "num_groups": groups, "topk_groups": kept}
    weights, ids = route(logits, k, **arguments)
    assert ids.tolist() == by_groups(logits, bias, k, groups, kept)
    torch.testing.assert_close(weights.sum(1), torch.ones(30, dtype=torch.float64))
    without = route(logits, k, method="deepseek_v3", num_groups=groups, topk_groups=kept)[1]
    assert without.tolist() == by_groups(logits, torch.zeros(experts), k, groups, kept)


def test_grouped_selection_never_leaves_its_groups() -> None:
    """Experts of a kept group win over any other even when their own key is -inf."""
    logits = torch.tensor([[5.0, 5.0, -9.0, -9.0, 4.0, 4.0, 4.0, 4.0]])
    bias = torch.tensor([0.0, 0.0, -INF, -INF, 0.0, 0.0, 0.0, 0.0])
    ids = route(logits, 4, method="deepseek_v3", bias=bias, num_groups=2, topk_groups=1)[1]
    assert ids.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(("experts", "k", "groups", "kept", "match"), [
    (9, 2, 2, 1, "2 for 9 experts"), (8, 2, 4, 5, "topk_groups: got 5"), (8, 9, None, None, "k: got 9"),
    (8, 0, None, None, "k: got 0"), (8, 3, 4, 1, "k: got 3, expected at most 2")])
def test_bad_sizes_are_refused_with_the_numbers(experts: int, k: int, groups: int, kept: int, match: str) -> None:
    """C12."""
    with pytest.raises(ShapeError, match=match):
        route(torch.zeros(2, experts), k, method="deepseek_v3", num_groups=groups, topk_groups=kept)


def test_bad_arguments_are_refused() -> None:
    logits = torch.zeros(2, 8)
    with pytest.raises(SettingsError, match=r"'top2'.*'llama4'"):
        route(logits, 2, method="top2")
    with pytest.raises(SettingsError, match="bias"):
        route(logits, 2, bias=torch.zeros(8))
    with pytest.raises(SettingsError, match="both or neither"):
        route(logits, 2, method="deepseek_v3", num_groups=2)
    with pytest.raises(SettingsError, match="num_groups"):
        route(logits, 2, num_groups=2, topk_groups=1)
    with pytest.raises(ShapeError, match="bias"):
        route(logits, 2, method="sigmoid", bias=torch.zeros(7))
    with pytest.raises(DtypeError, match="logits"):
        route(logits.int(), 2)


@pytest.mark.parametrize("method", METHODS)
def test_ties_go_to_the_lowest_id(method: str) -> None:
    """C10: all-zero rows, ties across the k-th place, saturated scores that a float32 sigmoid cannot tell apart."""
    weights, ids = route(torch.zeros(2, 384), 6, method=method)
    assert ids.tolist() == [list(range(6))] * 2 and bool((weights == weights[0, 0]).all())
    logits = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0, 1.0]])
    assert route(logits, 4, method=method)[1].tolist() == [[1, 3, 0, 2]]
    logits = torch.tensor([[40.0, 41.0, 30.0, 200.0]])
    assert route(logits, 3, method=method, compute_dtype=torch.float32)[1].tolist() == [[3, 1, 0]]
    coarse = random_tensor((50, 384), torch.bfloat16, seed=3, scale=0.01).round(decimals=2)
    ids = route(coarse, 8, method=method)[1].tolist()
    for row, chosen in zip(coarse.tolist(), ids):
        assert chosen == sorted(range(384), key=lambda e: (-row[e], e))[:8]


@pytest.mark.parametrize("experts", [128, 256])
@pytest.mark.parametrize("method", METHODS)
def test_rows_of_nan_and_infinities(method: str, experts: int) -> None:
    """C08: always k different ids and finite weights; a hopeless row gives 0 .. k - 1 and equal weights."""
    rows = [torch.full((experts,), v) for v in (NAN, -INF, INF, 0.0)]
    mixed = torch.full((experts,), NAN)
    mixed[7], mixed[3] = 1.0, 2.0
    some = torch.full((experts,), -INF)
    some[100] = -5.0
    up = torch.zeros(experts)
    up[9], up[5] = INF, INF
    logits = torch.stack([*rows, mixed, some, up])
    weights, ids = route(logits, 8, method=method, scaling=2.0)
    assert torch.isfinite(weights).all() and all(len(set(r)) == 8 for r in ids.tolist())
    assert int(ids.min()) >= 0 and int(ids.max()) < experts
    assert ids[:4].tolist() == [list(range(8))] * 4
    assert torch.equal(weights[:2], torch.full((2, 8), 0.25, dtype=torch.float64))
    assert ids[4].tolist() == [3, 7, 0, 1, 2, 4, 5, 6] and torch.equal(weights[4, 2:], torch.zeros(6, dtype=torch.float64))
    assert ids[5].tolist() == [100, *range(7)] and weights[5, 0] > 0
    assert ids[6, :2].tolist() == [5, 9] and weights[6, 0] == weights[6, 1] > 0
    if method in ("softmax", "topk_softmax"):
        assert weights[6].tolist() == [1.0, 1.0] + [0.0] * 6


def test_empty_batch() -> None:
    """C01."""
    for method in METHODS:
        weights, ids = route(torch.zeros(0, 8), 2, method=method)
        assert weights.shape == ids.shape == (0, 2) and ids.dtype == torch.int32
    weights, _ = route(torch.zeros(0, 8), 2, method="deepseek_v3", num_groups=4, topk_groups=2, bias=torch.zeros(8))
    assert weights.shape == (0, 2)
