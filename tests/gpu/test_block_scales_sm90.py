"""fp8 products with scales of blocks by gemm/dense_sm90 and gemm/skinny_sm90 on a Hopper GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelgen import build
from kernelgen.kernels.gemm import dense_sm90, skinny_sm90
from kernelgen.kernels.gemm.dense_sm90 import Config
from kernelgen.kernels.gemm.skinny_sm90 import Config as Skinny
from kernelgen.targets import target_of
from kernelgen.testing.mma_products import Product, make, problem_of, run_product

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")

RECIPES = ("block_128x128", "block_1x128")
DENSE = (Config(1, 2, 128, 5), Config(1, 2, 192, 4, parts=2), Config(2, 2, 128, 4, parts=2, slabs=1), Config(1, 2, 160, 5, parts=2),
         Config(1, 1, 64, 8), Config(1, 2, 128, 5, 2, 1, parts=2), Config(1, 2, 128, 4, 1, 2), Config(1, 1, 128, 8),
         Config(1, 2, 96, 5, parts=3), Config(1, 3, 64, 4, slabs=1), Config(1, 2, 256, 4, 2, 1, parts=4), Config(1, 1, 96, 10, 2, 1))
SKINNY = (Skinny(1, 8, 4, 2, 2, 2), Skinny(1, 16, 6, 2, 1, 1), Skinny(2, 16, 4, 1, 2, 4), Skinny(1, 64, 4, 2, 1, 2),
          Skinny(1, 128, 4, 1, 1, 8))


def fits(config: Config | Skinny, case: Product) -> bool:
    """Scales of columns of b leave no room for the sums of the largest tiles, and a thread keeps eight of them at most."""
    return not isinstance(config, Config) or bool(dense_sm90.legal(problem_of(case, make(case)[0]), target_of("cuda"), config))


def run(case: Product, config: Config | Skinny) -> None:
    family: Any = dense_sm90.FAMILY if isinstance(config, Config) else skinny_sm90.FAMILY
    run_product(case, family, target_of("cuda"), build.kernel, config, "cuda")


@pytest.mark.parametrize("scales", RECIPES)
@pytest.mark.parametrize("config", DENSE, ids=str)
def test_dense(config: Config, scales: str) -> None:
    if not fits(config, Product(64, 256, 256, scales=scales)):
        pytest.skip("too many scales in registers")
    for m, n, k in ((256, 384, 256), (37, 200, 16), (300, 1000, 400), (129, 8, 1152), (64, 2112, 640)):
        for major in ("rr", "cc"):
            run(Product(m, n, k, scales=scales, scale_major=major), config)
    run(Product(130, 264, 272, "e5m2", scales=scales), config)
    run(Product(60, 264, 35 * 128, scales=scales, scale_major="cc"), config)  # columns' scales: 32 blocks of k at a time


@pytest.mark.parametrize("scales", RECIPES)
@pytest.mark.parametrize("config", (Config(1, 2, 112, 4, split_k=2), Config(1, 1, 64, 8, split_k=4),
                                    Config(1, 2, 128, 4, parts=2, split_k=2), Config(1, 2, 88, 4, split_k=2),
                                    Config(1, 1, 48, 4, resident=2)), ids=str)
def test_shares_of_k(config: Config, scales: str) -> None:
    if not fits(config, Product(64, 256, 512, scales=scales)):
        pytest.skip("too many scales in registers")
    for m, n, k in ((256, 384, 512), (37, 200, 1168), (300, 1000, 656), (130, 8, 1168)):
        for major in ("rr", "cc"):
            run(Product(m, n, k, scales=scales, scale_major=major), config)
    if config.block_n % 16 == 0:
        run(Product(130, 768, 656, scales=scales, activation="swiglu", gate_up="interleaved", bias="bf16", c="fp32", beta=-0.5), config)


@pytest.mark.parametrize("scales", RECIPES)
@pytest.mark.parametrize("config", SKINNY, ids=str)
def test_skinny(config: Skinny, scales: str) -> None:
    for m in {1, config.tokens // 2 + 1, config.tokens, 2 * config.tokens + 3}:
        for n, k in ((256, 384), (72, 16), (1000, 1168), (8, 4096)):
            for major in ("rr", "cc"):
                run(Product(m, n, k, scales=scales, scale_major=major), config)


@pytest.mark.parametrize("scales", RECIPES)
@pytest.mark.parametrize("activation, gate_up", (
    ("silu", "gate_first"), ("swiglu", "gate_first"), ("geglu", "up_first"), ("swiglu", "interleaved")))
def test_epilogues(scales: str, activation: str, gate_up: str) -> None:
    for config in (*DENSE[:6], SKINNY[2], SKINNY[3]):
        for n in (256, 768):  # a half ends at a block of b, or within one
            case = Product(16, n, 272, scales=scales, activation=activation, gate_up=gate_up, bias="bf16")
            if not fits(config, case):
                continue
            run(case, config)
            run(replace(case, c="fp32", beta=-0.5, batch=3, batched_b=True), config)


@pytest.mark.parametrize("config", (DENSE[3], DENSE[5], SKINNY[1], SKINNY[3]), ids=str)
@pytest.mark.parametrize("scales", RECIPES)
def test_error_does_not_grow_with_k(scales: str, config: Config | Skinny) -> None:
    run(Product(16, 256, 65536, scales=scales), config)


@pytest.mark.parametrize("scales", RECIPES)
def test_exact_inputs_give_exact_bits(scales: str) -> None:
    for config in (DENSE[3], DENSE[5], SKINNY[3]):
        run(Product(40, 200, 1008, scales=scales, whole=True, out="fp32"), config)
