"""append_kv, append_mla, rope, rope_append_kv and merge_states through the public calls on a GPU, against the oracles.

Every check of a group runs even if one fails, so that one run tells everything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.kernels.base import families
from kernelgen.targets import target_of
from kernelgen.testing.cache_ops import FP8, check_append, check_merge, check_mla, check_rope, check_rope_append, make_table
from kernelgen.testing.data import poisoned_empty, random_tensor
from kernelgen.testing.resources import compiled, covered
from kernelgen.testing.tolerance import assert_bits_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

F32, F64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
E4M3, E5M2 = FP8
CUDA = "cuda"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def all_of(checks: list[Callable[[], object]]) -> None:
    failures = []
    for check in checks:
        try:
            check()
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, f"{len(failures)} of {len(checks)} failed\n" + "\n".join(failures)


@pytest.mark.parametrize("form", ("csr", "blocks", "slots"))
def test_append_kv(form: str) -> None:
    append = partial(check_append, form, device=CUDA)
    checks = [
        partial(append, layout, page_size, *dtypes, heads=3, dim=dim, dim_v=dim_v, mode=mode, odd=odd, index=index)
        for layout, page_size, dtypes, dim, dim_v, mode, odd, index in (
            ("NHD", 1, (BF16, BF16), 40, 24, "positions", False, torch.int32),
            ("HND", 3, (BF16, BF16), 128, 128, "positions", True, torch.int64),
            ("NHD", 16, (F32, F32), 17, 64, "one", False, torch.int64),
            ("HND", 16, (F64, F64), 8, 8, "last", False, torch.int32),
            ("NHD", 3, (FP16, FP16), 576, 8, "last", False, torch.int64))
        if form != "slots" or mode == "positions"]
    for scales in (None, "number", "tensor", "head", "request_head", "page"):
        if scales != "request_head" or form != "slots":
            checks += [partial(append, "NHD", 3, BF16, E4M3, heads=4, dim=64, dim_v=64, scales=scales, pair=False),
                       partial(append, "HND", 16, FP16, E5M2, heads=2, dim=24, dim_v=137, scales=scales, odd=True),
                       partial(append, "NHD", 1, F32, E4M3, heads=2, dim=40, dim_v=24, scales=scales)]
    checks += [partial(append, "NHD", 16, E5M2, E5M2, heads=2, dim=48, dim_v=48)]
    all_of(checks)


def test_append_mla() -> None:
    all_of([partial(check_mla, combined, *dtypes, device=CUDA) for combined in (False, True)
            for dtypes in ((BF16, BF16), (F32, E4M3), (BF16, E5M2))])


def test_fp8_codes_of_every_kind_of_float() -> None:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16).float()
    x = torch.cat([x, x * 1.0009765625, x * 0.9990234375])
    x = x[~x.isnan()]
    x = x[: x.numel() // 64 * 64].view(-1, 1, 64)
    for dtype in FP8:
        cache = poisoned_empty((x.shape[0], 1, 1, 64), dtype, CUDA)
        nan = torch.full_like(x, torch.nan).to(CUDA)
        others = poisoned_empty((x.shape[0], 1, 1, 64), dtype, CUDA)
        others.view(torch.uint8).zero_()
        kernelgen.append_kv((cache, others), x.to(CUDA), nan, slot_mapping=torch.arange(x.shape[0], device=CUDA), backend="generated")
        limit = torch.finfo(dtype).max
        assert_bits_equal(cache.cpu().view(-1, 1, 64), x.clamp(-limit, limit).to(dtype), what=str(dtype))
        assert others.float().isnan().all()


@pytest.mark.parametrize("dtype", (F32, BF16, FP16, F64), ids=str)
def test_rope(dtype: torch.dtype) -> None:
    rope = partial(check_rope, device=CUDA)
    all_of([partial(rope, *arguments, dtype, interleaved=interleaved, **named) for interleaved in (False, True) for arguments, named in (
        (((7, 3, 64), 2), {}), (((2, 5, 3, 46), 1), dict(rotary=22, scaling=LLAMA3, top=100_000)), (((5, 9, 128), 3), dict(top=2**31 - 1)),
        (((4, 2, 80), 2), dict(rotary=64, cache_dtype=F32)), (((9, 2, 48), 2), dict(cache_dtype=dtype)), (((0, 2, 64), 2), {}),
        (((3, 70, 256), 2), dict(rotary=192)))])


@pytest.mark.parametrize("cache_dtype", (BF16, E4M3, E5M2), ids=str)
def test_rope_append_kv(cache_dtype: torch.dtype) -> None:
    fused = partial(check_rope_append, device=CUDA)
    all_of([partial(fused, form, BF16, cache_dtype, interleaved=i) for form in ("csr", "slots") for i in (False, True)] + [
        partial(fused, "blocks", FP16, FP16 if cache_dtype == BF16 else cache_dtype, rotary=20, cos=F32),
        partial(fused, "blocks", F32, F32 if cache_dtype == BF16 else cache_dtype, rotary=24, cos=BF16, interleaved=True)])


@pytest.mark.parametrize("dtype", (F32, BF16, FP16), ids=str)
def test_merge_states(dtype: torch.dtype) -> None:
    all_of([partial(check_merge, *sizes, dtype, device=CUDA) for sizes in (
        (1, 1, 1, 64), (2, 7, 5, 192), (9, 13, 3, 17), (0, 3, 2, 8), (3, 0, 2, 8), (40, 2, 1, 512))])
    inf, nan = float("inf"), float("nan")
    lses = torch.tensor([[nan, inf, 1e30, -3e38], [0.0, 0.0, 0.0, -3.4e38]], device=CUDA).unsqueeze(-1)
    outs = torch.ones(2, 4, 1, 8, dtype=dtype, device=CUDA)
    outs[1, 1] = 2.0
    out, lse = kernelgen.merge_states(outs, lses, backend="generated")
    assert out[0].isnan().all() and lse[0].isnan().all() and (out[1:] == 1).all() and bool(lse[1] == inf)


def test_tokens_that_lead_nowhere_are_skipped() -> None:
    table, pages = make_table("csr", [4, 9], 4, 0, seed=1, device=CUDA)
    cache, k = poisoned_empty((pages, 2, 4, 1, 8), F32, CUDA), random_tensor((2, 1, 8), seed=1, device=CUDA)
    before = cache.clone()
    index = partial(torch.tensor, device=CUDA)
    kernelgen.append_kv(cache, k, k, slot_mapping=index([4 * pages, 2**40]), backend="generated")
    kernelgen.append_kv(cache, k, k, table, positions=index([4, 12]), backend="generated")
    kernelgen.append_kv(cache, k, k, table, positions=index([0, 2**40]), batch_indices=index([2, 1]), backend="generated")
    junk = kernelgen.PageTable.from_blocks(torch.tensor([[7], [-3]], dtype=torch.int32, device=CUDA), [1, 1], 4)
    kernelgen.append_kv(cache, k, k, junk, backend="generated")
    assert_bits_equal(cache, before, what="skipped")


def test_offsets_beyond_2_to_the_31() -> None:
    pages = 2**31 // (16 * 2 * 64) + 8
    cache = torch.zeros((pages, 2, 16, 1, 64), dtype=E4M3, device=CUDA)  # more than 2^31 elements before the last page
    k = random_tensor((1, 1, 64), BF16, seed=1, device=CUDA)
    kernelgen.append_kv(cache, k, k, slot_mapping=torch.tensor([pages * 16 - 1], device=CUDA), backend="generated")
    assert_bits_equal(cache[-1, 0, -1], k[0].float().to(E4M3), what="last slot")
    assert int(cache.view(torch.uint8).count_nonzero()) == 2 * int((k.float().to(E4M3).float() != 0).sum())


def test_no_sync_and_captured_by_a_graph() -> None:
    """Everything in one graph, replayed with other tokens and positions; no call reads the device."""
    table, pages = make_table("blocks", [8, 8], 4, 1, seed=2, device=CUDA)
    q, k = random_tensor((2, 4, 64), BF16, seed=1, device=CUDA), random_tensor((2, 2, 64), BF16, seed=2, device=CUDA)
    cache = poisoned_empty((pages, 2, 4, 2, 64), BF16, CUDA)
    positions, requests = torch.tensor([1, 2], device=CUDA), torch.tensor([1, 0], dtype=torch.int32, device=CUDA)
    outs, lses = random_tensor((3, 2, 4, 64), BF16, seed=3, device=CUDA), random_tensor((3, 2, 4), seed=4, device=CUDA)

    def step() -> tuple[torch.Tensor, ...]:
        turned = kernelgen.rope(q, k, positions, backend="generated")
        fused = kernelgen.rope_append_kv(q, k, k, cache, table, positions=positions, batch_indices=requests, backend="generated")
        kernelgen.append_kv(cache, k, k, table, batch_indices=requests, backend="generated")
        return (*turned, fused, *kernelgen.merge_states(outs, lses, backend="generated"))

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    positions.copy_(torch.tensor([5, 6])), q.mul_(2)
    expected_cache = poisoned_empty(cache.shape, BF16, CUDA)
    cache.copy_(expected_cache)
    graph.replay()
    expected = ref.rope(q, k, positions, compute_dtype=F32)
    torch.testing.assert_close(results[0].float(), expected[0].float(), atol=0.03, rtol=0.01)
    assert_bits_equal(results[2], results[0], what="fused q")
    replayed = cache.clone()
    cache.copy_(expected_cache)
    step()
    assert_bits_equal(replayed, cache, what="cache")
    assert int((~cache.isnan()).sum()) == 2 * 2 * 2 * 2 * 64  # two tokens by two calls, keys and values


def test_coverage_compiles_here() -> None:
    target = target_of(CUDA)
    for op in ("append", "rope", "merge_states"):
        for family in families(op, "cuda"):
            assert all(m["spill_stores"] == 0 for m in compiled(covered(family, target)).values())


def test_speed_is_printed() -> None:
    """No limit: GB/s of each op, for the log."""
    tokens, pages = 8192, 8192 // 16 + 1
    q, k = (torch.randn(tokens, h, 128, dtype=BF16, device=CUDA) for h in (32, 8))
    slots, positions = torch.randperm(tokens, device=CUDA), torch.arange(tokens, device=CUDA)
    cache, cache8 = torch.zeros(pages, 2, 16, 8, 128, dtype=BF16, device=CUDA), torch.zeros(pages, 2, 16, 8, 128, device=CUDA).to(E4M3)
    outs, lses = torch.randn(8, tokens // 8, 32, 128, dtype=BF16, device=CUDA), torch.randn(8, tokens // 8, 32, device=CUDA)
    kv, qk = 2 * k.nbytes, q.nbytes + k.nbytes
    for name, moved, call in (
        ("append bf16", 2 * kv, lambda: kernelgen.append_kv(cache, k, k, slot_mapping=slots)),
        ("append e4m3", 1.5 * kv, lambda: kernelgen.append_kv(cache8, k, k, slot_mapping=slots, k_scale=0.1, v_scale=0.1)),
        ("rope", 2 * qk, lambda: kernelgen.rope(q, k, positions)),
        ("rope in place", 2 * qk, lambda: kernelgen.rope(q, k, positions, inplace=True)),
        ("rope_append e4m3", 2 * q.nbytes + 1.5 * kv, lambda: kernelgen.rope_append_kv(
            q, k, k, cache8, positions=positions, slot_mapping=slots, k_scale=0.1, v_scale=0.1)),
        ("merge 8", outs.nbytes * 1.125, lambda: kernelgen.merge_states(outs, lses)),
    ):
        call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(50):
            call()
        end.record()
        end.synchronize()
        us = start.elapsed_time(end) / 50 * 1000
        print(f"{name}: {us:.1f} us, {moved / us / 1000:.0f} GB/s")
