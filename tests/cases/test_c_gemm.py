"""Group C of the public bug cases, products: empty operands, uneven groups, scales of last blocks, layouts, scales of wrong forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelgen
from kernelgen.errors import DeviceError, DtypeError, ShapeError
from kernelgen.kernels.gemm import gemm_cpu
from kernelgen.testing.data import column_major, every_second_row, offset_by_one, poisoned_empty, random_tensor, seed_of
from kernelgen.testing.gemm import check_gemm, operands, scales_of
from kernelgen.testing.grouped import check_grouped, grouped_operands, grouped_scales
from kernelgen.testing.tolerance import assert_bits_equal

F32, BF16, FP16, E4M3 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
BACKENDS = ("generated", "torch", "reference")
RECIPES = ("tensor", "row", "block_1x128", "block_128x128")


# C01, C02, C03: nothing to do


def test_c01_products_of_no_rows() -> None:
    """An idle rank calls with zero tokens: an empty result of the right kind, from every backend."""
    for backend in BACKENDS:
        out = kernelgen.gemm(torch.zeros(0, 256, dtype=BF16), torch.zeros(256, 64, dtype=BF16), backend=backend)
        assert out.shape == (0, 64) and out.dtype == BF16 and out.device.type == "cpu"


def test_c02_every_optional_output_of_no_tokens() -> None:
    """Shapes of scales are counted, never inferred from zero elements."""
    x = torch.zeros(0, 256, dtype=BF16)
    shapes = {"tensor": (), "row": (0, 1), "block_1x128": (0, 2), "block_128x128": (0, 2)}
    for backend in ("generated", "reference"):
        for recipe, shape in shapes.items():
            codes, scale = kernelgen.quantize_fp8(x, recipe, backend=backend)
            assert codes.shape == (0, 256) and codes.dtype == E4M3 and scale.shape == shape and scale.dtype == F32
        for recipe in RECIPES[:3]:
            codes, scale = kernelgen.gemm(x, torch.zeros(256, 300, dtype=BF16), out_scale=recipe, backend=backend)
            assert codes.shape == (0, 300) and scale.shape == {"block_1x128": (0, 3)}.get(recipe, shapes[recipe])
        ends = torch.zeros(4, dtype=torch.int32)
        codes, scale = kernelgen.grouped_gemm(x, torch.zeros(4, 256, 300, dtype=BF16), ends, out_scale="row", backend=backend)
        assert codes.shape == (0, 300) and scale.shape == (0, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_c03_empty_extents_mean_the_same_everywhere(backend: str) -> None:
    """M, N, K or the batch 0: same shape, and for K = 0 the epilogue of zeros."""
    for m, n, k in ((0, 6, 4), (5, 0, 4), (5, 6, 0), (0, 0, 0)):
        a, b, bias, c = torch.zeros(m, k), torch.zeros(k, n), random_tensor((n,), seed=1), random_tensor((m, n), seed=2)
        out = kernelgen.gemm(a, b, out=poisoned_empty((m, n)), backend=backend)
        assert out.shape == (m, n) and bool((out == 0).all())
        out = kernelgen.gemm(a, b, bias=bias, activation="relu", c=c, beta=0.5, out=poisoned_empty((m, n)), backend=backend)
        torch.testing.assert_close(out, bias.relu().expand(m, n) + 0.5 * c)
    assert kernelgen.gemm(torch.zeros(0, 5, 4), torch.zeros(0, 4, 6), backend=backend).shape == (0, 5, 6)


def test_c03_no_groups() -> None:
    for backend in ("generated", "reference"):
        none = torch.zeros(0, dtype=torch.int32)
        assert kernelgen.grouped_gemm(torch.zeros(4, 6), torch.zeros(0, 6, 5), none, backend=backend).shape == (4, 5)
        assert kernelgen.grouped_gemm(torch.zeros(4, 6), torch.zeros(6, 5), none, backend=backend).shape == (0, 4, 5)
        assert kernelgen.grouped_gemm_masked(torch.zeros(0, 4, 6), torch.zeros(0, 6, 5), none, backend=backend).shape == (0, 4, 5)


# C04, C06: groups of any size


@pytest.mark.parametrize("sizes", ([0, 0, 0, 0], [0, 5, 0, 3], [7]), ids=str)
def test_c04_empty_groups(sizes: list[int]) -> None:
    for grouping in ("rows", "masked", "k"):
        for order in ("rr", "rc", "cr"):  # NN, NT, TN
            a, b, ends = grouped_operands(grouping, sizes, 24, 40, BF16, seed=seed_of(sizes), order=order)
            check_grouped(grouping, a, b, ends, seed=1, what=f"{grouping} {sizes} {order}")


@pytest.mark.parametrize("sizes", ([200, 0, 56, 192], [1, 1, 1, 1021], [0, 0, 4096, 0], [3, 17, 1, 33]), ids=str)
def test_c06_uneven_groups(sizes: list[int]) -> None:
    """Each group equals the plain product of its rows, bit for bit; in bf16 and in fp8 with blocks."""
    seed = seed_of(sizes)
    a, b, ends = grouped_operands("rows", sizes, 48, 64, BF16, seed=seed, order="rc")
    out, starts = check_grouped("rows", a, b, ends, seed=seed, what=str(sizes)), [0, *ends.tolist()]
    for e in range(len(sizes)):
        alone = kernelgen.gemm(a[starts[e] : starts[e + 1]], b[e], backend="generated")
        assert_bits_equal(out[starts[e] : starts[e + 1]], alone, what=f"{sizes} group {e}")
    a, b, ends = grouped_operands("rows", sizes, 140, 150, E4M3, seed=seed, order="rc")
    check_grouped("rows", a, b, ends, seed=seed, what=f"{sizes} fp8", **grouped_scales(a, b, "block_128x128", seed=seed))


def test_c06_experts_as_a_router_fills_them() -> None:
    sizes = [round(700 / (1 + e) ** 1.1) if e % 7 else 0 for e in range(64)]
    a, b, ends = grouped_operands("rows", sizes, 48, 64, BF16, seed=3, order="rc")
    check_grouped("rows", a, b, ends, seed=3, what="a power law over 64 experts")


# C18: offsets beyond 32 bits


def test_c18_offsets_are_64_bit() -> None:
    """Strides and extents travel as 64-bit words, and a row whose offset is beyond 2^32 elements is read from where it is."""
    assert {kind for _, kind in gemm_cpu.PARAMS.fields} == {"ptr", "i64", "f64"}
    wide = (1 << 32) // 8 + 64  # rows of a so far apart that the last begins beyond 2^32 elements
    memory = torch.empty(9 * wide, dtype=torch.uint8)  # 5 GB of address space, of which nine pages are touched
    a = memory.view(E4M3).as_strided((9, 16), (wide, 1))
    values = random_tensor((9, 16), seed=1).to(E4M3)
    a.view(torch.uint8).copy_(values.view(torch.uint8))
    b, one = random_tensor((16, 8), seed=2).to(E4M3), torch.ones(())
    got = kernelgen.gemm(a, b, scale_a=one, scale_b=one, backend="generated")
    assert_bits_equal(got, kernelgen.gemm(values, b, scale_a=one, scale_b=one, backend="generated"), what="rows far apart")


# C19, C21: blocks that are not full


@pytest.mark.parametrize("k", (64, 128, 192, 256, 300, 320, 640, 896))
def test_c19_the_last_block_of_k_has_its_scale(k: int) -> None:
    """Scales far from 1: a block that takes its neighbour's, or none, is off by orders of magnitude."""
    a, b = operands(256, 256, k, E4M3, seed=k, order="rc")
    for recipe in RECIPES[2:]:
        scales = scales_of(a, b, recipe, seed=k, span=12)
        out = check_gemm(a, b, seed=k, what=f"{recipe} k={k}", **scales)
        exact = kernelgen.gemm(a, b, backend="reference", out_dtype=F32, **scales)
        assert float((out.float() - exact).norm() / exact.norm()) < 0.01
    x = random_tensor((256, k), seed=k)
    codes, scale = kernelgen.quantize_fp8(x, "block_1x128", backend="generated")
    weight, weight_scale = kernelgen.quantize_fp8(random_tensor((256, k), seed=k + 1), "block_128x128", backend="generated")
    out = kernelgen.gemm(codes, weight.t(), scale_a=scale, scale_b=weight_scale.t(), out_dtype=F32, backend="generated")
    true = x.double() @ random_tensor((256, k), seed=k + 1).double().t()
    assert float((out - true).norm() / true.norm()) < 0.06  # the noise of fp8 on both sides


