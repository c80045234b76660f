"""append_kv, append_mla, rope, rope_append_kv and merge_states through the public calls on the CPU, against the oracles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.errors import DtypeError, LayoutError, NoBackendError, SettingsError, ShapeError
from kernelgen.settings import override
from kernelgen.testing.cache_ops import FP8, check_append, check_merge, check_mla, check_rope, check_rope_append, make_table
from kernelgen.testing.data import poisoned_empty, random_tensor
from kernelgen.testing.tolerance import assert_bits_equal

F32, F64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
E4M3, E5M2 = FP8
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("layout", ("NHD", "HND"))
@pytest.mark.parametrize("form", ("csr", "blocks", "slots"))
@pytest.mark.parametrize("page_size", (1, 3, 16))
def test_append_kv(form: str, layout: str, page_size: int) -> None:
    modes = ("positions",) if form == "slots" else ("positions", "one", "last")
    for mode in modes:
        check_append(form, layout, page_size, BF16, BF16, heads=3, dim=40, dim_v=24, mode=mode)
        check_append(form, layout, page_size, F32, F32, heads=2, dim=17, dim_v=17, mode=mode, pair=False, index=torch.int64)
    check_append(form, layout, page_size, BF16, E4M3, heads=3, dim=72, dim_v=130, scales="head", odd=True)


@pytest.mark.parametrize("scales", (None, "number", "tensor", "head", "request_head", "page"))
@pytest.mark.parametrize("dtype, cache_dtype", ((BF16, E4M3), (FP16, E5M2), (F32, E4M3), (E4M3, E4M3)), ids=str)
def test_append_quantised(dtype: torch.dtype, cache_dtype: torch.dtype, scales: str | None) -> None:
    for form in ("csr", "blocks"):
        check_append(form, "NHD", 3, dtype, cache_dtype, heads=4, dim=64, dim_v=64, scales=scales, pair=False)
    if scales != "request_head":
        check_append("slots", "HND", 16, dtype, cache_dtype, heads=2, dim=24, dim_v=136, scales=scales)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_codes_of_every_kind_of_float(dtype: torch.dtype) -> None:
    """All sixteen-bit patterns, around every rounding tie of fp8 and far beyond its range: the codes are torch's, saturated."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16)
    x = torch.cat([x.float(), x.float() * 1.0009765625, x.float() * 0.9990234375])
    x = x[: x.numel() // 64 * 64].view(-1, 1, 64)
    cache = poisoned_empty((x.shape[0], 1, 1, 64), dtype)
    kernelgen.append_kv((cache, cache.clone()), x, x, slot_mapping=torch.arange(x.shape[0]), backend="generated")
    limit = torch.finfo(dtype).max
    assert_bits_equal(cache.view(-1, 1, 64), x.clamp(-limit, limit).to(dtype), what=str(dtype))


def test_tokens_that_lead_nowhere_are_skipped_and_errors_under_check() -> None:
    table, pages = make_table("csr", [4, 9], 4, 0, seed=1, device="cpu")
    k = random_tensor((2, 1, 8), seed=1)

    def fresh() -> torch.Tensor:
        return poisoned_empty((pages, 2, 4, 1, 8))

    junk = kernelgen.PageTable.from_csr([0, 1, 2], [-1, pages], [1, 1], 4)
    calls: tuple[tuple[Any, dict[str, torch.Tensor]], ...] = (
        (None, {"slot_mapping": torch.tensor([4 * pages, 2**40])}),
        (table, {"positions": torch.tensor([4, 12])}),
        (table, {"positions": torch.tensor([0, 2**40]), "batch_indices": torch.tensor([2, 1])}),
        (junk, {}),
        (kernelgen.PageTable.from_blocks(torch.tensor([[7], [-3]], dtype=torch.int32), [1, 1], 4), {}),
        (table, {"batch_indices": torch.tensor([1, 2**40])}),
    )
    for i, (where, named) in enumerate(calls[:-1]):
        cache = fresh()
        kernelgen.append_kv(cache, k, k, where, **named, backend="generated")
        assert_bits_equal(cache, fresh(), what=f"case {i}")
    for where, named in calls:
        with override(check=True), pytest.raises(ShapeError):
            kernelgen.append_kv(fresh(), k, k, where, **named, backend="generated")
    # A CSR table whose starts lie outside its own page numbers: nothing outside is read.
    wild = kernelgen.PageTable(4, kv_indptr=torch.tensor([0, 2**30, 5], dtype=torch.int32), kv_indices=torch.zeros(3, dtype=torch.int32),
                               kv_last_page_len=torch.ones(2, dtype=torch.int32))
    cache = fresh()
    kernelgen.append_kv(cache, k, k, wild, backend="generated")
    assert_bits_equal(cache, fresh(), what="wild starts")


def test_append_far_into_a_cache() -> None:
    """Offsets beyond 2^31 elements: the pages of a small buffer lie 2^29 elements apart in an expanded address range."""
    stride = 2**29
    memory = torch.empty(0, dtype=torch.uint8)
    try:
        memory = torch.empty(5 * stride + 64, dtype=torch.uint8)  # touched only where the test writes
    except RuntimeError:
        pytest.skip("no 2.7 GB of address space")
    codes = memory.view(E4M3).as_strided((6, 1, 1, 8), (stride, 8, 8, 1))
    other = memory.view(E4M3).as_strided((6, 1, 1, 8), (stride, 8, 8, 1), 32)
    k = random_tensor((1, 1, 8), seed=3).to(E4M3)
    kernelgen.append_kv((codes, other), k, k, slot_mapping=torch.tensor([5]), backend="generated")
    assert 5 * stride > 2**31
    assert_bits_equal(codes[5, 0, 0], k[0, 0], what="page 5")


def test_append_empty_and_lengths_as_sequences() -> None:
    cache = poisoned_empty((2, 2, 4, 1, 8))
    before = cache.clone()
    none = torch.empty(0, 1, 8)
    kernelgen.append_kv(cache, none, none, slot_mapping=torch.empty(0, dtype=torch.int32), backend="generated")
    kernelgen.append_kv(cache, none, none, kernelgen.PageTable.from_csr([0], [], [], 4), backend="generated")
    assert_bits_equal(cache, before, what="empty")
    dense = poisoned_empty((3, 10, 1, 8)), poisoned_empty((3, 10, 1, 8))
    k = random_tensor((3, 1, 8), seed=1)
    kernelgen.append_kv(dense, k, k, kernelgen.PageTable.contiguous([1, 10, 4], 10), backend="generated")
    for b, row in enumerate((0, 9, 3)):
        assert torch.equal(dense[0][b, row], k[b])
    assert dense[0].isnan().sum() == 27 * 8


@pytest.mark.parametrize("combined", (False, True))
def test_append_mla(combined: bool) -> None:
    for dtype, cache_dtype in ((BF16, BF16), (F32, E4M3), (BF16, E5M2)):
        check_mla(combined, dtype, cache_dtype, device="cpu")


@pytest.mark.parametrize("dtype", (F32, BF16, FP16, F64), ids=str)
def test_rope(dtype: torch.dtype) -> None:
    for interleaved in (False, True):
        check_rope((7, 3, 64), 2, dtype, interleaved=interleaved)
        check_rope((2, 5, 3, 46), 1, dtype, interleaved=interleaved, rotary=22, scaling=LLAMA3, top=100_000)
        check_rope((1, 1, 128), 1, dtype, interleaved=interleaved, scaling=LINEAR, top=2**31 - 1)
        check_rope((4, 2, 80), 2, dtype, interleaved=interleaved, rotary=64, cache_dtype=F32)
        check_rope((0, 2, 64), 2, dtype, interleaved=interleaved)
    check_rope((3, 2, 2, 2, 34), 2, dtype)
    check_rope((9, 2, 48), 2, dtype, cache_dtype=dtype)


def test_rope_of_leading_dimensions_that_do_not_fold() -> None:
    q, k = random_tensor((4, 6, 8, 2, 16), BF16, seed=1)[:, ::2, ::3], random_tensor((4, 3, 3, 1, 16), BF16, seed=2)
    positions = torch.randint(0, 99, (3, 4, 3), generator=torch.Generator().manual_seed(3)).transpose(0, 1)
    expected = kernelgen.rope(q.contiguous(), k, positions.contiguous(), backend="generated")
    for got in (kernelgen.rope(q, k, positions, backend="generated"), kernelgen.rope(q, k, positions, backend="generated"),
                kernelgen.rope(q, k.clone(), positions, inplace=True, backend="generated")):
        for a, b in zip(got, expected):
            assert_bits_equal(a, b, what="folded")


def test_rope_outside_the_cache() -> None:
    q = torch.ones(4, 1, 8)
    cache, positions = ref.make_cos_sin_cache(3, 4), torch.tensor([2, 3, -1, 2**40])
    turned, _ = kernelgen.rope(q, q, positions, cos_sin_cache=cache, backend="generated")
    assert turned[0].isfinite().all() and turned[1:, :, :4].isnan().all() and (turned[:, :, 4:] == 1).all()
    with override(check=True), pytest.raises(ShapeError, match="expected 0 .. 2"):
        kernelgen.rope(q, q, positions, cos_sin_cache=cache, backend="generated")


@pytest.mark.parametrize("cache_dtype", (BF16, E4M3, E5M2), ids=str)
def test_rope_append_kv(cache_dtype: torch.dtype) -> None:
    for form in ("csr", "slots"):
        for interleaved in (False, True):
            check_rope_append(form, BF16, cache_dtype, interleaved=interleaved, device="cpu")
    check_rope_append("blocks", FP16, E4M3 if cache_dtype == BF16 else cache_dtype, rotary=20, cos=F32, device="cpu")
    check_rope_append("blocks", F32, F32 if cache_dtype == BF16 else cache_dtype, rotary=24, cos=BF16, interleaved=True, device="cpu")
    if cache_dtype == BF16:
        check_rope_append("csr", F64, F64, device="cpu")


@pytest.mark.parametrize("dtype", (F32, BF16, FP16, F64), ids=str)
def test_merge_states(dtype: torch.dtype) -> None:
    for sides, tokens, heads, dim in ((1, 1, 1, 64), (2, 7, 5, 192), (9, 13, 3, 17), (0, 3, 2, 8), (3, 0, 2, 8), (40, 2, 1, 512)):
        check_merge(sides, tokens, heads, dim, dtype)
    one = random_tensor((1, 3, 2, 8), dtype, seed=5)
    assert_bits_equal(kernelgen.merge_states(one, torch.full((1, 3, 2), -87.5), backend="generated")[0], one[0], what="one side")


def test_merge_of_infinite_and_nan_states() -> None:
    inf, nan = float("inf"), float("nan")
    outs = torch.ones(2, 4, 1, 8)
    outs[1, 1] = 2.0
    lses = torch.tensor([[nan, inf, 1e30, -3e38], [0.0, 0.0, 0.0, -3.4e38]]).unsqueeze(-1)  # +inf: of a sink, which has all of the weight
    out, lse = kernelgen.merge_states(outs, lses, backend="generated")
    assert out[0].isnan().all() and lse[0].isnan() and (out[1:] == 1).all() and lse[1] == inf and lse[2] == 1e30 and lse[3] == -3e38


def test_gradients_go_to_the_oracle_and_kernels_refuse() -> None:
    q, k = (random_tensor((3, 2, 8), seed=s).requires_grad_() for s in (1, 2))
    turned = kernelgen.rope(q, k, torch.arange(3))
    outs, lses = torch.randn(2, 3, 2, 8, requires_grad=True), torch.randn(2, 3, 2, requires_grad=True)
    out, lse = kernelgen.merge_states(outs, lses)
    cache = torch.zeros(3, 2, 1, 2, 8)
    kernelgen.append_kv(cache, k, k, slot_mapping=torch.arange(3))
    (turned[0].sum() + turned[1].sum() + (out * out).sum() + lse.sum() + cache.sum()).backward()
    assert all(t.grad is not None and t.grad.abs().sum() > 0 for t in (q, k, outs, lses))
    for call in (lambda: kernelgen.rope(q, k, torch.arange(3), backend="generated"),
                 lambda: kernelgen.merge_states(outs, lses, backend="generated"),
                 lambda: kernelgen.append_kv(torch.zeros(3, 2, 1, 2, 8), k, k, slot_mapping=torch.arange(3), backend="generated")):
        with pytest.raises(NoBackendError, match="backward"):
            call()
    with torch.no_grad():
        assert not kernelgen.rope(q, k, torch.arange(3), backend="generated")[0].requires_grad
    with pytest.raises(SettingsError, match="out: got a tensor while"):
        kernelgen.merge_states(outs, lses, out=torch.empty(3, 2, 8))


def test_reference_backend_agrees() -> None:
    check = dict(slot_mapping=torch.tensor([3, -1, 0]), k_scale=0.5, v_scale=torch.tensor(2.0))
    k = random_tensor((3, 2, 16), BF16, seed=1)
    caches = [poisoned_empty((2, 2, 2, 2, 16), E4M3) for _ in range(2)]
    results = []
    for cache, backend in zip(caches, ("generated", "reference")):
        results.append(kernelgen.rope_append_kv(k, k, k, cache, positions=torch.zeros(3, dtype=torch.int32), **check, backend=backend))
    assert_bits_equal(caches[0], caches[1], what="caches")
    assert_bits_equal(results[0], results[1], what="q")
    a, b = (kernelgen.rope(k, k, torch.zeros(3, dtype=torch.int32), inplace=False, backend=name) for name in ("generated", "reference"))
    assert_bits_equal(a[0], b[0], what="rope at 0")


K, CACHE = torch.zeros(2, 1, 8), torch.zeros(3, 2, 4, 1, 8)
SLOTS, TABLE = torch.arange(2), kernelgen.PageTable.from_csr([0, 1, 2], [0, 1], [1, 1], 4)


@pytest.mark.parametrize("error, words, change", (
    (ShapeError, "neither", {}),
    (ShapeError, "together", {"slot_mapping": SLOTS, "positions": SLOTS}),
    (ShapeError, "one entry per token", {"slot_mapping": SLOTS[:1]}),
    (DtypeError, "int32 or int64", {"slot_mapping": SLOTS.float()}),
    (DtypeError, "got list", {"slot_mapping": [0, 1]}),
    (ShapeError, r"kv_cache: got shape \(3, 4, 1, 8\)", {"kv_cache": CACHE[:, 0], "slot_mapping": SLOTS}),
    (ShapeError, r"v: got shape \(1, 1, 8\)", {"v": K[:1], "slot_mapping": SLOTS}),
    (DtypeError, "cache of torch.float32", {"k": K.bfloat16(), "slot_mapping": SLOTS}),
    (DtypeError, "with a scale", {"k_scale": 1.0, "slot_mapping": SLOTS}),
    (SettingsError, "kv_layout", {"kv_layout": "DNH", "slot_mapping": SLOTS}),
    (SettingsError, "kv_scales", {"kv_scales": "row", "slot_mapping": SLOTS}),
    (LayoutError, "memory of its own", {"kv_cache": CACHE[:1].expand(3, -1, -1, -1, -1), "slot_mapping": SLOTS}),
    (LayoutError, "expected 1", {"k": torch.zeros(2, 8, 2)[..., :1].transpose(1, 2)[..., ::1], "slot_mapping": SLOTS}),
    (DtypeError, "kernelgen.PageTable", {"page_table": SLOTS}),
    (ShapeError, "pages of 4, expected 5", {"page_table": kernelgen.PageTable.from_csr([0, 1, 2], [0, 1], [1, 1], 5)}),
    (ShapeError, "2 tokens for 1 requests", {"page_table": kernelgen.PageTable.from_csr([0, 1], [0], [1], 4)}),
))
def test_errors_of_append_kv(error: type[Exception], words: str, change: dict[str, Any]) -> None:
    with pytest.raises(error, match=words):
        kernelgen.append_kv(**(dict(kv_cache=CACHE, k=K, v=K) | change))


def test_things_that_are_no_tensors_do_not_meet_a_remembered_call() -> None:
    for _ in range(2):
        kernelgen.append_kv(CACHE.clone(), K, K, TABLE, backend="generated")
        kernelgen.rope(K, K, SLOTS, backend="generated")
    for call in (lambda: kernelgen.append_kv(CACHE.clone(), K, K, TABLE, batch_indices=[0, 1], backend="generated"),  # type: ignore[arg-type]
                 lambda: kernelgen.append_kv(None, K, K, TABLE, backend="generated"),  # type: ignore[arg-type]
                 lambda: kernelgen.rope(K, K, SLOTS, cos_sin_cache=[1.0], backend="generated")):  # type: ignore[arg-type]
        with pytest.raises(DtypeError):
            call()


def test_scales_that_fit_twice_need_a_name() -> None:
    cache = torch.zeros(2, 2, 4, 1, 8).to(E4M3)
    scale = torch.ones(2, 1)
    with pytest.raises(ShapeError, match="kv_scales= names the form"):
        kernelgen.append_kv(cache, K, K, TABLE, k_scale=scale)
    kernelgen.append_kv(cache, K, K, TABLE, k_scale=scale, kv_scales="page")
    with pytest.raises(DtypeError, match="expected float32"):
        kernelgen.append_kv(cache, K, K, TABLE, k_scale=scale.double())


@pytest.mark.parametrize("error, words, change", (
    (ShapeError, "positions: got shape", {"positions": SLOTS[:1]}),
    (DtypeError, "positions: got torch.float32", {"positions": SLOTS.float()}),
    (ShapeError, "rotary_dim: got 3", {"rotary_dim": 3}),
    (ShapeError, "rotary_dim: got 10", {"rotary_dim": 10}),
    (ShapeError, "cos_sin_cache", {"cos_sin_cache": torch.zeros(4, 4), "rotary_dim": 6}),
    (SettingsError, "scaling", {"cos_sin_cache": torch.zeros(4, 4), "scaling": LINEAR}),
    (SettingsError, "rope_type", {"scaling": {"rope_type": "yarn"}}),
    (SettingsError, "theta", {"theta": "x"}),
    (DtypeError, "expected one dtype", {"k": K.double()}),
    (LayoutError, "memory of its own", {"k": K[:1].expand(2, -1, -1), "inplace": True}),
))
def test_errors_of_rope(error: type[Exception], words: str, change: dict[str, Any]) -> None:
    with pytest.raises(error, match=words):
        kernelgen.rope(**(dict(q=K, k=K.clone(), positions=SLOTS) | change))


def test_explain() -> None:
    for target in ("cpu", "sm_90a"):
        for decision in (kernelgen.explain("rope", (9, 32, 128), (9, 8, 128), target=target),
                         kernelgen.explain("append_kv", (4, 2, 16, 8, 128), (9, 8, 128), (9, 8, 128), target=target),
                         kernelgen.explain("merge_states", (4, 9, 8, 128), target=target)):
            assert decision.chosen is not None and decision.chosen.backend == "generated", decision
    assert str(kernelgen.explain("append_kv", (4, 2, 16, 8, 128), (9, 8, 128), (9, 8, 128), target="cpu").problem) == (
        "append[t=9 h=8 d=128 bf16 page=16 slots]")
