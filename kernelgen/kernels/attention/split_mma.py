"""Host side of attention/split_mma: dense and ragged attention of few query rows over many keys, for sm_80 and later.

Keys are split over blocks and the parts merged, as planned calls do (paged_mma), but without a plan: the cut is a few numbers
among the arguments, worked out on the host where it knows the lengths and by the kernel where it does not. So nothing of a call
outlives it: the workspace comes from torch's allocator each time, and a captured CUDA graph holds all that it needs.

The kernel: templates/include/kernelgen/attention/mma_split.cuh, its cut split_cut.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kernelgen.kernels.attention import paged_mma
from kernelgen.kernels.attention.mma import Config, address, options, shared_memory_of, words_of
from kernelgen.kernels.attention.paged_mma import MERGE_THREADS
from kernelgen.kernels.attention.prefill_mma import MAX_TOKENS, check_factor, scalars_of, supports_unplanned
from kernelgen.kernels.attention.schedule import CHUNK_UNIT, Division, item_bound, make_schedule
from kernelgen.kernels.base import KernelFamily
from kernelgen.params import ParamStruct
from kernelgen.problems.attention import AttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import AttentionTensors
from kernelgen.verdicts import Verdict, first_no

# struct SplitMmaParams of split_params.cuh.
_PLAIN = ("q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "kv_lens")
_WORKSPACE = ("partial_out", "partial_lse")
_RARE = ("sinks", "alibi_slopes", "mask", "mask_indptr", "variant_words", "q_scale", "k_scale", "v_scale")
PARAMS = ParamStruct((
    *((name, "ptr") for name in _PLAIN + _WORKSPACE + _RARE),
    ("q_batch", "i64"), ("q_row", "i64"), ("q_head", "i64"),
    ("k_batch", "i64"), ("k_row", "i64"), ("k_head", "i64"),
    ("v_batch", "i64"), ("v_row", "i64"), ("v_head", "i64"),
    ("out_batch", "i64"), ("out_row", "i64"), ("out_head", "i64"),
    ("lse_batch", "i64"), ("lse_row", "i64"), ("lse_head", "i64"),
    ("alibi_batch", "i64"), ("alibi_head", "i64"),
    ("mask_batch", "i64"), ("mask_row", "i64"), ("mask_head", "i64"), ("mask_key", "i64"),
    ("q_scale_batch", "i64"), ("q_scale_head", "i64"), ("k_scale_batch", "i64"), ("k_scale_head", "i64"),
    ("v_scale_batch", "i64"), ("v_scale_head", "i64"),
    ("seq_q", "i32"), ("seq_k", "i32"), ("batch", "i32"), ("group_size", "i32"),
    ("window_left", "i32"), ("window_right", "i32"), ("q_keep", "i32"), ("q_flip", "i32"),
    ("num_q_heads", "i32"), ("num_kv_heads", "i32"),
    ("chunk", "i32"), ("splits", "i32"), ("slots", "i32"), ("min_chunk", "i32"),
    ("logit_scale", "f32"), ("cap_scale", "f32"), ("v_factor", "f32"),
))
ENTRY, MERGE_ENTRY = "attention_split_mma", "attention_split_merge"

# Each warp reads the lengths of so many requests at most, 32 at a time. A batch of that size has work for every SM without a
# split, so a dense one is simply not split; a ragged one would still need the pass to find its rows.
MAX_SCANNED = 1024
_MAX_BLOCKS = 2**31 - 1
_MAX_WORKSPACE = 1 << 32


@dataclass(frozen=True)
class SplitConfig:
    """A tile, and how a call is cut for it on the target's number of SMs. Only the tile is compiled in."""

    tile: Config
    division: Division

    def __str__(self) -> str:
        chunk = self.division.fixed_chunk
        return f"{self.tile} " + (f"chunks of {chunk}" if chunk else f"{self.division.slots} items a head")


