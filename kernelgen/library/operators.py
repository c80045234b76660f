"""Operators of torch from the rows of the table: schemas, kernels, fake kernels, and the call that graphs record.

Nothing is compiled or loaded here; a kernel is the public function, found when it first runs. What calls the operators is in
``recorded.py``, and what takes an operator's arguments to the public function in ``kernels.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from kernelgen.errors import DeviceError, NoBackendError
from kernelgen.library import gradients
from kernelgen.library.forms import FORMS
from kernelgen.library.table import NEVER, PLAIN, ROWS, Parameter, Row, constant
from kernelgen.library.written import no_gradient as no_gradient_of
from kernelgen.library.written import wrote

NAMESPACE = "kernelgen"
_library = torch.library.Library(NAMESPACE, "DEF")  # operators live as long as this
# Strides are part of what a kernel was made for, and the last dimension must stay contiguous.
_RETURNS = ("()", "Tensor", "(Tensor, Tensor)")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_UNCAPTURED = (torch.Tag.cudagraph_unsafe,)
_any_requires_grad, _grad_enabled = torch._C._any_requires_grad, torch.is_grad_enabled
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_ON_HOST = ("kv_indptr", "kv_last_page_len", "seq_lens", "starts", "tables")  # of a page table on a device its lengths may be


class Slot(NamedTuple):
    """A public argument in a flat list: where its parts lie, and how it is taken apart and put together (None: as it is)."""

    name: str
    places: tuple[int, ...]
    split: Callable[[Any], tuple[Any, ...]] | None
    join: Callable[..., Any] | None


class Overload(NamedTuple):
    """One operator. ``flat`` names its arguments, ``defaults`` has a value for those that have one, from ``required`` on."""

    row: Row
    name: str
    schema: str
    flat: tuple[str, ...]
    required: int
    defaults: tuple[Any, ...]
    slots: tuple[Slot, ...]
    writes: bool
    results: int
    fixed: Mapping[str, Any]
    has_gradient: bool
    tags: tuple[Any, ...]

    @property
    def qualified(self) -> str:
        return f"{NAMESPACE}::{self.row.name}" + (f".{self.name}" if self.name else "")

    @property
    def taken(self) -> int:
        """Arguments of the schema; of a brief one fewer than ``flat`` has, and a call with more is the full one."""
        return self.schema.partition(") -> ")[0].count(",") + 1

    def operator(self) -> Any:
        return getattr(getattr(torch.ops.kernelgen, self.row.name), self.name or "default")


def overloads_of(row: Row) -> list[Overload]:
    """Plain, with one result more, and with given outputs; each also for the row's ``also``. A plain one that is brief has a full one."""
    forms: list[tuple[str, int, tuple[str, ...], Mapping[str, Any], bool]] = [("", row.results, (), {}, row.gradient)]
    if row.more is not None:
        forms.append((row.more.name, row.results + 1, (), row.more.fixed, row.gradient))
    if row.outputs:
        forms.append(("out", 0, row.written, {}, False))
    made = [_overload(row, name, results, outputs, (), fixed, gradient, False) for name, results, outputs, fixed, gradient in forms]
    made = _with_brief(row, made)
    also = row.also
    if also is not None:
        twins = []
        for name, results, outputs, fixed, _ in forms:
            count = results if also.results is None or outputs else also.results
            joined = f"{also.name}_{name}" if name else also.name
            twins.append(_overload(row, joined, count, outputs, also.writes, {**fixed, **also.fixed}, False, also.uncaptured))
        made += _with_brief(row, twins)
    return made


def _with_brief(row: Row, made: list[Overload]) -> list[Overload]:
    """Every argument of a schema costs a call 0.1 us."""
    if not row.brief:
        return made
    name = made[0].name
    return [_shortened(made[0]), made[0]._replace(name=f"{name}_full" if name else "full"), *made[1:]]


