"""The CUDA kernels of mixture-of-experts without a GPU: everything compiles for every architecture and nothing spills."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kernelgen.kernels.moe import route_cuda
from kernelgen.problems.moe import RouteProblem
from kernelgen.targets import Target
from kernelgen.testing.resources import ARCHS, compiled, covered

FAMILIES = (route_cuda.FAMILY,)


@pytest.mark.parametrize("arch", ARCHS)
def test_coverage_compiles(arch: str) -> None:
    for name, report in compiled([spec for family in FAMILIES for spec in covered(family, Target.parse(arch))]).items():
        assert report["spill_stores"] == 0, (name, report)


def test_tokens_fill_an_sm() -> None:
    """64 warps to an SM, the most there can be, hide each other's latency: at most 32 registers for what is measured."""
    target = Target.parse("sm_90a")
    deepseek = RouteProblem(4096, 256, 8, "bf16", "deepseek_v3", bias=True, bias_dtype="fp32", num_groups=8, topk_groups=4)
    specs = [route_cuda.spec(p, target, next(iter(route_cuda.candidates(p, target)))) for p in (deepseek, replace(deepseek, dtype="fp32"))]
    assert all(report["registers"] <= 40 for report in compiled(specs).values())


def test_one_spec_for_everything_that_varies_from_call_to_call() -> None:
    target, base = Target.parse("sm_90a"), RouteProblem(64, 256, 8, "bf16")
    config = next(iter(route_cuda.candidates(base, target)))
    changes: tuple[dict[str, Any], ...] = ({"tokens": 3}, {"k": 2}, {"experts": 200}, {"method": "topk_softmax"})
    for change in changes:
        assert route_cuda.spec(replace(base, **change), target, config) == route_cuda.spec(base, target, config)
