"""Decision: what dispatch chose for a problem, and what it thought of everything else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelgen.targets import Target
from kernelgen.verdicts import Verdict


@dataclass(frozen=True)
class Candidate:
    """One way to run a problem: a backend and, for generated kernels, a family and its config."""

    backend: str
    kernel: str
    config: Any
    verdict: Verdict
    score: float
    note: str

    @property
    def label(self) -> str:
        return f"{self.backend} {self.kernel}".strip()


@dataclass(frozen=True)
class Decision:
    """The chosen candidate (None: nothing can run it) and every candidate with its reason, best first.

    ``artifacts``: where nothing is compiled here, what explain found of the chosen kernels in the cache.
    """

    problem: Any
    target: Target
    chosen: Candidate | None
    candidates: tuple[Candidate, ...]
    artifacts: tuple[str, ...] = ()

    def table(self) -> list[dict[str, Any]]:
        """The candidates as plain rows, for JSON."""
        return [
            {
                "backend": c.backend, "kernel": c.kernel, "config": str(c.config) if c.config is not None else "",
                "ok": c.verdict.ok, "chosen": c is self.chosen, "score": c.score, "reason": c.verdict.reason, "note": c.note,
            }
            for c in self.candidates
        ]

    def __str__(self) -> str:
        width = max((len(c.label) for c in self.candidates), default=0)
        lines = [f"{self.problem} on {self.target}"]
        for c in self.candidates:
            mark = "->" if c is self.chosen else "  "
            if c.verdict.ok:
                words = "; ".join(w for w in (str(c.config) if c.config is not None else "", c.verdict.reason, c.note) if w)
                lines.append(f" {mark} {c.label:<{width}}  score {c.score:g}  {words}")
            else:
                lines.append(f" {mark} {c.label:<{width}}  no: {c.verdict.reason}")
        return "\n".join([*lines, *(f"    {line}" for line in self.artifacts)])
