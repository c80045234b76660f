"""How a dense or ragged call is cut when its keys are split: attention/split_mma and attention/split_cpu.

The formulas are those of a plan (schedule.py), but nothing is planned: what the host knows becomes a few numbers among the
kernel's arguments, and the rest the kernel works out from the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernelgen.kernels.attention.schedule import CHUNK_UNIT, Division, chunk_for, item_bound
from kernelgen.problems.attention import AttentionProblem

# Where it has to, each warp of a GPU reads the lengths of so many requests at most, 32 at a time. A batch of that size has work for
# every SM without a split, so a dense one is simply not split; a ragged one would still need the pass to find its rows.
MAX_SCANNED = 1024


@dataclass(frozen=True)
class SplitConfig:
    """A tile (the family's own config), and how a call is cut for it on the target. Of the cut nothing is compiled in."""

    tile: Any
    division: Division

    def __str__(self) -> str:
        chunk = self.division.fixed_chunk
        return f"{self.tile} " + (f"chunks of {chunk}" if chunk else f"{self.division.slots} items a head")


@dataclass(frozen=True)
class Cut:
    """What a launch needs of a cut.

    chunk   keys of a chunk; 0: the kernel chooses from the lengths
    splits  items of each row tile, the same in every request; 0: the kernel counts them
    items   most items of one key/value head
    split   some request may have more than one chunk: there are partial results to merge
    """

    chunk: int
    splits: int
    items: int
    split: bool


def keys_in_sight(problem: AttentionProblem) -> int:
    """Most keys of a request, from the first that one of its rows may see under the window, down to a multiple of the unit."""
    p, left = problem, problem.window[0]
    if left is None:
        return p.seq_k
    if p.layout == "dense" and not p.kv_lens:
        return p.seq_k - max(p.seq_k - p.seq_q - left, 0) // CHUNK_UNIT * CHUNK_UNIT
    return min(p.seq_k, p.seq_q + left + CHUNK_UNIT - 1)


def cut_of(problem: AttentionProblem, division: Division) -> Cut:
    """The cut of a call; where lengths are on the device, what the host can tell, and bounds for the rest."""
    p, keys = problem, keys_in_sight(problem)
    if p.layout == "ragged":
        return _cut_of_ragged(p, division, keys)
    tiles = -(-p.seq_q * p.group_size // division.block_rows)
    whole = max(-(-keys // CHUNK_UNIT), 1) * CHUNK_UNIT
    if division.fixed_chunk or not p.kv_lens:
        chunk = division.fixed_chunk or chunk_for(p.batch * tiles, p.batch * tiles * keys, keys, division)
    elif not 0 < p.batch * tiles < division.slots or p.batch > MAX_SCANNED:
        chunk = whole
    else:
        return Cut(0, 0, item_bound(p.batch * tiles, keys, division), keys > division.min_chunk)
    splits = max(-(-keys // chunk), 1)
    return Cut(chunk, splits, p.batch * tiles * splits, splits > 1)


def _cut_of_ragged(problem: AttentionProblem, division: Division, keys: int) -> Cut:
    p, rows = problem, problem.seq_q * problem.group_size
    tiles = rows // division.block_rows + p.batch if rows and p.batch else 0
    items, fixed = item_bound(tiles, keys, division) if tiles else 0, division.fixed_chunk
    if fixed:  # no tile walks more chunks than its request has, and the requests share the keys
        items = min(items, tiles + -(-rows // division.block_rows) * (p.seq_k // fixed))
    return Cut(fixed, 0, items, keys > (fixed or division.min_chunk))


def workspace_floats(problem: AttentionProblem, division: Division, cut: Cut) -> tuple[int, int]:
    """Elements of partial_out and of partial_lse."""
    rows = cut.items * problem.num_kv_heads * division.block_rows if cut.split else 0
    return rows * problem.head_dim_v, rows


def workspace(count: int, device: torch.device) -> torch.Tensor:
    """Memory for partial results. The caller drops it once its kernels are launched: it is reused only by what the same stream
    does later, and by a captured graph only within its own pool."""
    return torch.empty(count, dtype=torch.float32, device=device)


def mean_rows(problem: AttentionProblem) -> int | None:
    """Packed rows of a request; of ragged ones the mean, which the host knows. None where the batch must not matter."""
    p = problem
    if p.layout == "dense":
        return p.seq_q * p.group_size
    return None if p.batch_invariant else -(-p.seq_q // max(p.batch, 1)) * p.group_size
