"""From a variant's Python functions to expressions: each function is called once, with stand-ins that record."""

from __future__ import annotations

import contextlib
import difflib
import numbers
import re
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, NoReturn

import torch

from kernelgen.errors import DtypeError, SettingsError, VariantError
from kernelgen.variants import functions
from kernelgen.variants.expression import (
    BOOL,
    FLOAT32,
    FLOATS,
    INT,
    INT32,
    INT64,
    MAX_LENGTH,
    REAL,
    Expression,
    Range,
    constant,
    in_order,
    make,
)
from kernelgen.variants.traced import ELEMENTS, ExtraScalar, ExtraTensor, TracedVariant, scalar_kind

# Fields of the context and what is known of them. A query may stand before the first key: q_pos may be negative.
FIELDS: dict[str, Range] = {
    "batch": (0, INT32[1]), "head": (0, INT32[1]), "kv_head": (0, INT32[1]), "q_index": (0, MAX_LENGTH - 1),
    "q_pos": (1 - MAX_LENGTH, MAX_LENGTH - 1), "k_pos": (0, MAX_LENGTH - 1), "q_len": (0, MAX_LENGTH), "kv_len": (0, MAX_LENGTH),
}
_TORCH_TYPE = {BOOL: torch.bool, INT: torch.int64, FLOAT32: torch.float32, REAL: torch.float64}
_KIND_TYPE = {"bool": (BOOL, (0, 1)), "int32": (INT, INT32), "int64": (INT, INT64), "float": (REAL, (0, 0))}
_CACHE = "_kernelgen_traced"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


class _Recorder:
    """What the stand-ins share: Python may not look at a value that is known only inside the kernel."""

    __array_ufunc__ = None  # numpy scalars leave their operators to this class

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", str(func)).strip("_")
        if name == "getitem":
            raise _captured("indexes")
        canonical, builder = functions.find(name)
        return _call(canonical, builder, args, kwargs or {})

    def __bool__(self) -> NoReturn:
        raise VariantError("variant: Python took a value that is known only in the kernel for a condition; instead of if, while, and, or, "
                           "not, min(), max() and chained comparisons use torch.where, &, |, ~, torch.minimum, torch.maximum")

    def _as_python(self, target: str) -> NoReturn:
        raise VariantError(f"variant: Python needs a value that is known only in the kernel as {target}; use torch's functions "
                           "(torch.exp for math.exp, torch.where for loops and branches), and pass tensors by variant(tensors=...)")

    def __int__(self) -> NoReturn:
        self._as_python("an int")

    def __index__(self) -> NoReturn:
        self._as_python("an index")

    def __float__(self) -> NoReturn:
        self._as_python("a float")

    def __iter__(self) -> NoReturn:
        self._as_python("a sequence")

    def __len__(self) -> NoReturn:
        self._as_python("a sequence")


class Value(_Recorder):
    """A value of the kernel: the score, a field of the context, a scalar, an element, or what was computed of these."""

    __slots__ = ("expression",)
    __hash__ = object.__hash__
    expression: Expression

    def __init__(self, expression: Expression) -> None:
        self.expression = expression

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.expression.weak:
            raise VariantError(f"variant: .{name} of a Python number (a scalar of the variant); numbers have no methods of tensors")
        canonical, builder = functions.find(name, method=True)
        return lambda *args, **kwargs: _call(canonical, builder, (self, *args), kwargs)

    def __getitem__(self, index: Any) -> NoReturn:
        raise VariantError("variant: got an index of a single value, expected one of an extra tensor with all its dimensions in one "
                           "pair of brackets")

    def __pos__(self) -> Value:
        return self

    @property
    def dtype(self) -> torch.dtype:
        return _TORCH_TYPE[self.expression.dtype]

    def __repr__(self) -> str:
        return f"Value({self.expression!r})"


class Tensor(_Recorder):
    """An extra tensor: indexed with one integer expression per dimension."""

    def __init__(self, spec: ExtraTensor) -> None:
        self._spec = spec
        self.ndim = spec.rank
        self.shape = tuple(Value(make("size", INT, value=(spec.name, d), weak=True, bounds=(0, INT64[1]))) for d in range(spec.rank))

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int) -> Value:
        return self.shape[dim]

    def too_few(self, given: int) -> VariantError:
        return VariantError(f"variant: tensor {self._spec.name!r} has {self.ndim} dimensions, got {given} indices, expected {self.ndim}: "
                            f"ctx.{self._spec.name}[{', '.join(['i'] * self.ndim)}] with integer expressions")

    def __getitem__(self, index: Any) -> Value:
        given = index if isinstance(index, tuple) else (index,)
        if len(given) != self.ndim:
            raise self.too_few(len(given))
        indices = tuple(_lift(i) if not isinstance(i, (slice, type(Ellipsis), type(None))) else self._bad_index(i) for i in given)
        for e in indices:
            if e.dtype != INT:
                self._bad_index(e.dtype)
        return _element(self._spec, indices)

    def _bad_index(self, index: object) -> NoReturn:
        raise VariantError(f"variant: tensor {self._spec.name!r} got the index {index!r}, expected an integer expression for each "
                           "dimension")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise VariantError(f"variant: .{name} of tensor {self._spec.name!r}: an extra tensor is only indexed, and has shape, "
                           "ndim, dim() and size()")


