"""Tensors of the caller that a call writes to: autograd is told, and none of them takes part in it."""

from __future__ import annotations

from typing import Any

import torch

from kernelgen.errors import NoBackendError

# What torch.autograd.graph.increment_version calls, without its isinstance(t, torch.Tensor), which takes as long as the rest.
_increment_version = torch._C._increment_version
_SEVERAL = (tuple, list)


def wrote(*given: Any) -> None:
    """Raise the version counters of tensors, or of tuples of them, as torch's own operators do where they write; None is nothing.

    A kernel writes by address, so autograd would not notice that a tensor which it saved has other values now. A tensor of inference
    mode has no counter. Costs 0.3 us for each one: called where the caller gave something to write to, not elsewhere.
    """
    for t in given:
        if t is None:
            continue
        if type(t) in _SEVERAL:
            wrote(*t)
        else:
            _increment_version((t,))


def no_gradient(name: str, *, writes: bool, leave: str = "") -> NoBackendError:
    """``leave``: the argument without which there is a gradient."""
    what = "an operator that writes to its arguments" if writes else "this operator"
    return NoBackendError(f"{name}: got an input that requires a gradient, expected none: {what} has no gradient; detach the "
                          "input, call under torch.no_grad()" + (f", or leave {leave}= away" if leave else ""))
