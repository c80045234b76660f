"""Which experts live here: the forms in which a caller says so, checked, and as kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kernelgen.errors import DtypeError, ShapeError
from kernelgen.guard import whole
from kernelgen.ops.checks import check_rank
from kernelgen.ops.memo import layout_of

ExpertMap = torch.Tensor | Sequence[int] | range | tuple[int, int]
INDICES = {torch.int32: "int32", torch.int64: "int64"}


def local_range(expert_map: Any, experts: int) -> tuple[str | None, int]:
    """(kind of the map, first local id). Raises ShapeError for a range that is not of ``experts`` consecutive ids, DtypeError."""
    if expert_map is None:
        return None, 0
    if isinstance(expert_map, torch.Tensor):
        if expert_map.dtype not in INDICES:
            raise DtypeError(f"expert_map: got {expert_map.dtype}, expected int32 (or int64)")
        check_rank("expert_map", expert_map, 1, "(E_global)")
        return "table", 0
    if not isinstance(expert_map, (tuple, range)):
        return "table", 0
    ends = (expert_map.start, expert_map.stop) if isinstance(expert_map, range) else tuple(map(whole, expert_map))
    first, end = ends if len(ends) == 2 else (None, None)
    if first is None or end is None:
        raise ShapeError(f"expert_map: got {expert_map!r}, expected (first, last + 1), a range, or numbers in a tensor or list")
    if end - first != experts or (isinstance(expert_map, range) and expert_map.step != 1):
        raise ShapeError(f"expert_map: got {expert_map!r}, expected {experts} consecutive ids, one for each expert of w13")
    if not 0 <= first <= end < 2**63:
        raise ShapeError(f"expert_map: got {expert_map!r}, expected ids from 0 up, of at most 64 bits: a negative id is always skipped")
    return "range", first


def table_on(expert_map: Any, device: torch.device) -> torch.Tensor | None:
    """A table as int32, contiguous, on the device; None for no map and for ranges. What 32 bits do not hold names no expert."""
    if expert_map is None or isinstance(expert_map, (tuple, range)):
        return None
    if not isinstance(expert_map, torch.Tensor):
        numbers = [whole(n) for n in expert_map] if isinstance(expert_map, (Sequence, np.ndarray)) else [None]
        known = [n for n in numbers if n is not None]
        if len(known) < len(numbers):
            raise DtypeError(f"expert_map: got {expert_map!r}, expected (first, last + 1), a range, or whole numbers in a tensor or list")
        return torch.tensor([n if 0 <= n < 2**31 else -1 for n in known], dtype=torch.int32, device=device)
    return as_table(expert_map)


def as_table(expert_map: torch.Tensor) -> torch.Tensor:
    """The same of a tensor that is on its device."""
    if expert_map.dtype == torch.int64:
        expert_map = expert_map.clamp(-1, 2**31 - 1).to(torch.int32)  # without a look: wrapped around it might name one
    return expert_map.contiguous()


def map_key(expert_map: Any) -> Any:
    """What of a map decides a prepared call."""
    if isinstance(expert_map, tuple):
        return expert_map, tuple(map(type, expert_map))
    return expert_map if isinstance(expert_map, range) else layout_of(expert_map)
