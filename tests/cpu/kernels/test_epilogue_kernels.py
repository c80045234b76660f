"""A user's epilogue in every kernel that has it: generated C++ here, CUDA lane by lane on the emulator, and compiled for its chip."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelgen import build
from kernelgen.kernels.gemm import dense_sm90, dense_sm90_cute, gemm_cpu, gemm_mma
from kernelgen.settings import settings
from kernelgen.targets import Target, target_of
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.epilogues import EPILOGUES, TOTALS
from kernelgen.testing.installed import toolchain_installed
from kernelgen.testing.mma_products import Product, make, problem_of, run_product
from kernelgen.testing.ptx_emulator import EmulatedCute
from kernelgen.testing.resources import measured

HOPPER = Target.parse("sm_90a")
CONFIGS: dict[str, tuple[Any, list[Any]]] = {
    "gemm_mma": (gemm_mma.FAMILY, [gemm_mma.Config(32, 32, 64, 2, 1, 2, stages=3)]),
    "dense_sm90": (dense_sm90.FAMILY, [dense_sm90.Config(1, 2, 128, 3), dense_sm90.Config(1, 1, 64, 3, split_k=2)]),
}


def _case(name: str, index: int, **more: Any) -> Product:
    m, n, k = ((37, 136, 72), (70, 264, 200), (1, 72, 64))[index % 3]
    gate_up = ("gate_first", "interleaved", "up_first")[index % 3]
    return Product(m, n, k, "bf16", epilogue=name, batch=2 if name == "residual" else 1, gate_up=gate_up, **more)


@pytest.mark.parametrize("name, dtype", [*product(EPILOGUES, ("fp32", "bf16", "fp64")), *product(TOTALS, ("bf16",))])
def test_in_generated_cpp(name: str, dtype: str) -> None:
    for index in range(3):
        case = replace(_case(name, index), a=dtype, out=dtype, pad=index)
        run_product(case, gemm_cpu.FAMILY, target_of("cpu"), build.kernel)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name, family", [*product((*EPILOGUES, *TOTALS), ("gemm_mma",)), *product(TOTALS, ("dense_sm90",))])
def test_lane_by_lane(name: str, family: str) -> None:
    folder: Path = settings().cache_dir / "emulated"
    kernels, configs = CONFIGS[family]
    for index, config in enumerate(configs):
        if family == "dense_sm90" and config.split_k > 1:  # whose exchange of sums is not emulated
            continue
        case = _case(name, index)
        run_product(case, kernels, HOPPER, lambda spec, seed=case.seed: EmulatedKernel(spec, folder, True, seed), config)


@pytest.mark.skipif(shutil.which("g++") is None or not toolchain_installed("cutedsl"), reason="needs g++ and CuTe-DSL")
def test_in_cute_dsl() -> None:
    """Its compiled kernel, host side included, by the emulator of PTX; totals over rows with tiles that end past the last column, and in
    clusters tiles that have none."""
    folder = settings().cache_dir / "emulated_ptx"
    for case, config in (
        (Product(70, 272, 72, "bf16", epilogue="residual", batch=2), dense_sm90_cute.Config(1, 2, 128, 3)),
        (Product(150, 328, 72, "bf16", epilogue="norm", batch=2), dense_sm90_cute.Config(1, 2, 128, 3, cluster_n=2, pingpong=True)),
        (Product(200, 272, 136, "fp16", epilogue="gate_total"), dense_sm90_cute.Config(2, 2, 128, 3)),
    ):
        run_product(case, dense_sm90_cute.FAMILY, HOPPER, lambda spec, seed=case.seed: EmulatedCute(spec, folder, seed=seed), config)


def test_what_cute_dsl_does_not_have() -> None:
    for name, order, text in (("odd", "gate_first", "'flag' is bool"), ("gate", "up_first", "gate_first")):
        case = Product(64, 64, 64, "bf16", epilogue=name, gate_up=order)
        verdict = dense_sm90_cute.FAMILY.supports(problem_of(case, make(case)[0]), HOPPER)
        assert not verdict and text in verdict.reason


def test_for_the_chip() -> None:
    """No spills, by the configs that dispatch takes."""
    specs = []
    for index, (kernels, _) in enumerate(CONFIGS.values()):
        for name in (*EPILOGUES, TOTALS[0]):
            case = Product(2048, 2048, 512, "bf16", epilogue=name, gate_up=("gate_first", "interleaved")[index])
            problem = problem_of(case, make(replace(case, m=8, n=16, k=8))[0])
            problem = replace(problem, alignment=16, out_alignment=16)
            specs.append(kernels.spec(problem, HOPPER, next(iter(kernels.candidates(problem, HOPPER)))))
    assert not {name: row for name, row in measured(specs).items() if row["spill_bytes"]}


def test_blocks_that_share_k_do_not_reduce() -> None:
    case = Product(64, 64, 512, "bf16", epilogue="norm")
    verdict = dense_sm90.FAMILY.legal(problem_of(case, make(case)[0]), HOPPER, dense_sm90.Config(1, 1, 64, 3, split_k=2))
    assert not verdict and "do not reduce rows" in verdict.reason


def test_a_function_is_no_activation() -> None:
    """Kernels that do not call it refuse it by name."""
    from kernelgen.kernels.gemm import product_triton, skinny_sm90

    case = Product(64, 64, 64, "bf16", epilogue="silu")
    problem = problem_of(case, make(case)[0])
    for family in (skinny_sm90.FAMILY, product_triton.FAMILY):
        verdict = family.supports(problem, HOPPER)
        assert not verdict and "function" in verdict.reason, family.name
    assert torch.is_tensor(make(case)[0].words)
