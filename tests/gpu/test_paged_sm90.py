"""attention/paged_sm90 on a Hopper GPU: the differential suite, page sizes, every config, plans as callers make them, repeats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import GraphBounds, PageTable, build
from kernelgen.errors import NoBackendError
from kernelgen.kernels.attention import paged_sm90
from kernelgen.kernels.attention.prefill_sm90_configs import TABLE, Config
from kernelgen.targets import target_of
from kernelgen.tensors import PagedTensors
from kernelgen.testing.adapters import aligned, only
from kernelgen.testing.attention_cases import Spec, check, make_problem, specs
from kernelgen.testing.data import cu_seqlens, make_paged_cache, poisoned_empty, random_tensor, seed_of
from kernelgen.testing.planned import Planned, run_planned
from kernelgen.testing.planned_cases import INF, NAN, RelativeBias
from kernelgen.testing.tolerance import assert_bits_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90")

CUDA, KERNEL, FAMILY = "cuda", "attention/paged_sm90", paged_sm90.FAMILY
AXES: dict[str, tuple[Any, ...]] = {
    "layout": ("paged",), "dtype": ("bf16", "fp16"), "kv": ("same",), "scales": ("none",), "rope": ("same",),
    "dims": ((128, 128), (64, 64), (72, 40), (192, 128), (8, 24), (256, 256), (96, 96), (64, 256)),
    "variant": ("none", "score", "mask"), "pages": ("pow2", "any", "contiguous"), "batch_invariant": (False,),
}
PLAN: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 128, "q_dtype": torch.bfloat16, "backend": "generated"}
LENGTHS = ((700, 1, 0, 130, 64, 9), (900, 333, 40, 100, 64, 2049))


def run(planned: Planned, config: Config | None = None, **kwargs: Any) -> PagedTensors:
    target = target_of(CUDA)
    config = config or next(iter(paged_sm90.candidates(planned.problem(16), target)))
    return run_planned(planned, FAMILY, config, target, build.kernel, CUDA, **kwargs)


@pytest.mark.parametrize("page_size, kv_layout", [(1, "NHD"), (5, "HND"), (8, "NHD"), (12, "NHD"), (16, "NHD"), (16, "HND"), (24, "NHD"),
                                                  (64, "HND"), (128, "NHD"), (100, "NHD"), (256, "NHD"), (512, "HND")])
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (256, 256), (72, 40)], ids=str)
def test_page_sizes(page_size: int, kv_layout: str, dims: tuple[int, int]) -> None:
    run(Planned(*LENGTHS, heads=(8, 2), dims=dims, page_size=page_size, kv_layout=kv_layout, poison=(NAN, INF, -INF)))


@pytest.mark.parametrize("planned", [
    Planned(*LENGTHS, one_page=True, dims=(128, 128), poison=(NAN, INF)),
    Planned(*LENGTHS, causal=False, dims=(128, 128), dtype="fp16"),
    Planned(*LENGTHS, causal=False, window=(200, 30), soft_cap=5.0, scale=-0.3),
    Planned(*LENGTHS, window=(65, None), page_size=64, dims=(128, 128), poison=(INF,)),
    Planned(*LENGTHS, alibi=True, sinks=True, page_size=5),
    Planned(*LENGTHS, mask="dense", page_size=32, poison=(NAN,)),
    Planned(*LENGTHS, mask="packed", variant=RelativeBias(), page_size=1, causal=False, soft_cap=4.0),
    Planned((333, 40), (1000, 2500), dims=(128, 128), scale=20.0, page_size=16),
    Planned((333, 40), (1000, 2500), dims=(128, 128), scale=-20.0, page_size=3, dtype="fp16"),
    Planned(*LENGTHS, scale=0.0, dims=(192, 128)),
    Planned((3000,), (8000,), heads=(32, 8), dims=(128, 128)),
    Planned((0, 0), (40, 17)),
    Planned((20, 17), (0, 0)),
], ids=str)
def test_features(planned: Planned) -> None:
    run(planned)


def every_config() -> list[tuple[int, Config]]:
    """(head dim, config) of the table, and schedules that it does not use."""
    rows = [(row.head_dim, config) for row in TABLE for config in row.configs]
    return list(dict.fromkeys([
        *rows, (128, Config(2, 128, 3, value_stages=2)), (128, Config(2, 128, early_keys=True)), (128, Config(2, 128, diagonal=2)),
        (128, Config(2, 128, early_keys=True, diagonal=2)), (96, Config(2, 96)),
        (256, Config(2, 64, early_keys=True, out_parts=2)), (128, Config(1, 64, pingpong=False, resident=2))]))


@pytest.mark.parametrize("page_size", [3, 16, 128])
@pytest.mark.parametrize("d, config", every_config(), ids=str)
def test_every_config(d: int, config: Config, page_size: int) -> None:
    planned = Planned(*LENGTHS, heads=(8, 2), dims=(d, d), page_size=page_size, poison=(NAN,))
    verdict = paged_sm90.legal(planned.problem(16), target_of(CUDA), config)
    if not verdict:
        pytest.skip(verdict.reason)
    run(planned, config)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_offsets_beyond_2_to_the_31_elements(page_size: int) -> None:
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of free memory")

    def spread(t: PagedTensors) -> PagedTensors:
        stride = 2**33 // t.k_cache.shape[0] // 64 * 64
        views = []
        for cache in (t.k_cache, t.v_cache):
            view = torch.empty(cache.shape[0] * stride, dtype=cache.dtype, device=CUDA)
            view = view.as_strided(cache.shape, (stride, *cache[0].contiguous().stride()))
            view.copy_(cache)
            views.append(view)
        return t._replace(k_cache=views[0], v_cache=views[1])

    run(Planned((130, 40), (200, 333), dims=(128, 128), page_size=page_size), change=spread)


def test_many_requests() -> None:
    count = 3000
    run(Planned(tuple(i % 5 for i in range(count)), tuple((i * 7) % 40 for i in range(count)), heads=(2, 1), page_size=8))


@pytest.fixture
def this_kernel() -> Iterator[None]:
    with only("generated", KERNEL):
        yield


@pytest.mark.parametrize("spec", specs(40, seed=31, axes=AXES), ids=str)
def test_differential(spec: Spec, this_kernel: None) -> None:
    for index in range(4):
        problem = aligned(make_problem(spec, index))
        try:
            check(problem, CUDA, "generated")
        except NoBackendError as error:
            assert "alignment" in str(error), error


def cache_of(lens: tuple[int, ...], page: int) -> Any:
    keys = [tuple(random_tensor((n, 2, 128), torch.bfloat16, seed=seed_of("paged", b, side), device=CUDA) for side in "kv")
            for b, n in enumerate(lens)]
    return make_paged_cache(keys, page, seed=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("page", [3, 16])
def test_a_plan_repeats_on_two_streams_and_in_a_graph_that_is_updated(page: int, this_kernel: None) -> None:
    q_lens, kv_lens = (300, 1, 77), (500, 130, 77)
    case = cache_of(kv_lens, page)
    table = PageTable.from_blocks(case.block_tables, case.seq_lens.cpu(), page)
    q = random_tensor((sum(q_lens), 4, 128), torch.bfloat16, seed=8, device=CUDA)
    plan = kernelgen.plan_attention(table, cu_seqlens_q=cu_seqlens(q_lens), **PLAN)
    assert plan.decision.chosen is not None and plan.decision.chosen.kernel == KERNEL
    expected = plan.run(q, case.kv_cache)
    for _ in range(200):
        assert_bits_equal(plan.run(q, case.kv_cache), expected, what="repeated")
    streams, outs = [torch.cuda.Stream() for _ in range(2)], [poisoned_empty(q.shape, q.dtype, CUDA) for _ in range(2)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        for stream, out in zip(streams, outs):
            with torch.cuda.stream(stream):
                plan.run(q, case.kv_cache, out=out)
    torch.cuda.synchronize()
    for out in outs:
        assert_bits_equal(out, expected, what="two streams")

    bounds = GraphBounds(max_q_tokens=1000, max_seq_k=1000, max_pages=case.block_tables.numel())
    bounded = kernelgen.plan_attention(table, cu_seqlens_q=cu_seqlens(q_lens), cuda_graph_bounds=bounds, **PLAN)
    assert bounded.decision.chosen is not None and bounded.decision.chosen.kernel == KERNEL
    out = poisoned_empty(q.shape, q.dtype, CUDA)
    bounded.run(q, case.kv_cache, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bounded.run(q, case.kv_cache, out=out)
    for lens in (q_lens, (77, 300, 1), (1, 200, 177)):
        bounded.update(table, torch.tensor(lens, dtype=torch.int32))
        out.fill_(NAN)
        graph.replay()
        again = kernelgen.plan_attention(table, cu_seqlens_q=cu_seqlens(lens), **PLAN).run(q, case.kv_cache)
        assert_bits_equal(out, again, what=f"graph {lens}")


def test_a_plan_with_lengths_on_the_device(this_kernel: None) -> None:
    q_lens, kv_lens = (300, 1, 77), (500, 130, 77)
    case = cache_of(kv_lens, 16)
    q = random_tensor((sum(q_lens), 4, 128), torch.bfloat16, seed=8, device=CUDA)
    tables = [PageTable.from_blocks(case.block_tables, lens, 16) for lens in (case.seq_lens.cpu(), case.seq_lens)]
    plans = [kernelgen.plan_attention(table, cu_seqlens_q=cu_seqlens(q_lens), **PLAN) for table in tables]
    assert all(plan.decision.chosen.kernel == KERNEL for plan in plans)  # type: ignore[union-attr]
    assert_bits_equal(*(plan.run(q, case.kv_cache) for plan in plans), what="device lengths")


def test_rows_of_a_request_do_not_depend_on_the_batch(this_kernel: None) -> None:
    q_lens, kv_lens = (300, 1, 77), (500, 130, 77)
    case = cache_of(kv_lens, 16)
    q = random_tensor((sum(q_lens), 4, 128), torch.bfloat16, seed=8, device=CUDA)
    outs = []
    for count in (3, 1):
        table = PageTable.from_blocks(case.block_tables[:count].contiguous(), case.seq_lens[:count].cpu(), 16)
        plan = kernelgen.plan_attention(table, cu_seqlens_q=cu_seqlens(q_lens[:count]), batch_invariant=True, **PLAN)
        outs.append(plan.run(q[: sum(q_lens[:count])], case.kv_cache))
    assert_bits_equal(outs[1], outs[0][: q_lens[0]], what="one request of three")
