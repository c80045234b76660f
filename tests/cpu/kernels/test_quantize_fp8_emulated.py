"""quantize/quantize_fp8_cuda on the CPU, lane by lane, bit for bit against the reference in float32; see cuda_emulator."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernelgen.kernels.quantize import quantize_fp8_cuda
from kernelgen.kernels.quantize.quantize_fp8_cuda import Config
from kernelgen.problems.quantize import QuantizeProblem
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.tensors import QuantizeTensors
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.data import random_tensor
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


@pytest.mark.parametrize("width", (136, 384, 1000))
def test_blocks_that_own_a_row(width: int) -> None:
    """As many rows have: the codes and scales of teams that own a unit anywhere, also where rows end early."""
    x, ends = random_tensor((1, 18, width), torch.float32, seed=width), torch.tensor([13], dtype=torch.int32)
    problem = QuantizeProblem(1, 18, width, "fp32", "e4m3", "block_1x128")
    assert next(iter(quantize_fp8_cuda.candidates(replace(problem, rows=4096), TARGET))).units > 0
    for limited in (False, True):
        results = []
        for config in (Config(256, 16, 1), Config(128, 16, 1, 1), Config(224, 16, 1, 3)):
            assert quantize_fp8_cuda.legal(problem, TARGET, config)
            codes = torch.full((1, 18, width), 0x11, dtype=torch.uint8).view(torch.float8_e4m3fn)
            scale = torch.full((1, -(-width // 128), 20), -1.0).mT[:, :18]
            kernel = EmulatedKernel(quantize_fp8_cuda.spec(problem, TARGET, config, limited), settings().cache_dir / "emulated")
            quantize_fp8_cuda.bind_limited(problem, config, kernel, QuantizeTensors(x, codes, scale))(
                QuantizeTensors(x, codes, scale), ends.data_ptr() if limited else 0)
            results.append((codes.view(torch.uint8), scale))
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other)), (width, limited)
        assert bool((results[0][1][:, 13:] == -1).all()) is limited
