"""Reductions over rows of a user's epilogue: the partials that kernels leave, and the pass that adds them up in a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernelgen.params import ParamStruct
from kernelgen.variants.epilogue_function import reduced

# struct RowTotalsParams of row_totals.cuh.
PARAMS = ParamStruct((("partials", "ptr"), ("total", "ptr"), *((name, "i32") for name in ("m", "rows", "tiles", "maximum"))))
ENTRY = "add_up_rows"
_THREADS = 128


def reduces(problem: Any) -> bool:
    return problem.epilogue is not None and bool(problem.epilogue.totals)


def partials(problem: Any, t: Any, tiles: int) -> torch.Tensor:
    """Memory of them, one for each total, row and tile of columns."""
    made: torch.Tensor = t.totals.new_empty((len(t.totals), problem.batch, tiles, problem.m))
    return made


def entries(problem: Any) -> tuple[str, ...]:
    """More than the product's own, of CUDA kernels."""
    return (ENTRY,) if reduces(problem) else ()


def parameters(problem: Any) -> dict[str, str]:
    """Of templates/gemm/row_totals.cuh.jinja."""
    return {"totals_assertions": PARAMS.assertions("kernelgen::RowTotalsParams")} if reduces(problem) else {}


def with_totals(problem: Any, tiles: int, run: Callable[..., None], kernel: Any = None, device: int = 0,
                programmatic: bool = False) -> Callable[[Any], None]:
    """``run`` of a call's tensors and, where there are totals, the memory of partials; these are added up by an entry of the CUDA kernel,
    or by torch."""
    if not reduces(problem):
        return run
    kinds, rows = problem.epilogue.kinds, problem.batch * problem.m
    if kernel is not None:
        grid, block = (-(-rows // _THREADS), 1, 1), (_THREADS, 1, 1)
        launch = kernel.entry(ENTRY, PARAMS).prepare(device, grid=grid, block=block, programmatic=programmatic,
                                                      carveout=100 if programmatic else None)  # as the product has it
        pack, tails = PARAMS.pointer_packer.pack, {kind: PARAMS.pack_scalars(
            {"m": problem.m, "rows": rows, "tiles": tiles, "maximum": int(kind == "max")}) for kind in kinds}

    def both(t: Any) -> None:
        parts = partials(problem, t, tiles)
        run(t, parts)
        for kind, total, part in zip(kinds, t.totals, parts):
            if kernel is None:
                total.copy_(reduced(kind, part, 1))
            else:
                launch(pack(part.data_ptr(), total.data_ptr()) + tails[kind])

    return both
