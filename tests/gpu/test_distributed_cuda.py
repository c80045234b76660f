"""kernelgen.distributed over NCCL: the cases of the CPU, and what only streams can get wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernelgen.testing.distributed_cases import CASES
from kernelgen.testing.distributed_cuda_cases import CASES as CUDA_CASES
from kernelgen.testing.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs, found {torch.cuda.device_count()}")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folders = tmp_path_factory.mktemp("cases"), tmp_path_factory.mktemp("cuda")
    size = min(torch.cuda.device_count(), 4)
    modules = "kernelgen.testing.distributed_cases", "kernelgen.testing.distributed_cuda_cases"
    found: dict[str, str] = {}
    for module, folder in zip(modules, folders):
        found |= run_ranks(module, size, Path(folder), device="cuda", timeout=130)
    return found


@pytest.mark.parametrize("case", (*CASES, *CUDA_CASES))
def test_ranks(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == "", outcomes[case]
