"""What is looked at before an address is read: kernels are launched behind torch's back, on real memory only.

A call that torch watches (a dispatch mode, a function transform, forward-mode AD, jit tracing, a tensor subclass with its own
dispatch) is described as one that needs torch's operators; dispatch then leaves our kernels out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch._C._dynamo import eval_frame as _dynamo
from torch.autograd import forward_ad

from kernelgen.errors import DeviceError, DtypeError, LayoutError, NoBackendError, SettingsError

# Their memory is their own, and nothing of torch looks at what is done with it.
ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter))

_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_jit_trace = torch._C._is_tracing


def watched() -> bool:
    """torch records or changes what operators do here: a kernel launched past it would be lost."""
    return _dispatch_modes() > 0 or _transforms() is not None or forward_ad._current_level >= 0 or _jit_trace()


Op = TypeVar("Op", bound=Callable[..., Any])


def outside_graphs(op: Op) -> Op:
    """For ops that launch kernels: under torch.compile a call is a graph break, and the op runs as it would eagerly.

    Traced through, an op would run its host code on stand-ins for addresses and sizes; dynamo's own struct.pack, to which the
    kernels' arguments lead, calls itself until the stack ends.
    """
    # What torch.compiler.disable comes to, without a function around every call, and without importing dynamo, which takes a second.
    _dynamo.set_code_exec_strategy(op.__code__, _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.SKIP))
    vars(op).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="in this release kernelgen's ops are no operators of torch that "
                    "a graph could hold: compile without fullgraph")
    return op


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
        where = f"a {strange}" if strange else "a call inside a dispatch mode, a function transform or a trace"
        raise NoBackendError(f"{call}: got {where}, expected plain tensors outside of these: in this release the call has no operator "
                             "that torch could record; call it eagerly, under torch.compile behind torch.compiler.disable")


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
