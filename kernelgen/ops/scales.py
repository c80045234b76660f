"""fp8 scales of attention, brought to one form: numbers folded into the call, tensors seen as 2-D with stride 0 where shared."""

from __future__ import annotations

import torch

from kernelgen.errors import DeviceError, DtypeError, ShapeError
from kernelgen.ops.checks import number, shape_text

Scale = torch.Tensor | float


def _number(name: str, scale: Scale | None) -> float | None:
    return 1.0 if scale is None else None if isinstance(scale, torch.Tensor) else number(name, scale)


def split_numbers(q_scale: Scale | None, k_scale: Scale | None, v_scale: Scale | None) -> tuple[float, float, tuple[bool, bool, bool]]:
    """(factor of the logits, factor of the output, which scales are tensors)."""
    q, k, v = _number("q_scale", q_scale), _number("k_scale", k_scale), _number("v_scale", v_scale)
    return (1.0 if q is None else q) * (1.0 if k is None else k), 1.0 if v is None else v, (q is None, k is None, v is None)


def _check(name: str, scale: torch.Tensor, device: torch.device) -> None:
    if scale.dtype != torch.float32:
        raise DtypeError(f"{name}: got {scale.dtype}, expected float32")
    if scale.device != device:
        raise DeviceError(f"{name} is on {scale.device}, expected {device}; move it with .to()")


def head_scale(
    name: str, scale: Scale | None, batch: int, heads: int, device: torch.device, kind: str | None = None,
) -> torch.Tensor | None:
    """A scalar, (heads) or (batch, heads) tensor as (batch, heads), expanded; None for none and for a number.

    ``kind``: "tensor", "head" or "request_head" demands that form. Raises ShapeError, DtypeError, DeviceError.
    """
    if not isinstance(scale, torch.Tensor):
        return None
    _check(name, scale, device)
    shape = tuple(scale.shape)
    forms = {"tensor": scale.numel() == 1 and scale.dim() <= 1, "head": shape == (heads,), "request_head": shape == (batch, heads)}
    if not any(ok for form, ok in forms.items() if kind in (None, form)):
        wanted = {"tensor": "a scalar", "head": f"(H) = ({heads},)", "request_head": f"(B, H) = ({batch}, {heads})"}
        expected = wanted[kind] if kind else ", ".join(wanted.values())
        raise ShapeError(f"{name}: got shape {shape_text(scale)}, expected {expected}")
    if scale.numel() == 1 and scale.dim() <= 1:
        scale = scale.reshape(1, 1)
    return (scale if scale.dim() == 2 else scale.unsqueeze(0)).expand(batch, heads)


def page_scale(name: str, scale: Scale | None, pages: int, heads: int, device: torch.device) -> torch.Tensor | None:
    """A (pages, heads) tensor, checked; None for none and for a number."""
    if not isinstance(scale, torch.Tensor):
        return None
    _check(name, scale, device)
    if tuple(scale.shape) != (pages, heads):
        raise ShapeError(f"{name}: got shape {shape_text(scale)}, expected (pages, Hkv) = ({pages}, {heads})")
    return scale
