"""From page tables and lengths to the arrays of a plan; docs/design/attention_inference.md says what each array holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from kernelgen.errors import SettingsError, ShapeError
from kernelgen.guard import whole
from kernelgen.kernels.attention.schedule import Division, Ints, Schedule, item_bound, make_schedule
from kernelgen.launch.plan import DIVISION, SIZES, host_address, plan_functions
from kernelgen.ops.page_table import PageTable, on_host
from kernelgen.tensors import HostLengths, PlanArrays

# Any cut serves a backend that does not look at items.
_NO_DIVISION = Division(block_rows=1 << 20, slots=1)


@dataclass(frozen=True)
class GraphBounds:
    """Most that a plan captured in a CUDA graph will be updated to; its batch is the most requests.

    max_q_tokens   query rows of all requests
    max_seq_k      keys of one request
    max_pages      page numbers of all requests; default: what the page table of the plan has room for
    """

    max_q_tokens: int
    max_seq_k: int
    max_pages: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_q_tokens", self.max_q_tokens), ("max_seq_k", self.max_seq_k), ("max_pages", self.max_pages)):
            number = None if value is None else whole(value)
            if value is not None and (number is None or number < 0):
                raise SettingsError(f"cuda_graph_bounds: got {name}={value!r}, expected a whole number >= 0")
            object.__setattr__(self, name, number)


@dataclass(frozen=True)
class Shape:
    """What of a problem the arrays depend on."""

    group_size: int
    num_kv_heads: int
    head_dim_v: int
    mask: bool
    division: Division | None

    @cached_property
    def packed(self) -> bytes:
        """struct Division of the launcher."""
        d = self.division or _NO_DIVISION
        return DIVISION.pack(self.group_size, d.block_rows, d.slots, d.min_chunk, d.fixed_chunk)


class Batch(NamedTuple):
    """A page table with the starts (B + 1) of the query rows, and what the host knows of their lengths.

    ``size`` requests; ``rows`` query rows in all, ``max_q`` of one request, ``longest`` keys of one request, ``keys`` in
    all; None where the lengths are on a device. ``addresses``: the first arguments of plan_cut, where C++ may read the lengths.
    """

    table: PageTable
    size: int
    starts: torch.Tensor
    rows: int | None
    max_q: int | None
    longest: int | None
    keys: int | None
    addresses: tuple[int, int, int, int, int, int] | None = None

    @property
    def on_host(self) -> bool:
        return self.longest is not None and self.rows is not None

    @property
    def kv_lens(self) -> Ints:
        lengths = self.table.lengths_on_host()
        assert lengths is not None
        return lengths

    @property
    def q_lens(self) -> Ints:
        return np.diff(self.starts.numpy())


def read_batch(table: PageTable, starts: torch.Tensor | None) -> Batch:
    """``starts`` None: one query row per request."""
    size, plan = table.batch, plan_functions()
    if starts is None:
        starts, rows_at = _one_each(size)
    else:
        rows_at = host_address(starts)
    lens_at, indptr_at, last_at = host_address(table.seq_lens), 0, 0
    if table.kv_indptr is not None:
        indptr_at, last_at = host_address(table.kv_indptr), host_address(table.kv_last_page_len)
    if plan is None or not (rows_at and (lens_at or (indptr_at and last_at))):
        return _read_batch(table, starts, size)
    addresses = (rows_at, indptr_at, last_at, lens_at, size, table.page_size)
    rows, max_q, longest, keys = SIZES.unpack(plan.plan_sizes(*addresses))
    return Batch(table, size, starts, rows, max_q, longest, keys, addresses)


def _read_batch(table: PageTable, starts: torch.Tensor, size: int) -> Batch:
    """:func:`read_batch` by numpy, of what lies on the host."""
    rows: int | None = None
    max_q: int | None = None
    if starts.is_cpu:
        host = starts.numpy()
        rows, max_q = int(host[-1]), int(np.diff(host).max(initial=0))
    lens = table.lengths_on_host()
    longest, keys = (None, None) if lens is None else (int(lens.max(initial=0)), int(lens.sum(dtype=np.int64)))
    return Batch(table, size, starts, rows, max_q, longest, keys)


def to_host(batch: Batch) -> Batch:
    """The same with its lengths read back, which waits for the device."""
    moved = {name: t.cpu() for name in ("kv_indptr", "kv_last_page_len", "seq_lens") if (t := getattr(batch.table, name)) is not None}
    return read_batch(replace(batch.table, **moved), batch.starts.cpu())


@lru_cache(maxsize=64)
def _one_each(batch: int) -> tuple[torch.Tensor, int]:
    """Starts of one query row per request, and their address."""
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cpu")
    return starts, starts.data_ptr()


def page_begin(table: PageTable) -> Ints:
    """Where each request's pages start among :func:`page_numbers`; a kv_indptr on a device is read back."""
    if table.block_tables is not None:
        return np.arange(table.batch, dtype=np.int32) * np.int32(table.block_tables.shape[1])
    assert table.kv_indptr is not None
    return on_host(table.kv_indptr)[:-1]


