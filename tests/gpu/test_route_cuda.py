"""moe/route_cuda on a GPU: the cases of the emulated test, sizes that fill the chip, repeats, graphs."""

from __future__ import annotations

import pytest
import torch

import kernelgen
from kernelgen import build
from kernelgen.kernels.moe import route_cuda
from kernelgen.targets import target_of
from kernelgen.testing.data import random_tensor
from kernelgen.testing.route_cases import CASES, Case, check_result, run_case, run_strange_bias
from kernelgen.testing.tolerance import assert_bits_equal

LARGE = {
    "deepseek": Case(4096, 256, 8, "bf16", "deepseek_v3", bias="fp32", groups=(8, 4), scaling=2.5, counts=True),
    "qwen3 next": Case(4096, 512, 10, "bf16"),
    "mixtral": Case(32768, 8, 2, "bf16", counts=True),
    "qwen3": Case(32768, 128, 8, "bf16", counts=True),
}


@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_experts_and_weights(name: str) -> None:
    run_case((CASES | LARGE)[name], route_cuda.FAMILY, target_of("cuda"), build.kernel, "cuda")


def test_repeats_and_graphs() -> None:
    """1,000 repeats give equal bits; a captured call follows new logits."""
    logits, bias = random_tensor((300, 256), torch.bfloat16, seed=1, device="cuda"), random_tensor((256,), seed=2, scale=0.1, device="cuda")
    options = dict(method="deepseek_v3", bias=bias, num_groups=8, topk_groups=4, backend="generated")
    first = kernelgen.route(logits, 8, **options)  # type: ignore[arg-type]
    for _ in range(1000):
        again = kernelgen.route(logits, 8, **options)  # type: ignore[arg-type]
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernelgen.route(logits, 8, **options)  # type: ignore[arg-type]
    logits.copy_(random_tensor((300, 256), torch.bfloat16, seed=3, device="cuda"))
    graph.replay()
    expected = kernelgen.route(logits, 8, **options)  # type: ignore[arg-type]
    assert_bits_equal(captured[0], expected[0], what="weights")
    assert_bits_equal(captured[1], expected[1], what="ids")
    case = Case(300, 256, 8, "bf16", "deepseek_v3", bias="fp32", groups=(8, 4))
    check_result(case, logits.cpu(), bias.cpu(), captured[0].cpu(), captured[1].cpu())


def test_strange_bias() -> None:
    run_strange_bias(route_cuda.FAMILY, target_of("cuda"), build.kernel, "cuda")