@pytest.mark.parametrize("m", (1, 7, 63, 64, 65, 127, 129, 1088))
def test_c21_blocks_at_the_edges_of_m_and_n(m: int) -> None:
    for n, k in ((8, 128), (40, 256), (136, 2048), (2048, 256)):
        a, b = operands(m, n, k, E4M3, seed=m + n, order="rc")
        check_gemm(a, b, seed=m + n, what=f"{m}x{n}x{k}", **scales_of(a, b, "block_128x128", seed=m))
    a, b = operands(m, 136, 300, E4M3, seed=m, order="rc")
    check_gemm(a, b, seed=m, what=f"{m}x136x300, 1 x 128 on both sides", **scales_of(a, b, "block_1x128", seed=m))


# C22: any layout


@pytest.mark.parametrize("dtype", (BF16, E4M3), ids=str)
def test_c22_b_in_every_layout(dtype: torch.dtype) -> None:
    """Row-major, a transposed weight, a column slice, every second row, one element off, expanded: the same bits."""
    a, b = operands(33, 40, 200, dtype, seed=1)
    scales: dict[str, Any] = scales_of(a, b, "block_1x128", seed=2) if dtype == E4M3 else {}
    wanted = check_gemm(a, b, seed=1, what="row-major", **scales)
    wide = torch.cat([b.float(), b.float()], 1).to(dtype)
    for name, view in (("transposed", column_major(b)), ("column slice", wide[:, :40]), ("every second row", every_second_row(b)),
                       ("one element off", offset_by_one(b)), ("transposed slice", column_major(wide)[:, :40])):
        assert_bits_equal(kernelgen.gemm(a, view, backend="generated", **scales), wanted, what=name)
    stack = a.unsqueeze(0).expand(3, 33, 200)
    assert_bits_equal(kernelgen.gemm(stack, b, backend="generated", **scales)[2], wanted, what="expanded a")
    one_row = b[:1].expand(200, 40)
    check_gemm(a, one_row, seed=1, what="expanded b", **scales)


