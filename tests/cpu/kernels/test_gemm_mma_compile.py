"""gemm/gemm_mma, gemm/packed_skinny, gemm/grouped_gemm_mma, quantize/quantize_fp8_cuda and the CUDA row kernels without a GPU:
everything compiles for every architecture, tuned kernels keep their resources.

The table beside this file holds registers, spills and shared memory of the tuned kernels. After a change that moves
them on purpose: ``python tests/cpu/kernels/test_gemm_mma_compile.py`` writes it anew.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelgen.kernels.activation import silu_and_mul_cuda
from kernelgen.kernels.gemm import gemm_mma, grouped_gemm_mma, mma_configs, packed_skinny
from kernelgen.kernels.gemm.gemm_mma import Config
from kernelgen.kernels.gemm.mma import form_of
from kernelgen.kernels.norm import rmsnorm_cuda
from kernelgen.kernels.quantize import quantize_fp8_cuda
from kernelgen.problems.gemm import GemmProblem
from kernelgen.problems.quantize import QuantizeProblem
from kernelgen.problems.rows import RmsNormProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.resources import ARCHS, assert_within_table, compiled, covered, measured

FAMILIES = (gemm_mma.FAMILY, packed_skinny.FAMILY, grouped_gemm_mma.FAMILY, quantize_fp8_cuda.FAMILY, rmsnorm_cuda.FAMILY,
            silu_and_mul_cuda.FAMILY)
# All of coverage() compiles for sm_90a. sm_86 stands for every part with 99 KB of shared memory: there what takes another config. The
# other architectures compile the instructions in use once each, which is what could differ.
FULL_ARCH, SMALL_MEMORY = "sm_90a", "sm_86"
TABLE = Path(__file__).with_name("ptxas_gemm_mma.json")
TABLE_ARCHS = ("sm_80", "sm_90a")
BASE = GemmProblem(1, 4096, 4096, 4096, "bf16", "bf16", "bf16", b_order="col")
BLOCKS = replace(BASE, a_dtype="e4m3", b_dtype="e4m3", scales="block_128x128")
WEIGHT = replace(BASE, b_dtype="int4", weight_format="int4", group_size=128, scale_dtype="bf16")
MXFP4 = replace(BASE, b_dtype="mxfp4", weight_format="mxfp4", group_size=32, scale_dtype="e8m0")


def tuned_specs(arch: str) -> list[KernelSpec]:
    """Every config that the chooser may pick, and what differs most from it in registers."""
    target = Target.parse(arch)
    configs = [m.config for m in mma_configs.MEASURED if gemm_mma.legal(BASE, target, m.config)]
    specs = [gemm_mma.spec(BASE, target, config) for config in configs]
    for problem, count in ((BLOCKS, None), (replace(BLOCKS, scales="row"), 1), (WEIGHT, 1), (MXFP4, 4)):
        fitting = [m.config for m in mma_configs.table_of(form_of(problem)) if gemm_mma.legal(problem, target, m.config)]
        specs += [gemm_mma.spec(problem, target, config) for config in fitting[:count]]
    for problem, m in ((WEIGHT, 1), (WEIGHT, 16), (WEIGHT, 32), (MXFP4, 1), (MXFP4, 16)):
        few = replace(problem, m=m)
        specs.append(packed_skinny.spec(few, target, next(iter(packed_skinny.candidates(few, target)))))
    wide = configs[0]
    specs.append(gemm_mma.spec(replace(BASE, b_order="row", a_order="col"), target, wide))
    specs.append(gemm_mma.spec(replace(BASE, activation="swiglu"), target, wide))
    for shape in rmsnorm_cuda._SHAPES:
        config = rmsnorm_cuda.Config(*shape)
        problem = RmsNormProblem(64, 8 * config.lanes * max(config.kept, 1), "bf16", "bf16", True)
        if rmsnorm_cuda.legal(problem, target, config):
            specs.append(rmsnorm_cuda.spec(problem, target, config))
    for recipe, shapes in quantize_fp8_cuda._SHAPES.items():
        wide = QuantizeProblem(1, 4096, 7168, "bf16", recipe=recipe)
        specs += [quantize_fp8_cuda.spec(wide, target, shape) for shape in shapes]
    return specs


@pytest.mark.parametrize("arch", ARCHS)
def test_coverage_compiles(arch: str) -> None:
    target = Target.parse(arch)
    if arch in (FULL_ARCH, SMALL_MEMORY):
        elsewhere = {spec.name for family in FAMILIES for spec in covered(family, Target.parse(FULL_ARCH))} if arch == SMALL_MEMORY else ()
        specs = [spec for family in FAMILIES for spec in covered(family, target) if spec.name not in elsewhere]
        assert specs
    else:
        small = Config(64, 64, 64, 2, 2, stages=3)
        gated = replace(BASE, activation="swiglu", b_order="row", alignment=4)
        specs = [gemm_mma.spec(replace(BASE, a_dtype="fp16", b_dtype="fp16"), target, small), gemm_mma.spec(gated, target, small)]
        specs += [covered(family, target)[0] for family in FAMILIES[1:]]
    for name, report in compiled(specs).items():
        assert report["registers"] <= 255 and report["spill_stores"] == 0, (name, report)


@pytest.mark.parametrize("arch", TABLE_ARCHS)
def test_tuned_kernels_keep_their_resources(arch: str) -> None:
    assert_within_table(tuned_specs(arch), TABLE, arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_problem_has_a_config(arch: str) -> None:
    """Also where a block has only 99 KB of shared memory, in every order and form, with every gate."""
    target = Target.parse(arch)
    for base in (BASE, BLOCKS, replace(BLOCKS, scales="tensor", accumulate="fast"), WEIGHT, MXFP4):
        orders = itertools.product(("row", "col"), ("col",) if base.weight_format else ("row", "col"))
        gates = ((None, "gate_first"), ("swiglu", "gate_first"), ("geglu", "interleaved"))
        for (a_order, b_order), (activation, gate_up), m, n in itertools.product(orders, gates, (1, 17, 64, 100, 256, 5000), (2, 30, 4096)):
            problem = replace(base, m=m, n=n, a_order=a_order, b_order=b_order, activation=activation, gate_up=gate_up)
            assert gemm_mma.supports(problem, target)
            configs = list(gemm_mma.candidates(problem, target))
            assert configs, f"no config for {problem} on {arch}"
            for config in configs:
                assert config.shared_memory(form_of(problem)) <= target.shared_memory_per_block


def test_choice_follows_the_measurements() -> None:
    """The fastest measured config of each shape, or one within 4 % of it (docs/design/gemm_portable.md)."""
    target = Target.parse("sm_90a")
    for shape, expected in (
        ((4096, 4096, 4096), "256x128x64 w4x2 s3"), ((512, 4096, 7168), "128x128x64 w2x2 s3 b2"),
        ((256, 4096, 7168), "128x64x128 w2x2x2 s4"), ((128, 4096, 7168), "64x64x128 w2x2x2 s5"),
        ((64, 4096, 7168), "64x32x128 w2x1x4 s6"), ((16, 4096, 7168), "16x32x256 w1x1x4 s6"),
    ):
        m, n, k = shape
        assert str(next(iter(gemm_mma.candidates(replace(BASE, m=m, n=n, k=k), target)))) == expected


def test_one_spec_for_all_extents_and_batches() -> None:
    """What varies from call to call must not compile anew."""
    target = Target.parse("sm_90a")
    config = Config(64, 64, 64, 2, 2)
    spec = gemm_mma.spec(BASE, target, config)
    for change in ({"m": 3}, {"n": 80}, {"k": 99}, {"batch": 9}, {"batched_b": True}, {"accumulate": "fast"}):
        assert gemm_mma.spec(replace(BASE, **change), target, config) == spec  # type: ignore[arg-type]
    # The up half of a row-order b starts N / 2 elements into a row: an odd half takes two-byte accesses.
    gated = replace(BASE, b_order="row", activation="swiglu")
    assert "_a2_" in gemm_mma.spec(replace(gated, n=4098), target, config).name
    assert "_a2_" not in gemm_mma.spec(gated, target, config).name


@pytest.mark.parametrize("change, words", [
    ({"a_dtype": "fp32", "b_dtype": "fp32"}, "fp32"), ({"b_dtype": "fp16"}, "bf16 and fp16"), ({"out_dtype": "e4m3"}, "e4m3"),
    ({"bias_dtype": "fp64"}, "fp64"), ({"scales": "row"}, "scales=row"),
    ({"weight_format": "int4", "b_dtype": "int4", "group_size": 48, "scale_dtype": "bf16"}, "48"),
    ({"k": 2**31}, str(2**31)),
])
def test_refusals_name_the_value(change: dict[str, Any], words: str) -> None:
    verdict = gemm_mma.supports(replace(BASE, **change), Target.parse("sm_80"))
    assert not verdict and words in verdict.reason


def test_illegal_configs_say_why() -> None:
    target = Target.parse("sm_86")
    for config, words in (
        (Config(96, 64, 64, 1, 2), "96x32"), (Config(64, 64, 48, 2, 2), "block_k 48"), (Config(256, 256, 64, 2, 2), "registers"),
        (Config(128, 128, 64, 2, 2, stages=4), "shared memory"), (Config(64, 64, 64, 2, 2, stages=1), "1 stages"),
        (Config(16, 64, 1024, 1, 1), "whole rows"),
    ):
        verdict = gemm_mma.legal(BASE, target, config)
        assert not verdict and words in verdict.reason, (config, verdict)
    gated = replace(BASE, activation="swiglu")
    assert "gate and up" in gemm_mma.legal(gated, target, Config(16, 16, 256, 1, 1)).reason


if __name__ == "__main__":
    TABLE.write_text(json.dumps({arch: measured(tuned_specs(arch)) for arch in TABLE_ARCHS}, indent=1) + "\n")
