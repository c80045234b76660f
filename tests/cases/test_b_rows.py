"""Group B of the public bug cases: which keys a row sees, and what comes out of the numbers it meets.

Each test runs every backend that can run its call. tests/gpu/test_cases_b_cuda.py repeats them with another ``device``.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import PageTable
from kernelgen.testing.bug_cases import (
    Results,
    check,
    check_mla,
    check_paged,
    main_dtype,
    one_hot_values,
    paged_of,
    run,
    run_paged,
    tables,
    weights_of,
)
from kernelgen.testing.data import cu_seqlens, poison_, poisoned_empty, random_tensor, random_tensors, seed_of
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def device() -> str:
    return "cpu"


def inputs(q_len: int, kv_len: int, heads: int, kv_heads: int, dim: int, device: str, *, seed: int) -> list[torch.Tensor]:
    """q (q_len, Hq, D), k and v (kv_len, Hkv, D) in the device's main type."""
    shapes = [(q_len, heads, dim), (kv_len, kv_heads, dim), (kv_len, kv_heads, dim)]
    return random_tensors(shapes, main_dtype(device), seed=seed, device=device)


def assert_empty_rows(results: Results, rows: slice) -> None:
    """Rows (of the first dimension) without keys: exactly 0, LSE -inf."""
    for name, got in results.items():
        assert not got.out[rows].any(), name
        assert got.lse is None or bool((got.lse[rows] == -INF).all()), name


# B01: rows that may attend to nothing


def test_b01_more_queries_than_keys_dense(device: str) -> None:
    """Five causal queries over 3, 1 and 0 keys: the first 2, 4 and 5 rows see nothing and give 0 and LSE -inf."""
    for kv_len in (3, 1, 0):
        q, k, v = inputs(5, kv_len, 4, 2, 64, device, seed=seed_of("B01", kv_len))
        results = check("B01", q[None], k[None], v[None], causal=True)
        for got in results.values():
            assert not got.out[0, : 5 - kv_len].any() and bool(torch.isfinite(got.out).all())
            assert got.lse is None or bool((got.lse[0, :, : 5 - kv_len] == -INF).all())


@pytest.mark.parametrize("page", [0, 1, 16])
def test_b01_more_queries_than_keys_ragged_and_paged(device: str, page: int) -> None:
    """The same rows as three requests of one batch, the one without keys in the middle; page 0 stands for ragged."""
    lens, seed = [3, 0, 1], seed_of("B01", page)
    q, k, v = inputs(15, sum(lens), 4, 2, 64, device, seed=seed)
    if page:
        case = paged_of(k, v, lens, page, seed=seed)
        for table in tables(case).values():
            results = check_paged("B01", table, q, case.kv_cache, {"q_lens": [5, 5, 5]}, seed=seed)
    else:
        results = check("B01", q, k, v, cu_seqlens([5, 5, 5], device), cu_seqlens(lens, device), causal=True, seed=seed)
    for rows in (slice(0, 2), slice(5, 14)):
        assert_empty_rows(results, rows)


def test_b01_empty_rows_of_mla(device: str) -> None:
    """Latent attention with a request without keys between two with fewer keys than queries."""
    q = random_tensor((15, 5, 80), main_dtype(device), seed=1, device=device)
    cache = poisoned_empty((4, 4, 80), q.dtype, device)
    cache[2, :3], cache[0, :1] = (random_tensor((n, 80), q.dtype, seed=n, device=device) for n in (3, 1))
    table = PageTable.from_blocks(torch.tensor([[2], [-1], [0]], device=device), [3, 0, 1], 4)
    results = check_mla("B01", table, q, cache, 64, q_lens=[5, 5, 5])
    for rows in (slice(0, 2), slice(5, 14)):
        assert_empty_rows(results, rows)


# B02: causal with fewer queries than keys


