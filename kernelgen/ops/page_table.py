"""PageTable: which pages of a paged cache hold each request's keys, and how many of them are in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernelgen.errors import DeviceError, DtypeError, ShapeError
from kernelgen.guard import outside_graphs, whole
from kernelgen.launch.plan import host_address, plan_functions
from kernelgen.ops.checks import check_rank, shape_text
from kernelgen.settings import settings

Lengths = torch.Tensor | Sequence[int]  # and integer arrays of numpy
Ints = npt.NDArray[np.int32]
_INT32 = np.iinfo(np.int32)
_ZERO, _ONE = np.int32(0), np.int32(1)


@dataclass(frozen=True, eq=False)
class PageTable:
    """The pages of B requests, in one of two forms; make one with ``from_csr``, ``from_blocks`` or ``contiguous``.

    csr      kv_indptr (B + 1), kv_indices (>= kv_indptr[-1]), kv_last_page_len (B)
    blocks   block_tables (B, max_pages), seq_lens (B)

    All int32. The page numbers (kv_indices, block_tables) lie on the cache's device; the lengths there or on the host,
    where a plan reads them without a sync. Entries past a request's pages are never read. Lengths on the host are
    checked at once, those on a device under KERNELGEN_CHECK=1.
    """

    page_size: int
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_last_page_len: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None

    @classmethod
    @outside_graphs("a page table is made")
    def from_csr(
        cls, kv_indptr: Lengths, kv_indices: Lengths, kv_last_page_len: Lengths, page_size: int,
    ) -> PageTable:
        """kv_indptr (B + 1) starts in kv_indices, which holds page numbers; kv_last_page_len (B) tokens of the last page.

        Integer tensors (int64 is converted once), numpy arrays or plain sequences. A request with pages has a last length of 1 ..
        page_size; that of a request without pages is not looked at. Raises ShapeError, DtypeError, DeviceError.
        """
        page_size = _page_size("page_size", page_size)
        indptr, indices = index_values("kv_indptr", kv_indptr), index_values("kv_indices", kv_indices, pages=True)
        last = index_values("kv_last_page_len", kv_last_page_len)
        _check_devices(indices, kv_indptr=indptr, kv_last_page_len=last)
        if indptr.shape[0] == 0 or last.shape[0] != indptr.shape[0] - 1:
            raise ShapeError(f"got kv_indptr {shape_text(indptr)}, kv_last_page_len {shape_text(last)}, expected (B + 1) and (B)")
        _check_csr(indptr, last, indices.shape[0], page_size)
        return _table(page_size, last.shape[0], 0, kv_indptr=indptr, kv_indices=indices, kv_last_page_len=last)

    @classmethod
    @outside_graphs("a page table is made")
    def from_blocks(cls, block_tables: torch.Tensor, seq_lens: Lengths, page_size: int) -> PageTable:
        """block_tables (B, max_pages) page numbers, seq_lens (B) keys in use, each at most max_pages * page_size.

        Raises ShapeError, DtypeError, DeviceError.
        """
        page_size = _page_size("page_size", page_size)
        blocks, lengths = index_values("block_tables", block_tables, rank=2, pages=True), index_values("seq_lens", seq_lens)
        _check_devices(blocks, seq_lens=lengths)
        batch, width = blocks.shape
        if lengths.shape[0] != batch:
            raise ShapeError(f"seq_lens: got {lengths.shape[0]} lengths, expected {batch}, one per row of block_tables")
        plan, address = plan_functions(), host_address(lengths)
        known = plan is not None and address and plan.all_within(address, batch, 0, width * page_size)
        if not known and _may_read(lengths):
            _check_range("seq_lens", on_host(lengths), 0, width * page_size, f"{width} pages of {page_size}")
        return _table(page_size, batch, width, block_tables=blocks, seq_lens=lengths)

    @classmethod
    @outside_graphs("a page table is made")
    def contiguous(cls, seq_lens: Lengths, capacity: int, *, device: torch.device | str | None = None) -> PageTable:
        """A dense cache (B, capacity, Hkv, D) seen as one page per request, of which seq_lens (B) tokens are in use.

        ``device``: the cache's; default that of seq_lens. Raises ShapeError, DtypeError.
        """
        capacity = _page_size("capacity", capacity)
        lengths = index_values("seq_lens", seq_lens)
        where = lengths.device if device is None else torch.device(device)
        return cls.from_blocks(torch.arange(lengths.shape[0], dtype=torch.int32, device=where).unsqueeze(1), lengths, capacity)

    @property
    def form(self) -> str:
        """"csr" or "blocks"."""
        return "blocks" if self.kv_indptr is None else "csr"

    @property
    def one_page(self) -> bool:
        """Every request has one page: a contiguous cache."""
        return self.width == 1

    @cached_property
    def width(self) -> int:
        """Page numbers of each request in a block table, 0 of the other form."""
        return 0 if self.block_tables is None else self.block_tables.shape[1]

    @cached_property
    def batch(self) -> int:
        if self.kv_indptr is not None:
            return self.kv_indptr.shape[0] - 1
        assert self.seq_lens is not None
        return self.seq_lens.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the page numbers are."""
        pages = self.kv_indices if self.kv_indices is not None else self.block_tables
        assert pages is not None
        return pages.device

    def host_lengths(self) -> list[int] | None:
        """Keys in use of each request, or None where reading them would be a device sync."""
        lengths = self.lengths_on_host()
        return None if lengths is None else lengths.tolist()

    def lengths_on_host(self) -> Ints | None:
        """:meth:`host_lengths` as an array, which shares the memory of ``seq_lens``."""
        if self.seq_lens is not None:
            return self.seq_lens.numpy() if self.seq_lens.is_cpu else None
        assert self.kv_indptr is not None and self.kv_last_page_len is not None
        if not (self.kv_indptr.is_cpu and self.kv_last_page_len.is_cpu):
            return None
        indptr = self.kv_indptr.numpy()
        pages = indptr[1:] - indptr[:-1]
        return np.where(pages > 0, (pages - _ONE) * np.int32(self.page_size) + self.kv_last_page_len.numpy(), _ZERO)

    def copy(self) -> PageTable:
        """The same table in memory of its own, so that later writes to the caller's tensors do not reach it."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        copies: dict[str, Any] = {name: t.clone() for name, t in values.items() if isinstance(t, torch.Tensor)}
        return replace(self, **copies)

    def to_meta(self) -> PageTable:
        """The same table for a cache that has no memory (explain): page numbers on the meta device, lengths where they are."""
        pages = {name: t.to("meta") for name in ("kv_indices", "block_tables") if (t := getattr(self, name)) is not None}
        return replace(self, **pages)

    def __str__(self) -> str:
        return f"PageTable({self.form}, {self.batch} requests, pages of {self.page_size}, {self.device})"


def _table(page_size: int, batch: int, width: int, **tensors: torch.Tensor) -> PageTable:
    table = object.__new__(PageTable)
    # What the frozen class's __init__ would do, one guarded assignment per field, at a fifth of its time; the rest are class defaults.
    table.__dict__.update(tensors, page_size=page_size, batch=batch, width=width)
    return table


def _page_size(name: str, size: Any) -> int:
    value = size if type(size) is int else whole(size)
    if value is None or value < 1:
        raise ShapeError(f"{name}: got {size!r}, expected a whole number of at least 1")
    return value


def index_values(name: str, values: Any, rank: int = 1, *, pages: bool = False) -> torch.Tensor:
    """int32 and contiguous; a sequence or a numpy array becomes a tensor on the host.

    ``pages``: the values are page numbers, and junk among them is no error: what no int32 holds becomes the nearest one.
    """
    if type(values) is torch.Tensor and values.dtype is torch.int32 and values.dim() == rank and values.is_contiguous():
        return values
    if not isinstance(values, torch.Tensor):
        values = _host_values(name, values, rank)
    if values.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{name}: got {values.dtype}, expected int32 (or int64, converted once)")
    check_rank(name, values, rank, "(n)" if rank == 1 else "(B, max_pages)")
    if values.dtype == torch.int64:
        values = _within_int32(name, values, pages)
    return values.to(torch.int32).contiguous()


def _host_values(name: str, values: Any, rank: int) -> torch.Tensor:
    """A sequence of whole numbers or an integer array of numpy as an int64 tensor."""
    array = isinstance(values, np.ndarray)
    try:
        host = np.asarray(values) if array or (rank == 1 and isinstance(values, Sequence)) else None
    except ValueError:  # sequences of different lengths in one
        host = None
    if host is None or (host.dtype.kind not in "iu" and (array or host.size)):
        more = ", whole numbers or an integer array" if rank == 1 else " or an integer array"
        got = f"{host.dtype} values" if host is not None else type(values).__name__
        raise DtypeError(f"{name}: got {got}, expected an int32 tensor{more}")
    if host.dtype == np.uint64:
        host = np.minimum(host, np.uint64(2**63 - 1))
    return torch.from_numpy(host.astype(np.int64))


def _within_int32(name: str, values: torch.Tensor, pages: bool) -> torch.Tensor:
    """int64 values that int32 holds. Wrapping would turn junk into numbers that look right."""
    if not values.is_cpu or pages:
        return values.clamp(_INT32.min, _INT32.max)
    if values.numel() and not _INT32.min <= int(values.min()) <= int(values.max()) <= _INT32.max:
        raise ShapeError(f"{name}: got values from {int(values.min())} to {int(values.max())}, expected ones that an int32 holds")
    return values


def _check_devices(pages: torch.Tensor, **lengths: torch.Tensor) -> None:
    for name, t in lengths.items():
        if not t.is_cpu and t.device != pages.device:
            raise DeviceError(f"{name} is on {t.device}, expected the host or {pages.device}, where the page numbers are")


def _may_read(*tensors: torch.Tensor) -> bool:
    """Values can be looked at: they are on the host, or the caller asked for checks that sync."""
    return all(t.is_cpu for t in tensors) or (not any(t.is_meta for t in tensors) and settings().check)


def on_host(values: torch.Tensor) -> Ints:
    """Checks run in numpy: its calls on some hundred numbers cost a third of torch's."""
    host: Ints = (values if values.is_cpu else values.cpu()).numpy()
    return host


