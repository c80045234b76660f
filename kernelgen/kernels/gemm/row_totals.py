"""Reductions over rows of a user's epilogue: the partials that kernels leave, and the pass that adds them up in an order of its own: an
entry of the same binary on a GPU (row_totals.cuh), torch's operators on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernelgen.params import ParamStruct
from kernelgen.variants.epilogue_function import reduced

# struct RowTotalsParams of row_totals.cuh.
PARAMS = ParamStruct((*((name, "ptr") for name in ("partials", "total")), *((name, "i32") for name in ("m", "rows", "tiles", "maximum"))))
ENTRY = "add_up_rows"
_THREADS = 128
Add = Callable[[Any, torch.Tensor], None]


def partials(problem: Any, t: Any, tiles: int) -> torch.Tensor:
    """Memory for one of each total, row and tile of columns."""
    first: torch.Tensor = t.totals[0]
    return first.new_empty((len(t.totals), problem.batch, tiles, problem.m))


def reduces(problem: Any) -> bool:
    return problem.epilogue is not None and bool(problem.epilogue.totals)


def entries(problem: Any) -> tuple[str, ...]:
    """More than the product's own, of CUDA kernels."""
    return (ENTRY,) if reduces(problem) else ()


def parameters(problem: Any) -> dict[str, str]:
    """Of templates/gemm/row_totals.cuh.jinja."""
    return {"totals_assertions": PARAMS.assertions("kernelgen::RowTotalsParams")} if reduces(problem) else {}


def adding_kernel(problem: Any, kernel: Any, device: int, tiles: int, programmatic: bool = False) -> Add | None:
    """The second pass of a CUDA kernel."""
    if not reduces(problem):
        return None
    rows = problem.batch * problem.m
    grid = (-(-rows // _THREADS), 1, 1)
    launch = kernel.entry(ENTRY, PARAMS).prepare(device, grid=grid, block=(_THREADS, 1, 1), programmatic=programmatic)
    tails = [PARAMS.pack_scalars({"m": problem.m, "rows": rows, "tiles": tiles, "maximum": int(kind == "max")})
             for kind in problem.epilogue.kinds]
    pack = PARAMS.pointer_packer.pack

    def add(t: Any, parts: torch.Tensor) -> None:
        for tail, total, part in zip(tails, t.totals, parts):
            launch(pack(part.data_ptr(), total.data_ptr()) + tail)

    return add


def adding_operators(problem: Any) -> Add:
    """By torch."""
    def add(t: Any, parts: torch.Tensor) -> None:
        for kind, total, part in zip(problem.epilogue.kinds, t.totals, parts):
            total.copy_(reduced(kind, part, 1))

    return add


def with_totals(problem: Any, tiles: int, run: Callable[..., None], add: Add | None) -> Callable[[Any], None]:
    """``run`` of a call's tensors and, where there are totals, the memory of their partials; ``add`` brings these to the call's totals."""
    if add is None or not reduces(problem):
        return run

    def both(t: Any) -> None:
        parts = partials(problem, t, tiles)
        run(t, parts)
        add(t, parts)

    return both
