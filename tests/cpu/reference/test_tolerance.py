"""The derived tolerance and the makers of inputs: they pass what is right and fail what is wrong by a little."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernelgen.reference import (
    attention,
    attention_plain,
    attention_varlen,
    attention_varlen_plain,
    gemm,
    gemm_plain,
    mla_attention,
    mla_attention_plain,
    moe,
    moe_plain,
    paged_attention,
    paged_attention_plain,
)
from kernelgen.testing.data import (
    cu_seqlens,
    layouts,
    make_paged_cache,
    matrix_layouts,
    packed_qkv,
    poisoned_empty,
    random_lengths,
    random_tensor,
    random_tensors,
    seed_of,
)
from kernelgen.testing.tolerance import (
    assert_attention_close,
    assert_bits_equal,
    assert_close_to_reference,
    assert_lse_close,
    compare,
    ulp,
)

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("dtype", "value", "expected"), [
    (torch.bfloat16, 1.0, 2.0**-7), (torch.bfloat16, 1.99, 2.0**-7), (torch.bfloat16, 2.0, 2.0**-6),
    (torch.float16, 0.5, 2.0**-11), (torch.float16, 0.0, 2.0**-24), (torch.float32, 3.0, 2.0**-22),
    (torch.float8_e4m3fn, 448.0, 32.0), (torch.float8_e5m2, 1.0, 0.25), (torch.float64, 1.0, 2.0**-52)])
def test_ulp(dtype: torch.dtype, value: float, expected: float) -> None:
    assert ulp(torch.tensor(value, dtype=torch.float64), dtype).item() == expected


def matrix_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b = random_tensors([(200, 96), (96, 40)], torch.bfloat16, seed=1)
    exact, plain = gemm(a, b), gemm_plain(a, b)
    other_order = sum((a[:, i : i + 32].float() @ b[i : i + 32].float() for i in range(0, 96, 32)), torch.zeros(200, 40))
    return other_order.bfloat16(), exact, plain, a


def test_another_order_of_addition_passes() -> None:
    actual, exact, plain, _ = matrix_case()
    assert plain.dtype == torch.bfloat16 and not torch.equal(plain.double(), exact)
    result = assert_close_to_reference(actual, exact, plain, what="order", seed=1)
    assert result.rows == 200 and 0 < result.ratio <= 1


@pytest.mark.parametrize("row", [0, 77, 199])
def test_one_wrong_element_fails_and_is_named(row: int) -> None:
    actual, exact, plain, _ = matrix_case()
    largest = float(exact[row].abs().max())
    actual[row, 13] = exact[row, 13] + 8 * ulp(torch.tensor(largest), torch.bfloat16)
    with pytest.raises(AssertionError) as caught:
        assert_close_to_reference(actual, exact, plain, what="gemm 200x40", seed=1)
    text = str(caught.value)
    assert f"worst row ({row},), column 13" in text and "1 of 200 rows" in text and "seed 1" in text
    assert f"expected {float(exact[row, 13])!r}" in text and f"got {float(actual[row, 13])!r}" in text


def test_a_wrong_small_tile_does_not_hide_behind_large_rows() -> None:
    actual, exact, plain, _ = matrix_case()
    scale = torch.ones(200, 1).double()
    scale[64:128] = 2.0**-20
    actual, exact, plain = (x.double() * scale for x in (actual, exact, plain))
    wrong = actual.clone()
    wrong[64:128] = 0
    # In a global norm the lost tile is smaller than the rounding of the rest.
    assert (wrong - exact)[64:128].norm() < 1e-3 * (actual - exact).norm()
    assert compare(actual, exact, plain, what="", out_dtype=torch.bfloat16).ok
    result = compare(wrong, exact, plain, what="", out_dtype=torch.bfloat16)
    assert not result.ok and result.failing_rows == 64


def test_rows_left_over_are_judged_by_the_last_64() -> None:
    exact = random_tensor((74, 8), seed=5).double()
    plain, actual = exact.float(), exact.clone()
    plain[:64] += 1e-5  # lucky in the last ten rows alone
    actual[70, 3] += 1.5e-5
    assert assert_close_to_reference(actual.float(), exact, plain, what="rest").ratio > 0.5
    plain[10:64] = exact[10:64].float()  # and in all of the last 64
    with pytest.raises(AssertionError, match="worst row"):
        assert_close_to_reference(actual.float(), exact, plain, what="rest")


def test_the_ulp_term_carries_an_exact_plain_evaluation() -> None:
    exact = torch.full((3, 4), 1.0, dtype=torch.float64)
    plain = exact.bfloat16()
    step = 2.0**-7
    for steps, ok in ((0, True), (2, True), (3, False)):
        assert compare((exact + steps * step).bfloat16(), exact, plain, what="").ok is ok
    assert compare(torch.zeros(3, 4), torch.zeros(3, 4).double(), torch.zeros(3, 4), what="").ok
    assert not compare(torch.full((3, 4), 1e-30), torch.zeros(3, 4).double(), torch.zeros(3, 4), what="").ok


def test_non_finite_values_must_match() -> None:
    exact = torch.tensor([[NAN, INF, -INF, 1.0]], dtype=torch.float64)
    good = exact.half()
    assert compare(good, exact, good, what="").ok
    for column, value in ((0, 1.0), (1, -INF), (1, NAN), (2, 60000.0), (3, NAN), (3, INF)):
        wrong = good.clone()
        wrong[0, column] = value
        result = compare(wrong, exact, good, what="")
        assert not result.ok and result.column == column and result.error == INF
    big = torch.tensor([[70000.0, 1.0]], dtype=torch.float64)
    assert compare(big.half(), big, big.half(), what="").ok  # rounds to infinity in float16
    assert not compare(torch.tensor([[65504.0, 1.0]]).half(), big, big.half(), what="").ok
    with pytest.raises(AssertionError, match="plain evaluation is not finite"):
        compare(torch.ones(1, 1), torch.ones(1, 1).double(), torch.full((1, 1), NAN), what="")


def test_shapes_and_types_are_checked() -> None:
    with pytest.raises(AssertionError, match="got shape"):
        compare(torch.ones(2, 3), torch.ones(3, 2).double(), torch.ones(3, 2), what="")
    with pytest.raises(AssertionError, match="must be float64"):
        compare(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3), what="")
    assert compare(torch.ones(0, 3), torch.ones(0, 3).double(), torch.ones(0, 3), what="").ok
    assert compare(torch.ones(3), torch.ones(3).double(), torch.ones(3), what="").ok


def test_float64_results_have_a_float64_tolerance() -> None:
    a, b = random_tensors([(64, 96), (96, 40)], torch.float64, seed=2)
    exact, plain = gemm(a, b), gemm_plain(a, b)
    actual = sum((a[:, i : i + 32] @ b[i : i + 32] for i in range(0, 96, 32)), torch.zeros(64, 40, dtype=torch.float64))
    assert not torch.equal(actual, exact)
    assert_close_to_reference(actual, exact, plain, what="float64")
    assert not compare(actual + 1e-12, exact, plain, what="").ok
    assert not compare(plain.double(), exact, plain, what="").ok


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of one head, block by block with a running maximum, as kernels do; dense (S, D) inputs."""
    peak = torch.full((len(q), 1), -INF)
    total, acc = torch.zeros(len(q), 1), torch.zeros(len(q), v.shape[1])
    for j in range(0, len(k), block):
        s = q.float() @ k[j : j + block].float().t() * q.shape[1] ** -0.5
        s = s.masked_fill(torch.arange(j, j + s.shape[1]) > torch.arange(len(q))[:, None], -INF)
        top = torch.maximum(peak, s.amax(1, True))
        p, shrink = torch.exp(s - top), torch.exp(peak - top)
        total = total * shrink + p.sum(1, True)
        acc = acc * shrink + p.to(v.dtype).float() @ v[j : j + block].float()
        peak = top
    return (acc / total).to(q.dtype), (peak + total.log()).squeeze(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_blocked_kernel_passes_and_its_faults_fail(dtype: torch.dtype) -> None:
    q, k, v = random_tensors([(1, 130, 2, 64)] * 3, dtype, seed=3)
    exact, exact_lse = attention(q, k, v, causal=True, return_lse=True)
    plain, plain_lse = attention_plain(q, k, v, causal=True, return_lse=True)
    assert plain.dtype == dtype and plain_lse.dtype == torch.float32
    heads = [flash(q[0, :, h], k[0, :, h], v[0, :, h], 32) for h in range(2)]
    out, lse = torch.stack([h[0] for h in heads], 1)[None], torch.stack([h[1] for h in heads])[None]
    assert_attention_close(out, exact, plain, what="flash", seed=3)
    assert_lse_close(lse, exact_lse, plain_lse, what="flash", seed=3)
    shifted = attention(q[:, :-1], k[:, :-1], v[:, :-1], causal=True).to(dtype)
    with pytest.raises(AssertionError, match="rows beyond"):
        assert_attention_close(torch.cat([shifted, out[:, :1]], 1), exact, plain, what="a row too few")
    missing = out.clone()
    missing[0, 64, 1] = attention(q[:, 64:65, 1:], k[:, 1:65, 1:], v[:, 1:65, 1:]).to(dtype)
    with pytest.raises(AssertionError, match=r"worst row \(0, 64, 1\)"):
        assert_attention_close(missing, exact, plain, what="one key missing")
    with pytest.raises(AssertionError, match="lse"):
        assert_lse_close(lse / math.log(2), exact_lse, plain_lse, what="log2")
    with pytest.raises(AssertionError, match="1 of"):
        assert_lse_close(lse + (torch.arange(260).view(1, 2, 130) == 7) * 1e-4, exact_lse, plain_lse, what="one row")


def test_lse_of_empty_rows_must_be_minus_infinity() -> None:
    exact = torch.tensor([[[-INF, 0.01]]], dtype=torch.float64)
    assert_lse_close(exact.float(), exact, exact.float(), what="")
    with pytest.raises(AssertionError, match="rows beyond"):
        assert_lse_close(torch.tensor([[[-1e30, 0.01]]]), exact, exact.float(), what="")


def test_plain_evaluations_of_the_other_forms() -> None:
    """Rounded to the output type, close to the exact result, and not equal to it."""
    kv = [(random_tensor((n, 2, 16), torch.bfloat16, seed=n), random_tensor((n, 2, 16), torch.bfloat16, seed=50 + n)) for n in (9, 40)]
    q = random_tensor((2, 4, 16), torch.bfloat16, seed=4)
    case = make_paged_cache(kv, 8, seed=5)
    k, v, cu = torch.cat([a for a, _ in kv]), torch.cat([b for _, b in kv]), cu_seqlens([9, 40])
    latent = [(a.reshape(-1, 1, 32), b.reshape(-1, 1, 32)[..., :8]) for a, b in kv]
    mla_case = make_paged_cache(latent, 8, seed=6, pair=True)
    caches = [c.squeeze(2).contiguous() for c in mla_case.kv_cache]
    q_mla = random_tensors([(2, 4, 32), (2, 4, 8)], torch.bfloat16, seed=7)
    x, w13, w2 = random_tensors([(5, 16), (3, 24, 16), (3, 16, 12)], torch.bfloat16, seed=8)
    routing = (torch.rand(5, 2), torch.randint(0, 3, (5, 2)))
    pairs: list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]] = [
        (paged_attention, paged_attention_plain, (q, case.kv_cache, case), {}),
        (attention_varlen, attention_varlen_plain, (q, k, v, [0, 1, 2], cu), {}),
        (mla_attention, mla_attention_plain, (*q_mla, *caches, mla_case), {"scale": 0.2}),
        (moe, moe_plain, (x, w13, w2, *routing), {}),
    ]
    for exact_call, plain_call, arguments, features in pairs:
        exact, plain = exact_call(*arguments, **features), plain_call(*arguments, **features)
        assert plain.dtype == torch.bfloat16 and exact.dtype == torch.float64
        error = (plain.double() - exact).abs().max() / exact.abs().max()
        assert 1e-5 < error < 0.02, exact_call.__name__


