"""The CUDA attention kernels on the CPU, lane by lane: indices, masks, waits and barriers against the float64 reference.

Every case runs with copies that land at once and with copies that land only when waited for, and with shuffled threads. The
kernels are compiled by g++; see cuda_emulator.
"""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernelgen import reference as ref
from kernelgen.kernels.attention import paged_mma, plan_cuda, prefill_mma
from kernelgen.kernels.attention.mma import Config
from kernelgen.kernels.attention.schedule import Division, make_schedule
from kernelgen.ops.page_table import PageTable
from kernelgen.ops.planning import GraphBounds, Shape, make_arrays, read_batch
from kernelgen.problems.attention import AttentionProblem
from kernelgen.problems.common import alignment_of
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.reference.plain import attention_plain, attention_varlen_plain
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.tensors import AttentionTensors, PagedTensors
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.data import cu_seqlens, poisoned_empty, random_lengths, random_tensor, random_tensors, seed_of
from kernelgen.testing.planned import run_planned
from kernelgen.testing.planned_cases import CASES, Weights
from kernelgen.testing.tolerance import assert_attention_close, assert_lse_close

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

TARGET = Target.parse("sm_90a")
# The others of CASES run on a GPU; each here costs several seconds of g++.
EMULATED = ("decode split", "decode key warps", "mixed", "everything", "nonfinite", "fp8 page scales fp16", "mla small",
            "mla plain rope", "mla plain rope page", "mla plain rope number",
            "weights", "weights nonfinite", "weights key warps", "weights beyond fp16", "weights fp8 fp16")


@pytest.fixture(scope="module")
def folder() -> Path:
    return settings().cache_dir / "emulated"


@pytest.mark.parametrize("name", EMULATED)
def test_planned(name: str, folder: Path) -> None:
    planned, config = CASES[name]
    for lazy in (False, True):
        run_planned(planned, paged_mma.FAMILY, config, TARGET, lambda spec, lazy=lazy: EmulatedKernel(spec, folder, lazy, planned.seed))


def test_offsets_beyond_2_to_the_31_elements(folder: Path) -> None:
    """Pages so far apart that their numbers times the stride pass 2^31, in memory that is mapped but hardly used."""
    planned, config = CASES["decode split"]
    stride = 2**27 + 64

    def spread(t: Any) -> Any:
        pages = t.k_cache.shape[0]
        views = []
        for cache in (t.k_cache, t.v_cache):
            assert (pages - 1) * stride > 2**31
            size = ((pages - 1) * stride + cache[0].numel()) * cache.element_size()
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
            store = torch.frombuffer(memory, dtype=cache.dtype)
            view = store.as_strided(cache.shape, (stride, *cache[0].contiguous().stride()))
            view.copy_(cache)
            views.append(view)
        return t._replace(k_cache=views[0], v_cache=views[1])

    run_planned(planned, paged_mma.FAMILY, config, TARGET, lambda spec: EmulatedKernel(spec, folder), change=spread)


def test_rows_that_q_does_not_have_are_not_written(folder: Path) -> None:
    """A captured run has the rows of its capture; an update may plan more."""
    planned, config = CASES["mixed"]

    def run(t: PagedTensors, problem: PagedAttentionProblem) -> PagedTensors:
        paged_mma.bind(problem, config, EmulatedKernel(paged_mma.spec(problem, TARGET, config), folder), t)(t)
        return t

    def check(t: PagedTensors) -> PagedTensors:
        problem = planned.problem(alignment_of(t.q, t.k_cache, t.v_cache))
        assert t.lse is not None
        whole = run(t._replace(out=poisoned_empty(t.out.shape, t.out.dtype), lse=poisoned_empty(t.lse.shape)), problem)
        assert whole.lse is not None
        for count in (12, 5, 3, 1):
            out, lse = poisoned_empty(t.out.shape, t.out.dtype), poisoned_empty(t.lse.shape)
            run(t._replace(q=t.q[:count], out=out[:count], lse=lse[:count]), problem)
            # The rows of a warp share when they rescale: with fewer of them the rounding may differ.
            torch.testing.assert_close(out[:count], whole.out[:count], rtol=0.02, atol=0.01)
            torch.testing.assert_close(lse[:count], whole.lse[:count], rtol=1e-4, atol=1e-4)
            assert bool(out[count:].isnan().all()) and bool(lse[count:].isnan().all()), count
        return t

    run_planned(planned, paged_mma.FAMILY, config, TARGET, lambda spec: EmulatedKernel(spec, folder), change=check)


