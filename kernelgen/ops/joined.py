"""The levels of a cascade as one page table: the pages of an innermost request are those of its levels, one after another.

A level whose keys end within a page is joined by smaller pages: a token is a page stride away from its counterpart in the
next page, and if that is a whole number of token strides, the same memory is a cache of pages of any divisor of it, in either
layout. Page ``n`` of the caller starts at small page ``n * per_page``; numbers between its last one and the next page's first
(the values of a (pages, 2, ..) cache, other heads) are in no table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernelgen.errors import DeviceError, ShapeError
from kernelgen.kernels.attention.schedule import Ints
from kernelgen.ops.page_table import Lengths, PageTable, check_starts
from kernelgen.ops.paged import check_table
from kernelgen.ops.planning import page_begin, page_numbers
from kernelgen.ops.query_lengths import query_starts
from kernelgen.ops.scales import Scale, page_scale
from kernelgen.settings import settings

Level = tuple[PageTable, Lengths]
Longs = npt.NDArray[np.int64]
_LENGTHS = ("kv_indptr", "kv_last_page_len", "seq_lens")
_INT32 = 2**31


class Joined(NamedTuple):
    """One paged call: its table, query starts and caches (pages, page_size, Hkv, D).

    ``per_page``: small pages from one page of the caller to the next; 1 where the caller's own pages serve.
    """

    table: PageTable
    starts: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    per_page: int

    def scale(self, name: str, scale: Scale | None, pages: int) -> Scale | None:
        """A (pages, Hkv) scale, one row per small page."""
        if self.per_page == 1 or not isinstance(scale, torch.Tensor):
            return scale
        checked = page_scale(name, scale, pages, self.k_cache.shape[2], self.k_cache.device)
        assert checked is not None
        return checked.repeat_interleave(self.per_page, 0)[: self.k_cache.shape[0]]


class _Level(NamedTuple):
    """A level on the host. ``starts`` (B + 2), ``lens`` and ``begin`` (B + 1) end with a request that has nothing."""

    table: PageTable
    starts: Longs
    lens: Longs
    begin: Longs


def join_levels(levels: Sequence[Level], rows: int, k_cache: torch.Tensor, v_cache: torch.Tensor) -> Joined | str:
    """The one call that the levels over caches (pages, page_size, Hkv, D) are, or why there is none.

    Lengths on a device are read back in one copy, which waits for it; page numbers stay there. Raises ShapeError for levels
    that do not cut ``rows`` query rows or do not nest, DeviceError.
    """
    size, pages = _check_pages(levels, k_cache), k_cache.shape[0]
    if len(levels) == 1 and (alone := _alone(*levels[0])) is not None:
        return Joined(*alone, k_cache, v_cache, 1)
    found = _on_host(levels)
    for index, level in enumerate(found):
        check_starts(f"cu_seqlens_q of level {index}", level.starts[:-1].astype(np.int32), None, "")
        if level.starts[-1] != rows:
            raise ShapeError(f"q: got {rows} rows, expected {level.starts[-1]}, the sum of the query lengths of level {index}")
    owners = [_owners(level, found[-1], index) for index, level in enumerate(found[:-1])]
    owners.append(np.arange(found[-1].table.batch, dtype=np.int64))
    lens = np.stack([level.lens[owner] for level, owner in zip(found, owners)])
    behind = lens[::-1].cumsum(0)[::-1] - lens  # keys of later levels: where there are some, a level must end with a page
    small = int(np.gcd.reduce(lens[behind > 0], initial=size))
    per_page, parts = 1, 1
    if small < size:
        apart = _tokens_apart(k_cache, v_cache)
        if isinstance(apart, str):
            return f"levels end within pages of {size} tokens, and {apart}"
        small = int(np.gcd(small, apart))
        per_page, parts = apart // small, size // small
        if pages * per_page >= _INT32:
            return f"levels end within pages of {size} tokens, and pages of {small} have numbers beyond int32"
        k_cache, v_cache = (_small_pages(cache, small, per_page) for cache in (k_cache, v_cache))
    counts = -(-lens // small)
    if counts.sum() >= _INT32:
        return f"the joined page table has {counts.sum()} entries, beyond int32"
    numbers = _numbers(found, owners, counts, parts, per_page, pages)
    indptr = np.concatenate([np.zeros(1, np.int64), counts.sum(0).cumsum()])
    last = lens.sum(0) - (counts.sum(0) - 1) * small
    table = PageTable.from_csr(torch.from_numpy(indptr), numbers, torch.from_numpy(last), small)
    return Joined(table, torch.from_numpy(found[-1].starts[:-1]), k_cache, v_cache, per_page)


def _check_pages(levels: Sequence[Level], cache: torch.Tensor) -> int:
    """The page size that tables and cache share."""
    for table, _ in levels:
        check_table(table)
        if table.page_size != cache.shape[1]:
            raise ShapeError(f"kv_cache: got pages of {cache.shape[1]} tokens, expected {table.page_size} as in {table}")
        if table.device != cache.device:
            raise DeviceError(f"{table}: got page numbers on {table.device}, expected {cache.device}, where the cache is")
    return cache.shape[1]


def _alone(table: PageTable, starts: Lengths) -> tuple[PageTable, torch.Tensor] | None:
    """One level is a planned call as it is, unless its query starts are on a device, where a plan does not take them."""
    own = query_starts(None, starts, table.batch)
    return (table, own) if own is not None and own.device.type == "cpu" else None


def _on_host(levels: Sequence[Level]) -> list[_Level]:
    """Lengths on the host, those of all levels on a device by one copy."""
    given: list[dict[str, torch.Tensor]] = []
    for table, starts in levels:
        tensors = {name: t for name in _LENGTHS if (t := getattr(table, name)) is not None}
        found = query_starts(None, starts, table.batch)
        assert found is not None
        given.append(tensors | {"starts": found})
    away = [t for tensors in given for t in tensors.values() if t.device.type != "cpu"]
    copies = iter(torch.cat(away).cpu().split([t.shape[0] for t in away]) if away else ())
    result = []
    for (table, _), tensors in zip(levels, given):
        on_host: dict[str, Any] = {name: t if t.device.type == "cpu" else next(copies) for name, t in tensors.items()}
        cut: Ints = on_host.pop("starts").numpy()
        checked = _checked(replace(table, **on_host))
        lens = checked.lengths_on_host()
        assert lens is not None
        result.append(_Level(checked, _ended(cut, int(cut[-1])), _ended(lens, 0), _ended(page_begin(checked), 0)))
    return result


def _ended(values: Ints, end: int) -> Longs:
    return np.append(values.astype(np.int64), end)


def _checked(table: PageTable) -> PageTable:
    """The table with its lengths checked: those that came from a device were not, and a wrong one leads past its pages."""
    if table.block_tables is not None and table.seq_lens is not None:
        return PageTable.from_blocks(table.block_tables, table.seq_lens, table.page_size)
    assert table.kv_indptr is not None and table.kv_indices is not None and table.kv_last_page_len is not None
    return PageTable.from_csr(table.kv_indptr, table.kv_indices, table.kv_last_page_len, table.page_size)


def _owners(outer: _Level, inner: _Level, index: int) -> Longs:
    """The request of an outer level that each innermost one lies in; the level's last, empty one for those without rows."""
    first, last = inner.starts[:-2], inner.starts[1:-1]
    owner = np.where(last > first, np.searchsorted(outer.starts[:-1], first, side="right") - 1, outer.table.batch)
    bad = np.flatnonzero(last > np.where(last > first, outer.starts[owner + 1], last))
    if bad.size:
        b = bad[0]
        raise ShapeError(f"levels: rows {first[b]} .. {last[b] - 1} of the innermost level lie in no single request of level {index}; "
                         "levels must nest")
    return owner.astype(np.int64)


