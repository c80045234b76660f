"""quantize/quantize_fp8_cpu through the public call: recipes, dtypes, activations, layouts, special values, errors."""

from __future__ import annotations

import pytest
import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.errors import DtypeError, LayoutError, NoBackendError, SettingsError, ShapeError
from kernelgen.testing.cpu_level import instruction_level
from kernelgen.testing.data import every_second_row, offset_by_one, padded_rows, random_tensor, seed_of
from kernelgen.testing.quantize import check_quantize
from kernelgen.testing.tolerance import assert_bits_equal

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ("tensor", "row", "block_1x128", "block_128x128")
SIZES = ((1, 1), (3, 130), (129, 64), (260, 300), (5, 2000))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_bit_is_that_of_float32_arithmetic(recipe: str) -> None:
    more = {"row": ((F32, E5M2),), "block_128x128": ((F32, E4M3),), "block_1x128": ((FP16, E4M3), (F32, E4M3)), "tensor": ((F32, E4M3),)}
    for i, (dtype, code) in enumerate(((BF16, E4M3), *more[recipe])):
        for m, k in SIZES:
            what = f"{recipe} {m}x{k} {dtype}"
            seed = seed_of(what)
            # Rows and columns of very different size: a scale taken from a neighbour shows.
            x = random_tensor((m, k), F32, seed=seed) * torch.exp2(random_tensor((m, 1), seed=seed + 1, scale=4).clamp(-10, 10))
            check_quantize(x.to(dtype), recipe, what=what, seed=seed, code=code, pad=i, columns_first=i == 1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_batches_and_layouts(recipe: str) -> None:
    x = random_tensor((2, 3, 130, 200), BF16, seed=1)
    for name, view in (
        ("4 dimensions", x), ("overlapping", x[0].as_strided((4, 50, 200), (200, 200, 1))), ("padded", padded_rows(x[0], 1)),
        ("every second", every_second_row(x[0])), ("unaligned", offset_by_one(x[0])), ("stride 0", x[0, :1].expand(3, 130, 200)),
        ("transposed batch", x[0].transpose(0, 1)),
    ):
        check_quantize(view, recipe, what=f"{recipe} {name}", seed=1)


@pytest.mark.parametrize("activation, gate_up, recipe", (
    ("swiglu", "gate_first", "tensor"), ("swiglu", "gate_first", "block_1x128"), ("swiglu", "up_first", "row"),
    ("geglu", "interleaved", "block_128x128"), ("silu", "gate_first", "row"),
))
def test_activation_first(activation: str, gate_up: str, recipe: str) -> None:
    for m, k in ((3, 130), (140, 600), (1, 2)):
        what = f"{activation} {gate_up} {recipe} {m}x{k}"
        x = random_tensor((m, k), BF16, seed=seed_of(what), scale=3)
        check_quantize(x, recipe, what=what, seed=seed_of(what), activation=activation, gate_up=gate_up)


def test_special_values() -> None:
    """Zeros, subnormal amaxima, saturation, and a NaN that stays within its scale."""
    x = random_tensor((4, 300), F32, seed=1)
    x[0] = 0
    x[1] = 1e-44
    x[2, 5] = float("nan")
    x[3, 200] = 3e38
    for recipe in RECIPES[1:]:
        check_quantize(x, recipe, what=recipe, seed=1)
    _, scale = kernelgen.quantize_fp8(x, "block_1x128", backend="generated")
    assert scale[0].tolist() == [1, 1, 1] and scale[1, 0] == torch.finfo(F32).tiny
    assert scale[2].isnan().tolist() == [True, False, False]
    for whole in (x, x[:2], x.new_zeros(3, 4)):
        check_quantize(whole, "tensor", what="tensor", seed=1)


@pytest.mark.parametrize("shape", ((0, 5), (5, 0), (0, 0), (3, 0, 200), (0, 4, 200)), ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    for recipe in RECIPES:
        check_quantize(torch.zeros(shape), recipe, what=f"{recipe} {shape}", seed=1)


@pytest.mark.parametrize("isa", ("x86-64-v3",))
def test_instruction_levels(isa: str) -> None:
    with instruction_level(isa):
        check_quantize(random_tensor((20, 300), BF16, seed=1), "block_1x128", what=isa, seed=1)
        check_quantize(random_tensor((20, 300), BF16, seed=1), "row", what=isa, seed=1, activation="swiglu", gate_up="interleaved")


def test_repeated_calls_allocate_their_own_outputs() -> None:
    x, y = random_tensor((9, 300), BF16, seed=1), random_tensor((9, 300), BF16, seed=2)
    first, again, other = (kernelgen.quantize_fp8(t, "row", backend="generated") for t in (x, x, y))
    assert first[0].data_ptr() != again[0].data_ptr() and first[1].data_ptr() != again[1].data_ptr()
    assert_bits_equal(again[1], first[1], what="the same values again")
    assert_bits_equal(other[1], ref.quantize_fp8(y, "row", compute_dtype=F32)[1], what="other values")


def test_float64_and_refusals() -> None:
    x = random_tensor((4, 200), torch.float64, seed=1)
    codes, scale = kernelgen.quantize_fp8(x, "row")
    torch.testing.assert_close(codes.double() * scale, x, rtol=0.07, atol=1e-2)
    with pytest.raises(NoBackendError, match="dtype fp64"):
        kernelgen.quantize_fp8(x, backend="generated")
    x = x.float()
    for arguments, error, words in (
        (dict(recipe="column"), SettingsError, "recipe: got 'column'"), (dict(dtype=FP16), DtypeError, "dtype: got torch.float16"),
        (dict(activation="swish"), SettingsError, "activation: got 'swish'"), (dict(out=x), DtypeError, "the pair"),
        (dict(out=(codes, scale[:, 0])), ShapeError, "out scale"), (dict(out=(codes[:, :100], scale)), ShapeError, "out codes"),
    ):
        with pytest.raises(error, match=words):
            kernelgen.quantize_fp8(x, **({"recipe": "row"} | arguments))
    for bad, error, words in ((x.int(), DtypeError, "x: got torch.int32"), (x[0], ShapeError, "expected"), (x.t(), LayoutError, "stride")):
        with pytest.raises(error, match=words):
            kernelgen.quantize_fp8(bad)
    with pytest.raises(ShapeError, match="even"):
        kernelgen.quantize_fp8(x[:, :3], activation="swiglu")
    own = x.view(torch.float8_e4m3fn)
    for out in ((own[:, :200], scale), (codes, x[:, :1])):
        with pytest.raises(LayoutError, match="got memory that x lies in"):
            kernelgen.quantize_fp8(x, "row", out=out)
