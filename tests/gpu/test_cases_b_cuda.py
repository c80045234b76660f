"""Group B of the public bug cases on a GPU: the functions of tests/cases with CUDA tensors, and what only a GPU can show."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import GraphBounds, PageTable
from kernelgen.errors import DeviceError
from kernelgen.testing.bug_cases import backends, plan_sizes
from kernelgen.testing.data import cu_seqlens, random_tensor, random_tensors
from kernelgen.testing.tolerance import assert_bits_equal

CUDA, BF16 = "cuda", torch.bfloat16


def _cases(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"cases_{name}", Path(__file__).parent.parent / "cases" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Without those that need no device (b12 and b26 on the host, torch's own CPU kernel) and b19, whose head dims
# test_attention_prefill_mma.py has. A function's ``device`` is the fixture below.
_TAKEN = {
    "test_b_rows": ("b01", "b02", "b03", "b04", "b06", "b07", "b33", "b35", "b37", "b41_nan"),
    "test_b_memory": ("b09_unused", "b09_fp8", "b12_any", "b13", "b14", "b16", "b17_four", "b18", "b22", "b46"),
    "test_b_calls": ("b23", "b25", "b28", "b29", "b30", "b31", "b38", "b43", "b47"),
}
for _name, _prefixes in _TAKEN.items():
    _module = _cases(_name)
    globals().update({n: f for n, f in vars(_module).items() if n.startswith(tuple(f"test_{p}" for p in _prefixes))})


@pytest.fixture
def device() -> str:
    return CUDA


@pytest.fixture(autouse=True)
def give_memory_back() -> None:
    """Large caches of the test before must not stand in the way."""
    torch.cuda.empty_cache()


def generated_plan(case: str, table: PageTable, q: torch.Tensor, cache: torch.Tensor, **flags: Any) -> kernelgen.AttentionPlan:
    """A plan by a generated kernel."""
    sizes = plan_sizes(q, cache)
    backends(case, "paged_attention", table, device=CUDA, **sizes)
    return kernelgen.plan_attention(table, **sizes, **flags, backend="generated", device=CUDA)


def capture(calls: list[Callable[[], Any]]) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """Warm up on a side stream, then capture all calls in one graph; returns it and what the calls returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
    return graph, results


def test_b28_replay_of_two_plans_follows_updates() -> None:
    """A windowed and a full plan captured at lengths [4096, 1, 1, 1]; after new lengths, new pages in place and an update, the replay
    gives every row as eager plans do."""
    before, after = [4096, 1, 1, 1], [10, 3000, 77, 500]
    q, cache = random_tensors([(4, 8, 64), (300, 2, 16, 2, 64)], BF16, seed=28, device=CUDA)
    blocks = torch.zeros(4, 256, dtype=torch.int32, device=CUDA)
    blocks[0] = torch.arange(256, device=CUDA)
    bounds = GraphBounds(max_q_tokens=4, max_seq_k=4096)
    windows: list[Any] = [(128, None), None]
    table = PageTable.from_blocks(blocks, before, 16)
    plans = [generated_plan("B28 paged", table, q, cache, window=w, cuda_graph_bounds=bounds) for w in windows]
    graph, results = capture([lambda plan=plan: plan.run(q, cache) for plan in plans])  # type: ignore[misc]
    graph.replay()
    for lens in (before, after, before):
        blocks.copy_(torch.randint(0, 300, (4, 256), generator=torch.Generator().manual_seed(sum(lens))))
        table = PageTable.from_blocks(blocks, lens, 16)
        for plan in plans:
            plan.update(table)
        graph.replay()
        for window, got in zip(windows, results):
            want = generated_plan("B28 paged", table, q, cache, window=window)
            torch.testing.assert_close(got, want.run(q, cache), rtol=2**-7, atol=2**-9)  # other splits, other rounding


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_b29_replay_at_other_lengths(batch: int) -> None:
    """Captured at 2 keys with splits allowed, replayed at 8192 and 1: right after an update, the planned answer without one."""
    q, cache = random_tensors([(batch, 4, 64), (256, 2, 64, 1, 64)], BF16, seed=batch, device=CUDA)
    blocks = torch.randint(0, 256, (batch, 128), generator=torch.Generator().manual_seed(2), dtype=torch.int32).to(CUDA)

    def table(keys: int) -> PageTable:
        return PageTable.from_blocks(blocks, [keys] * batch, 64)

    plan = generated_plan("B29 paged", table(2), q, cache, cuda_graph_bounds=GraphBounds(batch, 8192))
    graph, (got,) = capture([lambda: plan.run(q, cache)])
    for keys in (2, 8192, 8192, 1):
        before = got.clone()
        graph.replay()
        if keys != 2:
            assert_bits_equal(got, before, what="replay without an update")
        plan.update(table(keys))
        graph.replay()
        want = generated_plan("B29 paged", table(keys), q, cache).run(q, cache)
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-9)


