"""attention/paged_sm90 on the CPU, lane by lane: boxes of pages, rows copied one by one, both page tables, what lies behind the last key.

The kernel itself is that of attention/prefill_sm90: test_prefill_sm90_emulated.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelgen.kernels import counters
from kernelgen.kernels.attention import paged_sm90
from kernelgen.kernels.attention.prefill_sm90_configs import Config
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.tensors import PagedTensors
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.data import poisoned_empty
from kernelgen.testing.planned import Planned, run_planned
from kernelgen.testing.planned_cases import INF, NAN, RelativeBias
from kernelgen.testing.tolerance import assert_bits_equal

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

TARGET = replace(Target.parse("sm_90a"), sm_count=2)
MIXED = ((140, 1, 0, 33, 5), (90, 160, 40, 20, 0))  # rows without keys, requests without queries and without keys

# A scale that makes logits outgrow the first tile's by more than 2^128 has scores made again, early_keys from the pages.
CASES: dict[str, tuple[Planned, Config]] = {
    "boxes of 16": (Planned(*MIXED, poison=(NAN, INF), kv_layout="HND"), Config(2, 32)),
    "boxes of 16, scores made again": (Planned(*MIXED, kv_layout="HND", scale=-30.0), Config(2, 32)),
    "pages of a tile, scores made again from pages": (
        Planned((150, 33), (170, 90), page_size=64, dims=(72, 64), dtype="fp16", sinks=True, scale=20.0, poison=(NAN,)),
        Config(2, 64, early_keys=True, diagonal=2)),
    "contiguous": (Planned((77, 1), (140, 35), one_page=True, heads=(2, 2), dims=(40, 72), dtype="fp16", window=(40, 9), causal=False,
                           soft_cap=5.0, poison=(INF,)), Config(1, 48, 3, False, resident=2)),
    "boxes of 8": (Planned((30, 0, 200, 1, 65), (40, 9, 240, 70, 65), page_size=24, dims=(96, 96)),
                                  Config(3, 32, 3)),
    "pages of 1": (Planned((70, 1, 0, 34), (90, 60, 40, 20), heads=(3, 1), page_size=1, dims=(72, 64), poison=(NAN, -INF)), Config(2, 48)),
    "pages of 5, everything": (Planned((50, 17), (150, 64), page_size=5, dims=(64, 128), mask="packed", soft_cap=3.0, alibi=True,
                                       sinks=True, window=(90, None), causal=False, variant=RelativeBias()), Config(1, 32, pingpong=False)),
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return settings().cache_dir / "emulated"


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stands in for a GPU; its counters must be left as they were found."""
    words = torch.zeros(2, dtype=torch.int32)
    monkeypatch.setattr(counters, "counter", lambda device: (words.data_ptr(), words))
    monkeypatch.setattr(paged_sm90, "target_of", lambda device: TARGET)
    yield
    assert not words.any(), words


def run(planned: Planned, config: Config, folder: Path, family: Any = paged_sm90.FAMILY) -> None:
    for lazy in (False, True):
        verdict = paged_sm90.legal(planned.problem(16), TARGET, config)
        assert verdict, verdict.reason
        run_planned(planned, family, config, TARGET, lambda spec, lazy=lazy: EmulatedKernel(spec, folder, lazy, stalls=lazy))


@pytest.mark.parametrize("name", CASES)
def test_paged(name: str, folder: Path) -> None:
    run(*CASES[name], folder)


def test_rows_that_a_captured_run_has_not(folder: Path) -> None:
    """An update may plan more query rows than the q of a captured run has: those are neither read nor written."""
    planned, config = CASES["boxes of 16"]
    least, runs = 60, []

    def bind(problem: Any, config: Config, kernel: Any, t: PagedTensors) -> Callable[[PagedTensors], None]:
        def both(t: PagedTensors) -> None:
            paged_sm90.bind(problem, config, kernel, t)(t)
            out = poisoned_empty((t.out.shape[0], *t.out.shape[1:]), t.out.dtype)
            lse = poisoned_empty(t.out.shape[:2])
            few = t._replace(q=t.q[:least], out=out[:least], lse=lse[:least])
            paged_sm90.bind(problem, config, kernel, few)(few)
            assert bool(out[least:].isnan().all()) and bool(lse[least:].isnan().all())
            assert_bits_equal(out[:least], t.out[:least], what="the first rows")
            runs.append(few)

        return both

    run(planned, config, folder, replace(paged_sm90.FAMILY, bind=bind))
    assert len(runs) == 4
