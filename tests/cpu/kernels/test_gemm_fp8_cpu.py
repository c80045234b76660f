"""gemm/gemm_cpu with fp8 operands and outputs: every recipe, order of operands and of scales, tail, epilogue and level."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.errors import DeviceError, DtypeError, ShapeError
from kernelgen.testing.cpu_level import LEVELS, instruction_level
from kernelgen.testing.data import column_major, offset_by_one, poisoned_empty, random_tensor, seed_of
from kernelgen.testing.gemm import check_gemm, check_quantized_gemm, operands, scales_of
from kernelgen.testing.tolerance import assert_bits_equal

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ORDERS = ("rr", "rc", "cr", "cc")
RECIPES = ("tensor", "row", "block_128x128", "block_1x128")
# Around register tiles, blocks of 128, and the thin form, which takes up to four rows.
SIZES = ((1, 1, 1), (3, 5, 2), (4, 131, 300), (2, 40, 128), (9, 33, 17), (130, 70, 63), (65, 261, 401), (33, 129, 256))


@pytest.fixture
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the public call for one instruction level."""
    with instruction_level(request.param) as isa:
        yield isa


@pytest.mark.parametrize("recipe", RECIPES)
def test_sizes_orders_and_scale_orders(recipe: str) -> None:
    for m, n, k in SIZES:
        for i, order in enumerate(ORDERS):
            what = f"{m}x{n}x{k} {order} {recipe}"
            a, b = operands(m, n, k, E4M3, seed=seed_of(what), order=order, pad=i)
            scales = scales_of(a, b, recipe, seed=seed_of(what), columns_first=i % 2 == 1)
            check_gemm(a, b, seed=seed_of(what), what=what, out_pad=3, **scales)


@pytest.mark.parametrize("level", LEVELS, indirect=True)
def test_instruction_levels(level: str) -> None:
    for recipe in ("row", "block_128x128"):
        for m in (45, 3):
            for order in ("rc", "cr"):
                what = f"{level} {recipe} m={m} {order}"
                a, b = operands(m, 150, 333, E4M3, seed=seed_of(what), order=order)
                check_gemm(a, b, seed=seed_of(what), what=what, **scales_of(a, b, recipe, seed=1))


