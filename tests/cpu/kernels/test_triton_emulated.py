"""Triton's kernels on the CPU by their PTX for sm_90a: bf16, which its interpreter cannot multiply, and sums in the order that a
GPU makes them in."""

from __future__ import annotations

import shutil

import pytest
import torch

from kernelgen.dispatch.libraries import Library
from kernelgen.kernels.gemm import product_triton
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.testing.attention_calls import compare_call
from kernelgen.testing.data import random_tensors
from kernelgen.testing.interpreted_attention import interpreted
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


def test_attention_of_many_keys_in_float32() -> None:
    """No chain of rounded additions over all keys. The interpreter does not show it: it adds as NumPy does."""
    q, k, v = random_tensors([(1, 1, 8, 128), (1, 777, 2, 128), (1, 777, 2, 128)], torch.float32, seed=2)
    with interpreted(settings().cache_dir / "emulated_ptx", lambda spec, folder: EmulatedTriton(spec, folder, False, 3, False)):
        compare_call(q, k, v, seed=2, what="777 keys", backend="triton")