def test_b02_causal_aligns_at_the_bottom_right(device: str) -> None:
    """Two queries over six keys: row 0 sees keys 0 .. 4, row 1 sees all, which equal logits and one-hot values show."""
    dtype = main_dtype(device)
    q, k = torch.zeros(2, 1, 64, dtype=dtype, device=device), torch.zeros(6, 1, 64, dtype=dtype, device=device)
    v = one_hot_values(6, 1, 64, dtype, device)
    case = paged_of(k, v, [6], 4)
    got = {f"dense {n}": r.out[0] for n, r in run("B02", q[None], k[None], v[None], causal=True).items()}
    starts = cu_seqlens([2], device), cu_seqlens([6], device)
    got |= {f"ragged {n}": r.out for n, r in run("B02", q, k, v, *starts, causal=True).items()}
    got |= {f"paged {n}": r.out for n, r in run_paged("B02", tables(case)["csr"], q, case.kv_cache, {"q_lens": [2]}).items()}
    if device == "cpu":
        assert {"dense torch", "dense generated", "dense reference"} <= set(got)
    expected = torch.zeros(2, 1, 64)
    expected[0, 0, :5], expected[1, 0, :6] = 1 / 5, 1 / 6
    for name, out in got.items():
        torch.testing.assert_close(out.cpu(), expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=0, msg=name)


# B03: rows whose logits all lie far below zero


@pytest.mark.parametrize("level", [-1e3, -6e4, -1e6])
def test_b03_very_negative_logits_are_no_mask(device: str, level: float) -> None:
    """64 raw logits at the level and one above it: the output is that key's value, its scaled logit the LSE."""
    dtype = main_dtype(device)
    q = torch.zeros(1, 1, 1, 128, dtype=dtype, device=device)
    q[..., 0] = 1
    k = torch.zeros(1, 64, 1, 128, dtype=dtype, device=device)
    k[..., 0], k[0, 37, 0, 0] = level, level * 55 / 60 if level < -1e4 else level + 900
    v = random_tensor(k.shape, dtype, seed=seed_of("B03", level), device=device)
    top = float(k[0, 37, 0, 0]) * 128**-0.5
    for causal in (False, True):
        for name, got in check("B03", q, k, v, causal=causal).items():
            assert torch.equal(got.out[0, 0], v[0, 37]), f"{name} causal={causal}"
            if got.lse is not None:
                assert got.lse.item() == pytest.approx(top, rel=4 * torch.finfo(torch.float32).eps), name


@pytest.mark.parametrize("by", ["causal", "kv_lens", "mask"])
def test_b03_masked_key_beside_a_very_negative_logit(device: str, by: str) -> None:
    """The only visible key has a scaled logit of about -20000, a masked one has 0: the masked one gets no weight."""
    dtype = main_dtype(device)
    q, k = (torch.zeros(1, 2, 1, 64, dtype=dtype, device=device) for _ in range(2))
    q[..., 0], k[0, 0, 0, 0] = 1, -159744.0  # a bfloat16 number, / 8 = -19968
    v = random_tensor(k.shape, dtype, seed=5, device=device)
    features: dict[str, Any] = {
        "causal": {"causal": True}, "kv_lens": {"kv_lens": torch.tensor([1], dtype=torch.int32, device=device)},
        "mask": {"mask": torch.tensor([True, False], device=device)},
    }[by]
    for name, got in check("B03 mask" if by == "mask" else "B03", q, k, v, **features).items():
        row = 1 if by == "kv_lens" else 0  # with one key in use, row 0 stands before it; neither call is causal but the first
        assert torch.equal(got.out[0, row], v[0, 0]), name
        if got.lse is not None:
            assert got.lse[0, 0, row].item() == pytest.approx(-19968, rel=5e-7), name


# B04: merging empty partial results


