"""gemm and the grouped products against torch.matmul, with every epilogue and fp8 recipe."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.reference import gemm, grouped_gemm, grouped_gemm_masked, pack_weight, quantize_fp8
from kernelgen.testing.data import matrix_layouts, random_tensor, random_tensors

NAN = float("nan")
E4M3 = torch.float8_e4m3fn


def close(actual: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected.double(), atol=1e-11, rtol=1e-11)


def test_gemm_by_hand() -> None:
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, -6.0]])
    out = gemm(a, b, bias=torch.tensor([1.0, 1.0]), c=torch.tensor([[10.0, 10.0]]), beta=0.5, activation="relu")
    assert out.tolist() == [[19.0, 5.0]]  # relu(13 + 1) + 5, relu(-8 + 1) + 5


@pytest.mark.parametrize(("a_shape", "b_shape"), [((5, 7), (7, 3)), ((2, 5, 7), (7, 3)), ((2, 3, 5, 7), (2, 3, 7, 4))])
def test_gemm_equals_matmul(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    a, b = random_tensors([a_shape, b_shape], torch.bfloat16, seed=1)
    expected = a.double() @ b.double()
    close(gemm(a, b), expected)
    bias, c = random_tensor(b_shape[-1:], torch.float32, seed=2), random_tensor(expected.shape, torch.bfloat16, seed=3)
    close(gemm(a, b, bias=bias, c=c, beta=2.0, activation="gelu"),
          F.gelu(expected + bias.double()) + 2 * c.double())
    assert gemm(a, b, compute_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("gate_up", ["gate_first", "up_first", "interleaved"])
@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_gated_epilogue_halves_n(activation: str, gate_up: str) -> None:
    a, b, bias = random_tensors([(5, 7), (7, 8), (8,)], torch.float64, seed=4)
    h = a @ b + bias
    halves = {"gate_first": (h[:, :4], h[:, 4:]), "up_first": (h[:, 4:], h[:, :4]),
              "interleaved": (h[:, ::2], h[:, 1::2])}[gate_up]
    act = F.silu if activation == "swiglu" else F.gelu
    close(gemm(a, b, bias=bias, activation=activation, gate_up=gate_up), act(halves[0]) * halves[1])
    residual = random_tensor((5, 4), torch.float64, seed=5)
    close(gemm(a, b, bias=bias, activation=activation, gate_up=gate_up, c=residual), act(halves[0]) * halves[1] + residual)
    with pytest.raises(ShapeError, match="c: got shape"):
        gemm(a, b, activation=activation, c=torch.zeros(5, 8))


def test_beta_zero_does_not_read_c() -> None:
    a, b = random_tensors([(2, 3), (3, 4)], torch.float32, seed=5)
    close(gemm(a, b, c=torch.full((2, 4), NAN), beta=0.0), a.double() @ b.double())
    assert torch.isnan(gemm(a, b, c=torch.full((2, 4), NAN))).all()


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_empty_sizes(m: int, n: int, k: int) -> None:
    """C02, C03: K = 0 gives the epilogue of zeros, every other empty size an empty result."""
    a, b, bias = torch.zeros(m, k), torch.zeros(k, n), torch.arange(n, dtype=torch.float32)
    assert torch.equal(gemm(a, b, bias=bias), bias.double().expand(m, n))
    codes, scale = gemm(a, b, bias=bias, out_scale="block_1x128")
    assert codes.shape == (m, n) and codes.dtype == E4M3 and scale.shape == (m, math.ceil(n / 128))


def test_layouts_of_the_operands() -> None:
    """C22: transposed, sliced, strided and misaligned operands hold the same values; a stride of 0 repeats them."""
    a, b = random_tensors([(6, 9), (9, 5)], torch.bfloat16, seed=6)
    expected = a.double() @ b.double()
    for name, x in matrix_layouts(a).items():
        for other, y in matrix_layouts(b).items():
            torch.testing.assert_close(gemm(x, y), expected, msg=f"{name}, {other}", atol=1e-12, rtol=1e-12)
    row = b[:1].expand(9, 5)
    close(gemm(a, row), a.double() @ row.double())


@pytest.mark.parametrize("k", [64, 128, 192, 256, 300, 320, 640, 896])
@pytest.mark.parametrize("recipe", ["tensor", "row", "block", "block_1x128"])
def test_fp8_recipes_multiply_out(recipe: str, k: int) -> None:
    """C19, C21: scales of every block count, the short last one too; M and N odd, scales in 2^-8 .. 2^8."""
    m, n = 65, 136
    a8, b8 = (x.to(E4M3) for x in random_tensors([(m, k), (k, n)], seed=k))
    kb, nb = math.ceil(k / 128), math.ceil(n / 128)
    shapes = {"tensor": ((), ()), "row": ((m, 1), (1, n)), "block": ((m, kb), (kb, nb)), "block_1x128": ((m, kb), (kb, n))}
    scale_a, scale_b = (torch.exp2(16 * torch.rand(s, generator=torch.Generator().manual_seed(k)) - 8) for s in shapes[recipe])
    full_a, full_b = a8.double(), b8.double()
    for i in range(k):
        full_a[:, i] *= scale_a if recipe == "tensor" else scale_a[:, 0] if recipe == "row" else scale_a[:, i // 128]
        full_b[i] *= {"tensor": lambda i: scale_b, "row": lambda i: scale_b[0],
                      "block": lambda i: scale_b[i // 128].repeat_interleave(128)[:n],
                      "block_1x128": lambda i: scale_b[i // 128]}[recipe](i)
    result = gemm(a8, b8.t().contiguous().t(), scale_a=scale_a, scale_b=scale_b)
    torch.testing.assert_close(result, full_a @ full_b, atol=1e-8, rtol=1e-12)
    close(gemm(a8, b8, scale_a=scale_a.t().contiguous().t() if scale_a.dim() == 2 else scale_a, scale_b=scale_b), result)


def test_quantised_operands_approximate_the_product() -> None:
    """quantize_fp8 and gemm agree on what the recipes mean: the relative error is fp8 noise, about 0.04."""
    a, w = random_tensors([(65, 320), (136, 320)], torch.float32, seed=7)
    w = w * torch.exp2(torch.arange(136) % 9 - 4.0)[:, None]
    exact = a.double() @ w.double().t()
    for ra, rb in (("tensor", "tensor"), ("row", "row"), ("block_1x128", "block_128x128"), ("block_1x128", "block_1x128")):
        a8, sa = quantize_fp8(a, ra)
        w8, sb = quantize_fp8(w, rb)
        out = gemm(a8, w8.t(), scale_a=sa, scale_b=sb.t() if sb.dim() else sb)
        assert (out - exact).norm() / exact.norm() < 0.05, (ra, rb)


def test_scales_of_an_undocumented_form_are_refused() -> None:
    """C23."""
    a8, b8 = torch.zeros(4, 256).to(E4M3), torch.zeros(256, 300).to(E4M3)
    for bad in (torch.ones(4), torch.ones(1, 4), torch.ones(4, 3), torch.ones(1, 4, 1)):
        with pytest.raises(ShapeError, match="scale_a"):
            gemm(a8, b8, scale_a=bad)
    for bad in (torch.ones(300), torch.ones(300, 1), torch.ones(3, 2), torch.ones(1, 3)):
        with pytest.raises(ShapeError, match="scale_b"):
            gemm(a8, b8, scale_b=bad)
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(DtypeError, match="expected float32"):
            gemm(a8, b8, scale_a=torch.ones((), dtype=dtype))
    for scale in (2.0, torch.tensor(2.0), torch.tensor([2.0])):
        assert torch.equal(gemm(a8, b8, scale_a=scale), torch.zeros(4, 300, dtype=torch.float64))


def test_bad_calls_are_named() -> None:
    a, b = torch.zeros(4, 8), torch.zeros(8, 6)
    with pytest.raises(DtypeError, match=r"a torch.float32 and b torch.bfloat16"):
        gemm(a, b.bfloat16())
    with pytest.raises(ShapeError, match=r"\(4, 8\).*\(6, 8\)"):
        gemm(a, b.t())
    with pytest.raises(ShapeError, match="bias"):
        gemm(a, b, bias=torch.zeros(4))
    with pytest.raises(ShapeError, match="c: got shape"):
        gemm(a, b, c=torch.zeros(6))
    with pytest.raises(SettingsError, match="activation"):
        gemm(a, b, activation="swish")
    with pytest.raises(SettingsError, match="accumulate"):
        gemm(a, b, accumulate="float16")
    with pytest.raises(SettingsError, match="out_scale"):
        gemm(a, b, out_scale="block_128x128")
    with pytest.raises(ShapeError, match="even last dimension"):
        gemm(a, b[:, :5], activation="swiglu")


@pytest.mark.parametrize("out_scale", ["tensor", "row", "block_1x128"])
def test_requantised_result(out_scale: str) -> None:
    a, b = random_tensors([(5, 8), (8, 300)], torch.float32, seed=8)
    codes, scale = gemm(a, b, activation="silu", out_scale=out_scale, out_dtype=torch.float8_e5m2)
    expected = quantize_fp8(F.silu(a.double() @ b.double()), out_scale, dtype=torch.float8_e5m2)
    assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scale, expected[1])


def test_packed_weight_as_b() -> None:
    a, w = random_tensors([(5, 70), (6, 70)], torch.bfloat16, seed=9)
    for packed in (pack_weight(w, "int4", group_size=32), pack_weight(w, "mxfp4"), pack_weight(w, symmetric=False)):
        close(gemm(a, packed), a.double() @ packed.dequantize().t())
        assert (gemm(a, packed) - a.double() @ w.double().t()).abs().max() > 1e-3
    with pytest.raises(DtypeError, match="scale_b"):
        gemm(a, pack_weight(w), scale_b=torch.tensor(1.0))


GROUPS = [[0, 0, 0, 0], [0, 5, 0, 3], [7], [20, 0, 5, 19], [1, 1, 1, 102], [0, 0, 40, 0]]


@pytest.mark.parametrize("sizes", GROUPS)
@pytest.mark.parametrize("spare", [0, 3])
def test_row_groups_equal_a_loop(sizes: list[int], spare: int) -> None:
    """C04, C06: uneven and empty groups; rows past the last group are never read nor written."""
    total, groups = sum(sizes), len(sizes)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    a, b = random_tensors([(total + spare, 9), (groups, 9, 6)], torch.float64, seed=10)
    a[total:] = NAN
    bias, c = random_tensors([(groups, 6), (total + spare, 6)], torch.float64, seed=11)
    before = random_tensor((total + spare, 6), torch.float64, seed=12)
    out = grouped_gemm(a, b, ends, bias=bias, c=c, beta=0.5, activation="silu", initial=before)
    first = 0
    for e, size in enumerate(sizes):
        rows = slice(first, first + size)
        close(out[rows], F.silu(a[rows] @ b[e] + bias[e]) + 0.5 * c[rows])
        first += size
    assert torch.equal(out[total:], before[total:])
    assert torch.isnan(grouped_gemm(a, b, ends)[total:]).all()
    transposed = b.mT.contiguous().mT
    close(grouped_gemm(a, transposed, ends.tolist())[:total], grouped_gemm(a, b, ends)[:total])


def test_row_groups_with_gates_and_scales() -> None:
    a8, b8 = random_tensor((6, 256), seed=13).to(E4M3), random_tensor((3, 256, 136), seed=14).to(E4M3)
    scale_a, ends = torch.rand(6, 2) + 0.5, [2, 2, 6]
    for shape in ((), (3,), (3, 1, 136), (3, 2, 2), (3, 2, 136)):
        scale_b = torch.rand(shape) + 0.5
        out = grouped_gemm(a8, b8, ends, scale_a=scale_a, scale_b=scale_b, activation="swiglu", gate_up="interleaved")
        for e, rows in ((0, slice(0, 2)), (2, slice(2, 6))):
            one = scale_b[e] if scale_b.dim() else scale_b
            close(out[rows], gemm(a8[rows], b8[e], scale_a=scale_a[rows], scale_b=one, activation="swiglu",
                                  gate_up="interleaved"))
    codes, scale = grouped_gemm(a8, b8, ends, scale_a=scale_a, scale_b=torch.ones(3), out_scale="row")
    assert codes.dtype == E4M3 and scale.shape == (6, 1)


@pytest.mark.parametrize("sizes", GROUPS)
def test_k_groups_equal_a_loop(sizes: list[int]) -> None:
    """Weight gradients: an empty group gives zeros, columns past the last group are never read."""
    total, groups = sum(sizes), len(sizes)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    a, b = random_tensors([(5, total + 2), (total + 2, 6)], torch.float64, seed=15)
    a[:, total:], b[total:] = NAN, NAN
    out = grouped_gemm(a, b, ends)
    assert out.shape == (groups, 5, 6)
    for e, size in enumerate(sizes):
        keys = slice(int(ends[e]) - size, int(ends[e]))
        close(out[e], a[:, keys] @ b[keys])
        assert size or torch.equal(out[e], torch.zeros(5, 6, dtype=torch.float64))


@pytest.mark.parametrize("counts", [[0, 0, 0], [4, 0, 2], [1, 4, 4]])
def test_masked_groups(counts: list[int]) -> None:
    a, b = random_tensors([(3, 4, 9), (3, 9, 6)], torch.float64, seed=16)
    before, bias = random_tensors([(3, 4, 3), (6,)], torch.float64, seed=17)
    for e, n in enumerate(counts):
        a[e, n:] = NAN
    out = grouped_gemm_masked(a, b, torch.tensor(counts, dtype=torch.int32), bias=bias, activation="swiglu", initial=before)
    assert out.shape == (3, 4, 3)
    for e, n in enumerate(counts):
        close(out[e, :n], gemm(a[e, :n], b[e], bias=bias, activation="swiglu"))
        assert torch.equal(out[e, n:], before[e, n:])


def test_bad_groups_are_refused() -> None:
    a, b = torch.zeros(4, 8), torch.zeros(2, 8, 6)
    for ends in ([2], [3, 2], [1, 5], [-1, 4]):
        with pytest.raises(ShapeError, match="offsets"):
            grouped_gemm(a, b, ends)
    with pytest.raises(DtypeError, match="offsets"):
        grouped_gemm(a, b, torch.tensor([1.0, 2.0]))
    with pytest.raises(ShapeError, match="bias"):
        grouped_gemm(a, b, [1, 4], bias=torch.zeros(3, 6))
    for counts in ([1], [1, 5], [-1, 0]):
        with pytest.raises(ShapeError, match="counts"):
            grouped_gemm_masked(torch.zeros(2, 4, 8), b, counts)
    assert grouped_gemm(a[:0], torch.zeros(0, 8, 6), []).shape == (0, 6)
    assert grouped_gemm_masked(torch.zeros(0, 4, 8), torch.zeros(0, 8, 6), []).shape == (0, 4, 6)


def test_grouped_mm_of_torch_has_the_same_convention() -> None:
    if not hasattr(F, "grouped_mm") and not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    native = getattr(F, "grouped_mm", None) or torch._grouped_mm
    a, b = random_tensors([(12, 16), (3, 16, 8)], torch.bfloat16, seed=18)
    ends = torch.tensor([2, 2, 12], dtype=torch.int32)
    torch.testing.assert_close(native(a, b, offs=ends).double(), grouped_gemm(a, b, ends), atol=0.1, rtol=0.02)
