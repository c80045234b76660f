"""The expression of a variant: an immutable graph in which equal parts are one object.

Types, and what they mean in torch's terms when the oracle runs the same function in float64:

    bool     torch.bool
    int      torch.int64; a kernel computes it in 32 bits wherever the known range of the value allows
    float32  what torch makes of integers by division, of an integer and a Python float, and by ``.float()``
    real     the type the kernel computes in: the score, floating extra tensors

Python numbers, and what Python computes from them alone (a variant's scalars), are ``weak``: beside a tensor's value they
take its type, as in torch.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernelgen.errors import VariantError
from kernelgen.forks import Lock

BOOL, INT, FLOAT32, REAL = "bool", "int", "float32", "real"
_RANK = {BOOL: 0, INT: 1, FLOAT32: 2, REAL: 3}
FLOATS = (FLOAT32, REAL)

INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)
# Requests are shorter than this, so that differences of positions stay within 32 bits.
MAX_LENGTH = 2**30

Range = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Expression:
    """One operation. Made by :func:`make` only, so that equal expressions are identical; compared by identity.

    ``value``: number of a constant, name of a context field, extra tensor or scalar, (tensor, dimension) of a size.
    ``low`` and ``high`` bound the value of an int, and of a bool, which beside an int is 0 or 1.
    """

    op: str
    dtype: str
    operands: tuple[Expression, ...] = ()
    value: object = None
    weak: bool = False
    low: int = 0
    high: int = 0

    @property
    def is_constant(self) -> bool:
        return self.op == "constant"

    @property
    def is_int32(self) -> bool:
        return INT32[0] <= self.low and self.high <= INT32[1]

    def __repr__(self) -> str:
        value = "" if self.value is None else f" {self.value!r}"
        return f"<{self.dtype} {self.op}{value} of {len(self.operands)} operands>"

    @staticmethod
    def read_back(*, low: int = 0, high: int = 0, **parts: Any) -> Expression:
        """From its fields: for manifests, of whose kernels the text must be that of the call."""
        return make(bounds=(low, high), **parts)

    def __reduce__(self) -> tuple[Callable[..., Expression], tuple[object, ...]]:
        return make, (self.op, self.dtype, self.operands, self.value, self.weak, (self.low, self.high))


_interned: weakref.WeakValueDictionary[tuple[object, ...], Expression] = weakref.WeakValueDictionary()
_interning = Lock(threading.RLock)  # a collection inside may run code that traces


def make(op: str, dtype: str, operands: tuple[Expression, ...] = (), value: object = None, weak: bool = False,
         bounds: Range = (0, 0)) -> Expression:
    """The one expression of this content."""
    if dtype == BOOL:
        bounds = (int(bool(value)),) * 2 if op == "constant" else (0, 1)
    # repr tells 0.0 from -0.0 and True from 1, and makes a NaN equal to itself.
    key = (op, dtype, operands, repr(value), weak, bounds)
    with _interning:
        found = _interned.get(key)
        if found is None:
            found = _interned[key] = Expression(op, dtype, operands, value, weak, *bounds)
        return found


def constant(value: bool | int | float, dtype: str | None = None, weak: bool = True) -> Expression:
    """A number. Without ``dtype`` that of Python: bool, int or (weak) real."""
    if dtype is None:
        dtype = BOOL if isinstance(value, bool) else INT if isinstance(value, int) else REAL
    if dtype == BOOL:
        return make("constant", BOOL, value=bool(value), weak=weak)
    if dtype == INT:
        number = int(value)
        if not INT64[0] <= number <= INT64[1]:
            raise VariantError(f"variant: got the integer {number}, expected one of at most 64 bits")
        return make("constant", INT, value=number, weak=weak, bounds=(number, number))
    return make("constant", dtype, value=float(value), weak=weak)


def number_of(e: Expression) -> int | float:
    """Value of a constant."""
    assert isinstance(e.value, (int, float))
    return e.value


def promote(*operands: Expression) -> tuple[str, bool]:
    """(dtype, weak) of an elementwise result, by torch's rules."""
    strong = [e.dtype for e in operands if not e.weak]
    if not strong:
        return max((e.dtype for e in operands), key=_RANK.__getitem__), True
    dtype = max(strong, key=_RANK.__getitem__)
    widest = max((e.dtype for e in operands), key=_RANK.__getitem__)
    if widest in FLOATS and dtype not in FLOATS:
        return FLOAT32, False  # a Python float beside integers: torch's default type
    return (widest if dtype == BOOL else dtype), False


def wrap(value: int) -> int:
    """An integer as 64 bits hold it."""
    return (value + 2**63) % 2**64 - 2**63