@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 2, 96), (7, 5, 192)])
def test_b04_merging_empty_states(device: str, shape: tuple[int, int, int]) -> None:
    """(0, -inf) is neutral bit for bit wherever it stands and whatever its output holds; all empty or no state: (0, -inf)."""
    value = random_tensor(shape, torch.float16, seed=seed_of("B04", shape), device=device)
    log = random_tensor(shape[:2], seed=7, device=device)
    nothing = torch.full_like(log, -INF)
    for junk in (0.0, NAN, INF):
        empty = torch.full_like(value, junk)
        for states in (((value, log),), ((empty, nothing), (value, log)), ((value, log), (empty, nothing)),
                       ((empty, nothing), (empty, nothing), (value, log), (empty, nothing))):
            out, lse = kernelgen.merge_states(*(torch.stack(side) for side in zip(*states)))
            assert_bits_equal(out, value, what=f"{len(states)} states")
            assert_bits_equal(lse, log, what=f"{len(states)} states")
        for count in (0, 1, 2, 5):
            out, lse = kernelgen.merge_states(empty.expand(count, *shape), nothing.expand(count, *shape[:2]))
            assert out.dtype == torch.float16 and not out.any() and out.shape == shape, count
            assert lse.dtype == torch.float32 and bool((lse == -INF).all()), count


# B06: one base of the LSE


def test_b06_parts_by_different_backends_merge(device: str) -> None:
    """4096 keys in three parts, each by another backend: every LSE is natural, and the merge is what one pass gives."""
    dtype = main_dtype(device)
    q, k, v = random_tensors([(1, 3, 4, 64), (1, 4096, 2, 64), (1, 4096, 2, 64)], dtype, seed=seed_of("B06"), device=device)
    scores = torch.einsum("qhd,khd->hqk", q[0].double(), k[0].double().repeat_interleave(2, 1)) / 8
    values = v[0].double().repeat_interleave(2, 1)
    exact = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    parts = [slice(0, 1000), slice(1000, 1001), slice(1001, 4096)]
    by_part = [{n: r for n, r in run("B06", q, k[:, s], v[:, s]).items() if r.lse is not None} for s in parts]
    for s, results in zip(parts, by_part):
        for name, got in results.items():
            torch.testing.assert_close(got.lse[0].double(), torch.logsumexp(scores[..., s], -1), rtol=1e-6, atol=1e-5, msg=name)
    names = sorted(by_part[0])
    assert len(names) >= 2, names
    for turn in range(len(names)):
        states = [results[names[(i + turn) % len(names)]] for i, results in enumerate(by_part)]
        out, lse = kernelgen.merge_states(torch.stack([r.out[0] for r in states]), torch.stack([r.lse[0].t() for r in states]))
        torch.testing.assert_close(lse.double(), torch.logsumexp(scores, -1).t(), rtol=1e-6, atol=1e-5)
        assert (out.double() - exact).abs().max() < (1e-7 if dtype == torch.float32 else 1e-3), names


# B07: what a window counts


@pytest.mark.parametrize("left", [0, 1, 2, 15, 16, 17, 39, 40, 41])
def test_b07_window_counts_keys_beside_the_own_one(device: str, left: int) -> None:
    """(W, 0) sees the own key and W before it: one-hot values show the set, in prefill and, as its last row, in decode."""
    dtype, length = main_dtype(device), 40
    q, k = torch.zeros(2, length, 1, 64, dtype=dtype, device=device)
    v = one_hot_values(length, 1, 64, dtype, device)
    case = paged_of(k, v, [length], 16)
    i, j = torch.arange(length)[:, None], torch.arange(64)
    allowed = (j <= i) & (j >= i - left)
    seen = {}
    for rows in (length, 1):
        some = q[-rows:]
        lens = cu_seqlens([rows], device), cu_seqlens([length], device)
        windowed: dict[str, Any] = {"window": (left, 0)}
        seen |= {f"dense {n} {rows}": r.out[0] for n, r in run("B07", some[None], k[None], v[None], **windowed).items()}
        seen |= {f"causal {n} {rows}": r.out[0]
                 for n, r in run("B07", some[None], k[None], v[None], causal=True, window=(left, None)).items()}
        seen |= {f"ragged {n} {rows}": r.out for n, r in run("B07", some, k, v, *lens, **windowed).items()}
        planned = {"q_lens": [rows], "window": (left, None)}
        seen |= {f"paged {n} {rows}": r.out for n, r in run_paged("B07", tables(case)["blocks"], some, case.kv_cache, planned).items()}
    for name, out in seen.items():
        rows = out.shape[0]
        weights = out[:, 0].cpu().float()
        assert torch.equal(weights > 0, allowed[-rows:]) and not (weights < 0).any(), name
        expected = 1 / allowed[-rows:].sum(1, keepdim=True)
        torch.testing.assert_close(weights.amax(1, keepdim=True), expected, rtol=2 * torch.finfo(dtype).eps, atol=0, msg=name)