class Context:
    """Stand-in for the context of one logit."""

    def __init__(self, values: Mapping[str, Value | Tensor]) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        names = sorted(vars(self))
        near = difflib.get_close_matches(name, names, n=1)
        guess = f"did you mean {near[0]!r}? " if near else ""
        raise VariantError(f"variant: the context has no {name!r}; {guess}{'It' if guess else 'it'} has {', '.join(names)}")


def _captured(what: str) -> VariantError:
    return VariantError(f"variant: the function {what} a torch tensor that it found outside; pass it by "
                        "variant(tensors={'name': tensor}) and read ctx.name[...]")


def _element(spec: ExtraTensor, indices: tuple[Expression, ...]) -> Value:
    dtype, bounds = ELEMENTS[spec.dtype][:2]
    return Value(make("load", dtype, indices, value=spec.name, bounds=bounds))


def _lift(x: Any) -> Expression:
    """A number, a value or a 0-d tensor made inside the function as an expression."""
    if isinstance(x, Value):
        return x.expression
    if isinstance(x, Tensor):
        raise x.too_few(0)
    if isinstance(x, torch.Tensor):
        if x.dim() or x.dtype.is_complex:
            raise _captured("uses")
        return constant(x.item())
    if isinstance(x, bool):
        return constant(x)
    if isinstance(x, numbers.Integral):
        return constant(int(x))
    if isinstance(x, numbers.Real):
        return constant(float(x))
    if x is None:
        raise VariantError("variant: got None as an operand, expected a number or a value")
    raise VariantError(f"variant: got a {type(x).__name__} as an operand, expected a number or a value of the kernel")


