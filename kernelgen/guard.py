"""What is looked at before an address is read: kernels are launched behind torch's back, on real memory only.

A call that torch's dispatcher must see (a dispatch mode, jit tracing, a tensor subclass with its own dispatch) is made as an operator
(kernelgen/library); under torch.compile dynamo traces that operator's call in place of the function. A call inside a function
transform or forward-mode AD, or one that asks for a gradient, is described as one that needs torch's operators; dispatch then leaves our
kernels out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch._C._dynamo import eval_frame as _dynamo
from torch.autograd import forward_ad

from kernelgen.errors import DeviceError, DtypeError, LayoutError, NoBackendError, SettingsError
from kernelgen.library import operators as operators  # registers them
from kernelgen.library import recorded

# Their memory is their own, and nothing of torch looks at what is done with it.
ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter))

_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_jit_trace = torch._C._is_tracing


def watched() -> bool:
    """torch records or changes what operators do here: a kernel launched past it would be lost."""
    return _dispatch_modes() > 0 or _transforms() is not None or forward_ad._current_level >= 0 or _jit_trace()


Op = TypeVar("Op", bound=Callable[..., Any])


class _Recording(threading.local):
    depth = 0


_recording = _Recording()


def operator(name: str) -> Callable[[Op], Op]:
    """For public functions: in a graph the call is the operator ``kernelgen::name``, and nothing of the function is traced.

    Costs an eager call nothing: there is no function around it.
    """
    def mark(op: Op) -> Op:
        # A frame of its own is never compiled: called from compiled code's breaks it runs as it is.
        _dynamo.set_code_exec_strategy(op.__code__, _SKIP)
        call = getattr(recorded, name)
        _tell_dynamo(op, _torchdynamo_inline=call)  # what dynamo traces instead
        if "." not in op.__qualname__:  # what torch.compile(op) compiles; a method would lose its object
            _tell_dynamo(op, _torchdynamo_orig_callable=call, _torchdynamo_wrapper_id=id(op))
        return op

    return mark


class _Own(dict[str, Any]):
    """Attributes of a function, of which a copy has none of dynamo's.

    functools.wraps copies all: what somebody wraps around one of our functions would not be traced, but what dynamo traces for ours.
    """

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> Any:
        return [key for key in dict.keys(self) if not key.startswith("_torchdynamo")]


def _tell_dynamo(op: Callable[..., Any], **attributes: Any) -> None:
    op.__dict__ = _Own(vars(op)) if type(vars(op)) is dict else vars(op)
    dict.update(vars(op), attributes)


def outside_graphs(what: str) -> Callable[[Op], Op]:
    """For functions that work on the host: under torch.compile a call is a graph break that says ``what`` is done there."""
    why = (f"kernelgen: {what} on the host; do it outside of the compiled function and give that what comes of it, or compile without "
           "fullgraph")

    def mark(op: Op) -> Op:
        # What torch.compiler.disable comes to, without a function around every call, and without importing dynamo, which takes a second.
        _dynamo.set_code_exec_strategy(op.__code__, _SKIP)
        _tell_dynamo(op, _torchdynamo_disable=True, _torchdynamo_disable_msg=why)
        return op

    return mark


_SKIP = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.SKIP)


def through_torch(*tensors: Any) -> bool:
    """The call is for torch's dispatcher: a dispatch mode or jit tracing is active, or an input has its own dispatch.

    Function transforms and forward-mode AD need operators that they can look into, and are no such case; nor is a call from
    within an operator.
    """
    if _recording.depth or _transforms() is not None or forward_ad._current_level >= 0:
        return False
    return _dispatch_modes() > 0 or _jit_trace() or any(isinstance(t, torch.Tensor) and _dispatches(t) for t in tensors)


def record(name: str, values: dict[str, Any]) -> Any:
    """The call as operator ``kernelgen::name``. ``values``: the public function's arguments, among other things."""
    _recording.depth += 1
    try:
        call = getattr(recorded, name)
        code = call.__code__
        return call(**{key: values[key] for key in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]})
    finally:
        _recording.depth -= 1


