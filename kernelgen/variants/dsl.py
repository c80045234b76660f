"""Expressions to Python for CuTe-DSL, one line per operation, operands first: epilogues of products and variants of attention share it.
templates/cute/functions.py has the helpers that the text calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kernelgen.errors import VariantError
from kernelgen.variants.expression import BOOL, FLOATS, INT, Expression, in_order, number_of

if TYPE_CHECKING:
    from kernelgen.variants.traced import TracedVariant

_INFIX = {"add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "eq": "==", "ne": "!=", "and": "&", "or": "|", "xor": "^"}
_WRAPPING = {f"wrapping_{name}": _INFIX[name] for name in ("add", "sub", "mul")}
_HELPERS = {"maximum": "maximum", "minimum": "minimum", "abs": "absolute", "sigmoid": "sigmoid", "power": "power", "where": "where",
            "isnan": "isnan", "isinf": "isinf", "isfinite": "isfinite"}
_TESTS = ("isnan", "isinf", "isfinite")
_MATH = ("exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "tanh", "erf", "sqrt", "rsqrt", "sin", "cos", "floor", "ceil", "trunc")
_LOGIC = ("and", "or", "xor", "not")
_TYPES = {"float32": "Float32", "float64": "Float64", "bfloat16": "BFloat16", "float16": "Float16", "int32": "Int32", "int64": "Int64",
          "uint8": "Uint8", "bool": "Uint8"}


class Writer:
    """Writes one function's statements. A subclass says what the leaves are: fields, scalars, loads, sizes.

    Integers that may need 64 bits have them.

    what    in error messages: whose function it is
    """

    what = "epilogue"

    def leaf(self, e: Expression) -> str | None:
        """The text of what is no operation: a score, a field of the context, a scalar, a size; None for an operation."""
        raise NotImplementedError

    def load(self, e: Expression, names: Mapping[Expression, str]) -> str:
        raise NotImplementedError

    def lines(self, result: Expression, kind: str, more: tuple[Expression, ...] = ()) -> list[str]:
        """The function's body, which returns ``result`` as ``kind``, with ``more`` as a tuple."""
        names: dict[Expression, str] = {}
        lines: list[str] = []
        for e in in_order((result, *more)):
            leaf = None if e.is_constant else self.leaf(e)
            if e.is_constant or leaf is not None:
                names[e] = leaf or ""
                continue
            names[e] = f"t{len(lines)}"
            lines.append(f"    {names[e]} = {self.text(e, names)}")
        return [*lines, f"    return {', '.join(self.operand(e, names, kind) for e in (result, *more))}"]

    def kind(self, e: Expression) -> str:
        if e.dtype == INT:
            return "Int32" if e.is_int32 else "Int64"
        return "Boolean" if e.dtype == BOOL else "Float32"

    def operand(self, e: Expression, names: Mapping[Expression, str], wanted: str) -> str:
        """e as a value of a type of the DSL."""
        if e.is_constant:
            number = number_of(e)
            if wanted == "Boolean":
                return repr(bool(number))
            if wanted == "Float32" and not math.isfinite(number):
                return f'Float32(float("{float(number)}"))'
            return f"{wanted}({float(number) if wanted == 'Float32' else int(number)!r})"
        return names[e] if self.kind(e) == wanted else f"{wanted}({names[e]})"

    def _operand_type(self, e: Expression) -> str:
        """Comparisons take the type of their operands, all else that of the result; integers the width that holds every one."""
        compares = e.dtype == BOOL and e.op not in _LOGIC
        if e.op in _TESTS or (compares and any(o.dtype in FLOATS for o in e.operands)):
            return "Float32"
        if not compares and e.dtype != INT:
            return self.kind(e)
        everything = (*e.operands, *(() if compares else (e,)))
        return "Int32" if all(x.dtype == BOOL or x.is_int32 for x in everything) else "Int64"

    def text(self, e: Expression, names: Mapping[Expression, str]) -> str:
        if e.op == "load":
            return self.load(e, names)
        if e.op == "cast":
            return self.operand(e.operands[0], names, self.kind(e))
        if e.op == "where":
            condition, *chosen = e.operands
            values = (self.operand(condition, names, "Boolean"), *(self.operand(v, names, self.kind(e)) for v in chosen))
            return f"functions.where({', '.join(values)})"
        wanted, kind = self._operand_type(e), self.kind(e)
        text = self._operation(e, [self.operand(o, names, wanted) for o in e.operands], wanted)
        return text if e.dtype != INT or wanted == kind else f"{kind}({text})"

    def _operation(self, e: Expression, values: list[str], wanted: str) -> str:
        infix = _INFIX.get(e.op) or _WRAPPING.get(e.op)
        if infix:
            return f"{values[0]} {infix} {values[1]}"
        if e.op == "div" and wanted == "Float32":
            return f"{values[0]} / {values[1]}"
        if e.op in ("floordiv", "mod") and wanted != "Float32" and e.operands[1].low > 0:
            if e.op == "floordiv":
                return f"{values[0]} // {values[1]}"
            return f"{values[0]} % {values[1]}" if e.operands[0].low >= 0 else f"functions.floor_mod({', '.join(values)})"
        if e.op == "neg":
            return f"-{values[0]}"
        if e.op == "not" and e.dtype == BOOL:
            return f"functions.negation({values[0]})"
        if e.op in _HELPERS and (e.op != "power" or wanted == "Float32"):
            return f"functions.{_HELPERS[e.op]}({', '.join(values)})"
        if e.op in _MATH and wanted == "Float32":
            return f"cute.math.{e.op}({', '.join(values)})"
        raise VariantError(f"{self.what}: {e.op} of {e.dtype} values is not in CuTe-DSL {self.what}s; they have + - * / comparisons & | ~, "
                           f"where, minimum, maximum, abs, sigmoid, pow, {', '.join(_MATH)}, // and % of integers by positive ones")


