"""Few rows times packed 4-bit weights by gemm/packed_skinny on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernelgen import build
from kernelgen.kernels.gemm import packed_skinny
from kernelgen.kernels.gemm.packed_skinny import Config
from kernelgen.targets import target_of
from kernelgen.testing.mma_products import Product, problem_of, run_product
from kernelgen.testing.mma_products import make as make_product

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs sm_80 or later")


def run(case: Product, config: Config | None = None) -> None:
    run_product(case, packed_skinny.FAMILY, target_of("cuda"), build.kernel, config, "cuda")


@pytest.mark.parametrize("weight, group, symmetric", (
    ("int4", 128, True), ("int4", 128, False), ("int4", 64, True), ("int4", 64, False), ("int4", 32, True), ("int4", 32, False),
    ("mxfp4", 32, True)))
@pytest.mark.parametrize("dtype", ("bf16", "fp16"))
def test_forms(dtype: str, weight: str, group: int, symmetric: bool) -> None:
    form: dict[str, Any] = dict(weight=weight, group=group, symmetric=symmetric)
    for m in (1, 3, 8, 13, 16, 29, 32):
        for n, k in ((64, 1024), (72, 32), (8, 4192), (1000, 2336), (4096, 7168)):
            run(Product(m, n, k, dtype, **form))


@pytest.mark.parametrize("tiles", (1, 2, 4))
@pytest.mark.parametrize("warps", (4, 8, 16))
def test_configs(warps: int, tiles: int) -> None:
    target = target_of("cuda")
    for m in (1, 9, 17):
        for case in (Product(m, 328, 3104, "bf16", weight="int4"), Product(m, 136, 544, "fp16", weight="mxfp4")):
            for stages in (2, 3, 4):
                config = Config(tiles, 8 if m == 1 else 16 if m == 9 else 32, warps, stages)
                if packed_skinny.legal(problem_of(case, make_product(case)[0]), target, config):
                    run(case, config)


@pytest.mark.parametrize("activation, out, bias, c", (
    ("relu", "bf16", "bf16", None), ("gelu", "fp32", "fp32", "fp32"), ("silu", "fp16", "bf16", "fp16"), (None, "bf16", None, "fp32")))
def test_epilogue(activation: str | None, out: str, bias: str | None, c: str | None) -> None:
    for m, n, k in ((5, 120, 288), (24, 392, 1120)):
        run(Product(m, n, k, "bf16", weight="int4", activation=activation, out=out, bias=bias, c=c, beta=-0.5))


def test_exact_inputs_give_exact_bits() -> None:
    run(Product(6, 200, 2048, "bf16", weight="int4", whole=True, out="fp32"))