def _check_range(name: str, values: Ints, low: int, high: int, why: str) -> None:
    wrong = np.flatnonzero((values < low) | (values > high))
    if len(wrong):
        raise ShapeError(f"{name}: got {int(values[wrong[0]])} for request {wrong[0]}, expected {low} to {high} ({why})")


def check_starts(name: str, starts: Ints, total: int | None, why: str) -> None:
    """Cumulative lengths on the host: 0 first, never falling, ending at most at ``total``. Raises ShapeError."""
    if len(starts) == 0 or starts[0] != 0 or np.diff(starts).min(initial=0) < 0:
        raise ShapeError(f"{name}: got {starts.tolist()[:8]}, expected B + 1 values that start at 0 and never fall")
    if total is not None and starts[-1] > total:
        raise ShapeError(f"{name}: got {int(starts[-1])} at the end, expected at most {total}, {why}")


def _check_csr(indptr: torch.Tensor, last: torch.Tensor, num_indices: int, page_size: int) -> None:
    plan, starts, lens = plan_functions(), host_address(indptr), host_address(last)
    if plan is not None and starts and lens and plan.csr_fits(starts, lens, last.shape[0], num_indices, page_size):
        return
    if _may_read(indptr, last):  # what is wrong, if anything is
        at, lengths = on_host(indptr), on_host(last)
        check_starts("kv_indptr", at, num_indices, "the length of kv_indices")
        _check_range("kv_last_page_len", np.where(np.diff(at) > 0, lengths, _ONE), 1, page_size, "the page size")
