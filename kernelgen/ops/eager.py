"""Pieces of MoE and small ops that the float64 oracle runs in this release, rounded to the contract's dtypes.

They are no part of dispatch yet. They run on any device, read index values back to the host, and are differentiable where
their arithmetic is.
"""

from __future__ import annotations

import torch

from kernelgen import reference
from kernelgen.ops.checks import check_tensors
from kernelgen.reference import MoESort
from kernelgen.reference.moe import ExpertMap


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """ALiBi slopes (num_heads) float32 on the CPU (Press et al. 2021, with its rule for other than powers of two).

    Raises ShapeError for fewer than one head.
    """
    return reference.alibi_slopes(num_heads)


def moe_sort(ids: torch.Tensor, num_experts: int, *, expert_map: ExpertMap | None = None) -> MoESort:
    """Group the slots of ids (T, k) int32 by local expert, within one in the order of (token, slot).

    Returns MoESort(offsets (E) end offsets, token_of_row (T * k), row_of_slot (T, k)), all int32, -1 where there is
    none. ``expert_map`` and skipped ids: as in ``moe``. Raises ShapeError, DtypeError.
    """
    check_tensors(ids=ids)
    return reference.moe_sort(ids, num_experts, expert_map=expert_map)


def moe_permute(x: torch.Tensor, sort: MoESort) -> torch.Tensor:
    """x (T, H) to rows (T * k, H) in the sort's order and x's dtype; rows past its last offset are unspecified.

    Raises ShapeError.
    """
    check_tensors(x=x)
    return reference.moe_permute(x, sort).to(x.dtype)


def moe_unpermute(rows: torch.Tensor, sort: MoESort, weights: torch.Tensor) -> torch.Tensor:
    """out[t] = sum over slots s of weights[t, s] * rows[row_of_slot[t, s]]: (T, H) in rows' dtype.

    rows (T * k, H), weights (T, k). Skipped slots add nothing. Raises ShapeError, DeviceError.
    """
    check_tensors(rows=rows, weights=weights)
    return reference.moe_unpermute(rows, sort, weights).to(rows.dtype)
