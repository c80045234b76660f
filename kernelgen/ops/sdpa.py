"""sdpa: attention with the signature and the layout of torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from kernelgen.errors import LayoutError, SettingsError, ShapeError
from kernelgen.guard import operator, record, through_torch
from kernelgen.ops.attention import attention
from kernelgen.ops.checks import check_tensors, shape_text

# The operator itself: the name in torch.nn.functional may have been replaced by sdpa.
_torch_sdpa = torch.ops.aten.scaled_dot_product_attention.default


@operator("sdpa")
def sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention, which it may replace by assignment.

    query (.., Hq, L, E), key (.., H, S, E), value (.., H, S, Ev) -> (.., Hq, L, Ev); leading dimensions broadcast.
    ``is_causal`` aligns at the top left, as torch does and :func:`kernelgen.attention` does not. Tensors are read where
    they are; copied are only those whose last dimension is strided or no multiple of 8, and batch dimensions that cannot
    be merged.

    attn_mask  bool, True = may attend, or a float bias. On the CPU a float mask of zeros and -inf (or the dtype's lowest
               number, which stands for it) is taken as bool. Any other bias, and every float mask on a GPU, where looking
               would be a device sync, goes to torch's operator.

    Head dims of 0 and above 512 go to torch's operator too.

    A row that may attend to nothing gives 0, where torch's kernels differ (0, NaN, or the mean of the values). Dropout is
    an error. Gradients go through a backend that has them. Raises ShapeError, DtypeError, DeviceError, SettingsError.
    """
    if through_torch(query, key, value):
        recorded: torch.Tensor = record("sdpa", locals())
        return recorded
    check_tensors(query=query, key=key, value=value, attn_mask=attn_mask)
    if dropout_p > 0:
        raise SettingsError(f"dropout_p: got {dropout_p}, expected 0: kernelgen has no dropout; call model.eval() or set it to 0")
    if attn_mask is not None and is_causal:
        raise SettingsError("got attn_mask and is_causal=True, expected one of them, as torch documents; merge the two masks")
    if query.is_nested or key.is_nested or value.is_nested:
        raise LayoutError("got a nested tensor, expected dense ones; kernelgen.attention_varlen takes packed tokens with cu_seqlens")
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        allowed = as_bool_mask(attn_mask)
        if allowed is None:
            return _torch_sdpa(query, key, value, attn_mask, 0.0, False, scale=scale, enable_gqa=enable_gqa)
        attn_mask = allowed
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.dim() < 2:
            raise ShapeError(f"{name}: got shape {shape_text(t)}, expected at least (tokens, head dim)")
    if not _fits_kernels(query, key, value):
        return _torch_sdpa(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    rank = max(query.dim(), key.dim(), value.dim())
    if rank == 2:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    query, key, value = _match_heads(query, key, value, enable_gqa)
    lead = _common_lead(query, key, value)
    q, k, v = (_merge_lead(t, lead) for t in (query, key, value))
    if attn_mask is not None and len(lead) > 1:
        attn_mask = _merge_lead(attn_mask[(None,) * max(0, 3 - attn_mask.dim())], lead)
    out = attend(q, k, v, scale=scale, mask=attn_mask, **_top_left(is_causal, q.shape[2], k.shape[2])).transpose(1, 2)
    if len(lead) != 1:
        out = out.reshape(*lead, *out.shape[1:])
    return out.squeeze(0) if rank == 2 else out


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float | None, **features: Any) -> torch.Tensor:
    """:func:`kernelgen.attention` of (B, H, L, E) tensors, any E: returns (B, L, Hq, Ev).

    ``keys`` among the features limits the call to the first keys. As torch's operator it follows autocast.
    """
    query, key, value = under_autocast(query, key, value)
    keys = features.pop("keys", None)
    if keys is not None:
        key, value = key[:, :, :keys], value[:, :, :keys]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = attention(*(readable(t.transpose(1, 2)) for t in (query, key, value)), scale=scale, **features)
    assert isinstance(out, torch.Tensor)
    return out[..., : value.shape[-1]]


def under_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in autocast's type where it is on; as for torch's operator, float64 is left alone."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def readable(t: torch.Tensor) -> torch.Tensor:
    """The tensor itself where kernels can read it; else a copy, its last dimension padded with zeros to a multiple of 8."""
    if t.shape[-1] % 8:
        t = F.pad(t, (0, -t.shape[-1] % 8))  # keeps the order of the strides, so the last dimension may still be strided
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def as_bool_mask(mask: torch.Tensor) -> torch.Tensor | None:
    """A float mask that only shows (0) or hides (-inf, lowest number) as bool; None for another, or where looking would sync."""
    if mask.device.type != "cpu" or mask.requires_grad or not mask.is_floating_point():
        return None
    hidden = mask <= torch.finfo(mask.dtype).min
    return ~hidden if bool(((mask == 0) | hidden).all()) else None


def _fits_kernels(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Head dims that :func:`kernelgen.attention` has, and heads at all."""
    heads = all(t.dim() == 2 or t.shape[-3] for t in (query, key, value))
    return heads and 0 < query.shape[-1] <= 512 and 0 < value.shape[-1] <= 512


def _top_left(is_causal: bool, rows: int, keys: int) -> dict[str, Any]:
    """Row i sees keys 0 .. i, in terms of attention's bottom-right alignment, where row i stands at i + keys - rows."""
    if not is_causal:
        return {}
    if rows > keys:
        return {"window": (None, rows - keys)}
    return {"causal": True, "keys": rows}


def _match_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Key and value with one head count that divides that of the query. Raises ShapeError."""
    hq, hk, hv = (t.shape[-3] if t.dim() > 2 else 1 for t in (query, key, value))
    if hq == hk == hv:
        return query, key, value
    if enable_gqa:
        if not (hk and hv) or hq % hk or hq % hv:
            raise ShapeError(f"got {hq} query heads, {hk} key heads, {hv} value heads, expected a multiple (enable_gqa=True)")
        common = math.lcm(hk, hv)
        key, value = (t if h == common else t.repeat_interleave(common // h, -3) for t, h in ((key, hk), (value, hv)))
        return query, key, value
    heads = max(hq, hk, hv)
    if not {hq, hk, hv} <= {1, heads}:
        raise ShapeError(f"got {hq} query heads, {hk} key heads, {hv} value heads, expected equal ones; "
                         "grouped heads need enable_gqa=True")
    query, key, value = (t.expand(*t.shape[:-3], heads, *t.shape[-2:]) for t in (query, key, value))
    return query, key, value


def _common_lead(*tensors: torch.Tensor) -> tuple[int, ...]:
    leads = [t.shape[:-3] for t in tensors]
    if leads[0] == leads[1] == leads[2]:
        return tuple(leads[0])
    try:
        return tuple(torch.broadcast_shapes(*leads))
    except RuntimeError:
        shapes = ", ".join(f"{name} {shape_text(t)}" for name, t in zip(("query", "key", "value"), tensors))
        raise ShapeError(f"got {shapes}, expected leading dimensions that broadcast") from None


def _merge_lead(t: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
    """(.., H, L, E) with its leading dimensions expanded to ``lead`` and merged into one."""
    try:
        t = t.expand(*lead, *t.shape[-3:])
    except RuntimeError:
        raise ShapeError(f"got shape {shape_text(t)}, expected leading dimensions that broadcast to {lead}") from None
    return t if len(lead) == 1 else t.reshape(math.prod(lead), *t.shape[-3:])
