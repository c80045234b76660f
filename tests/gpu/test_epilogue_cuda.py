"""A user's epilogue on a GPU: in every kernel that has it, through the public call, in a graph that is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import build
from kernelgen.kernels.gemm import dense_sm90, dense_sm90_cute, gemm_mma
from kernelgen.targets import target_of
from kernelgen.testing.epilogues import EPILOGUES, epilogue_named
from kernelgen.testing.mma_products import Product, run_product

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FAMILIES = {f.FAMILY.name: f.FAMILY for f in (gemm_mma, dense_sm90, dense_sm90_cute)}
SIZES = ((37, 136, 72), (300, 520, 264), (1, 64, 128), (1000, 1024, 512), (257, 72, 4096))


@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_against_the_reference(family: str, name: str) -> None:
    if FAMILIES[family].capabilities and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip(f"{family} is Hopper's")
    if (family, name) == ("gemm/dense_sm90_cute", "odd"):
        pytest.skip("tensors of bool are not in CuTe-DSL's epilogues")
    orders = ("gate_first",) if family == "gemm/dense_sm90_cute" else ("gate_first", "interleaved", "up_first")
    for m, n, k in SIZES:
        if (family, name) == ("gemm/dense_sm90_cute", "gate"):
            n -= n % 16  # its results leave by TMA, in rows of whole 16 bytes
        for gate_up in orders if name == "gate" else orders[:1]:
            case = Product(m, n, k, "bf16", epilogue=name, batch=2 if name == "residual" else 1, gate_up=gate_up)
            run_product(case, FAMILIES[family], target_of("cuda"), build.kernel, device="cuda")


@pytest.mark.parametrize("backend", ["auto", "generated", "cublaslt", "torch"])
@pytest.mark.parametrize("name", EPILOGUES)
def test_public_calls(name: str, backend: str) -> None:
    a, b = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in ((2, 33, 128), (128, 96)))
    function = epilogue_named(name, 2, 33, 48 if name == "gate" else 96, seed=5, device="cuda")
    want = function.apply(a.double() @ b.double(), "gate_first").to(torch.bfloat16)
    for _ in range(2):
        got = kernelgen.gemm(a, b, epilogue=function, backend=backend)
        torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-2)


def test_in_a_captured_graph() -> None:
    a, b = (torch.randn(128, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    function = epilogue_named("residual", 1, 128, 128, seed=5, device="cuda")
    out: Any = torch.empty(128, 128, dtype=torch.bfloat16, device="cuda")
    for _ in range(2):
        kernelgen.gemm(a, b, epilogue=function, out=out)
    want, graph = out.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernelgen.gemm(a, b, epilogue=function, out=out)
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)
