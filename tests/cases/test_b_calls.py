"""Group B of the public bug cases: what a call accepts, what a plan keeps, and what one call leaves for the next.

Each test runs every backend that can run its call. tests/gpu/test_cases_b_cuda.py repeats them with another ``device``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import GraphBounds, PageTable, reference, settings
from kernelgen.dispatch import select
from kernelgen.errors import DeviceError, DtypeError, SettingsError, ShapeError
from kernelgen.kernels.attention.schedule import Division
from kernelgen.ops import memo
from kernelgen.ops.planning import Shape, make_arrays, make_bounded_arrays, read_batch, refill
from kernelgen.reference.masks import pack_mask
from kernelgen.reference.plain import attention_plain, attention_varlen_plain
from kernelgen.testing.bug_cases import (
    Results,
    assert_same,
    backends,
    check,
    check_paged,
    check_results,
    main_dtype,
    paged_of,
    plan_sizes,
    run,
    run_paged,
    tables,
)
from kernelgen.testing.data import cu_seqlens, random_lengths, random_tensor, random_tensors, seed_of
from kernelgen.testing.tolerance import assert_bits_equal

BF16 = torch.bfloat16


@pytest.fixture
def device() -> str:
    return "cpu"


def rows_and_keys(q_len: int, lens: list[int], device: str, dtype: torch.dtype | None = None, heads: int = 4) -> list[torch.Tensor]:
    """q (q_len, heads, 64), k and v (sum(lens), 2, 64)."""
    shapes = [(q_len, heads, 64), (sum(lens), 2, 64), (sum(lens), 2, 64)]
    return random_tensors(shapes, dtype or main_dtype(device), seed=seed_of(q_len, lens), device=device)


# B23: masks of a wrong size


@pytest.mark.parametrize("shape", [(10, 15), (20, 10), (10, 21), (9, 20), (200,)])
def test_b23_wrong_dense_masks(device: str, shape: tuple[int, ...]) -> None:
    """Ten queries, twenty keys: a mask that does not broadcast to them is refused with both shapes."""
    q, k, v = rows_and_keys(10, [20], device)
    got = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    with pytest.raises(ShapeError, match=rf"mask: got shape \({got}\).*\(1, 4, 10, 20\)"):
        kernelgen.attention(q[None], k[None], v[None], mask=torch.ones(shape, dtype=torch.bool, device=device))


def test_b23_legal_masks(device: str) -> None:
    """A transposed (20, 10) view and other broadcasts give the oracle's numbers; 0/1/2 in an integer type is no mask."""
    q, k, v = rows_and_keys(10, [20], device)
    for shape in ((10, 20), (20,), (4, 10, 20), (4, 1, 20), (1, 1, 10, 1)):
        check("B23 mask", q[None], k[None], v[None], mask=random_tensor(shape, seed=sum(shape), device=device) > 0)
    check("B23 mask", q[None], k[None], v[None], mask=(random_tensor((20, 10), seed=1, device=device) > 0).t())
    for dtype in (torch.int32, torch.uint8, torch.float32):
        with pytest.raises(DtypeError, match="mask: got torch"):
            kernelgen.attention(q[None], k[None], v[None], mask=(torch.arange(200, device=device) % 3).view(10, 20).to(dtype))


def test_b23_ragged_masks(device: str) -> None:
    """Flat and packed masks of sum(Sq * Sk) = 191 entries are right, one entry or byte more or less is refused."""
    q, k, v = rows_and_keys(13, [17, 7], device)
    cu = cu_seqlens([10, 3], device), cu_seqlens([17, 7], device)
    flat = random_tensor((191,), seed=3, device=device) > 0
    case = paged_of(k, v, [17, 7], 4)
    table = tables(case)["csr"]
    for mask in (flat, pack_mask(flat)):
        kind = "dense" if mask.dtype == torch.bool else "packed"
        check("B23 mask", q, k, v, *cu, mask=mask)
        check_paged("B23 mask", table, q, case.kv_cache, {"q_lens": [10, 3], "mask": kind}, mask=mask)
        plan = kernelgen.plan_attention(table, **plan_sizes(q, case.kv_cache), q_lens=[10, 3], mask=kind)
        for wrong in (mask[:-1], torch.cat([mask, mask[:1]])):
            with settings.override(check=True):
                with pytest.raises(ShapeError, match=rf"mask: got shape \({wrong.shape[0]},?\).*{mask.shape[0]}"):
                    kernelgen.attention_varlen(q, k, v, *cu, mask=wrong)
                with pytest.raises(ShapeError, match=rf"mask: got shape \({wrong.shape[0]},?\).*{mask.shape[0]}"):
                    plan.run(q, case.kv_cache, mask=wrong)


