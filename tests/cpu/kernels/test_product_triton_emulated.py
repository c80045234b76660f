"""gemm/product_triton on the CPU by its PTX for sm_90a: wgmma in bf16, which Triton's interpreter cannot multiply, and float64."""

from __future__ import annotations

import shutil

import pytest

from kernelgen.dispatch.libraries import Library
from kernelgen.kernels.gemm import product_triton
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.testing.mma_products import Product, run_product
from kernelgen.testing.ptx_emulator import EmulatedTriton

pytestmark = pytest.mark.skipif(Library("triton", "triton").version() is None or shutil.which("g++") is None, reason="needs triton and g++")


@pytest.mark.parametrize("case", (
    Product(65, 72, 88, "bf16", bias="fp32", activation="gelu"), Product(20, 50, 33, "fp64", orders="cr", out="fp64", pad=1),
), ids=("bf16", "fp64"))
def test_product(case: Product) -> None:
    for lazy in (False, True):
        run_product(case, product_triton.FAMILY, Target.parse("sm_90a"),
                    lambda spec, lazy=lazy: EmulatedTriton(spec, settings().cache_dir / "emulated_ptx", lazy, 3, True))
