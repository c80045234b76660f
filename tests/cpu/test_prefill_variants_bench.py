"""tools/bench/prefill_variants.py without a GPU: its problems and configs, one small problem lane by lane, and what a run prints."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernelgen.bench.protocol import Protocol, Timing
from kernelgen.bench.results import Row
from kernelgen.kernels import counters
from kernelgen.kernels.attention import prefill_sm90
from kernelgen.kernels.attention.prefill_sm90_configs import Config
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.testing.cuda_emulator import EmulatedKernel

from .test_bench import load_file

TOOL = load_file(Path(__file__).parent.parent.parent / "tools" / "bench" / "prefill_variants.py")
H200 = replace(Target.parse("sm_90a"), sm_count=132)


def test_every_config_is_legal_and_a_kernel_of_its_own() -> None:
    cases = TOOL.cases()
    assert len({str(case) for case in cases}) == len(cases)
    for case in cases:
        problem, found = case.problem(), TOOL.configs_of(case, H200)
        assert prefill_sm90.supports(problem, H200)
        assert found[0] == next(prefill_sm90.candidates(problem, H200)) and len(found) > 3, case
        missing = [c for c in TOOL.VARIANTS[case.dims, case.causal] if c not in found]
        assert not missing, [prefill_sm90.legal(problem, H200, c).reason for c in missing]
        kernels = {replace(c, section=Config.section) for c in found}
        assert len({prefill_sm90.spec(problem, H200, c) for c in found}) == len(kernels)


def test_dense_and_ragged_have_the_same_arithmetic() -> None:
    assert TOOL.SKEWED.ragged and not TOOL.EVEN.ragged
    assert abs(TOOL.EVEN.flops / TOOL.SKEWED.flops - 1.0) < 1e-3


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("lens", [(70, 70), (70, 9, 33)], ids=["dense", "ragged"])
def test_a_small_problem(lens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    words, folder = torch.zeros(2, dtype=torch.int32), settings().cache_dir / "emulated"
    monkeypatch.setattr(counters, "counter", lambda device: (words.data_ptr(), words))
    monkeypatch.setattr(prefill_sm90, "target_of", lambda device: replace(H200, sm_count=2))
    wrong, right = Config(2, 32), Config(1, 32, early_keys=True)
    monkeypatch.setattr(TOOL, "configs_of", lambda case, target: [right, wrong])

    def kernel_of(spec):  # type: ignore[no-untyped-def]
        if spec == prefill_sm90.spec(case.problem(), H200, wrong):
            raise ValueError("no such kernel")
        return EmulatedKernel(spec, folder)

    case = TOOL.Case(lens, 2, (64, 48), True)
    protocol = replace(Protocol.of("cpu"), samples=1, together=1, min_sample=1e-6)
    rows = TOOL.measured(case, protocol, H200, kernel_of)
    assert [row.candidate for row in rows] == [str(right), str(wrong), *([] if case.ragged else ["torch"])]
    assert rows[0].us and not rows[0].note and not rows[1].us and rows[1].note == "cannot run: no such kernel"
    lines = TOOL.table(rows)
    assert lines[0].startswith(str(case)) and any("NOT TIMED" in line and "no such kernel" in line for line in lines)


def test_a_run_says_what_configs_are_worth_and_where_targets_stand() -> None:
    absorbed = str(TOOL.Case((8192,) * 2, 16, (192, 128), True))
    rows = [Row("s", absorbed, "a", us=Timing.of([10.0]), tflops=600.0, ratio=0.9),
            Row("s", absorbed, "b", us=Timing.of([8.0]), tflops=750.0, ratio=1.125),
            Row("s", absorbed, "torch-cudnn", True, Timing.of([9.0]), 666.0, ratio=1.0),
            Row("s", str(TOOL.SKEWED), "a", us=Timing.of([10.0]), tflops=660.0),
            Row("s", str(TOOL.EVEN), "a", us=Timing.of([10.0]), tflops=700.0)]
    text = "\n".join(TOOL.table(rows))
    assert "a 600 -> b 750 | torch-cudnn 666; best over peers 1.125, in use 0.900" in text and "b 1.250" in text
    assert "750 TFLOP/s, target 650" in text and "loss 0.057" in text and "1.125 in the mean" in text