# C23: scales of another form


def test_c23_scales_of_any_other_form_are_refused() -> None:
    a, b = operands(4, 6, 8, E4M3, seed=1, batch=2, batched_b=True)
    one = torch.tensor(0.5)
    wanted = kernelgen.gemm(a, b, scale_a=one, scale_b=one, backend="reference")
    for good in (one, one.reshape(1)):
        for backend in ("auto", "generated", "reference"):
            got = kernelgen.gemm(a, b, scale_a=good, scale_b=one, backend=backend)
            assert_bits_equal(got, wanted, what=f"{tuple(good.shape)} {backend}")
    rows = torch.full((2, 4, 1), 0.5)
    assert_bits_equal(kernelgen.gemm(a, b, scale_a=rows, scale_b=one, backend="generated"), wanted, what="a scale for each row")
    for bad, error, words in (
        (one.half(), DtypeError, "scale_a: got torch.float16"), (one.double(), DtypeError, "scale_a: got torch.float64"),
        (0.5, DtypeError, "scale_a: got float"), (one.to("meta"), DeviceError, "scale_a is on meta"),
        (torch.full((2, 1, 1), 0.5), ShapeError, r"scale_a: got shape \(2, 1, 1\)"),
        (torch.full((4,), 0.5), ShapeError, "scale_a: got shape"), (torch.full((2,), 0.5), ShapeError, "scale_a: got shape"),
        (torch.empty(0), ShapeError, "scale_a: got shape"),
        (torch.full((3, 4, 1), 0.5), ShapeError, "scale_a: got shape"),
    ):
        for backend in ("auto", "generated", "reference"):
            with pytest.raises(error, match=words):
                kernelgen.gemm(a, b, scale_a=bad, scale_b=one, backend=backend)


def test_c23_values_of_scales_are_taken_as_they_are() -> None:
    """A negative scale is a factor like any other; a NaN reaches what it scales, and nothing else."""
    a, b = operands(9, 40, 300, E4M3, seed=1)
    scales = scales_of(a, b, "block_128x128", seed=1)
    scales["scale_a"][2] *= -1
    check_gemm(a, b, seed=1, what="negative", **scales)
    scales["scale_a"][3, 1] = float("nan")
    for m in (9, 4):
        words = scales | {"scale_a": scales["scale_a"][:m]}
        out = kernelgen.gemm(a[:m], b, backend="generated", **words)
        assert bool(out[3].isnan().all()) and bool(out[:3].isfinite().all()) and bool(out[4:].isfinite().all())
    for dtype in (BF16, FP16):
        x = random_tensor((4, 300), dtype, seed=1)
        x[1, 140] = float("inf")
        codes, scale = kernelgen.quantize_fp8(x, "block_1x128", backend="generated")
        assert scale[1].isinf().tolist() == [False, True, False] and bool(scale[[0, 2, 3]].isfinite().all())
        assert bool(codes[1, 140].float().isnan()) and bool((codes[1, 128:140].float() == 0).all())
