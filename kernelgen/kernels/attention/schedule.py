"""How planned attention is cut into items: rows of queries x chunks of keys (docs/design/attention_inference.md).

One row block against one chunk of keys is an item; a request whose keys fit one chunk needs no second stage. The chunk is
as long as it can be while there is an item for every place that can run one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

CHUNK_UNIT = 64
Ints = npt.NDArray[np.int32]
_ONE = np.int32(1)


@dataclass(frozen=True)
class Division:
    """The parameters of a cut, chosen per kernel config.

    block_rows   packed query rows of an item
    slots        items of one key/value head that run at the same time on the whole device
    min_chunk    shortest chunk worth a second stage, in keys
    fixed_chunk  batch-invariant calls: this many keys whatever the batch is; 0 = choose
    """

    block_rows: int
    slots: int
    min_chunk: int = 256
    fixed_chunk: int = 0


class Schedule(NamedTuple):
    chunk: int
    item_indptr: Ints  # (B + 1)
    split: bool  # any request has more than one split

    @property
    def num_items(self) -> int:
        return int(self.item_indptr[-1])


def make_schedule(
    q_lens: Ints | int, kv_lens: Ints, group_size: int, division: Division, longest: int | None = None, keys: int | None = None,
    out: Ints | None = None,
) -> Schedule:
    """Cut a batch. q_lens (B) or one number for all, kv_lens (B), on the host; ``longest`` and the sum ``keys`` of kv_lens, where
    they are known; ``out`` (B + 1) takes item_indptr, its first entry being 0 already."""
    longest = int(kv_lens.max(initial=0)) if longest is None else longest
    rows = q_lens * group_size if isinstance(q_lens, int) else q_lens.astype(np.int64) * group_size
    tiles = (rows + (division.block_rows - 1)) // division.block_rows
    chunk = division.fixed_chunk or _chunk(tiles, kv_lens, longest, keys, division)
    indptr = np.zeros(len(kv_lens) + 1, dtype=np.int32) if out is None else out
    if longest <= chunk and isinstance(tiles, int):
        indptr[:] = _ramp(len(kv_lens), tiles)
        return Schedule(chunk, indptr, False)
    items: Any = tiles
    if longest > chunk:
        splits = np.maximum((kv_lens + np.int32(chunk - 1)) // np.int32(chunk), _ONE)
        items = splits if isinstance(tiles, int) and tiles == 1 else splits * tiles
    np.add.accumulate(items, out=indptr[1:])
    return Schedule(chunk, indptr, longest > chunk)


@lru_cache(maxsize=64)
def _ramp(count: int, step: int) -> Ints:
    return np.arange(count + 1, dtype=np.int32) * np.int32(step)


def _chunk(tiles: npt.NDArray[np.int64] | int, kv_lens: Ints, longest: int, keys: int | None, division: Division) -> int:
    total = tiles * len(kv_lens) if isinstance(tiles, int) else int(tiles.sum())
    if total >= division.slots:
        return chunk_for(total, 0, longest, division)  # the work makes no difference
    if isinstance(tiles, int):
        work = tiles * (int(kv_lens.sum(dtype=np.int64)) if keys is None else keys)
    else:
        work = int(tiles @ kv_lens)
    return chunk_for(total, work, longest, division)


def chunk_for(tiles: int, work: int, longest: int, division: Division) -> int:
    """A chunk such that about ``slots`` items result: ``work``, the sum of tiles x keys, spread over the free places, rounded up."""
    whole = max(_round_up(longest), CHUNK_UNIT)
    if tiles >= division.slots:
        return whole  # enough items without any split
    return min(whole, max(_round_up(-(-work // division.slots)), division.min_chunk))


def _round_up(keys: int) -> int:
    return -(-keys // CHUNK_UNIT) * CHUNK_UNIT


def item_bound(max_tiles: int, max_keys: int, division: Division) -> int:
    """Most items that any batch within the bounds can have: ``max_tiles`` row blocks in all, ``max_keys`` of one request.

    With a chosen chunk the number of splits beyond one per tile is at most ``slots``.
    """
    if division.fixed_chunk:
        return max_tiles * max(-(-max_keys // division.fixed_chunk), 1)
    return max_tiles + division.slots