# B25: nothing of a call is left for the next


KINDS: dict[str, dict[str, Any]] = {"mask": {"causal": False}, "causal": {"causal": True}, "none": {"causal": False},
                                    "window": {"causal": True, "window": (4, None)}, "cap": {"causal": True, "soft_cap": 2.0}}


def forget() -> None:
    select.forget()
    memo.forget_calls()


def test_b25_a_mask_of_one_call_does_not_reach_the_next(device: str) -> None:
    """A masked call, then causal, plain, windowed and capped ones over the same tensors, twice: the bits of calls that are alone."""
    q, k, v = rows_and_keys(10, [20], device)
    dense = torch.rand(10, 20, generator=torch.Generator().manual_seed(1)).to(device) > 0.5
    case = paged_of(k, v, [20], 4)

    def one(kind: str) -> tuple[Results, Results]:
        masked = kind == "mask"
        return (run("B25 mask" if masked else "B25", q[None], k[None], v[None], **KINDS[kind], **({"mask": dense} if masked else {})),
                run_paged("B25 mask" if masked else "B25", tables(case)["csr"], q, case.kv_cache,
                          {"q_lens": [10], **KINDS[kind], **({"mask": "dense"} if masked else {})},
                          **({"mask": dense.flatten()} if masked else {})))

    alone = {}
    for kind in KINDS:
        forget()
        alone[kind] = one(kind)
    forget()
    for kind in [*KINDS, *KINDS]:
        for got, want in zip(one(kind), alone[kind]):
            assert_same(got, want, what=kind)


def test_b25_plans_side_by_side(device: str) -> None:
    """One plan per kind over one table, run in turns and re-planned to other lengths and back: always its own bits."""
    q, k, v = rows_and_keys(14, [20, 33], device)
    case = paged_of(k, v, [20, 33], 4)
    shorter = PageTable.from_blocks(case.block_tables, [13, 1], 4)
    mask = random_tensor((10 * 20 + 4 * 33,), seed=3, device=device) > 0
    sizes = plan_sizes(q, case.kv_cache) | {"q_lens": [10, 4]}
    for name in backends("B25 paged", "paged_attention", tables(case)["blocks"], device=device, **sizes):
        plans = {kind: kernelgen.plan_attention(tables(case)["blocks"], **sizes, **flags, backend=name)
                 for kind, flags in KINDS.items() if kind != "mask"}
        if name in backends("B25 mask paged", "paged_attention", tables(case)["blocks"], device=device, **sizes, mask="dense"):
            plans["mask"] = kernelgen.plan_attention(tables(case)["blocks"], **sizes, causal=False, mask="dense", backend=name)
        given = {kind: {"mask": mask} if kind == "mask" else {} for kind in plans}
        first = {kind: plan.run(q, case.kv_cache, **given[kind]) for kind, plan in plans.items()}
        for kind, plan in plans.items():
            if kind != "mask":
                plan.update(shorter, [13, 1])
                plan.run(q, case.kv_cache)
                plan.update(tables(case)["csr"], [10, 4])
        for kind in reversed(plans):
            assert_bits_equal(plans[kind].run(q, case.kv_cache, **given[kind]), first[kind], what=f"{kind} by {name}")
        assert len({tuple(out.flatten().tolist()) for out in first.values()}) == len(first)


# B26: workspace


