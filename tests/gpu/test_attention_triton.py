"""attention/attention_triton on a GPU, through the public functions and our launcher: bf16, which Triton's interpreter does not have, and
sizes beyond it; the cases that the interpreter runs; plans whose lengths are on the device, and graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import GraphBounds, PageTable
from kernelgen.testing import interpreted_attention as small
from kernelgen.testing.attention_calls import NAN, compare_call, compare_nonfinite
from kernelgen.testing.attention_cases import Spec, check_many, specs
from kernelgen.testing.data import cu_seqlens, poisoned_empty, random_tensor, random_tensors
from kernelgen.testing.tolerance import assert_bits_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

BF16, FP16, FP32, INF = torch.bfloat16, torch.float16, torch.float32, float("inf")
AXES: dict[str, tuple[Any, ...]] = {
    "layout": ("dense", "ragged", "paged"), "dtype": ("bf16", "fp16", "fp32"), "kv": ("same",), "scales": ("none",), "rope": ("same",),
    "dims": ((128, 128), (64, 64), (72, 40), (192, 128), (256, 256), (64, 512))}


@pytest.mark.parametrize("spec", specs(1, axes=AXES), ids=str)
def test_random_problems(spec: Spec) -> None:
    check_many(spec, 3, "cuda", "triton")


@pytest.mark.parametrize("d, dv, dtype", [
    (64, 64, BF16), (128, 128, BF16), (128, 128, FP16), (256, 256, BF16), (576, 512, BF16), (192, 128, BF16), (128, 128, FP32),
    (512, 512, FP32), (64, 64, torch.float64)], ids=str)
def test_sizes(d: int, dv: int, dtype: torch.dtype) -> None:
    for seed, (b, sq, sk, features) in enumerate((
        (2, 1000, 1000, {"causal": True}), (1, 300, 2049, {"window": (700, 13)}), (3, 1, 777, {}),
        (1, 70, 130, {"causal": True, "soft_cap": 3.0}),
    )):
        q, k, v = random_tensors([(b, sq, 8, d), (b, sk, 2, d), (b, sk, 2, dv)], dtype, seed=seed, device="cuda")
        compare_call(q, k, v, seed=seed, what=f"{d}/{dv} {features}", backend="triton", **features)


def test_many_ragged_requests() -> None:
    lens = [i * 7 % 45 for i in range(300)]
    q, k, v = random_tensors([(sum(lens), 6, 64), (sum(lens) + 300, 2, 64), (sum(lens) + 300, 2, 64)], BF16, seed=1, device="cuda")
    starts = cu_seqlens(lens, "cuda"), cu_seqlens([n + 1 for n in lens], "cuda")
    compare_call(q, k, v, *starts, seed=1, what="300 requests", backend="triton", causal=True)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("values", [(NAN,), (INF, -INF), (INF, NAN)], ids=str)
def test_values_that_are_no_numbers(values: tuple[float, ...], dtype: torch.dtype) -> None:
    for d, features in ((64, {"causal": True}), (128, {"window": (20, 30), "soft_cap": 5.0}), (256, {"causal": True})):
        compare_nonfinite((40, 250), (215, 230, 247), d, values, "cuda", seed=d, dtype=dtype, backend="triton", **features)


def test_cases_of_the_interpreter() -> None:
    small.empty_rows("cuda")
    small.block_masks("cuda", BF16)
    small.far_apart("cuda")


def test_a_variant() -> None:
    bias = random_tensor((4, 257), FP32, seed=1, device="cuda")
    q, k, v = random_tensors([(2, 150, 4, 64), (2, 200, 2, 64), (2, 200, 2, 64)], BF16, seed=2, device="cuda")
    compare_call(q, k, v, seed=2, what="relative bias", backend="triton", variant=kernelgen.variants.relative_bias(bias))


def test_lengths_on_the_device_and_graphs() -> None:
    """As with lengths on the host, bit by bit; a captured plan is updated, and a captured call of attention runs again."""
    lens, page = (100, 1, 57, 300), 16
    blocks = torch.randperm(4 * 20, generator=torch.Generator().manual_seed(1)).reshape(4, 20).int().cuda()
    cache = random_tensor((80, 2, page, 2, 64), BF16, seed=3, device="cuda")
    q = random_tensor((4, 8, 64), BF16, seed=4, device="cuda")
    asked: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "q_dtype": BF16, "backend": "triton"}

    def table(lengths: tuple[int, ...], device: str) -> PageTable:
        return PageTable.from_blocks(blocks, torch.tensor(lengths, dtype=torch.int32, device=device), page)

    want = kernelgen.plan_attention(table(lens, "cpu"), **asked).run(q, cache)
    got = kernelgen.plan_attention(table(lens, "cuda"), **asked).run(q, cache)
    assert isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor)
    assert_bits_equal(got, want, what="lengths on the device")

    bounded = kernelgen.plan_attention(table(lens, "cpu"), cuda_graph_bounds=GraphBounds(4, 320), **asked)
    out, dense = poisoned_empty((4, 8, 64), BF16, "cuda"), poisoned_empty((4, 1, 8, 64), BF16, "cuda")
    keys = cache[:, 0, :, :, :].reshape(4, 320, 2, 64)
    calls = (lambda: bounded.run(q, cache, out=out), lambda: kernelgen.attention(q[:, None], keys, keys, out=dense, backend="triton"))
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    other = (7, 320, 33, 16)
    bounded.update(table(other, "cpu"))
    again = dense.clone()
    out.fill_(NAN), dense.fill_(NAN)
    graph.replay()
    fresh = kernelgen.plan_attention(table(other, "cpu"), **asked).run(q, cache)
    assert isinstance(fresh, torch.Tensor)
    assert_bits_equal(out, fresh, what="an updated plan")
    assert_bits_equal(dense, again, what="a captured call")
