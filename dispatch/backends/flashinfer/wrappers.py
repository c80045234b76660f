"""FlashInfer's plan / run objects, kept per device and stream and planned again when a call needs another plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

WORKSPACE = 128 * 2**20  # bytes, what its documentation advises
LN_2 = 0.6931471805599453  # its LSE is of base 2


@dataclass
class Planned:
    """A wrapper and what it is planned for: a key, and the arrays of the plan where it has some, by identity."""

    wrapper: Any
    key: Any = None
    arrays: Callable[[], Any] = lambda: None
    copied: Any = field(default=None)

    def plan(self, key: Any, arrays: Any, plan: Callable[[Any], None]) -> Any:
        """The wrapper, planned. ``arrays``: a tensor whose life is that of the plan, or None where the key says all."""
        if self.key != key or (arrays is not None and self.arrays() is not arrays):
            if self.copied is not None:
                # Its plan lies in pinned memory, which the copy before may still be reading; nearly always done by now.
                self.copied.synchronize()
            self.key = None  # a plan that raises leaves nothing behind
            plan(self.wrapper)
            self.key, self.arrays = key, (lambda: None) if arrays is None else weakref.ref(arrays)
            if torch.cuda.is_available():
                self.copied = torch.cuda.Event()
                self.copied.record()
        return self.wrapper


_kept: dict[Any, Any] = {}


def stream_key(device: torch.device) -> tuple[torch.device, int]:
    """Work of two streams may overlap, so neither shares memory with the other."""
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def workspace(device: torch.device, name: str = "float", size: int = WORKSPACE) -> torch.Tensor:
    """Memory that calls of one stream share, zero at first."""
    key = (name, *stream_key(device))
    if key not in _kept:
        _kept[key] = torch.zeros(size, dtype=torch.uint8, device=device)
    return _kept[key]


def wrapper(device: torch.device, kind: str, make: Callable[[torch.Tensor], Any]) -> Planned:
    """The wrapper of a kind for the current stream; ``make`` gets the workspace."""
    key = (kind, *stream_key(device))
    if key not in _kept:
        _kept[key] = Planned(make(workspace(device)))
    kept: Planned = _kept[key]
    return kept


def forget() -> None:
    """Drop all wrappers and workspaces (tests)."""
    _kept.clear()


def as_given(tensor: torch.Tensor) -> torch.Tensor:
    """The call's own output where a kernel can write to it, else memory for it."""
    return tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