def _tokens_apart(k_cache: torch.Tensor, v_cache: torch.Tensor) -> int | str:
    """How many token strides lie between two pages, of keys as of values; or why that is no number."""
    pages, size = k_cache.shape[:2]
    if pages <= 1:
        return size
    strides = [cache.stride()[:2] for cache in (k_cache, v_cache)]
    apart = {page // token if token and page % token == 0 else 0 for page, token in strides}
    if len(apart) == 1 and min(apart) >= size:
        return apart.pop()
    shown = " and ".join(f"{page} and {token}" for page, token in strides)
    return f"smaller ones need a page stride of as many whole token strides in keys as in values, got {shown} elements"


def _small_pages(cache: torch.Tensor, small: int, per_page: int) -> torch.Tensor:
    """The cache seen as pages of ``small`` tokens, of which ``per_page`` lie between the starts of two pages."""
    pages, size, heads, dim = cache.shape
    _, token, head, element = cache.stride()
    count = (pages - 1) * per_page + size // small if pages else 0
    return cache.as_strided((count, small, heads, dim), (small * token, token, head, element))


def _numbers(found: list[_Level], owners: list[Longs], counts: Longs, parts: int, per_page: int, pages: int) -> torch.Tensor:
    """Page numbers of the joined requests, on the device of the tables. counts (levels, B): small pages of each piece."""
    device = found[0].table.device
    numbers = torch.empty(int(counts.sum()), dtype=torch.int32, device=device)
    ends = counts.T.reshape(-1).cumsum().reshape(-1, len(found)).T  # in the order of requests, and of levels within one
    for level, owner, count, end in zip(found, owners, counts, ends):
        # Entry e of this level's pieces is small page ``source`` of the level's table, and goes to ``target``.
        before = count.cumsum() - count
        entries = np.arange(count.sum())
        source = entries + (level.begin[owner] * parts - before).repeat(count)
        target = entries + (end - count - before).repeat(count)
        page, part = (source, None) if parts == 1 else np.divmod(source, parts)
        used = page_numbers(level.table).reshape(-1)[_on(device, page)]
        if settings().check and len(used) and not 0 <= int(used.min()) <= int(used.max()) < pages:
            raise ShapeError(f"{level.table}: got pages {int(used.min())} .. {int(used.max())}, expected 0 .. {pages - 1}")
        numbers[_on(device, target)] = used if part is None else used * per_page + _on(device, part)
    return numbers


def _on(device: torch.device, values: Longs) -> torch.Tensor:
    """int32, which holds every entry of a table."""
    return torch.from_numpy(values.astype(np.int32)).to(device, non_blocking=True)
