"""Decision: what dispatch chose for a problem, and what it thought of everything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from kernelgen.dispatch.backends.base import Later, Properties
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict


@dataclass(frozen=True)
class Candidate:
    """One way to run a problem: a backend and, for generated kernels and libraries of several kernels, the kernel and its config.

    score      of the rule that ``note`` quotes;  general: that rule is one for what no other speaks of
    measured   microseconds of a call, where this problem's bucket was measured on such a GPU; None where not
    predicted  microseconds by the cost model; None where it has no figures
    artifact   "cached", "not built yet" or "" (not asked for, or nothing to build): explain fills it in
    """

    backend: str
    kernel: str
    config: Any
    verdict: Verdict
    score: float
    note: str
    properties: Properties = field(default_factory=Properties)
    general: bool = False
    measured: float | None = None
    predicted: float | None = None
    artifact: str = ""

    def settled(self) -> Candidate:
        """With its config, and the verdict that knows of it."""
        if not isinstance(self.config, Later):
            return self
        config, verdict = self.config.settle()
        return replace(self, config=config, verdict=verdict)

    @property
    def label(self) -> str:
        return f"{self.backend} {self.kernel}".strip()


@dataclass(frozen=True)
class Decision:
    """The chosen candidate (None: nothing can run it) and every candidate with its reason, best first.

    rows         the candidates that the choice looked at
    every        what finds all of them, with their configs: for explain, which reads ``candidates``
    decided_by   "measurement", "rule", "model", "call" or "setting" (KERNELGEN_BACKEND) where a backend was named; "" where
                 nothing was chosen
    basis        where the measurements are from, or why those that there are do not count
    artifacts    where nothing is compiled here, what explain found of the chosen kernels in the cache
    """

    problem: Any
    target: Target
    chosen: Candidate | None
    rows: tuple[Candidate, ...]
    artifacts: tuple[str, ...] = ()
    decided_by: str = ""
    basis: str = ""
    every: Callable[[], tuple[Candidate, ...]] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every candidate with its config and last verdict: the chosen one, then by time and score, then what cannot run the problem."""
        found = self.rows if self.every is None else self.every()
        return tuple(sorted((c.settled() for c in found), key=lambda c: (
            c is not self.chosen, not c.verdict.ok, c.measured is None, c.measured or 0.0, -c.score)))

    def table(self) -> list[dict[str, Any]]:
        """The candidates as plain rows, for JSON."""
        return [
            {
                "backend": c.backend, "kernel": c.kernel, "config": str(c.config) if c.config is not None else "",
                "ok": c.verdict.ok, "chosen": c is self.chosen, "score": c.score, "reason": c.verdict.reason, "note": c.note,
                "measured_us": c.measured, "predicted_us": c.predicted, "artifact": c.artifact, "properties": asdict(c.properties),
            }
            for c in self.candidates
        ]

    def as_dict(self) -> dict[str, Any]:
        """Everything that explain shows, for JSON."""
        return {"problem": str(self.problem), "target": str(self.target), "decided_by": self.decided_by, "basis": self.basis,
                "candidates": self.table(), "artifacts": list(self.artifacts)}

    def __str__(self) -> str:
        width = max((len(c.label) for c in self.candidates), default=0)
        by = f", decided by {self.decided_by}" if self.decided_by else ""
        lines = [f"{self.problem} on {self.target}{by}{f' ({self.basis})' if self.basis else ''}"]
        for c in self.candidates:
            mark = "->" if c is self.chosen else "  "
            if c.verdict.ok:
                words = [str(c.config) if c.config is not None else "", _times(c), c.artifact, c.verdict.reason, c.note]
                lines.append(f" {mark} {c.label:<{width}}  score {c.score:g}  {'; '.join(w for w in words if w)}")
            else:
                lines.append(f" {mark} {c.label:<{width}}  no: {c.verdict.reason}")
        return "\n".join([*lines, *(f"    {line}" for line in self.artifacts)])


def _times(c: Candidate) -> str:
    words = [f"{us:.4g} us {how}" for us, how in ((c.measured, "measured"), (c.predicted, "predicted")) if us is not None]
    return ", ".join(words)
