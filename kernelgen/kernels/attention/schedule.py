"""How planned attention is cut into items: rows of queries x chunks of keys (docs/design/attention_inference.md).

One row block against one chunk of keys is an item; a request whose keys fit one chunk needs no second stage. The chunk is
as long as it can be while there is an item for every place that can run one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

CHUNK_UNIT = 64
Ints = npt.NDArray[np.int32]


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


def make_schedule(q_lens: Ints, kv_lens: Ints, group_size: int, division: Division) -> Schedule:
    """Cut a batch: q_lens (B), kv_lens (B). A process with the launcher does it in C++ (launch/plan.py)."""
    tiles = -(-q_lens.astype(np.int64) * group_size // division.block_rows)
    longest = int(kv_lens.max(initial=0))
    chunk = division.fixed_chunk or chunk_for(int(tiles.sum()), int(tiles @ kv_lens.astype(np.int64)), longest, division)
    splits = np.maximum(-(-kv_lens.astype(np.int64) // chunk), 1)
    indptr = np.zeros(len(kv_lens) + 1, dtype=np.int32)
    np.cumsum(splits * tiles, out=indptr[1:])
    return Schedule(chunk, indptr, longest > chunk)


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
