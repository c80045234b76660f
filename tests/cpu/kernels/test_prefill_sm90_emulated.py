"""attention/prefill_sm90 on the CPU, lane by lane: boxes, products, turns, masks, non-finite values and both rare paths of its softmax.

Copies, products and stores run at once, or only when they are waited for while warps fall behind at random; see cuda_emulator. Each
kernel costs several seconds of g++, so cases share them.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from kernelgen.kernels.attention import prefill_sm90
from kernelgen.kernels.attention.prefill_sm90_configs import Config
from kernelgen.settings import settings
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.prefill_cases import (
    CASES,
    CAUSAL,
    CHANGES,
    FEW_QUERIES,
    INF,
    NAN,
    NUMBERS_OF_FEW,
    STEPS,
    Case,
    Change,
    growing,
    infinite_keys,
    nonfinite,
    run,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


# Consumers without keys of their own in some of a row tile's, and with half of them.
HALVES = Case(Config(3, 64, diagonal=2), (250, 250), (230, 230), causal=True)
EDGES = Case(Config(2, 32, diagonal=2, early_keys=True), (300, 0, 1, 130), (310, 90, 40, 100), True, dims=(72, 64), dtype="fp16",
             window=(45, 7), kv_lens=(310, 60, 40, 100))
# Scores made again from keys in memory.
EARLY = replace(CAUSAL, config=Config(2, 32, 3, value_stages=2, early_keys=True), scale=-0.125)
RAGGED = Case(Config(3, 32, 2, value_stages=3, early_keys=True), (40, 0, 170), (60, 9, 150), True, (4, 2), (72, 40), "fp16",
              window=(None, 30), kv_lens=(60, 9, 131))


def nonfinite_ragged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for i in range(0, v.shape[0], 11):
        v[i, 0, 13 * i % v.shape[-1]] = (NAN, INF, -INF)[i % 3]


def growing_ragged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The same of RAGGED's requests. Their last values of a row are what boxes of 64 columns cover in part."""
    q[..., 71] = torch.tensor([8.0, 0.0, -8.0, 1.0])[torch.arange(q.shape[0]) % 4, None]
    tiles = torch.cat([torch.arange(length) // 32 for length in RAGGED.k_lens])
    k[: len(tiles), :, 71] = torch.tensor(STEPS)[tiles, None] + 0.25 * k[: len(tiles), :, 71]


# Schedules that configs can choose beside the ones in use.
SCHEDULES = {
    "own tiles": HALVES,
    "own tiles, more keys, no turns": replace(HALVES, config=Config(3, 48, pingpong=False, diagonal=1), q_lens=(110,), k_lens=(290,),
                                              blocks=1),
    "own tiles of a window": EDGES,
    "two row tiles share keys": Case(Config(2, 32, multicast=1), (300, 300), (150, 150), dims=(72, 64), kv_lens=(150, 77)),
    "two row tiles share a part of the keys": Case(Config(1, 32, multicast=1, splits=2), (140, 140), (150, 150), kv_lens=(150, 77)),
    "ragged, more requests than lanes": Case(Config(1, 32, pingpong=False), tuple(3 * i % 70 for i in range(40)),
                                             tuple(7 * i % 90 for i in range(40)), True, dims=(8, 16), blocks=3),
    "results in two parts": Case(Config(2, 32, out_parts=2), (150, 150), (60, 60), dims=(64, 112), causal=True),
    "results in two parts, ragged": Case(Config(1, 32, out_parts=2), (50, 1, 77), (40, 40, 50), True, dims=(40, 232), dtype="fp16"),
}
NUMBERS: dict[str, tuple[Case, Change]] = {
    **NUMBERS_OF_FEW,
    "growing, keys given back early": (EARLY, growing(tuple(-step for step in STEPS))),
    "NaN, keys given back early": (EARLY, nonfinite(NAN)),
    "infinite keys, given back early": (EARLY, infinite_keys),
    "growing ragged, keys given back early": (RAGGED, growing_ragged),
    "own tiles, NaN": (HALVES, nonfinite(NAN, INF)),
    "own tiles, growing": (HALVES, growing((*STEPS, -40.0, -41.0))),
    "own tiles of a window, inf": (EDGES, nonfinite_ragged),
}


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


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str, folder: Path) -> None:
    both(SCHEDULES[name], folder)


@pytest.mark.parametrize("name", FEW_QUERIES)
def test_few_queries(name: str, folder: Path) -> None:
    both(FEW_QUERIES[name], folder)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_schedules(name: str, folder: Path) -> None:
    case, change = NUMBERS[name]
    both(case, folder, change)
