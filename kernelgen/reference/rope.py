"""Rotary position embedding (Su et al. 2021), both pairings, partial, cached and with frequency scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.reference.checks import (
    INDEX_DTYPES,
    check_compute_dtype,
    check_float,
    check_option,
    check_same_device,
    check_shape,
    to_compute,
)

LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def rope_frequencies(rotary_dim: int, theta: float = 10000.0,
                     scaling: Mapping[str, Any] | None = None, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Angle per position of each pair, ``theta ** (-2 i / rotary_dim)``, float64 ``(rotary_dim / 2)`` on ``device`` or torch's default.

    ``scaling`` has the keys of a Hugging Face ``rope_scaling`` entry. "default" changes nothing. "linear" divides every
    frequency by ``factor``. "llama3" (Llama 3.1): with wavelength w = 2 pi / f and L = original_max_position_embeddings,
    frequencies with w > L / low_freq_factor are divided by ``factor``, those with w < L / high_freq_factor are kept, and
    between them ``s = (L / w - low) / (high - low)`` blends ``(1 - s) * f / factor + s * f``.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ShapeError(f"rotary_dim: got {rotary_dim}, expected an even number of at least 2")
    freq = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim)
    if scaling is None:
        return freq
    if not isinstance(scaling, Mapping):
        raise SettingsError(f"scaling: got {scaling!r}, expected a mapping with the keys of a Hugging Face rope_scaling")
    kind = scaling.get("rope_type", scaling.get("type", "llama3"))  # "type" in older configs
    check_option("scaling rope_type", kind, ("llama3", "linear", "default"))
    if kind == "default":
        return freq
    missing = [key for key in (LLAMA3_KEYS if kind == "llama3" else LLAMA3_KEYS[:1]) if key not in scaling]
    if missing:
        raise SettingsError(f"scaling: got {dict(scaling)!r}, expected also {', '.join(missing)} for {kind!r}")
    factor = float(scaling["factor"])
    if kind == "linear":
        return freq / factor
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    ratio = float(scaling["original_max_position_embeddings"]) * freq / (2 * math.pi)
    blend = ((ratio - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * freq / factor + blend * freq


def make_cos_sin_cache(max_position: int, rotary_dim: int, *, theta: float = 10000.0,
                       scaling: Mapping[str, Any] | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``(max_position, rotary_dim)``: rotary_dim / 2 cosines, then as many sines, rounded once from float64."""
    angles = torch.arange(max_position, dtype=torch.float64)[:, None] * rope_frequencies(rotary_dim, theta, scaling)
    return torch.cat([angles.cos(), angles.sin()], -1).to(dtype)


def rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, *, theta: float = 10000.0,
         cos_sin_cache: torch.Tensor | None = None, rotary_dim: int | None = None, interleaved: bool = False,
         scaling: Mapping[str, Any] | None = None,
         compute_dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate pairs of ``q (.., Hq, D)`` and ``k (.., Hkv, D)`` by their position's angles; returns new tensors.

    ``positions (..)`` int32 or int64, one per token. The first ``rotary_dim`` entries (default: all D, or the cache's
    width) rotate, the rest is passed on. Pair i is (i, i + rotary_dim / 2), or (2i, 2i + 1) if ``interleaved``; it
    becomes (x cos - y sin, y cos + x sin). Angles are computed in float64 from ``theta`` and ``scaling`` (see
    :func:`rope_frequencies`) or read from ``cos_sin_cache (positions, rotary_dim)``, cosines then sines. Raises
    ShapeError (also for a position outside the cache), DtypeError, DeviceError, SettingsError.
    """
    check_compute_dtype(compute_dtype)
    check_float(q=q, k=k, cos_sin_cache=cos_sin_cache)
    check_same_device(q=q, k=k, positions=positions, cos_sin_cache=cos_sin_cache)
    if positions.dtype not in INDEX_DTYPES:
        raise DtypeError(f"positions: got {positions.dtype}, expected int32 or int64")
    check_shape("positions", positions, q.shape[:-2], "one per token of q")
    check_shape("k", k, (*q.shape[:-2], *k.shape[-2:-1], q.shape[-1]), "(.., Hkv, D) with q's tokens and D")
    if cos_sin_cache is not None:
        if cos_sin_cache.dim() != 2 or (rotary_dim or cos_sin_cache.shape[-1]) != cos_sin_cache.shape[-1]:
            raise ShapeError(f"cos_sin_cache: got shape {tuple(cos_sin_cache.shape)}, expected (positions, rotary_dim)"
                             + (f" with rotary_dim = {rotary_dim}" if rotary_dim else ""))
        if scaling is not None:
            raise SettingsError("scaling: given together with cos_sin_cache, expected it to be in the cache already")
        rotary_dim = cos_sin_cache.shape[-1]
    size = q.shape[-1] if rotary_dim is None else rotary_dim
    if size > q.shape[-1] or size % 2:
        raise ShapeError(f"rotary_dim: got {size}, expected an even number up to D = {q.shape[-1]}")
    if cos_sin_cache is not None:
        if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < cos_sin_cache.shape[0]:
            raise ShapeError(f"positions: got {int(positions.min())} .. {int(positions.max())}, expected 0 .. "
                             f"{cos_sin_cache.shape[0] - 1} (rows of cos_sin_cache)")
        cos, sin = to_compute(cos_sin_cache, compute_dtype)[positions.long()].chunk(2, -1)
    else:
        angles = positions.to(torch.float64)[..., None] * rope_frequencies(size, theta, scaling, device="cpu").to(q.device)
        cos, sin = angles.cos().to(compute_dtype), angles.sin().to(compute_dtype)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return _rotate_pairs(q, cos, sin, interleaved, compute_dtype), _rotate_pairs(k, cos, sin, interleaved,
                                                                                 compute_dtype)


def _rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool,
                  compute_dtype: torch.dtype) -> torch.Tensor:
    value = to_compute(x, compute_dtype)
    size = 2 * cos.shape[-1]
    head, rest = value[..., :size], value[..., size:]
    first, second = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([joined, rest], -1)
