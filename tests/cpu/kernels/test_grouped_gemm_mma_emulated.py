"""gemm/grouped_gemm_mma on the CPU, lane by lane: groups of every kind and size against the reference; see cuda_emulator."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernelgen.kernels.gemm import grouped_gemm_mma
from kernelgen.kernels.gemm.gemm_mma import Config
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.grouped_products import Grouped, run_grouped
from kernelgen.testing.mma_products import Product

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

TARGET = Target.parse("sm_90a")
HALVES, SMALL = Config(32, 32, 64, 2, 1, 2, stages=3), Config(16, 32, 128, 1, 2, stages=2)
MANY = tuple(i % 3 for i in range(70))
# name -> case, config, other sizes that the same closure serves
CASES = {
    "rows": (Grouped("rows", (20, 0, 1, 37), Product(0, 50, 100, "bf16", bias="bf16")), HALVES,
             [(0, 0, 0, 58), (58, 0, 0, 0), (1, 1, 1, 55), (0, 0, 0, 0)]),
    "rows many": (Grouped("rows", MANY, Product(0, 24, 64, "fp16", c="fp16", beta=0.5)), HALVES, []),
    # Columns of a at 16 bytes, of which a group begins anywhere.
    "rows columns": (Grouped("rows", (17, 0, 1, 32), Product(0, 40, 64, "bf16", orders="cr"), spare=6), HALVES, [(1, 5, 2, 42)]),
    "rows fp8": (Grouped("rows", (5, 40, 0, 3), Product(0, 72, 300, scales="row", activation="swiglu", bias="fp32")), SMALL, []),
    "rows blocks": (Grouped("rows", (5, 40, 0, 3), Product(0, 136, 300, scales="block_128x128", scale_major="cr")), SMALL, []),
    "rows int4": (Grouped("rows", (9, 0, 20), Product(0, 40, 160, "bf16", weight="int4", group=32, symmetric=False)), SMALL, []),
    "rows quantized": (Grouped("rows", (9, 0, 20), Product(0, 40, 64, "bf16", out="e4m3", out_scale="row")), HALVES, []),
    "masked": (Grouped("masked", (20, 0, 1, 37), Product(0, 50, 100, "bf16")), HALVES, [(0, 0, 0, 0), (40, 40, 40, 40)]),
    "masked blocks": (Grouped("masked", (5, 33), Product(0, 72, 300, scales="block_1x128", activation="silu")), SMALL, []),
    "masked quantized": (Grouped("masked", (5, 0, 33), Product(0, 136, 64, "bf16", out="e4m3", out_scale="block_1x128")), HALVES, []),
    "no groups": (Grouped("rows", (), Product(0, 50, 64, "bf16")), HALVES, []),
    "k columns": (Grouped("k", (70, 0, 1, 133), Product(37, 50, 0, "bf16", orders="cr", out="fp32", c="fp32")), HALVES,
                  [(0, 204, 0, 0), (101, 102, 1, 0)]),
    "k rows": (Grouped("k", (70, 0, 1, 133), Product(37, 50, 0, "fp16", orders="rc")), HALVES, [(9, 1, 9, 100)]),
    "k fp8": (Grouped("k", (70, 0, 200, 13), Product(20, 40, 0, scales="row", orders="rr")), SMALL, []),
    "k blocks": (Grouped("k", (70, 0, 200, 130), Product(20, 40, 0, scales="block_128x128")), SMALL, [(128, 128, 0, 144)]),
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return settings().cache_dir / "emulated"


@pytest.mark.parametrize("name", CASES)
def test_groups(name: str, folder: Path) -> None:
    case, config, others = CASES[name]
    for lazy in (False, True):
        run_grouped(case, grouped_gemm_mma.FAMILY, TARGET,
                    lambda spec, lazy=lazy: EmulatedKernel(spec, folder, lazy, case.product.seed), config, others=others)
