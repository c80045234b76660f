"""A user's epilogue on a GPU: in every kernel that has it, through the public call, in a graph that is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import build
from kernelgen.kernels.gemm import dense_sm90, dense_sm90_cute, gemm_mma
from kernelgen.targets import target_of
from kernelgen.testing.data import poison_
from kernelgen.testing.epilogues import EPILOGUES, GATED, TOTALS, epilogue_named
from kernelgen.testing.mma_products import Product, make, problem_of, run_product

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FAMILIES = {f.FAMILY.name: f.FAMILY for f in (gemm_mma, dense_sm90, dense_sm90_cute)}
SIZES = ((37, 136, 72), (300, 520, 264), (1, 64, 128), (1000, 1024, 512), (257, 72, 4096))


@pytest.mark.parametrize("name", (*EPILOGUES, *TOTALS))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_against_the_reference(family: str, name: str) -> None:
    if FAMILIES[family].capabilities and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip(f"{family} is Hopper's")
    if (family, name) == ("gemm/dense_sm90_cute", "odd"):
        pytest.skip("tensors of bool are not in CuTe-DSL's epilogues")
    orders = ("gate_first",) if family == "gemm/dense_sm90_cute" else ("gate_first", "interleaved", "up_first")
    for m, n, k in SIZES:
        if m == 1 and name in TOTALS:
            continue  # one number has no tile by whose worst it could be judged
        if family == "gemm/dense_sm90_cute" and name in GATED:
            n -= n % 16  # its results leave by TMA, in rows of whole 16 bytes
        for gate_up in orders if name in GATED else orders[:1]:
            case = Product(m, n, k, "bf16", epilogue=name, batch=2 if name == "residual" else 1, gate_up=gate_up)
            run_product(case, FAMILIES[family], target_of("cuda"), build.kernel, device="cuda")


@pytest.mark.parametrize("backend", ["auto", "generated", "cublaslt", "torch"])
@pytest.mark.parametrize("name", EPILOGUES)
def test_public_calls(name: str, backend: str) -> None:
    a, b = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in ((2, 33, 128), (128, 96)))
    function = epilogue_named(name, 2, 33, 48 if name in GATED else 96, seed=5, device="cuda")
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


@pytest.mark.parametrize("backend", ["auto", "generated", "cublaslt", "torch", "reference"])
@pytest.mark.parametrize("name", TOTALS)
def test_public_calls_with_totals(name: str, backend: str) -> None:
    for m in (1, 33):
        a, b = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in ((2, m, 128), (128, 160)))
        function = epilogue_named(name, 2, m, 80 if name in GATED else 160, seed=5, device="cuda")
        want, totals = function.evaluate(a.double() @ b.double(), "gate_first")
        given = torch.empty_like(want, dtype=torch.bfloat16)
        for out in (None, None, given, given):
            got, by_name = kernelgen.gemm(a, b, epilogue=function, out=out, backend=backend)
            torch.testing.assert_close(got, want.to(torch.bfloat16), rtol=1.6e-2, atol=1e-2)
            for total, exact in zip(by_name.values(), totals):
                torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_totals_are_the_same_bits_every_time(family: str) -> None:
    """And of what is not finite."""
    case = Product(600, 1032, 512, "bf16", epilogue="norm", batch=2)
    tensors, _, _ = make(case, "cuda")
    tensors.a[0, 3, 5], tensors.a[1, 4, 6], tensors.a[1, 5] = float("inf"), float("nan"), 1e25
    problem, target = problem_of(case, tensors), target_of("cuda")
    config = next(iter(FAMILIES[family].candidates(problem, target)))
    run = FAMILIES[family].bind(problem, config, build.kernel(FAMILIES[family].spec(problem, target, config)), tensors)
    run(tensors)
    first = [t.clone() for t in tensors.totals]
    assert first[0][0, 3].isinf() and first[0][1, 4].isnan() and first[1][1, 4].isnan() and first[0][1, 5].isinf()
    assert first[1][1, 5].isfinite() and int((~first[0].isfinite()).sum()) == 3
    for _ in range(200):
        for t in tensors.totals:
            poison_(t)
        run(tensors)
        assert all(torch.equal(t.view(torch.int32), one.view(torch.int32)) for t, one in zip(tensors.totals, first))


def test_totals_in_a_captured_graph() -> None:
    a, b = (torch.randn(256, 256, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    function = epilogue_named("norm", 1, 256, 256, seed=5, device="cuda")
    for _ in range(2):
        want = kernelgen.gemm(a, b, epilogue=function)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, totals = kernelgen.gemm(a, b, epilogue=function)
    for t in (out, *totals.values()):
        t.zero_()
    for _ in range(3):
        graph.replay()
    assert torch.equal(out, want[0]) and all(torch.equal(t, want[1][name]) for name, t in totals.items())


def test_totals_in_compiled_code() -> None:
    a, b = (torch.randn(256, 256, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    function = epilogue_named("norm", 1, 256, 256, seed=5, device="cuda")

    def normalized(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out, totals = kernelgen.gemm(a, b, epilogue=function)
        return out.float() * torch.rsqrt(totals["sum_sq"] / out.shape[-1] + 1e-6).unsqueeze(-1)

    got = torch.compile(normalized, fullgraph=True, backend="aot_eager")(a, b)
    torch.testing.assert_close(got, normalized(a, b), rtol=1e-5, atol=1e-5)
