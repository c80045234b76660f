"""gemm/packed_sm90 on the CPU, lane by lane: decoding, orders of k, groups, tails, slices of a cluster, waits and barriers.

Every case runs with copies that land at once and with copies that land only when waited for; see cuda_emulator.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernelgen.kernels.gemm import packed_sm90
from kernelgen.kernels.gemm.packed_sm90 import Config
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.mma_products import Product, run_product

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

TARGET = Target.parse("sm_90a")
CASES = {
    "one row": (Product(1, 40, 1056, "bf16", weight="int4"), Config(1, 8, 2, 1, 3)),
    "slices": (Product(7, 72, 2592, "bf16", weight="int4", bias="fp32", activation="silu"), Config(2, 8, 2, 2, 2, 4, 3)),
    "slices without steps": (Product(3, 24, 416, "bf16", weight="int4"), Config(1, 8, 2, 1, 4, 8)),
    "rows of two tiles": (Product(13, 64, 640, "fp16", weight="int4", c="fp16", beta=-0.5, out="fp32"), Config(4, 16, 1, 2, 2, 2)),
    "padded rows": (Product(16, 56, 416, "bf16", weight="int4", pad=8), Config(1, 16, 2, 2, 3)),
    "zeros": (Product(5, 40, 544, "bf16", weight="int4", symmetric=False), Config(2, 8, 2, 1, 3, 2)),
    "zeros, groups of 64": (Product(9, 40, 608, "fp16", weight="int4", group=64, symmetric=False), Config(2, 16, 2, 1, 3, 2)),
    "groups of 32": (Product(3, 40, 1184, "bf16", weight="int4", group=32, symmetric=False), Config(1, 8, 2, 2, 3)),
    "mxfp4": (Product(11, 72, 736, "bf16", weight="mxfp4", activation="gelu"), Config(2, 16, 2, 1, 3, 2)),
    "exact": (Product(6, 40, 1024, "bf16", weight="int4", whole=True, out="fp32"), Config(1, 8, 2, 1, 3, 4)),
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return settings().cache_dir / "emulated"


@pytest.mark.parametrize("name", CASES)
def test_product(name: str, folder: Path) -> None:
    case, config = CASES[name]
    for lazy in (False, True):
        run_product(case, packed_sm90.FAMILY, TARGET, lambda spec, lazy=lazy: EmulatedKernel(spec, folder, lazy, case.seed), config)
