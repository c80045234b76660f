"""Reductions over the rows of a product in a user's epilogue: ``return y, {"sum_sq": kernelgen.row_sum(y * y)}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kernelgen.errors import VariantError

if TYPE_CHECKING:
    from kernelgen.variants.expression import Expression

_MOST = 16


@dataclass(frozen=True)
class RowReduction:
    """What row_sum and row_max make: ``value`` of each element, a stand-in of a kernel's or a tensor."""

    kind: str
    value: Any


class Reduction(NamedTuple):
    """One that was traced."""

    name: str
    kind: str
    value: Expression


def row_sum(value: Any) -> RowReduction:
    """For an epilogue's function (:func:`kernelgen.epilogue`): the sum of ``value`` over all columns of a row of the output, in float32
    (float64 of float64 operands), before anything is rounded. Its order is fixed, so equal calls give equal bits; 0 of no columns.
    """
    return RowReduction("sum", value)


def row_max(value: Any) -> RowReduction:
    """As :func:`row_sum`, the largest; NaN where one of them is, -inf of no columns."""
    return RowReduction("max", value)


def taken_apart(returned: Any) -> tuple[Any, Mapping[str, RowReduction]]:
    """What a function returned, as its value and its reductions by name. Raises VariantError."""
    if isinstance(returned, RowReduction):
        raise VariantError("epilogue: the function returned a reduction alone, expected (value, {name: reduction})")
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], Mapping):
        return returned, {}
    if len(returned[1]) > _MOST:
        raise VariantError(f"epilogue: got {len(returned[1])} reductions, expected at most {_MOST}; call for the others anew")
    for name, reduction in returned[1].items():
        if not isinstance(name, str) or not isinstance(reduction, RowReduction):
            raise VariantError(f"epilogue: got {name!r}: {type(reduction).__name__} among the reductions, expected names with what "
                               "kernelgen.row_sum or kernelgen.row_max gave")
    return returned


def reduced(kind: str, terms: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """By torch's operators, along one dimension."""
    if kind == "sum":
        return terms.sum(dim)
    return terms.amax(dim) if terms.shape[dim] else torch.full_like(terms.sum(dim), -torch.inf)
