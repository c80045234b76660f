"""What a variant's function may call: torch's elementwise functions and Python's operators, as builders of expressions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from kernelgen.errors import VariantError
from kernelgen.variants.expression import (
    BOOL,
    FLOAT32,
    FLOATS,
    INT,
    INT32,
    INT64,
    REAL,
    Expression,
    arithmetic,
    cast,
    compare,
    constant,
    logic,
    make,
    negation,
    number_of,
    promote,
    select,
)

Builder = Callable[..., Expression]

# ---- Operators -----------------------------------------------------------------------------------------------------


def _no_bools(name: str, *operands: Expression) -> None:
    if all(e.dtype == BOOL for e in operands):
        raise VariantError(f"variant: {name} of bools is not defined; use &, |, ^ or ~, or .int() for a number")


def _add(a: Expression, b: Expression) -> Expression:
    return logic("or", a, b) if a.dtype == b.dtype == BOOL else arithmetic("add", a, b)


def _subtract(a: Expression, b: Expression) -> Expression:
    _no_bools("-", a, b)
    if a is b and a.dtype == INT:
        return constant(0, INT, a.weak)
    return arithmetic("sub", a, b)


def _multiply(a: Expression, b: Expression) -> Expression:
    return logic("and", a, b) if a.dtype == b.dtype == BOOL else arithmetic("mul", a, b)


def _divide(a: Expression, b: Expression, rounding_mode: str | None = None) -> Expression:
    if rounding_mode == "floor":
        return _floor_divide(a, b)
    if rounding_mode is not None:
        raise VariantError(f"variant: got rounding_mode={rounding_mode!r}, expected None or 'floor'")
    dtype, weak = promote(a, b)
    if dtype not in FLOATS:
        dtype = REAL if weak else FLOAT32
    return arithmetic("div", a, b, dtype=dtype, weak=weak)


def _numeric(op: str, name: str) -> Builder:
    def build(a: Expression, b: Expression) -> Expression:
        _no_bools(name, a, b)
        return arithmetic(op, a, b)

    return build


_floor_divide = _numeric("floordiv", "//")


def _bitwise(op: str, name: str) -> Builder:
    def build(a: Expression, b: Expression) -> Expression:
        if any(e.dtype in FLOATS for e in (a, b)):
            raise VariantError(f"variant: {name} needs bools or integers, got {a.dtype} and {b.dtype}")
        return logic(op, a, b) if a.dtype == b.dtype == BOOL else arithmetic(op, a, b)

    return build


def _invert(a: Expression) -> Expression:
    if a.dtype in FLOATS:
        raise VariantError(f"variant: ~ needs a bool or an integer, got {a.dtype}")
    return negation(a) if a.dtype == BOOL else arithmetic("not", a)


def _shift(op: str, name: str) -> Builder:
    def build(a: Expression, b: Expression) -> Expression:
        if a.dtype != INT or b.dtype != INT:
            raise VariantError(f"variant: {name} needs integers, got {a.dtype} and {b.dtype}")
        if op == "shl" and b.is_constant and 0 <= number_of(b) <= 62:
            return arithmetic("mul", a, constant(1 << int(number_of(b))))
        return arithmetic(op, a, b)

    return build


def _negate(a: Expression) -> Expression:
    _no_bools("-", a)
    return arithmetic("neg", a)


def _absolute(a: Expression) -> Expression:
    _no_bools("abs", a)
    return arithmetic("abs", a)


def _power(base: Expression, exponent: Expression) -> Expression:
    _no_bools("**", base, exponent)
    if exponent.is_constant and not base.is_constant:
        return _constant_power(base, number_of(exponent), exponent)
    if base.is_constant and number_of(base) == 2 and exponent.dtype in FLOATS and not exponent.weak:
        return arithmetic("exp2", exponent, dtype=promote(base, exponent)[0])
    return arithmetic("power", base, exponent)


def _constant_power(base: Expression, number: int | float, exponent: Expression) -> Expression:
    """Powers that torch computes by multiplication or by a square root, and small integer ones."""
    dtype = promote(base, exponent)[0]
    if dtype == INT and number < 0:
        raise VariantError(f"variant: got an integer to the power of {number}, expected an exponent >= 0; "
                           "make the base a float with .float()")
    if dtype in FLOATS and base.dtype != dtype:
        base = cast(base, dtype)
    if number in (1, 2, 3):
        product = base
        for _ in range(int(number) - 1):
            product = arithmetic("mul", product, base)
        return product
    if number in (0.5, -0.5):
        return arithmetic("sqrt" if number > 0 else "rsqrt", base)
    if number == -1:
        return arithmetic("div", constant(1), base)
    return arithmetic("power", base, exponent)


def _swapped(op: str) -> Builder:
    return lambda a, b: compare(op, b, a)


# ---- Functions -----------------------------------------------------------------------------------------------------

def _float_function(op: str) -> Builder:
    def build(input: Expression) -> Expression:
        return arithmetic(op, input, dtype=input.dtype if input.dtype in FLOATS else FLOAT32)

    return build


def _rounding(op: str) -> Builder:
    """Integers are whole already."""
    def build(input: Expression) -> Expression:
        return input if input.dtype in (INT, BOOL) else arithmetic(op, input)

    return build


def _sign(input: Expression) -> Expression:
    return input if input.dtype == BOOL else arithmetic("sign", input)


def _float_test(op: str, of_integers: bool) -> Builder:
    def build(input: Expression) -> Expression:
        return make(op, BOOL, (input,)) if input.dtype in FLOATS else constant(of_integers)

    return build


def _extremum(op: str) -> Builder:
    def build(input: Expression, other: Expression) -> Expression:
        _no_bools(op, input, other)
        return arithmetic(op, input, other)

    return build


def _clamp(input: Expression, min: Expression | None = None, max: Expression | None = None) -> Expression:
    if min is None and max is None:
        raise VariantError("variant: torch.clamp got neither min nor max")
    if min is not None:
        input = arithmetic("maximum", input, min)
    return input if max is None else arithmetic("minimum", input, max)


def _as_bool(e: Expression) -> Expression:
    return cast(e, BOOL)


def _logical(op: str) -> Builder:
    return lambda input, other: logic(op, _as_bool(input), _as_bool(other))


def _where(condition: Expression, input: Expression, other: Expression) -> Expression:
    if condition.dtype != BOOL:
        raise VariantError(f"variant: torch.where got a condition of type {condition.dtype}, expected bool; compare it with something")
    return select(condition, input, other)


def _like(fill: int | float | None) -> Builder:
    def build(input: Expression, fill_value: Expression | None = None) -> Expression:
        value = fill if fill_value is None else number_of(fill_value) if fill_value.is_constant else None
        if value is None:
            raise VariantError("variant: torch.full_like needs fill_value to be a Python number")
        return constant(value, input.dtype, weak=False)

    return build


def _silu(input: Expression, inplace: Any = None) -> Expression:
    return arithmetic("mul", input, _float_function("sigmoid")(input))


def _relu(input: Expression, inplace: Any = None) -> Expression:
    return arithmetic("maximum", input, constant(0))


def _log_sigmoid(input: Expression) -> Expression:
    return _negate(_float_function("softplus")(_negate(input)))


# What ``.to`` accepts. float64 is the type the kernel computes in: the widest there is.
CASTS: dict[torch.dtype, tuple[str, tuple[int, int]]] = {
    torch.float32: (FLOAT32, INT64), torch.float64: (REAL, INT64), torch.int32: (INT, INT32), torch.int64: (INT, INT64),
    torch.bool: (BOOL, INT64),
}


def _to(input: Expression, dtype: Any) -> Expression:
    if isinstance(dtype, Expression):
        return cast(input, dtype.dtype)
    if dtype not in CASTS:
        raise VariantError(f"variant: .to({dtype}) is not possible in a kernel, expected one of {', '.join(map(str, CASTS))}")
    return cast(input, CASTS[dtype][0], CASTS[dtype][1])


_FLOAT_FUNCTIONS = ("atan", "cos", "cosh", "erf", "exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "rsqrt", "sigmoid", "sin",
                    "sinh", "softplus", "sqrt", "tan", "tanh")
_arctan2 = lambda input, other: arithmetic("arctan2", input, other, dtype=_divide(input, other).dtype)  # noqa: E731

# By torch's name, as functions and as methods of a value.
FUNCTIONS: dict[str, Builder] = {
    **{name: _float_function(name) for name in _FLOAT_FUNCTIONS},
    **{name: _rounding(name) for name in ("ceil", "floor", "round", "trunc")},
    "abs": _absolute, "sign": _sign, "neg": _negate, "square": lambda input: _power(input, constant(2)),
    "reciprocal": lambda input: _divide(constant(1), input), "relu": _relu, "silu": _silu, "log_sigmoid": _log_sigmoid,
    "add": _add, "sub": _subtract, "mul": _multiply, "div": _divide, "floor_divide": _floor_divide,
    "remainder": _numeric("mod", "%"), "fmod": _numeric("fmod", "fmod"), "pow": _power, "atan2": _arctan2,
    "minimum": _extremum("minimum"), "maximum": _extremum("maximum"), "clamp": _clamp, "where": _where,
    "lt": partial(compare, "lt"), "le": partial(compare, "le"), "gt": _swapped("lt"), "ge": _swapped("le"),
    "eq": partial(compare, "eq"), "ne": partial(compare, "ne"),
    "logical_and": _logical("and"), "logical_or": _logical("or"), "logical_xor": _logical("xor"),
    "logical_not": lambda input: negation(_as_bool(input)),
    "bitwise_and": _bitwise("and", "&"), "bitwise_or": _bitwise("or", "|"), "bitwise_xor": _bitwise("xor", "^"),
    "bitwise_not": _invert, "bitwise_left_shift": _shift("shl", "<<"), "bitwise_right_shift": _shift("shr", ">>"),
    "isnan": _float_test("isnan", False), "isinf": _float_test("isinf", False), "isfinite": _float_test("isfinite", True),
    "zeros_like": _like(0), "ones_like": _like(1), "full_like": _like(None),
}
ALIASES = {
    "absolute": "abs", "negative": "neg", "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "max": "maximum",
    "min": "minimum", "clip": "clamp", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne",
    "arctan": "atan", "arctan2": "atan2", "fix": "trunc", "special_expit": "sigmoid", "floordiv": "floor_divide",
    "truediv": "div", "mod": "remainder", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not",
}
# Methods that are no function of torch, or take their arguments in another order.
METHODS: dict[str, Builder] = {
    "to": _to, "type_as": _to, "float": partial(_to, dtype=torch.float32), "double": partial(_to, dtype=torch.float64),
    "int": partial(_to, dtype=torch.int32), "long": partial(_to, dtype=torch.int64), "bool": partial(_to, dtype=torch.bool),
    "where": lambda input, condition, other: _where(condition, input, other),
}
# Python's operator -> (function of torch that does the same, as people write it).
OPERATORS = {
    "add": ("add", "+"), "sub": ("sub", "-"), "mul": ("mul", "*"), "truediv": ("div", "/"), "floordiv": ("floor_divide", "//"),
    "mod": ("remainder", "%"), "pow": ("pow", "**"), "and": ("bitwise_and", "&"), "or": ("bitwise_or", "|"), "xor": ("bitwise_xor", "^"),
    "lshift": ("bitwise_left_shift", "<<"), "rshift": ("bitwise_right_shift", ">>"),
    "lt": ("lt", "<"), "le": ("le", "<="), "gt": ("gt", ">"), "ge": ("ge", ">="), "eq": ("eq", "=="), "ne": ("ne", "!="),
}
UNARY_OPERATORS = {"neg": ("neg", "-"), "invert": ("bitwise_not", "~"), "abs": ("abs", "abs()")}
# These take a Python number for no tensor in torch, so neither do they here: one function has to serve the oracle too.
_TENSORS_ONLY = {"minimum", "maximum", "atan2", "logical_and", "logical_or", "logical_xor"}


def supported() -> str:
    """What a variant's function may use, for error messages and the documentation."""
    operators = " ".join(text for _, text in [*OPERATORS.values(), *UNARY_OPERATORS.values()])
    return (f"the operators {operators}; torch.{{{', '.join(sorted(FUNCTIONS))}}} and the methods of these names; "
            f".{{{', '.join(sorted(set(METHODS) - set(FUNCTIONS)))}}}; full indexing of extra tensors")


