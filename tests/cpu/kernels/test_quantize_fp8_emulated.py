"""quantize/quantize_fp8_cuda on the CPU, lane by lane, bit for bit against the reference in float32; see cuda_emulator."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernelgen.kernels.quantize import quantize_fp8_cuda
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.quantize_cases import CASES, Case, run_case

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

TARGET = Target.parse("sm_90a")


@pytest.fixture(scope="module")
def folder() -> Path:
    return settings().cache_dir / "emulated"


@pytest.mark.parametrize("name", CASES)
def test_codes_and_scales(name: str, folder: Path) -> None:
    run_case(CASES[name], quantize_fp8_cuda.FAMILY, TARGET, lambda spec: EmulatedKernel(spec, folder))


def test_rows_that_are_read_again(folder: Path) -> None:
    config = quantize_fp8_cuda.Config(512, 512, 0)
    for width in (5000, 136):
        run_case(Case("row", (3, width), activation="silu"), quantize_fp8_cuda.FAMILY, TARGET,
                 lambda spec: EmulatedKernel(spec, folder), config)
