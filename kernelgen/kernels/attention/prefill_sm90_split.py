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
# Tiles of few queries: those of one consumer first, which 64 packed rows fill; as many stages as fit.
_FEW = tuple(Config(consumers, keys, stages, consumers > 1) for consumers in (1, 2) for keys, stages in ((128, 3), (128, 2), (64, 2)))


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
        (not c.pack_gqa or c.multicast == 0, f"pack_gqa beside multicast {c.multicast}, which shares tiles of single heads"),
        (1 <= c.splits <= MAX_SPLITS, f"{c.splits} splits of a tile's keys: 1 to {MAX_SPLITS}"),
        (c.splits == 1 or not c.out_over_query, "splits beside out_over_query: partial results leave from registers"),
        (c.splits == 1 or c.out_parts == 1, f"splits beside {c.out_parts} parts of results, which leave from registers"),
        (c.splits == 1 or p.num_q_heads <= MAX_GRID_Y, f"{p.num_q_heads} query heads exceed the {MAX_GRID_Y} of a merge"),
        (c.splits == 1 or (parts <= _MAX_PARTS and parts * (p.head_dim_v + 1) * 4 <= _MAX_WORKSPACE),
         f"{parts} partial rows of {p.head_dim_v} columns: at most {_MAX_PARTS}, {_MAX_WORKSPACE} bytes"),
    )


def splits_for(problem: AttentionProblem, target: Target, config: Config) -> int:
    """As many as the estimate takes the least time with: parts fill the SMs in few rounds. 1 where the batch must not matter."""
    p, packed = problem, packed_heads(problem, config)
    if p.batch_invariant:
        return 1
    tiles = -(-p.seq_q // queries_of(p, config)) * (p.num_q_heads // packed)
    tiles = tiles + p.batch * (p.num_q_heads // packed) if p.layout == "ragged" else tiles * p.batch
    keys = cut.keys_in_sight(p) // (max(p.batch, 1) if p.layout == "ragged" else 1)
    rows = p.seq_q * (1 if p.layout == "ragged" else p.batch) * p.num_q_heads
    places = max(target.sm_count * config.resident, 1)

    def time(splits: int) -> float:
        merge = _MERGE + splits * rows / _MERGED_ROWS if splits > 1 else 0.0
        return -(-tiles * splits // places) * config.resident * (keys / splits + _TILE) + merge

    return min(range(1, max(1, min(keys // _FEWEST_KEYS, MAX_SPLITS)) + 1), key=time)


def of_few_queries(problem: AttentionProblem, target: Target) -> Iterator[Config]:
    """For calls that do not fill a tile of two consumers, or whose tiles leave SMs idle: heads packed, keys split, legal or not."""
    p = problem
    queries = p.seq_q // (max(p.batch, 1) if p.layout == "ragged" else 1)
    for tile in () if p.batch_invariant else _FEW:
        config = replace(tile, pack_gqa=2 <= p.group_size <= _ROWS)
        config = replace(config, splits=splits_for(p, target, config))
        if config.splits > 1 or (config.pack_gqa and queries < 2 * _ROWS):
            yield config


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
