"""Group B of the public bug cases: where a call reads and writes. Pages, strides, far offsets, sizes, head counts and dims.

Each test runs every backend that can run its call. tests/gpu/test_cases_b_cuda.py repeats them with another ``device``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import kernelgen
from kernelgen import PageTable, reference, settings
from kernelgen.errors import ShapeError
from kernelgen.testing.bug_cases import (
    Results,
    assert_finite_and_same,
    backends,
    check,
    check_mla,
    check_paged,
    main_dtype,
    paged_of,
    plan_sizes,
    run,
    run_mla,
    run_paged,
    tables,
    weights_of,
)
from kernelgen.testing.data import FP8_NAN, cu_seqlens, layouts, packed_qkv, poison_, random_tensor, random_tensors, seed_of
from kernelgen.testing.tolerance import assert_attention_close, assert_bits_equal, assert_close_to_reference

NAN, INF = float("nan"), float("inf")
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def device() -> str:
    return "cpu"


def keys_of(lens: list[int], heads: int, dim: int, device: str, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """k and v of requests one behind the other."""
    shape = (sum(lens), heads, dim)
    return random_tensors([shape, shape], dtype or main_dtype(device), seed=seed_of(lens, heads, dim), device=device)


# B09: what was never written


LENS = [32, 64, 96, 48]


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_b09_unused_slots_of_a_contiguous_cache(device: str, junk: float) -> None:
    """Slots of 128 keys of which the first 32 to 96 were written: whatever lies behind them changes no bit, through ``attention``
    with kv_lens and through a plan over the same memory."""
    q = random_tensor((4, 1, 4, 64), main_dtype(device), seed=1, device=device)
    lens = torch.tensor(LENS, dtype=torch.int32, device=device)
    results = []
    for rest in (junk, 0.0):
        k, v = random_tensors([(4, 128, 2, 64)] * 2, q.dtype, seed=2, device=device)
        for b, n in enumerate(LENS):
            k[b, n:], v[b, n:] = rest, rest
        found = run("B09", q, k, v, kv_lens=lens, skip=("torch",))  # torch: the test below
        paged = run_paged("B09", PageTable.contiguous(lens, 128), q[:, 0], (k, v))
        results.append(found | {f"paged {n}": r for n, r in paged.items()})
    assert_finite_and_same(*results, what=f"{junk}")


def test_b09_torch_keeps_the_rule_too() -> None:
    """The torch backend is held to the same rule for keys past kv_lens."""
    q, (k, v) = random_tensor((1, 1, 4, 64), seed=1), random_tensors([(1, 128, 2, 64)] * 2, seed=2)
    poison_(k[:, 32:]), poison_(v[:, 32:])
    out = kernelgen.attention(q, k, v, kv_lens=torch.tensor([32], dtype=torch.int32), backend="torch")
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("page", [1, 16, 19, 128])
def test_b09_unused_slots_and_pages(device: str, page: int) -> None:
    """A cache of NaN in which only used slots were written, its last pages partly: bit for bit as with zeros."""
    k, v = keys_of(LENS, 2, 64, device)
    q = random_tensor((4, 4, 64), k.dtype, seed=1, device=device)
    case = paged_of(k, v, LENS, page)
    table = tables(case)["csr"]
    dirty = run_paged("B09", table, q, case.kv_cache)
    assert_finite_and_same(dirty, run_paged("B09", table, q, case.kv_cache.nan_to_num(0.0)), what=f"page {page}")  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
def test_b09_fp8_nan_codes(device: str, dtype: torch.dtype) -> None:
    """Unused slots of an fp8 cache hold NaN codes."""
    q = random_tensor((4, 1, 4, 64), torch.bfloat16, seed=1, device=device)
    lens = torch.tensor(LENS, dtype=torch.int32, device=device)
    results = []
    for code in (FP8_NAN, 0):
        k, v = random_tensors([(4, 128, 2, 64)] * 2, dtype, seed=2, device=device)
        for b, n in enumerate(LENS):
            k[b, n:].view(torch.uint8).fill_(code), v[b, n:].view(torch.uint8).fill_(code)
        results.append(run("B09 fp8", q, k, v, kv_lens=lens))
    assert_finite_and_same(*results, what=str(dtype))


def test_b09_unused_slots_of_mla(device: str) -> None:
    """The latent cache likewise."""
    q = random_tensor((2, 5, 80), main_dtype(device), seed=1, device=device)
    cache = poison_(torch.empty(5, 4, 80, dtype=q.dtype, device=device))
    cache[3], cache[1, :2] = (random_tensor((n, 80), q.dtype, seed=n, device=device) for n in (4, 2))
    cache[4, :1] = cache[1, :1]
    table = PageTable.from_blocks(torch.tensor([[3, 1, -1], [4, 2**31 - 1, -1]], device=device), [6, 1], 4)
    check_mla("B09", table, q, cache, 64)
    assert_finite_and_same(run_mla("B09", table, q, cache, 64), run_mla("B09", table, q, cache.nan_to_num(0.0), 64), what="mla")


# B12, B13: any page size


@pytest.mark.parametrize("page", [1, 2, 3, 8, 16, 19, 64, 128, 256, 512])
def test_b12_any_page_size(device: str, page: int) -> None:
    """Lengths of one key, one page and one page and a key, in both forms of table and both layouts."""
    lens = [1, page, page + 1]
    k, v = keys_of(lens, 2, 64, device)
    q = random_tensor((3, 4, 64), k.dtype, seed=page, device=device)
    case = paged_of(k, v, lens, page, kv_layout="HND" if page % 2 else "NHD")
    for table in tables(case).values():
        check_paged("B12", table, q, case.kv_cache, {"kv_layout": case.kv_layout})


def test_b12_bad_last_page_length() -> None:
    """A request with pages needs 1 .. page_size keys on its last one; 0 and page_size + 1 are refused by number."""
    for last in (0, 17):
        with pytest.raises(ShapeError, match=f"kv_last_page_len: got {last} for request 1, expected 1 to 16"):
            PageTable.from_csr([0, 1, 2], [0, 1], [16, last], 16)
    PageTable.from_csr([0, 1, 1], [0], [16, 17], 16)  # request 1 has no pages: its last length is not looked at


@pytest.mark.parametrize("page", [256, 512])
def test_b13_large_shuffled_pages(device: str, page: int) -> None:
    """A decode over 1000 keys on large pages in random order."""
    lens = [1000, 999, 1]
    k, v = keys_of(lens, 2, 64, device)
    q = random_tensor((3, 8, 64), k.dtype, seed=page, device=device)
    case = paged_of(k, v, lens, page, seed=page)
    check_paged("B13", tables(case)["blocks"], q, case.kv_cache)


# B14: offsets beyond 32 bits


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    """A cache of the test before is gone before the next one is made."""
    gc.collect()
    yield


def untouched(elements: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Memory that costs address space only, until it is written: on a CPU the system maps pages when they are touched."""
    try:
        return torch.empty(elements, dtype=dtype, device=device)
    except RuntimeError as error:
        pytest.skip(f"no room for {elements} elements of {dtype}: {str(error)[:80]}")


