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
    when: Callable[[Any], bool] = lambda problem: True
    kernel: str = ""

    def matches(self, backend: str, kernel: str, problem: Any, target: Target) -> bool:
        return (
            self.op in ("", problem.op) and self.backend == backend and self.kernel in ("", kernel)
            and self.target_kind in ("", target.kind) and self.when(problem)
        )


RULES: tuple[Rule, ...] = (
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
