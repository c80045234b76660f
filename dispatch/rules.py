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
    """Candidates of ``backend`` (and ``kernel``, "" = any) for ``op`` on ``target_kind`` get ``score``."""

    op: str
    backend: str
    score: float
    note: str
    target_kind: str = ""
    capability: tuple[int, ...] = ()
    when: Callable[[Any], bool] = lambda problem: True
    kernel: str = ""

    def matches(self, backend: str, kernel: str, problem: Any, target: Target) -> bool:
        return (
            self.op in ("", problem.op) and self.backend == backend and self.kernel in ("", kernel)
            and self.target_kind in ("", target.kind) and (not self.capability or target.capability in self.capability)
            and self.when(problem)
        )


def _nothing_masked(p: Any) -> bool:
    """Dense attention of which every row sees every key: what torch's kernels do as the contract says, NaN included."""
    return p.layout == "dense" and not (p.causal or p.windowed or p.kv_lens or p.mask or p.block_mask or p.variant)


def _cudnn_attention(p: Any) -> bool:
    """What cuDNN was measured for: 16-bit inputs (it has no others in torch) and its three head dims."""
    return _nothing_masked(p) and p.q_dtype == p.kv_dtype in ("bf16", "fp16") and p.head_dim == p.head_dim_v in (64, 128, 256)


def _plain_gemm(p: Any) -> bool:
    return not (p.bias or p.activation or p.accumulate_c) and p.a_dtype == p.b_dtype == p.out_dtype and p.a_dtype in ("bf16", "fp16")


RULES: tuple[Rule, ...] = (
    Rule("attention", "torch", 70, "cuDNN in torch 2.11 takes 0.39 - 0.74 x the time of prefill_mma, measured in bf16, D 64, 128, 256, "
         "1k - 16k, and so expected in fp16 (H200, 2026-11-29, `kernelgen bench attention`); with a mask it lets a NaN of a "
         "masked key through", target_kind="cuda", capability=(90,), when=_cudnn_attention),
    Rule("gemm", "torch", 70, "cuBLAS takes 0.63 - 1.06 x the time of our products at M = 64 and 128, 0.86 x of narrow ones; they are even "
         "or faster above and up to 32 rows (H200, 2026-11-30, tools/bench/results/tried/h200_gemm_sm90.json)", target_kind="cuda",
         capability=(90,), when=lambda p: _plain_gemm(p) and p.m > 32 and (p.m < 384 or p.n < 1024)),
    Rule("gemm", "generated", 64, "TMA and WGMMA, b read at memory speed (H200, 2026-11-30, tools/bench/results/tried/h200_gemm_sm90.json)",
         target_kind="cuda", capability=(90,), kernel="gemm/skinny_sm90", when=lambda p: p.m <= 64 or p.n <= 3072),
    Rule("gemm", "generated", 62, "TMA and WGMMA (H200, 2026-11-30, tools/bench/results/tried/h200_gemm_sm90.json)",
         target_kind="cuda", capability=(90,), kernel="gemm/dense_sm90"),
    Rule("", "generated", 60, "specialised for this problem"),
    Rule("", "torch", 40, "works everywhere torch does"),
    Rule("", "reference", 1, "slow eager float64 version"),
)


def score(backend: str, kernel: str, problem: Any, target: Target) -> tuple[float, str]:
    """(score, note) of a candidate. Every registered backend has a catch-all row."""
    for rule in RULES:
        if rule.matches(backend, kernel, problem, target):
            return rule.score, rule.note
    return 0.0, "no rule names it"
