"""The hot path's memory: raw call signature -> prepared call."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from kernelgen.guard import ORDINARY

# Signatures kept per op. A server whose lengths change with every call would grow it for ever; clearing costs one
# dispatch of about 100 us per live signature.
LIMIT = 4096

_memos: list[dict[Hashable, Any]] = []


def new_memo() -> dict[Hashable, Any]:
    memo: dict[Hashable, Any] = {}
    _memos.append(memo)
    return memo


def remember(memo: dict[Hashable, Any], key: Hashable, call: Any) -> None:
    if key is None or unusual(key):
        return
    if len(memo) >= LIMIT:
        memo.clear()
    memo[key] = call


def forget_calls() -> None:
    """Drop every prepared call (tests, and after settings change)."""
    for memo in _memos:
        memo.clear()


def layout_of(t: Any, *, written: bool = False) -> Hashable:
    """What of an optional tensor decides a prepared call; None for none.

    Anything unusual (no tensor, no memory, a subclass, a lazily negated view) gets a form of its own: no call with it is
    ever remembered, so it takes the long way and is checked there. ``written``: that it requires a gradient is unusual too.
    """
    if t is None:
        return None
    if type(t) not in ORDINARY or t.layout != torch.strided:
        return (_UNUSUAL, type(t))
    if written and t.requires_grad and torch.is_grad_enabled():
        return (_UNUSUAL, type(t))
    address = t.data_ptr()
    if (address == 0 and t.numel()) or t.is_neg():
        return (_UNUSUAL, address)
    return (t.shape, t.stride(), t.dtype, t.device, address & 15)


_UNUSUAL = object()


def unusual(key: Any) -> bool:
    """Whether a key holds a form of :func:`layout_of` that must not be remembered."""
    return key is _UNUSUAL or (type(key) is tuple and any(unusual(part) for part in key))
