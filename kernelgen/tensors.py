"""The tensors of one call, as kernels and adapters receive them (already validated, outputs allocated)."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionTensors(NamedTuple):
    """Dense or ragged attention; shapes as in CONTRACTS. ``cu_seqlens_*`` are int32 on the device, None when dense."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    scale: float
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None
    q_scale: torch.Tensor | float | None = None
    k_scale: torch.Tensor | float | None = None
    v_scale: torch.Tensor | float | None = None
    block_mask: object | None = None
    variant: object | None = None


class GemmTensors(NamedTuple):
    """a (Ba, M, K), b (Bb, K, N), out (Ba, M, N or N/2): three-dimensional views, Bb is 1 when b is shared."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None = None
    c: torch.Tensor | None = None
    beta: float = 1.0
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None


class RmsNormTensors(NamedTuple):
    """x, out, residual (rows, width); weight (width)."""

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    residual: torch.Tensor | None
    eps: float


class SiluAndMulTensors(NamedTuple):
    """x (rows, 2 * width), out (rows, width)."""

    x: torch.Tensor
    out: torch.Tensor
