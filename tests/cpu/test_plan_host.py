"""The launcher's half of planning: C++ and numpy make the same arrays of any batch, and agree on what is no batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import kernelgen
from kernelgen import GraphBounds, PageTable
from kernelgen.errors import ShapeError
from kernelgen.kernels.attention.schedule import Division
from kernelgen.launch import plan as host_plan
from kernelgen.launch.host import launcher
from kernelgen.ops import planning
from kernelgen.ops.paged import query_starts
from kernelgen.ops.planning import Batch, Shape, make_arrays, make_bounded_arrays, read_batch, refill
from kernelgen.tensors import PlanArrays

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher()
    assert host_plan.plan_functions() is not None
    # The size of the partial results is compared, nothing is put there: some of these batches would need gigabytes.
    monkeypatch.setattr(planning, "workspace", lambda rows, shape, device: torch.empty(rows * (shape.head_dim_v + 1), device="meta"))


def by_numpy(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> Any:
    """``make()`` in a process that has no launcher."""
    with monkeypatch.context() as patch:
        patch.setattr(host_plan, "_functions", None)
        patch.setattr(host_plan.host, "_module", None)
        return make()


def random_table(rng: np.random.Generator, batch: int) -> PageTable:
    size = int(rng.choice([1, 5, 16, 64, 1000]))
    pages = rng.integers(0, int(rng.choice([2, 9, 400])), batch)
    if rng.random() < 0.5:
        indptr = np.concatenate([[0], np.cumsum(pages)])
        return PageTable.from_csr(indptr, np.zeros(indptr[-1] + 3, np.int32), rng.integers(1, size + 1, batch), size)
    width = max(int(pages.max(initial=0)), 1)
    return PageTable.from_blocks(torch.zeros(batch, width, dtype=torch.int32), rng.integers(0, width * size + 1, batch), size)


def random_batch(rng: np.random.Generator, batch: int) -> tuple[PageTable, Any]:
    q_lens = rng.integers(0, int(rng.choice([2, 5, 300])), batch)
    return random_table(rng, batch), None if rng.random() < 0.3 else q_lens


def read(table: PageTable, q_lens: Any) -> Batch:
    return read_batch(table, query_starts(q_lens, None, table.batch))


def random_shape(rng: np.random.Generator) -> Shape:
    division = Division(int(rng.choice([1, 16, 128])), int(rng.choice([1, 7, 132, 5000])), int(rng.choice([64, 256])),
                        int(rng.choice([0, 0, 512])))
    mask, items = bool(rng.random() < 0.3), bool(rng.random() < 0.9)
    return Shape(int(rng.choice([1, 3, 8, 71])), int(rng.choice([1, 8])), 64, mask, division if items else None)


def seen(arrays: PlanArrays) -> tuple[Any, ...]:
    return (arrays.lengths.tolist(), arrays.rows, arrays.num_items, None if arrays.partial is None else arrays.partial.shape,
            None if arrays.mask_indptr is None else arrays.mask_indptr.tolist())


def test_arrays_of_random_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(20_261)
    for case in range(400):
        table, q_lens = random_batch(rng, int(rng.integers(0, 70)))
        shape = random_shape(rng)
        batch = read(table, q_lens)
        plain = by_numpy(monkeypatch, partial(read, table, q_lens))
        assert (batch.addresses is not None) == (table.batch > 0) and plain.addresses is None, case
        assert (batch.rows, batch.max_q, batch.longest, batch.keys) == (plain.rows, plain.max_q, plain.longest, plain.keys), case
        assert batch.starts.tolist() == plain.starts.tolist(), case
        want = by_numpy(monkeypatch, partial(make_arrays, plain, shape, CPU))
        assert seen(make_arrays(batch, shape, CPU)) == seen(want), (case, shape)


def test_arrays_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refill with fewer requests ends in empty ones, whatever was there before."""
    rng = np.random.default_rng(20_262)
    bounds = GraphBounds(max_q_tokens=70 * 300, max_seq_k=400_000, max_pages=70 * 400)
    for case in range(60):
        shape, size = random_shape(rng), 70
        arrays, want = (make_bounded_arrays(size, bounds, 70 * 400, shape, CPU) for _ in range(2))
        for _ in range(3):
            table, q_lens = random_batch(rng, int(rng.integers(0, size + 1)))
            refill(arrays, read(table, q_lens), bounds, shape)
            by_numpy(monkeypatch, partial(refill, want, by_numpy(monkeypatch, partial(read, table, q_lens)), bounds, shape))
            assert seen(arrays) == seen(want), case


def outcome(make: Callable[[], Any]) -> str:
    try:
        make()
    except ShapeError as error:
        return str(error)
    return "fine"


def test_both_refuse_the_same_lengths_in_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(20_263)
    outcomes = set()
    for case in range(600):
        count = int(rng.integers(1, 5))
        values = rng.integers(-1, 6, count)
        starts = np.sort(rng.integers(0, 9, count + 1)) if rng.random() < 0.5 else rng.integers(-1, 9, count + 1)
        starts[0] = 0 if rng.random() < 0.8 else starts[0]
        indices, blocks = np.zeros(8, np.int32), torch.zeros(count, 2, dtype=torch.int32)
        for make in (
            partial(PageTable.from_csr, starts, indices, values, 4), partial(PageTable.from_blocks, blocks, values, 2),
            partial(query_starts, values, None, count), partial(query_starts, None, starts, count),
        ):
            got = outcome(make)
            assert got == by_numpy(monkeypatch, partial(outcome, make)), case
            outcomes.add(got.split(":")[0])
    assert outcomes == {"fine", "kv_indptr", "kv_last_page_len", "seq_lens", "q_lens", "cu_seqlens_q"}


def test_lengths_beyond_int32_and_70000_requests() -> None:
    lens = torch.full((70_000,), 100_000, dtype=torch.int32)
    batch = read_batch(PageTable.contiguous(lens, 100_000), None)
    assert batch.keys == 7_000_000_000 and batch.rows == 70_000 and batch.addresses is not None
    with pytest.raises(ShapeError, match="q_lens: got 4294967294 query rows in all"):
        query_starts([2**31 - 1, 2**31 - 1], None, 2)


@pytest.mark.parametrize("strange", [
    lambda t: t.long(), lambda t: t.repeat_interleave(2)[::2], lambda t: torch._neg_view(-t), lambda t: torch.nn.Buffer(t)])
def test_only_plain_int32_memory_is_read_by_address(strange: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A table that was put together by hand."""
    t = strange(torch.tensor([3, 0, 5], dtype=torch.int32))
    plain = type(t) is torch.Tensor and t.dtype == torch.int32 and t.is_contiguous() and not t.is_neg()
    assert bool(host_plan.host_address(t)) == plain


def test_a_plan_does_not_wait_for_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> Any:
        raise AssertionError("built for a plan")

    monkeypatch.setattr(host_plan.host, "_built_launcher", build)
    plan = by_numpy(monkeypatch, lambda: kernelgen.plan_attention(
        PageTable.contiguous([3, 5], 8), num_q_heads=2, num_kv_heads=1, head_dim=16, q_dtype=torch.float32, backend="reference"))
    assert plan._state.arrays.kv_lens.tolist() == [3, 5]
