"""Host side of attention/paged_mma: planned attention over paged caches with mma.sync, for sm_80 and later.

Items, chunks and the arrays of a plan: docs/design/attention_inference.md. The kernel: templates/include/kernelgen/
attention/mma_paged.cuh, its second stage paged_merge.cuh; the choices made here: docs/design/cuda_attention_mma.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from kernelgen.errors import NoBackendError
from kernelgen.kernels.attention import prefill_mma
from kernelgen.kernels.attention.mma import (
    FP8,
    HALVES,
    REGISTERS_PER_SM,
    Config,
    Problem,
    address,
    legal_common,
    logit_scalars,
    options,
    plain_rope,
    round_up,
    scaled,
    shared_memory_bound,
    shared_memory_of,
    supports_common,
    two_strides,
    words_of,
)
from kernelgen.kernels.attention.schedule import CHUNK_UNIT, Division
from kernelgen.kernels.base import KernelFamily
from kernelgen.params import ParamStruct
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import PagedTensors
from kernelgen.verdicts import Verdict, first_no

# struct PagedMmaParams of paged_params.cuh.
_PLAIN = ("q", "k", "v", "out", "lse", "q_indptr", "kv_lens", "page_begin", "item_indptr", "chunk", "partial_out",
          "partial_lse", "page_indices")
_RARE = ("q_rope", "k_rope", "sinks", "alibi_slopes", "mask", "mask_indptr", "variant_words", "q_scale", "k_scale", "v_scale")
PARAMS = ParamStruct((
    *((name, "ptr") for name in _PLAIN + _RARE),
    ("q_row", "i64"), ("q_head", "i64"), ("q_rope_row", "i64"), ("q_rope_head", "i64"),
    ("k_page", "i64"), ("k_row", "i64"), ("k_head", "i64"),
    ("v_page", "i64"), ("v_row", "i64"), ("v_head", "i64"),
    ("k_rope_page", "i64"), ("k_rope_row", "i64"),
    ("out_row", "i64"), ("out_head", "i64"), ("lse_row", "i64"), ("lse_head", "i64"),
    ("alibi_batch", "i64"), ("alibi_head", "i64"),
    ("q_scale_batch", "i64"), ("q_scale_head", "i64"), ("k_scale_batch", "i64"), ("k_scale_head", "i64"),
    ("v_scale_batch", "i64"), ("v_scale_head", "i64"),
    ("batch", "i32"), ("num_q_heads", "i32"), ("num_kv_heads", "i32"), ("group_size", "i32"), ("q_rows", "i32"),
    ("page_size", "i32"), ("page_shift", "i32"),
    ("window_left", "i32"), ("window_right", "i32"), ("q_keep", "i32"), ("q_flip", "i32"),
    ("logit_scale", "f32"), ("cap_scale", "f32"), ("v_factor", "f32"), ("k_factor", "f32"),
))
ENTRY, MERGE_ENTRY = "attention_paged_mma", "attention_paged_merge"
MERGE_THREADS = 128

_MAX_POSITION = 1 << 29  # positions plus windows stay within int32
MAX_GRID_Y = 65535
_MERGE_BLOCKS = 1 << 14  # of the second stage: up to it every head gets a block of its own, in y, which ends at MAX_GRID_Y
_BLOCKS_PER_SM = 32
# Items per place that can run one. One wave of long chunks reads a 16-bit cache at 3.9 - 4.25 TB/s, three waves at 3.6 - 4.0,
# six at 3.1 - 3.8 (H200, 537 MB, tools/bench/results/tried/h200_decode_configs.json); of an fp8 cache, whose conversion is the limit, three
# waves are faster than one.
_DECODE_WAVES, _DECODE_WAVES_FP8 = 1, 3
_MIN_CHUNK = 256
_INVARIANT_CHUNK = 1024  # of batch-invariant calls
_DECODE_ROWS = 16
_MIXED_ROWS = 64


def _out_dtype(problem: PagedAttentionProblem) -> str:
    return problem.out_dtype or ("bf16" if problem.q_dtype in FP8 else problem.q_dtype)


def supports(problem: PagedAttentionProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cuda" and target.capability >= 80, f"paged_mma needs sm_80 or later, got {target}"),
        (bool(common := supports_common(p)), common.reason),
        (p.page_size <= _MAX_POSITION, f"page size {p.page_size} exceeds {_MAX_POSITION}"),
        (p.rope_dim % 8 == 0 and 0 <= p.rope_dim < p.head_dim, f"rope_dim {p.rope_dim} is not a multiple of 8 below {p.head_dim}"),
        (p.rope_dim == 0 or p.num_kv_heads == 1, f"MLA has one latent head, got {p.num_kv_heads}"),
        (plain_rope(p) == 0 or (p.kv_dtype in FP8 and p.rope_dtype == p.q_dtype and p.q_dtype in HALVES),
         f"k_rope_cache of {p.rope_dtype} beside a latent cache of {p.kv_dtype} under q of {p.q_dtype}: neither one type nor an fp8 "
         "latent part with a 16-bit rope part of q's type"),
        (plain_rope(p) == 0 or (p.head_dim - p.rope_dim) % 16 == 0,
         f"latent dim {p.head_dim - p.rope_dim} is not a multiple of 16 beside a k_rope_cache of another dtype"),
        (_out_dtype(p) in HALVES if p.q_dtype in FP8 else _out_dtype(p) == p.q_dtype,
         f"out dtype {_out_dtype(p)} does not fit q dtype {p.q_dtype}"),
        (p.kv_scales != "page" or p.kv_dtype in FP8, f"page scales need an fp8 cache, got {p.kv_dtype}"),
    )


def legal(problem: Problem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target: divisibility, registers, shared memory?"""
    return first_no(
        (CHUNK_UNIT % config.block_k == 0, f"block_k {config.block_k} does not divide the chunk's unit of {CHUNK_UNIT} keys"),
        (bool(common := legal_common(problem, target.shared_memory_per_block, config, target)), common.reason),
    )