def test_b07_right_side_of_a_window(device: str) -> None:
    """(None, R) and (L, R) count R keys after the own one; with causal none of them."""
    q, k, v = inputs(40, 40, 2, 1, 64, device, seed=seed_of("B07"))
    for window in ((None, 0), (None, 3), (2, 3), (0, 0)):
        for causal in (False, True):
            check("B07", q[None], k[None], v[None], window=window, causal=causal)


# B33: the soft-cap is applied


@pytest.mark.parametrize("cap", [0.0, 5.0, 50.0])
@pytest.mark.parametrize("shape", [(1, 48, 70), (64, 1, 31), (64, 1, 600)])
def test_b33_soft_cap_acts_on_scaled_logits(device: str, cap: float, shape: tuple[int, int, int]) -> None:
    """Logits up to 40 under no cap, 5 and 50: c * tanh(logit / c) before the mask; prefill, decode and a long cache in splits."""
    batch, q_len, kv_len = shape
    seed = seed_of("B33", cap, shape)
    q, k, v = random_tensors([(batch, q_len, 4, 64), (batch, kv_len, 2, 64), (batch, kv_len, 2, 64)], main_dtype(device), seed=seed,
                             device=device)
    q = (q * 10).to(q.dtype)
    results = check("B33", q, k, v, causal=True, soft_cap=cap, seed=seed)
    case = paged_of(k.flatten(0, 1), v.flatten(0, 1), [kv_len] * batch, 16)
    planned = {"q_lens": [q_len] * batch, "soft_cap": cap}
    results |= {f"paged {n}": r for n, r in
                check_paged("B33", tables(case)["blocks"], q.flatten(0, 1), case.kv_cache, planned, seed=seed).items()}
    uncapped = run("B33", q, k, v, causal=True)["reference"].out.flatten()
    for name, got in results.items():
        moved = float((got.out.flatten() - uncapped).abs().max())
        assert moved > (0.5 if cap == 5 else 0.05) if cap else moved < 0.05, f"{name}: moved by {moved}"


# B35: a sink is counted once


SINKS = (-2.0, 0.0, 3.0, -INF, 20.0)


def sink_formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, cap: float | None,
                 first: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """One query (Hq, D) over keys (S, 1, D) from ``first`` on: sum exp(l) v / (sum exp(l) + exp(sink)), and its log."""
    logits = torch.einsum("hd,kd->hk", q.to(dtype), k[first:, 0].to(dtype)) * q.shape[1] ** -0.5
    logits = cap * torch.tanh(logits / cap) if cap else logits
    both = torch.cat([logits, sinks.to(dtype)[:, None]], 1)
    return weights_of(both, v.dtype)[:, :-1] @ v[first:, 0].to(dtype), torch.logsumexp(both, 1)