@dataclass(frozen=True)
class Cut:
    """What a launch needs of a cut: fields of the same names in SplitMmaParams, and bounds.

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
    """Where lengths are on the device: what the host can tell, and bounds for the rest."""
    p, keys = problem, keys_in_sight(problem)
    if p.layout == "ragged":
        return _cut_of_ragged(p, division, keys)
    tiles = -(-p.seq_q * p.group_size // division.block_rows)
    whole = max(-(-keys // CHUNK_UNIT), 1) * CHUNK_UNIT
    if division.fixed_chunk or not p.kv_lens:
        lengths = np.full(p.batch, keys, np.int32)
        chunk = division.fixed_chunk or make_schedule(p.seq_q, lengths, p.group_size, division).chunk
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


def _workspace_rows(problem: AttentionProblem, config: SplitConfig, cut: Cut) -> int:
    return cut.items * problem.num_kv_heads * config.tile.block_q if cut.split else 0


def supports(problem: AttentionProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (bool(unplanned := supports_unplanned(p, target, "split_mma")), unplanned.reason),
        (p.seq_q * p.group_size <= MAX_TOKENS, f"{p.seq_q} queries of {p.group_size} heads exceed {MAX_TOKENS} rows"),
        (p.num_q_heads <= paged_mma.MAX_GRID_Y, f"{p.num_q_heads} query heads exceed {paged_mma.MAX_GRID_Y}"),
        (p.layout == "dense" or p.batch <= MAX_SCANNED, f"{p.batch} ragged requests exceed the {MAX_SCANNED} that a block looks through"),
    )


def legal(problem: AttentionProblem, target: Target, config: SplitConfig) -> Verdict:
    """Does the config fit the problem and the target: divisibility, registers, shared memory, grid and workspace?"""
    cut, rows = cut_of(problem, config.division), config.division.block_rows
    blocks = cut.items * problem.num_kv_heads * config.tile.value_splits
    workspace = 4 * (problem.head_dim_v + 1) * _workspace_rows(problem, config, cut)
    return first_no(
        (rows == config.tile.block_q, f"items of {rows} rows for tiles of {config.tile.block_q}"),
        (bool(tile := paged_mma.legal(problem, target, config.tile)), tile.reason),
        (blocks <= _MAX_BLOCKS, f"{blocks} blocks exceed the {_MAX_BLOCKS} of a grid"),
        (workspace <= _MAX_WORKSPACE, f"partial results of {workspace} bytes exceed {_MAX_WORKSPACE}"),
    )


def _rows(problem: AttentionProblem) -> int | None:
    """Packed rows of a request; of ragged ones the mean, which the host knows. None where the batch must not matter."""
    p = problem
    if p.layout == "dense":
        return p.seq_q * p.group_size
    return None if p.batch_invariant else -(-p.seq_q // max(p.batch, 1)) * p.group_size


def candidates(problem: AttentionProblem, target: Target) -> Iterator[SplitConfig]:
    """Legal configs, best guess first: those of planned calls."""
    for tile in dict.fromkeys(paged_mma.configs_for(problem, _rows(problem))):
        config = SplitConfig(tile, paged_mma.division(problem, target, tile))
        if legal(problem, target, config):
            yield config


def spec(problem: AttentionProblem, target: Target, config: SplitConfig) -> KernelSpec:
    """The specialisation: dtype, head dims, features in use, alignment class and tile; nothing that varies per call."""
    p, tile = problem, config.tile
    parameters = options(p, tile, ragged=p.layout == "ragged", kv_lens=p.kv_lens, out_element=p.out_dtype, merge_threads=MERGE_THREADS)
    return KernelSpec.make(
        "_".join(["attention_split_mma", *words_of(parameters, tile)]), "attention/split_mma.cu.jinja", "nvrtc", parameters,
        params=PARAMS, params_type="kernelgen::SplitMmaParams", entries=(ENTRY, MERGE_ENTRY), target=target,
    )


def workspace(count: int, device: torch.device) -> torch.Tensor:
    """Memory for partial results: rows of partial_out, then partial_lse."""
    return torch.empty(count, dtype=torch.float32, device=device)


def bind(problem: AttentionProblem, config: SplitConfig, kernel: Any, tensors: AttentionTensors) -> Callable[[AttentionTensors], None]:
    """The closure of a repeated call: packs addresses, launches the items and, where requests may be split, the merge."""
    p, tile, cut = problem, config.tile, cut_of(problem, config.division)
    device = tensors.q.device.index or 0
    check_factor(p, tensors)
    attend = kernel.prepare(device, grid=(cut.items * p.num_kv_heads * tile.value_splits, 1, 1), block=(tile.threads, 1, 1),
                            shared_memory=shared_memory_of(p, tile))
    scalars = PARAMS.pack_scalars(scalars_of(p, tensors) | {
        "num_q_heads": p.num_q_heads, "num_kv_heads": p.num_kv_heads, "chunk": cut.chunk, "splits": cut.splits,
        "slots": config.division.slots, "min_chunk": config.division.min_chunk,
    })
    pack = PARAMS.pointer_packer.pack
    given = [name for name in _PLAIN if not (name == "lse" and not p.return_lse)]
    names = _PLAIN + _RARE

    def pointers(t: AttentionTensors) -> list[int]:
        return [address(getattr(t, name)) if name in given or name in _RARE else 0 for name in names]

    first = len(_PLAIN)

    def whole(t: AttentionTensors) -> None:
        at = pointers(t)
        attend(pack(*at[:first], 0, 0, *at[first:]) + scalars)

    rows, columns = _workspace_rows(p, config, cut), p.head_dim_v
    if not cut.split or not rows:
        return whole
    total = math.prod(tensors.q.shape[:-2])
    merge = kernel.entry(MERGE_ENTRY).prepare(device, grid=paged_mma.merge_grid(p, total), block=(MERGE_THREADS, 1, 1))

    def split(t: AttentionTensors) -> None:
        # Freed on return, and reused only by what this stream does later; under capture the graph's own pool does the same.
        partial = workspace(rows * (columns + 1), t.q.device)
        at, partial_out = pointers(t), partial.data_ptr()
        params = pack(*at[:first], partial_out, partial_out + 4 * rows * columns, *at[first:]) + scalars
        attend(params)
        merge(params)

    return split


def coverage() -> Iterable[tuple[AttentionProblem, SplitConfig | None]]:
    """Problems that together reach every branch of the template."""
    base = AttentionProblem("dense", 2, 1, 4000, 32, 8, 128, 128, "bf16", "bf16", "bf16")
    ragged = replace(base, layout="ragged", seq_q=2, seq_k=8000)
    small: dict[str, Any] = {"head_dim": 64, "head_dim_v": 64}
    yield base, None
    yield replace(base, kv_lens=True, return_lse=True), None
    yield replace(base, kv_lens=True, seq_q=9, causal=True, window=(300, None), sinks=True, soft_cap=True), None
    yield replace(base, kv_lens=True, seq_q=300, causal=True, return_lse=True, **small), None
    yield replace(base, head_dim=72, head_dim_v=40, q_dtype="fp16", kv_dtype="fp16", out_dtype="fp16", alignment=2, alibi=True), None
    yield replace(base, mask="dense", kv_lens=True, **small), None
    yield ragged, None
    yield replace(ragged, kv_lens=True, causal=True, mask="packed", sinks=True, return_lse=True, batch_invariant=True, **small), None
    yield replace(ragged, mask="flat", window=(100, 7), alibi=True, **small), None
    fp8 = replace(base, kv_dtype="e4m3", scales="head", kv_lens=True)
    yield fp8, None
    yield replace(fp8, q_dtype="e5m2", kv_dtype="e5m2", layout="ragged", scales="request_head", seq_q=600, **small), None
    yield replace(base, head_dim=512, head_dim_v=512, kv_lens=True, return_lse=True), None
    yield replace(base, num_kv_heads=1, head_dim=576, head_dim_v=512), None


FAMILY = KernelFamily(
    name="attention/split_mma", op="attention", target_kind="cuda", toolchain="nvrtc", supports=supports,
    candidates=candidates, legal=legal, spec=spec, bind=bind, coverage=coverage,
)
