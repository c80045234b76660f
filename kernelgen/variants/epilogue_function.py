"""``kernelgen.epilogue``: a user's function of one element of a product, in the place of bias, activation and c."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kernelgen.errors import DeviceError, DtypeError, SettingsError, ShapeError, VariantError
from kernelgen.library.forms import epilogues

if TYPE_CHECKING:
    from kernelgen.variants.epilogue import TracedEpilogue
    from kernelgen.variants.expression import Expression

_MOST_TOTALS = 16


class RowReduction(NamedTuple):
    kind: str
    value: Any


@dataclass(frozen=True)
class Reduction:
    """Not a tuple: files of recorded calls tell it from one."""

    name: str
    kind: str
    value: Expression


def row_sum(value: Any) -> RowReduction:
    """In an epilogue's function: the sum of ``value`` over a row of the output, in float32 (float64 of float64 operands), in a fixed order;
    0 of no columns."""
    return RowReduction("sum", value)


def row_max(value: Any) -> RowReduction:
    """As :func:`row_sum`, the largest; NaN where one of them is, -inf of no columns."""
    return RowReduction("max", value)


def taken_apart(made: Any) -> tuple[Any, Mapping[str, RowReduction]]:
    """What a function returned: its value, and its reductions by name. Raises VariantError."""
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)):
        return made, {}
    wrong = [name for name, r in made[1].items() if not (isinstance(name, str) and isinstance(r, RowReduction))]
    if wrong or len(made[1]) > _MOST_TOTALS:
        what = f"{wrong} of them not by row_sum or row_max under a str" if wrong else "too many for one kernel"
        raise VariantError(f"epilogue: got {len(made[1])} reductions, {what}; expected {{name: kernelgen.row_sum(value)}} or row_max, at "
                           f"most {_MOST_TOTALS}")
    return made


def reduced(kind: str, terms: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """By torch's operators."""
    return terms.sum(dim) if kind == "sum" else terms.amax(dim) if terms.shape[dim] else torch.full_like(terms.sum(dim), -torch.inf)


