"""tools/bench/prefill_few_queries.py without a GPU: its problems and configs, one small problem lane by lane, and what a run prints."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernelgen.bench.protocol import Protocol
from kernelgen.kernels import counters
from kernelgen.kernels.attention import prefill_mma, prefill_sm90
from kernelgen.kernels.attention.prefill_sm90_configs import Config
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.testing.cuda_emulator import EmulatedKernel

from .test_bench import load_file

TOOL = load_file(Path(__file__).parent.parent.parent / "tools" / "bench" / "prefill_few_queries.py")
H200 = replace(Target.parse("sm_90a"), sm_count=132)


def test_every_case_has_packed_kernels_and_few_queries_split_ones() -> None:
    cases = TOOL.cases()
    assert len({str(case) for case in cases}) == len(cases)
    for case in cases:
        words = " ".join(TOOL.candidates_of(case, H200))
        assert ("gqa" in words or case.heads == case.kv_heads) and "prefill_mma" in words and "split_mma" in words
        assert " split" in words or case.batch * case.queries >= 512


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_small_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    words, folder, config = torch.zeros(2, dtype=torch.int32), settings().cache_dir / "emulated", Config(1, 32, pack_gqa=True, splits=2)
    monkeypatch.setattr(counters, "counter", lambda device: (words.data_ptr(), words))
    monkeypatch.setattr(prefill_sm90, "target_of", lambda device: replace(H200, sm_count=2))
    case = TOOL.Case(2, 20, 90, 2, 1, 64)
    other = next(iter(prefill_mma.candidates(case.problem(), H200)))
    monkeypatch.setattr(TOOL, "candidates_of", lambda *_: {str(config): (prefill_sm90, config), "prefill_mma": (prefill_mma, other)})

    def kernel_of(spec):  # type: ignore[no-untyped-def]
        if "sm90" not in spec.name:
            raise ValueError("no such kernel")
        return EmulatedKernel(spec, folder)

    rows = TOOL.measured(case, replace(Protocol.of("cpu"), samples=1, together=1, min_sample=1e-6), H200, kernel_of)
    assert [row.candidate for row in rows] == [str(config), "prefill_mma"]
    assert rows[0].us and not rows[0].note and rows[1].note == "cannot run: no such kernel"
    lines = TOOL.table(rows)
    assert lines[0].startswith(str(case)) and f"({config})" in lines[1] and "NOT TIMED prefill_mma" in lines[3]
