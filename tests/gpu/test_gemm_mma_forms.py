"""gemm/gemm_mma on a GPU beyond 16-bit operands: fp8 in every recipe and order, packed weights, every config of the tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelgen import build
from kernelgen.kernels.gemm import gemm_mma, mma_configs
from kernelgen.kernels.gemm.gemm_mma import Config
from kernelgen.targets import target_of
from kernelgen.testing.mma_products import Product, make, problem_of, run_product

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

FAMILY = gemm_mma.FAMILY
RECIPES = ("tensor", "row", "block_128x128", "block_1x128")


def run(case: Product, config: Config | None = None) -> torch.Tensor:
    return run_product(case, FAMILY, target_of("cuda"), build.kernel, config, "cuda")


@pytest.mark.parametrize("scales", RECIPES)
@pytest.mark.parametrize("orders", ("rc", "rr", "cr", "cc"))
def test_fp8_orders(scales: str, orders: str) -> None:
    for m, n, k, pad in ((129, 264, 400, 0), (16, 200, 1152, 0), (37, 45, 131, 1), (300, 96, 640, 4), (5, 72, 128, 8)):
        for b in ("e4m3", "e5m2"):
            run(Product(m, n, k, b=b, scales=scales, orders=orders, pad=pad, scale_major="rc" if pad else "cr"))


@pytest.mark.parametrize("k", (64, 128, 192, 256, 300, 320, 640, 896))
def test_fp8_last_block_of_k(k: int) -> None:
    """Case C19: the scales of a short last block, far from 1."""
    for scales in RECIPES[2:]:
        run(Product(256, 256, k, scales=scales))


@pytest.mark.parametrize("scales", RECIPES[2:])
def test_fp8_tails_of_m_and_n(scales: str) -> None:
    """Case C21."""
    for m in (1, 7, 63, 64, 65, 127, 129, 1088):
        for n in (8, 40, 136, 2048):
            for k in (128, 256, 2048):
                run(Product(m, n, k, scales=scales))


@pytest.mark.parametrize("scales", RECIPES)
@pytest.mark.parametrize("activation, gate_up", (
    ("silu", "gate_first"), ("swiglu", "gate_first"), ("geglu", "up_first"), ("swiglu", "interleaved")))
def test_fp8_epilogues(scales: str, activation: str, gate_up: str) -> None:
    for orders in ("rc", "rr"):
        for m, n, k in ((70, 176, 256), (16, 512, 384), (130, 288, 144)):
            case = Product(m, n, k, scales=scales, orders=orders, activation=activation, gate_up=gate_up, bias="bf16")
            run(case)
            run(replace(case, c="fp32", beta=-0.5))


@pytest.mark.parametrize("scales", RECIPES)
def test_fp8_batches(scales: str) -> None:
    for batched_b in (False, True):
        run(Product(33, 48, 300, scales=scales, batch=5, batched_b=batched_b, orders="cr"))


@pytest.mark.parametrize("scales", RECIPES)
def test_fp8_exact_inputs_give_exact_bits(scales: str) -> None:
    for orders in ("rc", "cr"):
        run(Product(130, 200, 1000, scales=scales, whole=True, out="fp32", orders=orders))
        run(Product(16, 200, 1000, scales=scales, whole=True, out="fp32", orders=orders, accumulate="fast"))


@pytest.mark.parametrize("scales", RECIPES)
def test_fp8_error_does_not_grow_with_k(scales: str) -> None:
    run(Product(64, 128, 65536, scales=scales))


def test_fp8_nan_and_infinity_stay_in_their_row_and_column() -> None:
    for b_type in ("e4m3", "e5m2"):
        case = Product(64, 96, 256, b=b_type, scales="block_128x128")
        tensors, _, _ = make(case, "cuda")
        tensors.a.view(torch.uint8)[0, 3, 7] = 0x7F
        tensors.b.view(torch.uint8)[0, 9, 5] = 0x7F if b_type == "e4m3" else 0x7C
        problem, target = problem_of(case, tensors), target_of("cuda")
        config = next(iter(FAMILY.candidates(problem, target)))
        FAMILY.bind(problem, config, build.kernel(FAMILY.spec(problem, target, config)), tensors)(tensors)
        touched = torch.zeros(64, 96, dtype=torch.bool, device="cuda")
        touched[3], touched[:, 5] = True, True
        assert torch.equal(~tensors.out[0].isfinite(), touched), b_type


@pytest.mark.parametrize("shape", ((0, 8, 128), (8, 0, 128), (5, 8, 0), (1, 1, 1)), ids=str)
def test_empty_and_tiny(shape: tuple[int, int, int]) -> None:
    for scales in RECIPES:
        run(Product(*shape, scales=scales, bias="bf16"))
    for weight in ("int4", "mxfp4"):
        run(Product(*shape, "bf16", weight=weight))


@pytest.mark.parametrize("row", mma_configs.FP8, ids=lambda row: str(row.config))
def test_every_fp8_config(row: mma_configs.Measured) -> None:
    for scales in ("row", "block_1x128"):
        run(Product(200, 264, 700, scales=scales), row.config)


@pytest.mark.parametrize("row", mma_configs.FOUR_BIT, ids=lambda row: str(row.config))
def test_every_packed_config(row: mma_configs.Measured) -> None:
    for weight in ("int4", "mxfp4"):
        run(Product(200, 264, 704, "bf16", weight=weight), row.config)


@pytest.mark.parametrize("a", ("bf16", "fp16"))
@pytest.mark.parametrize("group, symmetric", ((32, True), (32, False), (64, True), (128, False), (256, True)))
def test_int4(a: str, group: int, symmetric: bool) -> None:
    for m, n, k in ((1, 256, 4096), (16, 200, 1024), (65, 72, 416), (7, 33, 1000)):
        run(Product(m, n, k, a, out=a, weight="int4", group=group, symmetric=symmetric))


@pytest.mark.parametrize("a", ("bf16", "fp16"))
def test_mxfp4(a: str) -> None:
    for m, n, k in ((1, 256, 4096), (16, 200, 1024), (65, 72, 416), (7, 33, 1001)):
        run(Product(m, n, k, a, out=a, weight="mxfp4"))


@pytest.mark.parametrize("weight", ("int4", "mxfp4"))
def test_packed_epilogues_orders_and_batches(weight: str) -> None:
    for orders in ("rc", "cc"):
        run(Product(40, 96, 330, "bf16", weight=weight, orders=orders, activation="swiglu", bias="fp32"))
        run(Product(20, 48, 128, "fp16", out="fp16", weight=weight, orders=orders, batch=3, batched_b=True, c="fp16", beta=2.0))
        run(Product(20, 48, 130, "fp16", weight=weight, orders=orders, pad=1))


@pytest.mark.parametrize("out_scale", ("tensor", "row", "block_1x128"))
@pytest.mark.parametrize("out", ("e4m3", "e5m2"))
def test_quantized_outputs(out_scale: str, out: str) -> None:
    for a, scales in (("bf16", None), ("e4m3", "row"), ("e4m3", "block_128x128")):
        for m, n, k in ((130, 264, 256), (16, 1000, 128)):
            run(Product(m, n, k, a, scales=scales, out=out, out_scale=out_scale, bias="bf16", activation="swiglu"))
            run(Product(m, n, k, a, scales=scales, out=out, out_scale=out_scale, batch=3, pad=1))
