"""From page tables and lengths to the arrays of a plan; docs/design/attention_inference.md says what each array holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from kernelgen.errors import SettingsError, ShapeError
from kernelgen.kernels.attention.schedule import Division, Ints, Schedule, item_bound, make_schedule
from kernelgen.ops.page_table import PageTable
from kernelgen.tensors import PlanArrays

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
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise SettingsError(f"cuda_graph_bounds: got {name}={value!r}, expected a whole number >= 0")


@dataclass(frozen=True)
class Shape:
    """What of a problem the arrays depend on."""

    group_size: int
    num_kv_heads: int
    head_dim_v: int
    mask: bool
    division: Division | None


class Batch(NamedTuple):
    """A page table with the starts (B + 1) of the query rows, and what the host knows of their lengths.

    ``rows`` query rows in all, ``max_q`` of one request, ``longest`` keys of one request, ``keys`` in all; None where the
    lengths are on a device. ``max_q`` 1 with ``rows`` B is a decode.
    """

    table: PageTable
    starts: torch.Tensor
    kv_lens: Ints | None
    rows: int | None
    max_q: int | None
    longest: int | None
    keys: int | None

    @property
    def on_host(self) -> bool:
        return self.kv_lens is not None and self.rows is not None

    @property
    def q_lens(self) -> Ints | int:
        return 1 if self.max_q == 1 and self.rows == self.table.batch else np.diff(self.starts.numpy())


def read_batch(table: PageTable, starts: torch.Tensor | None) -> Batch:
    """``starts`` None: one query row per request."""
    kv_lens = host_lengths(table)
    rows: int | None
    max_q: int | None
    if starts is None:
        starts, rows, max_q = _one_each(table.batch), table.batch, min(table.batch, 1)
    elif starts.device.type == "cpu":
        host = starts.numpy()
        rows, max_q = int(host[-1]), int((host[1:] - host[:-1]).max(initial=0))
    else:
        rows = max_q = None
    if kv_lens is None:
        return Batch(table, starts, None, rows, max_q, None, None)
    return Batch(table, starts, kv_lens, rows, max_q, int(kv_lens.max(initial=0)), int(kv_lens.sum()))


def to_host(batch: Batch) -> Batch:
    """The same with its lengths read back, which waits for the device."""
    moved = {name: t.cpu() for name in ("kv_indptr", "kv_last_page_len", "seq_lens") if (t := getattr(batch.table, name)) is not None}
    return read_batch(replace(batch.table, **moved), batch.starts.cpu())


@lru_cache(maxsize=64)
def _one_each(batch: int) -> torch.Tensor:
    return torch.arange(batch + 1, dtype=torch.int32)


def host_lengths(table: PageTable) -> Ints | None:
    """Keys in use of each request, or None where reading them would be a device sync."""
    if table.seq_lens is not None:
        return table.seq_lens.numpy() if table.seq_lens.device.type == "cpu" else None
    assert table.kv_indptr is not None and table.kv_last_page_len is not None
    if table.kv_indptr.device.type != "cpu" or table.kv_last_page_len.device.type != "cpu":
        return None
    pages = np.diff(table.kv_indptr.numpy())
    return np.where(pages > 0, (pages - 1) * table.page_size + table.kv_last_page_len.numpy(), 0).astype(np.int32)


def page_begin(table: PageTable) -> Ints:
    """Where each request's pages start among :func:`page_numbers`; a kv_indptr on a device is read back."""
    if table.block_tables is not None:
        return np.arange(table.batch, dtype=np.int32) * np.int32(table.block_tables.shape[1])
    assert table.kv_indptr is not None
    return table.kv_indptr.cpu().numpy()[:-1]


def page_numbers(table: PageTable) -> torch.Tensor:
    pages = table.block_tables if table.block_tables is not None else table.kv_indices
    assert pages is not None
    return pages.reshape(-1)


_Views = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _views(buffer: torch.Tensor, batch: int) -> _Views:
    """q_indptr, kv_lens, page_begin, item_indptr, chunk as views of one buffer."""
    sizes = (batch + 1, batch, batch, batch + 1, 1)
    q_indptr, kv_lens, page_begin, item_indptr, chunk = buffer.split(sizes)
    return q_indptr, kv_lens, page_begin, item_indptr, chunk


def _fill(batch: Batch, schedule: Schedule) -> Ints:
    """The plan's int32 arrays one behind the other."""
    assert batch.kv_lens is not None
    n = batch.table.batch
    whole = np.empty(4 * n + 3, dtype=np.int32)
    whole[: n + 1], whole[n + 1 : 2 * n + 1] = batch.starts.numpy(), batch.kv_lens
    whole[2 * n + 1 : 3 * n + 1], whole[3 * n + 1 : 4 * n + 2] = page_begin(batch.table), schedule.item_indptr
    whole[-1] = schedule.chunk
    return whole


def _mask_starts(batch: Batch) -> torch.Tensor:
    assert batch.kv_lens is not None
    sizes = np.asarray(batch.q_lens, np.int64) * batch.kv_lens
    return torch.from_numpy(np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]))


