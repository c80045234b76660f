"""What the rows of rules.py ask of a problem, and the thresholds behind it, each with its measurement."""

from __future__ import annotations

from typing import Any

from kernelgen.targets import Target

# Rows of a up to which skinny_sm90 is the better Hopper product whatever the estimate of the other says, which knows tiles and not how
# much of b is on its way (H200, 2026-11-30: at 8 rows its choices took 1.3 - 1.7 x the time). And columns of b from which it is worse for
# more than 128 rows (192 - 512 rows: best for 576 and 2112 columns, never for 4096).
# Of many small products in a batch dense_sm90 is the better one sooner (64 rows: 9.0 us for 9.7, 8.7 for 9.1; 32 rows: 7.7 and 7.4, 7.7 and
# 7.3; tools/bench/results/tried/h200_batched.json).
# With more than 32 rows of fp8, sums promoted, and 48 of 16 bits the tiles of dense_sm90 are the better ones more often than not, and the
# estimates decide (64 rows: fp8 up to 1.3 x as fast as skinny_sm90, 16 bits 1.0 - 1.11; 32 rows of fp8: slower but for 24576 columns;
# tools/bench/results/tried/h200_tune_few_rows.json).
FEW_ROWS, FEW_COLUMNS, FEW_ROWS_OF_MANY, FEW_ROWS_OF_FP8, FEW_ROWS_OF_HALVES = 64, 4096, 32, 32, 48
# Columns of b from which more of 16 bits are dense_sm90's in any case: 64 and 128 rows of 6144, 8192, 24576 columns 0.84 - 0.99 x the time
# of skinny_sm90's best (h200_tune_skinny.json, h200_tune_few_rows.json there), which the estimates do not know: 96 rows took 1.3 x.
WIDE_COLUMNS = 6144
# Rows from which dense tiles, which can share K too, were the better product for few columns as well (192 - 512 rows of 576 and
# 2112 columns: 0.5 - 1.05 of the time of skinny_sm90's best; fp8, 256 and 512 rows: 0.76 - 0.9; H200, 2026-11-30,
# tools/bench/results/tried/h200_tune_dense.json, h200_tune_few_rows.json).
DENSE_ROWS = 192


TILE_OF_128 = 128  # rows of prefill_sm90's tile


def _nothing_masked(p: Any) -> bool:
    """Dense attention of which every row sees every key: what torch's kernels do as the contract says, NaN included."""
    return p.layout == "dense" and not (p.causal or p.windowed or p.kv_lens or p.mask or p.block_mask or p.variant)


def _measured_attention(p: Any) -> bool:
    """The calls for which kernels and libraries were measured beside each other: dense and ragged 16-bit ones, of what may be asked beside
    that with a window, a soft-cap or the LSE. (With kv_lens a library gets a copy of v.)"""
    others = p.kv_lens or p.mask or p.block_mask or p.variant or p.alibi or p.sinks or p.requires_grad
    return not others and p.q_dtype == p.kv_dtype and p.q_dtype in ("bf16", "fp16") and 64 <= p.head_dim == p.head_dim_v <= 256


# Where FlashAttention-4 and cuDNN were ahead of ours (H200, bf16).
#
# FA4_FEW, FA4_KEYS  fewer than a tile of queries over many keys, where prefill_sm90 neither splits nor packs (64 over 4,096: 0.69 x
#                 split_mma's time; 2026-11-30, tools/bench/results/h200_dispatch.json)
# CUDNN_LENGTHS   D 128 without a mask, queries and keys in this range, CUDNN_HEADS and more heads of the batch: 0.96 x of our time at
#                 8 x 512, 1.05 x at 16 x 1,024 (2026-12-01, tools/bench/results/h200_prefill_variants.json)
FA4_FEW, FA4_KEYS, CUDNN_LENGTHS, CUDNN_HEADS = 64, 4096, range(512, 1024), 128


def fewer_than_a_tile(p: Any) -> bool:
    queries, keys = _lengths(p)
    plain = _measured_attention(p) and p.layout == "dense" and not (p.windowed or p.soft_cap)
    return plain and FA4_FEW <= queries < TILE_OF_128 and keys >= FA4_KEYS


def long_wide_heads(p: Any) -> bool:
    """Where split_mma's items, cut finer than prefill_mma's tiles, were the faster ones though there are tiles for every SM."""
    plain = not (p.windowed or p.batch_invariant)
    return _measured_attention(p) and plain and p.layout == "dense" and p.head_dim >= 128 and min(p.seq_q, p.seq_k) >= 2048