@pytest.mark.parametrize("features, dtypes", [
    ({"variant": Weights(0.05), "causal": True, "soft_cap": True}, ("fp16", "fp16")),
    ({"variant": Weights(), "mask": "dense", "scales": "request_head"}, ("bf16", "e4m3")),
    ({"alibi": True, "sinks": True, "causal": True}, ("bf16", "bf16")), ({"mask": "dense", "soft_cap": True}, ("fp16", "fp16")),
    ({"scales": "request_head", "causal": True}, ("bf16", "e4m3")),
], ids=str)
def test_dense(features: dict[str, Any], dtypes: tuple[str, str], folder: Path) -> None:
    seed = seed_of("emulated dense", features)
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
    q_type, kv_type = (kinds[d] for d in dtypes)
    q, k, v = random_tensors([(2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64)], q_type, seed=seed)
    k, v = k.to(kv_type), v.to(kv_type)
    given: dict[str, Any] = {"soft_cap": 3.0 if features.get("soft_cap") else None}
    given["alibi_slopes"] = random_tensor((2, 4), seed=seed).abs() if features.get("alibi") else None
    given["sinks"] = torch.tensor([0.7, float("inf"), -float("inf"), -0.4]) if features.get("sinks") else None
    given["mask"] = (random_tensor((2, 1, 70, 90), seed=seed + 2) > -0.5).expand(2, 4, 70, 90) if features.get("mask") else None
    for i, name in enumerate(("k_scale", "v_scale")):
        given[name] = random_tensor((2, 2), seed=seed + 3 + i).abs() if features.get("scales") else None
    variant, config = features.get("variant"), Config(64, 32, 4, 2)
    problem = AttentionProblem("dense", 2, 70, 90, 4, 2, 64, 64, dtypes[0], dtypes[1], dtypes[0], return_lse=variant is None, **features)
    out, lse = poisoned_empty(q.shape, q_type), poisoned_empty((2, 4, 70))
    words = variant.words("cpu") if variant else None
    tensors = AttentionTensors(q, k, v, out, None if variant else lse, 0.125, variant_words=words, **given)
    prefill_mma.bind(problem, config, EmulatedKernel(prefill_mma.spec(problem, TARGET, config), folder, True), tensors)(tensors)
    causal = problem.causal
    given["variant"] = variant.reference("cpu") if variant else None
    exact, exact_lse = ref.attention(q, k, v, causal=causal, return_lse=True, **given)
    plain, plain_lse = attention_plain(q, k, v, causal=causal, return_lse=True, **given)
    assert_attention_close(out, exact, plain, what=str(problem), seed=seed)
    if variant is None:
        assert_lse_close(lse, exact_lse, plain_lse.float(), what=str(problem), seed=seed)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_grid_in_one_dimension(ragged: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for more heads or requests than a grid has in y and z, with smaller limits."""
    monkeypatch.setattr(prefill_mma, "_MAX_GRID_YZ", 1)
    seed, heads, lens = seed_of("flat grid", ragged), (6, 3), ([70, 0, 129], [80, 5, 64])
    shapes = [(199, 6, 64), (149, 3, 64), (149, 3, 264)] if ragged else [(3, 70, 6, 64), (3, 90, 3, 64), (3, 90, 3, 264)]
    q, k, v = random_tensors(shapes, torch.bfloat16, seed=seed)
    sizes = (3, 199, 149) if ragged else (3, 70, 90)
    problem = AttentionProblem("ragged" if ragged else "dense", *sizes, *heads, 64, 264, "bf16", "bf16", "bf16", causal=True,
                               return_lse=True)
    config = Config(64, 32, 4, value_splits=2)
    cu = tuple(cu_seqlens(x) for x in lens) if ragged else ()
    out, lse = poisoned_empty((*q.shape[:-1], 264), q.dtype), poisoned_empty((199, 6) if ragged else (3, 6, 70))
    spec, tensors = prefill_mma.spec(problem, TARGET, config), AttentionTensors(q, k, v, out, lse, 0.125, *cu)
    assert "flatgrid" in spec.name
    prefill_mma.bind(problem, config, EmulatedKernel(spec, folder, True), tensors)(tensors)
    exact, exact_lse = (ref.attention_varlen if ragged else ref.attention)(q, k, v, *cu, causal=True, return_lse=True)
    plain, plain_lse = (attention_varlen_plain if ragged else attention_plain)(q, k, v, *cu, causal=True, return_lse=True)
    assert_attention_close(out, exact, plain, what=str(problem), seed=seed)
    assert_lse_close(lse, exact_lse, plain_lse.float(), what=str(problem), seed=seed)


@pytest.mark.parametrize("division", [Division(16, 40), Division(64, 7, 256), Division(64, 1, 256, 128)], ids=str)
@pytest.mark.parametrize("count", [1, 3, 1025, 2300])
def test_device_plan_equals_the_host_plan(count: int, division: Division, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = seed_of("device plan", count)
    q_lens, kv_lens = random_lengths(count, 9, seed=seed), random_lengths(count, 3000, seed=seed + 1)
    shape, page, cpu = Shape(3, 1, 8, True, division), 16, torch.device("cpu")
    kernel = EmulatedKernel(plan_cuda.spec(TARGET), folder)
    monkeypatch.setattr(plan_cuda, "_launch", lambda index: kernel.prepare(index, grid=(1, 1, 1), block=(plan_cuda.THREADS, 1, 1)))
    pages = [-(-n // page) for n in kv_lens]
    last = [n - (c - 1) * page if c else 0 for n, c in zip(kv_lens, pages)]
    for table in (PageTable.from_blocks(torch.zeros(count, 200, dtype=torch.int32), torch.tensor(kv_lens), page),
                  PageTable.from_csr(cu_seqlens(pages), torch.zeros(sum(pages), dtype=torch.int32), torch.tensor(last), page)):
        batch = read_batch(table, cu_seqlens(q_lens))
        host, device = make_arrays(batch, shape, cpu), plan_cuda.plan_on_device(batch, shape, cpu, None, None)
        for name in ("q_indptr", "kv_lens", "page_begin", "item_indptr", "chunk", "mask_indptr"):
            assert torch.equal(getattr(device, name), getattr(host, name)), name
        assert device.num_items >= int(device.item_indptr[-1])
        schedule = make_schedule(np.array(q_lens), np.array(kv_lens), 3, division)
        assert schedule.num_items == int(device.item_indptr[-1])


def test_device_plan_of_nonsense_stays_in_bounds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query starts below 0, above the bound and falling: no row outside of q comes out of it."""
    kernel = EmulatedKernel(plan_cuda.spec(TARGET), folder)
    monkeypatch.setattr(plan_cuda, "_launch", lambda index: kernel.prepare(index, grid=(1, 1, 1), block=(plan_cuda.THREADS, 1, 1)))
    table = PageTable.from_blocks(torch.zeros(4, 20, dtype=torch.int32), torch.tensor([5, 300, 0, 64], dtype=torch.int32), 16)
    for starts in ([-5, 3, 2, 99, 8], [0, -7, -3, 4, 8], [2**31 - 1, -(2**31), 5, 6, 7]):
        batch = read_batch(table, None)._replace(starts=torch.tensor(starts, dtype=torch.int32))
        arrays = plan_cuda.plan_on_device(batch, Shape(3, 1, 8, False, Division(16, 40)), torch.device("cpu"), GraphBounds(8, 320), None)
        assert bool(((arrays.q_indptr >= 0) & (arrays.q_indptr <= 8)).all()), arrays.q_indptr
        assert bool(((arrays.kv_lens >= 0) & (arrays.kv_lens <= 320)).all()), arrays.kv_lens
