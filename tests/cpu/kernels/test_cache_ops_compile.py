"""append, rope and merge_states on CUDA without a GPU: everything compiles for every architecture and nothing spills."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kernelgen.kernels.attention import merge_states_cuda
from kernelgen.kernels.cache import append_cpu, append_cuda
from kernelgen.kernels.rope import rope_cpu, rope_cuda
from kernelgen.kernels.rope.access import copy_access, rotation_access, units_of_head
from kernelgen.kernels.rowwise import TokenConfig
from kernelgen.problems.cache_ops import AppendProblem, MergeProblem, RopeProblem, Rotation
from kernelgen.targets import Target
from kernelgen.testing.resources import ARCHS, compiled, covered

FAMILIES = (append_cuda.FAMILY, rope_cuda.FAMILY, merge_states_cuda.FAMILY)
APPEND = AppendProblem(64, 8, 128, 128, "bf16", "bf16", "bf16", "bf16", 16)
ROPE = RopeProblem(64, 32, 8, 128, "bf16", Rotation(128))


@pytest.mark.parametrize("arch", ARCHS)
def test_coverage_compiles(arch: str) -> None:
    for name, report in compiled([spec for family in FAMILIES for spec in covered(family, Target.parse(arch))]).items():
        # 64 registers let a block of 256 threads be there four times: what hides the latency of a token's indices.
        assert report["registers"] <= 64 and report["spill_stores"] == 0, (name, report)


def test_one_spec_for_everything_that_varies_from_call_to_call() -> None:
    target = Target.parse("sm_90a")
    config = next(iter(append_cuda.candidates(APPEND, target)))
    spec = append_cuda.spec(APPEND, target, config)
    changes: tuple[dict[str, Any], ...] = (
        {"tokens": 3}, {"heads": 2}, {"head_dim": 256}, {"page_size": 7}, {"table": "slots"}, {"table": "blocks"},
        {"k_dtype": "fp16", "v_dtype": "fp16", "k_cache_dtype": "fp16", "v_cache_dtype": "fp16"})
    for change in changes:
        assert append_cuda.spec(replace(APPEND, **change), target, config) == spec
    quantised = replace(APPEND, k_cache_dtype="e4m3", v_cache_dtype="e4m3")
    for kind in ("number", "head", "page"):
        assert append_cuda.spec(replace(quantised, k_scale=kind), target, config) == append_cuda.spec(quantised, target, config)
    rope_config = TokenConfig(256)
    for change in ({"tokens": 3}, {"q_heads": 5}, {"head_dim": 256}, {"rotation": Rotation(64)}, {"in_place": True}):
        assert rope_cuda.spec(replace(ROPE, **change), target, rope_config) == rope_cuda.spec(ROPE, target, rope_config)  # type: ignore[arg-type]


def test_access_widths() -> None:
    assert copy_access(((2, 16),), 128) == 8 and copy_access(((2, 2),), 128) == 1 and copy_access(((2, 16),), 20) == 4
    assert copy_access(((2, 16), (1, 4)), 128) == 4 and copy_access(((1, 16),), 64) == 16 and copy_access(((8, 16),), 9) == 1
    assert rotation_access(8, Rotation(64), 128) == 8 and rotation_access(8, Rotation(24), 128) == 4
    assert rotation_access(8, Rotation(24, True), 128) == 8 and rotation_access(8, Rotation(22, True), 46) == 2
    assert units_of_head(8, Rotation(64), 128) == 4 + 8 and units_of_head(1, Rotation(64, True), 64) == 32


def test_blocks_fit_the_token() -> None:
    target = Target.parse("sm_90a")
    for problem, expected in ((APPEND, 256), (replace(APPEND, heads=1, head_dim=512, head_dim_v=64), 128), (replace(APPEND, heads=1), 64)):
        assert next(iter(append_cuda.candidates(problem, target))).threads == expected
    for dim, dtype, lanes in ((128, "bf16", 16), (512, "fp32", 64), (8, "fp16", 8)):
        assert next(iter(merge_states_cuda.candidates(MergeProblem(2, 9, 8, dim, dtype), target))).lanes == lanes


def test_refusals_name_the_value() -> None:
    gpu, cpu = Target.parse("sm_80"), Target.parse("cpu-x86-64-v3")
    double = replace(APPEND, k_dtype="fp64", k_cache_dtype="e4m3")
    for verdict, words in (
        (append_cuda.supports(APPEND, cpu), "sm_80"), (append_cpu.supports(APPEND, gpu), "CPU"), (append_cpu.supports(double, cpu), "fp64"),
        (append_cuda.supports(replace(APPEND, rotation=Rotation(4096)), gpu), "4096"),
        (rope_cpu.supports(replace(ROPE, dtype="e4m3"), cpu), "e4m3"), (rope_cuda.supports(replace(ROPE, tokens=2**31), gpu), str(2**31)),
        (merge_states_cuda.supports(MergeProblem(2, 9, 8, 128, "fp64"), gpu), "fp64"),
        (merge_states_cuda.supports(MergeProblem(2, 9, 8, 128, "bf16", "fp64"), gpu), "fp64"),
    ):
        assert not verdict and words in verdict.reason, verdict
