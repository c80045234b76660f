"""moe/sort_cuda, permute_cuda and unpermute_cuda on the CPU, lane by lane, against the reference; see cuda_emulator."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kernelgen.kernels.moe import permute_cuda, sort_cuda, unpermute_cuda
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.moe_cases import PERMUTES, SORTS, UNPERMUTES, run_permute, run_sort, run_unpermute

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

TARGET = Target.parse("sm_90a")


@pytest.fixture(scope="module")
def folder() -> Path:
    return settings().cache_dir / "emulated"


@pytest.mark.parametrize("name", SORTS)
def test_sort(name: str, folder: Path) -> None:
    """By one block, and by as many as a small one needs."""
    case = SORTS[name]
    for config in (None, sort_cuda.Config(4, alone=0)):
        run_sort(case, sort_cuda.FAMILY, TARGET, lambda spec: EmulatedKernel(spec, folder), config=config)


def test_sort_by_several_blocks(folder: Path) -> None:
    """More slots than blocks of 2,048 take at once."""
    case = replace(SORTS["several chunks"], tokens=1700)
    assert sort_cuda.Config(4, alone=0).blocks(case.tokens * case.k)[0] > 3
    run_sort(case, sort_cuda.FAMILY, TARGET, lambda spec: EmulatedKernel(spec, folder), config=sort_cuda.Config(4, alone=0))


@pytest.mark.parametrize("name", PERMUTES)
def test_permute(name: str, folder: Path) -> None:
    run_permute(PERMUTES[name], permute_cuda.FAMILY, TARGET, lambda spec: EmulatedKernel(spec, folder))


@pytest.mark.parametrize("name", UNPERMUTES)
def test_unpermute(name: str, folder: Path) -> None:
    run_unpermute(UNPERMUTES[name], unpermute_cuda.FAMILY, TARGET, lambda spec: EmulatedKernel(spec, folder))
