"""attention/paged_mma on a GPU: every path and every config against the float64 reference, and plans with device lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelgen import build
from kernelgen.kernels.attention import paged_mma, plan_cuda
from kernelgen.kernels.attention.mma import Config
from kernelgen.kernels.attention.schedule import Division
from kernelgen.ops.page_table import PageTable
from kernelgen.ops.planning import Shape, make_arrays, read_batch
from kernelgen.targets import target_of
from kernelgen.testing.data import cu_seqlens, random_lengths, seed_of
from kernelgen.testing.planned import Planned, run_planned
from kernelgen.testing.planned_cases import CASES, INF, NAN

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

CUDA = "cuda"


def run(planned: Planned, config: Config, **kwargs: Any) -> Any:
    return run_planned(planned, paged_mma.FAMILY, config, target_of(CUDA), build.kernel, CUDA, **kwargs)


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    run(*CASES[name])


@pytest.mark.parametrize("config", paged_mma.DECODE, ids=str)
@pytest.mark.parametrize("heads, dims, kv_dtype", [((32, 8), (128, 128), ""), ((6, 6), (64, 64), ""), ((16, 1), (128, 128), "e4m3"),
                                                   ((4, 2), (256, 256), "")], ids=str)
def test_every_decode_config(config: Config, heads: tuple[int, int], dims: tuple[int, int], kv_dtype: str) -> None:
    planned = Planned((1,) * 6, (1000, 0, 17, 64, 333, 2049), heads=heads, dims=dims, kv_dtype=kv_dtype, chunk=256,
                      poison=() if kv_dtype else (NAN, INF))
    problem = planned.problem(16)
    verdict = paged_mma.legal(problem, target_of(CUDA), config)
    if not verdict:
        pytest.skip(verdict.reason)
    run(planned, config)


@pytest.mark.parametrize("config", [*paged_mma.MIXED, Config(128, 64, 4)], ids=str)
@pytest.mark.parametrize("page_size, one_page", [(16, False), (48, False), (1, True)])
def test_every_mixed_config(config: Config, page_size: int, one_page: bool) -> None:
    planned = Planned((100, 1, 0, 37, 5), (300, 777, 40, 20, 0), heads=(8, 2), dims=(128, 128), chunk=256, page_size=page_size,
                      one_page=one_page, poison=(NAN, INF, -INF))
    run(planned, config)


@pytest.mark.parametrize("window", [(0, 0), (33, None), (None, 20), (400, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_over_chunks(window: tuple[int | None, int | None], causal: bool) -> None:
    run(Planned((90, 3, 1), (400, 500, 130), window=window, causal=causal, chunk=64, page_size=5), Config(64, 64, 4, 2))


def test_many_requests() -> None:
    """The search over item_indptr takes three rounds."""
    count = 5000
    q_lens = tuple(i % 3 for i in range(count))
    run(Planned(q_lens, tuple((i * 7) % 40 for i in range(count)), heads=(2, 1), page_size=8), Config(16, 32, 1, 3))


def test_offsets_beyond_2_to_the_31_elements() -> None:
    planned, config = CASES["decode split"]
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of free memory")

    def spread(t: Any) -> Any:
        pages, stride = t.k_cache.shape[0], 2**28 + 64
        views = []
        for cache in (t.k_cache, t.v_cache):
            view = torch.empty((pages - 1) * stride + cache[0].numel(), dtype=cache.dtype, device=CUDA)
            view = view.as_strided(cache.shape, (stride, *cache[0].contiguous().stride()))
            view.copy_(cache)
            views.append(view)
        return t._replace(k_cache=views[0], v_cache=views[1])

    run(planned, config, change=spread)


def test_batch_invariant_bits_do_not_depend_on_the_batch() -> None:
    problem = replace(CASES["mixed"][0].problem(16), batch_invariant=True)
    target = target_of(CUDA)
    chosen = {next(iter(paged_mma.candidates(replace(problem, batch=b, max_seq_q=m), target))) for b in (1, 300) for m in (1, 900)}
    cuts = {paged_mma.division(replace(problem, batch=b), target, config) for b in (1, 300) for config in chosen}
    assert len(chosen) == len(cuts) == 1


@pytest.mark.parametrize("division", [Division(16, 40), Division(64, 7, 256), Division(64, 1, 256, 128)], ids=str)
@pytest.mark.parametrize("count", [1, 3, 1025, 70000])
def test_device_plan_equals_the_host_plan(count: int, division: Division) -> None:
    seed = seed_of("device plan", count)
    q_lens, kv_lens = random_lengths(count, 9, seed=seed), random_lengths(count, 900, seed=seed + 1)
    shape, page, device = Shape(3, 1, 8, True, division), 16, torch.device(CUDA, torch.cuda.current_device())
    pages = [-(-n // page) for n in kv_lens]
    last = torch.tensor([n - (c - 1) * page if c else 0 for n, c in zip(kv_lens, pages)], dtype=torch.int32)
    blocks, indices = torch.zeros(count, 60, dtype=torch.int32), torch.zeros(sum(pages), dtype=torch.int32)
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    pairs = ((PageTable.from_blocks(blocks, lens, page), PageTable.from_blocks(blocks.cuda(), lens.cuda(), page)),
             (PageTable.from_csr(cu_seqlens(pages), indices, last, page),
              PageTable.from_csr(cu_seqlens(pages, CUDA), indices.cuda(), last.cuda(), page)))
    for on_host, on_device in pairs:
        host = make_arrays(read_batch(on_host, cu_seqlens(q_lens)), shape, torch.device("cpu"))
        batch = read_batch(on_device, cu_seqlens(q_lens))
        planned = plan_cuda.plan_on_device(batch, shape, device, None, None)
        for name in ("q_indptr", "kv_lens", "page_begin", "item_indptr", "chunk", "mask_indptr"):
            assert torch.equal(getattr(planned, name).cpu(), getattr(host, name)), name
        assert planned.num_items >= int(planned.item_indptr[-1])
