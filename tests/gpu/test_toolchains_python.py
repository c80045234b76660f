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


def _cute(factor: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
    with toy.templates():
        spec = replace(toy.spec("sm_90a", factor=factor, template=toy.CUTE_TEMPLATE), params=ParamStruct(()))
        kernel: Any = build.kernel(replace(spec, target=replace(target_of("cuda"), sm_count=0, shared_memory_per_block=0)))
    return kernel.entry("scale")


def _triton(factor: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
    with toy.templates():
        spec = toy.spec("sm_90a", factor=factor, template=toy.TRITON_TEMPLATE)
        kernel: Any = build.kernel(replace(spec, target=replace(target_of("cuda"), sm_count=0, shared_memory_per_block=0)))

    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        kernel.prepare(0, (-(-x.numel() // 128), 1, 1))(toy.packed(x, y))

    return run


@pytest.fixture(params=[_cute, _triton], ids=["cutedsl", "triton"])
def scaling(request: pytest.FixtureRequest) -> Callable[[int], Callable[[torch.Tensor, torch.Tensor], None]]:
    """By a factor: each is a kernel of its own."""
    return request.param


def test_sizes_streams_and_graphs(scaling: Callable[[int], Callable[[torch.Tensor, torch.Tensor], None]]) -> None:
    scale = scaling(-3)
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


def test_a_first_call_within_a_capture(scaling: Callable[[int], Callable[[torch.Tensor, torch.Tensor], None]]) -> None:
    scale = scaling(-5)  # that nobody called before
    x, y = torch.randn(1000, device="cuda"), poisoned_empty((1000,), torch.float32, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale(x, y)
    graph.replay()
    assert torch.equal(y, -5 * x)