def find(name: str, method: bool = False) -> tuple[str, Builder]:
    """(canonical name, builder). Raises VariantError that lists what there is."""
    if method and name in METHODS:
        return name, METHODS[name]
    canonical = ALIASES.get(name, name)
    if canonical not in FUNCTIONS:
        raise VariantError(f"variant: {'method .' if method else 'torch.'}{name} is not supported in a kernel; supported are {supported()}")
    return canonical, FUNCTIONS[canonical]


@cache
def _signature(builder: Builder) -> inspect.Signature:
    return inspect.signature(builder)


def build(name: str, builder: Builder, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: list[bool]) -> Expression:
    """Call a builder with expressions. Raises VariantError where the arguments are not those it knows.

    ``numbers``: for each positional operand, whether it is a Python number in torch.
    """
    try:
        _signature(builder).bind(*args, **kwargs)
    except TypeError as error:
        raise VariantError(f"variant: {name} {error}; a kernel knows {name}{_signature(builder)}".replace(": 'Expression'", "")) from None
    if numbers and (all(numbers) or (any(numbers) and name in _TENSORS_ONLY)):
        raise VariantError(f"variant: torch's {name} takes tensors, got a Python number (a constant or a scalar); use torch.clamp "
                           "for a bound, pass a number that is computed before as a scalar, or give an extra tensor")
    return builder(*args, **kwargs)
