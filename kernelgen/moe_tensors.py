"""The tensors of one call of route, moe and the pieces of moe, as kernels and adapters receive them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class RouteTensors(NamedTuple):
    """logits (T, E), bias (E) or None; outputs weights (T, k) float32 and ids (T, k) int32; counts (E) int32, added to, or None."""

    logits: torch.Tensor
    bias: torch.Tensor | None
    weights: torch.Tensor
    ids: torch.Tensor
    scaling: float
    counts: torch.Tensor | None = None


class MoESort(NamedTuple):
    """Rows of the k copies of T tokens, grouped by expert: what moe_sort gives.

    offsets       (E) int32: where the rows of each expert end, as grouped_gemm takes them
    token_of_row  (T * k) int32: token of each row; -1 for rows past the last offset
    row_of_slot   (T, k) int32: row of each (token, slot); -1 where the slot is skipped
    """

    offsets: torch.Tensor
    token_of_row: torch.Tensor
    row_of_slot: torch.Tensor


class SortTensors(NamedTuple):
    """ids (T, k); expert_map (E_global) int32, contiguous, or None; ``first`` local id of a range; the rest as in MoESort.

    For a product that adds rows to those of tokens: weights (T, k) to weight_of_row (T * k) float32; cleared (T, W), whose rows are
    multiples of 16 bytes, or None.
    """

    ids: torch.Tensor
    offsets: torch.Tensor
    token_of_row: torch.Tensor
    row_of_slot: torch.Tensor
    expert_map: torch.Tensor | None = None
    first: int = 0
    weights: torch.Tensor | None = None
    weight_of_row: torch.Tensor | None = None
    cleared: torch.Tensor | None = None


class PermuteTensors(NamedTuple):
    """x (T, W) to rows (T * k, W); row_of_slot (T, k) int32, contiguous; weights (T, k) or None.

    scale (T, S) float32 moves to scale_rows (T * k, S): x are codes then, and weights multiply the scale.
    """

    x: torch.Tensor
    row_of_slot: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    scale_rows: torch.Tensor | None = None


class UnpermuteTensors(NamedTuple):
    """rows (T * k, W) to out (T, W); row_of_slot (T, k) int32, contiguous; weights (T, k) or None; addend (T, W) or None."""

    rows: torch.Tensor
    row_of_slot: torch.Tensor
    out: torch.Tensor
    weights: torch.Tensor | None = None
    addend: torch.Tensor | None = None


class MoeTensors(NamedTuple):
    """Shapes as in moe; w13 and w2 may be PackedWeight. Scales are tensors; ``expert_map`` as given, ``table`` (E_global) int32 and
    ``first`` what kernels see of it.
    """

    x: torch.Tensor
    w13: Any
    w2: Any
    weights: torch.Tensor
    ids: torch.Tensor
    out: torch.Tensor
    alpha: float | None = None
    limit: float | None = None
    bias13: torch.Tensor | None = None
    bias2: torch.Tensor | None = None
    scale13: torch.Tensor | None = None
    scale2: torch.Tensor | None = None
    shared: tuple[torch.Tensor, torch.Tensor] | None = None
    expert_map: Any = None
    table: torch.Tensor | None = None
    first: int = 0
