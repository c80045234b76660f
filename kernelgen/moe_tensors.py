"""The tensors of one call of route, moe and the pieces of moe, as kernels and adapters receive them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RouteTensors(NamedTuple):
    """logits (T, E), bias (E) or None; outputs weights (T, k) float32 and ids (T, k) int32; counts (E) int32, added to, or None."""

    logits: torch.Tensor
    bias: torch.Tensor | None
    weights: torch.Tensor
    ids: torch.Tensor
    scaling: float
    counts: torch.Tensor | None = None