def _call(name: str, builder: functions.Builder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    def lift(x: Any) -> Any:
        # Names of dtypes and modes stay as they are; None is an argument left out (torch.clamp).
        return x if x is None or isinstance(x, (torch.dtype, str)) else _lift(x)

    given = tuple(lift(x) for x in args)
    # A 0-d tensor is a weak constant here, but torch takes it for a tensor.
    plain = [e.weak and not isinstance(x, torch.Tensor) for e, x in zip(given, args) if isinstance(e, Expression)]
    return Value(functions.build(name, builder, given, {key: lift(x) for key, x in kwargs.items()}, plain))


def _operators() -> None:
    """Python's operators on values, forward and reflected."""
    def forward(builder: functions.Builder, symbol: str) -> Callable[[Any, Any], Any]:
        def operator(self: Value, other: Any) -> Value:
            return Value(builder(self.expression, _lift(other)))

        return operator

    def reflected(builder: functions.Builder, symbol: str) -> Callable[[Any, Any], Any]:
        def operator(self: Value, other: Any) -> Value:
            return Value(builder(_lift(other), self.expression))

        return operator

    def unary(builder: functions.Builder) -> Callable[[Any], Any]:
        return lambda self: Value(builder(self.expression))

    def whole(self: Tensor, *_: Any) -> NoReturn:
        raise self.too_few(0)

    for name, (function, symbol) in functions.OPERATORS.items():
        builder = functions.FUNCTIONS[function]
        setattr(Value, f"__{name}__", forward(builder, symbol))
        setattr(Tensor, f"__{name}__", whole)
        if symbol not in ("<", "<=", ">", ">=", "==", "!="):  # Python reflects comparisons by itself
            setattr(Value, f"__r{name}__", reflected(builder, symbol))
            setattr(Tensor, f"__r{name}__", whole)
    for name, (function, _) in functions.UNARY_OPERATORS.items():
        setattr(Value, f"__{name}__", unary(functions.FUNCTIONS[function]))
        setattr(Tensor, f"__{name}__", whole)


_operators()
_FIELD_VALUES = {name: Value(make("field", INT, value=name, bounds=bounds)) for name, bounds in FIELDS.items()}


def trace(variant: Any) -> TracedVariant:
    """The variant as expressions. A variant object is traced once; its result is kept in the object.

    ``variant`` is a :class:`~kernelgen.reference.masks.Variant` or has its fields. Raises VariantError for a function
    that cannot become a kernel, DtypeError for an extra tensor of a type that no kernel reads.
    """
    kept = getattr(variant, "__dict__", {}).get(_CACHE)
    if kept is not None:
        return kept
    traced = _trace(variant)
    with contextlib.suppress(AttributeError):  # slots: traced anew each time
        object.__setattr__(variant, _CACHE, traced)
    return traced


def _trace(variant: Any) -> TracedVariant:
    tensors = {name: extra_tensor(name, t) for name, t in dict(variant.tensors).items()}
    scalars = {name: ExtraScalar(name, scalar_kind(name, x)) for name, x in dict(variant.scalars).items()}
    context = _context(tensors, scalars)
    score = mask = None
    if variant.score is not None:
        value = make("score", REAL)
        score = _result("score", called("score", variant.score, {"score": Value(value), "ctx": context}), FLOATS, "a float (the new score)")
        score = None if score is value else score
    if variant.mask is not None:
        mask = _result("mask", called("mask", variant.mask, {"ctx": context}), (BOOL,), "a bool (True = may attend)")
        mask = None if mask.is_constant and mask.value else mask
    read = {name for e in in_order(tuple(e for e in (score, mask) if e is not None)) for name in _names_in(e)}
    return TracedVariant(
        score, mask, tuple(tensors[n] for n in sorted(tensors) if n in read), tuple(scalars[n] for n in sorted(scalars) if n in read),
        getattr(variant, "normalization", "softmax"), getattr(variant, "name", None),
    )


def _context(tensors: Mapping[str, ExtraTensor], scalars: Mapping[str, ExtraScalar]) -> Context:
    values: dict[str, Value | Tensor] = dict(_FIELD_VALUES)
    for name, tensor in tensors.items():
        values[name] = Tensor(tensor) if tensor.rank else _element(tensor, ())
    for name, scalar in scalars.items():
        dtype, bounds = _KIND_TYPE[scalar.kind]
        values[name] = Value(make("scalar", dtype, value=name, weak=True, bounds=bounds))
    hidden = FIELDS.keys() & (tensors.keys() | scalars.keys())
    if hidden:
        raise VariantError(f"variant: the extra value {min(hidden)!r} hides a field of the context; rename it")
    return Context(values)


def _names_in(e: Expression) -> tuple[Any, ...]:
    """Names of the extra tensors and scalars that one operation reads."""
    if e.op in ("load", "scalar"):
        return (e.value,)
    return e.value[:1] if e.op == "size" and isinstance(e.value, tuple) else ()


def called(what: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """What a user's function makes of stand-ins. What it raises itself passes through, with its traceback. Raises VariantError where it
    cannot be called with so many."""
    try:
        return function(*arguments.values())
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # from within
            raise
        raise VariantError(f"variant: the {what} function cannot be called as function({', '.join(arguments)}): {error}") from error


def _result(what: str, value: Any, dtypes: tuple[str, ...], expected: str) -> Expression:
    if value is None:
        raise VariantError(f"variant: the {what} function returned None, expected {expected}; is a return missing?")
    if isinstance(value, (tuple, list, dict, str)):
        raise VariantError(f"variant: the {what} function returned a {type(value).__name__}, expected {expected}")
    e = _lift(value)
    if e.dtype not in dtypes:
        advice = "compare it with something, as in x != 0" if what == "mask" else "convert it with .float()"
        raise VariantError(f"variant: the {what} function returned {e.dtype}, expected {expected}; {advice}")
    return e


def extra_tensor(name: str, t: Any) -> ExtraTensor:
    """What a kernel compiles in of an extra tensor. Raises DtypeError."""
    if not isinstance(t, torch.Tensor):
        raise DtypeError(f"variant: extra tensor {name!r} is a {type(t).__name__}, expected torch.Tensor")
    element = str(t.dtype).removeprefix("torch.")
    if element not in ELEMENTS:
        raise DtypeError(f"variant: extra tensor {name!r} has dtype {t.dtype}, expected one of {', '.join(ELEMENTS)}")
    return ExtraTensor(name, element, t.dim())


def extra_values(
    what: str, name: Any, tensors: Any, scalars: Any, fields: tuple[str, ...],
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Extra tensors and numbers of a variant or an epilogue, and its name, checked. Raises VariantError, DtypeError, SettingsError."""
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise SettingsError(f"name: got {name!r}, expected at most 32 of a-z, 0-9 and _, a letter first")
    for kind, given in (("tensors", tensors), ("scalars", scalars)):
        if not isinstance(given, (Mapping, NoneType)):
            raise VariantError(f"{what}: {kind}: got a {type(given).__name__}, expected values by name, as {kind}={{'name': value}}")
    tensors, scalars = dict(tensors or {}), dict(scalars or {})
    for extra in (*tensors, *scalars):
        if not isinstance(extra, str) or not extra.isidentifier() or extra in fields or (extra in tensors and extra in scalars):
            raise VariantError(f"{what}: the extra value {extra!r} needs another name: an identifier, given once, none of "
                               f"{', '.join(fields)}")
    for extra, t in tensors.items():
        extra_tensor(extra, t)
    for extra, x in scalars.items():
        scalar_kind(extra, x)
    return tensors, scalars
