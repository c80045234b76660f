"""The CUDA kernels of mixture-of-experts without a GPU: everything compiles for every architecture and nothing spills."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kernelgen.kernels.moe import permute_cuda, route_cuda, sort_cuda, unpermute_cuda
from kernelgen.problems.moe import MoePermuteProblem, MoeSortProblem, MoeUnpermuteProblem, RouteProblem
from kernelgen.targets import Target
from kernelgen.testing.resources import ARCHS, compiled, covered

FAMILIES = (route_cuda.FAMILY, sort_cuda.FAMILY, permute_cuda.FAMILY, unpermute_cuda.FAMILY)


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
    sort, permute = MoeSortProblem(4096, 8, 256), MoePermuteProblem(64, 8, 4096, "bf16")
    for change in ({"tokens": 9000}, {"k": 2}, {"experts": 128}):
        assert sort_cuda.spec(replace(sort, **change), target, sort_cuda.Config(32)) == sort_cuda.spec(sort, target, sort_cuda.Config(32))
    rows = next(iter(permute_cuda.candidates(permute, target)))
    for change in ({"tokens": 3}, {"k": 2}, {"width": 8192}, {"dtype": "fp16"}, {"dtype": "e4m3"}):
        assert permute_cuda.spec(replace(permute, **change), target, rows) == permute_cuda.spec(permute, target, rows)


def test_launches_fit_the_slots() -> None:
    """One block for few slots; for many, as few launches and no more than 128 blocks; counters stay within 32 KB."""
    target = Target.parse("sm_90a")
    for tokens, k, experts, warps, blocks in ((1, 8, 128, 4, 1), (64, 8, 256, 16, 1), (1024, 8, 256, 32, 1), (4096, 8, 256, 32, 16),
                                              (32768, 8, 1024, 8, 128), (200000, 8, 128, 32, 121), (0, 8, 16, 4, 1)):
        problem = MoeSortProblem(tokens, k, experts)
        config = next(iter(sort_cuda.candidates(problem, target)))
        count, chunk = config.blocks(problem.slots)
        assert (config.warps, count) == (warps, blocks), problem
        assert count * chunk >= problem.slots and chunk % (32 * config.warps) == 0
        assert sort_cuda.shared_memory(problem, config) <= 48 << 10


def test_refusals_name_the_value() -> None:
    gpu, cpu = Target.parse("sm_80"), Target.parse("cpu-x86-64-v3")
    sort, permute, unpermute = MoeSortProblem(4, 2, 8), MoePermuteProblem(4, 2, 64, "bf16"), MoeUnpermuteProblem(4, 2, 64, "bf16", "bf16")
    for verdict, words in (
        (sort_cuda.supports(replace(sort, experts=2000), gpu), "2000 experts"), (sort_cuda.supports(sort, cpu), "sm_80"),
        (sort_cuda.supports(replace(sort, tokens=1 << 30, k=2), gpu), "int32"), (permute_cuda.supports(permute, cpu), "sm_80"),
        (permute_cuda.supports(replace(permute, dtype="fp64", weight_dtype="fp32"), gpu), "fp64"),
        (unpermute_cuda.supports(replace(unpermute, dtype="fp64"), gpu), "fp64"),
        (unpermute_cuda.supports(replace(unpermute, weight_dtype="e4m3"), gpu), "e4m3"),
        (sort_cuda.legal(replace(sort, experts=1024), gpu, sort_cuda.Config(16)), "16384 counters"),
    ):
        assert not verdict and words in verdict.reason, verdict
