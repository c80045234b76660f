"""Adapters of matrix products on a GPU: each against the float64 reference, on the operands that our own kernels are tested with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.dispatch.libraries import Library
from kernelgen.errors import NoBackendError
from kernelgen.testing.data import poison_, random_tensor
from kernelgen.testing.gemm import check_gemm, operands, scales_of
from kernelgen.testing.grouped import check_grouped, grouped_operands, grouped_scales
from kernelgen.testing.tolerance import assert_close_to_reference

BF16, FP16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CUDA = "cuda"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs sm_90")
needs_triton = pytest.mark.skipif(Library("triton", "triton").version() is None, reason="needs triton")
SIZES = ((128, 256, 192), (33, 48, 80), (13, 17, 19), (1, 64, 64), (64, 1, 64), (1, 1, 1), (5, 7, 1), (300, 40, 2048))
FP8_SIZES = ((128, 256, 512), (1, 16, 128), (2, 128, 256), (13, 48, 400), (127, 272, 384), (33, 144, 640), (3, 16, 16), (5, 64, 1152),
             (0, 16, 128), (16, 16, 0))
EDGES = ((0, 16, 32), (16, 0, 32), (16, 32, 0))


def _bias(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return random_tensor((n,), dtype, seed=seed, device=CUDA)


@pytest.fixture(params=["cublaslt", pytest.param("triton", marks=needs_triton)])
def portable(request: pytest.FixtureRequest) -> Iterator[str]:
    """A backend for every product without scales."""
    yield request.param


@pytest.mark.parametrize("dtype", (BF16, FP16, F32, F64), ids=str)
def test_plain_products_of_every_size_and_order(portable: str, dtype: torch.dtype, seed: int) -> None:
    for m, n, k in (*SIZES, *EDGES):
        for order, pad in (("rc", 0), ("rr", 1), ("cr", 8), ("cc", 2))[: 1 if k > 1000 else 4]:
            a, b = operands(m, n, k, dtype, seed=seed, device=CUDA, order=order, pad=pad)
            check_gemm(a, b, seed=seed, what=f"{m}x{n}x{k} {order} {pad}", backend=portable, out_pad=pad)


@pytest.mark.parametrize("activation", (None, "relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"))
def test_epilogues(portable: str, activation: str | None, seed: int) -> None:
    for dtype, side in ((BF16, BF16), (FP16, FP16), (BF16, F32), (F32, F32)):
        for m, n, k in ((128, 256, 192), (33, 48, 80), (13, 18, 19), (1, 64, 64), (7, 16, 0), (40, 1, 64)):
            if (dtype == F32 and k == 192) or (n == 1 and activation in ("swiglu", "geglu")):
                continue
            a, b = operands(m, n, k, dtype, seed=seed, device=CUDA, order="rc")
            outputs = n // 2 if activation in ("swiglu", "geglu") else n
            c = random_tensor((m, outputs), side, seed=seed + 2, device=CUDA)
            gate = dict(gate_up="interleaved") if activation == "swiglu" else {}
            for features in (dict(bias=_bias(n, side, seed)), dict(c=c, beta=0.5), dict(bias=_bias(n, side, seed), c=c, beta=-1.25), {}):
                check_gemm(a, b, seed=seed, what=f"{dtype} {m}x{n}x{k} {sorted(features)}", backend=portable, activation=activation,
                           **gate, **features)


@pytest.mark.parametrize("out_dtype", (BF16, FP16, F32), ids=str)
def test_types_of_the_output(portable: str, out_dtype: torch.dtype, seed: int) -> None:
    for dtype in (BF16, FP16, F32):
        a, b = operands(40, 56, 96, dtype, seed=seed, device=CUDA, order="rc")
        check_gemm(a, b, seed=seed, what=f"{dtype} -> {out_dtype}", backend=portable, out_dtype=out_dtype)
        check_gemm(a, b, seed=seed, what=f"{dtype} -> {out_dtype} bias", backend=portable, out_dtype=out_dtype, bias=_bias(56, F32, seed))


def test_batches(portable: str, seed: int) -> None:
    for batch, batched_b in ((3, True), (3, False), (0, True), (1, True), (70000, True)):
        m, n, k = (4, 8, 8) if batch > 3 else (20, 24, 40)
        a, b = operands(m, n, k, BF16, seed=seed, device=CUDA, batch=batch, batched_b=batched_b, order="rc")
        check_gemm(a, b, seed=seed, what=f"batch {batch} {batched_b}", backend=portable)
        if batch == 3:
            for activation in (None, "relu", "gelu_tanh"):
                check_gemm(a, b, seed=seed, what=f"batch {batch} {activation}", backend=portable, bias=_bias(n, BF16, seed),
                           activation=activation)
            c = random_tensor((3, m, n), BF16, seed=seed, device=CUDA)
            check_gemm(a, b, seed=seed, what="batch, c", backend=portable, c=c, beta=0.25)
    heads = random_tensor((20, 6, 40), BF16, seed=seed, device=CUDA).transpose(0, 1)  # rows between those of the other entries
    _, b = operands(1, 24, 40, BF16, seed=seed, device=CUDA, batch=6, batched_b=True)
    check_gemm(heads, b, seed=seed, what="heads", backend=portable)
    check_gemm(heads, b[0], seed=seed, what="heads, one b", backend=portable, bias=_bias(24, BF16, seed))


def test_overlapping_rows_and_no_strides_at_all(portable: str, seed: int) -> None:
    line = random_tensor((4096,), BF16, seed=seed, device=CUDA)
    a, b = line.as_strided((40, 64), (8, 1)), line.as_strided((64, 48), (1, 16))
    check_gemm(a, b, seed=seed, what="overlapping", backend=portable)
    check_gemm(line[:64].expand(17, 64), line[:48].expand(64, 48), seed=seed, what="stride 0", backend=portable)


def test_a_zero_beta_reads_no_c_and_out_may_be_c(portable: str, seed: int) -> None:
    a, b = operands(33, 48, 80, BF16, seed=seed, device=CUDA, order="rc")
    c = poison_(torch.empty(33, 48, dtype=BF16, device=CUDA))
    assert kernelgen.gemm(a, b, c=c, beta=0.0, backend=portable).isfinite().all()
    assert kernelgen.gemm(a, b, c=c, beta=0.0, activation="silu", backend=portable).isfinite().all()
    c = random_tensor((33, 48), BF16, seed=seed + 2, device=CUDA)
    words: dict[str, Any] = dict(c=c.clone(), beta=0.5)
    exact, plain = ref.gemm(a, b, **words), ref.gemm_plain(a, b, out_dtype=BF16, **words)
    kernelgen.gemm(a, b, c=c, beta=0.5, out=c, backend=portable)
    assert isinstance(exact, torch.Tensor)
    assert_close_to_reference(c, exact, plain, what="c in place", seed=seed)


@pytest.mark.parametrize("activation", (None, "relu", "gelu_tanh", "silu"))
def test_nan_and_infinity_go_their_way(portable: str, activation: str | None, seed: int) -> None:
    for dtype in (BF16, F32):
        a, b = operands(24, 32, 64, dtype, seed=seed, device=CUDA, order="rc")
        a[0, 3], a[1, 5], a[2, 7] = float("nan"), float("inf"), -float("inf")
        check_gemm(a, b, seed=seed, what=f"{dtype} {activation}", backend=portable, activation=activation, bias=_bias(32, dtype, seed))


def test_gradients_are_those_of_torch(seed: int) -> None:
    for features in ({}, dict(bias=_bias(48, BF16, seed)), dict(c=random_tensor((33, 48), BF16, seed=seed, device=CUDA), beta=0.5)):
        a, b = (x.requires_grad_() for x in operands(33, 48, 80, BF16, seed=seed, device=CUDA))
        got = kernelgen.gemm(a, b, backend="cublaslt", **features)
        weight = random_tensor((33, 48), BF16, seed=seed + 5, device=CUDA)
        found = torch.autograd.grad((got * weight).sum(), (a, b))
        for mine, left, right, exact in ((found[0], weight, b.mT, None), (found[1], a.mT, weight, None)):
            exact = left.detach().double() @ right.detach().double()
            assert_close_to_reference(mine, exact, (left.detach().float() @ right.detach().float()), what="gradient", seed=seed)
    with pytest.raises(NoBackendError, match="gradient"):
        kernelgen.gemm(a, b, activation="silu", backend="cublaslt")


# -- fp8


def _fp8(m: int, n: int, k: int, seed: int, types: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3), **words: Any) -> Any:
    a, b = operands(m, n, k, F32, seed=seed, device=CUDA, order="rc", **words)
    return a.contiguous().to(types[0]), b.mT.contiguous().to(types[1]).mT


@on_hopper
@pytest.mark.parametrize("columns_first", (False, True))
@pytest.mark.parametrize("recipe", ("tensor", "row", "block_128x128", "block_1x128"))
def test_fp8_recipes(recipe: str, columns_first: bool, seed: int) -> None:
    for m, n, k in FP8_SIZES:
        a, b = _fp8(m, n, k, seed)
        scales = scales_of(a, b, recipe, seed=seed, columns_first=columns_first)
        check_gemm(a, b, seed=seed, what=f"{m}x{n}x{k}", backend="cublaslt", **scales)


@on_hopper
@pytest.mark.parametrize("recipe", ("tensor", "row", "block_128x128", "block_1x128"))
def test_fp8_epilogues_and_outputs(recipe: str, seed: int) -> None:
    m, n, k = 37, 160, 384
    a, b = _fp8(m, n, k, seed)
    scales = scales_of(a, b, recipe, seed=seed)
    for out_dtype in (BF16, FP16):
        c = random_tensor((m, n), out_dtype, seed=seed + 3, device=CUDA)
        every: tuple[dict[str, Any], ...] = (
            {}, dict(bias=_bias(n, out_dtype, seed)), dict(bias=_bias(n, F32, seed)), dict(c=c, beta=0.5),
            dict(activation="gelu_tanh", bias=_bias(n, BF16, seed)), dict(activation="swiglu"))
        for features in every[: 6 if out_dtype == BF16 else 4]:  # the sums of fp8 have some 14 bits, which a gate would square
            check_gemm(a, b, seed=seed, what=f"{out_dtype} {sorted(features)}", backend="cublaslt", out_dtype=out_dtype, **features,
                       **scales)
    check_gemm(a, b, seed=seed, what="odd bias", backend="cublaslt", bias=_bias(n + 1, BF16, seed)[1:], out_pad=3, **scales)
    ones = {name: torch.full_like(scale, 0.5) for name, scale in scales.items()}
    whole, other = ((torch.arange(x.numel(), device=CUDA).reshape(x.shape) * step % 7 - 3).to(E4M3) for x, step in ((a, 5), (b.mT, 11)))
    exact = ref.gemm(whole, other.mT, **ones)
    assert isinstance(exact, torch.Tensor)
    assert torch.equal(kernelgen.gemm(whole, other.mT, out_dtype=F32, backend="cublaslt", **ones), exact.float())
    if recipe == "row":
        for name in ("scale_a", "scale_b"):
            check_gemm(a, b, seed=seed, what=f"one {name}", backend="cublaslt", **scales | {name: scales[name].flatten()[0].clone()})
        wide = torch.rand(m + 1, 1, device=CUDA) + 0.5
        check_gemm(a, b, seed=seed, what="odd scale", backend="cublaslt", **scales | {"scale_a": wide[1:]})


@on_hopper
@pytest.mark.parametrize("types", ((E4M3, E5M2), (E5M2, E4M3)), ids=str)
@pytest.mark.parametrize("recipe", ("tensor", "row", "block_128x128", "block_1x128"))
def test_fp8_types_strides_and_batches(recipe: str, types: tuple[torch.dtype, torch.dtype], seed: int) -> None:
    k = 512 if recipe == "block_128x128" else 256
    a, b = _fp8(40, 64, k, seed, types)
    check_gemm(a, b, seed=seed, what="types", backend="cublaslt", **scales_of(a, b, recipe, seed=seed))
    a, b = _fp8(24, 64, k, seed, types, batch=3)
    check_gemm(a, b, seed=seed, what="one b", backend="cublaslt", **scales_of(a, b, recipe, seed=seed))
    wide = a.new_empty(24, k + 16)
    wide[:, :k].copy_(a[0])
    check_gemm(wide[:, :k], b, seed=seed, what="padded rows", backend="cublaslt", **scales_of(a[0], b, recipe, seed=seed))
    one = a[0, :1].as_strided((1, k), (3, 1))
    check_gemm(one, b, seed=seed, what="odd stride of one row", backend="cublaslt", **scales_of(one, b, recipe, seed=seed))


# -- groups


def _groups(grouping: str) -> tuple[tuple[list[int], int, int], ...]:
    odd = ([3, 0, 17, 40], 24, 40), ([0, 0], 16, 16), ([1] * 40, 64, 32), ([129, 1, 0, 64], 136, 72)
    return odd if grouping != "k" else (([3, 0, 17, 40], 24, 40), ([1, 1], 48, 64), ([130, 0], 136, 72))


@on_hopper
@pytest.mark.parametrize("grouping, order", (("rows", "rc"), ("rows", "rr"), ("k", "cr"), ("masked", "rc"), ("masked", "cr")))
def test_groups_of_16_bits(grouping: str, order: str, seed: int) -> None:
    for sizes, n, k in _groups(grouping):
        for rest in (0, 5):
            a, b, ends = grouped_operands(grouping, sizes, n, k, BF16, seed=seed, device=CUDA, order=order, pad=8, rest=rest)
            check_grouped(grouping, a, b, ends, seed=seed, what=f"{sizes} {n} {k} {order}", backend="cublaslt")


@needs_triton
@pytest.mark.parametrize("dtype", (F32, F64, BF16), ids=str)
@pytest.mark.parametrize("grouping", ("rows", "masked", "k"))
def test_groups_by_triton(grouping: str, dtype: torch.dtype, seed: int) -> None:
    for sizes, n, k in _groups(grouping):
        a, b, ends = grouped_operands(grouping, sizes, n, k, dtype, seed=seed, device=CUDA, order="rc", pad=1)
        columns = k if grouping == "k" else n
        for features in ({}, dict(activation="geglu", bias=random_tensor((len(sizes), columns), dtype, seed=seed, device=CUDA))):
            check_grouped(grouping, a, b, ends, seed=seed, what=f"{sizes} {n} {k}", backend="triton", **features)


@on_hopper
@pytest.mark.parametrize("dtype", (FP16, F32, F64), ids=str)
def test_masked_groups_of_other_types_with_epilogues(dtype: torch.dtype, seed: int) -> None:
    for sizes, n, k in _groups("masked"):
        a, b, ends = grouped_operands("masked", sizes, n, k, dtype, seed=seed, device=CUDA, order="rc")
        bias = random_tensor((len(sizes), n), dtype, seed=seed, device=CUDA)
        check_grouped("masked", a, b, ends, seed=seed, what=f"{sizes}", backend="cublaslt", bias=bias, activation="swiglu")


@on_hopper
@pytest.mark.parametrize("recipe", ("tensor", "row", "expert"))
def test_groups_of_fp8(recipe: str, seed: int) -> None:
    for sizes, n, k in (([3, 0, 17, 40], 32, 64), ([0, 0], 16, 16), ([1] * 40, 64, 32), ([129, 1, 0, 64], 144, 1040)):
        a, b, ends = grouped_operands("rows", sizes, n, k, F32, seed=seed, device=CUDA, order="rc")
        a, b = a.to(E4M3), b.mT.contiguous().to(E4M3).mT
        check_grouped("rows", a, b, ends, seed=seed, what=f"{sizes}", backend="cublaslt", **grouped_scales(a, b, recipe, seed=seed))


@on_hopper
def test_ends_that_leave_the_matrix_are_cut_off(seed: int) -> None:
    a, b, _ = grouped_operands("rows", [5, 9, 4], 24, 40, BF16, seed=seed, device=CUDA, order="rc", rest=0)
    good = kernelgen.grouped_gemm(a, b, torch.tensor([5, 14, 18], dtype=torch.int32, device=CUDA), backend="cublaslt")
    wild = torch.tensor([5, 14, 2**31 - 1], dtype=torch.int32, device=CUDA)
    for backend in ("cublaslt", "triton"):
        torch.testing.assert_close(kernelgen.grouped_gemm(a, b, wild, backend=backend), good)


@on_hopper
def test_gradients_of_groups(seed: int) -> None:
    a, b, ends = grouped_operands("rows", [5, 0, 19], 24, 40, BF16, seed=seed, device=CUDA, order="rc", rest=6)
    a, b = a.requires_grad_(), b.requires_grad_()
    out = kernelgen.grouped_gemm(a, b, ends, backend="cublaslt")
    found = torch.autograd.grad(out[:24].float().square().sum(), (a, b))
    x, w = a.detach().float().requires_grad_(), b.detach().float().requires_grad_()
    near = torch.cat([x[:5] @ w[0], x[5:24] @ w[2]])
    wanted = torch.autograd.grad(near.square().sum(), (x, w))
    for got, want in zip(found, wanted):
        torch.testing.assert_close(got.float(), torch.nan_to_num(want), rtol=2e-2, atol=2e-2 * float(torch.nan_to_num(want).abs().max()))


@on_hopper
@pytest.mark.parametrize("form", ("gemm", "row", "block_128x128", "grouped"))
def test_calls_can_be_captured(form: str, seed: int) -> None:
    out = torch.empty(24, 64, dtype=BF16, device=CUDA)
    if form == "grouped":
        a, b, ends = grouped_operands("rows", [5, 19], 64, 128, BF16, seed=seed, device=CUDA, order="rc", rest=0)
        args: tuple[Any, ...] = (a, b, ends)
        words: dict[str, Any] = {}
    else:
        a, b = operands(24, 64, 128, BF16, seed=seed, device=CUDA, order="rc") if form == "gemm" else _fp8(24, 64, 128, seed)
        args, words = (a, b), {} if form == "gemm" else scales_of(a, b, form, seed=seed)

    def call() -> None:
        (kernelgen.grouped_gemm if form == "grouped" else kernelgen.gemm)(*args, out=out, backend="cublaslt", **words)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    a.copy_(random_tensor(a.shape, F32, seed=seed + 9, device=CUDA).to(a.dtype))
    if form == "grouped":
        ends[0] = 11
    graph.replay()
    replayed = out.clone()
    call()
    assert torch.equal(out, replayed)
