"""The tensors of one call of the small ops around attention, as kernels and the reference adapter receive them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class Place(NamedTuple):
    """Where each token goes: a slot mapping, or a page table with positions and requests. Index tensors are 1-D.

    ``page_indptr`` is None for a table of blocks, where ``page_indices`` is (B, max_pages) and ``lengths`` the tokens of
    each request; with it ``lengths`` are the tokens of each last page. ``later`` (T) int32: tokens of the same request
    behind each one, where the positions are the last ones of the lengths.
    """

    slot_mapping: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    requests: torch.Tensor | None = None
    later: torch.Tensor | None = None
    page_indptr: torch.Tensor | None = None
    page_indices: torch.Tensor | None = None
    lengths: torch.Tensor | None = None


class Angles(NamedTuple):
    """What rotates: ``table`` holds frequencies (rotary_dim / 2) float64, or is a cos_sin_cache (positions, rotary_dim)."""

    table: torch.Tensor
    theta: float
    scaling: Mapping[str, Any] | None
    cached: bool


class AppendTensors(NamedTuple):
    """k (T, H, D), v (T, H, Dv); caches (pages, page_size, H, D or Dv) as views.

    ``k_cache`` and ``v_cache`` carry shapes and strides when a call is bound; a repeated call gives any tensor from whose
    address the side starts ``k_offset`` or ``v_offset`` bytes on. Scales: numbers, or float32 tensors in one of the
    forms (), (H), (B, H), (pages, H).
    """

    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    place: Place
    k_scale: torch.Tensor | float | None = None
    v_scale: torch.Tensor | float | None = None
    q: torch.Tensor | None = None
    q_out: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    angles: Angles | None = None
    k_offset: int = 0
    v_offset: int = 0


class RopeTensors(NamedTuple):
    """q, k and their outputs (outer, inner, H, D); positions (outer, inner)."""

    q: torch.Tensor
    k: torch.Tensor
    q_out: torch.Tensor
    k_out: torch.Tensor
    positions: torch.Tensor
    angles: Angles


class MergeTensors(NamedTuple):
    """outs (n, T, H, D), lses (n, T, H), out (T, H, D), lse (T, H) float32."""

    outs: torch.Tensor
    lses: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
