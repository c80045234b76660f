"""The rows that order backends. A higher score wins; the first row that matches a candidate gives its score.

Each note names the measurement behind the row (machine, date, command) or says that none is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

    def matches(self, backend: str, kernel: str, problem: Any, target: Target) -> bool:
        return (
            self.op in ("", problem.op) and self.backend == backend and self.kernel in ("", kernel)
            and self.target_kind in ("", target.kind) and (not self.capability or target.capability in self.capability)
            and self.when(problem) and self.fits(problem, target)
        )


# Rows of a up to which skinny_sm90 is the better Hopper product whatever the estimate of the other says, which knows tiles and not how
# much of b is on its way (H200, 2026-11-30: at 8 rows its choices took 1.3 - 1.7 x the time). And columns of b from which it is worse for
# more than 128 rows (192 - 512 rows: best for 576 and 2112 columns, never for 4096).
# Of many small products in a batch dense_sm90 is the better one sooner (64 rows: 9.0 us for 9.7, 8.7 for 9.1; 32 rows: 7.7 and 7.4, 7.7 and
# 7.3; tools/bench/results/tried/h200_batched.json).
# With more than 32 rows of fp8, sums promoted, and 48 of 16 bits the tiles of dense_sm90 are the better ones more often than not, and the
# estimates decide (64 rows: fp8 up to 1.3 x as fast as skinny_sm90, 16 bits 1.0 - 1.11; 32 rows of fp8: slower but for 24576 columns;
# tools/bench/results/tried/h200_tune_few_rows.json).
FEW_ROWS, FEW_COLUMNS, FEW_ROWS_OF_MANY, FEW_ROWS_OF_FP8, FEW_ROWS_OF_HALVES = 64, 4096, 32, 32, 48
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
        few = FEW_ROWS_OF_FP8 if kind_of_sums(p) != "plain" else FEW_ROWS_OF_HALVES if p.a_dtype in ("bf16", "fp16") else FEW_ROWS
    return p.m <= few or skinny_sm90.estimate(p, target) <= dense_sm90.estimate(p, target)


# Codes from which packed_sm90 was measured: fewer are read in less time than its start takes.
MANY_CODES = 5760 * 2880


def _one_wave(p: Any, target: Target) -> bool:
    """What packed_sm90 was measured for: all of its blocks at once, with something to read for each."""
    from kernelgen.kernels.gemm import packed_sm90

    return p.n * p.k >= MANY_CODES and bool(packed_sm90.supports(p, target)) and packed_sm90.one_wave(p, target)


def _plain_gemm(p: Any) -> bool:
    return not (p.bias or p.activation or p.accumulate_c) and p.a_dtype == p.b_dtype == p.out_dtype and p.a_dtype in ("bf16", "fp16")


def _few_tokens(p: Any) -> bool:
    """Where moe/small_cuda was faster than the composition: up to eight tokens."""
    return p.tokens <= 8


RULES: tuple[Rule, ...] = (
    Rule("attention", "generated", 69, "a decode: split_mma reads the keys once for the heads that share them, on all SMs: 0.97 - 1.7 x "
         "as fast as FlashAttention-2; cuDNN, where it may be taken, takes 0.70 - 1.0 x its time (H200, 2026-11-30, "
         "tools/bench/results/h200_decode_dense.json)", target_kind="cuda", kernel="attention/split_mma", when=_decode),
    Rule("attention", "generated", 65, "long keys and fewer tiles of prefill_mma than SMs: split_mma gives the others a part of the keys "
         "(reasoned, unmeasured)", target_kind="cuda", kernel="attention/split_mma", fits=_few_tiles),
    Rule("attention", "generated", 55, "for calls whose tiles leave SMs idle, or that are a decode: this one is neither",
         target_kind="cuda", kernel="attention/split_mma"),
    Rule("attention", "generated", 50, "TMA and WGMMA: not measured yet", target_kind="cuda", kernel="attention/prefill_sm90"),
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
    Rule("gemm", "generated", 64, "TMA and WGMMA for few rows or columns: by the estimates of both Hopper products, whose figures were "
         "measured on an H200 (2026-11-30)", target_kind="cuda", capability=(90,), kernel="gemm/skinny_sm90", fits=_skinny),
    Rule("gemm", "generated", 62, "TMA and WGMMA (H200, 2026-11-30, tools/bench/results/tried/h200_gemm_sm90.json)",
         target_kind="cuda", capability=(90,), kernel="gemm/dense_sm90"),
    Rule("gemm", "generated", 22, "the same product in CuTe-DSL, whose choices nobody has timed: taken by name alone, and where a tuning "
         "on this GPU finds it faster", target_kind="cuda", kernel="gemm/dense_sm90_cute"),
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
    Rule("", "reference", 1, "slow eager float64 version"),
    Rule("", "cudnn", 35, "cuDNN by its own graphs: below everything that rules know; where it was measured, times decide"),
    Rule("", "flash_attn_4", 34, "FlashAttention-4: where it was measured, times decide"),
    Rule("", "flash_attn_3", 33, "FlashAttention-3 (unmeasured)"),
    Rule("", "flash_attn_2", 32, "FlashAttention-2 (unmeasured)"),
    Rule("gemm", "cublaslt", 71, "cuBLAS takes 0.92 - 1.01 x the time of our products at M = 256, 0.87 - 0.99 x of narrow ones from there "
         "on; up to 192 rows ours are 0.9 - 1.5 x as fast, above even (H200, 2026-11-30, tools/bench/results/tried/h200_tune_dense.json)",
         target_kind="cuda", capability=(90,), when=lambda p: _plain_gemm(p) and p.m > 192 and (p.m < 384 or p.n < 1024),
         fits=lambda p, target: not _many_products(p, target)),
    Rule("gemm", "cublaslt", 50, "beside our products: 16 bits, 0.85 - 1.04 x as fast up to 128 rows; fp8 0.2 - 1.19 x, 0.46 - 0.95 "
         "in the mean of 13 shapes for each number of rows (H200, 2026-11-30, tools/bench/results/h200_gemm_hopper.json); before torch's "
         "own, whose epilogues multiply in float32", target_kind="cuda", general=True),
    Rule("grouped_gemm", "cublaslt", 50, "_grouped_mm is 0.83 - 1.06 x as fast as grouped_sm90, _scaled_grouped_mm 0.67 - 0.81 x (H200, "
         "2026-11-30, tools/bench/results/h200_gemm_hopper.json), before what the contract adds: cut ends, rows left alone",
         target_kind="cuda", general=True),
    Rule("", "cublaslt", 45, "products alone"),
    Rule("gemm", "flashinfer", 25, "before the oracle alone: it compiles at its first use, and was not run by this adapter on a GPU yet",
         target_kind="cuda"),
    Rule("moe", "flashinfer", 21, "before the oracle alone: it compiles for minutes at its first use, and was not run by this adapter on a "
         "GPU yet", target_kind="cuda"),
    Rule("", "flashinfer", 31, "FlashInfer, whose kernels are compiled for minutes at first use (unmeasured)"),
    Rule("", "triton", 30, "before the oracle: portable, untuned, for what has no kernel elsewhere; its sums of float32 and float64, in "
         "their present form, ran in Triton's interpreter alone"),
)


# Of a library that no row names: behind everything that was measured or written for the problem, before the oracle.
UNNAMED = Rule("", "", 20, "no rule names it: it was not measured")


def rule_of(backend: str, kernel: str, problem: Any, target: Target) -> Rule | None:
    """The first row that names a candidate."""
    return next((rule for rule in _index().of(backend) if rule.matches(backend, kernel, problem, target)), None)


def bound(backend: str, op: str, target: Target) -> tuple[float, bool]:
    """(the highest score that a row can give a backend for an op on such a target, whether a row for everything else may)."""
    return _index().bound(backend, op, target.kind, target.capability)


class _Index:
    """What is worked out of RULES once: a choice asks for it with every candidate."""

    def __init__(self, rows: tuple[Rule, ...]) -> None:
        self.rows = rows
        self._of: dict[str, tuple[Rule, ...]] = {}
        self._bounds: dict[tuple[str, str, str, int], tuple[float, bool]] = {}

    def of(self, backend: str) -> tuple[Rule, ...]:
        found = self._of.get(backend)
        if found is None:
            found = self._of[backend] = tuple(rule for rule in self.rows if rule.backend == backend)
        return found

    def bound(self, backend: str, op: str, kind: str, capability: int) -> tuple[float, bool]:
        key = (backend, op, kind, capability)
        found = self._bounds.get(key)
        if found is None:
            may = [r for r in self.of(backend) if r.op in ("", op) and r.target_kind in ("", kind)
                   and (not r.capability or capability in r.capability)] or [UNNAMED]
            found = self._bounds[key] = (max(r.score for r in may), any(r.general for r in may))
        return found


_last: _Index | None = None


def _index() -> _Index:
    """Of RULES as they are: tests put others in their place."""
    global _last
    if _last is None or _last.rows is not RULES:
        _last = _Index(RULES)
    return _last
