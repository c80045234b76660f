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


def with_totals(problem: Any, tiles: int, run: Callable[[Any, Any], None]) -> Callable[[Any], None]:
    """``run`` of a call's tensors and its partials' memory, None without totals; what it leaves there is added up behind it."""
    if problem.epilogue is None or not problem.epilogue.totals:
        return lambda t: run(t, None)
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