def needs_torch(*tensors: Any) -> bool:
    """The call must go through torch's operators: it is watched, an input asks for a gradient, or has its own dispatch."""
    if watched():
        return True
    given = [t for t in tensors if isinstance(t, torch.Tensor)]
    return (torch.is_grad_enabled() and any(t.requires_grad for t in given)) or any(_dispatches(t) for t in given)


def _dispatches(t: torch.Tensor) -> bool:
    return type(t) not in ORDINARY and type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def address_of(t: torch.Tensor) -> int:
    """The address of the values, 0 where only torch's operators may be used."""
    return 0 if watched() or _dispatches(t) else t.data_ptr()


def check_required(**tensors: Any) -> None:
    """Arguments that a call cannot do without."""
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise DtypeError(f"{name}: got {'None' if t is None else type(t).__name__}, expected a torch.Tensor")


def check_memory(name: str, t: torch.Tensor) -> None:
    """A dense tensor whose values lie in memory as they are. Raises LayoutError, DeviceError."""
    if t.layout != torch.strided or t.is_nested:
        raise LayoutError(f"{name}: got a tensor of layout {'nested' if t.is_nested else t.layout}, expected a dense one; "
                          "call .to_dense(), or take the ragged form of the call")
    if t.is_neg() or t.is_conj():
        raise LayoutError(f"{name}: got a view that negates or conjugates lazily, expected its values in memory; call .resolve_neg() "
                          "or .resolve_conj()")
    if t.device.type != "meta" and not _dispatches(t) and not watched() and t.numel() and t.data_ptr() == 0:
        raise DeviceError(f"{name}: got a {type(t).__name__} of {t.numel()} elements without memory, expected one with its values; its "
                          "storage was freed or never made")


def check_plain(call: str, **tensors: Any) -> None:
    """Tensors of a call that no operator of torch stands in for: kernels read their memory, past everything that watches.

    Raises NoBackendError.
    """
    given = [t for value in tensors.values() for t in (value if isinstance(value, (tuple, list)) else (value,))]
    strange = next((type(t).__name__ for t in given if isinstance(t, torch.Tensor) and _dispatches(t)), None)
    if strange or watched():
        where = f"a {strange}" if strange else "a call inside a function transform or forward-mode AD"
        raise NoBackendError(f"{call}: got {where}, expected plain tensors outside of these: no operators of torch that could be "
                             "transformed stand in for the call; take it out of the transform")


# What most fields of a call are: told from tensors by a look at their type.
_KNOWN = ORDINARY | {type(None), float, int, bool, str}


def check_addresses(call: str, values: tuple[Any, ...]) -> None:
    """No tensor that a kernel is given has its own dispatch: such a one need have no memory where it says.

    Calls whose first inputs are of that kind became operators before; this is about outputs and rarer inputs beside plain ones.
    Raises NoBackendError.
    """
    for value in values:
        if type(value) in _KNOWN:
            continue
        if isinstance(value, tuple):
            check_addresses(call, value)
        elif isinstance(value, torch.Tensor) and _dispatches(value):
            raise NoBackendError(f"{call}: got a {type(value).__name__} beside plain tensors, expected all of them plain or all of that "
                                 "kind: kernels read and write memory by its address; unwrap it, or wrap the others")


def check_flags(**flags: Any) -> None:
    """True or False, numpy's too: a tensor here would be read once and remembered. Problems hold Python's, by ``bool(...)``."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise SettingsError(f"{name}: got {value!r}, expected True or False")


def whole(value: Any) -> int | None:
    """A Python int for a whole number of Python or numpy; None for anything else, True and tensors among it."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        return None
    return int(value)


def check_backend(backend: Any) -> None:
    if not isinstance(backend, str):
        raise NoBackendError(f"got backend={backend!r}, expected a name, such as 'auto' or 'torch'")