def page_numbers(table: PageTable) -> torch.Tensor:
    pages = table.block_tables if table.block_tables is not None else table.kv_indices
    assert pages is not None
    return pages


def _fill(batch: Batch, shape: Shape, size: int, buffer: torch.Tensor) -> tuple[int, bool]:
    """Fill ``buffer``, the int32 arrays (:class:`PlanArrays`) of ``size`` requests one behind the other, those past the batch empty.

    Returns the number of items and whether any request is split.
    """
    plan = plan_functions()
    if plan is None or batch.addresses is None:
        whole, schedule = _arrays_on_host(batch, shape, size)
        buffer.copy_(torch.from_numpy(whole), non_blocking=True)
        return schedule.num_items, schedule.split
    index, stream = -1, 0
    if buffer.is_cuda:
        index = buffer.device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
    found = plan.plan_cut(buffer.data_ptr(), index, stream, *batch.addresses, size, batch.table.width, shape.packed)
    return found >> 1, bool(found & 1)


def _arrays_on_host(batch: Batch, shape: Shape, size: int) -> tuple[Ints, Schedule]:
    """The arrays by numpy, and how the batch is cut."""
    lens, table, n = batch.kv_lens, batch.table, batch.size
    schedule = make_schedule(batch.q_lens, lens, shape.group_size, shape.division or _NO_DIVISION)
    whole = np.zeros(4 * size + 3, dtype=np.int32)
    q_indptr, kv_lens, begin, item_indptr, chunk = np.split(whole, np.cumsum((size + 1, size, size, size + 1)))  # views
    q_indptr[: n + 1], kv_lens[:n], begin[:n], item_indptr[: n + 1] = batch.starts.numpy(), lens, page_begin(table), schedule.item_indptr
    q_indptr[n + 1 :], item_indptr[n + 1 :], chunk[:] = q_indptr[n], item_indptr[n], schedule.chunk
    return whole, schedule


def _mask_starts(batch: Batch) -> torch.Tensor:
    sizes = np.asarray(batch.q_lens, np.int64) * batch.kv_lens
    return torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]))


