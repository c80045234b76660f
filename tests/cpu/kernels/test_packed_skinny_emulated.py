"""gemm/packed_skinny on the CPU, lane by lane: decoding, orders of k, groups, tails, waits and barriers against the reference.

Every case runs with copies that land at once and with copies that land only when waited for; see cuda_emulator.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from kernelgen.errors import LayoutError
from kernelgen.kernels.gemm import packed_skinny, packed_sm90
from kernelgen.kernels.gemm.packed_skinny import Config
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.mma_products import Product, make, problem_of, run_product

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

TARGET = Target.parse("sm_80")
SMALL = Config(1, 8, 4, 2)
CASES = {
    "one row": (Product(1, 40, 1056, "bf16", weight="int4"), SMALL),
    "several chunks": (Product(7, 72, 2592, "bf16", weight="int4", bias="fp32", activation="silu"), Config(2, 8, 4, 3)),
    "rows of two tiles": (Product(13, 64, 640, "fp16", weight="int4", c="fp16", beta=-0.5, out="fp32"), Config(4, 16, 4, 2)),
    "rows of four tiles": (Product(32, 56, 416, "bf16", weight="int4", pad=8), Config(1, 32, 4, 2)),
    "zeros": (Product(5, 40, 544, "bf16", weight="int4", symmetric=False), SMALL),
    "zeros, groups of 64": (Product(9, 40, 608, "fp16", weight="int4", group=64, symmetric=False), Config(2, 16, 4, 3)),
    "groups of 64": (Product(3, 40, 1120, "bf16", weight="int4", group=64), SMALL),
    "groups of 32": (Product(3, 40, 1184, "fp16", weight="int4", group=32, symmetric=False), SMALL),
    "mxfp4": (Product(11, 72, 736, "bf16", weight="mxfp4", activation="gelu"), Config(2, 16, 4, 2)),
    "mxfp4 of fp16": (Product(2, 24, 96, "fp16", weight="mxfp4"), SMALL),
    "exact": (Product(6, 40, 1024, "bf16", weight="int4", whole=True, out="fp32"), Config(1, 8, 8, 3)),
}


def test_views_of_more_than_4_gb_are_refused() -> None:
    """The kernel counts bytes from the matrix' first column in 32 bits."""
    case = Product(3, 1 << 13, 256, "bf16", weight="int4")
    tensors = make(case)[0]
    far = torch.empty_strided(tensors.b.shape, (1 << 40, 1 << 20, 1), dtype=torch.uint8, device="meta")
    with pytest.raises(LayoutError, match="codes .* 8192 rows 1048576 bytes apart.* make codes contiguous"):
        packed_skinny.bind(problem_of(case, tensors), SMALL, None, tensors._replace(b=far))
    block = packed_sm90.Config(2, 8, 4, 2)  # counts from a block's first column on: of 128 of them
    packed_skinny.check_reach(problem_of(case, tensors), block, tensors._replace(b=far), packed_sm90.ENTRY, block.block_n)
    further = torch.empty_strided(tensors.b.shape, (1 << 40, 1 << 25, 1), dtype=torch.uint8, device="meta")
    with pytest.raises(LayoutError, match="expected 128 rows within 4 GB by gemm_packed_sm90"):
        packed_sm90.bind(problem_of(case, tensors), block, None, tensors._replace(b=further))


@pytest.fixture(scope="module")
def folder() -> Path:
    return settings().cache_dir / "emulated"


@pytest.mark.parametrize("name", CASES)
def test_product(name: str, folder: Path) -> None:
    case, config = CASES[name]
    for lazy in (False, True):
        run_product(case, packed_skinny.FAMILY, TARGET, lambda spec, lazy=lazy: EmulatedKernel(spec, folder, lazy, case.seed), config)
