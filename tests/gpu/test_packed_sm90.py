"""Few rows times packed 4-bit weights by gemm/packed_sm90 on a Hopper GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernelgen import build
from kernelgen.kernels.gemm import packed_sm90
from kernelgen.kernels.gemm.packed_sm90 import Config
from kernelgen.targets import target_of
from kernelgen.testing.mma_products import Product, problem_of, run_product
from kernelgen.testing.mma_products import make as make_product

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90")


def run(case: Product, config: Config | None = None) -> None:
    run_product(case, packed_sm90.FAMILY, target_of("cuda"), build.kernel, config, "cuda")


@pytest.mark.parametrize("weight, group, symmetric", (
    ("int4", 128, True), ("int4", 128, False), ("int4", 64, True), ("int4", 64, False), ("int4", 32, True), ("int4", 32, False),
    ("mxfp4", 32, True)))
@pytest.mark.parametrize("dtype", ("bf16", "fp16"))
def test_forms(dtype: str, weight: str, group: int, symmetric: bool) -> None:
    form: dict[str, Any] = dict(weight=weight, group=group, symmetric=symmetric)
    for m in (3, 13):
        for n, k in ((72, 32), (8, 4192), (1000, 2336)):
            run(Product(m, n, k, dtype, **form))


@pytest.mark.parametrize("split_k", (1, 2, 4, 8))
def test_configs(split_k: int) -> None:
    target = target_of("cuda")
    for tokens, case in ((8, Product(1, 328, 3104, "bf16", weight="int4")), (16, Product(9, 136, 544, "fp16", weight="mxfp4"))):
        for tiles, warps, stages, ahead in ((1, (2, 1), 2, 0), (2, (4, 2), 3, 100), (4, (2, 4), 4, 3), (3, (3, 3), 3, 12)):
            config = Config(tiles, tokens, *warps, stages, split_k, ahead)
            if packed_sm90.legal(problem_of(case, make_product(case)[0]), target, config):
                run(case, config)


@pytest.mark.parametrize("activation, out, bias, c", (
    ("relu", "bf16", "bf16", None), ("gelu", "fp32", "fp32", "fp32"), ("silu", "fp16", "bf16", "fp16"), (None, "bf16", None, "fp32")))
def test_epilogue(activation: str | None, out: str, bias: str | None, c: str | None) -> None:
    for m, n, k in ((5, 120, 288), (14, 392, 1120)):
        run(Product(m, n, k, "bf16", weight="int4", activation=activation, out=out, bias=bias, c=c, beta=-0.5))


def test_exact_inputs_give_exact_bits() -> None:
    run(Product(6, 200, 2048, "bf16", weight="int4", whole=True, out="fp32"))


def test_what_the_kernel_before_writes_is_seen() -> None:
    """Launches overlap, and codes, scales and a go to L2 before the kernel before has ended."""
    case = Product(4, 4096, 4096, "bf16", weight="int4")
    tensors = make_product(case, "cuda")[0]
    problem, target = problem_of(case, tensors), target_of("cuda")
    config = next(iter(packed_sm90.candidates(problem, target)))
    call = packed_sm90.bind(problem, config, build.kernel(packed_sm90.spec(problem, target, config)), tensors)
    call(tensors)
    wanted, written = tensors.out.clone(), (tensors.a, tensors.b, tensors.scale_b)
    kept = [t.clone() for t in written]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            for t in written:
                t.zero_()
            call(tensors)
            for t, old in zip(written, kept):
                t.copy_(old)
            call(tensors)
    for _ in range(20):
        tensors.out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(tensors.out, wanted)