def every_op(where: str) -> dict[str, Callable[[], torch.Tensor]]:
    """A call of each public op that has a generated kernel, on tensors of one device."""
    q, k, v = random_tensors([(1, 70, 4, 64), (1, 90, 2, 64), (1, 90, 2, 64)], BF16, seed=30, device=where)
    x, w = random_tensors([(33, 256), (256, 128)], BF16, seed=31, device=where)
    cu = cu_seqlens([30, 40], where), cu_seqlens([50, 40], where)
    cache = random_tensor((8, 2, 16, 2, 64), BF16, seed=32, device=where)
    plan = kernelgen.plan_attention(PageTable.from_blocks(torch.arange(8, device=where).view(1, 8), [100], 16),
                                    **plan_sizes(q[0, :1], cache), device=where)
    calls: dict[str, Callable[[], Any]] = {
        "attention": lambda: kernelgen.attention(q, k, v, causal=True),
        "attention_varlen": lambda: kernelgen.attention_varlen(q[0], k[0], v[0], *cu, causal=True),
        "plan.run": lambda: plan.run(q[0, :1], cache),
        "gemm": lambda: kernelgen.gemm(x, w),
        "rmsnorm": lambda: kernelgen.rmsnorm(x, w[:, 0].contiguous()),
        "silu_and_mul": lambda: kernelgen.silu_and_mul(x),
    }
    return calls


def test_b30_tensors_of_another_device_than_the_current_one() -> None:
    """Current device 0, tensors on device 1: the result is there and right, and device 0 stays current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        for name, call in every_op("cuda:1").items():
            got = call()
            assert got.device == torch.device("cuda:1") and torch.cuda.current_device() == 0, name
            assert_bits_equal(got, every_op("cuda:0")[name](), what=name)


def test_b30_lengths_on_the_host_are_named() -> None:
    """Index tensors on the CPU beside CUDA tensors, where a kernel would need them."""
    q, k, v = random_tensors([(10, 4, 64), (10, 2, 64), (10, 2, 64)], BF16, seed=1, device=CUDA)
    here, host = cu_seqlens([10], CUDA), cu_seqlens([10])
    for cu_q, cu_k, name in ((host, here, "cu_seqlens_q"), (here, host, "cu_seqlens_k")):
        with pytest.raises(DeviceError, match=f"{name} is on cpu, expected cuda"):
            kernelgen.attention_varlen(q, k, v, cu_q, cu_k)
    with pytest.raises(DeviceError, match="kv_lens is on cpu"):
        kernelgen.attention(q[None], k[None], v[None], kv_lens=torch.tensor([3], dtype=torch.int32))


def test_b31_work_runs_on_the_current_stream() -> None:
    """On a side stream behind a long kernel: write the inputs, call, read; no sync. Fifty rounds of every op give what the default
    stream gives, as no launch runs ahead of the write."""
    q, k, v = random_tensors([(1, 256, 4, 64)] * 3, BF16, seed=31, device=CUDA)
    x, w = random_tensors([(256, 512), (512, 512)], BF16, seed=32, device=CUDA)
    cache = torch.stack([k, v], 2)[0].view(16, 16, 2, 4, 64).transpose(1, 2).contiguous()
    plan = kernelgen.plan_attention(PageTable.from_blocks(torch.arange(16, device=CUDA).view(1, 16), [256], 16),
                                    **plan_sizes(q[0, :1], cache))
    ops: dict[str, tuple[torch.Tensor, Callable[[], Any]]] = {
        "attention": (q, lambda: kernelgen.attention(q, k, v, causal=True)),
        "gemm": (x, lambda: kernelgen.gemm(x, w)),
        "rmsnorm": (x, lambda: kernelgen.rmsnorm(x, w[0])),
        "silu_and_mul": (x, lambda: kernelgen.silu_and_mul(x)),
    }
    if plan.decision.chosen is not None and plan.decision.chosen.backend == "generated":
        ops["plan.run"] = (cache, lambda: plan.run(q[0, :1], cache))
    side = torch.cuda.Stream()
    for name, (written, call) in ops.items():
        values = [written * (i % 5 - 2) for i in range(50)]
        expected = []
        for value in values:
            written.copy_(value)
            expected.append(call().clone())
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            got = []
            for value in values:
                written.zero_()
                torch.cuda._sleep(200_000)
                written.copy_(value)
                got.append(call().clone())
        side.synchronize()
        for i, (a, b) in enumerate(zip(got, expected)):
            assert_bits_equal(a, b, what=f"{name}, round {i}")