def round_items(count: int) -> int:
    """An upper bound that few values share, so that plans of nearly equal size share a prepared launch: at most 1/16 above."""
    step = max(1 << max(count.bit_length() - 5, 0), 1)
    return -(-count // step) * step


def partial_rows(items: int, shape: Shape) -> int:
    """Rows of partial results for ``items`` items."""
    return items * shape.num_kv_heads * (shape.division or _NO_DIVISION).block_rows


def workspace(rows: int, shape: Shape, device: torch.device) -> torch.Tensor:
    """Room for ``rows`` partial results: outputs, then log-sums."""
    return torch.empty(rows * (shape.head_dim_v + 1), dtype=torch.float32, device=device)


def make_arrays(batch: Batch, shape: Shape, device: torch.device) -> PlanArrays:
    """Arrays for exactly this batch, from lengths on the host: one copy to the device. Page numbers, already there, are not copied."""
    size, pages = batch.size, page_numbers(batch.table)
    buffer = pages.new_empty(4 * size + 3)  # int32, in a third less time than torch.empty
    count, split = _fill(batch, shape, size, buffer)
    items = round_items(count)
    rows = partial_rows(items, shape)
    partial = workspace(rows, shape, device) if split and shape.division else None
    mask = _mask_starts(batch).to(device) if shape.mask else None
    # No kernel of ours without a division of its items: copies, as a plan does not look at the caller's lengths again.
    known = shape.division is None
    host = HostLengths(batch.starts.numpy().copy(), batch.kv_lens.copy(), page_begin(batch.table).copy()) if known else None
    return PlanArrays.make(buffer, size, pages, mask, partial, rows, items, host)


def make_bounded_arrays(batch: int, bounds: GraphBounds, max_pages: int, shape: Shape, device: torch.device) -> PlanArrays:
    """Arrays with room for anything within the bounds, all requests empty; :func:`refill` writes a batch into them."""
    division = shape.division or _NO_DIVISION
    tiles = -(-bounds.max_q_tokens * shape.group_size // division.block_rows) + batch
    items = item_bound(tiles, bounds.max_seq_k, division)
    rows = partial_rows(items, shape)
    split = shape.division is not None and bounds.max_seq_k > (division.fixed_chunk or division.min_chunk)
    partial = workspace(rows, shape, device) if split else None
    with torch.inference_mode(False):  # an update outside of it writes here too
        buffer = torch.zeros(4 * batch + 3, dtype=torch.int32, device=device)
        mask = torch.zeros(batch + 1, dtype=torch.int64, device=device) if shape.mask else None
        pages = torch.zeros(bounds.max_pages or max_pages, dtype=torch.int32, device=device)
    return PlanArrays.make(buffer, batch, pages, mask, partial, rows, items)


def refill(arrays: PlanArrays, batch: Batch, bounds: GraphBounds, shape: Shape) -> None:
    """Write a batch into the memory of a bounded plan; requests that are missing become empty. Raises ShapeError."""
    assert batch.rows is not None and batch.longest is not None
    size, room = arrays.batch, arrays.pages.shape[0]
    pages = page_numbers(batch.table).reshape(-1)
    for name, got, limit in (("requests", batch.size, size), ("query rows", batch.rows, bounds.max_q_tokens),
                             ("keys of one request", batch.longest, bounds.max_seq_k), ("page numbers", pages.shape[0], room)):
        if got > limit:
            raise ShapeError(f"got {got} {name}, expected at most the {limit} of the plan's cuda_graph_bounds; make a new plan")
    _fill(batch, shape, size, arrays.lengths)
    arrays.pages[: pages.shape[0]].copy_(pages)
    if arrays.mask_indptr is not None:
        starts = _mask_starts(batch)
        arrays.mask_indptr.copy_(torch.nn.functional.pad(starts[None], (0, size - batch.size), mode="replicate")[0]
                                 if size > batch.size else starts)


def check_pages(arrays: PlanArrays, page_size: int, num_pages: int) -> None:
    """Page numbers in use, under KERNELGEN_CHECK=1: it waits for the device. Raises ShapeError."""
    numbers, begin, lens = (t.cpu() for t in (arrays.page_indices, arrays.page_begin, arrays.kv_lens))
    for b, (first, length) in enumerate(zip(begin.tolist(), lens.tolist())):
        used = numbers[first : first - (-length // page_size)]
        bad = ((used < 0) | (used >= num_pages)).nonzero().flatten().tolist()
        if bad:
            raise ShapeError(f"page table: request {b}, slot {bad[0]} holds page {int(used[bad[0]])}, expected 0 .. {num_pages - 1}")


def mask_entries(batch: Batch) -> int:
    """sum(Sq_b * Sk_b) of a batch on the host."""
    return int((np.asarray(batch.q_lens, np.int64) * batch.kv_lens).sum())


def check_mask(mask: torch.Tensor, mask_indptr: torch.Tensor) -> None:
    """The size of a ragged mask; on a device it waits for that. Raises ShapeError."""
    total = int(mask_indptr[-1])
    if tuple(mask.shape) != (-(-total // 8) if mask.dtype == torch.uint8 else total,):
        raise mask_size_error(mask, total)


def mask_size_error(mask: torch.Tensor, total: int) -> ShapeError:
    packed = mask.dtype == torch.uint8
    expected = -(-total // 8) if packed else total
    form = f"ceil({total} / 8) bytes of packed bits" if packed else "sum(Sq_b * Sk_b) values"
    return ShapeError(f"mask: got shape {tuple(mask.shape)}, expected ({expected},): {form}")
