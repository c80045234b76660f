"""Products on a Hopper GPU by the public calls, with operands and outputs that a caller may give and nobody would choose.

Whatever is not an operand's own (padding, rows beyond counts, columns beyond groups, memory around outputs) holds NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import build
from kernelgen.kernels.gemm import grouped_sm90
from kernelgen.kernels.gemm.dense_sm90 import Config
from kernelgen.problems.gemm import GroupedGemmProblem
from kernelgen.targets import target_of
from kernelgen.tensors import GroupedGemmTensors
from kernelgen.testing.data import column_major, padded_rows, poison_, poisoned_empty, random_tensor
from kernelgen.testing.gemm import check_gemm, operands, scales_of
from kernelgen.testing.grouped import check_grouped, grouped_operands, grouped_scales
from kernelgen.testing.tolerance import assert_bits_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90")

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
CUDA = "cuda"
ODD = [200, 0, 57, 1, 131]


def kernel_of(op: str, *args: Any, **kwargs: Any) -> str:
    chosen = kernelgen.explain(op, *args, backend="generated", **kwargs).chosen
    assert chosen is not None
    return str(chosen.kernel)


def assert_codes(codes: torch.Tensor, scale: torch.Tensor, exact: torch.Tensor) -> None:
    """Of 1 x 128 blocks, by the noise of e4m3: the products' own sums of fp8 differ from float32's in the last of some 14 bits."""
    largest = torch.nn.functional.pad(exact.abs(), (0, -exact.shape[-1] % 128)).unflatten(-1, (-1, 128)).amax(-1)
    torch.testing.assert_close(scale, largest / 448, rtol=5e-3, atol=0)
    values = codes * scale.repeat_interleave(128, -1)[..., : exact.shape[-1]]
    torch.testing.assert_close(values, exact, rtol=0.07, atol=float(exact.abs().max()) / 400)


@pytest.mark.parametrize("m", (1, 50, 300))
def test_outputs_of_any_alignment(m: int) -> None:
    """Columns that are no multiple of 16 bytes, or begin anywhere: rows of out have addresses of their own, a and b keep TMA."""
    for n in (1, 45, 259):
        a, b = operands(m, n, 136, BF16, seed=n, device=CUDA, order="rc")
        assert kernel_of("gemm", a, b).endswith("_sm90")
        check_gemm(a, b, seed=n, what=f"{m}x{n}")
        bias, c = random_tensor((n,), BF16, seed=1, device=CUDA), random_tensor((m, n), F32, seed=2, device=CUDA)
        check_gemm(a, b, seed=n, what=f"{m}x{n} epilogue", bias=bias, activation="silu", c=c, beta=0.5, out_dtype=F32, out_pad=3)
    a, b = operands(m, 258, 200, BF16, seed=m, device=CUDA, order="rc")
    check_gemm(a, b, seed=m, what=f"{m} gated", activation="swiglu", out_pad=1)
    a, b = operands(m, 77, 400, E4M3, seed=m, device=CUDA, order="rc")
    for recipe in ("row", "block_128x128"):
        check_gemm(a, b, seed=m, what=f"{m} {recipe}", **scales_of(a, b, recipe, seed=m))
        codes, scale = kernelgen.gemm(a, b, out_scale="block_1x128", backend="generated", **scales_of(a, b, recipe, seed=m))
        exact = kernelgen.gemm(a, b, backend="reference", out_dtype=F32, **scales_of(a, b, recipe, seed=m))
        assert_codes(codes.float(), scale, exact)


def test_strides_that_copies_may_trip_over() -> None:
    """Stride 0, overlapping rows, batches inside of rows, K that ends beside NaN, columns of a wider buffer as output."""
    b = column_major(random_tensor((264, 136), BF16, seed=1, device=CUDA))
    for m in (24, 300):
        one = random_tensor((1, 264), BF16, seed=2, device=CUDA)
        windows = random_tensor((8 * m + 264,), BF16, seed=3, device=CUDA).as_strided((m, 264), (8, 1))
        inside = random_tensor((m, 3, 264), BF16, seed=4, device=CUDA).transpose(0, 1)
        shared = random_tensor((m, 264), BF16, seed=5, device=CUDA).expand(3, m, 264)
        for name, a in (("stride 0", one.expand(m, 264)), ("overlapping rows", windows), ("batch in rows", inside), ("shared", shared),
                        ("padded", padded_rows(one.expand(m, 264), 8))):
            assert kernel_of("gemm", a, b).endswith("_sm90"), name
            check_gemm(a, b, seed=1, what=f"{name} m={m}", out_pad=8)
        short = padded_rows(random_tensor((m, 200), BF16, seed=6, device=CUDA), 56)
        check_gemm(short, padded_rows(b[:200].t().contiguous(), 56).t(), seed=1, what="K beside NaN")
        stack = b.expand(3, 264, 136)
        assert_bits_equal(kernelgen.gemm(shared, stack, backend="generated"), kernelgen.gemm(shared, b, backend="generated"), what="stack")
        buffer = poisoned_empty((m, 3, 24 + 136), BF16, CUDA)
        out = buffer[..., 8:144].transpose(0, 1)
        kernelgen.gemm(inside, b, out=out, backend="generated")
        assert_bits_equal(out, kernelgen.gemm(inside.contiguous(), b, backend="generated"), what="out inside of rows")
        assert bool(buffer[..., :8].isnan().all()) and bool(buffer[..., 144:].isnan().all())


@pytest.mark.parametrize("grouping", ("rows", "masked", "k"))
def test_groups_beside_nan_with_odd_outputs(grouping: str) -> None:
    """NaN in rows beyond counts, in their scales, and in columns beyond the last group; rows of out of any alignment."""
    total = sum(ODD)
    for n, pad in ((45, 0), (136, 8), (131, 0)):
        rest = -total % 8 + 8
        order = "rc" if grouping != "k" else "cr"
        features = dict(bias=random_tensor((len(ODD), 136 if grouping == "k" else n), BF16, seed=4, device=CUDA), activation="gelu_tanh")
        if grouping == "k":  # n counts rows of the result, and its columns are 136
            order, features = ("cr" if n % 8 == 0 else "rc"), {}
        a, b, ends = grouped_operands(grouping, ODD, n, 136, BF16, seed=n, device=CUDA, order=order, rest=rest, pad=pad)
        check_grouped(grouping, a, b, ends, seed=n, what=f"{grouping} {n}", **features)
        if grouping == "k":
            continue
        assert kernel_of("grouped_gemm_masked" if grouping == "masked" else "grouped_gemm", a, b, ends).endswith("_sm90")
        a, b, ends = grouped_operands(grouping, ODD, n, 304, E4M3, seed=n, device=CUDA, order="rc", rest=rest, pad=16)
        for recipe in ("row", "block_128x128"):
            scales = grouped_scales(a, b, recipe, seed=n, columns_first=recipe != "row")
            for e, size in enumerate(ODD):
                if grouping == "masked":
                    scales["scale_a"][e, size:] = float("nan")
            if grouping == "rows":
                scales["scale_a"][total:] = float("nan")
            check_grouped(grouping, a, b, ends, seed=n, what=f"{grouping} {recipe} {n}", **scales)
        call = kernelgen.grouped_gemm_masked if grouping == "masked" else kernelgen.grouped_gemm
        exact = call(a, b, ends, out=poisoned_empty((*a.shape[:-1], n), F32, CUDA), backend="reference", **scales)
        used, blocks = ~exact.isnan().any(-1), -(-n // 128)
        codes, scale = poisoned_empty(exact.shape, E4M3, CUDA), poisoned_empty((*a.shape[:-1], blocks), F32, CUDA)
        call(a, b, ends, out=(codes, scale), out_scale="block_1x128", backend="generated", **scales)
        assert_codes(codes.float()[used], scale[used], exact[used])
        assert bool(codes.float()[~used].isnan().all()) and bool(scale[~used].isnan().all()), f"{grouping} codes {n}"


def test_ends_outside_the_matrix_write_nothing_outside() -> None:
    problem = GroupedGemmProblem(36, 100, 64, 64, "bf16", "bf16", "bf16", b_order="col", batched_b=True, grouping="rows")
    target = target_of(CUDA)
    a = random_tensor((1, 100, 64), BF16, seed=1, device=CUDA)
    b = random_tensor((36, 64, 64), BF16, seed=2, device=CUDA).mT
    for config in (Config(1, 2, 64, 8), Config(1, 2, 128, 5, pingpong=True)):
        kernel = build.kernel(grouped_sm90.spec(problem, target, config))
        for ends in ([10, -5, 2**31 - 1, 50, 0, -(2**31)], [-7, 300, 20, 400, 99, 100]):
            buffer = poisoned_empty((1, 140, 64), BF16, CUDA)
            tensors = GroupedGemmTensors(a, b, buffer[:, 20:120], torch.tensor(ends * 6, dtype=torch.int32, device=CUDA))
            grouped_sm90.bind(problem, config, kernel, tensors)(tensors)
            torch.cuda.synchronize()
            assert bool(buffer[:, :20].isnan().all()) and bool(buffer[:, 120:].isnan().all())
            assert not bool(buffer[:, 20:120].isnan().any())


def test_more_than_32_groups_most_of_them_empty() -> None:
    """Tiles are found 32 groups at a time from the group of the tile before."""
    for sizes in ([0] * 70 + [5] + [0] * 31 + [300, 0, 129], [1] * 97, [0] * 33 + [700]):
        for grouping in ("rows", "masked"):
            a, b, ends = grouped_operands(grouping, sizes, 392, 136, BF16, seed=len(sizes), device=CUDA, order="rc", rest=8)
            check_grouped(grouping, a, b, ends, seed=1, what=f"{grouping} {len(sizes)}")


def test_rows_beyond_two_billion_elements() -> None:
    """The last rows of an output of 2.3 and of an operand of 2.2 thousand million elements."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free memory")
    w = random_tensor((32776, 64), BF16, seed=1, device=CUDA)
    tall = torch.zeros(70000, 64, dtype=BF16, device=CUDA)
    tall[-5:] = random_tensor((5, 64), BF16, seed=2, device=CUDA)
    for n in (32776, 32775):
        out = kernelgen.gemm(tall, w[:n].t(), backend="generated")
        torch.testing.assert_close(out[-5:].double(), tall[-5:].double() @ w[:n].double().t(), rtol=0.01, atol=0.05)
        assert not bool(out[-300:-5].any())
        del out
    counts = [1, 0, 131072 + 3]
    a = torch.zeros(3, 131080, 5632, dtype=E4M3, device=CUDA)
    a[2, counts[2] - 3 : counts[2]] = random_tensor((3, 5632), F32, seed=3, device=CUDA).to(E4M3)
    poison_(a[2, counts[2]:])
    b, one = random_tensor((3, 136, 5632), F32, seed=4, device=CUDA).to(E4M3).mT, torch.ones((), device=CUDA)
    out = poison_(torch.empty(3, 131080, 136, dtype=BF16, device=CUDA))
    ends = torch.tensor(counts, dtype=torch.int32, device=CUDA)
    kernelgen.grouped_gemm_masked(a, b, ends, scale_a=one, scale_b=one, out=out, backend="generated")
    exact = a[2, counts[2] - 3 : counts[2]].double() @ b[2].double()
    torch.testing.assert_close(out[2, counts[2] - 3 : counts[2]].double(), exact, rtol=0.02, atol=0.5)
    assert bool(out[2, counts[2]:].isnan().all()) and bool(out[1].isnan().all()) and not bool(out[2, 131000 : counts[2] - 3].any())
