"""tools/bench/moe_layer.py without a GPU: its cases, the bounds of every step, and what a run prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kernelgen.bench.protocol import Timing
from kernelgen.bench.results import Row
from kernelgen.bench.suites import MOE_SHAPES, MoeCase
from kernelgen.bench.workloads.moe import MoeWorkload
from kernelgen.targets import Target

from .test_bench import load_file

TOOL = load_file(Path(__file__).parent.parent.parent / "tools" / "bench" / "moe_layer.py")
H200 = replace(Target.parse("sm_90a"), sm_count=132)


def test_targets_come_first_and_every_step_has_a_bound() -> None:
    cases = TOOL.cases(TOOL.TOKENS, "")
    assert len(cases) == 28 and {(c.model, c.tokens, c.recipe) for c in cases[:2]} == set(TOOL.TARGETS)
    for case in (*cases[:2], MoeCase("qwen3-30b", 4096, "fp8-block"), MoeCase("gpt-oss-120b", 512, "mxfp4"), MoeCase("qwen3-next", 64)):
        steps = [name for name, _ in TOOL._decision(case, H200).chosen.config.decisions]
        assert set(steps) <= set(TOOL.bounds(case, MoeWorkload(case, "cuda"))), steps


def test_bounds_are_bytes_and_operations() -> None:
    case, s = MoeCase("deepseek-v3-tp8", 4096, "fp8-block"), MOE_SHAPES["deepseek-v3-tp8"]
    moved, flops = TOOL.bounds(case, MoeWorkload(case, "cuda"))["down"]
    slots = 4096 * s.k
    assert flops == 2 * slots * s.hidden * s.inner
    assert abs(moved - (s.experts * s.hidden * s.inner + slots * (s.inner + 2 * s.hidden))) < 1e-3 * moved
    up, layer = TOOL.bounds(case, MoeWorkload(case, "cuda"))["up"], MoeWorkload(case, "cuda")
    assert up[1] + flops == layer.flops


def test_a_run_says_where_the_targets_stand() -> None:
    case = MoeCase("qwen3-30b", 32768)
    rows = [Row("moe-layer", str(case), "kernelgen", us=Timing.of([5000.0]), tflops=495.0),
            Row("moe-part", str(case), "up", us=Timing.of([2e3]))]
    assert list(TOOL.standings(rows)) == [f"{case} kernelgen: 495 TFLOP/s, to be 480"]
    lines = TOOL.shown(case, rows).splitlines()
    assert len(lines) == 2 and "5000.0 us" in lines[0] and "up" in lines[1]
