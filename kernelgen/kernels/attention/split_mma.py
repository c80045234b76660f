"""Host side of attention/split_mma: dense and ragged attention of few query rows over many keys, for sm_80 and later.

Keys are split over blocks and the parts merged, as planned calls do (paged_mma), but without a plan: the cut is a few numbers
among the arguments, worked out on the host where it knows the lengths and by the kernel where it does not. So nothing of a call
outlives it: the workspace comes from torch's allocator each time, and a captured CUDA graph holds all that it needs.

The kernel: templates/include/kernelgen/attention/mma_split.cuh, its cut split_cut.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

from kernelgen.kernels.attention import cut, paged_mma
from kernelgen.kernels.attention.cut import MAX_SCANNED, SplitConfig, cut_of
from kernelgen.kernels.attention.mma import options, shared_memory_of, words_of
from kernelgen.kernels.attention.paged_mma import MERGE_THREADS
from kernelgen.kernels.attention.prefill_mma import MAX_TOKENS, check_factor, scalars_of, supports_unplanned
from kernelgen.kernels.base import KernelFamily
from kernelgen.params import ParamStruct
from kernelgen.problems.attention import AttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import AttentionTensors
from kernelgen.verdicts import Verdict, first_no

# struct SplitMmaParams of split_params.cuh. But for the partial results, pointers have the names of AttentionTensors.
PARAMS = ParamStruct((
    *((name, "ptr") for name in (
        "q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "kv_lens", "partial_out", "partial_lse", "sinks", "alibi_slopes",
        "mask", "mask_indptr", "variant_words", "q_scale", "k_scale", "v_scale")),
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
_PARTIAL_OUT, _PARTIAL_LSE = (PARAMS.pointers.index(name) for name in ("partial_out", "partial_lse"))
ENTRY, MERGE_ENTRY = "attention_split_mma", "attention_split_merge"

_MAX_BLOCKS = 2**31 - 1
_MAX_WORKSPACE = 1 << 32


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
    needed, rows = cut_of(problem, config.division), config.division.block_rows
    blocks = needed.items * problem.num_kv_heads * config.tile.value_splits
    workspace = 4 * sum(cut.workspace_floats(problem, config.division, needed))
    return first_no(
        (rows == config.tile.block_q, f"items of {rows} rows for tiles of {config.tile.block_q}"),
        (bool(tile := paged_mma.legal(problem, target, config.tile)), tile.reason),
        (blocks <= _MAX_BLOCKS, f"{blocks} blocks exceed the {_MAX_BLOCKS} of a grid"),
        (workspace <= _MAX_WORKSPACE, f"partial results of {workspace} bytes exceed {_MAX_WORKSPACE}"),
    )


def candidates(problem: AttentionProblem, target: Target) -> Iterator[SplitConfig]:
    """Legal configs, best guess first: those of planned calls."""
    for tile in dict.fromkeys(paged_mma.configs_for(problem, cut.mean_rows(problem))):
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


def bind(problem: AttentionProblem, config: SplitConfig, kernel: Any, tensors: AttentionTensors) -> Callable[[AttentionTensors], None]:
    """The closure of a repeated call: packs addresses, launches the items and, where requests may be split, the merge."""
    p, tile, division = problem, config.tile, config.division
    needed = cut_of(p, division)
    device = tensors.q.device.index or 0
    check_factor(p, tensors)
    attend = kernel.prepare(device, grid=(needed.items * p.num_kv_heads * tile.value_splits, 1, 1), block=(tile.threads, 1, 1),
                            shared_memory=shared_memory_of(p, tile))
    scalars = PARAMS.pack_scalars(scalars_of(p, tensors) | {
        "num_q_heads": p.num_q_heads, "num_kv_heads": p.num_kv_heads, "chunk": needed.chunk, "splits": needed.splits,
        "slots": division.slots, "min_chunk": division.min_chunk,
    })
    pack, gather = PARAMS.pointer_packer.pack, gather_addresses(tensors)
    columns, rows = cut.workspace_floats(p, division, needed)
    if not rows:
        return lambda t: attend(pack(*gather(t)) + scalars)
    total = math.prod(tensors.q.shape[:-2])
    merge = kernel.entry(MERGE_ENTRY).prepare(device, grid=paged_mma.merge_grid(p, total), block=(MERGE_THREADS, 1, 1))

    def split(t: AttentionTensors) -> None:
        partial = cut.workspace(columns + rows, t.q.device)
        addresses, partial_out = gather(t), partial.data_ptr()
        addresses[_PARTIAL_OUT], addresses[_PARTIAL_LSE] = partial_out, partial_out + 4 * columns
        params = pack(*addresses) + scalars
        attend(params)
        merge(params)

    return split


def gather_addresses(sample: AttentionTensors) -> Callable[[AttentionTensors], list[int]]:
    """What reads the addresses, in the order of Params, of calls that have the same tensors as ``sample``."""
    given = [(i, name) for i, name in enumerate(PARAMS.pointers) if isinstance(getattr(sample, name, None), torch.Tensor)]
    positions, read = [i for i, _ in given], attrgetter(*(name for _, name in given))
    empty = [0] * len(PARAMS.pointers)

    def gather(t: AttentionTensors) -> list[int]:
        addresses = empty.copy()
        for i, tensor in zip(positions, read(t)):
            addresses[i] = tensor.data_ptr()
        return addresses

    return gather


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