# Few rows: the time is that of reading the cache, so what counts is the bytes in flight. An H200 needs about 40 KB per SM at
# 4.8 TB/s and 1 us of loaded latency; at D = 128, 16 bit, 227 KB of shared memory:
#
#   config                blocks x warps per SM    bytes in flight per SM (tiles loaded ahead)
#   16x32 w1 s3           4 x 1                    4 x 2 x 16 KB = 128 KB
#   16x64 w1 s2           3 x 1                    3 x 1 x 32 KB =  96 KB
#   16x32 w1 s2 keys4     1 x 4                    4 x 1 x 16 KB =  64 KB
#   16x16 w1 s3 keys4     2 x 4                    8 x 2 x  8 KB = 128 KB
#
# A warp takes about 1,000 issue slots for 32 keys, and the memory delivers 32 keys of 512 bytes in 800 cycles per SM: one
# warp per scheduler is enough. Measured (H200, bf16, the same file): 3.56 - 3.99, 3.16 - 3.62, 3.54 - 3.89 and 3.35 - 3.83
# TB/s at three waves. An fp8 cache wants the four warps that share a tile: 1.64 TB/s against 1.11. The later ones are for
# wide heads and small shared memory.
DECODE = (
    Config(16, 32, 1, 3), Config(16, 64, 1, 2), Config(16, 16, 1, 3, key_warps=4), Config(16, 32, 1, 2, key_warps=4),
    Config(16, 32, 1, 2), Config(16, 16, 1, 2), Config(16, 16, 1),
)
# Up to 64 rows, and batches of unknown or mixed lengths: every warp loads, those that have rows multiply.
MIXED = (Config(64, 64, 4, 2), Config(64, 32, 4, 2), Config(64, 64, 4), Config(64, 32, 4), Config(64, 16, 4), Config(32, 16, 2))


def _rows(problem: PagedAttentionProblem) -> int | None:
    """Most packed rows of a request; None where that is unknown, or must not matter."""
    if problem.max_seq_q is None or problem.batch_invariant:
        return None
    return problem.max_seq_q * max(problem.group_size, 1)


def configs_for(problem: Problem, rows: int | None) -> tuple[Config, ...]:
    """Configs for items of so many packed rows, best guess first, legal or not."""
    if rows is not None and rows <= _DECODE_ROWS:
        row: tuple[Config, ...] = DECODE if problem.kv_dtype not in FP8 else (DECODE[2], *DECODE)
    elif rows is None or rows <= _MIXED_ROWS:
        row = MIXED
    else:
        widest = max(problem.head_dim, problem.head_dim_v)
        row = (*next(configs for limit, configs in prefill_mma.TABLE if widest <= limit), *MIXED)
    splits = 2 if problem.head_dim_v > 256 else 1
    return tuple(config if config.value_splits == splits else replace(config, value_splits=splits) for config in row)


