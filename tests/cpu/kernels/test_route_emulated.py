"""moe/route_cuda on the CPU, lane by lane, against the reference; see cuda_emulator."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernelgen.kernels.moe import route_cuda
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.route_cases import CASES, run_case, run_strange_bias

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def folder() -> Path:
    return settings().cache_dir / "emulated"


@pytest.mark.parametrize("name", CASES)
def test_experts_and_weights(name: str, folder: Path) -> None:
    run_case(CASES[name], route_cuda.FAMILY, Target.parse("sm_90a"), lambda spec: EmulatedKernel(spec, folder))


def test_strange_bias(folder: Path) -> None:
    run_strange_bias(route_cuda.FAMILY, Target.parse("sm_90a"), lambda spec: EmulatedKernel(spec, folder))