def round_items(count: int) -> int:
    """An upper bound that few values share, so that plans of nearly equal size share a prepared launch: at most 1/16 above."""
    step = max(1 << max(count.bit_length() - 5, 0), 1)
    return -(-count // step) * step


def workspace(items: int, shape: Shape, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(partial_out, partial_lse) for ``items`` items."""
    division = shape.division or _NO_DIVISION
    rows = items * shape.num_kv_heads * division.block_rows
    return (torch.empty(rows, shape.head_dim_v, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device))


def make_arrays(batch: Batch, shape: Shape, device: torch.device) -> PlanArrays:
    """Arrays for exactly this batch, from lengths on the host: one copy to the device. Page numbers are not copied."""
    assert batch.kv_lens is not None
    schedule = make_schedule(batch.q_lens, batch.kv_lens, shape.group_size, shape.division or _NO_DIVISION, batch.longest)
    buffer = torch.from_numpy(_fill(batch, schedule))
    if device.type != "cpu":
        buffer = buffer.to(device, non_blocking=True)
    items = round_items(schedule.num_items)
    partial = workspace(items, shape, device) if schedule.split and shape.division else (None, None)
    mask = _mask_starts(batch).to(device) if shape.mask else None
    return PlanArrays(*_views(buffer, batch.table.batch), page_numbers(batch.table), mask, *partial, items)


def make_bounded_arrays(batch: int, bounds: GraphBounds, max_pages: int, shape: Shape, device: torch.device) -> PlanArrays:
    """Arrays with room for anything within the bounds, all requests empty; :func:`refill` writes a batch into them."""
    division = shape.division or _NO_DIVISION
    buffer = torch.zeros(4 * batch + 3, dtype=torch.int32, device=device)
    tiles = -(-bounds.max_q_tokens * shape.group_size // division.block_rows) + batch
    items = item_bound(tiles, bounds.max_seq_k, division)
    split = shape.division is not None and bounds.max_seq_k > (division.fixed_chunk or division.min_chunk)
    partial = workspace(items, shape, device) if split else (None, None)
    mask = torch.zeros(batch + 1, dtype=torch.int64, device=device) if shape.mask else None
    pages = torch.zeros(bounds.max_pages or max_pages, dtype=torch.int32, device=device)
    return PlanArrays(*_views(buffer, batch), pages, mask, *partial, items)


def refill(arrays: PlanArrays, batch: Batch, bounds: GraphBounds, shape: Shape) -> None:
    """Write a batch into the memory of a bounded plan; requests that are missing become empty. Raises ShapeError."""
    assert batch.kv_lens is not None and batch.rows is not None and batch.longest is not None
    size, room = arrays.kv_lens.shape[0], arrays.page_indices.shape[0]
    pages = page_numbers(batch.table)
    for name, got, limit in (("requests", batch.table.batch, size), ("query rows", batch.rows, bounds.max_q_tokens),
                             ("keys of one request", batch.longest, bounds.max_seq_k), ("page numbers", pages.shape[0], room)):
        if got > limit:
            raise ShapeError(f"got {got} {name}, expected at most the {limit} of the plan's cuda_graph_bounds; make a new plan")
    schedule = make_schedule(batch.q_lens, batch.kv_lens, shape.group_size, shape.division or _NO_DIVISION, batch.longest)
    whole = _padded(_fill(batch, schedule), batch.table.batch, size)
    target = torch.as_strided(arrays.q_indptr, (4 * size + 3,), (1,))  # the one buffer that _views() cut
    target.copy_(torch.from_numpy(whole), non_blocking=True)
    arrays.page_indices[: pages.shape[0]].copy_(pages)
    if arrays.mask_indptr is not None:
        starts = _mask_starts(batch)
        arrays.mask_indptr.copy_(torch.nn.functional.pad(starts[None], (0, size - batch.table.batch), mode="replicate")[0]
                                 if size > batch.table.batch else starts)


def _padded(whole: Ints, batch: int, size: int) -> Ints:
    """The arrays of :func:`_fill` with empty requests behind."""
    if batch == size:
        return whole
    starts, lens, begin, items, chunk = np.split(whole, np.cumsum((batch + 1, batch, batch, batch + 1)))
    more = (0, size - batch)
    return np.concatenate([np.pad(starts, more, mode="edge"), np.pad(lens, more), np.pad(begin, more), np.pad(items, more, mode="edge"),
                           chunk])


def check_pages(arrays: PlanArrays, page_size: int, num_pages: int) -> None:
    """Page numbers in use, under KERNELGEN_CHECK=1: it waits for the device. Raises ShapeError."""
    numbers, begin, lens = (t.cpu() for t in (arrays.page_indices, arrays.page_begin, arrays.kv_lens))
    for b, (first, length) in enumerate(zip(begin.tolist(), lens.tolist())):
        used = numbers[first : first - (-length // page_size)]
        bad = ((used < 0) | (used >= num_pages)).nonzero().flatten().tolist()
        if bad:
            raise ShapeError(f"page table: request {b}, slot {bad[0]} holds page {int(used[bad[0]])}, expected 0 .. {num_pages - 1}")


def check_mask(mask: torch.Tensor, mask_indptr: torch.Tensor) -> None:
    """The size of a ragged mask, under KERNELGEN_CHECK=1: it waits for the device. Raises ShapeError."""
    total = int(mask_indptr[-1])
    packed = mask.dtype == torch.uint8
    expected = -(-total // 8) if packed else total
    if tuple(mask.shape) != (expected,):
        form = f"ceil({total} / 8) bytes of packed bits" if packed else "sum(Sq_b * Sk_b) values"
        raise ShapeError(f"mask: got shape {tuple(mask.shape)}, expected ({expected},): {form}")