def _overload(
    row: Row, name: str, results: int, outputs: tuple[str, ...], writes: tuple[str, ...], fixed: Mapping[str, Any], gradient: bool,
    uncaptured: bool,
) -> Overload:
    elsewhere = {*row.outputs, *(p.name for p in row.all_parameters if row.also and p.name in row.also.writes and p.type == "Tensor!?")}
    kept = [p for p in row.all_parameters if p.type not in NEVER and (p.name not in elsewhere or p.name in writes)]
    parts = [(p.name, words) for p in kept for words in _schema_parts(p, p.name in writes)]
    parts += [(out, f"Tensor!? {out}" if i >= row.results else f"Tensor! {out}") for i, out in enumerate(outputs)]
    # What most calls have stands first, what a weight that is not packed leaves at its default last: the end of a call is not passed.
    ranks = {p.name: 3 for p in kept if p.type == "Weight"} | {"slot_mapping": 1}
    parts.sort(key=lambda part: ranks.get(part[0], 2) if "=" in part[1] else 0)
    letters = iter("abcdefgh")
    words = [text.replace("!", f"({next(letters)}!)") if "!" in text else text for _, text in parts]
    flat = tuple(text.partition("=")[0].split()[-1] for text in words)
    required = sum("=" not in text for text in words)
    places: dict[str, list[int]] = {}
    for place, (owner, _) in enumerate(parts):
        places.setdefault(owner, []).append(place)
    slots = []
    for owner in (*(p.name for p in kept), *outputs):
        form = next((FORMS.get(p.type) for p in kept if p.name == owner), None)
        slots.append(Slot(owner, tuple(places.get(owner, ())), form and form.split, form and form.join))
    return Overload(
        row, name, f"({', '.join(words)}) -> {_RETURNS[results]}", flat, required,
        tuple(constant(text.partition("=")[2]) for text in words[required:]), tuple(slots), any("!)" in text for text in words),
        results, fixed, gradient, (*_TAGS, *_UNCAPTURED) if uncaptured else _TAGS)


def _shortened(o: Overload) -> Overload:
    """Without the last arguments; what is left keeps its place, and the others their defaults."""
    words, _, returns = o.schema[1:].partition(") -> ")
    return o._replace(schema=f"({', '.join(words.split(', ')[: o.required + o.row.brief])}) -> {returns}")


def _schema_parts(p: Parameter, writes: bool) -> list[str]:
    if p.type in PLAIN:
        kind = p.type.replace("!?", "!") if writes else p.type
        kind = "Tensor!" if writes and kind == "Tensor" else kind
        default = f'"{p.default}"' if isinstance(p.default, str) else repr(p.default)
        return [f"{kind} {p.name}" + ("" if p.required or writes else f"={default}")]
    return [words.format(p.name) for words in FORMS[p.type].parts]


def _function(row: Row) -> Callable[..., Any]:
    module, _, path = row.function.partition(":")
    found: Any = import_module(f"{NAMESPACE}.ops.{module}")
    for name in path.split("."):
        found = getattr(found, name)
    function: Callable[..., Any] = found
    return function


def arguments(o: Overload, flat: Sequence[Any], wanted: Container[str] | None = None, *, renamed: bool = False) -> dict[str, Any]:
    """The public arguments by name from an operator's own; what the dispatcher left out as a default is left out.

    ``wanted``: no others. ``renamed``: a method's object is "self".
    """
    given: dict[str, Any] = {}
    count = len(flat)
    for name, places, _, join in o.slots:
        if not places or places[0] >= count or (wanted is not None and name not in wanted):
            continue
        if join is None:
            given[name] = flat[places[0]]
        else:
            given[name] = join(*(flat[i] if i < count else o.defaults[i - o.required] for i in places))
    if renamed and "plan" in given:
        given["self"] = given.pop("plan")
    scale = given.pop("out_scales", None)
    if scale is not None:
        given["out"] = (given["out"], scale)
    return given


def kernel_of(o: Overload) -> Callable[..., Any]:
    """The public function behind the operator's flat arguments, taken apart as ``kernels.py`` has it."""
    pack, refused = o.row.pack, not o.has_gradient
    call: Callable[..., Any] | None = None

    def kernel(*flat: Any) -> Any:
        nonlocal call
        if refused and _grad_enabled() and _any_requires_grad(*flat):
            raise no_gradient(o)
        if call is None:
            call = _call_of(o)
        return call(*flat) if pack is None else pack(call(*flat))

    return kernel


def _call_of(o: Overload) -> Callable[..., Any]:
    function, nothing, fixed = _function(o.row), not o.results, dict(o.fixed)
    if is_written(o):
        from kernelgen.library import kernels

        written: Callable[..., Any] = getattr(kernels, kernel_name(o))(function)
        return written

    def call(*flat: Any) -> Any:
        value = function(**arguments(o, flat, renamed=True), **fixed)
        return None if nothing else value

    return call


_MOST_WRITTEN = 12  # arguments: the many of the rarer operators are found by name, which takes them 3 us