@pytest.mark.parametrize("sm_count", [16, 108, 132, 142])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_b26_workspace_holds_every_item(sm_count: int, kv_heads: int) -> None:
    """64 query heads, D 256, up to 512 requests of mixed lengths: what a plan allots, exactly or for its bounds, is never less than
    what its items write, and a batch beyond the bounds is refused with both numbers."""
    division = Division(block_rows=64, slots=2 * sm_count)
    shape, cpu = Shape(64 // kv_heads, kv_heads, 256, False, division), torch.device("cpu")
    for batch in (1, 2, 7, 64, 512):
        longest, width = 20_000, 40
        bounds = GraphBounds(max_q_tokens=batch, max_seq_k=longest)
        bounded = make_bounded_arrays(batch, bounds, batch * width, shape, cpu)
        blocks = torch.zeros(batch, width, dtype=torch.int32)
        for turn, top in enumerate((longest, 300, 1, 0, longest)):
            lens = random_lengths(batch, top, seed=seed_of("B26", batch, turn))
            planned = read_batch(PageTable.from_blocks(blocks, lens, 512), None)
            refill(bounded, planned, bounds, shape)
            for arrays in (make_arrays(planned, shape, cpu), bounded):
                items, chunk = int(arrays.item_indptr[-1]), int(arrays.chunk)
                assert items <= arrays.num_items and int(arrays.item_indptr.diff().min()) >= 1
                if max(lens) > chunk:
                    rows = items * kv_heads * division.block_rows
                    assert arrays.partial_lse is not None and arrays.partial_lse.numel() >= rows
                    assert arrays.partial_out is not None and arrays.partial_out.numel() >= rows * 256
        with pytest.raises(ShapeError, match="got 20001 keys of one request, expected at most the 20000"):
            refill(bounded, read_batch(PageTable.from_blocks(blocks, [20_001] * batch, 512), None), bounds, shape)


# B28, B29: new lengths for an old plan


def test_b28_two_plans_follow_new_lengths(device: str) -> None:
    """A windowed and a full plan made for lengths [4096, 1, 1, 1], then for [10, 3000, 77, 500] in the same page table: every row as
    from fresh plans."""
    before, after = [4096, 1, 1, 1], [10, 3000, 77, 500]
    cache = random_tensor((300, 2, 16, 2, 64), main_dtype(device), seed=28, device=device)
    q = random_tensor((4, 4, 64), cache.dtype, seed=29, device=device)
    pages = torch.randperm(299, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    blocks = torch.full((4, 256), -1, dtype=torch.int32, device=device)
    blocks[0], blocks[1:, 0] = pages[:256].to(device), pages[256:259].to(device)
    sizes = plan_sizes(q, cache)
    for name in backends("B28 paged", "paged_attention", PageTable.from_blocks(blocks, before, 16), device=device, **sizes):
        now = blocks.clone()
        windows: list[Any] = [(128, None), None]
        plans = [kernelgen.plan_attention(PageTable.from_blocks(now, before, 16), **sizes, window=w, backend=name) for w in windows]
        for plan in plans:
            plan.run(q, cache)
        now.fill_(-1)
        for b, n in enumerate(after):
            now[b, : -(-n // 16)] = pages[40 * b : 40 * b + -(-n // 16)].to(device)
        table = PageTable.from_blocks(now, after, 16)
        for plan, window in zip(plans, windows):
            plan.update(table)
            want = kernelgen.plan_attention(table, **sizes, window=window, backend=name).run(q, cache)
            assert_bits_equal(plan.run(q, cache), want, what=f"window {window} by {name}")  # type: ignore[arg-type]
            check_paged("B28", table, q, cache, {"window": window})


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_b29_lengths_change_by_update_only(device: str, batch: int) -> None:
    """Planned at 2 keys, updated to 8192 and back to 1: right each time. Without an update the caller's new lengths change nothing: a
    plan keeps the lengths that it copied."""
    cache = random_tensor((256, 2, 64, 1, 64), main_dtype(device), seed=29, device=device)
    q = random_tensor((batch, 8, 64), cache.dtype, seed=batch, device=device)
    blocks = torch.randint(0, 256, (batch, 128), generator=torch.Generator().manual_seed(2), dtype=torch.int32).to(device)
    sizes = plan_sizes(q, cache)

    def table(keys: int) -> PageTable:
        return PageTable.from_blocks(blocks, [keys] * batch, 64)

    for name in backends("B29 paged", "paged_attention", table(2), device=device, **sizes):
        if name == "reference" and batch > 1:
            continue  # seconds a run, and check_paged below has it
        lengths = torch.full((batch,), 2, dtype=torch.int32)
        plan = kernelgen.plan_attention(PageTable.from_blocks(blocks, lengths, 64), **sizes, backend=name)
        first = plan.run(q, cache)
        lengths.fill_(8192)
        assert_bits_equal(plan.run(q, cache), first, what=f"not updated by {name}")  # type: ignore[arg-type]
        for keys in (8192, 1, 2):
            plan.update(table(keys))
            got = plan.run(q, cache)
            want = kernelgen.plan_attention(table(keys), **sizes, backend=name).run(q, cache)
            assert_bits_equal(got, want, what=f"{keys} keys by {name}")  # type: ignore[arg-type]
    check_paged("B29", table(8192), q, cache)


# B30: devices


def test_b30_mixed_devices_are_named(device: str) -> None:
    """One tensor on another device than the rest (here: meta) is an error that names it and both devices, on every entry."""
    q, k, v = rows_and_keys(10, [20], device)
    cu = cu_seqlens([10], device), cu_seqlens([20], device)
    case = paged_of(k, v, [20], 4)
    plan = kernelgen.plan_attention(tables(case)["csr"], **plan_sizes(q, case.kv_cache), q_lens=[10], sinks=True)
    for name, call in {
        "k": lambda: kernelgen.attention(q[None], k[None].to("meta"), v[None]),
        "v": lambda: kernelgen.attention_varlen(q, k, v.to("meta"), *cu),
        "cu_seqlens_q": lambda: kernelgen.attention_varlen(q, k, v, cu[0].to("meta"), cu[1]),
        "kv_lens": lambda: kernelgen.attention(q[None], k[None], v[None], kv_lens=cu[0][1:].to("meta")),
        "sinks": lambda: plan.run(q, case.kv_cache, sinks=torch.zeros(4, device="meta")),
        "kv_cache": lambda: plan.run(q, torch.empty_like(case.kv_cache, device="meta"), sinks=torch.zeros(4, device=device)),
        "lses": lambda: kernelgen.merge_states(q[None], torch.zeros(1, 10, 4, device="meta")),
    }.items():
        with pytest.raises(DeviceError, match=rf"{name}.*meta"):
            call()


# B31: inputs are read when the call runs


def test_b31_every_round_sees_its_own_inputs(device: str) -> None:
    """Fifty rounds over the same buffers, each written just before the call: constant values come out, of no other round."""
    q, k, v = rows_and_keys(8, [8], device)
    case = paged_of(k, v, [8], 8)
    cache = case.kv_cache
    assert isinstance(cache, torch.Tensor)
    calls = {f"dense {n}": (lambda n=n: kernelgen.attention(q[None], k[None], v[None], return_lse=n != "torch", backend=n))
             for n in backends("B31", "attention", q[None], k[None], v[None], device=device)}
    table, sizes = tables(case)["csr"], plan_sizes(q, cache) | {"q_lens": [8]}
    for name in backends("B31 paged", "paged_attention", table, device=device, **sizes):
        plan = kernelgen.plan_attention(table, **sizes, backend=name)
        calls[f"paged {name}"] = lambda plan=plan: plan.run(q, cache)
    for turn in range(50):
        q.fill_(turn % 3), v.fill_(turn), cache[:, 1].fill_(turn)
        for name, call in calls.items():
            out = call()
            out = out[0] if isinstance(out, tuple) else out
            torch.testing.assert_close(out, torch.full_like(out, turn), msg=f"round {turn} of {name}")


# B38: scales of an fp8 cache


SCALES: dict[str, Any] = {"number": (0.25, 0.5), "0-d": (torch.tensor(0.25), torch.tensor(0.5)),
                          "head": (torch.tensor([0.25, 1.0]), torch.tensor([0.5, 2.0]))}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_b38_scales_of_an_fp8_cache(device: str, dtype: torch.dtype, kind: str) -> None:
    """k_scale 0.25 and v_scale 0.5 as numbers, 0-d tensors and one per head: dense, ragged, paged and decode give attention over the
    dequantised cache, which bfloat16 holds exactly."""
    lens, q_lens = [17, 30, 5], [3, 6, 1]
    q, k, v = rows_and_keys(10, lens, device, BF16)
    k, v = ((x * 4).to(dtype) for x in (k, v))
    scales = [s.to(device) if isinstance(s, torch.Tensor) else s for s in SCALES[kind]]
    factors = [s[:, None] if isinstance(s, torch.Tensor) and s.dim() else s for s in scales]
    wide = [(x.float() * f).to(BF16) for x, f in zip((k, v), factors)]
    given = {"k_scale": scales[0], "v_scale": scales[1]}
    case = paged_of(k, v, lens, 4, kv_layout="HND")
    planned = {"kv_scales": "head" if kind == "head" else "tensor", "kv_layout": "HND"}
    cu = cu_seqlens(q_lens, device), cu_seqlens(lens, device)
    found = {
        "ragged": (run("B38 fp8", q, k, v, *cu, causal=True, **given), q_lens),
        "paged": (run_paged("B38 fp8", tables(case)["csr"], q, case.kv_cache, planned | {"q_lens": q_lens}, **given), q_lens),
        "decode": (run_paged("B38 fp8", tables(case)["blocks"], q[:3], case.kv_cache, planned, **given), [1, 1, 1]),
    }
    for layout, (results, rows) in found.items():
        starts = cu_seqlens(rows, device), cu[1]
        exact, plain = (f(q[: sum(rows)], *wide, *starts, causal=True, return_lse=True)
                        for f in (reference.attention_varlen, attention_varlen_plain))
        check_results(results, exact, plain, what=f"{layout} {dtype} {kind}")
    dense = run("B38 fp8", q[None], k[None], v[None], **given)
    check_results(dense, *(f(q[None], *(x[None] for x in wide), return_lse=True) for f in (reference.attention, attention_plain)),
                  what=f"dense {dtype} {kind}")


def test_b38_unsupported_scales_are_refused(device: str) -> None:
    """Scales of another shape or type than documented are errors on every path, never ignored."""
    q, k, v = rows_and_keys(10, [20], device, BF16)
    k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
    case = paged_of(k, v, [20], 4)
    cu = cu_seqlens([10], device), cu_seqlens([20], device)
    plans = {kind: kernelgen.plan_attention(tables(case)["csr"], **plan_sizes(q, case.kv_cache), q_lens=[10], kv_scales=kind)
             for kind in ("tensor", "head", "request_head", "page")}
    good = torch.tensor(0.5, device=device)
    for shape in ((3,), (2, 1), (1, 2, 1), (20, 2)):
        bad = torch.ones(shape, device=device)
        for given in ({"k_scale": bad, "v_scale": good}, {"k_scale": good, "v_scale": bad}):
            with pytest.raises(ShapeError, match="_scale: got shape"):
                kernelgen.attention(q[None], k[None], v[None], **given)
            with pytest.raises(ShapeError, match="_scale: got shape"):
                kernelgen.attention_varlen(q, k, v, *cu, **given)
            for plan in plans.values():
                with pytest.raises(ShapeError, match="_scale: got shape"):
                    plan.run(q, case.kv_cache, **given)
    with pytest.raises(DtypeError, match="k_scale: got torch.float16"):
        kernelgen.attention(q[None], k[None], v[None], k_scale=good.half(), v_scale=good)
    with pytest.raises(SettingsError, match="v_scale: got none"):
        plans["tensor"].run(q, case.kv_cache, k_scale=good)


# B43: another call than was planned


def test_b43_run_other_than_planned(device: str) -> None:
    """Planned for 4 requests of 20 tokens; other rows, heads, types, dims and unequal k and v are refused with both values."""
    lens = [9, 13, 4, 20]
    q, k, v = rows_and_keys(20, lens, device)
    case = paged_of(k, v, lens, 4, pair=True)
    k_cache, v_cache = case.kv_cache
    sizes = plan_sizes(q, case.kv_cache)
    four = kernelgen.plan_attention(tables(case)["csr"], **sizes)
    twenty = kernelgen.plan_attention(tables(case)["csr"], **sizes, q_lens=[5, 5, 5, 5])
    other = torch.float16
    for plan, given, error, words in (
        (four, q[:3], ShapeError, "got 3 rows .*expected 4"), (four, q[:5], ShapeError, "got 5 rows .*expected 4"),
        (twenty, q[:19], ShapeError, "got 19 rows .*expected 20"), (twenty, torch.cat([q, q[:1]]), ShapeError, "got 21 rows .*expected 20"),
        (twenty, q[:, :2], ShapeError, r"\(20, 2, 64\), expected \(Tq, 4, 64\)"),
        (twenty, q.to(other), DtypeError, "got torch.float16, expected .* as planned"),
        (twenty, q[..., :32], ShapeError, r"\(20, 4, 32\), expected \(Tq, 4, 64\)"),
    ):
        with pytest.raises(error, match=words):
            plan.run(given, case.kv_cache)
    for cache, error, words in (
        ((k_cache[:, :3], v_cache[:, :3]), ShapeError, r"\(3, 2, 64\).*expected \(4, 2, 64\)"),
        ((k_cache[:, :, :1], v_cache[:, :, :1]), ShapeError, r"\(4, 1, 64\).*expected \(4, 2, 64\)"),
        ((k_cache, v_cache[:-1]), ShapeError, "kv_cache: got k"),
        ((k_cache, v_cache[..., :32]), ShapeError, r"\(4, 2, 32\).*expected \(4, 2, 64\)"),
        ((k_cache.to(other), v_cache.to(other)), DtypeError, "got torch.float16, expected .* as planned"),
    ):
        with pytest.raises(error, match=words):
            twenty.run(q, cache)
    with pytest.raises(ShapeError, match="v: got 45 .*expected 46"):
        kernelgen.attention(q[None], k[None], v[None, :-1])
    check_paged("B43", tables(case)["csr"], q, case.kv_cache, {"q_lens": [5, 5, 5, 5]})


# B47: hints change nothing


def test_b47_upper_bounds_of_lengths_change_no_bit(device: str) -> None:
    """max_seqlen hints and the width of a block table of 1, 2 and 64 times the longest length, and bounds of a plan likewise: the
    same bits."""
    lens = [700, 3, 65]
    q, k, v = rows_and_keys(3, lens, device)
    cu = cu_seqlens([1] * 3, device), cu_seqlens(lens, device)
    case = paged_of(k, v, lens, 16)
    width = 44
    found = []
    for factor in (1, 2, 64):
        blocks = torch.full((3, width * factor), -1, dtype=torch.int32, device=device)
        blocks[:, :width] = case.block_tables[:, :width]
        table = PageTable.from_blocks(blocks, lens, 16)
        ragged = {name: run("B47", q, k, v, *cu, causal=True)[name] for name in ("generated", "reference")}
        for name, result in ragged.items():
            hinted = kernelgen.attention_varlen(q, k, v, *cu, causal=True, max_seqlen_q=factor, max_seqlen_k=700 * factor, backend=name,
                                                return_lse=True)
            assert_bits_equal(hinted[0], result.out, what=f"hint x {factor} by {name}")
        paged = run_paged("B47", table, q, case.kv_cache)
        bounded = {}
        if "generated" in paged:
            plan = kernelgen.plan_attention(table, **plan_sizes(q, case.kv_cache), backend="generated",
                                            cuda_graph_bounds=GraphBounds(3 * factor, 700 * factor))
            bounded["generated"] = plan.run(q, case.kv_cache)
        found.append((ragged, paged, bounded))
    for ragged, paged, bounded in found[1:]:
        assert_same(ragged, found[0][0], what="ragged")
        assert_same(paged, found[0][1], what="paged")
        for name, out in bounded.items():
            assert_bits_equal(out, found[0][2][name], what=f"bounds by {name}")
