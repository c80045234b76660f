"""Few queries over many keys by attention/prefill_sm90: heads of a group packed into one tile, keys of a tile split over blocks.

The kernel's side: templates/include/kernelgen/attention/sm90_dense.cuh, sm90_split.cuh and sm90_merge.cuh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from kernelgen.kernels import counters
from kernelgen.kernels.attention import cut
from kernelgen.kernels.attention.mma import address
from kernelgen.kernels.attention.paged_mma import MAX_GRID_Y, MERGE_THREADS
from kernelgen.kernels.attention.prefill_sm90_configs import Config
from kernelgen.problems.attention import AttentionProblem
from kernelgen.targets import Target
from kernelgen.tensors import AttentionTensors
from kernelgen.verdicts import Verdict, first_no

MERGE_ENTRY = "attention_prefill_sm90_merge"

_ROWS = 64  # of a consumer
MAX_SPLITS = 256
_MAX_WORKSPACE = 1 << 32
_MERGE_BLOCKS = 1 << 18
_MAX_PARTS = 2**31 - 1  # of all rows: counted in int32
_FEWEST_KEYS = 256  # of a part: below, what it reads is no more than what it leaves to the merge
# An estimate in keys of a tile, 14 ns each with D 128 (128 rows by products, 64 by their bytes from memory): what a tile takes beside its
# keys, the merge as a kernel, and its rows, of which so many are written and read in that time.
_TILE, _MERGE, _MERGED_ROWS = 256, 400, 55
# Tiles of few queries, as many stages as fit: up to 64 packed rows, more, and of short parts, two blocks of an SM.
_NARROW = (*(Config(1, 128, stages, False) for stages in (3, 2)), *(Config(1, 64, stages, False) for stages in (3, 2)))
_WIDE = (Config(2, 128, 3), Config(2, 128), Config(2, 64))
_SHORT, _SHORT_PART = Config(1, 64, 3, False, resident=2), 512  # keys
_ROUNDS = 8  # that parts may take
# Where they were timed: queries enough for 64 packed rows, keys from which, and how many for each query.
_TIMED_DIM, _QUERIES, _KEYS, _KEYS_PER_QUERY = 128, range(16, 513), 4096, 8


def packed_heads(problem: AttentionProblem, config: Config) -> int:
    """Query heads whose rows a tile has."""
    return problem.group_size if config.pack_gqa else 1


def queries_of(problem: AttentionProblem, config: Config) -> int:
    """Of a row tile: whole queries of all packed heads in each consumer's rows."""
    return config.consumers * max(_ROWS // packed_heads(problem, config), 1)


def divides(problem: AttentionProblem, config: Config) -> Verdict:
    """Can heads be packed and keys split as the config wants?"""
    p, c = problem, config
    parts = p.seq_q * (1 if p.layout == "ragged" else p.batch) * p.num_q_heads * c.splits
    return first_no(
        (not c.pack_gqa or 2 <= p.group_size <= _ROWS, f"pack_gqa: groups of {p.group_size} heads, 2 to {_ROWS} fit a consumer's rows"),
        (not c.pack_gqa or c.multicast == 0, f"pack_gqa beside multicast {c.multicast}, which shares tiles of a single head"),
        (1 <= c.splits <= MAX_SPLITS, f"{c.splits} splits of a tile's keys: 1 to {MAX_SPLITS}"),
        (c.splits == 1 or not c.out_over_query, "splits beside out_over_query: partial results leave from registers"),
        (c.splits == 1 or c.out_parts == 1, f"splits beside {c.out_parts} parts of results, which leave from registers"),
        (c.splits == 1 or p.num_q_heads <= MAX_GRID_Y, f"{p.num_q_heads} query heads exceed the {MAX_GRID_Y} of a merge"),
        (c.splits == 1 or (parts <= _MAX_PARTS and parts * (p.head_dim_v + 1) * 4 <= _MAX_WORKSPACE),
         f"{parts} partial rows of {p.head_dim_v} columns: at most {_MAX_PARTS}, {_MAX_WORKSPACE} bytes"),
    )


def _requests(problem: AttentionProblem) -> int:
    """By which tokens are to be divided for those of a request, of a ragged batch in the mean."""
    return max(problem.batch, 1) if problem.layout == "ragged" else 1


def _tiles(problem: AttentionProblem, config: Config) -> int:
    p, requests = problem, _requests(problem)
    of_request = -(-p.seq_q // (requests * queries_of(p, config)))
    return of_request * p.batch * (p.num_q_heads // packed_heads(p, config))


def splits_for(problem: AttentionProblem, target: Target, config: Config) -> int:
    """As many as the estimate takes the least time with: parts fill the SMs in few rounds. 1 where the batch must not matter."""
    p, tiles, keys = problem, max(_tiles(problem, config), 1), cut.keys_in_sight(problem) // _requests(problem)
    if p.batch_invariant:
        return 1
    rows = p.seq_q * (p.batch if p.layout == "dense" else 1) * p.num_q_heads
    places, most = max(target.sm_count * config.resident, 1), min(keys // _FEWEST_KEYS, MAX_SPLITS)

    def time(splits: int) -> float:
        merge = _MERGE + splits * rows / _MERGED_ROWS if splits > 1 else 0.0
        return -(-tiles * splits // places) * config.resident * (keys / splits + _TILE) + merge

    filling = {min(rounds * places // tiles, most) for rounds in range(1, _ROUNDS + 1)}
    return min(sorted({1} | {splits for splits in filling if splits > 1}), key=time)


def of_few_queries(problem: AttentionProblem, target: Target) -> Iterator[Config]:
    """For calls that do not fill tiles of a head, or whose tiles leave SMs idle, best guess first, legal or not: keys split, and heads
    packed where that makes fewer tiles."""
    p, group = problem, problem.group_size
    packable = 2 <= group <= _ROWS
    if p.batch_invariant:
        return

    def fitted(tile: Config) -> Config:
        packed = replace(tile, pack_gqa=packable)
        if _tiles(p, packed) >= _tiles(p, tile):
            packed = tile
        return replace(packed, splits=splits_for(p, target, packed))

    few = p.seq_q * (group if packable else 1) <= _ROWS * _requests(p)
    short = few and cut.keys_in_sight(p) <= _SHORT_PART * _requests(p) * fitted(_NARROW[0]).splits
    for tile in (*((_SHORT,) if short else ()), *_NARROW, *_WIDE) if few else (*_WIDE, *_NARROW):
        config = fitted(tile)
        if config.pack_gqa or config.splits > 1:
            yield config


def leading(problem: AttentionProblem, target: Target) -> Config | None:
    """The first of those where they were the fastest (docs/design/prefill_sm90.md), which then is the first candidate."""
    p, keys = problem, cut.keys_in_sight(problem)
    one_by_one = p.mask or p.variant or p.alibi
    timed = p.layout == "dense" and not one_by_one and p.head_dim == p.head_dim_v == _TIMED_DIM and p.seq_q in _QUERIES
    if not timed or p.seq_q * p.group_size < _ROWS or keys < max(_KEYS, _KEYS_PER_QUERY * p.seq_q):
        return None
    return next(of_few_queries(p, target), None)


def bind_split(
    problem: AttentionProblem, config: Config, kernel: Any, device: int, attend: Callable[[bytes], None],
    packed: Callable[[Iterable[int]], bytes], call: Callable[[AttentionTensors], Any], rare: Callable[[AttentionTensors], Any] | None,
) -> Callable[[AttentionTensors], None]:
    """The closure of a repeated call. ``attend``: launch of the parts; ``packed``: the argument from its pointers, in order; ``call`` and
    ``rare``: the tensors in front of the counter and behind it."""
    p, tokens = problem, problem.seq_q * (1 if problem.layout == "ragged" else problem.batch)
    grid = (tokens, p.num_q_heads if tokens * p.num_q_heads <= _MERGE_BLOCKS else 1, 1)  # one for all heads where rows are many
    merge = kernel.entry(MERGE_ENTRY).prepare(device, grid=grid, block=(MERGE_THREADS, 1, 1), programmatic=True)
    rows = tokens * p.num_q_heads * config.splits
    columns = rows * p.head_dim_v

    def run(t: AttentionTensors) -> None:
        partial = cut.workspace(columns + rows, t.q.device)
        counter, memory = counters.counter(device)
        q, k, v, out, lse, *lengths = map(address, call(t))
        behind = (counter, *(map(address, rare(t)) if rare else (0,) * 5))
        partial_out = partial.data_ptr()
        partial_lse = partial_out + 4 * columns
        attend(packed((q, k, v, partial_out, partial_lse, *lengths, *behind)))
        merge(packed((partial_out, partial_lse, v, out, lse, *lengths, *behind)))
        del memory

    return run