def is_written(o: Overload) -> bool:
    """Whether ``kernels.py`` has the operator's kernel."""
    return o.taken <= _MOST_WRITTEN


def kernel_name(o: Overload) -> str:
    """Of an operator's kernel in ``kernels.py``."""
    return f"{o.row.name}_{o.name}" if o.name else o.row.name


def no_gradient(o: Overload) -> NoBackendError:
    return no_gradient_of(o.qualified, writes=o.writes, leave="out" if o.row.gradient else "")


def fake_of(o: Overload) -> Callable[..., Any]:
    """What the kernel would return, of tensors without memory and sizes that may be symbols."""
    defaults = {p.name: p.default for p in o.row.all_parameters}
    refused, code = not o.has_gradient, o.row.shapes.__code__
    wanted = frozenset(code.co_varnames[: code.co_argcount])  # no plan or variant is looked up for a shape
    places = written_places(o)

    def fake(*flat: Any, **named: Any) -> Any:
        if named:  # the meta kernel is called with what its arguments are called
            flat = (*flat, *(named.get(name, default) for name, default in list(zip(
                o.flat, (*[None] * o.required, *o.defaults)))[len(flat) :]))
        if refused and _grad_enabled() and _any_requires_grad(*flat):
            raise no_gradient(o)
        _check_one_device(o, flat)
        _check_as_eager(o, flat)
        wrote(*(flat[i] for i in places if i < len(flat)))  # as the public function does with tensors that have memory
        if o.results == 0:
            return None
        made = o.row.shapes(**(defaults | arguments(o, flat, wanted) | dict(o.fixed)))
        return made[0] if o.results == 1 else made

    return fake


def _check_one_device(o: Overload, flat: Sequence[Any]) -> None:
    """One tensor on "meta" brings a call here, and the shapes would be taken for results where others have memory.

    Fake tensors are told by their mode. Raises DeviceError.
    """
    found: dict[torch.device, str] = {}
    for name, value in zip(o.flat, flat):
        for t in value if isinstance(value, (list, tuple)) else (value,):
            if type(t) in _PLAIN and not (t.is_cpu and name in _ON_HOST):
                found.setdefault(t.device, name)
    if len(found) > 1:
        (device, first), (other, name) = list(found.items())[:2]
        raise DeviceError(f"{name} is on {other} and {first} on {device}, expected one device; move one with .to()")


def _check_as_eager(o: Overload, flat: Sequence[Any]) -> None:
    """Shapes, dtypes and layouts, by the public function's own checks, where every size is a number.

    Symbols are not compared, or a new length would compile a graph anew: there the kernel's own call says what is wrong. So it does of
    what is no decision of its arguments alone, as a plan's run.
    """
    from kernelgen.dispatch.explain import OPS, check_call

    tensors = list(gradients.tensors_in(flat))
    sizes = [n for t in tensors for n in (*t.shape, *t.stride())]
    if o.row.name not in OPS or any(isinstance(n, torch.SymInt) for n in (*sizes, *_numbers_in(flat))):
        return
    with _disable_current_modes(), torch.no_grad():
        meta = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
        values = arguments(o, gradients.with_tensors(flat, meta))
        if values.pop("variant", None) is None:  # whose extra tensors are read
            check_call(o.row.name, {**values, **o.fixed}, tensors[0].device)


def _numbers_in(flat: Sequence[Any]) -> Iterator[Any]:
    for x in flat:
        if isinstance(x, (list, tuple)):
            yield from x
        else:
            yield x


def written_places(o: Overload) -> tuple[int, ...]:
    """Where in its arguments an operator's schema says that it writes."""
    return tuple(i for i, text in enumerate(o.schema[1:].partition(") -> ")[0].split(", ")) if "!)" in text)


def _register(row: Row) -> None:
    for o in overloads_of(row):
        name = o.qualified.partition("::")[2]
        _library.define(name + o.schema, tags=o.tags)
        kernel = kernel_of(o)
        for device in ("CPU", "CUDA"):
            _library.impl(name, kernel, device)
        torch.library.register_fake(o.qualified, fake_of(o), lib=_library)
        if o.has_gradient:
            gradients.register(_library, o, kernel)
        else:  # the kernel looks itself, and torch's own Autograd kernel would take a second way through the dispatcher
            _library.impl(name, torch.library.fallthrough_kernel, "Autograd")


for _row in ROWS:
    _register(_row)