@pytest.mark.parametrize("a_dtype, b_dtype, rows", ((E4M3, E5M2, (20,)), (E5M2, E4M3, (20, 2))), ids=str)
def test_both_types_in_any_mix(a_dtype: torch.dtype, b_dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    for m in rows:
        a, _ = operands(m, 1, 200, a_dtype, seed=1)
        _, b = operands(1, 40, 200, b_dtype, seed=2)
        check_gemm(a, b, seed=1, what=f"{a_dtype} {b_dtype} m={m}", **scales_of(a, b, "block_1x128", seed=3))


def test_one_side_may_have_a_single_scale() -> None:
    a, b = operands(9, 40, 200, E4M3, seed=1, order="rc")
    rows, one = scales_of(a, b, "row", seed=1), scales_of(a, b, "tensor", seed=2)
    check_gemm(a, b, seed=1, what="one for a", scale_a=one["scale_a"], scale_b=rows["scale_b"])
    check_gemm(a, b, seed=1, what="one for b", scale_a=rows["scale_a"], scale_b=one["scale_b"].reshape(1))


@pytest.mark.parametrize("recipe", RECIPES)
def test_batches(recipe: str) -> None:
    for batched_b in (False, True):
        for m in (9, 2):
            a, b = operands(m, 33, 140, E4M3, seed=3, batch=5, batched_b=batched_b, order="rc", pad=1)
            check_gemm(a, b, seed=3, what=f"{recipe} batched_b={batched_b} m={m}", out_pad=1, **scales_of(a, b, recipe, seed=4))
    a, b = operands(9, 33, 140, E4M3, seed=3, batch=5, batched_b=True)
    shared = scales_of(a[0], b[0], recipe, seed=4)
    check_gemm(a, b, seed=3, what=f"{recipe}, one scale tensor for the whole batch", **shared)


@pytest.mark.parametrize("activation, gate_up, recipe, rows", (
    ("silu", "gate_first", "block_128x128", (37,)), ("swiglu", "gate_first", "block_128x128", (37, 3)),
    ("geglu", "up_first", "row", (37, 3)), ("swiglu", "interleaved", "block_1x128", (37, 3)),
))
def test_epilogue(activation: str, gate_up: str, recipe: str, rows: tuple[int, ...]) -> None:
    for m in rows:
        for order in ("rc", "rr"):
            a, b = operands(m, 300, 260, E4M3, seed=m, order=order)
            outputs = 150 if activation in ("swiglu", "geglu") else 300
            bias, c = random_tensor((300,), BF16, seed=1), random_tensor((m, outputs), F32, seed=2)
            scales = scales_of(a, b, recipe, seed=3, span=3)
            what = f"{activation} {gate_up} {recipe} m={m} {order}"
            for accumulate in ("float32", "fast"):
                check_gemm(a, b, seed=m, what=f"{what} {accumulate}", bias=bias, activation=activation, gate_up=gate_up, c=c, beta=-0.5,
                           accumulate=accumulate, **scales)


@pytest.mark.parametrize("out_scale", ("tensor", "row", "block_1x128"))
def test_output_is_quantised(out_scale: str) -> None:
    for m, n in ((37, 300), (200, 131), *(((2, 128), (1, 1)) if out_scale == "row" else ())):
        a, b = operands(m, n, 150, E4M3, seed=m, order="rc")
        check_quantized_gemm(a, b, out_scale, seed=m, what=f"{m}x{n} to {out_scale}", out_pad=5, **scales_of(a, b, "block_128x128", seed=1))
    a, b = operands(40, 300, 50, BF16, seed=1, batch=3)
    check_quantized_gemm(a, b, out_scale, seed=1, what="bf16 batch", activation="swiglu", code=E5M2 if out_scale == "row" else E4M3)


def test_quantised_output_in_either_order_of_scales() -> None:
    a, b = operands(40, 300, 50, E4M3, seed=1)
    scales = scales_of(a, b, "block_128x128", seed=1)
    codes, scale = kernelgen.gemm(a, b, out_scale="block_1x128", backend="generated", **scales)
    out = (torch.empty_like(codes), poisoned_empty((3, 40)).t())
    kernelgen.gemm(a, b, out_scale="block_1x128", out=out, backend="generated", **scales)
    assert_bits_equal(out[1].contiguous(), scale, what="scales with rows contiguous")
    assert_bits_equal(out[0].view(torch.uint8), codes.view(torch.uint8), what="codes")


@pytest.mark.parametrize("k", (128, 192, 64, 127, 129, 1))
def test_last_block_of_k_is_scaled(k: int) -> None:
    """With one huge scale in the last block, leaving it out shows."""
    a, b = operands(20, 30, k, E4M3, seed=k)
    scales = scales_of(a, b, "block_128x128", seed=1)
    scales["scale_a"][:, -1] = 1e4
    for m in (20, 3):
        check_gemm(a[:m], b, seed=k, what=f"k={k} m={m}", scale_a=scales["scale_a"][:m], scale_b=scales["scale_b"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_long_sums_keep_their_accuracy(recipe: str) -> None:
    """K = 65536: the limit is that of a plain float32 evaluation, and exactly representable sums come out exact."""
    a, b = operands(9, 40, 65536, E4M3, seed=1, order="rc")
    check_gemm(a, b, seed=1, what=f"{recipe} K=65536", out_dtype=F32, **scales_of(a, b, recipe, seed=2, span=2))
    ones = torch.ones(9, 65536).to(E4M3)
    scales = {name: torch.ones_like(s) for name, s in scales_of(ones, ones.t(), recipe, seed=2).items()}
    out = kernelgen.gemm(ones, ones.t(), out_dtype=F32, backend="generated", **scales)
    assert_bits_equal(out, torch.full((9, 9), 65536.0), what="a sum of ones")


def test_exact_inputs_give_exact_bits() -> None:
    """Whole numbers and powers of two as scales: the float64 result is a float32, and every bit of it is there."""
    a = torch.randint(-8, 9, (40, 300), generator=torch.Generator().manual_seed(1)).float().to(E4M3)
    b = torch.randint(-8, 9, (300, 70), generator=torch.Generator().manual_seed(2)).float().to(E4M3)
    for recipe in RECIPES:
        scales = {name: torch.exp2(s.log2().round().clamp(-2, 2)) for name, s in scales_of(a, b, recipe, seed=3).items()}
        for m in (40, 3) if recipe == "block_128x128" else (40,):
            words = scales | {"scale_a": scales["scale_a"] if recipe == "tensor" else scales["scale_a"][:m]}
            exact = ref.gemm(a[:m], b, **words)
            assert isinstance(exact, torch.Tensor)
            got = kernelgen.gemm(a[:m], b, out_dtype=F32, backend="generated", **words)
            assert_bits_equal(got, exact.float(), what=f"{recipe} m={m}")


def test_all_codes() -> None:
    """Every code of both types against every other, NaN and infinities included."""
    codes = torch.arange(256, dtype=torch.uint8)
    for a_type, b_type in ((E4M3, E4M3), (E4M3, E5M2)):
        a, b = codes.view(256, 1).view(a_type), codes.view(1, 256).view(b_type)
        one = torch.ones(())
        exact = (a.double() @ b.double()).float()
        for m in (256, 4) if b_type == E5M2 else (256,):
            for start in range(0, 256, m if m == 256 else 64):
                part = a[start : start + m]
                got = kernelgen.gemm(part, b, scale_a=one, scale_b=one, out_dtype=F32, backend="generated")
                torch.testing.assert_close(got, exact[start : start + m], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", ((0, 5, 4), (5, 0, 4), (0, 0, 0), (5, 4, 0), (2, 4, 0)), ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_empty(shape: tuple[int, int, int], recipe: str) -> None:
    a, b = operands(*shape, E4M3, seed=1)
    scales = scales_of(a, b, recipe, seed=1)
    check_gemm(a, b, seed=1, what=f"{recipe} {shape}", **scales)
    for out_scale in ("tensor", "row", "block_1x128") if recipe == "block_128x128" and shape[0] != 2 else ():
        codes, scale = kernelgen.gemm(a, b, out_scale=out_scale, backend="generated", **scales)
        wanted = kernelgen.gemm(a, b, out_scale=out_scale, backend="reference", **scales)
        assert codes.shape == wanted[0].shape and torch.equal(scale, wanted[1]), (out_scale, scale, wanted[1])


def test_views_and_unaligned_bases() -> None:
    a, b = operands(17, 33, 141, E4M3, seed=1, order="rc")
    scales = scales_of(a, b, "block_1x128", seed=2)
    wanted = check_gemm(a, b, seed=1, what="aligned", **scales)
    moved = kernelgen.gemm(offset_by_one(a), column_major(b), backend="generated", **scales)
    assert_bits_equal(moved, wanted, what="one element off")
    wide = torch.cat([b, b], 1)[:, :33]
    assert_bits_equal(kernelgen.gemm(a, wide, backend="generated", **scales), wanted, what="a column slice")


def test_repeated_calls_take_their_own_scales() -> None:
    """A remembered signature reads the scales of each call, whatever their order."""
    a, b = operands(9, 40, 200, E4M3, seed=1, order="rc")
    for recipe in RECIPES:
        for columns_first in (False, True, False):
            for seed in (1, 2):
                scales = scales_of(a, b, recipe, seed=seed, columns_first=columns_first)
                check_gemm(a, b, seed=1, what=f"{recipe} {seed} {columns_first}", **scales)
    c = random_tensor((9, 40), BF16, seed=5)
    for beta in (0.5, 2.0):
        check_gemm(a, b, seed=1, what=f"beta {beta}", c=c, beta=beta, **scales_of(a, b, "row", seed=1))


def test_refused_scales_name_what_they_need() -> None:
    a, b = operands(8, 256, 300, E4M3, seed=1)
    good = scales_of(a, b, "row", seed=1)
    for change, error, words in (
        ({"scale_a": good["scale_a"].to(FP16)}, DtypeError, "scale_a: got torch.float16, expected float32"),
        ({"scale_a": 1.0}, DtypeError, "scale_a: got float, expected a torch.Tensor"),
        ({"scale_a": None}, DtypeError, "without scale_a and scale_b"),
        ({"scale_a": torch.ones(8, 2)}, ShapeError, r"scale_a: got shape \(8, 2\)"),
        ({"scale_a": torch.ones(1, 1)}, ShapeError, r"scale_a: got shape \(1, 1\)"),
        ({"scale_a": torch.ones(1, 8, 1)}, ShapeError, r"scale_a: got shape \(1, 8, 1\)"),
        ({"scale_b": torch.ones(3, 2)}, ShapeError, "blocks of 128 on both sides"),
        ({"scale_a": torch.ones(8, 3)}, ShapeError, "blocks of 128 on both sides"),
        ({"scale_a": torch.ones((), device="meta")}, DeviceError, "scale_a is on meta"),
    ):
        with pytest.raises(error, match=words):
            kernelgen.gemm(a, b, **(good | change))
    with pytest.raises(DtypeError, match="out_dtype: got torch.float8_e4m3fn without out_scale"):
        kernelgen.gemm(a, b, out_dtype=E4M3, **good)