@pytest.mark.parametrize("elements", [2**31, 2**32])
@pytest.mark.parametrize("kind", ["main", "fp8"])
def test_b14_pages_beyond_32_bits(device: str, elements: int, kind: str) -> None:
    """Pages at the end of a cache of just over 2^31 and 2^32 elements and on both sides of these marks give the bits that they give
    in a small cache; NaN lies wherever a wrapped offset would read."""
    page, heads, dim = 16, 2, 64
    dtype = E4M3 if kind == "fp8" else main_dtype(device)
    per_page = 2 * page * heads * dim
    mark = elements // per_page
    cache = untouched(elements + 4 * per_page, dtype, device).view(mark + 4, 2, page, heads, dim)
    used = [mark + 3, mark, mark - 1, mark + 1, mark // 2 - 1, mark // 2 + 7]
    poison_(cache[:6]), poison_(cache[mark + 2])
    for i, number in enumerate(used):
        cache[number].copy_(random_tensor(cache.shape[1:], dtype, seed=i, device=device))
    small = torch.stack([cache[n].view(torch.uint8) for n in used]).view(dtype)
    q = random_tensor((3, 4, dim), torch.bfloat16 if kind == "fp8" else dtype, seed=9, device=device)
    far = PageTable.from_blocks(torch.tensor(used, device=device).view(3, 2), [32, 31, 17], page)
    near = PageTable.from_blocks(torch.arange(6, device=device).view(3, 2), [32, 31, 17], page)
    case = "B14 fp8" if kind == "fp8" else "B14"
    assert_finite_and_same(run_paged(case, far, q, cache), run_paged(case, near, q, small), what=f"{elements} elements")
    check_paged(case, near, q, small)


@pytest.mark.parametrize("mark", [2**31, 2**32])
@pytest.mark.parametrize("dim", ["batch", "row", "head"])
def test_b14_strides_beyond_32_bits(device: str, dim: str, mark: int) -> None:
    """Views of one buffer whose batches, rows or heads lie so far apart that the last one is past 2^31 or 2^32 elements: inputs
    and output."""
    buffer = untouched(mark + 2**20, main_dtype(device), device)
    shape = (2, 3, 2, 64)
    stride = {"batch": (mark, 128, 64), "row": (512, mark // 2, 64), "head": (512, 128, mark)}[dim]

    def view(start: int) -> torch.Tensor:
        return buffer[start:].as_strided(shape, (*stride, 1), buffer[start:].storage_offset())

    q, k, v, out = (view(4096 * i) for i in range(4))
    for i, x in enumerate((q, k, v)):
        x.copy_(random_tensor(shape, x.dtype, seed=i, device=device))
    want = check("B14", q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    for name in want:
        poison_(out)
        kernelgen.attention(q, k, v, causal=True, out=out, return_lse=want[name].lse is not None, backend=name)
        if name == "torch":  # picks its kernel by the strides
            torch.testing.assert_close(out, want[name].out)
        else:
            assert_bits_equal(out, want[name].out, what=f"{dim} stride {mark} by {name}")


# B16, B17: more requests, heads and rows than a grid axis has


@pytest.mark.parametrize("batch", [65_535, 65_536, 70_000])
@pytest.mark.parametrize("layout", ["ragged", "paged"])
def test_b16_seventy_thousand_requests(device: str, batch: int, layout: str) -> None:
    """A decode of up to 70,000 requests of four keys each. The oracle walks over requests and would take minutes: the formula in
    float64 stands for it."""
    dtype = main_dtype(device)
    q, k, v = (x[:batch] for x in random_tensors([(70_000, 1, 64), (70_000, 4, 1, 64), (70_000, 4, 1, 64)], dtype, seed=16,
                                                device=device))
    skip = ("reference",)
    if layout == "paged":
        order = torch.randperm(batch, generator=torch.Generator().manual_seed(1)).to(device)
        cache = torch.empty(batch, 2, 4, 1, 64, dtype=dtype, device=device)
        cache[order, 0], cache[order, 1] = k, v
        table = PageTable.from_blocks(order[:, None], [4] * batch, 4)
        results = run_paged("B16", table, q, cache, skip=skip)
    else:
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        results = run("B16", q, k.flatten(0, 1), v.flatten(0, 1), starts, starts * 4, skip=skip)
    if not results:
        pytest.skip("no kernel for it yet, and the oracle would take minutes")
    exact, plain = (_by_formula(q.transpose(0, 1), k[:, :, 0], v[:, :, 0], t) for t in (torch.float64, torch.float32))
    for name, got in results.items():
        assert_attention_close(got.out, exact.transpose(0, 1), plain.transpose(0, 1).to(dtype), what=f"{layout} by {name}")


def _by_formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """q (1, B, D) with each row's own keys k, v (B, S, D): softmax(q k / sqrt(D)) v."""
    logits = torch.einsum("bd,bkd->bk", q[0].to(dtype), k.to(dtype)) * q.shape[-1] ** -0.5
    return torch.einsum("bk,bkd->bd", weights_of(logits, v.dtype), v.to(dtype))[None]


def test_b17_sixty_five_thousand_heads(device: str) -> None:
    """1 x 65,536 heads x 10 queries x 16."""
    q, k, v = random_tensors([(1, 10, 65_536, 16)] * 3, main_dtype(device), seed=17, device=device)
    results = run("B17", q, k, v, skip=("reference", "torch"))
    exact, plain = (torch.einsum("hqk,khd->qhd", weights_of(torch.einsum("qhd,khd->hqk", q[0].to(t), k[0].to(t)) / 4, v.dtype),
                                 v[0].to(t))[None] for t in (torch.float64, torch.float32))
    # Heads, which are alike, as the rows of a tile, and 1,024 of them: the plain evaluation of 64 is sometimes lucky among so many
    # (with AVX2 seven rows were at up to 1.4 x such a limit).
    for name, got in results.items():
        assert_close_to_reference(got.out, exact, plain.to(q.dtype), what=f"heads by {name}", tile_rows=1024)


def test_b17_four_million_queries(device: str) -> None:
    """1 x 1 x (64 * 65,535 + 1) queries x 8 over four keys."""
    rows = 64 * 65_535 + 1
    q, k, v = random_tensors([(1, rows, 1, 8), (1, 4, 1, 8), (1, 4, 1, 8)], main_dtype(device), seed=18, device=device)
    results = run("B17", q, k, v, skip=("reference",))
    for part in (slice(0, 64), slice(rows // 2, rows // 2 + 64), slice(64 * 32_767, 64 * 32_769), slice(rows - 64, rows)):
        exact, plain = ((weights_of(q[0, part, 0].to(t) @ k[0, :, 0].to(t).T * 8**-0.5, v.dtype) @ v[0, :, 0].to(t))[None, :, None]
                        for t in (torch.float64, torch.float32))
        for name, got in results.items():
            assert_attention_close(got.out[:, part], exact, plain.to(q.dtype), what=f"rows {part} by {name}")
    for name, got in results.items():
        assert bool(torch.isfinite(got.out).all()), name


# B18, B19: head counts and head dims


@pytest.mark.parametrize("dim", [64, 128])
def test_b18_any_group_size(device: str, dim: int) -> None:
    """Hq / Hkv of 1 .. 17, 24, 32, 64 and 71, prefill and decode of three requests."""
    lens = [17, 5, 30]
    for group in [*range(1, 18), 24, 32, 64, 71] if dim == 64 else [7, 71]:
        heads = 2 if group < 9 else 1
        seed = seed_of("B18", dim, group)
        k, v = keys_of(lens, heads, dim, device)
        q = random_tensor((43, heads * group, dim), k.dtype, seed=seed, device=device)
        case = paged_of(k, v, lens, 16, seed=seed)
        check("B18", q[None], k[None], v[None], causal=True, seed=seed)
        check_paged("B18", tables(case)["csr"], q[:3], case.kv_cache, seed=seed)
        check_paged("B18", tables(case)["csr"], q, case.kv_cache, {"q_lens": [21, 21, 1]}, seed=seed)


DIMS = (16, 24, 40, 56, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def head_dim_call(device: str, dim: int, dim_v: int) -> list[torch.Tensor]:
    shapes = [(2, 9, 4, dim), (2, 21, 2, dim), (2, 21, 2, dim_v)]
    return random_tensors(shapes, main_dtype(device), seed=seed_of("B19", dim, dim_v), device=device)


@pytest.mark.parametrize(("dim", "dim_v"), [(40, 64), (512, 512)])
def test_b19_head_dims(device: str, dim: int, dim_v: int) -> None:
    """A head dim that is no multiple of 16, unequal ones, the largest."""
    check("B19", *head_dim_call(device, dim, dim_v), causal=True)


@pytest.mark.full
@pytest.mark.parametrize(("dim", "dim_v"), [*((d, d) for d in DIMS), (192, 128)])
def test_b19_every_head_dim(device: str, dim: int, dim_v: int) -> None:
    """All head dims of the case."""
    check("B19", *head_dim_call(device, dim, dim_v), causal=True)


def test_b19_head_dims_are_checked_before_any_compile(device: str) -> None:
    """Every legal size has a kernel; 1, 7 and 520 are refused with the sizes that are legal, as is 576 but for 576/512."""
    for dim, dim_v in [*((d, d) for d in DIMS), (192, 128), (40, 64)]:
        assert "generated" in backends("B19", "attention", *head_dim_call(device, dim, dim_v), device=device)
    for dim in (1, 7, 520, 576):
        with pytest.raises(ShapeError, match=f"got head dim {dim} .*expected a multiple of 8 from 8 to 512"):
            kernelgen.attention(*head_dim_call(device, dim, dim))
        table = PageTable.from_blocks(torch.zeros(1, 1, dtype=torch.int32, device=device), [1], 4)
        with pytest.raises(ShapeError, match=f"head_dim: got {dim}, expected a multiple of 8 from 8 to 512"):
            kernelgen.plan_attention(table, num_q_heads=1, num_kv_heads=1, head_dim=dim, q_dtype=torch.bfloat16)
    assert "reference" in backends("B19", "attention", *head_dim_call(device, 576, 512), device=device) if device != "cpu" else True


# B22: strides


def test_b22_views_of_a_fused_projection(device: str) -> None:
    """q, k and v as slices of one (2048, 1, Hq + 2 Hkv, 64) tensor, batch and sequence swapped: the bits of contiguous inputs, and
    the oracle's numbers in the last rows."""
    q, k, v = (x.transpose(0, 1) for x in packed_qkv((2048, 1), 16, 1, 64, main_dtype(device), seed=22, device=device))
    views = run("B22", q, k, v, causal=True, skip=("reference",))
    copies = run("B22", q.contiguous(), k.contiguous(), v.contiguous(), causal=True, skip=("reference", "torch"))
    exact, plain = (f(q[:, -64:], k, v, causal=True) for f in (reference.attention, reference.attention_plain))
    for name, got in views.items():
        if name == "generated":
            assert_bits_equal(got.out, copies[name].out, what="fused")
        assert_attention_close(got.out[:, -64:], exact, plain, what=f"fused by {name}")


@pytest.mark.parametrize("layout", ["ragged", "dense"])
def test_b22_every_layout_of_each_operand(device: str, layout: str) -> None:
    """Padded, odd, misaligned, skipped and transposed rows of q, k and v in turn, k and v in one memory, heads of stride 0."""
    shapes = [(2, 33, 4, 64), (2, 50, 2, 64), (2, 50, 2, 64)]
    tensors = random_tensors(shapes, main_dtype(device), seed=23, device=device)
    cu: list[torch.Tensor] = []
    if layout == "ragged":
        tensors, cu = [x.flatten(0, 1) for x in tensors], [cu_seqlens([33] * 2, device), cu_seqlens([50] * 2, device)]
    want = run("B22", *tensors, *cu, causal=True)
    for turn in range(3):
        for name, view in layouts(tensors[turn]).items():
            given = [view if i == turn else x for i, x in enumerate(tensors)]
            got = run("B22", *given, *cu, causal=True)
            for backend in ("generated", "reference"):
                assert_bits_equal(got[backend].out, want[backend].out, what=f"{'qkv'[turn]} {name} by {backend}")
            if "torch" in got:
                torch.testing.assert_close(got["torch"].out, want["torch"].out)
    q, k, _ = tensors
    check("B22", q, k, k, *cu, causal=True)
    check("B22", q, k[..., :1, :].expand_as(k), k[..., 1:, :].expand_as(k), *cu, causal=True)


# B46: page numbers


@pytest.mark.parametrize("bad", [-1, 8, 2**31 - 1])
@pytest.mark.parametrize("op", ["paged", "mla"])
def test_b46_bad_page_numbers(device: str, bad: int, op: str) -> None:
    """A page that does not exist, in a used slot, is an error that names request and slot under KERNELGEN_CHECK=1; in an unused slot
    it changes nothing. int32 and int64 tables, and a transposed view of one."""
    dtype = main_dtype(device)
    numbers = torch.tensor([[5, 2, 7], [1, 3, 0]], dtype=torch.int32, device=device)
    cache = random_tensor((8, 2, 4, 1, 64) if op == "paged" else (8, 4, 80), dtype, seed=46, device=device)
    q = random_tensor((2, 4, 64 if op == "paged" else 80), dtype, seed=47, device=device)

    def call(blocks: torch.Tensor) -> Results:
        table = PageTable.from_blocks(blocks, [9, 6], 4)
        return run_paged("B46", table, q, cache) if op == "paged" else run_mla("B46", table, q, cache, 64)

    want = call(numbers)
    for form in (torch.int32, torch.int64):
        junk, used = numbers.to(form, copy=True), numbers.to(form, copy=True)
        junk[1, 2], used[1, 1] = bad, bad
        for view in (junk, junk.t().contiguous().t()):
            with settings.override(check=True):
                assert_finite_and_same(call(view), want, what=f"unused {bad}")
        for name in want:
            with settings.override(check=True), pytest.raises(ShapeError, match=f"request 1, slot 1 holds page {bad}, expected 0 .. 7"):
                if op == "paged":
                    table = PageTable.from_blocks(used, [9, 6], 4)
                    kernelgen.plan_attention(table, **plan_sizes(q, cache), backend=name).run(q, cache)
                else:
                    plan = kernelgen.plan_mla(PageTable.from_blocks(used, [9, 6], 4), num_heads=4, q_dtype=dtype, scale=0.1,
                                              head_dim_latent=64, head_dim_rope=16, backend=name)
                    plan.run(q[..., :64], q[..., 64:], cache)
