"""quantize/quantize_fp8_cuda on a GPU: the cases of the emulated test, every config of rows, sizes that fill the chip, graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelgen import build
from kernelgen.kernels.quantize import quantize_fp8_cuda
from kernelgen.problems.quantize import QuantizeProblem
from kernelgen.targets import target_of
from kernelgen.tensors import QuantizeTensors
from kernelgen.testing.data import poisoned_empty, random_tensor
from kernelgen.testing.quantize_cases import CASES, Case, run_case
from kernelgen.testing.tolerance import assert_bits_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

FAMILY = quantize_fp8_cuda.FAMILY
LARGE = {
    "tensor": Case("tensor", (4001, 7168)), "row": Case("row", (4001, 7168)), "row of a million": Case("row", (3, 1 << 20)),
    "block": Case("block_1x128", (4001, 7168)), "block swiglu": Case("block_1x128", (1000, 4096), activation="swiglu"),
    "square": Case("block_128x128", (3, 1000, 2048)), "fp16": Case("block_1x128", (300, 5000), "fp16", "e5m2", "gelu_tanh"),
}


@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_codes_and_scales(name: str) -> None:
    run_case((CASES | LARGE)[name], FAMILY, target_of("cuda"), build.kernel, device="cuda")


@pytest.mark.parametrize("config", quantize_fp8_cuda._SHAPES["row"], ids=str)
def test_every_config_of_rows(config: quantize_fp8_cuda.Config) -> None:
    width = config.held - 24 if config.kept else 70000
    run_case(Case("row", (130, width)), FAMILY, target_of("cuda"), build.kernel, config, "cuda")


@pytest.mark.parametrize("recipe", ("tensor", "block_1x128"))
def test_graph_capture(recipe: str) -> None:
    problem = QuantizeProblem(1, 512, 1024, "bf16", recipe=recipe)
    target = target_of("cuda")
    config = next(iter(FAMILY.candidates(problem, target)))
    x = random_tensor((1, 512, 1024), torch.bfloat16, seed=1, device="cuda")
    shape = (1, 1, 1) if recipe == "tensor" else (1, 512, 8)
    tensors = QuantizeTensors(x, poisoned_empty(x.shape, torch.float8_e4m3fn, "cuda"), poisoned_empty(shape, device="cuda"))
    run = FAMILY.bind(problem, config, build.kernel(FAMILY.spec(problem, target, config)), tensors)
    run(tensors)
    expected = tensors.codes.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(tensors)
    x.copy_(random_tensor((1, 512, 1024), torch.bfloat16, seed=2, device="cuda"))
    graph.replay()
    changed = tensors.codes.clone()
    run(tensors)
    assert_bits_equal(changed, tensors.codes, what="replayed on new values")
    x.copy_(random_tensor((1, 512, 1024), torch.bfloat16, seed=1, device="cuda"))
    graph.replay()
    assert_bits_equal(tensors.codes, expected, what="replayed")


def test_rows_that_do_not_exist_stay_as_they_are() -> None:
    problem = replace(QuantizeProblem(3, 40, 256, "bf16"), recipe="block_1x128")
    target, config = target_of("cuda"), quantize_fp8_cuda._SHAPES["block_1x128"][0]
    x = random_tensor((3, 40, 256), torch.bfloat16, seed=1, device="cuda")
    tensors = QuantizeTensors(x, poisoned_empty(x.shape, torch.float8_e4m3fn, "cuda"), poisoned_empty((3, 40, 2), device="cuda"))
    ends = torch.tensor([0, 7, 40], dtype=torch.int32, device="cuda")
    kernel = build.kernel(quantize_fp8_cuda.spec(problem, target, config, limited=True))
    quantize_fp8_cuda.bind_limited(problem, config, kernel, tensors)(tensors, ends.data_ptr())
    written = ~tensors.scale.isnan().any(-1)
    assert torch.equal(written, torch.arange(40, device="cuda") < ends.unsqueeze(1))
