"""tools/bench/paged_prefill.py without a GPU: its problems and configs, and one small problem lane by lane."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernelgen.bench.protocol import Protocol
from kernelgen.kernels import counters
from kernelgen.kernels.attention import paged_mma, paged_sm90
from kernelgen.kernels.attention.prefill_sm90_configs import Config
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.testing.cuda_emulator import EmulatedKernel

from .test_bench import load_file

TOOL = load_file(Path(__file__).parent.parent.parent / "tools" / "bench" / "paged_prefill.py")
H200 = replace(Target.parse("sm_90a"), sm_count=132)


def test_every_case_has_kernels() -> None:
    cases = TOOL.cases()
    assert len({str(case) for case in cases}) == len(cases)
    for case in cases:
        assert paged_sm90.supports(case.problem(), H200) and len(TOOL.configs_of(case, H200)) > 1
        assert len(TOOL.specs_of(case, H200)) == len(TOOL.configs_of(case, H200)) + 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_small_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    words, folder, config = torch.zeros(2, dtype=torch.int32), settings().cache_dir / "emulated", Config(1, 32)
    monkeypatch.setattr(counters, "counter", lambda device: (words.data_ptr(), words))
    monkeypatch.setattr(paged_sm90, "target_of", lambda device: replace(H200, sm_count=2))
    monkeypatch.setattr(TOOL, "configs_of", lambda case, target: [config])
    case = TOOL.Case(2, 70, 90, 16, (2, 1), 64)
    mine = paged_sm90.spec(case.problem(), H200, config)

    def kernel_of(spec):  # type: ignore[no-untyped-def]
        if spec != mine:
            raise ValueError("no such kernel")
        return EmulatedKernel(spec, folder)

    rows = TOOL.measured(case, replace(Protocol.of("cpu"), samples=1, together=1, min_sample=1e-6), H200, kernel_of)
    assert [row.candidate for row in rows] == [f"paged_sm90 {config}", "paged_mma", "prefill_sm90 without pages"]
    assert rows[0].us and not rows[0].note and all(row.note == "cannot run: no such kernel" for row in rows[1:])
    lines = TOOL.shown(rows)
    assert lines[0] == str(case) and "TFLOP/s" in lines[1] and "NOT TIMED" in lines[2]
    assert paged_mma.supports(case.problem(), H200)
