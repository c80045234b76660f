"""The activations that moe asks of the portable products beside gemm's own: on the CPU, and the CUDA epilogue lane by lane."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from kernelgen import build
from kernelgen.kernels.gemm import dense_sm90, grouped_gemm_cpu, grouped_gemm_mma, grouped_sm90, skinny_sm90
from kernelgen.kernels.gemm.gemm_mma import Config
from kernelgen.problems.gemm import MORE_ACTIVATIONS, GemmProblem, GroupedGemmProblem
from kernelgen.settings import settings
from kernelgen.targets import Target, target_of
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.moe_activations import CASES, run_activation

TARGET = Target.parse("sm_90a")


@pytest.mark.parametrize("case", [CASES[i] for i in (0, 1, 3, 7)], ids=lambda c: f"{c[0]} {c[2]}")
def test_cpu(case: tuple) -> None:
    run_activation(case, torch.bfloat16, grouped_gemm_cpu.FAMILY, target_of("cpu"), build.kernel)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]} {c[2]} {c[4]}")
def test_mma_emulated(case: tuple) -> None:
    folder: Path = settings().cache_dir / "emulated"
    run_activation(case, torch.bfloat16, grouped_gemm_mma.FAMILY, TARGET, lambda spec: EmulatedKernel(spec, folder),
                   Config(32, 32, 32, 2, 1, stages=2))


def test_every_product_has_every_activation() -> None:
    for activation in MORE_ACTIVATIONS:
        problem = GroupedGemmProblem(8, 64, 256, 128, "bf16", "bf16", "bf16", b_order="col", batched_b=True, activation=activation)
        assert grouped_gemm_mma.supports(problem, TARGET) and grouped_gemm_cpu.supports(problem, Target.parse("cpu-x86-64-v3"))
        assert grouped_sm90.supports(problem, TARGET)
        single = GemmProblem(1, 64, 256, 128, "bf16", "bf16", "bf16", b_order="col", activation=activation)
        assert dense_sm90.supports(single, TARGET) and skinny_sm90.supports(single, TARGET)
        assert problem.outputs == (256 if activation in ("relu", "relu2", "gelu", "gelu_tanh", "silu") else 128)
        assert problem.clamped == (activation == "swiglu_oai" or activation.endswith("clamped"))
