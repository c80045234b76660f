"""gemm/gemm_mma on the CPU, lane by lane: fragments of every form, scales, tails, waits and barriers against the reference.

Every case runs with copies that land at once and with copies that land only when waited for; see cuda_emulator.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernelgen.kernels.gemm import gemm_mma
from kernelgen.kernels.gemm.gemm_mma import Config
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.mma_products import Product, run_product

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

TARGET = Target.parse("sm_90a")
SMALL, DEEP = Config(32, 32, 128, 2, 2, stages=2), Config(16, 32, 512, 1, 1, 4, stages=3)
HALVES = Config(32, 32, 64, 2, 1, 2, stages=3)
CASES = {
    "16-bit": (Product(37, 50, 100, "bf16"), HALVES),
    "16-bit orders": (Product(37, 56, 104, "fp16", orders="cr", bias="fp16", activation="silu"), HALVES),
    "fp8 tensor": (Product(37, 50, 304, scales="tensor"), SMALL),
    "fp8 rows": (Product(20, 72, 640, scales="row", b="e5m2", batch=2, bias="bf16"), DEEP),
    "fp8 blocks": (Product(37, 200, 400, scales="block_128x128", scale_major="cc"), SMALL),
    "fp8 column blocks": (Product(9, 40, 1100, scales="block_1x128", scale_major="rc", c="fp32", beta=-0.5), DEEP),
    "fp8 orders": (Product(37, 50, 300, scales="block_1x128", orders="cr", batch=2, batched_b=True), SMALL),
    "fp8 odd": (Product(19, 33, 131, scales="row", orders="rr", pad=1), SMALL),
    "fp8 gated": (Product(21, 144, 144, scales="block_128x128", activation="swiglu", gate_up="up_first", bias="fp32"), SMALL),
    "fp8 gated rows": (Product(21, 96, 144, scales="row", orders="rr", activation="geglu"), Config(32, 64, 128, 2, 2, stages=2)),
    "fp8 fast": (Product(33, 40, 200, "e5m2", scales="tensor", accumulate="fast"), SMALL),
    "fp8 exact": (Product(37, 50, 400, scales="block_128x128", whole=True, out="fp32", orders="rr"), SMALL),
    "fp8 without k": (Product(5, 40, 0, scales="block_128x128", bias="bf16", activation="silu"), SMALL),
    "int4 short k": (Product(5, 40, 3, "bf16", weight="int4"), SMALL),
    "quantized rows": (Product(21, 136, 144, scales="row", out="e4m3", out_scale="row", bias="bf16"), SMALL),
    "quantized tensor": (Product(21, 136, 144, scales="row", out="e5m2", out_scale="tensor", batch=2), SMALL),
    "quantized blocks": (Product(21, 330, 144, "bf16", out="e4m3", out_scale="block_1x128", pad=1), HALVES),
    "int4": (Product(19, 70, 416, "bf16", weight="int4"), Config(32, 64, 128, 1, 2, 2, stages=3)),
    "int4 zeros": (Product(5, 40, 330, "fp16", weight="int4", group=64, symmetric=False, bias="fp16", batch=2, batched_b=True),
                   Config(16, 32, 256, 1, 1, 4, stages=3)),
    "int4 columns": (Product(40, 33, 200, "bf16", weight="int4", group=32, symmetric=False, orders="cc"), SMALL),
    "mxfp4": (Product(19, 70, 416, "bf16", weight="mxfp4", activation="silu"), SMALL),
    "mxfp4 gated": (Product(9, 96, 131, "fp16", weight="mxfp4", activation="swiglu", pad=1), SMALL),
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return settings().cache_dir / "emulated"


@pytest.mark.parametrize("name", CASES)
def test_product(name: str, folder: Path) -> None:
    case, config = CASES[name]
    for lazy in (False, True):
        run_product(case, gemm_mma.FAMILY, TARGET, lambda spec, lazy=lazy: EmulatedKernel(spec, folder, lazy, case.seed), config)
