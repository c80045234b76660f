"""Group C of the public bug cases, mixture of experts: no tokens, ids that repeat or name nobody, ties, NaN logits, shards, repeats."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.errors import LayoutError, SettingsError, ShapeError
from kernelgen.render import template_text
from kernelgen.testing.data import padded_rows, random_tensor
from kernelgen.testing.moe_layer import check_moe, layer
from kernelgen.testing.tolerance import assert_bits_equal

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32
BACKENDS = ("generated", "reference")
INF, NAN = float("inf"), float("nan")


# C01, C02: nothing to do


@pytest.mark.parametrize("backend", BACKENDS)
def test_c01_a_rank_without_tokens(backend: str) -> None:
    c = layer(0, 8, 2, 256, 64)
    out = kernelgen.moe(**c, backend=backend)
    assert out.shape == (0, 256) and out.dtype == BF16 and out.device.type == "cpu"
    given = torch.empty(0, 256, dtype=BF16)
    assert kernelgen.moe(**c, out=given, backend=backend) is given


@pytest.mark.parametrize("backend", BACKENDS)
def test_c02_every_piece_of_no_tokens(backend: str) -> None:
    counts = torch.zeros(8, dtype=I32)
    weights, ids = kernelgen.route(torch.zeros(0, 8), 2, counts=counts, backend=backend)
    assert weights.shape == ids.shape == (0, 2) and weights.dtype == F32 and ids.dtype == I32 and not counts.any()
    sort = kernelgen.moe_sort(ids, 8, backend=backend)
    assert sort.offsets.tolist() == [0] * 8 and sort.token_of_row.shape == (0,) and sort.row_of_slot.shape == (0, 2)
    rows = kernelgen.moe_permute(torch.zeros(0, 256, dtype=BF16), sort, backend=backend)
    assert rows.shape == (0, 256) and rows.dtype == BF16
    assert kernelgen.moe_unpermute(rows, sort, weights, backend=backend).shape == (0, 256)


# C07, C15: ids


@pytest.mark.parametrize("tokens", (256, 257, 300))
def test_c07_an_expert_twice_in_a_token(tokens: int) -> None:
    """Duplicates keep a row each, and their weights add up, below and above any size at which a sort changes its way."""
    c = layer(tokens, 128, 4, 64, 32)
    c["ids"][3], c["ids"][-1], c["ids"][tokens // 2] = (torch.tensor(row, dtype=I32) for row in ([5, 88, 88, 65], [7] * 4, [5, 88, 88, 65]))
    c["weights"] = torch.softmax(random_tensor((tokens, 4), seed=1), 1)
    out = check_moe(c, what=str(tokens))
    sort = kernelgen.moe_sort(c["ids"], 128, backend="generated")
    assert sorted(sort.row_of_slot.flatten().tolist()) == list(range(4 * tokens))
    assert bool((sort.token_of_row >= 0).all()) and int(sort.offsets[-1]) == 4 * tokens
    one = kernelgen.moe(**(c | {"ids": torch.full((tokens, 1), 7), "weights": torch.ones(tokens, 1)}), backend="generated")
    torch.testing.assert_close(out[-1], one[-1], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("backend", BACKENDS)
def test_c15_ids_that_name_no_expert(backend: str) -> None:
    """-1 and ids past the end add nothing, whatever their weight; a token with no other is exactly 0."""
    c = layer(9, 6, 3, 64, 32, F32)
    base = kernelgen.moe(**c, backend=backend)
    c["ids"] = c["ids"].clone()
    c["ids"][1], c["ids"][2], c["ids"][4, 1], c["ids"][5, 0] = -1, 6, -1, 2**31 - 1
    for bad in (1.0, NAN, INF):
        weights = torch.where((c["ids"] < 0) | (c["ids"] >= 6), bad, c["weights"])
        out = kernelgen.moe(**(c | {"weights": weights}), backend=backend)
        assert bool((out[1:3] == 0).all()) and bool(out.isfinite().all())
        torch.testing.assert_close(out[[0, 3, 6, 7, 8]], base[[0, 3, 6, 7, 8]])  # in other groups: other sums of equal quality
        kept = weights.nan_to_num(0, 0, 0) * (c["ids"] >= 0) * (c["ids"] < 6)
        torch.testing.assert_close(out, kernelgen.moe(**(c | {"ids": c["ids"].clamp(0, 5), "weights": kept}), backend=backend))
    assert bool((kernelgen.moe(**(c | {"ids": torch.full((9, 3), -1)}), backend=backend) == 0).all())


# C08, C10, C12: routing


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("experts", (128, 256))
def test_c08_rows_of_padding(experts: int, backend: str) -> None:
    logits = random_tensor((6, experts), seed=1)
    logits[0], logits[1], logits[2], logits[3], logits[4, ::2] = NAN, INF, -INF, 2.5, NAN
    for method in ("softmax", "topk_softmax", "sigmoid", "deepseek_v3", "llama4"):
        weights, ids = kernelgen.route(logits, 8, method=method, backend=backend)
        assert bool(weights.isfinite().all()) and bool((weights >= 0).all())
        assert all(len(set(row)) == 8 and min(row) >= 0 and max(row) < experts for row in ids.tolist())
        for row in range(4):
            assert ids[row].tolist() == list(range(8))
            assert bool((weights[row] == weights[row, 0]).all())
        assert bool((ids[4] % 2 == 1).all())


def test_c10_ties_go_to_the_lowest_id() -> None:
    """Everything equal; collisions of bf16; ties just across the k-th place. Equal on every backend, run after run."""
    logits = (random_tensor((40, 384), seed=2) * 2).round().to(BF16) / 2
    logits[0], logits[1] = 0, -1
    logits[1, 100:108], logits[2, :] = 3, logits[2, :].clamp(max=0)
    logits[2, 7], logits[2, 300:310] = 2, 1
    for options in ({}, {"method": "deepseek_v3", "bias": torch.zeros(384)}, {"method": "sigmoid", "renormalize": False}):
        chosen = {backend: kernelgen.route(logits, 8, backend=backend, **options)[1] for backend in BACKENDS}  # type: ignore[arg-type]
        assert torch.equal(chosen["generated"], chosen["reference"])
        assert chosen["generated"][:3].tolist() == [list(range(8)), list(range(100, 108)), [7, *range(300, 307)]]
        for _ in range(20):
            assert torch.equal(kernelgen.route(logits, 8, backend="generated", **options)[1], chosen["generated"])  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_c12_groups_of_one_and_arguments_that_cannot_be(backend: str) -> None:
    logits = random_tensor((5, 8), seed=3)
    options: dict[str, Any] = dict(method="deepseek_v3", backend=backend)
    weights, ids = kernelgen.route(logits, 2, num_groups=8, topk_groups=3, **options)
    expected = ref.route(logits, 2, method="deepseek_v3", num_groups=8, topk_groups=3)
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(weights, expected[0].float())
    for k in (1, 8):
        assert kernelgen.route(logits, k, backend=backend)[1].sort(1).values[:, -1].max() < 8
    assert kernelgen.route(logits, 8, backend=backend)[1].sort(1).values.tolist() == [list(range(8))] * 5
    for change, error, words in (
        (dict(num_groups=3, topk_groups=1), ShapeError, "3, expected a divisor of 8"),
        (dict(num_groups=4, topk_groups=5), ShapeError, "topk_groups: got 5, expected 1 to 4"),
        (dict(num_groups=4, topk_groups=1, k=3), ShapeError, "k: got 3, expected at most 2"), (dict(k=9), ShapeError, "k: got 9"),
        (dict(k=0), ShapeError, "k: got 0"), (dict(num_groups=4), SettingsError, "both or neither"),
    ):
        with pytest.raises(error, match=words):
            kernelgen.route(logits, **({"k": 2} | options | change))


# C14: shards


def test_c14_shards_with_an_offset() -> None:
    """64 experts in two shards of 32, global ids: each shard gives something, both together the whole."""
    c = layer(30, 64, 6, 64, 32, F32)
    whole = kernelgen.moe(**c, backend="generated")
    for backend in BACKENDS:
        parts = [kernelgen.moe(**(c | {"w13": c["w13"][a : a + 32], "w2": c["w2"][a : a + 32]}), expert_map=(a, a + 32), backend=backend)
                 for a in (0, 32)]
        assert all(bool(part.abs().sum() > 0) for part in parts)
        torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-4, atol=1e-5)


# C18: 64-bit offsets


def test_c18_offsets_of_rows_are_64_bit() -> None:
    """Rows times their stride pass 2^32: the kernels step rows in 64 bits."""
    for name in ("permute_cuda.cuh", "unpermute_cuda.cuh", "permute_cpu.h", "unpermute_cpu.h"):
        text = template_text(f"include/kernelgen/moe/{name}")
        assert "int64_t x_stride, row_stride" in text or "int64_t row_stride" in text, name
        assert "int64_t row" in text and "int row =" not in text, name
    assert "int64_t tokens" in template_text("include/kernelgen/moe/route_cuda.cuh")


# C32, C33, C35: repeats, x, clamps


@pytest.mark.parametrize("k", (1, 8))
def test_c32_equal_calls_give_equal_bits(k: int) -> None:
    c, before = layer(33, 16, k, 64, 32), torch.get_num_threads()
    wanted = kernelgen.moe(**c, backend="generated")
    try:
        for threads in (1, 32):
            torch.set_num_threads(threads)
            for _ in range(20):
                for deterministic in (True, False):
                    again = kernelgen.moe(**c, deterministic=deterministic, backend="generated")
                    assert_bits_equal(again, wanted, what=f"{threads} threads, deterministic={deterministic}")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_c33_x_stays(backend: str) -> None:
    c = layer(12, 4, 2, 64, 32)
    x, shared = c["x"].clone(), (random_tensor((64, 64), BF16, seed=5, scale=0.1), random_tensor((64, 32), BF16, seed=6, scale=0.1))
    out = kernelgen.moe(**c, shared=shared, backend=backend)
    assert_bits_equal(c["x"], x, what="x")
    torch.testing.assert_close(out, kernelgen.moe(**c, shared=shared, backend="reference"), rtol=0.02, atol=0.02)
    buffer = padded_rows(torch.cat([x, x]), 8)
    for view in (buffer[:12], buffer[5:17]):
        with pytest.raises(LayoutError, match="memory that x lies in"):
            kernelgen.moe(**(c | {"x": buffer[:12]}), out=view, backend=backend)
    assert_bits_equal(buffer[:12].contiguous(), x, what="x after the refusal")


def test_c35_clamps_reach_the_kernels() -> None:
    c = layer(20, 4, 2, 64, 32, activation="swiglu_oai", scale=20.0) | {"gate_up": "interleaved"}
    assert float(c["x"].abs().max()) > 50
    free = check_moe(c | {"limit": 1e30}, what="without")
    for extra in ({"alpha": 1.702, "limit": 7.0}, {"alpha": 1.0, "limit": 2.0}):
        assert not torch.equal(check_moe(c | extra, what=str(extra)), free)
    plain = layer(20, 4, 2, 64, 32, scale=20.0)
    assert not torch.equal(check_moe(plain | {"limit": 7.0}, what="swiglu"), check_moe(plain, what="swiglu without"))
