"""The MoE layer and its pieces against a loop over tokens and slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.reference import (
    apply_activation,
    grouped_gemm,
    moe,
    moe_permute,
    moe_sort,
    moe_unpermute,
    pack_weight,
    route,
)
from kernelgen.testing.data import random_tensor, random_tensors

NAN = float("nan")
E4M3 = torch.float8_e4m3fn


def layer(tokens: int, experts: int, k: int, hidden: int, inner: int, seed: int, halves: int = 2,
          dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    x, w13, w2 = random_tensors([(tokens, hidden), (experts, halves * inner, hidden), (experts, hidden, inner)], dtype,
                                seed=seed, scale=0.5)
    weights, ids = route(random_tensor((tokens, experts), seed=seed + 1), k)
    return {"x": x, "w13": w13, "w2": w2, "weights": weights.float(), "ids": ids}


def by_loops(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *,
             act: Any, bias13: torch.Tensor | None = None, bias2: torch.Tensor | None = None,
             on_input: bool = False, keep: Any = lambda e: e) -> torch.Tensor:
    """``keep`` maps an id to a local expert, or None for a slot that is skipped."""
    out = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.float64)
    for t in range(x.shape[0]):
        for s in range(ids.shape[1]):
            e = keep(int(ids[t, s]))
            if e is None:
                continue
            w = weights[t, s].double()
            h = w13[e].double() @ (x[t].double() * w if on_input else x[t].double())
            y = w2[e].double() @ act(h if bias13 is None else h + bias13[e].double())
            y = y if bias2 is None else y + bias2[e].double()
            out[t] += y if on_input else w * y
    return out


def swiglu(h: torch.Tensor) -> torch.Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-11)


def test_one_expert_by_hand() -> None:
    x = torch.tensor([[2.0]])
    w13, w2 = torch.tensor([[[1.0], [3.0]]]), torch.tensor([[[4.0]]])
    out = moe(x, w13, w2, torch.tensor([[0.5]]), torch.tensor([[0]]), activation="reglu")
    assert out.tolist() == [[0.5 * 4 * (2 * 6)]]
    out = moe(x, w13, w2, torch.tensor([[0.5]]), torch.tensor([[0]]), activation="reglu", weights_on_input=True)
    assert out.tolist() == [[4.0 * (1 * 3)]]


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "geglu_tanh", "reglu", "swiglu_oai", "silu", "gelu", "relu2"])
def test_activations_with_biases(activation: str) -> None:
    gated = activation in ("swiglu", "geglu", "geglu_tanh", "reglu", "swiglu_oai")
    a = layer(7, 5, 3, 12, 6, seed=1, halves=2 if gated else 1)
    bias13, bias2 = random_tensors([tuple(a["w13"].shape[:2]), (5, 12)], torch.float64, seed=2)
    for gate_up in ("gate_first", "up_first", "interleaved") if gated else ("gate_first",):
        out = moe(**a, activation=activation, gate_up=gate_up, bias13=bias13, bias2=bias2)
        close(out, by_loops(**a, bias13=bias13, bias2=bias2,
                            act=lambda h, g=gate_up: apply_activation(h, activation, gate_up=g)))


def test_clamped_activation_parameters_arrive() -> None:
    """C35."""
    a = layer(5, 4, 2, 12, 6, seed=3)
    a["x"] = a["x"] * 50
    for activation, extra in (("swiglu_oai", {"alpha": 1.702, "limit": 7.0}), ("swiglu", {"limit": 7.0})):
        out = moe(**a, activation=activation, **extra)
        close(out, by_loops(**a, act=lambda h, n=activation, e=extra: apply_activation(h, n, **e)))
        assert not torch.allclose(out, moe(**a, activation=activation, limit=20.0))


def test_weights_on_input_and_shared_expert() -> None:
    a = layer(5, 4, 1, 12, 6, seed=4)
    close(moe(**a, weights_on_input=True), by_loops(**a, act=swiglu, on_input=True))
    shared = tuple(random_tensors([(10, 12), (12, 5)], torch.float64, seed=5))
    x = a["x"].clone()
    extra = swiglu(x @ shared[0].t()) @ shared[1].t()
    close(moe(**a, shared=shared), by_loops(**a, act=swiglu) + extra)
    assert torch.equal(a["x"], x)
    with pytest.raises(ShapeError, match="shared w2"):
        moe(**a, shared=(shared[0], shared[1][:, :4]))


def test_skipped_and_repeated_ids() -> None:
    """C07, C15: -1 and ids past the end add nothing whatever their weight; a repeated id adds its weights."""
    a = layer(6, 4, 3, 12, 6, seed=6)
    a["ids"] = torch.tensor([[0, -1, 2], [-1, -1, -1], [3, 3, 3], [4, 1, 99], [1, 1, 2], [0, 1, 2]], dtype=torch.int32)
    a["weights"] = random_tensor((6, 3), seed=7)
    a["weights"][1], a["weights"][3, 0], a["weights"][0, 1] = NAN, NAN, NAN
    out = moe(**a)
    close(out, by_loops(**a, act=swiglu, keep=lambda e: e if 0 <= e < 4 else None))
    assert torch.equal(out[1], torch.zeros(12, dtype=torch.float64))
    one = {**a, "ids": torch.full((6, 1), 3), "weights": a["weights"][:, :1] * 0 + a["weights"][2].sum()}
    close(out[2], moe(**one)[2])


@pytest.mark.parametrize("form", ["map", "range", "pair"])
def test_expert_shards_add_up(form: str) -> None:
    """C14: two shards of 32 experts, global ids; each is non-zero and their sum is the whole."""
    a = layer(9, 64, 4, 8, 4, seed=8)
    parts = []
    for first in (0, 32):
        table = torch.full((64,), -1, dtype=torch.int32)
        table[first : first + 32] = torch.arange(32, dtype=torch.int32)
        expert_map: Any = {"map": table, "range": range(first, first + 32), "pair": (first, first + 32)}[form]
        local = {**a, "w13": a["w13"][first : first + 32], "w2": a["w2"][first : first + 32]}
        parts.append(moe(**local, expert_map=expert_map))
        assert parts[-1].abs().sum() > 0
    close(parts[0] + parts[1], moe(**a))
    reversed_map = torch.arange(63, -1, -1, dtype=torch.int32)
    close(moe(**{**a, "w13": a["w13"].flip(0), "w2": a["w2"].flip(0)}, expert_map=reversed_map), moe(**a))
    with pytest.raises(ShapeError, match="expected a range of 64 experts"):
        moe(**a, expert_map=(0, 32))


def test_zero_tokens_and_unused_experts() -> None:
    """C01."""
    a = layer(3, 4, 2, 12, 6, seed=9)
    empty = {**a, "x": a["x"][:0], "ids": a["ids"][:0], "weights": a["weights"][:0]}
    assert moe(**empty).shape == (0, 12)
    a["ids"] = torch.tensor([[0, 1]] * 3)
    a["w13"][2:] = NAN  # an expert without tokens is not read
    assert torch.isfinite(moe(**a)).all()


@pytest.mark.parametrize("tokens", [0, 1, 256, 257, 300])
def test_sort_permute_and_back(tokens: int) -> None:
    """C07: a stable sort by (expert, token, slot); every slot has its row, skipped slots have none."""
    ids = torch.randint(-1, 20, (tokens, 4), generator=torch.Generator().manual_seed(10)).to(torch.int32)
    if tokens > 1:
        ids[0], ids[1] = torch.tensor([5, 8, 8, 6]), torch.tensor([7, 7, 7, 7])
    experts = 16
    sort = moe_sort(ids, experts)
    expected = sorted((e, t, s) for t, row in enumerate(ids.tolist()) for s, e in enumerate(row) if 0 <= e < experts)
    used = len(expected)
    assert sort.offsets.dtype == sort.token_of_row.dtype == sort.row_of_slot.dtype == torch.int32
    assert sort.offsets.tolist() == [sum(e <= i for e, _, _ in expected) for i in range(experts)]
    assert sort.token_of_row.tolist() == [t for _, t, _ in expected] + [-1] * (tokens * 4 - used)
    rows = torch.full((tokens, 4), -1)
    for row, (_, t, s) in enumerate(expected):
        rows[t, s] = row
    assert sort.row_of_slot.tolist() == rows.tolist()
    x = random_tensor((tokens, 8), torch.float64, seed=11)
    moved = moe_permute(x, sort)
    assert torch.equal(moved[:used], x[sort.token_of_row[:used].long()]) and torch.isnan(moved[used:]).all()
    weights = random_tensor((tokens, 4), seed=12)
    back = moe_unpermute(moved, sort, weights.masked_fill(rows < 0, NAN))
    close(back, x * (weights.double() * (rows >= 0)).sum(1, True))


def test_pieces_make_the_layer() -> None:
    a = layer(9, 6, 3, 12, 6, seed=13)
    a["ids"][0, 0], a["ids"][4] = -1, 6
    sort = moe_sort(a["ids"], 6)
    rows = moe_permute(a["x"], sort)
    hidden = grouped_gemm(rows, a["w13"].mT, sort.offsets, activation="swiglu")
    out = moe_unpermute(grouped_gemm(hidden, a["w2"].mT, sort.offsets), sort, a["weights"])
    close(out, moe(**a))


SCALES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "tensor": ((), ()), "expert": ((3,), (3,)), "channel": ((3, 24, 1), (3, 136, 1)), "channel flat": ((3, 24), (3, 136)),
    "block": ((3, 1, 2), (3, 2, 1)),
}


@pytest.mark.parametrize("form", SCALES)
def test_fp8_experts(form: str) -> None:
    a = layer(5, 3, 2, 136, 12, seed=14, dtype=torch.bfloat16)
    a["w13"], a["w2"] = a["w13"].to(E4M3), a["w2"].to(E4M3)
    generator = torch.Generator().manual_seed(15)
    scale13, scale2 = (torch.rand(s, generator=generator) + 0.5 for s in SCALES[form])

    def full(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if form == "block":
            n, k = torch.arange(w.shape[1]) // 128, torch.arange(w.shape[2]) // 128
            return w.double() * scale.double()[:, n][:, :, k]
        return w.double() * scale.double().reshape(tuple(scale.shape) + (1,) * (3 - scale.dim()))

    dense = {**a, "w13": full(a["w13"], scale13), "w2": full(a["w2"], scale2)}
    close(moe(**a, scale13=scale13, scale2=scale2), by_loops(**dense, act=swiglu))
    with pytest.raises(ShapeError, match="scale of w13"):
        moe(**a, scale13=torch.ones(3, 5))
    with pytest.raises(DtypeError, match="x torch.bfloat16 and w13"):
        moe(**a)


@pytest.mark.parametrize("format", ["int4", "mxfp4"])
def test_packed_experts(format: str) -> None:
    a = layer(5, 3, 2, 70, 33, seed=16, dtype=torch.bfloat16)
    packed = {**a, "w13": pack_weight(a["w13"], format, group_size=32), "w2": pack_weight(a["w2"], format, group_size=32)}
    dense = {**a, "w13": packed["w13"].dequantize(), "w2": packed["w2"].dequantize()}
    close(moe(**packed), by_loops(**dense, act=swiglu))
    with pytest.raises(DtypeError, match="packed"):
        moe(**packed, scale13=torch.tensor(1.0))


@pytest.mark.parametrize("recipe", ["row", "block_1x128"])
def test_rounded_activations_stay_close(recipe: str) -> None:
    a = layer(5, 3, 2, 136, 12, seed=17)
    exact, rounded = moe(**a), moe(**a, act_recipe=recipe)
    relative = ((rounded - exact).norm() / exact.norm()).item()
    assert 1e-3 < relative < 0.1
    half = moe(**a, mid_dtype=torch.bfloat16)
    assert 1e-5 < ((half - exact).norm() / exact.norm()).item() < 0.01


def test_bad_calls_are_named() -> None:
    a = layer(3, 4, 2, 12, 6, seed=18)
    for name, bad, match in (("w2", a["w2"][:, :, :5], "w2"), ("weights", a["weights"][:, :1], "weights"),
                             ("w13", a["w13"][:, :, :8], "w13"), ("ids", a["ids"][:2], "ids")):
        with pytest.raises(ShapeError, match=match):
            moe(**{**a, name: bad})
    with pytest.raises(DtypeError, match="ids"):
        moe(**{**a, "ids": a["ids"].float()})
    with pytest.raises(SettingsError, match="activation"):
        moe(**a, activation="swish")
    with pytest.raises(ShapeError, match="bias13"):
        moe(**a, bias13=torch.zeros(4, 6))
