"""Gradients of operators: the operator runs as it would without, and its backward differentiates the public function anew.

That function goes through torch's operators, or the float64 oracle, when an input wants a gradient: the same gradient as an eager
call's. It is one operator, ``<name>_backward``, so that a graph need not see inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DispatchKey, DispatchKeySet

if TYPE_CHECKING:
    from kernelgen.library.operators import Overload

_any_requires_grad = torch._C._any_requires_grad
_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_AUTOGRAD = (DispatchKey.AutogradCPU, DispatchKey.AutogradOther, DispatchKey.AutogradNestedTensor)  # the first stands for all backends


def register(library: torch.library.Library, o: Overload, kernel: Callable[..., Any]) -> None:
    """The operator's Autograd kernel. That of its backward is made when the first gradient is asked for.

    Without a gradient to take it is the kernel at once: a second way through the dispatcher would cost as much as the first, and a
    look at the set of keys 2 us. Who else watches plain tensors on a device stands above autograd, or is a mode.
    """
    function: Any = None

    def autograd(*flat: Any) -> Any:
        nonlocal function
        if _grad_enabled() and _any_requires_grad(*flat):
            if function is None:
                function = _function_of(o, _define_backward(library, o))
            return function.apply(flat, *tensors_in(flat))
        first = flat[0]
        if type(first) in _PLAIN and not (_dispatch_modes() or first.is_meta):
            return kernel(*flat)
        with torch._C._AutoDispatchBelowAutograd():
            return o.operator()(*flat)

    library.impl(o.qualified.partition("::")[2], autograd, "Autograd")


def _define_backward(library: torch.library.Library, o: Overload) -> Any:
    name = f"{o.row.name}_backward" + (f".{o.name}" if o.name else "")
    library.define(f"{name}(Tensor?[] grads, bool[] wanted, {o.schema[1:].partition(') -> ')[0]}) -> Tensor[]", tags=o.tags)
    run = _backward_of(o)
    for device in ("CPU", "CUDA"):
        library.impl(name, run, device)
    torch.library.register_fake(f"{library.ns}::{name}", _fake_backward, lib=library)
    return getattr(getattr(torch.ops.kernelgen, f"{o.row.name}_backward"), o.name or "default")


def tensors_in(flat: Sequence[Any]) -> Iterator[torch.Tensor]:
    for x in flat:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from (t for t in x if isinstance(t, torch.Tensor))


def with_tensors(flat: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """``flat`` with its tensors replaced, in the order of :func:`tensors_in`."""
    rest = iter(tensors)

    def replaced(x: Any) -> Any:
        return next(rest) if isinstance(x, torch.Tensor) else x

    return [[replaced(y) for y in x] if isinstance(x, (list, tuple)) else replaced(x) for x in flat]


def _function_of(o: Overload, reverse: Any) -> Any:
    operator = o.operator()

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, flat: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                result = operator(*flat)
            ctx.save_for_backward(*tensors)
            results = result if isinstance(result, tuple) else (result,)
            ctx.mark_non_differentiable(*(t for t in results if not _differentiable(t)))
            ctx.flat = with_tensors(flat, [_HOLE] * len(tensors))  # the tensors are torch's to keep
            return result

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
            wanted = list(ctx.needs_input_grad[1:])
            flat = with_tensors(ctx.flat, ctx.saved_tensors)
            made = iter(reverse([g if g is None or _differentiable(g) else None for g in grads], wanted, *flat))
            return (None, *(next(made) if one else None for one in wanted))

    Recomputed.__name__ = f"Backward of {o.qualified}"
    return Recomputed


_HOLE = torch.empty(0, device="cpu")


def _differentiable(t: torch.Tensor) -> bool:
    """Not indices, and not fp8 codes, with which autograd has no arithmetic; their scale is."""
    return t.is_floating_point() and t.dtype.itemsize > 1


def _backward_of(o: Overload) -> Callable[..., Any]:
    from kernelgen.library.operators import kernel_of

    kernel = kernel_of(o)

    def backward(grads: list[torch.Tensor | None], wanted: list[bool], *flat: Any) -> list[torch.Tensor]:
        given = list(tensors_in(flat))
        with _autograd_on(), torch.enable_grad():
            inputs = [t.detach().requires_grad_() if one else t.detach() for t, one in zip(given, wanted)]
            value = kernel(*with_tensors(flat, inputs))
            results = value if isinstance(value, tuple) else (value,)
            pairs = [(r, g) for r, g in zip(results, grads) if g is not None and r.requires_grad]
            leaves = [t for t, one in zip(inputs, wanted) if one]
            found: Sequence[torch.Tensor | None] = [None] * len(leaves)
            if pairs:
                outputs, seeds = zip(*pairs)
                found = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
        return [_like(t, g) for t, g in zip(leaves, found)]

    return backward


def _like(t: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """With the strides that the fake kernel promises."""
    made = torch.empty_like(t, requires_grad=False)
    return made.zero_() if gradient is None else made.copy_(gradient)


def _fake_backward(grads: Any, wanted: list[bool], *flat: Any, **named: Any) -> list[torch.Tensor]:
    given = list(tensors_in((*flat, *named.values())))
    return [torch.empty_like(t) for t, one in zip(given, wanted) if one]


class _autograd_on:
    """Operators record again, within a kernel that autograd called below itself."""

    def __enter__(self) -> None:
        kept = torch._C._dispatch_tls_local_exclude_set()
        for key in _AUTOGRAD:
            kept = kept - DispatchKeySet(key)
        self.guard = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), kept)
        self.guard.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.guard.__exit__(*error)
