"""From page tables and lengths to the arrays of a plan; docs/design/attention_inference.md says what each array holds."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class HostLengths:
    """Lengths of a batch on the host: starts (B + 1) of the query rows, keys (B)."""

    starts: Ints
    kv_lens: Ints

    @property
    def q_lens(self) -> Ints:
        return np.diff(self.starts)


def host_lengths(table: PageTable) -> Ints | None:
    """Keys in use of each request, or None where reading them would be a device sync."""
    if table.seq_lens is not None:
        return table.seq_lens.numpy() if table.seq_lens.device.type == "cpu" else None
    assert table.kv_indptr is not None and table.kv_last_page_len is not None
    if table.kv_indptr.device.type != "cpu" or table.kv_last_page_len.device.type != "cpu":
        return None
    pages = np.diff(table.kv_indptr.numpy())
    return np.where(pages > 0, (pages - 1) * table.page_size + table.kv_last_page_len.numpy(), 0).astype(np.int32)


def _page_begin(table: PageTable) -> Ints:
    if table.block_tables is not None:
        return np.arange(table.batch, dtype=np.int32) * np.int32(table.block_tables.shape[1])
    assert table.kv_indptr is not None
    return table.kv_indptr.cpu().numpy()[:-1]


def _page_numbers(table: PageTable) -> torch.Tensor:
    pages = table.block_tables if table.block_tables is not None else table.kv_indices
    assert pages is not None
    return pages.reshape(-1)


_Views = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _views(buffer: torch.Tensor, batch: int) -> _Views:
    """q_indptr, kv_lens, page_begin, item_indptr, chunk as views of one buffer."""
    sizes = (batch + 1, batch, batch, batch + 1, 1)
    q_indptr, kv_lens, page_begin, item_indptr, chunk = buffer.split(sizes)
    return q_indptr, kv_lens, page_begin, item_indptr, chunk


def _fill(lengths: HostLengths, begin: Ints, schedule: Schedule) -> Ints:
    return np.concatenate([lengths.starts, lengths.kv_lens, begin, schedule.item_indptr, (schedule.chunk,)], dtype=np.int32)


def _mask_starts(lengths: HostLengths) -> torch.Tensor:
    sizes = lengths.q_lens.astype(np.int64) * lengths.kv_lens
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


def make_arrays(table: PageTable, lengths: HostLengths, shape: Shape, device: torch.device) -> PlanArrays:
    """Arrays for exactly this batch, from lengths on the host: one copy to the device."""
    division = shape.division or _NO_DIVISION
    schedule = make_schedule(lengths.q_lens, lengths.kv_lens, shape.group_size, division)
    buffer = torch.from_numpy(_fill(lengths, _page_begin(table), schedule)).to(device, non_blocking=True)
    items = round_items(schedule.num_items)
    partial = workspace(items, shape, device) if schedule.split and shape.division else (None, None)
    mask = _mask_starts(lengths).to(device) if shape.mask else None
    return PlanArrays(*_views(buffer, table.batch), _page_numbers(table).clone(), mask, *partial, items)


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


def refill(arrays: PlanArrays, table: PageTable, lengths: HostLengths, bounds: GraphBounds, shape: Shape) -> None:
    """Write a batch into the memory of a bounded plan; requests that are missing become empty. Raises ShapeError."""
    batch, room = arrays.kv_lens.shape[0], arrays.page_indices.shape[0]
    pages = _page_numbers(table)
    longest = int(lengths.kv_lens.max(initial=0))
    for name, got, limit in (("requests", table.batch, batch), ("query rows", int(lengths.starts[-1]), bounds.max_q_tokens),
                             ("keys of one request", longest, bounds.max_seq_k), ("page numbers", pages.shape[0], room)):
        if got > limit:
            raise ShapeError(f"got {got} {name}, expected at most the {limit} of the plan's cuda_graph_bounds; make a new plan")
    missing = batch - table.batch
    padded = HostLengths(np.pad(lengths.starts, (0, missing), mode="edge"), np.pad(lengths.kv_lens, (0, missing)))
    schedule = make_schedule(padded.q_lens, padded.kv_lens, shape.group_size, shape.division or _NO_DIVISION)
    host = torch.from_numpy(_fill(padded, np.pad(_page_begin(table), (0, missing)), schedule))
    whole = torch.as_strided(arrays.q_indptr, (4 * batch + 3,), (1,))  # the one buffer that _views() cut
    whole.copy_(host, non_blocking=True)
    arrays.page_indices[: pages.shape[0]].copy_(pages)
    if arrays.mask_indptr is not None:
        arrays.mask_indptr.copy_(_mask_starts(padded))
