"""Expressions to the C++ text of ``struct VariantFunctions`` and ``struct EpilogueFunction``: one constant per operation, operands first.

The text depends on the expressions alone. Extra values appear as offsets in the argument block, never by name. The walk, and the type in
which each operation is done, are those of every language: triton_text.py writes them for Triton.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from kernelgen.variants.expression import BOOL, FLOAT32, FLOATS, INT, INT32, Expression, in_order, number_of, promote

if TYPE_CHECKING:
    from kernelgen.variants.epilogue import TracedEpilogue
    from kernelgen.variants.traced import ExtraTensor, TracedVariant

_MATH = "variant_math::"
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}
_COMPARISONS = ("lt", "le", "eq", "ne")
_TESTS = ("isnan", "isinf", "isfinite")
# op -> (helper for floats, helper for integers) where the helper is not called like the op.
_CALLS = {
    "abs": ("absolute", "integer_abs"), "floordiv": ("floor_div_real", "floor_div"), "mod": ("floor_mod_real", "floor_mod"),
    "fmod": ("truncated_mod_real", "truncated_mod"), "power": ("power", "integer_power"), "wrapping_floordiv": ("", "floor_div"),
    "shl": ("", "shift_left"), "shr": ("", "shift_right"),
}
# Integer helpers that exist in 64 bits only.
_WIDE = ("shl", "shr", "power", "wrapping_add", "wrapping_sub", "wrapping_mul", "wrapping_neg", "wrapping_abs", "wrapping_floordiv")


def variant_functions(traced: TracedVariant, scalar: str) -> str:
    """The struct, for kernels that compute in ``scalar``; needs kernelgen/attention/variant_math.h and namespace kernelgen."""
    score, mask = traced.score, traced.mask
    lines = [
        "struct VariantFunctions {",
        f"  static constexpr bool kHasScore = {_bool(score is not None)}, kHasMask = {_bool(mask is not None)};",
        f"  static constexpr bool kSoftmax = {_bool(traced.normalization == 'softmax')};",
        f"  static KERNELGEN_DEVICE {scalar} score({scalar} score, const VariantContext& c, const int64_t* args) {{",
        *(Body(traced, scalar).lines(score, scalar) if score is not None else ["    return score;"]),
        "  }",
        "  static KERNELGEN_DEVICE bool visible(const VariantContext& c, const int64_t* args) {",
        *(Body(traced, scalar).lines(mask, "bool") if mask is not None else ["    return true;"]),
        "  }",
        "};",
    ]
    return "\n".join(lines) + "\n"


def epilogue_function(traced: TracedEpilogue, scalar: str) -> str:
    """The struct, for products whose sums are ``scalar``; needs kernelgen/gemm/epilogue_function.h and namespace kernelgen."""
    terms, maxima = traced.terms, sum(1 << i for i, kind in enumerate(traced.kinds) if kind == "max")
    return "\n".join([
        f"struct EpilogueFunction{f' : RowTotals<{scalar}, {len(terms)}, {maxima}>' if terms else ''} {{",
        f"  static KERNELGEN_DEVICE {scalar} value({scalar} x, {scalar} y, const EpilogueContext& c, const int64_t* args"
        f"{f', {scalar} (&terms)[{len(terms)}]' if terms else ''}) {{",
        *Body(traced, scalar).lines(traced.result, scalar, terms),
        "  }",
        "};",
    ]) + "\n"


def _bool(x: bool) -> str:
    return "true" if x else "false"


class Body:
    """Statements of one function. Types go by their names in C++."""

    helpers = _MATH
    quotient = "/"  # of whole numbers, towards 0

    def __init__(self, traced: TracedVariant | TracedEpilogue, scalar: str) -> None:
        self.scalar = scalar
        self.names: dict[Expression, str] = {}
        self.tensors: dict[str, tuple[ExtraTensor, int]] = {}
        self.scalars: dict[str, tuple[str, int]] = {}
        offset = 0
        for tensor in traced.tensors:
            self.tensors[tensor.name] = (tensor, offset)
            offset += tensor.words
        for extra in traced.scalars:
            self.scalars[extra.name] = (extra.kind, offset)
            offset += 1

    def lines(self, result: Expression, out: str, terms: tuple[Expression, ...] = ()) -> list[str]:
        """``terms``: of totals over rows."""
        text: list[str] = []
        for e in in_order((result, *terms)):
            if e.is_constant:
                continue  # written where it is used, in the type it is used in
            if e.op == "field":
                self.names[e] = self.field(str(e.value))
            elif e.op == "score":
                self.names[e] = str(e.value or "score")
            else:
                name = f"t{len(text)}"
                text.append(self.statement(self.type_of(e), name, self.text(e)))
                self.names[e] = name
        text += [f"    terms[{i}] = {self.operand(e, out)};" for i, e in enumerate(terms)]
        return [*text, self.returned(self.operand(result, out))]

    def field(self, name: str) -> str:
        return f"c.{name}"

    def statement(self, kind: str, name: str, text: str) -> str:
        return f"    const {kind} {name} = {text};"

    def returned(self, text: str) -> str:
        return f"    return {text};"

    def literal(self, value: int | float, wanted: str) -> str:
        return _literal(value, wanted)

    def converted(self, text: str, wanted: str) -> str:
        """``text`` of another type as ``wanted``."""
        return f"{text} != 0" if wanted == "bool" else f"static_cast<{wanted}>({text})"

    def word(self, offset: int) -> str:
        return f"args[{offset}]"

    def chosen(self, condition: str, a: str, b: str) -> str:
        return f"{condition} ? {a} : {b}"

    def negative(self, value: str, kind: str) -> str:
        return f"-{value}" if not value.startswith("-") else f"-({value})"

    def opposite(self, value: str) -> str:
        return f"!{value}"

    def type_of(self, e: Expression) -> str:
        if e.dtype == INT:
            return "int32_t" if e.is_int32 else "int64_t"
        return {BOOL: "bool", FLOAT32: "float"}.get(e.dtype, self.scalar)

    def operand(self, e: Expression, wanted: str) -> str:
        """e as a value of the type ``wanted``."""
        if e.is_constant:
            return self.literal(number_of(e), wanted)
        return self.names[e] if self.type_of(e) == wanted else self.converted(self.names[e], wanted)

    def width(self, *values: Expression) -> str:
        """The integer type that holds every one of these."""
        return "int32_t" if all(e.dtype == BOOL or e.is_int32 for e in values) else "int64_t"

    def text(self, e: Expression) -> str:
        special: dict[str, Callable[[Expression], str]] = {
            "scalar": self.read_scalar, "size": self.read_size, "load": self.load, "cast": self.cast, "where": self.where,
        }
        if e.op in special:
            return special[e.op](e)
        if e.op in _COMPARISONS:
            return self.comparison(e)
        if e.op in _TESTS:
            return f"{self.helpers}{e.op}({self.operand(e.operands[0], self.type_of(e.operands[0]))})"
        return self.integer(e) if e.dtype == INT else self.plain(e, self.type_of(e))

    def read_scalar(self, e: Expression) -> str:
        kind, offset = self.scalars[str(e.value)]
        word = self.word(offset)
        if kind == "float":
            return self.converted(f"{self.helpers}double_of_bits({word})", self.scalar)
        return word if kind == "int64" else self.converted(word, {"bool": "bool", "int32": "int32_t"}[kind])

    def read_size(self, e: Expression) -> str:
        assert isinstance(e.value, tuple)
        name, dim = e.value
        return self.word(self.tensors[name][1] + 1 + 2 * dim)

    def load(self, e: Expression) -> str:
        from kernelgen.variants.traced import ELEMENTS

        tensor, base = self.tensors[str(e.value)]
        terms = []
        for d, index in enumerate(e.operands):
            size, stride = self.word(base + 1 + 2 * d), self.word(base + 2 + 2 * d)
            side = "index_from_start" if index.low >= 0 else "index_either_side"
            terms.append(f"{self.helpers}{side}({self.operand(index, 'int64_t')}, {size}) * {stride}")
        read = f"{self.helpers}{ELEMENTS[tensor.dtype][2]}({self.word(base)}, {' + '.join(terms) or '0'})"
        loaded = "double" if tensor.dtype == "float64" else "float"
        return read if e.dtype not in FLOATS or loaded == self.scalar else self.converted(read, self.scalar)

    def cast(self, e: Expression) -> str:
        (source,) = e.operands
        have = self.type_of(source)
        if e.dtype == INT and source.dtype in FLOATS:
            return f"{self.helpers}to_int{e.value}({self.operand(source, have)})"
        return self.converted(self.operand(source, have), self.type_of(e))

    def where(self, e: Expression) -> str:
        condition, a, b = e.operands
        wanted = self.type_of(e)
        return self.chosen(self.operand(condition, "bool"), self.operand(a, wanted), self.operand(b, wanted))

    def comparison(self, e: Expression) -> str:
        a, b = e.operands
        dtype = promote(a, b)[0]
        wanted = {FLOAT32: "float"}.get(dtype, self.scalar) if dtype in FLOATS else self.width(a, b)
        return f"{self.operand(a, wanted)} {_INFIX[e.op]} {self.operand(b, wanted)}"

    def integer(self, e: Expression) -> str:
        """An integer operation in the narrowest type that holds its operands and its result."""
        wanted = "int64_t" if e.op in _WIDE else self.width(e, *e.operands)
        text = self.division(e, wanted) if e.op in ("floordiv", "mod") else self.plain(e, wanted)
        result = self.type_of(e)
        return text if result == wanted else self.converted(text, result)

    def division(self, e: Expression, wanted: str) -> str:
        """Floor division by what is known of the operands: a shift, C++'s own division, or a helper."""
        a, b = e.operands
        left, right = self.operand(a, wanted), self.operand(b, wanted)
        if b.is_constant and b.low > 0 and b.low & (b.low - 1) == 0:
            if e.op == "mod":
                return f"{left} & {self.literal(b.low - 1, wanted)}"
            return f"{left} >> {b.low.bit_length() - 1}"
        if b.low <= 0:
            return self.plain(e, wanted)
        if a.low >= 0:
            return f"{left} {self.quotient if e.op == 'floordiv' else '%'} {right}"
        return f"{self.helpers}{'floor_div' if e.op == 'floordiv' else 'floor_mod'}_positive({left}, {right})"

    def plain(self, e: Expression, wanted: str) -> str:
        """Infix, prefix or call, all operands in one type."""
        values = [self.operand(x, wanted) for x in e.operands]
        if e.op in _INFIX:
            return f"{values[0]} {_INFIX[e.op]} {values[1]}"
        if e.op == "neg":
            return self.negative(values[0], wanted)
        if e.op == "not":
            return self.opposite(values[0]) if e.dtype == BOOL else f"~{values[0]}"
        of_floats, of_integers = _CALLS.get(e.op, (e.op, e.op))
        return f"{self.helpers}{of_floats if e.dtype in FLOATS else of_integers}({', '.join(values)})"


def _literal(value: int | float, wanted: str) -> str:
    """A number in a C++ type, exactly."""
    if wanted == "bool":
        return _bool(bool(value))
    if wanted in ("int32_t", "int64_t"):
        number = int(value)
        if wanted == "int32_t":
            return str(number) if number > INT32[0] else "(-2147483647 - 1)"
        return f"int64_t({number})" if number > -(2**63) else "int64_t(-9223372036854775807ll - 1)"
    real = as_float32(float(value)) if wanted == "float" else float(value)
    if math.isnan(real):
        return f"{_MATH}nan<{wanted}>()"
    if math.isinf(real):
        return f"{'-' if real < 0 else ''}{_MATH}infinity<{wanted}>()"
    text = f"{real:.9g}" if wanted == "float" else repr(real)
    text = text if "." in text or "e" in text else f"{text}.0"
    return f"{text}f" if wanted == "float" else text


def as_float32(value: float) -> float:
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
