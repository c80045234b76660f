"""Epilogues of products: a Python function ``(x, ctx) -> value`` of one element of a @ b, traced as a variant of attention is; of a product
whose columns are a gate's and what it gates ``(x, y, ctx) -> value``, x of the first half of the columns and y of the second.

``ctx`` has ``batch``, ``row`` and ``column`` of the element, the extra tensors, indexed with one integer expression per dimension, and the
extra numbers. Traced once, it is written as C++ (emit.py) for CUDA and CPU kernels and as Python for CuTe-DSL (templates/cute/functions.py
has its helpers). The public side: epilogue_function.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kernelgen.errors import VariantError
from kernelgen.variants.dsl import Writer
from kernelgen.variants.epilogue_function import Reduction, taken_apart
from kernelgen.variants.expression import FLOATS, INT, INT32, REAL, Expression, in_order, make
from kernelgen.variants.trace import _KIND_TYPE, Context, Tensor, Value, _element, _names_in, _result, called, extra_tensor
from kernelgen.variants.traced import ExtraScalar, ExtraTensor, scalar_kind

FIELDS = ("batch", "row", "column")
_WORDS = {"bool": "Int32", "int32": "Int32", "float": "Float32"}
_DSL = {"float32": "Float32", "bfloat16": "BFloat16", "float16": "Float16", "int32": "Int32", "int64": "Int64", "uint8": "Uint8"}


class _EpilogueWriter(Writer):
    """Extra values are arguments: tensors and numbers."""

    def leaf(self, e: Expression) -> str | None:
        if e.op in ("score", "field"):
            return str(e.value)
        if e.op == "size" and isinstance(e.value, tuple):
            return f"Int64(cute.size(extra_{e.value[0]}, mode=[{e.value[1]}]))"
        return f"extra_{e.value}" if e.op == "scalar" else None

    def load(self, e: Expression, names: Mapping[Expression, str]) -> str:
        places = [self.operand(i, names, "Int32" if i.is_int32 else "Int64") for i in e.operands]
        indices = [at if i.low >= 0 else f"functions.from_end(extra_{e.value}, {d}, {at})"
                   for d, (i, at) in enumerate(zip(e.operands, places))]
        return f"functions.load({', '.join((f'extra_{e.value}', *indices))})"


def _is_large(t: Any) -> bool:
    return any(size > INT32[1] for size in t.shape)


@dataclass(frozen=True)
class TracedEpilogue:
    """An epilogue as its kernels see it. Equal where the expression and the extra values that it reads are equal.

    rows    names of tensors whose last dimension is contiguous, which is compiled in
    large   names of those of a dimension of 2^31 elements or more, which CuTe-DSL's kernels do not take
    gated   takes two columns of the product for one of the output
    totals  its reductions over rows
    """

    result: Expression
    tensors: tuple[ExtraTensor, ...] = ()
    scalars: tuple[ExtraScalar, ...] = ()
    rows: tuple[str, ...] = ()
    gated: bool = False
    totals: tuple[Reduction, ...] = ()
    large: tuple[str, ...] = ()
    name: str | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.name or 'e'}_{self.digest}"

    def cpp(self, scalar: str = "float") -> str:
        """C++ text of ``struct EpilogueFunction``, for kernels whose sums are ``scalar`` ("float" or "double")."""
        from kernelgen.variants.emit import epilogue_function

        return epilogue_function(self, scalar)

    def fits(self, tensors: Mapping[str, Any], scalars: Mapping[str, Any]) -> bool:
        """Are these of the kinds that were traced?"""
        same = all(extra_tensor(t.name, given := tensors[t.name]) == t and (t.name in self.rows) == (t.rank > 0 and given.stride(-1) == 1)
                   and (t.name in self.large) == _is_large(given) for t in self.tensors)
        return same and all(scalar_kind(s.name, scalars[s.name]) == s.kind for s in self.scalars)

    @property
    def names(self) -> tuple[str, ...]:
        """Extra values in the order in which a kernel takes them."""
        return (*(t.name for t in self.tensors), *(s.name for s in self.scalars))

    @property
    def declarations(self) -> tuple[str, ...]:
        """Types of the same in CuTe-DSL."""
        return (*("cute.Tensor" for _ in self.tensors), *(f"cutlass.{_WORDS[s.kind]}" for s in self.scalars))

    @property
    def stand_ins(self) -> tuple[str, ...]:
        """Expressions of arguments to compile with: any sizes and strides."""
        made = []
        for t in self.tensors:
            last = "1," if t.name in self.rows else "cute.sym_int64(),"
            shape, strides = "cute.sym_int(), " * t.rank, "cute.sym_int64(), " * (t.rank - 1) + last
            made.append(f"make_fake_tensor(cutlass.{_DSL[t.dtype]}, ({shape}), ({strides}))")
        return (*made, *(f"{_WORDS[s.kind]}(1)" for s in self.scalars))

    @cached_property
    def code(self) -> str:
        """``def epilogue(x, y, batch, row, column, *extra values)``, of the value, and the term of each total."""
        head = f"def epilogue({', '.join(('x', 'y', *FIELDS, *(f'extra_{n}' for n in self.names)))}):"
        return "\n".join([head, *_EpilogueWriter().lines(self.result, "Float32", self.terms)])

    @property
    def terms(self) -> tuple[Expression, ...]:
        return tuple(total.value for total in self.totals)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(total.kind for total in self.totals)

    @cached_property
    def digest(self) -> str:
        """12 hex digits of the C++ text: the same for every function that gives the same kernel."""
        return hashlib.sha256(self.cpp().encode()).hexdigest()[:12]

    @cached_property
    def outside_dsl(self) -> str:
        """Why CuTe-DSL cannot have it, or ""."""
        for t in self.tensors:
            if t.dtype not in _DSL or t.rank == 0:
                return f"extra tensor {t.name!r} is {t.dtype} of {t.rank} dimensions: one of {', '.join(_DSL)}, one dimension or more"
        if self.large:
            return f"extra tensor {self.large[0]!r} has a dimension of 2^31 elements or more"
        for s in self.scalars:
            if s.kind not in _WORDS:
                return f"the number {s.name!r} needs 64 bits: one of 32"
        try:
            _ = self.code
        except VariantError as error:
            return str(error).removeprefix("epilogue: ")
        return ""


def trace_epilogue(
    function: Callable[..., Any], tensors: Mapping[str, Any] | None = None, scalars: Mapping[str, Any] | None = None, gated: bool = False
) -> TracedEpilogue:
    """:func:`trace_function`, for CuTe-DSL. Raises VariantError also for what has no form there."""
    traced = trace_function(function, tensors, scalars, gated)
    if traced.outside_dsl:
        raise VariantError(f"epilogue: {traced.outside_dsl}")
    return traced


def trace_function(
    function: Callable[..., Any], tensors: Mapping[str, Any] | None = None, scalars: Mapping[str, Any] | None = None, gated: bool = False,
    name: str | None = None,
) -> TracedEpilogue:
    """``function`` called once with stand-ins; ``gated``: it takes both halves. Raises VariantError for what cannot become a kernel,
    DtypeError for a tensor's type."""
    known = {name: t if isinstance(t, ExtraTensor) else extra_tensor(name, t) for name, t in (tensors or {}).items()}
    numbers = {name: ExtraScalar(name, scalar_kind(name, x)) for name, x in (scalars or {}).items()}
    hidden = {"x", "y", *FIELDS} & {*known, *numbers}
    if hidden:
        raise VariantError(f"epilogue: the extra value {min(hidden)!r} hides a field of the context; rename it")
    values: dict[str, Value | Tensor] = {
        field: Value(make("field", INT, value=field, bounds=(0, INT32[1]))) for field in FIELDS}
    values |= {n: Tensor(t) if t.rank else _element(t, ()) for n, t in known.items()}
    for n, scalar in numbers.items():
        dtype, bounds = _KIND_TYPE[scalar.kind]
        values[n] = Value(make("scalar", dtype, value=n, weak=True, bounds=bounds))
    given = {half: Value(make("score", REAL, value=half)) for half in (("x", "y") if gated else ("x",))}
    try:
        value, reduced = taken_apart(called("epilogue", function, given | {"ctx": Context(values)}))
        result = _result("epilogue", value, FLOATS, "a float (the new value)")
        totals = tuple(Reduction(n, r.kind, _result(f"epilogue's {n!r}", r.value, FLOATS, "a float")) for n, r in reduced.items())
    except VariantError as error:  # in the words of variants of attention, which are traced by the same
        error.args = (re.sub(r"^variant(?=: )|(?<= by )variant(?=\(tensors=)", "epilogue", str(error)),)
        raise
    read = {n for e in in_order((result, *(total.value for total in totals))) for n in _names_in(e)}
    # Descriptions without a tensor are those of calls, whose rows are contiguous.
    rows = (n for n, t in (tensors or {}).items() if n in read and known[n].rank and (isinstance(t, ExtraTensor) or t.stride(-1) == 1))
    large = tuple(n for n, t in sorted((tensors or {}).items()) if n in read and not isinstance(t, ExtraTensor) and _is_large(t))
    return TracedEpilogue(result, tuple(known[n] for n in sorted(known) if n in read),
                          tuple(numbers[n] for n in sorted(numbers) if n in read), tuple(sorted(rows)), gated, totals, large, name)
