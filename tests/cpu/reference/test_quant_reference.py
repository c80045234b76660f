"""fp8 recipes and packed weights: hand-made codes, shapes, extremes, round trips."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.reference import pack_weight, quantize_fp8
from kernelgen.reference.weights import E2M1_VALUES, PackedWeight, pack_nibbles, round_e2m1, unpack_nibbles
from kernelgen.testing.data import random_tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ["tensor", "row", "block_1x128", "block_128x128"]


def scale_shape(recipe: str, m: int, k: int) -> tuple[int, ...]:
    kb = math.ceil(k / 128)
    return {"tensor": (), "row": (m, 1), "block_1x128": (m, kb), "block_128x128": (math.ceil(m / 128), kb)}[recipe]


def test_codes_by_hand() -> None:
    x = torch.tensor([[448.0, -224.0, 1.0, 0.0], [2.0, 1.0, 0.5, -2.0]])
    codes, scale = quantize_fp8(x, "tensor")
    assert scale.item() == 1.0 and torch.equal(codes.float(), x)
    codes, scale = quantize_fp8(x, "row")
    assert scale.dtype == torch.float32 and scale.shape == (2, 1)
    assert scale.tolist() == [[1.0], [torch.tensor(2.0).div(448).item()]]
    assert codes[1].float().tolist() == [448.0, 224.0, 112.0, -448.0]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(("m", "k"), [(1, 1), (5, 127), (130, 128), (3, 300), (0, 64), (4, 0)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_shapes_extremes_and_error(recipe: str, m: int, k: int, dtype: torch.dtype) -> None:
    """C02: empty sizes have their scale shapes. Each block's largest entry gets the largest code."""
    x = random_tensor((m, k), torch.bfloat16, seed=m + k) * torch.exp2(torch.arange(k) % 21 - 10.0)
    codes, scale = quantize_fp8(x, recipe, dtype=dtype)
    assert codes.shape == x.shape and codes.dtype == dtype and scale.shape == scale_shape(recipe, m, k)
    if x.numel() == 0:
        assert torch.equal(scale, torch.ones_like(scale))
        return
    limit = torch.finfo(dtype).max
    full = scale.expand(m, k) if recipe in ("tensor", "row") else torch.stack(
        [scale[(i // 128) if recipe == "block_128x128" else i, torch.arange(k) // 128] for i in range(m)])
    step = 2.0 ** -4 if dtype == E4M3 else 2.0 ** -3
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((codes.float() * full - x).abs() <= x.abs() * step + full * smallest).all()
    for r in range(0, m, 128 if recipe == "block_128x128" else m if recipe == "tensor" else 1):
        rows = slice(r, r + (128 if recipe == "block_128x128" else m if recipe == "tensor" else 1))
        for c in range(0, k, 128 if recipe.startswith("block") else k):
            assert codes[rows, c : c + (128 if recipe.startswith("block") else k)].float().abs().max() == limit


@pytest.mark.parametrize("recipe", RECIPES)
def test_float32_gives_the_codes_of_the_division(recipe: str) -> None:
    x = random_tensor((130, 260), torch.float32, seed=1)
    exact, scale = quantize_fp8(x, recipe)
    single, scale32 = quantize_fp8(x, recipe, compute_dtype=torch.float32)
    assert torch.equal(scale, scale32)
    # A float32 division rounds as the float64 one does, so without an activation the codes agree to the bit.
    assert torch.equal(exact.view(torch.uint8), single.view(torch.uint8))


def test_zeros_tiny_values_and_nan() -> None:
    x = torch.zeros(4, 256)
    x[1, 0], x[2, 0], x[3, 200] = 1e-44, 1e-30, float("nan")
    codes, scale = quantize_fp8(x, "block_1x128")
    assert scale[0].tolist() == [1.0, 1.0] and scale[1, 0] == torch.finfo(torch.float32).tiny
    assert torch.isfinite(1 / scale[:3]).all() and codes[2, 0].float() == 448
    assert torch.isnan(scale[3, 1]) and torch.isnan(codes[3, 128:].float()).all()
    assert scale[3, 0] == 1.0 and torch.equal(codes[3, :128].float(), torch.zeros(128))


@pytest.mark.parametrize("activation", ["silu", "swiglu"])
def test_activation_comes_first(activation: str) -> None:
    x = random_tensor((3, 260), torch.bfloat16, seed=2)
    value = F.silu(x.double()) if activation == "silu" else F.silu(x[:, :130].double()) * x[:, 130:].double()
    codes, scale = quantize_fp8(x, "block_1x128", activation=activation)
    expected = quantize_fp8(value, "block_1x128")
    assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scale, expected[1])
    swapped = torch.cat([x[:, 130:], x[:, :130]], 1)
    if activation == "swiglu":
        again, _ = quantize_fp8(swapped, "block_1x128", activation=activation, gate_up="up_first")
        assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))


def test_batched_input_and_bad_arguments() -> None:
    x = random_tensor((2, 3, 200), torch.float32, seed=3)
    for recipe in RECIPES[1:]:
        codes, scale = quantize_fp8(x, recipe)
        for b in range(2):
            one = quantize_fp8(x[b], recipe)
            assert torch.equal(codes[b].view(torch.uint8), one[0].view(torch.uint8)) and torch.equal(scale[b], one[1])
    with pytest.raises(SettingsError, match=r"'column'.*'block_1x128'"):
        quantize_fp8(x, "column")
    with pytest.raises(SettingsError, match="dtype"):
        quantize_fp8(x, dtype=torch.float16)
    with pytest.raises(DtypeError, match="floating"):
        quantize_fp8(x.int())
    with pytest.raises(ShapeError, match="expected"):
        quantize_fp8(x[0, 0])


def test_e2m1_rounds_to_nearest_even() -> None:
    """Every midpoint goes to the neighbour with the even code; beyond 6 saturates; signs are kept."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    assert round_e2m1(values).tolist() == list(range(8))
    middles = (values[:-1] + values[1:]) / 2
    assert round_e2m1(middles).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert round_e2m1(middles + 1e-9).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert round_e2m1(torch.tensor([100.0, -100.0, -0.5, -0.1])).tolist() == [7, 15, 9, 0]


def test_nibbles() -> None:
    codes = torch.tensor([[1, 2, 3], [15, 0, 8]], dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.tolist() == [[0x21, 0x03], [0x0F, 0x08]]
    assert torch.equal(unpack_nibbles(packed, 3), codes)


def test_mxfp4_by_hand() -> None:
    w = torch.zeros(2, 40)
    w[0, :4] = torch.tensor([6.0, -3.0, 0.5, 0.24])
    w[0, 32:34] = torch.tensor([100.0, -60.0])
    packed = pack_weight(w, "mxfp4")
    # amax 6 = 1.5 * 2^2: exponent 2 - 2 = 0. amax 100 = 1.56 * 2^6: exponent 4, codes 100/16 -> 6, -60/16 -> -4.
    assert packed.scale.tolist() == [[127, 131], [0, 0]] and packed.group_size == 32
    values = packed.dequantize()
    assert values[0, :4].tolist() == [6.0, -3.0, 0.5, 0.0] and values[0, 32:34].tolist() == [96.0, -64.0]
    assert torch.equal(values[1], torch.zeros(40, dtype=torch.float64))
    assert torch.isnan(pack_weight(torch.full((1, 32), float("inf")), "mxfp4").dequantize()).all()


@pytest.mark.parametrize("columns", [32, 70, 129])
def test_mxfp4_error_is_at_most_half_a_step(columns: int) -> None:
    w = random_tensor((3, 5, columns), torch.bfloat16, seed=columns)
    values = pack_weight(w, "mxfp4").dequantize()
    assert values.shape == w.shape
    factor = torch.stack([w[..., 32 * (j // 32) : 32 * (j // 32) + 32].abs().amax(-1) for j in range(columns)], -1).double()
    unit = torch.exp2(torch.floor(torch.log2(factor)) - 2)
    # The widest step, between 4 and 6, is 2 units; saturation of 6 .. 8 units costs as much again.
    assert ((values - w.double()).abs() <= 2 * unit).all()
    assert ((values - w.double()).abs() <= unit).double().mean() > 0.95


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("columns", [128, 300, 33])
@pytest.mark.parametrize("group_size", [32, 128])
def test_int4_round_trip(group_size: int, columns: int, symmetric: bool) -> None:
    w = random_tensor((5, columns), torch.float32, seed=columns) + (0.0 if symmetric else 1.0)
    packed = pack_weight(w, "int4", group_size=group_size, symmetric=symmetric)
    assert packed.codes.shape == (5, math.ceil(columns / 2)) and packed.scale.shape == (5, math.ceil(columns / group_size))
    assert (packed.zero is None) == symmetric
    values = packed.dequantize()
    step = packed.scale.double().repeat_interleave(group_size, 1)[:, :columns]
    assert ((values - w.double()).abs() <= step * (0.5001 if symmetric else 1.0)).all()
    again = pack_weight(values, "int4", group_size=group_size, scale=packed.scale, zero=packed.zero)
    assert torch.equal(again.codes, packed.codes)


def test_int4_by_hand() -> None:
    packed = pack_weight(torch.tensor([[7.0, -7.0, 3.0, -8.0]]), "int4", scale=torch.tensor([[1.0]]))
    assert packed.codes.tolist() == [[0x1F, 0x0B]]
    assert packed.dequantize().tolist() == [[7.0, -7.0, 3.0, -8.0]]
    w = torch.tensor([[0.0, 15.0, 5.0, 1.0]])
    packed = pack_weight(w, "int4", symmetric=False)
    assert packed.zero is not None and packed.zero.tolist() == [[0]] and packed.codes.tolist() == [[0xF0, 0x15]]
    assert torch.equal(packed.dequantize(torch.float32), w)
    assert torch.equal(pack_weight(torch.zeros(2, 8)).dequantize(), torch.zeros(2, 8, dtype=torch.float64))


def test_packed_codes_are_taken_as_they_are() -> None:
    codes = torch.tensor([[0x21, 0xF7] * 16], dtype=torch.uint8)
    mx = pack_weight(codes, "mxfp4", scale=torch.tensor([[128, 126]], dtype=torch.uint8))
    assert mx.shape == (1, 64) and mx.dequantize()[0, :4].tolist() == [1.0, 2.0, 12.0, -12.0]
    assert mx.dequantize()[0, 32:36].tolist() == [0.25, 0.5, 3.0, -3.0]
    int4 = pack_weight(codes, "int4", group_size=32, scale=torch.tensor([[1.0, 2.0]]), zero=torch.tensor([[1, 2]]).byte())
    assert isinstance(int4, PackedWeight) and int4.dequantize()[0, :4].tolist() == [0.0, 1.0, 6.0, 14.0]
    assert int4.dequantize()[0, 32:36].tolist() == [-2.0, 0.0, 10.0, 26.0]


def test_bad_weights_are_refused() -> None:
    w = torch.zeros(4, 64)
    with pytest.raises(SettingsError, match="format"):
        pack_weight(w, "nvfp4")
    with pytest.raises(SettingsError, match="group_size"):
        pack_weight(w, "mxfp4", group_size=64)
    with pytest.raises(ShapeError, match="scale"):
        pack_weight(w, "int4", group_size=32, scale=torch.ones(4, 1))
    with pytest.raises(ShapeError, match="scale"):
        pack_weight(w.byte(), "int4")
    with pytest.raises(DtypeError, match="E8M0"):
        pack_weight(w.byte(), "mxfp4", scale=torch.ones(4, 4))
