"""Plans at their limits: updates that do not fit, buffers that are too small, values that an int32 cannot hold, strange tensors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernelgen
from kernelgen import GraphBounds, PageTable, reference
from kernelgen.errors import DeviceError, DtypeError, LayoutError, NoBackendError, SettingsError, ShapeError
from kernelgen.reference.masks import pack_mask
from kernelgen.testing.data import random_tensor
from kernelgen.testing.operator_calls import Recorder

HEADS, D, PAGE = 2, 16, 4
SIZES: dict[str, Any] = {"num_q_heads": HEADS, "num_kv_heads": HEADS, "head_dim": D, "q_dtype": torch.float32}


def blocks(rows: list[list[int]], lens: Any, page: int = PAGE) -> PageTable:
    return PageTable.from_blocks(torch.tensor(rows, dtype=torch.int32), lens, page)


@pytest.fixture
def cache() -> torch.Tensor:
    return random_tensor((8, 2, PAGE, HEADS, D), seed=1)


def rows(count: int) -> torch.Tensor:
    return random_tensor((count, HEADS, D), seed=count + 7)


# Updates


def test_a_plan_for_one_page_takes_no_table_of_more(cache: torch.Tensor) -> None:
    """The kernel of a contiguous cache looks up one page per request: two pages are another plan."""
    plan = kernelgen.plan_attention(blocks([[3], [5]], [4, 2]), **SIZES)
    for table in (blocks([[3, 7], [5, 1]], [7, 2]), PageTable.from_csr([0, 1, 2], [3, 5], [4, 2], PAGE)):
        with pytest.raises(ShapeError, match="expected one page per request"):
            plan.update(table)
    plan.update(blocks([[5], [3]], [1, 4]))
    got = plan.run(rows(2), cache)
    assert torch.equal(got, kernelgen.plan_attention(blocks([[5], [3]], [1, 4]), **SIZES).run(rows(2), cache))


def test_graph_bounds_beyond_one_page_leave_room_for_more(cache: torch.Tensor) -> None:
    plan = kernelgen.plan_attention(blocks([[3], [5]], [4, 2]), **SIZES, cuda_graph_bounds=GraphBounds(4, 8, max_pages=4))
    longer = blocks([[3, 7], [5, 1]], [7, 2])
    plan.update(longer)
    assert torch.equal(plan.run(rows(2), cache), kernelgen.plan_attention(longer, **SIZES).run(rows(2), cache))


def test_an_update_that_is_refused_changes_nothing(cache: torch.Tensor) -> None:
    table = blocks([[3, 7], [5, 1]], [7, 5])
    plan = kernelgen.plan_attention(table, **SIZES, cuda_graph_bounds=GraphBounds(4, 8))
    want = plan.run(rows(2), cache)
    for wrong, lens, words in ((table, [3, 3], "6 query rows"), (blocks([[3, 7, 0, 0, 0], [5, 1, 0, 0, 0]], [2, 1]), None, "page numbers"),
                               (blocks([[3, 7, 2]], [9]), None, "9 keys")):
        with pytest.raises(ShapeError, match=words):
            plan.update(wrong, lens)
        assert torch.equal(plan.run(rows(2), cache), want)
    plan.update(table)
    assert torch.equal(plan.run(rows(2), cache), want)


@pytest.mark.parametrize("mla", [False, True])
def test_fewer_rows_than_the_last_update_planned(cache: torch.Tensor, mla: bool) -> None:
    """An error, also of a call that ran before with these layouts; a replay that nobody checks writes no row that out has not."""
    table, bounds = blocks([[3, 7], [5, 1]], [7, 5]), GraphBounds(8, 8)
    plan: Any
    if mla:
        latent = random_tensor((8, PAGE, 24), seed=2)
        plan = kernelgen.plan_mla(table, num_heads=HEADS, q_dtype=torch.float32, scale=0.2, head_dim_latent=16, head_dim_rope=8,
                                  cuda_graph_bounds=bounds)
    else:
        plan = kernelgen.plan_attention(table, **SIZES, cuda_graph_bounds=bounds)
    q_rope = random_tensor((6, HEADS, 8), seed=5)

    def run(count: int, out: torch.Tensor) -> torch.Tensor:
        q = rows(6)[:count]
        return plan.run(q, q_rope[:count], latent, out=out) if mla else plan.run(q, cache, out=out)

    whole = torch.full((8, HEADS, D), 7.0)
    run(2, whole[:2])
    plan.update(table, [2, 3])
    with pytest.raises(ShapeError, match=r"got 2 rows in .*expected at least 5"):
        run(2, whole[:2])
    want = run(5, torch.empty(5, HEADS, D))
    plan._state.least_rows = 0
    for count in (4, 2, 1, 0):
        whole.fill_(7.0)
        run(count, whole[:count])
        assert torch.equal(whole[:count], want[:count]) and bool((whole[count:] == 7).all()), count


def test_a_plan_keeps_its_own_query_starts(cache: torch.Tensor) -> None:
    table, starts = blocks([[3, 7], [5, 1]], [7, 5]), torch.tensor([0, 1, 3], dtype=torch.int32)
    plan = kernelgen.plan_attention(table, **SIZES, cu_seqlens_q=starts)
    want = plan.run(rows(3), cache)
    starts[1] = 2
    plan.update(table)
    assert torch.equal(plan.run(rows(3), cache), want)


def test_a_plan_made_in_inference_mode_is_updated_outside(cache: torch.Tensor) -> None:
    table = blocks([[3, 7], [5, 1]], [7, 5])
    with torch.inference_mode():
        plan = kernelgen.plan_attention(table, **SIZES, cuda_graph_bounds=GraphBounds(4, 8))
    plan.update(table)
    assert torch.equal(plan.run(rows(2), cache), kernelgen.plan_attention(table, **SIZES).run(rows(2), cache))


# Tensors of a run


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))], ids=["deepcopy", "pickle"])  # noqa: S301
@pytest.mark.parametrize("bounds", [None, GraphBounds(2, 64)], ids=["plain", "bounded"])
def test_a_copy_is_a_plan_of_its_own(cache: torch.Tensor, copied: Callable[[Any], Any], bounds: Any) -> None:
    """It has its own memory (the addresses of the other's were copied with it), and graphs tell the two apart."""
    q = rows(2)
    plan = kernelgen.plan_attention(blocks([[3, 1], [5, 2]], [4, 7]), **SIZES, cuda_graph_bounds=bounds)
    want = plan.run(q, cache)
    other = copied(plan)
    plan.update(blocks([[0, 1], [6, 2]], [3, 5]))
    changed = plan.run(q, cache)
    assert torch.equal(other.run(q, cache), want) and not torch.equal(changed, want)
    call = torch.ops.kernelgen.attention_run
    run = call.once if bounds is None else call.default
    assert torch.equal(run(other.handle, q, cache), want) and torch.equal(run(plan.handle, q, cache), changed)


def test_sinks_are_checked(cache: torch.Tensor) -> None:
    plan = kernelgen.plan_attention(blocks([[3, 7]], [7]), **SIZES, sinks=True)
    q = rows(1)[None]
    for sinks, error, words in ((torch.zeros(1), ShapeError, r"sinks: got shape \(1\)"),
                                (torch.zeros(1, HEADS), ShapeError, "sinks: got shape"),
                                (torch.zeros(HEADS, dtype=torch.float64), DtypeError, "sinks: got torch.float64, expected float32"),
                                (torch.zeros(HEADS, dtype=torch.bfloat16), DtypeError, "sinks: got torch.bfloat16")):
        with pytest.raises(error, match=words):
            plan.run(rows(1), cache, sinks=sinks)
        with pytest.raises(error, match=words):
            kernelgen.attention(q, q, q, sinks=sinks)
    with pytest.raises(DtypeError, match="sinks: got torch.float64"):
        kernelgen.attention(q.double(), q.double(), q.double(), sinks=torch.zeros(HEADS, dtype=torch.float64))


@pytest.mark.parametrize("count", [1, 40])
def test_sinks_that_are_nan_or_infinite(cache: torch.Tensor, count: int) -> None:
    """A NaN parameter shows; a sink of inf takes all the weight. A row without keys gives 0 with either."""
    sinks = torch.tensor([float("nan"), float("inf")])
    plan = kernelgen.plan_attention(blocks([[3, 7], [5, 1]], [7, 0]), **SIZES, sinks=True, q_lens=[count, 1], causal=False)
    out, lse = plan.run(rows(count + 1), cache, sinks=sinks, return_lse=True)
    assert bool(out[:count, 0].isnan().all() and lse[:count, 0].isnan().all())
    assert bool((out[:count, 1] == 0).all() and (lse[:count, 1] == float("inf")).all())
    assert bool((out[count] == 0).all())


@pytest.mark.parametrize("form", ["dense", "packed"])
def test_ragged_masks_are_checked_where_lengths_are_known(cache: torch.Tensor, form: str) -> None:
    """Size and strides, without KERNELGEN_CHECK; also after an update, for layouts that ran before."""
    table = blocks([[3, 7], [5, 1]], [7, 5])
    plan = kernelgen.plan_attention(table, **SIZES, mask=form, q_lens=[2, 1])
    flat = random_tensor((19,), seed=3) > 0
    mask = flat if form == "dense" else pack_mask(flat)
    plan.run(rows(3), cache, mask=mask)
    cu = torch.tensor([0, 2, 3]), torch.tensor([0, 7, 12])
    ragged = rows(3), rows(12), rows(12)
    for call in (lambda m: plan.run(rows(3), cache, mask=m), lambda m: kernelgen.attention_varlen(*ragged, *cu, mask=m)):
        for wrong in (mask[:-1], torch.cat([mask, mask[:1]]), mask[None]):
            with pytest.raises(ShapeError, match="mask: got shape"):
                call(wrong)
        with pytest.raises(LayoutError, match="mask: got stride 2"):
            call(torch.stack([mask, mask], 1)[:, 0])
    plan.update(blocks([[3, 7], [5, 1]], [1, 2]), [2, 1])
    with pytest.raises(ShapeError, match="mask: got shape"):
        plan.run(rows(3), cache, mask=mask)


@pytest.mark.parametrize("given", [None, 5, (torch.zeros(8, PAGE, HEADS, D), None), "cache"])
def test_caches_that_are_none(given: Any) -> None:
    plan = kernelgen.plan_attention(blocks([[3, 7]], [7]), **SIZES)
    with pytest.raises((ShapeError, DtypeError), match="_cache: got"):
        plan.run(rows(1), given)


def test_a_scale_of_plain_queries_is_refused(cache: torch.Tensor) -> None:
    plan = kernelgen.plan_attention(blocks([[3, 7]], [7]), **SIZES)
    with pytest.raises(DtypeError, match="q_scale: got one for torch.float32, expected an fp8 q"):
        plan.run(rows(1), cache, q_scale=2.0)


def test_scales_of_a_latent_cache_are_those_of_the_plan() -> None:
    table, cache = blocks([[1, 0]], [5]), random_tensor((2, PAGE, 24), seed=2).to(torch.float8_e4m3fn)
    common: dict[str, Any] = {"num_heads": 1, "q_dtype": torch.float32, "kv_dtype": torch.float8_e4m3fn, "scale": 0.2,
                              "head_dim_latent": 16, "head_dim_rope": 8}
    q = random_tensor((1, 1, 24), seed=3)
    for kind, scale in ((None, torch.tensor(0.5)), (None, 0.5), ("tensor", None)):
        plan = kernelgen.plan_mla(table, **common, kv_scales=kind)
        with pytest.raises(SettingsError, match="k_scale: got"):
            plan.run(q[..., :16], q[..., 16:], cache, k_scale=scale)


def test_tensors_without_memory_of_their_own(cache: torch.Tensor) -> None:
    """Fake tensors, transforms and dispatch modes: a kernel would read address 0, or be lost to who watches."""
    plan = kernelgen.plan_attention(blocks([[3, 7]], [7]), **SIZES)
    q = rows(1)
    want = plan.run(q, cache)
    with FakeTensorMode() as fake:
        assert type(plan.run(fake.from_tensor(q), fake.from_tensor(cache))).__name__ == "FakeTensor"
    with Recorder() as seen:
        assert torch.equal(plan.run(q, cache), want)
    assert len(seen.seen) == 1
    with pytest.raises(NoBackendError, match="function transform"):
        torch.vmap(lambda x: plan.run(x, cache))(torch.stack([q, q]))
    with pytest.raises(LayoutError, match="negates"):
        plan.run(q, torch._neg_view(cache))


# Arguments of plans and tables


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"causal": "no"}, SettingsError, "causal: got 'no', expected True or False"),
    ({"batch_invariant": "no"}, SettingsError, "batch_invariant: got 'no'"),
    ({"sinks": torch.zeros(HEADS)}, SettingsError, "sinks: got tensor"),
    ({"head_dim": 48.0}, ShapeError, "head_dim: got 48.0, expected a whole number"),
    ({"head_dim": None}, ShapeError, "head_dim: got None"),
    ({"num_q_heads": 6.0}, ShapeError, "num_q_heads: got 6.0"),
    ({"scale": "x"}, SettingsError, "scale: got 'x', expected a number"),
    ({"soft_cap": "x"}, SettingsError, "soft_cap: got 'x', expected a number"),
    ({"soft_cap": float("inf")}, SettingsError, "soft_cap: got inf, expected a finite number"),
    ({"variant": "alibi"}, DtypeError, "variant: got str, expected one made by kernelgen.variant"),
    ({"rotation": 1.5}, SettingsError, "rotation: got 1.5, expected a whole number"),
    ({"cuda_graph_bounds": 5}, SettingsError, "cuda_graph_bounds: got 5"),
    ({"device": "cuda:0"}, DeviceError, "cuda:0"),
])
def test_plan_arguments(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        kernelgen.plan_attention(blocks([[3, 7]], [7]), **(SIZES | change))


def test_lengths_as_numpy_has_them() -> None:
    numbers, lens = np.array([[1, 0], [2, 3]]), np.array([5, 6], dtype=np.int32)
    table = PageTable.from_blocks(numbers, lens, PAGE)  # type: ignore[arg-type]
    assert table.block_tables is not None and table.block_tables.tolist() == numbers.tolist()
    assert table.host_lengths() is not None and list(table.host_lengths()) == [5, 6]  # type: ignore[arg-type]
    csr = PageTable.from_csr([np.int64(0), np.int32(1)], [np.int64(3)], lens[:1] - 3, PAGE)  # type: ignore[list-item, arg-type]
    assert csr.batch == 1
    plan = kernelgen.plan_attention(table, **SIZES, q_lens=np.array([2, 1]))  # type: ignore[arg-type]
    assert plan._state.rows == 3


@pytest.mark.parametrize(("make", "error", "words"), [
    (lambda: blocks([[1, 0]], np.array([5.0])), DtypeError, "seq_lens: got float64 values"),
    (lambda: blocks([[1, 0]], [2**31]), ShapeError, "seq_lens: got values from 2147483648"),
    (lambda: blocks([[1, 0]], torch.tensor([2**32 + 5])), ShapeError, "seq_lens: got values from 4294967301"),
    (lambda: blocks([[1, 0]], [2**70]), DtypeError, "seq_lens: got object values"),
    (lambda: PageTable.from_csr([[0, 1], [2]], [0], [1], PAGE), DtypeError, "kv_indptr: got list"),
    (lambda: PageTable.from_csr("01", [0], [1], PAGE), DtypeError, "kv_indptr: got"),
])
def test_numbers_that_are_no_lengths(make: Callable[[], PageTable], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_page_numbers_beyond_an_int32_stay_junk() -> None:
    """Wrapped to 32 bits they would look like pages."""
    table = PageTable.from_blocks(torch.tensor([[1, 2**32 + 3, -(2**40)]]), [2], PAGE)
    assert table.block_tables is not None and table.block_tables.tolist() == [[1, 2**31 - 1, -(2**31)]]


# Cascades


@pytest.mark.parametrize("own", [[1, 3], [0, 0], [3, 5]])
def test_causal_rows_that_stand_within_the_prefix(cache: torch.Tensor, own: list[int]) -> None:
    """Positions align at the bottom right of the joined keys: with 4 rows and 1 own key, three rows end within the prefix."""
    levels = [(blocks([[3, 7]], [7]), [0, 6]), (blocks([[5, 1], [2, 0]], own), torch.tensor([0, 4, 6], dtype=torch.int32))]
    got, lse = kernelgen.cascade_attention(rows(6), cache, levels, return_lse=True)
    want, want_lse = reference.cascade_attention(rows(6), cache, levels, return_lse=True)
    torch.testing.assert_close(got, want.float())
    torch.testing.assert_close(lse, want_lse.float())


def test_the_output_of_a_cascade_has_the_dtype_of_q(cache: torch.Tensor) -> None:
    with pytest.raises(DtypeError, match="out: got torch.float64, expected torch.float32"):
        kernelgen.cascade_attention(rows(1), cache, [(blocks([[3]], [2]), [0, 1])], out=torch.empty(1, HEADS, D, dtype=torch.float64))


# Rotation


@pytest.mark.parametrize(("dim", "dtype", "kv_dtype"), [
    (64, torch.float32, torch.float32), (72, torch.float32, torch.float32), (128, torch.bfloat16, torch.float8_e4m3fn),
])
def test_rotated_keys(dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Queries are rotated as the cached keys were, each plan with its own seed, though both share what is prepared."""
    shape = (8, PAGE, HEADS, dim)
    pair = random_tensor(shape, seed=3).to(kv_dtype), random_tensor(shape, seed=4).to(kv_dtype)
    q = random_tensor((3, HEADS, dim), dtype, seed=5)
    sizes = SIZES | {"head_dim": dim, "q_dtype": dtype, "kv_dtype": kv_dtype, "q_lens": [2, 1]}
    table = blocks([[3, 7], [5, 1]], [7, 5])
    plans = {seed: kernelgen.plan_attention(table, **sizes, rotation=seed, backend="generated") for seed in (0, 9)}
    first = {seed: plan.run(q, pair) for seed, plan in plans.items()}
    for seed, plan in plans.items():
        assert torch.equal(plan.run(q, pair), first[seed])
        want = kernelgen.plan_attention(table, **sizes, rotation=seed, backend="reference").run(q, pair)
        torch.testing.assert_close(first[seed], want, **({} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}))  # type: ignore[arg-type]
    assert not torch.equal(first[0], first[9])