def candidates(problem: PagedAttentionProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first."""
    seen = set()
    for config in configs_for(problem, _rows(problem)):
        if config not in seen and legal(problem, target, config):
            seen.add(config)
            yield config


def _resident_blocks(problem: Problem, target: Target, config: Config) -> int:
    """Blocks that fit on an SM, by shared memory (1 KB of each block is the system's) and registers."""
    shared = shared_memory_bound(problem, config) + 1024
    registers = round_up(config.registers(problem.head_dim, problem.head_dim_v), 8)
    blocks = min((target.shared_memory_per_block + 1024) // shared, REGISTERS_PER_SM // (config.threads * registers))
    return max(1, min(blocks, _BLOCKS_PER_SM))


def division(problem: Problem, target: Target, config: Config) -> Division:
    """How a batch is cut for this config."""
    if problem.batch_invariant:
        return Division(config.block_q, 1, _MIN_CHUNK, _INVARIANT_CHUNK)
    waves = (_DECODE_WAVES_FP8 if problem.kv_dtype in FP8 else _DECODE_WAVES) if config.block_q <= _MIXED_ROWS else 1
    places = target.sm_count * _resident_blocks(problem, target, config) * waves
    return Division(config.block_q, max(1, places // (max(problem.num_kv_heads, 1) * config.value_splits)), _MIN_CHUNK)


def spec(problem: PagedAttentionProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, head dims, features in use, page kind, alignment class and config."""
    p = problem
    parameters = options(
        p, config, kv_lens=True, rope_dim=p.rope_dim, out_element=_out_dtype(p),
        page_kind=p.page_kind, mask_form={None: "kNoMask", "dense": "kFlatMask", "packed": "kPackedMask"}[p.mask],
        merge_threads=MERGE_THREADS,
    )
    words = ["attention_paged_mma", p.page_kind, *(word for word in words_of(parameters, config) if word != "kvlens")]
    return KernelSpec.make(
        "_".join(words), "attention/paged_mma.cu.jinja", "nvrtc", parameters, params=PARAMS,
        params_type="kernelgen::PagedMmaParams", entries=(ENTRY, MERGE_ENTRY), target=target,
    )


def _scalars(problem: PagedAttentionProblem, t: PagedTensors) -> dict[str, int | float]:
    """Everything of Params that is fixed by shapes, strides and scalars."""
    p = problem
    values: dict[str, int | float] = {
        "q_row": t.q.stride(0), "q_head": t.q.stride(1), "out_row": t.out.stride(0), "out_head": t.out.stride(1),
        "q_rope_row": 0 if t.q_rope is None else t.q_rope.stride(0), "q_rope_head": 0 if t.q_rope is None else t.q_rope.stride(1),
        "k_rope_page": 0 if t.k_rope_cache is None else t.k_rope_cache.stride(0),
        "k_rope_row": 0 if t.k_rope_cache is None else t.k_rope_cache.stride(1),
        "lse_row": 0 if t.lse is None else t.lse.stride(0), "lse_head": 0 if t.lse is None else t.lse.stride(1),
    }
    for name, pages in (("k", t.k_cache), ("v", t.v_cache)):
        values |= {f"{name}_page": pages.stride(0), f"{name}_row": pages.stride(1), f"{name}_head": pages.stride(2)}
    for name, scales in (("q_scale", t.q_scale), ("k_scale", t.k_scale), ("v_scale", t.v_scale), ("alibi", t.alibi_slopes)):
        first, second = two_strides(scales)
        values |= {f"{name}_batch": first, f"{name}_head": second}
    # A window beyond every position is the same as none, and keeps the kernel's sums within int32.
    left, right = (min(side if side is not None else _MAX_POSITION, _MAX_POSITION) for side in p.window)
    values |= {"window_left": left, "window_right": 0 if p.causal else right}
    values |= logit_scalars(p, float(t.scale), t.soft_cap) | {"v_factor": float(t.v_factor), "k_factor": float(t.k_factor)}
    # The problem's counts are rounded up: the arrays say how many requests there are.
    values |= {"batch": t.arrays.batch, "num_q_heads": p.num_q_heads, "num_kv_heads": p.num_kv_heads, "group_size": p.group_size,
               "q_rows": t.q.shape[0], "page_size": p.page_size, "page_shift": p.page_size.bit_length() - 1}
    return values


def merge_grid(problem: Problem, rows: int) -> tuple[int, int, int]:
    """(query rows, heads): a block each, or one block for all heads of a row where that gives enough blocks."""
    return (rows, problem.num_q_heads if rows * problem.num_q_heads <= _MERGE_BLOCKS else 1, 1)


def bind(problem: PagedAttentionProblem, config: Config, kernel: Any, tensors: PagedTensors) -> Callable[[PagedTensors], None]:
    """The closure of a repeated run: packs addresses, launches the items and, where requests may be split, the merge.

    Shapes and strides are fixed; the plan's arrays and the number of items are read anew for each call.
    """
    if problem.kv_dtype in HALVES and not scaled(problem) and tensors.v_factor != 1.0:
        raise NoBackendError(f"v_factor: got {tensors.v_factor} for a {problem.kv_dtype} cache without scales, expected 1")
    device = tensors.q.device.index or 0
    scalars = PARAMS.pack_scalars(_scalars(problem, tensors))
    pack = PARAMS.pointer_packer.pack
    shared, block = shared_memory_of(problem, config), (config.threads, 1, 1)
    parts = problem.num_kv_heads * config.value_splits
    grid = merge_grid(problem, tensors.q.shape[0])
    launches: dict[int, Callable[[bytes], None]] = {}
    has_lse = problem.return_lse

    @cache
    def merge() -> Callable[[bytes], None]:
        """The second stage, loaded when a call first splits."""
        launch: Callable[[bytes], None] = kernel.entry(MERGE_ENTRY).prepare(device, grid=grid, block=(MERGE_THREADS, 1, 1))
        return launch

    def launch_of(items: int) -> Callable[[bytes], None]:
        launch = launches.get(items)
        if launch is None:
            launch = launches[items] = kernel.prepare(device, grid=(items * parts, 1, 1), block=block, shared_memory=shared)
        return launch

    def run(t: PagedTensors) -> None:
        a = t.arrays
        params = pack(
            t.q.data_ptr(), t.k_cache.data_ptr(), t.v_cache.data_ptr(), t.out.data_ptr(),
            t.lse.data_ptr() if has_lse else 0,  # type: ignore[union-attr]
            *a.addresses, a.pages.data_ptr(), address(t.q_rope), address(t.k_rope_cache),
            address(t.sinks), address(t.alibi_slopes), address(t.mask), address(a.mask_indptr), address(t.variant_words),
            address(t.q_scale), address(t.k_scale), address(t.v_scale),
        ) + scalars
        launch_of(a.num_items)(params)
        if a.partial is not None:
            merge()(params)

    return run


def coverage() -> Iterable[tuple[PagedAttentionProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    decode = PagedAttentionProblem(4, 4, 1, 4000, 32, 8, 128, 128, 16, "bf16", "bf16")
    mixed, prefill = replace(decode, seq_q=None, max_seq_q=None), replace(decode, seq_q=4000, max_seq_q=1000)
    small: dict[str, Any] = {"head_dim": 64, "head_dim_v": 64}
    yield decode, None
    yield replace(decode, return_lse=True), DECODE[2]
    yield replace(decode, page_size=48, num_kv_heads=32), DECODE[1]
    yield replace(decode, one_page=True, num_kv_heads=2, sinks=True, soft_cap=True), None
    yield mixed, None
    yield replace(mixed, head_dim=72, head_dim_v=40, page_size=5, causal=False, window=(100, 7), alignment=8, return_lse=True), None
    yield prefill, None
    yield replace(prefill, alibi=True, sinks=True, q_dtype="fp16", kv_dtype="fp16", **small), None
    yield replace(prefill, mask="packed", causal=False, **small), None
    yield replace(decode, mask="dense", **small), None
    fp8 = replace(decode, kv_dtype="e4m3", kv_scales="head")
    yield fp8, None
    yield replace(fp8, kv_scales="page"), DECODE[2]
    yield replace(fp8, kv_scales="page", kv_dtype="e5m2", q_dtype="fp16", max_seq_q=1000, page_size=24, **small), None
    yield replace(fp8, q_dtype="e4m3", q_scale=True, max_seq_q=16, window=(64, None), **small), None
    yield replace(decode, kv_dtype="e5m2", head_dim=72, head_dim_v=40, alignment=1), None
    mla = replace(decode, num_q_heads=128, num_kv_heads=1, head_dim=576, head_dim_v=512, rope_dim=64)
    yield mla, None
    yield replace(mla, num_q_heads=16, head_dim=80, head_dim_v=64, rope_dim=16, kv_dtype="e4m3", page_size=1, return_lse=True), None
    yield replace(mla, kv_dtype="e4m3", rope_dtype="bf16", kv_scales="request_head", return_lse=True), None
    yield replace(mla, q_dtype="fp16", kv_dtype="e5m2", rope_dtype="fp16", kv_scales="page", max_seq_q=None), None


FAMILY = KernelFamily(
    name="attention/paged_mma", op="paged_attention", target_kind="cuda", toolchain="nvrtc", supports=supports,
    candidates=candidates, legal=legal, spec=spec, bind=bind, coverage=coverage, division=division,
)
