"""What the descriptions of every op share: types of options, short forms to list them in, tensors without memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click

Options = dict[str, Any]
FP8 = ("e4m3", "e5m2")


@dataclass(frozen=True)
class Call:
    """Arguments of ``kernelgen.explain``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Form:
    """How one op is described: ``options`` of its command, and ``call`` from their values.

    ``at_run`` (values, problem) -> fields of the problem that a plan learns when it runs.
    """

    help: str
    options: tuple[Callable[..., Any], ...]
    call: Callable[[Options], Call]
    at_run: Callable[[Options, Any], dict[str, Any]] | None = None


class Whole(click.ParamType):
    """A whole number, from ``low`` up."""

    def __init__(self, low: int = 0) -> None:
        self.low, self.name = low, "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if not value.isdecimal() or int(value) < self.low:
            self.fail(f"got {value!r}, expected a whole number of at least {self.low}", param, ctx)
        return int(value)


class Dims(click.ParamType):
    """Whole numbers joined by commas (or x); ``form`` names them, one letter group each. No form: any number of them."""

    def __init__(self, form: str = "", *, example: str, least: int = 0) -> None:
        self.name, self.form, self.example, self.least = form or "N,N,...", form, example, least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.replace("x", ",").split(",")]
        wanted = self.form.count(",") + 1 if self.form else len(parts)
        if len(parts) != wanted or not all(p.isdecimal() and int(p) >= self.least for p in parts):
            count = f"{wanted} whole numbers" if self.form else "whole numbers"
            least = f" of at least {self.least}" if self.least else ""
            self.fail(f"got {value!r}, expected {count}{least}{f' {self.form}' if self.form else ''}, e.g. {self.example}", param, ctx)
        return tuple(int(p) for p in parts)


class Window(click.ParamType):
    """LEFT,RIGHT in keys, '-' for an unbounded side."""

    name = "LEFT,RIGHT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int | None, int | None]:
        if isinstance(value, tuple):
            return value
        parts = [p.strip() for p in value.split(",")]
        if len(parts) != 2 or not all(p in ("", "-") or p.isdecimal() for p in parts):
            self.fail(f"got {value!r}, expected LEFT,RIGHT in keys with '-' for an unbounded side, e.g. 128,0", param, ctx)
        left, right = (None if p in ("", "-") else int(p) for p in parts)
        return left, right


class Dtype(click.ParamType):
    """A dtype name, to its kernelgen name."""

    name = "DTYPE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from kernelgen.dtypes import parse_dtype
        from kernelgen.errors import DtypeError

        try:
            return parse_dtype(value)
        except DtypeError as error:
            self.fail(str(error), param, ctx)


class _FunctionName(click.ParamType):
    """MODULE:NAME of a variant or an epilogue, or of a function without arguments that makes one; nothing: one that changes nothing."""

    name = "[MODULE:NAME]"
    plain = "plain"
    what: str  # the function of kernelgen that makes such a thing

    def kind(self) -> tuple[type, Any]:
        """(its class, one that changes nothing)."""
        raise NotImplementedError

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        kind, nothing = self.kind()
        if value == self.plain:
            return nothing
        module, _, name = str(value).partition(":")
        try:
            found = getattr(import_module(module), name)
            made = found if isinstance(found, kind) else found()
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            self.fail(f"got {value!r}, expected MODULE:NAME of a {self.what}, or of a function without arguments that makes one: "
                      f"{error}", param, ctx)
        if not isinstance(made, kind):
            self.fail(f"got {value!r}, which is a {type(made).__name__}, expected a {self.what}", param, ctx)
        return made


class VariantName(_FunctionName):
    what = "kernelgen.variant"

    def kind(self) -> tuple[type, Any]:
        from kernelgen.reference.masks import Variant

        return Variant, Variant()


class EpilogueName(_FunctionName):
    what = "kernelgen.epilogue"

    def kind(self) -> tuple[type, Any]:
        from kernelgen.variants.epilogue_function import EpilogueFunction

        return EpilogueFunction, EpilogueFunction(lambda x, ctx: x)


def flag(name: str, help: str = "") -> Callable[..., Any]:
    return click.option(name, is_flag=True, help=help)


def number(name: str, help: str, *, low: int = 0, **more: Any) -> Callable[..., Any]:
    return click.option(name, type=Whole(low), help=help, **more)


def choice(name: str, values: tuple[str, ...], help: str, **more: Any) -> Callable[..., Any]:
    return click.option(name, type=click.Choice(values), help=help, **more)


def element(name: str, help: str, **more: Any) -> Callable[..., Any]:
    return click.option(name, type=Dtype(), help=help, **more)


def meta(shape: tuple[int, ...], dtype: str, *, grad: bool = False) -> Any:
    import torch

    from kernelgen.dtypes import DTYPES

    return torch.empty(shape, dtype=DTYPES[dtype].torch, device="meta", requires_grad=grad)


def index(*shape: int) -> Any:
    import torch

    return torch.empty(shape, dtype=torch.int32, device="meta")


def torch_dtype(name: str | None) -> Any:
    from kernelgen.dtypes import DTYPES

    return None if name is None else DTYPES[name].torch


DTYPE = element("--dtype", "Element type.", default="bf16", show_default=True)
GRAD = flag("--grad", "An input requires a gradient.")
NONDETERMINISTIC = flag("--nondeterministic", "deterministic=False.")
# A tensor from a slice may start or step anywhere: the kernels then read in smaller accesses.
ALIGNMENT = click.option("--alignment", type=click.Choice(("1", "2", "4", "8", "16")), help="At most so many bytes divide the "
                          "addresses and strides of the call (default: what fresh tensors of these shapes have).")
HEADS = (
    number("--kv-heads", "Key/value heads (default: as many as query heads)."),
    number("--head-dim-v", "Head dim of v (default: that of q)."),
    click.option("--window", type=Window(), help="LEFT,RIGHT in keys; '-' for unbounded."),
    click.option("--soft-cap", type=float, help="Cap of the scores."),
    flag("--alibi", "With ALiBi slopes."), flag("--sinks", "With attention sinks."),
    click.option("--variant", type=VariantName(), is_flag=False, flag_value=VariantName.plain,
                 help="With a score or mask variant: an importable one, or a function that makes it (default: one without functions)."),
    flag("--batch-invariant"), NONDETERMINISTIC,
)
