"""gemm/mixed_sm90 and its grouped form on the CPU, lane by lane: decoding, scales, orders, tails, groups, waits and barriers.

Every case runs with boxes that land at once and with boxes that land only when waited for; see cuda_emulator.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernelgen.kernels.gemm import grouped_mixed_sm90, mixed_sm90
from kernelgen.kernels.gemm.mixed_sm90 import Config
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.grouped_products import Grouped, run_grouped
from kernelgen.testing.mma_products import Product, make, problem_of, results, run_product
from kernelgen.testing.tolerance import assert_close_to_reference

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

TARGET = Target.parse("sm_90a")
CASES = {
    "mxfp4, odd blocks": (Product(21, 136, 352, "bf16", weight="mxfp4"), Config(16, 3)),
    "mxfp4, exact, by a table": (Product(5, 200, 416, "bf16", weight="mxfp4", whole=True, out="fp32"), Config(16, 2, 2, 3, True, True)),
    "zeros": (Product(40, 72, 288, "bf16", weight="int4", symmetric=False, bias="fp32", activation="gelu"),
              Config(48, 3, 2, 1, True)),
    "fp16, groups of 32, up first": (Product(33, 80, 160, "fp16", weight="int4", group=32, symmetric=False, out="fp16",
                                             activation="geglu", gate_up="up_first"), Config(64, 2)),
    "groups of 64, no vectors": (Product(19, 104, 96, "bf16", weight="int4", group=64, activation="swiglu",
                                         gate_up="interleaved"), Config(32, 3, 2)),
}
GROUPS = {
    "rows": (Grouped("rows", (17, 0, 40, 1), Product(0, 144, 160, "bf16", weight="mxfp4", bias="bf16", activation="swiglu")),
             Config(32, 3)),
    "masked": (Grouped("masked", (3, 20, 0), Product(0, 72, 96, "bf16", weight="int4", activation="swiglu",
                                                     gate_up="interleaved")), Config(16, 4, 1, 1)),
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return settings().cache_dir / "emulated"


@pytest.mark.parametrize("name", CASES)
def test_product(name: str, folder: Path) -> None:
    case, config = CASES[name]
    for lazy in (False, True):
        run_product(case, mixed_sm90.FAMILY, TARGET, lambda spec, lazy=lazy: EmulatedKernel(spec, folder, lazy, case.seed), config)


@pytest.mark.parametrize("name", GROUPS)
def test_groups(name: str, folder: Path) -> None:
    case, config = GROUPS[name]
    for lazy in (False, True):
        run_grouped(case, grouped_mixed_sm90.FAMILY, TARGET,
                    lambda spec, lazy=lazy: EmulatedKernel(spec, folder, lazy, case.product.seed), config)


def test_extreme_scales(folder: Path) -> None:
    """Exponents of 0, which is a subnormal bf16, large ones, and 255, which is NaN: of one column and group each."""
    case, config = CASES["mxfp4, odd blocks"]
    tensors, features, weight = make(case)
    assert tensors.scale_b is not None
    scale = weight.scale[0]
    for column, (first, others) in enumerate(((0, 0), (0, 1), (250, 3), (246, 0), (255, 127), (1, 255))):
        scale[column] = others
        scale[column, column] = first
    problem = problem_of(case, tensors)
    kernel = EmulatedKernel(mixed_sm90.spec(problem, TARGET, config), folder, False, case.seed)
    mixed_sm90.bind(problem, config, kernel, tensors)(tensors)
    exact, plain = results(case, tensors.a, weight, features)
    assert bool(exact[..., 4:6].isnan().all()) and bool(exact[..., :4].isfinite().all())
    for column in range(6):  # a limit goes by its row's largest value
        pick = (..., slice(column, column + 1))
        assert_close_to_reference(tensors.out[pick], exact[pick], plain[pick], what=f"column {column}")
