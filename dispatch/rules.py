"""The rows that order backends. A higher score wins; the first row that matches a candidate gives its score.

Each note names the measurement behind the row (machine, date, command) or says that none is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernelgen.dispatch import cost
from kernelgen.targets import Target


@dataclass(frozen=True)
class Rule:
    """Candidates of ``backend`` (and ``kernel``, "" = any) for ``op`` on ``target_kind`` get ``score``.

    ``general``: a row for what no other speaks of; between candidates that only such rows name, the cost model decides.
    """

    op: str
    backend: str
    score: float
    note: str
    target_kind: str = ""
    capability: tuple[int, ...] = ()
    when: Callable[[Any], bool] = lambda problem: True
    kernel: str = ""
    general: bool = False
    fits: Callable[[Any, Target], bool] = lambda problem, target: True

    def concerns(self, op: str, kind: str, capability: int) -> bool:
        """May it speak of such a problem on such a target?"""
        return self.op in ("", op) and self.target_kind in ("", kind) and (not self.capability or capability in self.capability)

    def names(self, backend: str, kernel: str) -> bool:
        return self.backend == backend and self.kernel in ("", kernel)


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


def _nothing_masked(p: Any) -> bool:
    """Dense attention of which every row sees every key: what torch's kernels do as the contract says, NaN included."""
    return p.layout == "dense" and not (p.causal or p.windowed or p.kv_lens or p.mask or p.block_mask or p.variant)


def _cudnn_attention(p: Any) -> bool:
    """What cuDNN was measured for: 16-bit inputs (it has no others in torch) and its three head dims."""
    return _nothing_masked(p) and p.q_dtype == p.kv_dtype in ("bf16", "fp16") and p.head_dim == p.head_dim_v in (64, 128, 256)


def _measured_attention(p: Any) -> bool:
    """The calls for which libraries were measured beside each other: dense and ragged 16-bit ones without gradient."""
    return p.q_dtype == p.kv_dtype and p.q_dtype in ("bf16", "fp16") and 64 <= p.head_dim == p.head_dim_v <= 256 and not p.requires_grad


# Where FlashAttention-4 and cuDNN's graphs were the faster ones (H200, 2026-11-30, bf16, tools/bench/results/h200_dispatch.json).
#
# FA4_QUERIES      queries from which FlashAttention-4 was ahead of ours: 128 took 1.07 x, ragged requests of 256 1.35 x, 300 0.96 x
# FA4_FEW, FA4_KEYS  fewer of them over keys that make up for it (64 over 4,096: 0.69 x)
# CUDNN_LENGTHS    queries and keys, both in this range, of at least CUDNN_HEADS heads of the batch: cuDNN took 0.80 - 0.97 x of
#                  FlashAttention-4's time with head dims 64 and 128; with fewer heads (16, 32) 1.02 - 1.39 x
FA4_QUERIES, FA4_FEW, FA4_KEYS, CUDNN_LENGTHS, CUDNN_HEADS = 257, 64, 4096, range(512, 1025), 128


def _long_attention(p: Any) -> bool:
    queries, keys = _lengths(p)
    return _measured_attention(p) and (queries >= FA4_QUERIES or queries >= FA4_FEW and keys >= FA4_KEYS)


def _long_wide_heads(p: Any) -> bool:
    """Where split_mma's items, cut finer than prefill_mma's tiles, were the faster ones though there are tiles for every SM."""
    plain = not (p.windowed or p.mask or p.block_mask or p.variant or p.alibi or p.batch_invariant)
    return _measured_attention(p) and plain and p.layout == "dense" and p.head_dim >= 128 and min(p.seq_q, p.seq_k) >= 2048


def _many_short_heads(p: Any) -> bool:
    return (_measured_attention(p) and p.layout == "dense" and p.head_dim in (64, 128) and not (p.windowed or p.mask or p.kv_lens)
            and p.seq_q == p.seq_k and p.seq_q in CUDNN_LENGTHS and p.batch * p.num_q_heads >= CUDNN_HEADS)


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


