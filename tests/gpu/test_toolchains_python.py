"""Kernels of the cutedsl and triton toolchains on a GPU: built or prebuilt, launched on streams and in graphs, with odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelgen import build
from kernelgen.params import ParamStruct
from kernelgen.targets import target_of
from kernelgen.testing import toy
from kernelgen.testing.data import poisoned_empty

SIZES = (1, 127, 128, 1000, 100_003)


def _cute() -> Callable[[torch.Tensor, torch.Tensor], None]:
    with toy.templates():
        spec = replace(toy.spec("sm_90a", factor=-3, template=toy.CUTE_TEMPLATE), params=ParamStruct(()))
        kernel: Any = build.kernel(replace(spec, target=replace(target_of("cuda"), sm_count=0, shared_memory_per_block=0)))
    return kernel.entry("scale")


def _triton() -> Callable[[torch.Tensor, torch.Tensor], None]:
    with toy.templates():
        spec = toy.spec("sm_90a", factor=-3, template=toy.TRITON_TEMPLATE)
        kernel: Any = build.kernel(replace(spec, target=replace(target_of("cuda"), sm_count=0, shared_memory_per_block=0)))

    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        kernel.prepare(0, (-(-x.numel() // 128), 1, 1))(toy.packed(x, y))

    return run


@pytest.fixture(params=["cutedsl", "triton"])
def scale(request: pytest.FixtureRequest) -> Callable[[torch.Tensor, torch.Tensor], None]:
    return {"cutedsl": _cute, "triton": _triton}[request.param]()


def test_sizes_streams_and_graphs(scale: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    for n in SIZES:
        x, y = torch.randn(n, device="cuda"), poisoned_empty((n,), torch.float32, "cuda")
        scale(x, y)
        assert torch.equal(y, -3 * x), n
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(2.0)  # behind the sleep: a kernel on another stream would read what was there before
        scale(x, y)
    stream.synchronize()
    assert torch.equal(y, torch.full_like(y, -6.0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale(x, y)
    x.copy_(torch.randn_like(x))
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, -3 * x)