@pytest.mark.parametrize(("cap", "window"), [(None, None), (3.0, 100)])
def test_b35_sink_enters_once_whatever_the_splits(device: str, cap: float | None, window: int | None) -> None:
    """Five heads with sinks of their own over lengths that cut into 1 to 8 and more chunks, a window that leaves the first ones
    empty, and no keys at all (output 0): sum exp(l) + exp(sink), the same alone and in a batch."""
    lens, seed = [0, 5, 300, 600, 2050], seed_of("B35", cap, window)
    q, k, v = inputs(len(lens), sum(lens), 5, 1, 64, device, seed=seed)
    sinks = torch.tensor(SINKS, device=device)
    planned: dict[str, Any] = {"sinks": True, "soft_cap": cap, "window": None if window is None else (window, None)}
    case = paged_of(k, v, lens, 16, seed=seed)
    features = {"soft_cap": cap, "window": planned["window"], "causal": True, "sinks": sinks}
    starts = cu_seqlens([1] * len(lens), device), cu_seqlens(lens, device)
    results = run("B35 sinks", q, k, v, *starts, **features)
    results |= {f"paged {n}": r for n, r in run_paged("B35 sinks", tables(case)["csr"], q, case.kv_cache, planned, sinks=sinks).items()}
    alone = paged_of(k[-2050:], v[-2050:], [2050], 16, seed=seed)
    last = run_paged("B35 sinks", tables(alone)["csr"], q[-1:], alone.kv_cache, planned, sinks=sinks)
    results |= {f"alone {n}": r for n, r in last.items()}
    sides = list(zip(k.split(lens), v.split(lens)))
    for name, got in results.items():
        pairs = [(4, 0)] if name.startswith("alone") else [(b, b) for b in range(len(lens))]
        for b, row in pairs:
            first = 0 if window is None else max(lens[b] - 1 - window, 0)
            exact, exact_lse = sink_formula(q[b], *sides[b], sinks, cap, first, torch.float64)
            plain, _ = sink_formula(q[b], *sides[b], sinks, cap, first, torch.float32)
            if lens[b] == 0:
                assert not got.out[row].any(), name
            assert_close_to_reference(got.out[row], exact, plain.to(got.out.dtype), what=f"{name}, request {b}")
            torch.testing.assert_close(got.lse[row].double(), exact_lse, rtol=1e-6, atol=1e-5, msg=name)


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8])
def test_b35_sink_in_one_of_the_merged_parts(device: str, splits: int) -> None:
    """Keys cut by hand into 1 to 8 parts of which one, an empty one where it can be, brings the sink: the merge has it once."""
    length, seed = 90, seed_of("B35 merge", splits)
    q, k, v = inputs(1, length, 5, 1, 64, device, seed=seed)
    sinks = torch.tensor(SINKS, device=device)
    exact, exact_lse = sink_formula(q[0], k, v, sinks, None, 0, torch.float64)
    ends = [length * i // max(splits - 1, 1) for i in range(splits)] + [length]  # the last part of several is empty
    pieces = [slice(a, b) for a, b in zip(ends, ends[1:])] if splits > 1 else [slice(0, length)]
    states = [run("B35 sinks", q[None], k[None, s], v[None, s], **({"sinks": sinks} if s == pieces[-1] else {})) for s in pieces]
    for name in {"reference", "generated"} & set(states[0]) & set(states[-1]):
        outs, lses = torch.stack([s[name].out[0] for s in states]), torch.stack([s[name].lse[0].t() for s in states])
        out, lse = kernelgen.merge_states(outs, lses)
        torch.testing.assert_close(out[0].double(), exact, rtol=0, atol=4 * torch.finfo(out.dtype).eps * float(exact.abs().max()))
        torch.testing.assert_close(lse[0].double(), exact_lse, rtol=1e-6, atol=1e-5)


# B37: ALiBi slopes of any number of heads


def published_slopes(heads: int) -> list[float]:
    """Press et al. 2021: a geometric series for a power of two, filled up with every second slope of twice as many heads."""
    power = 2 ** int(math.log2(heads))
    series = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return series + [2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * (heads - power), 2)]