class _VariantWriter(Writer):
    """Of variants: extra values lie in the argument block, ``words`` (kernelgen/variants/arguments.py)."""

    what = "variant"

    def __init__(self, traced: TracedVariant) -> None:
        self.tensors: dict[str, tuple[str, int]] = {}
        self.scalars: dict[str, tuple[str, int]] = {}
        offset = 0
        for tensor in traced.tensors:
            self.tensors[tensor.name] = (tensor.dtype, offset)
            offset += tensor.words
        for scalar in traced.scalars:
            self.scalars[scalar.name] = (scalar.kind, offset)
            offset += 1

    def leaf(self, e: Expression) -> str | None:
        if e.op in ("score", "field"):
            return str(e.value) if e.op == "field" else "x"
        if e.op == "scalar":
            kind, offset = self.scalars[str(e.value)]
            return f"functions.scalar_{kind}(words, {offset})"
        if e.op == "size" and isinstance(e.value, tuple):
            return f"functions.scalar_int64(words, {self.tensors[e.value[0]][1] + 1 + 2 * e.value[1]})"
        return None

    def load(self, e: Expression, names: Mapping[Expression, str]) -> str:
        dtype, offset = self.tensors[str(e.value)]
        indices = [f"({self.operand(i, names, 'Int64')}, {i.low < 0})" for i in e.operands]
        read = f"functions.element(words, {offset}, cutlass.{_TYPES[dtype]}{''.join(', ' + i for i in indices)})"
        return f"{read} != 0" if e.dtype == BOOL else f"{self.kind(e)}({read})"


FIELDS = ("batch", "head", "kv_head", "q_index", "q_pos", "k_pos", "q_len", "kv_len")


def variant_functions(traced: TracedVariant) -> str:
    """``def score(x, *FIELDS, words)`` and ``def visible(*FIELDS, words)``, those that the variant has. Raises VariantError for an
    operation without a form in the DSL."""
    lines: list[str] = []
    if traced.score is not None:
        lines += [f"def score({', '.join(('x', *FIELDS, 'words'))}):", *_VariantWriter(traced).lines(traced.score, "Float32"), "", ""]
    if traced.mask is not None:
        lines += [f"def visible({', '.join((*FIELDS, 'words'))}):", *_VariantWriter(traced).lines(traced.mask, "Boolean"), "", ""]
    return "\n".join(lines)
