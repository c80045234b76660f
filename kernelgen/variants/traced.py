"""What a traced variant is: expressions, and the extra values they read."""

from __future__ import annotations

import hashlib
import numbers
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from kernelgen.errors import VariantError
from kernelgen.variants.expression import BOOL, INT, INT32, INT64, REAL, Expression, Range

# Element type of an extra tensor -> (type of the expression, its range, helper of variant_math.h that reads it).
ELEMENTS: dict[str, tuple[str, Range, str]] = {
    "float32": (REAL, (0, 0), "load_fp32"), "float64": (REAL, (0, 0), "load_fp64"), "bfloat16": (REAL, (0, 0), "load_bf16"),
    "float16": (REAL, (0, 0), "load_fp16"), "int32": (INT, INT32, "load_int32"), "int64": (INT, INT64, "load_int64"),
    "uint8": (INT, (0, 255), "load_uint8"), "bool": (BOOL, (0, 1), "load_bool"),
}
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ELEMENTS}
SCALARS = ("float", "double")


@dataclass(frozen=True)
class ExtraTensor:
    """An extra tensor as far as it is compiled in; ``dtype`` in torch's words ("bfloat16")."""

    name: str
    dtype: str
    rank: int

    @property
    def words(self) -> int:
        """Address, then size and stride of each dimension."""
        return 1 + 2 * self.rank


@dataclass(frozen=True)
class ExtraScalar:
    """An extra number; ``kind`` is "bool", "int32", "int64" or "float"."""

    name: str
    kind: str


@dataclass(frozen=True)
class TracedVariant:
    """A variant as its kernels see it. Equal where the expressions and the extra values they read are equal.

    score          None = unchanged
    mask           None = every key that the other masks leave
    tensors        the extra tensors that are read, sorted by name; scalars: likewise
    normalization  "softmax", or "none": the score is the weight itself
    """

    score: Expression | None
    mask: Expression | None
    tensors: tuple[ExtraTensor, ...]
    scalars: tuple[ExtraScalar, ...]
    normalization: str = "softmax"
    name: str | None = field(default=None, compare=False)

    def code(self, scalar: str = "float") -> str:
        """C++ text of ``struct VariantFunctions``, for kernels that compute in ``scalar`` ("float" or "double")."""
        if scalar not in SCALARS:
            raise ValueError(f"scalar: got {scalar!r}, expected one of {', '.join(SCALARS)}")
        return self._texts[SCALARS.index(scalar)]

    @cached_property
    def _texts(self) -> tuple[str, ...]:
        from kernelgen.variants.emit import variant_functions

        return tuple(variant_functions(self, scalar) for scalar in SCALARS)

    @cached_property
    def digest(self) -> str:
        """12 hex digits of the text: the same for every function that gives the same kernel."""
        return hashlib.sha256("".join(self._texts).encode()).hexdigest()[:12]

    @property
    def word_count(self) -> int:
        """8-byte words of the argument block."""
        return sum(t.words for t in self.tensors) + len(self.scalars)

    def __str__(self) -> str:
        return f"{self.name or 'v'}_{self.digest}"

    def __reduce__(self) -> tuple[Any, ...]:
        return TracedVariant, (self.score, self.mask, self.tensors, self.scalars, self.normalization, self.name)


def scalar_kind(name: str, x: Any) -> str:
    """How a scalar is compiled in. Small integers get a kind of their own because 64-bit division is slow on GPUs."""
    if isinstance(x, bool):
        return "bool"
    if isinstance(x, numbers.Integral):
        if not INT64[0] <= int(x) <= INT64[1]:
            raise VariantError(f"variant: scalar {name!r} is {x}, expected an integer of at most 64 bits")
        return "int32" if INT32[0] <= int(x) <= INT32[1] else "int64"
    if isinstance(x, numbers.Real):
        return "float"
    raise VariantError(f"variant: scalar {name!r} is a {type(x).__name__}, expected a Python bool, int or float; pass tensors by tensors=")
