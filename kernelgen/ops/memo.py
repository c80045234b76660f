"""The hot path's memory: raw call signature -> prepared call."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

# Signatures kept per op. A server whose lengths change with every call would grow it for ever; clearing costs one
# dispatch of about 100 us per live signature.
LIMIT = 4096

_memos: list[dict[Hashable, Any]] = []


def new_memo() -> dict[Hashable, Any]:
    memo: dict[Hashable, Any] = {}
    _memos.append(memo)
    return memo


def remember(memo: dict[Hashable, Any], key: Hashable, call: Any) -> None:
    if len(memo) >= LIMIT:
        memo.clear()
    memo[key] = call


def forget_calls() -> None:
    """Drop every prepared call (tests, and after settings change)."""
    for memo in _memos:
        memo.clear()


def layout_of(t: Any) -> Hashable:
    """What of an optional tensor decides a prepared call. A thing that is no tensor has none and is refused later."""
    return (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15) if isinstance(t, torch.Tensor) else None
