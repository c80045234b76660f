"""Reductions over rows of a user's epilogue: the partials that kernels leave, and the pass that adds them up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernelgen.variants.row_reductions import reduced


def partials(problem: Any, t: Any, tiles: int) -> torch.Tensor:
    """Memory for one of each total, row and tile of columns."""
    first: torch.Tensor = t.totals[0]
    return first.new_empty((len(t.totals), problem.batch, tiles, problem.m))


def reduces(problem: Any) -> bool:
    return problem.epilogue is not None and bool(problem.epilogue.totals)


def with_totals(problem: Any, tiles: int, run: Callable[..., None]) -> Callable[[Any], None]:
    """``run`` of a call's tensors and, where there are totals, the memory of their partials; what it leaves there is added up behind it."""
    if not reduces(problem):
        return run
    kinds = problem.epilogue.kinds

    def both(t: Any) -> None:
        parts = partials(problem, t, tiles)
        run(t, parts)
        for kind, total, part in zip(kinds, t.totals, parts):
            if kind == "sum":
                torch.sum(part, 1, out=total)
            else:
                total.copy_(reduced(kind, part, 1))

    return both
