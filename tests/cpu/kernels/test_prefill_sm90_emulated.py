"""attention/prefill_sm90 on the CPU, lane by lane: boxes, products, turns, masks, non-finite values and both rare paths of its softmax.

Copies, products and stores run at once, or only when they are waited for while warps fall behind at random; see cuda_emulator. Each
kernel costs several seconds of g++, so cases share them.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from kernelgen.kernels.attention import prefill_sm90
from kernelgen.settings import settings
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.prefill_cases import CASES, CHANGES, Case, Change, run

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def folder() -> Path:
    return settings().cache_dir / "emulated"


def both(case: Case, folder: Path, change: Change | None = None) -> None:
    for lazy in (False, True):
        load = partial(EmulatedKernel, folder=folder, lazy=lazy, seed=1, stalls=lazy)
        run(case, prefill_sm90, load, what=f"lazy={lazy}", change=change)


@pytest.mark.parametrize("name", CASES)
def test_prefill(name: str, folder: Path) -> None:
    both(CASES[name], folder)


@pytest.mark.parametrize("name", CHANGES)
def test_numbers(name: str, folder: Path) -> None:
    case, change = CHANGES[name]
    both(case, folder, change)