def hopper_prefill(p: Any) -> bool:
    """A tile of queries and more for prefill_sm90, and nothing that makes its logits one by one. (Dense calls were timed; the rest of it is
    right on a GPU and has the same loop. A batch-invariant call may not look at means.)"""
    queries, keys = _lengths(p)
    others = p.mask or p.block_mask or p.variant or p.alibi or p.requires_grad or p.batch_invariant
    wide = min(p.head_dim, p.head_dim_v) >= 64
    return not others and wide and min(queries, p.seq_k // max(p.batch, 1) if p.layout == "ragged" else keys) >= TILE_OF_128


# A prefill over pages for paged_sm90 (H200, 2026-12-01, bf16, tools/bench/results/h200_paged_prefill.json).
#
# PAGED_QUERIES  of the longest request: 128 1.6 - 2.4 x as fast as paged_mma, 64 (many requests) 0.87 - 0.97 x
# PAGED_MEAN     of requests in the mean: decodes among them fill one row of 64, and read the keys once for each head
# PAGED_TILES    row tiles of all heads by SM: 0.97 was timed (one request of 512), fewer want split keys
PAGED_QUERIES, PAGED_MEAN, PAGED_TILES = 128, 64, 0.75


def paged_prefill(p: Any, target: Target) -> bool:
    """Pages of whole groups of eight rows (8 1.2 x, 16 1.75 x, 64 2.2 x, 256 2.4 x; single rows 0.6 - 0.9 x), features that were timed
    or have the same loop."""
    if p.seq_q is None or p.max_seq_q is None or p.mask or p.variant or p.alibi or p.batch_invariant:
        return False
    tiles = -(-p.seq_q // TILE_OF_128) * p.num_q_heads
    wide = min(p.head_dim, p.head_dim_v) >= 64 and (p.one_page or p.page_size % 8 == 0)
    many = p.max_seq_q >= PAGED_QUERIES and p.seq_q >= PAGED_MEAN * p.batch
    return wide and many and tiles >= PAGED_TILES * (target.sm_count or 0)


def few_queries(p: Any, target: Target) -> bool:
    """Where prefill_sm90 splits keys, or packs the heads of a group into 64 rows."""
    config = _of_few_queries(p, target)
    return config is not None and (config.splits > 1 or config.consumers == 1)


def packed_queries(p: Any, target: Target) -> bool:
    """Where prefill_sm90 packs the heads of a group, whose tiles leave no SM idle."""
    return _of_few_queries(p, target) is not None


def _of_few_queries(p: Any, target: Target) -> Any:
    from kernelgen.kernels.attention.prefill_sm90_split import leading

    return leading(p, target)


def cudnn_lengths(p: Any) -> bool:
    return (_measured_attention(p) and _nothing_masked(p) and p.head_dim == 128 and not p.soft_cap
            and p.seq_q in CUDNN_LENGTHS and p.seq_k in CUDNN_LENGTHS and p.batch * p.num_q_heads >= CUDNN_HEADS)


# When dense and ragged attention splits its keys over SMs or threads. Reasoned from the measured kernels (docs/design/
# attention_inference.md), not measured as thresholds.
#
# DECODE_QUERIES  of a request: a quarter of prefill_mma's smallest tile, which is mostly empty then
# PACKED_ROWS     queries x heads of a group that one tile of split_mma holds: keys are read once for all of them, where prefill_mma
#                 reads them for each query head
# LONG_KEYS       keys from which there is something to split: two of the shortest chunks
# KEYS_PER_QUERY  for more rows: below it the partial results cost as much as the keys
# TILE_ROWS       queries of prefill_mma's tile where there are few
# PANEL_ROWS      packed rows of prefill_cpu's shortest task
DECODE_QUERIES, PACKED_ROWS, LONG_KEYS, KEYS_PER_QUERY, TILE_ROWS, PANEL_ROWS = 16, 64, 512, 4, 64, 32


def _lengths(p: Any) -> tuple[int, int]:
    """Queries and keys in sight of a request; of ragged ones the mean, which is all that is known."""
    requests = max(p.batch, 1) if p.layout == "ragged" else 1
    queries, keys = -(-p.seq_q // requests), p.seq_k // requests
    return queries, keys if p.window[0] is None else min(keys, queries + p.window[0])


def decode(p: Any) -> bool:
    """Few rows over long keys. A batch-invariant call may not look at what the batch decides: means, and how long the cache is."""
    queries, keys = _lengths(p)
    few = queries <= DECODE_QUERIES and queries * p.group_size <= PACKED_ROWS
    return few and (p.layout == "dense" if p.batch_invariant else keys >= LONG_KEYS)


def few_tiles(p: Any, target: Target) -> bool:
    """Long keys, and less than a tile of prefill_mma for every SM."""
    queries, keys = _lengths(p)
    tiles = -(-queries // TILE_ROWS) * p.num_q_heads * p.batch
    return not p.batch_invariant and keys >= max(LONG_KEYS, KEYS_PER_QUERY * queries) and tiles < target.sm_count


def few_tasks(p: Any, target: Target) -> bool:
    """Long keys, and less than a task of prefill_cpu for every thread."""
    queries, keys = _lengths(p)
    tasks = -(-queries * p.group_size // PANEL_ROWS) * p.num_kv_heads * p.batch
    return not p.batch_invariant and keys >= max(LONG_KEYS, KEYS_PER_QUERY * queries) and tasks < target.sm_count


def many_products(p: Any, target: Target) -> bool:
    """A batch of small products that fills the chip, of 129 rows and more, too: ours take 0.94 - 0.96 of torch.bmm's time at 1,024."""
    from kernelgen.kernels.gemm import skinny_sm90

    return skinny_sm90.many_products(p, target)


def skinny(p: Any, target: Target) -> bool:
    """Few rows, where b's bytes are what counts, and else by the estimates of both Hopper products (imported when one is called)."""
    from kernelgen.kernels.gemm import dense_sm90, skinny_sm90
    from kernelgen.kernels.gemm.sm90 import kind_of_sums

    if many_products(p, target):
        return p.m <= FEW_ROWS_OF_MANY
    if p.m > 128 and (p.n >= FEW_COLUMNS or p.m >= DENSE_ROWS):
        return False
    few = FEW_ROWS  # of a batch, and of fp8 that is not promoted, too
    if p.batch == 1:
        halves = p.a_dtype in ("bf16", "fp16")
        few = FEW_ROWS_OF_FP8 if kind_of_sums(p) != "plain" else FEW_ROWS_OF_HALVES if halves else FEW_ROWS
        if halves and p.m > few and p.n >= WIDE_COLUMNS:
            return False
    return p.m <= few or skinny_sm90.estimate(p, target) <= dense_sm90.estimate(p, target)


# Groups of rows for CuTe-DSL (H200, 2026-12-01, bf16, tools/bench/results/tried/h200_grouped_sm90_cute.json).
#
# CUTE_ROWS    of a group in the mean, from which its gathered rows take 0.80 - 0.85 x the time of grouped_sm90 (256 to 8,192; 32: 0.99)
# CUTE_GROUPS  from which rows that lie in order do as well: 0.89 - 1.00 x (4 and 8 groups of thousands of rows: 0.99, 1.00)
# CUTE_N, CUTE_K  least extents of a group's matrix that was timed
CUTE_ROWS, CUTE_GROUPS, CUTE_N, CUTE_K = 128, 32, 1536, 768


def cute_groups(p: Any) -> bool:
    timed = p.grouping == "rows" and not p.scattered and p.n >= CUTE_N and p.k >= CUTE_K
    return timed and p.m >= CUTE_ROWS * p.batch and (p.gathered or p.batch >= CUTE_GROUPS)


# Outputs, and depth, from which dense_sm90_cute was timed with a user's epilogue (ungated, 4,096 rows and columns or more). Fewer rows or
# columns than EPILOGUE_SIDE would be tiles of another shape.
EPILOGUE_OUTPUTS, EPILOGUE_SIDE, EPILOGUE_K = 4096 * 4096, 1024, 1024


def long_epilogue(p: Any) -> bool:
    long = p.m * p.n >= EPILOGUE_OUTPUTS and min(p.m, p.n) >= EPILOGUE_SIDE and p.k >= EPILOGUE_K
    return long and p.epilogue is not None and not p.epilogue.gated


# Codes from which packed_sm90 was measured: fewer are read in less time than its start takes.
MANY_CODES = 5760 * 2880


def one_wave(p: Any, target: Target) -> bool:
    """What packed_sm90 was measured for: all of its blocks at once, with something to read for each."""
    from kernelgen.kernels.gemm import packed_sm90

    return p.n * p.k >= MANY_CODES and bool(packed_sm90.supports(p, target)) and packed_sm90.one_wave(p, target)


def plain_gemm(p: Any) -> bool:
    return not (p.bias or p.activation or p.accumulate_c) and p.a_dtype == p.b_dtype == p.out_dtype and p.a_dtype in ("bf16", "fp16")


def few_tokens(p: Any) -> bool:
    """Where moe/small_cuda was faster than the composition: up to eight tokens."""
    return p.tokens <= 8