def test_weights_of_the_second_product_are_rounded() -> None:
    q, k, v = random_tensors([(1, 4, 1, 16), (1, 50, 1, 16), (1, 50, 1, 16)], torch.bfloat16, seed=9)
    wide = {"out_dtype": torch.float32}
    rounded, kept = attention_plain(q, k, v, **wide), attention_plain(q, k, v, p_dtype=torch.float32, **wide)
    exact = attention(q, k, v)
    assert (kept - exact).abs().max() < 1e-6 < (rounded - exact).abs().max() < 0.01
    k8, v8 = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    exact = attention(q, k8, v8)
    fine = (attention_plain(q, k8, v8, **wide) - exact).abs().max()  # beside 16-bit queries P is 16-bit
    coarse = (attention_plain(q, k8, v8, p_dtype=torch.float8_e4m3fn, **wide) - exact).abs().max()
    assert 8 * fine < coarse < 0.1


def test_poison_and_layouts() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        assert torch.isnan(poisoned_empty((3, 5), dtype).float()).all()
        x = random_tensor((4, 6, 8), torch.float32, seed=10).to(dtype)
        for name, y in matrix_layouts(x).items():
            assert y.dtype == dtype and torch.equal(y.float(), x.float()), name
        strides = {name: y.stride() for name, y in layouts(x).items()}
        assert all(s[-1] == 1 for s in strides.values()) and len(set(strides.values())) == 4
        assert layouts(x)["offset_by_one"].data_ptr() % (2 * x.element_size()) == x.element_size()
    assert int(poisoned_empty((2,), torch.int32)[0]) == -(2**31) and bool(poisoned_empty((1,), torch.bool))
    q, k, v = packed_qkv((3,), 4, 2, 8, torch.float32, seed=11)
    assert q.shape == (3, 4, 8) and k.shape == v.shape == (3, 2, 8) and q.stride(0) == v.stride(0) == 64


def test_random_inputs_repeat_and_differ() -> None:
    assert seed_of("a", 1) == seed_of("a", 1) != seed_of("a", 2)
    assert torch.equal(random_tensor((5,), seed=1), random_tensor((5,), seed=1))
    first, second = random_tensors([(5,), (5,)], seed=1)
    assert not torch.equal(first, second)
    lengths = random_lengths(9, 20, seed=2)
    assert min(lengths) == 0 and max(lengths) == 20 and len(set(lengths)) > 4
    assert cu_seqlens([3, 0, 2]).tolist() == [0, 3, 3, 5] and cu_seqlens([]).dtype == torch.int32


def test_bits() -> None:
    x = torch.tensor([[1.0, NAN], [0.0, 2.0]])
    assert_bits_equal(x, x.clone(), what="same")
    with pytest.raises(AssertionError, match=r"1 of 4 elements differ in bits, first at \(1, 0\): got -0.0"):
        assert_bits_equal(torch.tensor([[1.0, NAN], [-0.0, 2.0]]), x, what="sign")
    with pytest.raises(AssertionError, match="bfloat16"):
        assert_bits_equal(x.bfloat16(), x, what="dtype")
    assert_bits_equal(x[:0], x[:0], what="empty")