def test_b37_slopes_of_any_head_count(device: str) -> None:
    """Slopes follow the published rule for every head count, and nothing of one call is left for the next (12, 16, 12)."""
    for heads in (1, 2, 3, 5, 6, 7, 8, 12, 16, 40, 71, 12, 16, 12):
        slopes = kernelgen.alibi_slopes(heads)
        torch.testing.assert_close(slopes.double(), torch.tensor(published_slopes(heads), dtype=torch.float64), rtol=1e-6, atol=0)
    for heads in (12, 16, 12):
        q, k, v = inputs(9, 17, heads, heads // 4, 64, device, seed=seed_of("B37", heads))
        check("B37 alibi", q[None], k[None], v[None], causal=True, alibi_slopes=kernelgen.alibi_slopes(heads).to(device))


# B41: a NaN that a row may attend to


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("place", ["q row", "q element", "k", "v"])
def test_b41_nan_goes_where_arithmetic_puts_it(device: str, place: str, causal: bool) -> None:
    """A NaN of q spoils its row, one of k every row that sees the key, one of v their column; all else keeps its bits."""
    q, k, v = inputs(6, 9, 4, 2, 64, device, seed=seed_of("B41"))
    clean = [t.clone() for t in (q, k, v)]
    out_nan, lse_nan = torch.zeros(6, 4, 64, dtype=torch.bool), torch.zeros(6, 4, dtype=torch.bool)
    sees = torch.arange(6) >= 2 if causal else torch.ones(6, dtype=torch.bool)  # of key 5, which row 2 stands at
    if place.startswith("q"):
        q[3, 1, slice(None) if place == "q row" else slice(7, 8)] = NAN
        out_nan[3, 1], lse_nan[3, 1] = True, True
    elif place == "k":
        k[5, 1, 7] = NAN
        out_nan[sees, 2:], lse_nan[sees, 2:] = True, True
    else:
        v[5, 1, 7] = NAN
        out_nan[sees, 2:, 7] = True
    # torch's own kernel loses the NaN of a query and spreads those of masked keys: the test below.
    before = run("B41", *(t[None] for t in clean), causal=causal, skip=("torch",))
    after = run("B41", q[None], k[None], v[None], causal=causal, skip=("torch",))
    caches = [paged_of(k_, v_, [9], 4, seed=3).kv_cache for k_, v_ in ((clean[1], clean[2]), (k, v))]
    table = tables(paged_of(k, v, [9], 4, seed=3))["csr"]
    flags = {"q_lens": [6], "causal": causal}
    paged = [run_paged("B41", table, rows, cache, flags) for rows, cache in zip((clean[0], q), caches)]
    pairs = [(name, before[name], after[name]) for name in after] + [(f"paged {n}", paged[0][n], paged[1][n]) for n in paged[1]]
    for name, was, now in pairs:
        out, old = now.out.reshape(q.shape).cpu(), was.out.reshape(q.shape).cpu()
        assert torch.equal(torch.isnan(out), out_nan), name
        assert_bits_equal(torch.where(out_nan, 0, out), torch.where(out_nan, 0, old), what=name)
        if now.lse is not None:
            lse = now.lse.cpu() if name.startswith("paged") else now.lse[0].t().cpu()
            assert torch.equal(torch.isnan(lse), lse_nan), name


def test_b41_nan_query_of_a_row_without_keys(device: str) -> None:
    """A row that sees nothing gives 0 and -inf whatever its query holds."""
    q, k, v = inputs(5, 3, 4, 2, 64, device, seed=seed_of("B41 empty"))
    poison_(q[:2])
    results = run("B41", q[None], k[None], v[None], causal=True)
    for name, got in results.items():
        assert not got.out[0, :2].any() and not torch.isnan(got.out).any(), name
        assert got.lse is None or bool((got.lse[0, :, :2] == -INF).all()), name


WIDE = torch.backends.cpu.get_cpu_capability().startswith("AVX512")


@pytest.mark.parametrize("place", [
    pytest.param("q", marks=pytest.mark.xfail(WIDE, strict=True, reason="torch with AVX-512 gives 0 for a NaN query")),
    pytest.param("v", marks=pytest.mark.xfail(strict=True, reason="torch gives 0 * NaN for a masked key"))])
def test_b41_torch_keeps_the_rule_too(place: str) -> None:
    """The torch backend is held to the same rule: a NaN query row gives NaN, a NaN value does not reach rows before it."""
    q, k, v = inputs(6, 9, 4, 2, 64, "cpu", seed=seed_of("B41"))
    (q if place == "q" else v)[5, 1, 7] = NAN
    out = kernelgen.attention(q[None], k[None], v[None], causal=place == "v", backend="torch")[0]
    assert bool(torch.isnan(out[5, 1]).all()) if place == "q" else not torch.isnan(out[:2]).any()
