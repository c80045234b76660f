"""Reductions over rows of a user's epilogue as the caller sees them: in ``out=``, allocated, and by name in what a call returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernelgen.errors import LayoutError, SettingsError
from kernelgen.ops.checks import check_apart, check_no_output_with_grad, check_output

Totals = tuple[torch.Tensor, ...]


def split_totals(out: Any, names: tuple[str, ...]) -> tuple[Any, Totals]:
    """(out, totals) of what the caller gave to write to: a tensor, or (tensor, {name: tensor}) with every name. Raises SettingsError."""
    if not (type(out) in (tuple, list) and len(out) == 2 and isinstance(out[1], Mapping)):
        return out, ()
    if set(out[1]) != set(names):
        raise SettingsError(f"out: got totals {', '.join(map(str, out[1])) or 'of no name'}, expected those of the epilogue: "
                            f"{', '.join(names) or 'it has none; give a tensor'}")
    return out[0], tuple(out[1][name] for name in names)


def make_totals(given: Totals, names: tuple[str, ...], a: torch.Tensor, *, grad: bool) -> Totals:
    """Of a (.., M, K): each (.., M), float32, float64 of float64. Those that were given are checked."""
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    if not given:
        return new_totals(a, len(names), tuple(a.shape[:-1]), dtype)
    for name, t in zip(names, given):
        if grad:
            check_no_output_with_grad(**{f"out {name}": t})
        check_output(f"out {name!r}", t, tuple(a.shape[:-1]), dtype, a.device)
        if not t.is_contiguous():
            raise LayoutError(f"out {name!r}: got strides {t.stride()}, expected a contiguous tensor; leave it out, or copy the result")
    return given


def new_totals(a: torch.Tensor, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Totals:
    return a.new_empty((count, *shape), dtype=dtype).unbind(0) if count else ()


def check_totals_apart(totals: Totals, function: Any, **others: torch.Tensor | None) -> None:
    """What the caller gave to write to lies in nothing that the call reads, nor in other results."""
    extras = {f"extra tensor {name!r}": t for name, t in function.tensors.items()}
    for i, t in enumerate(totals):
        check_apart("out of a total", t, **others, **extras, **{f"total {j}": other for j, other in enumerate(totals[:i])})


def named(names: tuple[str, ...], totals: Totals) -> dict[str, torch.Tensor]:
    return dict(zip(names, totals))
