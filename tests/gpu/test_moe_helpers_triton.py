"""moe/unpermute_triton and quantize/quantize_fp8_triton on a GPU: the cases of their siblings in CUDA, whose bits they have, every config,
sizes that fill the chip, graphs, and the layers that take them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import build
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.moe import rows_triton, unpermute_cuda
from kernelgen.kernels.quantize import quantize_fp8_cuda
from kernelgen.moe_tensors import UnpermuteTensors
from kernelgen.problems.moe import MoeUnpermuteProblem
from kernelgen.problems.quantize import LimitedQuantizeProblem, QuantizeProblem
from kernelgen.targets import target_of
from kernelgen.tensors import QuantizeTensors
from kernelgen.testing.data import poison_, poisoned_empty, random_tensor
from kernelgen.testing.moe_cases import UNPERMUTES, run_unpermute
from kernelgen.testing.moe_layer import check_moe, layer, quantize_experts
from kernelgen.testing.quantize_cases import CASES, run_case
from kernelgen.testing.tolerance import assert_bits_equal

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs sm_90")


def bound(family: KernelFamily, problem: Any, tensors: Any, config: Any = None) -> Any:
    target = target_of("cuda")
    assert family.supports(problem, target)
    config = config or next(iter(family.candidates(problem, target)))
    return family.bind(problem, config, build.kernel(family.spec(problem, target, config)), tensors)


@pytest.mark.parametrize("name", UNPERMUTES)
def test_sums(name: str) -> None:
    run_unpermute(UNPERMUTES[name], rows_triton.FAMILY, target_of("cuda"), build.kernel, "cuda")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.recipe == "block_1x128"])
def test_codes_and_scales(name: str) -> None:
    run_case(replace(CASES[name], activation=None), rows_triton.QUANTIZE, target_of("cuda"), build.kernel, device="cuda")


@pytest.mark.parametrize("tokens, k, width", ((1, 8, 2048), (300, 2, 4096), (5000, 8, 1000), (4096, 10, 2048)))
def test_sums_have_the_bits_of_the_sibling(tokens: int, k: int, width: int) -> None:
    rows = random_tensor((tokens * k, width), torch.bfloat16, seed=1, device="cuda")
    slots = torch.randperm(tokens * k, device="cuda").to(torch.int32).view(tokens, k)
    slots[:, 1:][torch.rand(tokens, k - 1, device="cuda") < 0.2] = -1
    weights = random_tensor((tokens, k), seed=2, device="cuda")
    problem, made = MoeUnpermuteProblem(tokens, k, width, "bf16", "bf16", alignment=16 if width % 8 == 0 else 2), []
    configs = list(rows_triton.FAMILY.candidates(problem, target_of("cuda")))
    for family, config in ((unpermute_cuda.FAMILY, None), *((rows_triton.FAMILY, c) for c in configs)):
        t = UnpermuteTensors(rows, slots, poisoned_empty((tokens, width), torch.bfloat16, "cuda"), weights)
        bound(family, problem, t, config)(t)
        made.append(t.out)
    for out in made[1:]:
        assert_bits_equal(out, made[0], what=f"{problem}")


@pytest.mark.parametrize("rows, width", ((3, 768), (9000, 768), (4096, 7168), (100, 2056)))
def test_codes_have_the_bits_of_the_sibling(rows: int, width: int) -> None:
    """Up to where rows end, behind which nothing is compared."""
    x, end = random_tensor((1, rows, width), torch.bfloat16, seed=3, device="cuda", scale=4.0), rows - rows // 3
    ends = torch.tensor([end], dtype=torch.int32, device="cuda")
    for kind in (QuantizeProblem, LimitedQuantizeProblem):
        problem, made = kind(1, rows, width, "bf16", recipe="block_1x128", alignment=16 if width % 16 == 0 else 8), []
        configs = list(rows_triton.QUANTIZE.candidates(problem, target_of("cuda")))
        for family, config in ((quantize_fp8_cuda.FAMILY, None), *((rows_triton.QUANTIZE, c) for c in configs)):
            codes = poison_(torch.empty((1, rows, width), dtype=torch.float8_e4m3fn, device="cuda"))
            scale = torch.full((1, -(-width // 128), -(-rows // 4) * 4), -1.0, device="cuda").mT[:, :rows]
            t = QuantizeTensors(x, codes, scale, ends if problem.limited else None)
            bound(family, problem, t, config)(t)
            used = end if problem.limited else rows
            made.append((codes[:, :used].contiguous().view(torch.uint8), scale[:, :used].contiguous()))
        for other in made[1:]:
            assert_bits_equal(other[0], made[0][0], what=f"{problem} codes")
            assert_bits_equal(other[1], made[0][1], what=f"{problem} scales")


def test_layers_take_them() -> None:
    """By the public call, and captured."""
    c = layer(600, 16, 4, 2048, 256, device="cuda")
    fp8 = quantize_experts(layer(300, 8, 2, 2048, 768, device="cuda"), "block_128x128", "block_128x128")
    for arguments, kernels in ((c, {"moe/unpermute_triton"}), (fp8, {"moe/unpermute_triton", "quantize/quantize_fp8_triton"})):
        chosen = kernelgen.explain("moe", **arguments, backend="generated").chosen
        assert chosen is not None and kernels <= {d.chosen.kernel for _, d in chosen.config.decisions}, str(chosen.config)
        check_moe(arguments, what=str(kernels))
    out = torch.empty_like(c["x"])
    expected = kernelgen.moe(**c)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernelgen.moe(**c, out=out)
    poison_(out)
    graph.replay()
    assert_bits_equal(out, expected, what="replayed")
