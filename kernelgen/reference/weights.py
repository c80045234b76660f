"""Packed int4 and mxfp4 weights in a plain, unshuffled layout.

A weight is given as a checkpoint stores a linear layer's: ``w (.., N, K)``, so ``gemm`` takes the packed object for
``b = w.mT`` and ``moe`` for ``w13`` and ``w2`` themselves. Groups run along K, and the last one may be short. Kernels
reorder the codes as they like; what a packed weight means is defined by :meth:`PackedWeight.dequantize`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from kernelgen.errors import DtypeError, ShapeError
from kernelgen.reference.checks import check_float, check_option, check_rank, check_shape

FORMATS = ("int4", "mxfp4")
# E2M1: sign, two exponent bits (bias 1), one mantissa bit; OCP Microscaling Formats v1.0, section 5.3.3.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MX_GROUP = 32
E8M0_BIAS, E8M0_NAN = 127, 255


class Quantized(Protocol):
    """What the oracles ask of a packed weight (.., N, K), of whatever class."""

    @property
    def codes(self) -> torch.Tensor: ...

    def dequantize(self, compute_dtype: torch.dtype = torch.float64) -> torch.Tensor: ...


@dataclass(frozen=True)
class PackedWeight:
    """``codes (.., N, ceil(K/2))`` uint8 with the even k in the low nibble, ``scale (.., N, ceil(K/group))``.

    int4: scale is floating, ``zero`` uint8 of its shape or None for symmetric codes (offset 8). mxfp4: scale is uint8,
    an E8M0 exponent with bias 127 (255 = NaN), and zero is None.
    """

    format: str
    shape: tuple[int, ...]
    group_size: int
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None

    def dequantize(self, compute_dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """``w (.., N, K)``: int4 ``(code - zero) * scale``, mxfp4 ``e2m1(code) * 2 ** (scale - 127)``."""
        columns = self.shape[-1]
        codes = unpack_nibbles(self.codes, columns)
        if self.format == "mxfp4":
            exponent = self.scale.to(compute_dtype) - E8M0_BIAS
            factor = torch.where(self.scale == E8M0_NAN, float("nan"), torch.exp2(exponent))
            values = torch.tensor(E2M1_VALUES, dtype=compute_dtype, device=codes.device)[codes.long() & 7]
            values = torch.where(codes >= 8, -values, values)
        else:
            factor = self.scale.to(compute_dtype)
            zero = 8 if self.zero is None else self._per_column(self.zero).to(compute_dtype)
            values = codes.to(compute_dtype) - zero
        return values * self._per_column(factor)

    def _per_column(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(self.group_size, -1)[..., : self.shape[-1]]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0 .. 15 ``(.., K)`` to bytes ``(.., ceil(K/2))``, even k in the low nibble, a missing last code 0."""
    padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, codes.shape[-1] % 2))
    return padded[..., 0::2] | (padded[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Inverse of :func:`pack_nibbles`: uint8 codes ``(.., columns)``."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[..., :columns]


def _groups(w: torch.Tensor, group_size: int) -> torch.Tensor:
    columns = math.ceil(w.shape[-1] / group_size) * group_size
    return torch.nn.functional.pad(w, (0, columns - w.shape[-1])).unflatten(-1, (-1, group_size))


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """E2M1 codes 0 .. 15 of the nearest values, ties to the even code, saturating at 6."""
    size = x.abs()
    # Midpoints of neighbours; a tie goes up exactly where the upper code is even.
    code = torch.zeros_like(size, dtype=torch.uint8)
    for i in range(1, 8):
        middle = (E2M1_VALUES[i - 1] + E2M1_VALUES[i]) / 2
        code += (size >= middle) if i % 2 == 0 else (size > middle)
    return code + 8 * (torch.signbit(x) & (code > 0)).to(torch.uint8)


def pack_weight(w: torch.Tensor, format: str = "int4", *, group_size: int = 128, symmetric: bool = True,
                scale: torch.Tensor | None = None, zero: torch.Tensor | None = None) -> PackedWeight:
    """Quantise a floating ``w (.., N, K)``, or wrap codes ``(.., N, ceil(K/2))`` uint8 that are packed already.

    int4: ``scale = max|w| / 7`` per group and codes -8 .. 7 stored plus 8; not ``symmetric``: ``scale = (max - min) /
    15`` over the group and 0, ``zero = round(-min / scale)``. The scale is rounded to w's dtype before it is used; a
    given ``scale`` (and ``zero``) is used as it is. mxfp4: groups are 32 whatever ``group_size`` says (32 or the
    default), and ``scale = 2 ** (floor(log2(max|w|)) - 2)`` (OCP Microscaling Formats v1.0, section 6.3), codes round
    to nearest even and saturate. Packed codes need their ``scale``, and their K is even. Raises ShapeError, DtypeError,
    SettingsError.
    """
    check_option("format", format, FORMATS)
    check_rank("w", w, tuple(range(2, 9)), "(.., N, K)")
    if format == "mxfp4":
        check_option("group_size", group_size, (MX_GROUP, 128))
        group_size = MX_GROUP
    if group_size < 1:
        raise ShapeError(f"group_size: got {group_size}, expected at least 1")
    if w.dtype == torch.uint8:
        return _wrap_codes(w, format, group_size, scale, zero)
    check_float(w=w)
    grouped = _groups(w.to(torch.float64), group_size)
    if format == "mxfp4":
        scale = _mx_scale(grouped) if scale is None else scale
        check_shape("scale", scale, grouped.shape[:-1], "(.., N, ceil(K/32))")
        if scale.dtype != torch.uint8:
            raise DtypeError(f"scale: got {scale.dtype}, expected uint8 E8M0 exponents for mxfp4")
        codes = round_e2m1(grouped / torch.exp2(scale.to(torch.float64) - E8M0_BIAS).unsqueeze(-1))
        zero = None
    else:
        if scale is None:
            low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
            span = torch.maximum(-low, high) / 7 if symmetric else (high - low) / 15
            scale = torch.where(span == 0, 1.0, span).to(w.dtype)
            zero = None if symmetric else (-low / scale.to(torch.float64)).round().clamp(0, 15).to(torch.uint8)
        check_shape("scale", scale, grouped.shape[:-1], "(.., N, ceil(K/group_size))")
        offset = 8 if zero is None else zero.to(torch.float64).unsqueeze(-1)
        codes = ((grouped / scale.to(torch.float64).unsqueeze(-1)).round() + offset).clamp(0, 15).to(torch.uint8)
    columns = codes.flatten(-2)[..., : w.shape[-1]]
    return PackedWeight(format, tuple(w.shape), group_size, pack_nibbles(columns), scale, zero)


def _mx_scale(grouped: torch.Tensor) -> torch.Tensor:
    """E8M0 exponents; a group of zeros gets the smallest one, a group with a NaN or inf the NaN code."""
    amax = grouped.abs().amax(-1)
    # frexp gives amax = m * 2^e with 0.5 <= m < 1, so floor(log2(amax)) = e - 1 exactly.
    exponent = torch.frexp(torch.where(torch.isfinite(amax), amax, 1.0)).exponent - 1 - 2
    exponent = torch.where(amax == 0, -E8M0_BIAS, exponent)
    code = (exponent + E8M0_BIAS).clamp(0, E8M0_NAN - 1)
    return torch.where(torch.isfinite(amax), code, E8M0_NAN).to(torch.uint8)


def _wrap_codes(w: torch.Tensor, format: str, group_size: int, scale: torch.Tensor | None,
                zero: torch.Tensor | None) -> PackedWeight:
    if scale is None:
        raise ShapeError("scale: got None for packed uint8 codes, expected one entry per group")
    shape = (*w.shape[:-1], 2 * w.shape[-1])
    check_shape("scale", scale, (*w.shape[:-1], math.ceil(shape[-1] / group_size)), "(.., N, ceil(K/group))")
    if format == "mxfp4" and scale.dtype != torch.uint8:
        raise DtypeError(f"scale: got {scale.dtype}, expected uint8 E8M0 exponents for mxfp4")
    if zero is not None:
        check_shape("zero", zero, scale.shape, "the shape of scale")
    return PackedWeight(format, shape, group_size, w, scale, zero)
