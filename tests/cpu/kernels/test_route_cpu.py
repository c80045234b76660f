"""moe/route_cpu: every case of the route kernels, the public call, special rows, repeated calls, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import build
from kernelgen.errors import DtypeError, LayoutError, ShapeError
from kernelgen.kernels.moe import route_cpu, route_cuda
from kernelgen.problems.moe import RouteProblem
from kernelgen.targets import Target, target_of
from kernelgen.testing.cpu_level import instruction_level
from kernelgen.testing.data import random_tensor
from kernelgen.testing.route_cases import CASES, Case, check_result, inputs_of, run_case, run_strange_bias
from kernelgen.testing.tolerance import assert_bits_equal

F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("name", CASES)
def test_experts_and_weights(name: str) -> None:
    run_case(CASES[name], route_cpu.FAMILY, target_of("cpu"), build.kernel)


def test_many_tokens_are_several_tasks() -> None:
    for case in (Case(700, 128, 8, "bf16", counts=True), Case(300, 256, 8, groups=(8, 4), method="deepseek_v3", bias="fp32", counts=True)):
        run_case(case, route_cpu.FAMILY, target_of("cpu"), build.kernel)


def test_float64_and_more_experts_than_a_warp_holds() -> None:
    logits = random_tensor((5, 3000), torch.float64, seed=1)
    weights, ids = kernelgen.route(logits, 40, backend="generated")
    expected = kernelgen.route(logits, 40, backend="reference")
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(weights, expected[0])


def test_instruction_level() -> None:
    with instruction_level("x86-64-v3"):
        for name in ("deepseek bf16", "special of all"):
            run_case(CASES[name], route_cpu.FAMILY, target_of("cpu"), build.kernel)


@pytest.mark.parametrize("name", ("special", "deepseek bf16", "ties with bias"))
def test_public_call(name: str) -> None:
    """The first call and the prepared one; strided rows; counts are added to."""
    case = CASES[name]
    logits, bias = inputs_of(case)
    counts = torch.zeros(case.experts, dtype=torch.int32)
    first = kernelgen.route(logits, case.k, bias=bias, counts=counts, backend="generated", **case.options)
    again = kernelgen.route(logits, case.k, bias=bias, counts=counts, backend="generated", **case.options)
    check_result(case, logits, bias, *first)
    for one, other in zip(first, again):
        assert one.data_ptr() != other.data_ptr()
        assert_bits_equal(other, one, what="again")
    assert torch.equal(counts, 2 * torch.bincount(first[1].flatten(), minlength=case.experts))
    wide = torch.zeros(case.tokens, 2 * case.experts, dtype=logits.dtype)[:, ::2].copy_(logits)
    with pytest.raises(LayoutError, match="stride"):
        kernelgen.route(wide, case.k)
    decision = kernelgen.explain("route", logits, case.k, bias=bias, counts=counts, **case.options)
    assert decision.chosen is not None and decision.chosen.kernel == "moe/route_cpu"


def test_counts_of_another_form_are_refused() -> None:
    logits = torch.zeros(2, 8)
    for counts, error in ((torch.zeros(7, dtype=torch.int32), ShapeError), (torch.zeros(8), DtypeError),
                          (torch.zeros(1, dtype=torch.int32).expand(8), LayoutError)):
        with pytest.raises(error, match="counts"):
            kernelgen.route(logits, 2, counts=counts)


def test_refusals_name_the_value() -> None:
    gpu, cpu, base = Target.parse("sm_80"), Target.parse("cpu-x86-64-v3"), RouteProblem(4, 64, 6, "bf16")
    changes: tuple[tuple[Any, Target, dict[str, Any], str], ...] = (
        (route_cuda, cpu, {}, "sm_80"), (route_cpu, gpu, {}, "CPU"), (route_cuda, gpu, {"experts": 1025}, "1025"),
        (route_cuda, gpu, {"k": 33}, "k = 33"), (route_cuda, gpu, {"dtype": "fp64"}, "fp64"), (route_cuda, gpu, {"method": "hash"}, "hash"),
        (route_cpu, cpu, {"dtype": "e4m3"}, "e4m3"), (route_cuda, gpu, {"bias": True, "bias_dtype": "fp64"}, "bias dtype fp64"))
    for module, target, change, words in changes:
        verdict = module.supports(replace(base, **change), target)
        assert not verdict and words in verdict.reason, verdict
    assert route_cuda.values_per_lane(256) == 8 and route_cuda.values_per_lane(160) == 6 and route_cuda.values_per_lane(1) == 1
    assert not route_cuda.legal(base, gpu, route_cuda.Config(8))


def test_strange_bias() -> None:
    run_strange_bias(route_cpu.FAMILY, target_of("cpu"), build.kernel)