# ---- Ranges of integer results -------------------------------------------------------------------------------------

def _corners(function: Callable[[int, int], int], a: Expression, b: Expression) -> Range:
    values = [function(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return min(values), max(values)


def _range_floordiv(a: Expression, b: Expression) -> Range:
    if b.low > 0 or b.high < 0:
        return _corners(lambda x, y: x // y, a, b)
    size = max(abs(a.low), abs(a.high))
    return -size, size


def _range_mod(a: Expression, b: Expression) -> Range:
    low, high = min(b.low + 1, 0), max(b.high - 1, 0)
    return (0, min(a.high, high)) if a.low >= 0 and b.low >= 0 else (low, high)


def _range_fmod(a: Expression, b: Expression) -> Range:
    size = max(abs(b.low), abs(b.high), 1) - 1
    return max(min(a.low, 0), -size), min(max(a.high, 0), size)


def _range_abs(a: Expression) -> Range:
    return max(a.low, -a.high, 0), max(abs(a.low), abs(a.high))


def _range_and(a: Expression, b: Expression) -> Range:
    bounds = [e.high for e in (a, b) if e.low >= 0]
    return (0, min(bounds)) if bounds else _range_bits(a, b)


def _range_bits(a: Expression, b: Expression) -> Range:
    bits = max((~x if x < 0 else x).bit_length() for x in (a.low, a.high, b.low, b.high))
    return (0 if a.low >= 0 and b.low >= 0 else -(1 << bits)), (1 << bits) - 1


def _range_shr(a: Expression, b: Expression) -> Range:
    if b.low >= 0 and b.high <= 63:
        return _corners(lambda x, y: x >> y, a, b)
    return min(a.low, 0), max(a.high, 0)


def _everything(*_: Expression) -> Range:
    return INT64


_RANGES: dict[str, Callable[..., Range]] = {
    "add": lambda a, b: (a.low + b.low, a.high + b.high),
    "sub": lambda a, b: (a.low - b.high, a.high - b.low),
    "mul": lambda a, b: _corners(lambda x, y: x * y, a, b),
    "neg": lambda a: (-a.high, -a.low),
    "abs": _range_abs,
    "floordiv": _range_floordiv,
    "mod": _range_mod,
    "fmod": _range_fmod,
    "minimum": lambda a, b: (min(a.low, b.low), min(a.high, b.high)),
    "maximum": lambda a, b: (max(a.low, b.low), max(a.high, b.high)),
    "and": _range_and,
    "or": _range_bits,
    "xor": _range_bits,
    "not": lambda a: (~a.high, ~a.low),
    "shl": _everything,
    "shr": _range_shr,
    "power": _everything,
    "sign": lambda a: (-1, 1),
    "where": lambda c, a, b: (min(a.low, b.low), max(a.high, b.high)),
}
# Operations that the kernel does with wrapping arithmetic where the result may exceed 64 bits.
_MAY_WRAP = ("add", "sub", "mul", "neg", "abs", "floordiv")


# ---- Folding -------------------------------------------------------------------------------------------------------

def _fold_floordiv(a: float, b: float) -> float:
    return 0 if b == 0 and isinstance(a, int) and isinstance(b, int) else a // b


def _fold_mod(a: float, b: float) -> float:
    return 0 if b == 0 and isinstance(a, int) and isinstance(b, int) else a % b


_FOLDS: dict[str, Callable[..., bool | int | float]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
    "neg": lambda a: -a, "abs": abs, "floordiv": _fold_floordiv, "mod": _fold_mod, "power": lambda a, b: a**b,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
}


def _folded(op: str, dtype: str, operands: tuple[Expression, ...], weak: bool) -> Expression | None:
    """The constant that an operation on constants gives. Strong floats are left to the compiler, which rounds as the kernel does."""
    fold = _FOLDS.get(op)
    if fold is None or not all(e.is_constant and (e.weak or e.dtype not in FLOATS) for e in operands):
        return None
    if dtype in FLOATS and not weak:
        return None
    try:
        value = fold(*(number_of(e) for e in operands))
    except (ArithmeticError, ValueError):
        return None
    if isinstance(value, complex) or (dtype == INT and isinstance(value, float)):
        return None
    return constant(wrap(int(value)) if dtype == INT else value, dtype, weak)


def _is_number(e: Expression, value: int) -> bool:
    return e.is_constant and e.dtype != BOOL and number_of(e) == value


def _identity(op: str, dtype: str, operands: tuple[Expression, ...]) -> Expression | None:
    """The operand that an operation leaves as it is: x + 0 (integers; -0.0 + 0 is 0.0), x * 1, x / 1, x // 1."""
    if len(operands) != 2:
        return None
    a, b = operands
    if op in ("minimum", "maximum", "and", "or") and a is b:
        return a
    if op in ("minimum", "maximum") and dtype == a.dtype == b.dtype == INT:
        low, high = (a, b) if a.high <= b.low else (b, a)
        chosen = low if op == "minimum" else high
        if low.high <= high.low and not chosen.weak:
            return chosen
    rules = [(a, b, 1 if op in ("mul", "div", "floordiv") else 0 if op in ("add", "sub") else None)]
    if op in ("add", "mul"):
        rules.append((b, a, rules[0][2]))
    for kept, other, neutral in rules:
        if neutral is None or kept.dtype != dtype or kept.weak or not _is_number(other, neutral):
            continue
        if dtype == INT or op in ("mul", "div"):
            return kept
    return None


def arithmetic(op: str, *operands: Expression, dtype: str | None = None, weak: bool | None = None) -> Expression:
    """An operation whose operands are converted to the result's type, folded where that is trivial."""
    promoted = promote(*operands)
    dtype = promoted[0] if dtype is None else dtype
    weak = promoted[1] if weak is None else weak
    found = _folded(op, dtype, operands, weak) or _identity(op, dtype, operands)
    if found is not None:
        return found
    if dtype != INT:
        return make(op, dtype, operands, weak=weak)
    low, high = _RANGES[op](*operands)
    if low < INT64[0] or high > INT64[1]:
        (low, high), op = INT64, f"wrapping_{op}" if op in _MAY_WRAP else op
    if low == high:
        return constant(low, INT, weak)
    return make(op, INT, operands, weak=weak, bounds=(low, high))


def compare(op: str, a: Expression, b: Expression) -> Expression:
    """``lt``, ``le``, ``eq`` or ``ne``. Integers are decided where their ranges say so; a float may be NaN."""
    weak = a.weak and b.weak
    found = _folded(op, BOOL, (a, b), weak)
    if found is not None:
        return found
    if promote(a, b)[0] == INT and BOOL not in (a.dtype, b.dtype):
        decided = {
            "lt": True if a.high < b.low else False if a is b or a.low >= b.high else None,
            "le": True if a is b or a.high <= b.low else False if a.low > b.high else None,
            "eq": True if a is b else False if a.high < b.low or b.high < a.low else None,
            "ne": False if a is b else True if a.high < b.low or b.high < a.low else None,
        }[op]
        if decided is not None:
            return constant(decided, BOOL, weak)
    return make(op, BOOL, (a, b), weak=weak)


def logic(op: str, a: Expression, b: Expression) -> Expression:
    """``and``, ``or``, ``xor`` of two bools."""
    for kept, other in ((a, b), (b, a)):
        if other.is_constant:
            value = bool(number_of(other))
            if op == "and":
                return kept if value else other
            if op == "or":
                return other if value else kept
            return negation(kept) if value else kept
    return arithmetic(op, a, b)


def negation(a: Expression) -> Expression:
    """``not`` of a bool."""
    if a.is_constant:
        return constant(not number_of(a), BOOL, a.weak)
    return a.operands[0] if a.op == "not" else make("not", BOOL, (a,), weak=a.weak)


def select(condition: Expression, a: Expression, b: Expression) -> Expression:
    dtype, weak = promote(a, b)
    if weak and dtype == REAL:
        dtype = FLOAT32  # torch.where of two Python floats has torch's default type
    if condition.is_constant or a is b:
        chosen = a if a is b or number_of(condition) else b
        if chosen.dtype == dtype and not chosen.weak:
            return chosen
    return arithmetic("where", condition, a, b, dtype=dtype, weak=False)


def cast(a: Expression, dtype: str, bounds: Range = INT64) -> Expression:
    """Conversion as ``.to`` does it; ``bounds`` is the range of the integer type."""
    if a.dtype == dtype and (dtype != INT or (bounds[0] <= a.low and a.high <= bounds[1])):
        return a
    if dtype == BOOL:
        return compare("ne", a, constant(0))
    if dtype != INT:
        return make("cast", dtype, (a,))
    if a.dtype == BOOL:
        return make("cast", INT, (a,), bounds=(0, 1))
    return make("cast", INT, (a,), value=32 if bounds == INT32 else 64, bounds=bounds)


def in_order(roots: tuple[Expression, ...]) -> list[Expression]:
    """Every expression reached, operands first, in an order that only the graph decides. No recursion: chains may be long."""
    order: list[Expression] = []
    seen: set[Expression] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        e, ready = stack.pop()
        if ready:
            order.append(e)
        elif e not in seen:
            seen.add(e)
            stack.append((e, True))
            stack += [(operand, False) for operand in reversed(e.operands)]
    return order