@dataclass(frozen=True, eq=False)
class EpilogueFunction:
    """What :func:`epilogue` makes; ``with_values`` gives one with other tensors and numbers, which is the same kernel."""

    function: Callable[..., Any]
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)
    gated: bool = False
    name: str | None = None
    origin: EpilogueFunction | None = field(default=None, repr=False)  # what with_values was asked of first

    def __post_init__(self) -> None:
        # What graphs know it by: values are arguments of theirs, so those of one origin share it, which none outlives then.
        object.__setattr__(self, "handle", epilogues.add(self) if self.origin is None else self.origin.handle)  # type: ignore[attr-defined]

    @cached_property
    def traced(self) -> TracedEpilogue:
        from kernelgen.variants.epilogue import trace_function

        return trace_function(self.function, self.tensors, self.scalars, self.gated, self.name)

    def names_of_totals(self) -> tuple[str, ...]:
        """Reductions over rows; in a graph an object may be made within it, and its origin is real."""
        return (self.origin or self)._names_of_totals()

    def _names_of_totals(self) -> tuple[str, ...]:
        return tuple([total.name for total in self.traced.totals])

    # torch._dynamo.assume_constant_result, whose import takes a second
    _names_of_totals._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @property
    def layout(self) -> tuple[Any, ...]:
        """All that a prepared call goes by: what was traced, where the extra values lie and of which classes they are; whether one asks
        for a gradient, which may change."""
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors.values())
        return (*self._fixed_layout, grad)

    @cached_property
    def _fixed_layout(self) -> tuple[Any, ...]:
        return (self.traced, frozenset([(t.device, type(t)) for t in self.tensors.values()]))

    def with_values(self, **values: Any) -> EpilogueFunction:
        """With some of the extra tensors and numbers replaced by name. What has been traced serves on, if they are of the same kinds.
        Raises SettingsError for other names, DtypeError for what is no tensor."""
        unknown = [name for name in values if name not in self.tensors and name not in self.scalars]
        if unknown:
            raise SettingsError(f"with_values: got {', '.join(unknown)}, expected names out of "
                                f"{', '.join([*self.tensors, *self.scalars]) or 'an empty list'}")
        tensors, scalars = ({n: values.get(n, v) for n, v in of.items()} for of in (self.tensors, self.scalars))
        for name, t in tensors.items():
            if not isinstance(t, torch.Tensor):
                raise DtypeError(f"with_values: got a {type(t).__name__} for the extra tensor {name!r}, expected a torch.Tensor")
        made = replace(self, tensors=tensors, scalars=scalars, origin=self.origin or self)
        kept = vars(self).get("traced")
        if kept is not None and kept.fits(tensors, scalars):
            vars(made)["traced"] = kept
        return made

    def words(self, device: torch.device) -> torch.Tensor:
        """The argument block of C++ and CUDA kernels."""
        from kernelgen.variants.arguments import bind_words

        return bind_words(self, self.traced, device)

    def check(self, shape: tuple[int, ...], device: torch.device) -> None:
        """``shape``: of the product, all columns. Raises ShapeError, DeviceError."""
        if self.gated and shape[-1] % 2:
            raise ShapeError(f"got N = {shape[-1]} for a gated epilogue, expected an even N: it takes a pair of columns")
        for name, t in self.tensors.items():
            if t.device != device and device.type != "meta":  # of a call that is only described they may lie anywhere
                raise DeviceError(f"epilogue: extra tensor {name!r} is on {t.device}, expected {device} as the call's tensors")

    def apply(self, product: torch.Tensor, gate_up: str) -> torch.Tensor:
        """By torch's operators: (B, M, N) in float32 or float64 to (B, M, outputs) of the same type."""
        return self.evaluate(product, gate_up)[0]

    def evaluate(self, product: torch.Tensor, gate_up: str) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The same, and its totals over rows, each (B, M)."""
        parts: tuple[torch.Tensor, ...] = (product,)
        if self.gated:
            half = product.shape[-1] // 2
            parts = (product[..., 0::2], product[..., 1::2]) if gate_up == "interleaved" else (product[..., :half], product[..., half:])
            parts = parts[::-1] if gate_up == "up_first" else parts
        batch, rows, columns = parts[0].shape
        values: dict[str, Any] = {name: torch.arange(n, device=product.device).view(shape) for name, n, shape in (
            ("batch", batch, (-1, 1, 1)), ("row", rows, (-1, 1)), ("column", columns, (-1,)))}
        for name, t in self.tensors.items():
            values[name] = t.to(product.dtype) if t.is_floating_point() else t if t.dtype == torch.bool else t.to(torch.int64)
        value, totals = taken_apart(self.function(*parts, SimpleNamespace(**values, **self.scalars)))

        def full(made: Any) -> torch.Tensor:
            if not isinstance(made, (torch.Tensor, int, float)):
                raise VariantError(f"epilogue: the function returned {type(made).__name__}, expected a number of each element")
            return torch.as_tensor(made, device=product.device).to(product.dtype).expand(parts[0].shape)

        return full(value), tuple(reduced(r.kind, full(r.value)) for r in totals.values())


def epilogue(
    function: Callable[..., Any], *, tensors: Mapping[str, torch.Tensor] | None = None, scalars: Mapping[str, Any] | None = None,
    gated: bool = False, name: str | None = None,
) -> EpilogueFunction:
    """What ``kernelgen.gemm(..., epilogue=)`` does to each element of a @ b, compiled into the kernel.

        gate = kernelgen.epilogue(lambda x, ctx: x * torch.sigmoid(ctx.alpha * x) + ctx.residual[ctx.row, ctx.column],
                                  tensors={"residual": residual}, scalars={"alpha": 1.702})

    function   ``(x, ctx) -> value`` of the float32 sum (float64 of float64 operands), scales of fp8 operands included; ``gated``:
               ``(x, y, ctx) -> value`` of a gate and what it gates, which lie along N as ``gate_up`` says, so that N is halved
    tensors    extra tensors, read as ``ctx.name[i, j]``, of one dimension or more
    scalars    extra Python numbers, read as ``ctx.name``; another value is no other kernel
    name       what it is called in explanations

    A function may return ``(value, {"sum_sq": kernelgen.row_sum(value * value)})``; the call then returns (out, {"sum_sq": (.., M)}).

    ctx holds batch (of all leading dimensions), row and column of the output. Functions are those of variants of attention
    (``kernelgen.variant``): torch's elementwise ones, ``torch.where``, Python's operators and comparisons; numbers that the function
    finds outside are compiled in. Raises VariantError, DtypeError or SettingsError.
    """
    from kernelgen.variants.trace import extra_values

    if not callable(function):
        raise VariantError(f"epilogue: got a {type(function).__name__}, expected a function")
    values = extra_values("epilogue", name, tensors, scalars, ("x", "y", "batch", "row", "column"))
    return EpilogueFunction(function, *values, bool(gated), name)
