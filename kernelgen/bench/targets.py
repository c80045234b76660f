"""Targets: what the figures of a run must reach, as data, and a short table of where they stand.

A figure is held against the best peer that ran beside it, against published figures of peers that did not (scaled by what a common
baseline takes in this run), and against the time that its bytes take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

BYTES_PER_US = 4.55e6  # reading from an H200's memory


@dataclass(frozen=True)
class Published:
    """A peer's figure of another run, and what the baseline took there. ``baseline`` None: microseconds as they are."""

    peer: str
    us: float
    baseline_us: float = 1.0
    baseline: Any = None

    def here(self, baseline_now: float | None) -> float | None:
        """What the peer would take in this run; None without the baseline's figure."""
        if self.baseline is None:
            return self.us
        return None if baseline_now is None else self.us * baseline_now / self.baseline_us


@dataclass(frozen=True)
class Figure:
    """Microseconds of one problem: ours (None: it did not run), the best peer's, and those of its bytes."""

    case: Any
    ours: float | None
    peer: float | None
    traffic: int

    @property
    def ratio(self) -> float | None:
        return self.peer / self.ours if self.ours and self.peer else None

    @property
    def bytes_us(self) -> float:
        return self.traffic / BYTES_PER_US


@dataclass(frozen=True)
class Target:
    """Of the problems that ``of`` picks: the least ratio to the best peer in the geometric mean and at each point, and the most time.

    most   (factor, microseconds): at most factor * bytes + so many
    """

    name: str
    of: Callable[[Any], bool]
    mean: float | None = None
    point: float | None = None
    most: tuple[float, float] | None = None

    def allowed(self, figure: Figure) -> float | None:
        return None if self.most is None else self.most[0] * figure.bytes_us + self.most[1]


@dataclass(frozen=True)
class Standing:
    """Where a target stands. ``faults``: in which way it is missed; problems without a figure are one."""

    target: Target
    problems: int
    mean: float | None
    worst: Figure | None
    slowest: Figure | None
    faults: tuple[str, ...]


def standing(target: Target, figures: Iterable[Figure]) -> Standing | None:
    """None where no problem of the target ran at all."""
    own = [f for f in figures if target.of(f.case)]
    if not own:
        return None
    with_peer = [f for f in own if f.ratio]
    mean = math.exp(sum(math.log(f.ratio or 1.0) for f in with_peer) / len(with_peer)) if with_peer else None
    worst = min(with_peer, key=lambda f: f.ratio or 0.0, default=None)
    timed = [f for f in own if f.ours]
    slowest = max(timed, key=lambda f: (f.ours or 0.0) / (target.allowed(f) or math.inf), default=None) if target.most else None
    faults = [f"{len(own) - len(timed)} of {len(own)} did not run"] if len(timed) < len(own) else []
    if target.mean and mean and mean < target.mean:
        faults.append(f"mean {mean:.3f} < {target.mean:.2f}")
    if target.point and worst and worst.ratio and worst.ratio < target.point:
        below = sum((f.ratio or 0.0) < target.point for f in with_peer)
        faults.append(f"{below} points < {target.point:.2f}")
    if slowest:
        above = sum((f.ours or 0.0) > (target.allowed(f) or math.inf) for f in timed)
        faults += [f"{above} points above the bound of bytes"] if above else []
    return Standing(target, len(own), mean, worst, slowest, tuple(faults))


def table(standings: Iterable[Standing]) -> list[str]:
    """One line per target: mean, worst, the farthest from its bound, and the verdict."""
    lines = [f"{'target':<44}{'n':>4}{'mean':>8}{'worst':>8}  {'where':<46}{'us / bound':>16}  verdict"]
    for s in standings:
        where = str((s.worst or s.slowest).case) if s.worst or s.slowest else ""  # type: ignore[union-attr]
        bound = ""
        if s.slowest:
            bound = f"{s.slowest.ours:.1f} / {s.target.allowed(s.slowest):.1f}"
        mean, worst = (f"{value:.3f}" if value else "" for value in (s.mean, s.worst.ratio if s.worst else None))
        lines.append(f"{s.target.name:<44}{s.problems:>4}{mean:>8}{worst:>8}  {where:<46}{bound:>16}  {'; '.join(s.faults) or 'reached'}")
        if s.slowest and s.worst and s.slowest is not s.worst:
            lines.append(f"{'':<64}  {str(s.slowest.case):<46}{'^':>16}")
    return lines
