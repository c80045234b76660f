"""The rows that order backends. A higher score wins; the first row that matches a candidate gives its score.

Each note names the measurement behind the row (machine, date, command) or says that none is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from kernelgen.dispatch import cost
from kernelgen.dispatch.conditions import (
    FEW_COLUMNS,
    cudnn_lengths,
    cute_groups,
    decode,
    few_queries,
    few_tasks,
    few_tiles,
    few_tokens,
    fewer_than_a_tile,
    hopper_prefill,
    long_epilogue,
    long_wide_heads,
    many_products,
    one_wave,
    packed_queries,
    paged_prefill,
    plain_gemm,
    skinny,
)
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


# Where cuBLAS is the better product of 16 bits, without what an epilogue adds: (note, when). By torch's matmul and as a backend of its own.
_H200 = "H200, 2026-11-30, tools/bench/results/"
_CUBLAS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("cuBLAS takes 0.92 - 1.01 x the time of our products at M = 256, 0.87 - 0.99 x of narrow ones from there on; up to 192 rows ours are "
     f"0.9 - 1.5 x as fast, above even ({_H200}tried/h200_tune_dense.json)", lambda p: p.m > 192 and (p.m < 384 or p.n < 1024)),
    ("rows of a or b begin within sectors of 32 bytes: cuBLAS takes 0.59 - 0.98 x the time of our products for 64 - 2048 rows, 1.14 x for "
     f"16 ({_H200}h200_dispatch.json)", lambda p: p.m > 32 and cost.uneven(p)),
    ("tiles of 64 and 128 rows are half empty: cuBLAS takes 0.68 and 0.85 x the time of our products for 80 and 96 rows, 1.05 x for 112 "
     f"({_H200}h200_dispatch.json)", lambda p: 64 < p.m < 112 and p.n >= FEW_COLUMNS),
)


# Rows of MoE layers in Triton: (op, kernel, when it was timed, note).
_HELPERS = "H200, 2026-12-01, tools/bench/results/tried/h200_moe_helpers_triton.json"
_TRITON_ROWS: tuple[tuple[str, str, Callable[[Any], bool], str], ...] = (
    ("moe_unpermute", "moe/unpermute_triton", lambda p: p.dtype in ("bf16", "fp16"),
     f"0.65 - 0.92 x the time of unpermute_cuda in 11 layers of bf16 ({_HELPERS})"),
    ("quantize_fp8", "quantize/quantize_fp8_triton", lambda p: p.dtype in ("bf16", "fp16") and p.alignment == 16,
     f"0.69 - 0.84 x the time of quantize_fp8_cuda in 8 problems of bf16 ({_HELPERS})"),
)


def _cublas(backend: str, score: float) -> Iterator[Rule]:
    for note, when in _CUBLAS:
        yield Rule("gemm", backend, score, note, target_kind="cuda", capability=(90,), when=partial(_plain_and, when),
                   fits=lambda p, target: not many_products(p, target))


def _plain_and(when: Callable[[Any], bool], p: Any) -> bool:
    return plain_gemm(p) and when(p)


RULES: tuple[Rule, ...] = (
    Rule("attention", "generated", 76, "D 128, 16 - 512 queries over 4,096 keys and more, tiles that leave SMs idle: with split keys, "
         "packed heads 0.38 - 0.96 x the time of split_mma, 0.10 - 0.89 x of FlashAttention-4, 14 problems (H200, 2026-12-01, "
         "tools/bench/results/h200_prefill_few_queries.json)", target_kind="cuda", capability=(90,),
         kernel="attention/prefill_sm90", fits=few_queries),
    Rule("attention", "generated", 70, "D 128, fewer queries than a tile over 4,096 keys and more: with packed heads 0.42 - 0.44 x the "
         "time of split_mma, 1.05 - 1.07 x of FlashAttention-4 (the same run)", target_kind="cuda", capability=(90,),
         kernel="attention/prefill_sm90", fits=packed_queries),
    Rule("attention", "generated", 69, "a decode: split_mma reads the keys once for the heads that share them, on all SMs: 0.97 - 1.7 x "
         "as fast as FlashAttention-2; cuDNN, where it may be taken, takes 0.70 - 1.0 x its time (H200, 2026-11-30, "
         "tools/bench/results/h200_decode_dense.json)", target_kind="cuda", kernel="attention/split_mma", when=decode),
    Rule("attention", "generated", 65, "long keys and fewer tiles of prefill_mma than SMs: split_mma gives the others a part of the keys "
         "(reasoned, unmeasured)", target_kind="cuda", kernel="attention/split_mma", fits=few_tiles),
    Rule("attention", "generated", 62, "D 128 and 256, 2,048 tokens and more: 0.86 - 0.97 x the time of prefill_mma in 15 of 16 problems, "
         "1.08 x in one (H200, 2026-11-30, tools/bench/results/h200_dispatch.json)", target_kind="cuda", capability=(90,),
         kernel="attention/split_mma", when=long_wide_heads),
    Rule("attention", "generated", 55, "for calls whose tiles leave SMs idle, or that are a decode: this one is neither",
         target_kind="cuda", kernel="attention/split_mma"),
    Rule("attention", "generated", 64, "TMA and WGMMA, a tile of queries and more: 0.82 - 1.05 x the time of the faster of cuDNN and "
         "FlashAttention-4 in 48 problems, 0.94 x in the mean (H200, 2026-12-01, tools/bench/results/h200_prefill_variants.json)",
         target_kind="cuda", capability=(90,), kernel="attention/prefill_sm90", when=hopper_prefill),
    Rule("attention", "generated", 50, "TMA and WGMMA: fewer queries than a tile, masks and variants were not timed",
         target_kind="cuda", kernel="attention/prefill_sm90"),
    Rule("attention", "generated", 22, "prefill_sm90 in CuTe-DSL: 0.94 - 1.04 x as fast in 33 problems of D up to 128, 1.00 x in the "
         "mean, and built in 4 s instead of one; D 256 0.94 - 0.96 x (H200, 2026-12-01, tools/bench/results/h200_dispatch.json, "
         "tried/h200_prefill_sm90_cute.json): where a tuning finds it faster", target_kind="cuda", kernel="attention/prefill_sm90_cute"),
    Rule("paged_attention", "generated", 61, "prefill_sm90 over pages, 128 queries and more: 1.2 - 2.5 x as fast as paged_mma in 13 "
         "problems (H200, 2026-12-01, tools/bench/results/h200_paged_prefill.json)", target_kind="cuda", capability=(90,),
         kernel="attention/paged_sm90", fits=paged_prefill),
    Rule("paged_attention", "generated", 22, "prefill_sm90 over pages, where paged_mma is the faster one or it was not timed",
         target_kind="cuda", kernel="attention/paged_sm90"),
    Rule("attention", "generated", 65, "long keys and fewer tasks of prefill_cpu than threads: split_cpu gives those keys, too",
         target_kind="cpu", kernel="attention/split_cpu", fits=few_tasks),
    Rule("attention", "generated", 55, "for calls whose tasks leave threads idle: this one has enough", target_kind="cpu",
         kernel="attention/split_cpu"),
    Rule("attention", "torch", 70, "D 128, many heads of 512 - 1,023 tokens, no mask: cuDNN in torch 2.11 takes 0.96 x the time of "
         "prefill_sm90 (H200, 2026-12-01, tools/bench/results/h200_prefill_variants.json)", target_kind="cuda", capability=(90,),
         kernel="cudnn", when=cudnn_lengths),
    *_cublas("torch", 70),
    Rule("gemm", "generated", 64, "TMA and WGMMA for few rows or columns: by the estimates of both Hopper products, whose figures were "
         "measured on an H200 (2026-11-30)", target_kind="cuda", capability=(90,), kernel="gemm/skinny_sm90", fits=skinny),
    Rule("gemm", "generated", 62, "TMA and WGMMA (H200, 2026-11-30, tools/bench/results/tried/h200_gemm_sm90.json)",
         target_kind="cuda", capability=(90,), kernel="gemm/dense_sm90"),
    Rule("gemm", "generated", 63, "a user's epilogue in CuTe-DSL, under the other consumer's products: 0.73 - 1.04 x the time of "
         "dense_sm90 in nine cases, 0.92 x in the mean, 1.00 - 1.06 x that of no epilogue where it loads nothing (H200, 2026-12-01, "
         "tools/bench/results/tried/h200_epilogue.json)", target_kind="cuda", capability=(90,), kernel="gemm/dense_sm90_cute",
         when=long_epilogue),
    Rule("gemm", "generated", 22, "the same product in CuTe-DSL: 0.91 - 1.13 x as fast as dense_sm90, 1.01 x in the mean of 15 shapes "
         "(H200, 2026-12-01, tools/bench/results/tried/h200_dense_sm90_cute.json), and built in 2.6 s instead of half a second: "
         "where a tuning finds it faster", target_kind="cuda", kernel="gemm/dense_sm90_cute"),
    Rule("gemm", "generated", 64, "packed weights, few rows: 0.60 - 0.87 x the time of packed_skinny where one wave of blocks is enough "
         "(H200, 2026-11-30, tools/bench/results/tried/h200_packed_sm90.json)", target_kind="cuda", capability=(90,),
         kernel="gemm/packed_sm90", fits=one_wave),
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
    Rule("grouped_gemm", "generated", 66, "16 bits in CuTe-DSL: gathered rows 0.80 - 0.85 x the time of grouped_sm90, many groups of "
         "rows in order 0.89 - 1.00 x (H200, 2026-12-01, tools/bench/results/tried/h200_grouped_sm90_cute.json)", target_kind="cuda",
         capability=(90,), kernel="gemm/grouped_sm90_cute", when=cute_groups),
    Rule("grouped_gemm", "generated", 22, "16 bits in CuTe-DSL, few groups or rows: 0.99 - 1.01 x the time of grouped_sm90 (the same run) "
         "for a longer build: where a tuning finds it faster", target_kind="cuda", kernel="gemm/grouped_sm90_cute"),
    Rule("moe", "generated", 64, "up to 8 tokens in two launches: 8 take 0.85 - 0.98 x the time of the composition, 1 takes 0.39 - 0.84 x "
         "(six layers on an H200, 2026-11-30, tools/bench/results/tried/h200_moe_small_tune.json)", target_kind="cuda",
         capability=(90,), kernel="moe/small_cuda", when=few_tokens),
    Rule("moe", "generated", 55, "for up to 8 tokens: 64 took 1.03 x the composition's time, other GPUs were not timed "
         "(H200, 2026-11-30)", target_kind="cuda", kernel="moe/small_cuda"),
    *(Rule(op, "generated", score, why, target_kind="cuda", capability=capability, kernel=kernel, when=when)
      for op, kernel, fast, note in _TRITON_ROWS
      for score, capability, when, why in ((64, (90,), fast, note), (22, (), lambda p: True, "such a problem or GPU was not timed"))),
    Rule("", "generated", 60, "specialised for this problem", general=True),
    Rule("", "torch", 40, "works everywhere torch does", general=True),
    Rule("attention", "cudnn", 75, "D 128, many heads of 512 - 1,023 tokens, no mask: 0.96 x the time of prefill_sm90 "
         "(H200, 2026-12-01, tools/bench/results/h200_prefill_variants.json)", target_kind="cuda", capability=(90,), when=cudnn_lengths),
    Rule("attention", "flash_attn_4", 74, "fewer queries than a tile over 4,096 keys and more: 0.69 x the time of split_mma; compiled in "
         "2 - 4 s at its first use (H200, 2026-11-30, tools/bench/results/h200_dispatch.json)", target_kind="cuda", capability=(90,),
         when=fewer_than_a_tile),
    Rule("", "reference", 1, "slow eager float64 version"),
    Rule("", "cudnn", 35, "cuDNN by its own graphs: below everything that rules know; where it was measured, times decide"),
    Rule("", "flash_attn_4", 34, "FlashAttention-4: where it was measured, times decide"),
    Rule("", "flash_attn_3", 33, "FlashAttention-3 (unmeasured)"),
    Rule("", "flash_attn_2", 32, "FlashAttention-2 (unmeasured)"),
    *_cublas("cublaslt", 71),
    Rule("gemm", "cublaslt", 50, "beside our products: 16 bits, 0.85 - 1.04 x as fast up to 128 rows; fp8 0.2 - 1.19 x, 0.46 - 0.95 "
         "in the mean of 13 shapes for each number of rows (H200, 2026-11-30, tools/bench/results/h200_gemm_hopper.json); before torch's "
         "own, whose epilogues multiply in float32", target_kind="cuda", general=True),
    Rule("grouped_gemm", "cublaslt", 50, "_grouped_mm is 0.83 - 1.06 x as fast as grouped_sm90, _scaled_grouped_mm 0.67 - 0.81 x (H200, "
         "2026-11-30, tools/bench/results/h200_gemm_hopper.json), before what the contract adds: cut ends, rows left alone",
         target_kind="cuda", general=True),
    Rule("", "cublaslt", 45, "products alone"),
    Rule("gemm", "flashinfer", 21, "before the oracle alone: untimed, and compiled for more than a minute; right on an H200 (2026-12-01)",
         target_kind="cuda", kernel="fp8_blockscale_gemm_sm90"),
    Rule("gemm", "flashinfer", 31, "compiled at its first use, for up to a minute; right in bf16 on an H200 (2026-11-30), not timed",
         target_kind="cuda"),
    Rule("moe", "flashinfer", 21, "before the oracle alone: it compiles for minutes at its first use, and was not run by this adapter on a "
         "GPU yet", target_kind="cuda"),
    Rule("", "flashinfer", 31, "FlashInfer, whose kernels are compiled for minutes at first use (unmeasured)"),
    *(Rule(op, "triton", 21, "before the oracle alone: portable; 4 x 1,024, D 128, causal took 5.0 x the time of prefill_sm90 in bf16, "
           "6.5 x that of torch's kernel in float32 (H200, 2026-12-01, printed)", target_kind="cuda")
      for op in ("attention", "paged_attention")),
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