def _decode(p: Any) -> bool:
    """Few rows over long keys. A batch-invariant call may not look at what the batch decides: means, and how long the cache is."""
    queries, keys = _lengths(p)
    few = queries <= DECODE_QUERIES and queries * p.group_size <= PACKED_ROWS
    return few and (p.layout == "dense" if p.batch_invariant else keys >= LONG_KEYS)


def _few_tiles(p: Any, target: Target) -> bool:
    """Long keys, and less than a tile of prefill_mma for every SM."""
    queries, keys = _lengths(p)
    tiles = -(-queries // TILE_ROWS) * p.num_q_heads * p.batch
    return not p.batch_invariant and keys >= max(LONG_KEYS, KEYS_PER_QUERY * queries) and tiles < target.sm_count


def _few_tasks(p: Any, target: Target) -> bool:
    """Long keys, and less than a task of prefill_cpu for every thread."""
    queries, keys = _lengths(p)
    tasks = -(-queries * p.group_size // PANEL_ROWS) * p.num_kv_heads * p.batch
    return not p.batch_invariant and keys >= max(LONG_KEYS, KEYS_PER_QUERY * queries) and tasks < target.sm_count


def _many_products(p: Any, target: Target) -> bool:
    """A batch of small products that fills the chip, of 129 rows and more, too: ours take 0.94 - 0.96 of torch.bmm's time at 1,024."""
    from kernelgen.kernels.gemm import skinny_sm90

    return skinny_sm90.many_products(p, target)


def _skinny(p: Any, target: Target) -> bool:
    """Few rows, where b's bytes are what counts, and else by the estimates of both Hopper products (imported when one is called)."""
    from kernelgen.kernels.gemm import dense_sm90, skinny_sm90
    from kernelgen.kernels.gemm.sm90 import kind_of_sums

    if _many_products(p, target):
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


# Codes from which packed_sm90 was measured: fewer are read in less time than its start takes.
MANY_CODES = 5760 * 2880


def _one_wave(p: Any, target: Target) -> bool:
    """What packed_sm90 was measured for: all of its blocks at once, with something to read for each."""
    from kernelgen.kernels.gemm import packed_sm90

    return p.n * p.k >= MANY_CODES and bool(packed_sm90.supports(p, target)) and packed_sm90.one_wave(p, target)


def _plain_gemm(p: Any) -> bool:
    return not (p.bias or p.activation or p.accumulate_c) and p.a_dtype == p.b_dtype == p.out_dtype and p.a_dtype in ("bf16", "fp16")


def _uneven(p: Any, target: Target) -> bool:
    return _plain_gemm(p) and p.m > 192 and cost.uneven(p) and not _many_products(p, target)


def _few_tokens(p: Any) -> bool:
    """Where moe/small_cuda was faster than the composition: up to eight tokens."""
    return p.tokens <= 8


_OFF_LINES = ("rows of a or b that do not begin at lines of 128 bytes: 0.59 and 0.83 x the time of our products (333 x 4096 x 4104 and "
              "1000^3; H200, 2026-11-30, tools/bench/results/h200_dispatch.json)")

RULES: tuple[Rule, ...] = (
    Rule("attention", "generated", 69, "a decode: split_mma reads the keys once for the heads that share them, on all SMs: 0.97 - 1.7 x "
         "as fast as FlashAttention-2; cuDNN, where it may be taken, takes 0.70 - 1.0 x its time (H200, 2026-11-30, "
         "tools/bench/results/h200_decode_dense.json)", target_kind="cuda", kernel="attention/split_mma", when=_decode),
    Rule("attention", "generated", 65, "long keys and fewer tiles of prefill_mma than SMs: split_mma gives the others a part of the keys "
         "(reasoned, unmeasured)", target_kind="cuda", kernel="attention/split_mma", fits=_few_tiles),
    Rule("attention", "generated", 62, "D 128 and 256, 2,048 tokens and more: 0.86 - 0.97 x the time of prefill_mma in 15 of 16 problems, "
         "1.08 x in one (H200, 2026-11-30, tools/bench/results/h200_dispatch.json)", target_kind="cuda", capability=(90,),
         kernel="attention/split_mma", when=_long_wide_heads),
    Rule("attention", "generated", 55, "for calls whose tiles leave SMs idle, or that are a decode: this one is neither",
         target_kind="cuda", kernel="attention/split_mma"),
    Rule("attention", "generated", 65, "long keys and fewer tasks of prefill_cpu than threads: split_cpu gives those keys, too",
         target_kind="cpu", kernel="attention/split_cpu", fits=_few_tasks),
    Rule("attention", "generated", 55, "for calls whose tasks leave threads idle: this one has enough", target_kind="cpu",
         kernel="attention/split_cpu"),
    Rule("attention", "torch", 70, "cuDNN in torch 2.11 takes 0.39 - 0.74 x the time of prefill_mma, measured in bf16, D 64, 128, 256, "
         "1k - 16k, and so expected in fp16 (H200, 2026-11-29, `kernelgen bench attention`); with a mask it lets a NaN of a "
         "masked key through", target_kind="cuda", capability=(90,), kernel="cudnn", when=_cudnn_attention),
    Rule("gemm", "torch", 70, "cuBLAS takes 0.92 - 1.01 x the time of our products at M = 256, 0.87 - 0.99 x of narrow ones from there "
         "on; up to 192 rows ours are 0.9 - 1.5 x as fast, above even (H200, 2026-11-30, tools/bench/results/tried/h200_tune_dense.json)",
         target_kind="cuda", capability=(90,), when=lambda p: _plain_gemm(p) and p.m > 192 and (p.m < 384 or p.n < 1024),
         fits=lambda p, target: not _many_products(p, target)),
    Rule("gemm", "torch", 70, _OFF_LINES, target_kind="cuda", capability=(90,), fits=_uneven),
    Rule("gemm", "generated", 64, "TMA and WGMMA for few rows or columns: by the estimates of both Hopper products, whose figures were "
         "measured on an H200 (2026-11-30)", target_kind="cuda", capability=(90,), kernel="gemm/skinny_sm90", fits=_skinny),
    Rule("gemm", "generated", 62, "TMA and WGMMA (H200, 2026-11-30, tools/bench/results/tried/h200_gemm_sm90.json)",
         target_kind="cuda", capability=(90,), kernel="gemm/dense_sm90"),
    Rule("gemm", "generated", 64, "packed weights, few rows: 0.60 - 0.87 x the time of packed_skinny where one wave of blocks is enough "
         "(H200, 2026-11-30, tools/bench/results/tried/h200_packed_sm90.json)", target_kind="cuda", capability=(90,),
         kernel="gemm/packed_sm90", fits=_one_wave),
    Rule("gemm", "generated", 54, "packed weights: small ones, and several waves of its blocks, were never timed", target_kind="cuda",
         kernel="gemm/packed_sm90"),
    Rule("gemm", "generated", 63, "packed weights, few rows: b's codes go straight to registers, read once (H200, 2026-11-30, "
         "tools/bench/results/h200_gemm_hopper.json)", target_kind="cuda", kernel="gemm/packed_skinny", when=lambda p: p.m <= 16),
    Rule("gemm", "generated", 55, "packed weights: gemm_mma takes 0.65 - 0.96 x its time at 32 rows (H200, 2026-11-30, "
         "tools/bench/results/tried/h200_tune_int4.json)", target_kind="cuda", kernel="gemm/packed_skinny"),
    Rule("gemm", "generated", 62, "packed weights, many rows: codes decoded in registers for WGMMA. As its grouped form, which was "
         "measured; single products were not timed", target_kind="cuda", capability=(90,), kernel="gemm/mixed_sm90",
         when=lambda p: p.m >= 128),
    Rule("gemm", "generated", 54, "packed weights: for 128 rows and more; fewer were not timed", target_kind="cuda",
         kernel="gemm/mixed_sm90"),
    Rule("grouped_gemm", "generated", 63, "packed weights: codes decoded in registers for WGMMA: a layer of gpt-oss-120b takes 0.23 - 0.35 "
         "x the time that it takes with grouped_gemm_mma (H200, 2026-11-30, tools/bench/results/tried/h200_mixed_sm90_moe.json)",
         target_kind="cuda", capability=(90,), kernel="gemm/grouped_mixed_sm90"),
    Rule("grouped_gemm", "generated", 64, "TMA and WGMMA: 0.96 - 1.12 x as fast as torch._grouped_mm (H200, 2026-11-30, "
         "tools/bench/results/h200_gemm_hopper.json)", target_kind="cuda", capability=(90,), kernel="gemm/grouped_sm90"),
    Rule("moe", "generated", 64, "up to 8 tokens in two launches: 8 take 0.85 - 0.98 x the time of the composition, 1 takes 0.39 - 0.84 x "
         "(six layers on an H200, 2026-11-30, tools/bench/results/tried/h200_moe_small_tune.json)", target_kind="cuda",
         capability=(90,), kernel="moe/small_cuda", when=_few_tokens),
    Rule("moe", "generated", 55, "for up to 8 tokens: 64 took 1.03 x the composition's time, other GPUs were not timed "
         "(H200, 2026-11-30)", target_kind="cuda", kernel="moe/small_cuda"),
    Rule("", "generated", 60, "specialised for this problem", general=True),
    Rule("", "torch", 40, "works everywhere torch does", general=True),
    Rule("attention", "cudnn", 75, "many heads of 512 - 1,024 tokens, D 64 and 128: 0.80 - 0.97 x the time of FlashAttention-4, "
         "0.52 - 0.74 x ours (H200, 2026-11-30, tools/bench/results/h200_dispatch.json)", target_kind="cuda", capability=(90,),
         when=_many_short_heads),
    Rule("attention", "flash_attn_4", 74, "long queries: 0.35 - 0.96 x the time of ours, 0.62 - 0.94 x of torch's cuDNN, and compiled in "
         "2 - 4 s at its first use (H200, 2026-11-30, tools/bench/results/h200_dispatch.json)", target_kind="cuda", capability=(90,),
         when=_long_attention),
    Rule("", "reference", 1, "slow eager float64 version"),
    Rule("", "cudnn", 35, "cuDNN by its own graphs: below everything that rules know; where it was measured, times decide"),
    Rule("", "flash_attn_4", 34, "FlashAttention-4: where it was measured, times decide"),
    Rule("", "flash_attn_3", 33, "FlashAttention-3 (unmeasured)"),
    Rule("", "flash_attn_2", 32, "FlashAttention-2 (unmeasured)"),
    Rule("gemm", "cublaslt", 71, "cuBLAS takes 0.92 - 1.01 x the time of our products at M = 256, 0.87 - 0.99 x of narrow ones from there "
         "on; up to 192 rows ours are 0.9 - 1.5 x as fast, above even (H200, 2026-11-30, tools/bench/results/tried/h200_tune_dense.json)",
         target_kind="cuda", capability=(90,), when=lambda p: _plain_gemm(p) and p.m > 192 and (p.m < 384 or p.n < 1024),
         fits=lambda p, target: not _many_products(p, target)),
    Rule("gemm", "cublaslt", 71, _OFF_LINES, target_kind="cuda", capability=(90,), fits=_uneven),
    Rule("gemm", "cublaslt", 50, "beside our products: 16 bits, 0.85 - 1.04 x as fast up to 128 rows; fp8 0.2 - 1.19 x, 0.46 - 0.95 "
         "in the mean of 13 shapes for each number of rows (H200, 2026-11-30, tools/bench/results/h200_gemm_hopper.json); before torch's "
         "own, whose epilogues multiply in float32", target_kind="cuda", general=True),
    Rule("grouped_gemm", "cublaslt", 50, "_grouped_mm is 0.83 - 1.06 x as fast as grouped_sm90, _scaled_grouped_mm 0.67 - 0.81 x (H200, "
         "2026-11-30, tools/bench/results/h200_gemm_hopper.json), before what the contract adds: cut ends, rows left alone",
         target_kind="cuda", general=True),
    Rule("", "cublaslt", 45, "products alone"),
    Rule("gemm", "flashinfer", 31, "compiled at its first use, for up to a minute; right in bf16 on an H200 (2026-11-30), not timed",
         target_kind="cuda"),
    Rule("moe", "flashinfer", 21, "before the oracle alone: it compiles for minutes at its first use, and was not run by this adapter on a "
         "GPU yet", target_kind="cuda"),
    Rule("", "flashinfer", 31, "FlashInfer, whose kernels are compiled for minutes at first use (unmeasured)"),
    Rule("", "triton", 30, "before the oracle: portable, untuned, 8.6 x the time of the best in the mean of 30 products (H200, 2026-11-30, "
         "tools/bench/results/h200_dispatch.json), for what has no kernel elsewhere"),
)


# Of a library that no row names: behind everything that was measured or written for the problem, before the oracle.
UNNAMED = Rule("", "", 20, "no rule names it: it was not measured")


def rule_of(backend: str, kernel: str, problem: Any, target: Target) -> Rule | None:
    """The first row that names a candidate."""
    rows = _index().of(backend, kernel, problem.op, target.kind, target.capability)
    return next((rule for rule in rows if rule.when(problem) and rule.fits(problem, target)), None)


def order(names: tuple[str, ...], op: str, target: Target) -> tuple[tuple[str, float, bool], ...]:
    """(backend, the highest score that a row can give it for an op on such a target, whether a row for everything else may), the highest
    first."""
    return _index().order(names, op, target.kind, target.capability)


class _Index:
    """What is worked out of RULES once: a choice asks for it with every candidate."""

    def __init__(self, rows: tuple[Rule, ...]) -> None:
        self.rows = rows
        self._of: dict[tuple[str, str, str, str, int], tuple[Rule, ...]] = {}
        self._orders: dict[tuple[tuple[str, ...], str, str, int], tuple[tuple[str, float, bool], ...]] = {}

    def of(self, backend: str, kernel: str, op: str, kind: str, capability: int) -> tuple[Rule, ...]:
        """The rows that may name a candidate, before they look at the problem."""
        key = (backend, kernel, op, kind, capability)
        found = self._of.get(key)
        if found is None:
            found = self._of[key] = tuple(r for r in self.rows if r.names(backend, kernel) and r.concerns(op, kind, capability))
        return found

    def bound(self, backend: str, op: str, kind: str, capability: int) -> tuple[float, bool]:
        may = [r for r in self.rows if r.backend == backend and r.concerns(op, kind, capability)] or [UNNAMED]
        return max(r.score for r in may), any(r.general for r in may)

    def order(self, names: tuple[str, ...], op: str, kind: str, capability: int) -> tuple[tuple[str, float, bool], ...]:
        key = (names, op, kind, capability)
        found = self._orders.get(key)
        if found is None:
            rows = [(name, *self.bound(name, op, kind, capability)) for name in names]
            found = self._orders[key] = tuple(sorted(rows, key=lambda row: -row[1]))
        return found


_last: _Index | None = None


def _index() -> _Index:
    """Of RULES as they are: tests put others in their place."""
    global _last
    if _last is None or _last.rows is not RULES:
        _last = _Index(RULES)
    return _last
