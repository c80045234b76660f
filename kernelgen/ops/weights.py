"""PackedWeight and pack_weight: 4-bit weights that gemm and grouped_gemm take as b."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from kernelgen.errors import DtypeError, LayoutError, SettingsError, ShapeError
from kernelgen.guard import check_flags, outside_graphs, whole
from kernelgen.ops.checks import check_tensors, shape_text

VERSION = 1
FORMATS = ("int4", "mxfp4")
GROUP_SIZES = (32, 64, 128)
MX_GROUP = 32
_SCALES = (torch.float32, torch.bfloat16, torch.float16)
_BYTES = (torch.uint8,)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight (.., N, K) in 4 bits: made by :func:`pack_weight`, given to gemm and grouped_gemm for b = w.mT.

    codes   (.., N, ceil(K / 2)) uint8, an even k in the low nibble
    scale   (.., N, ceil(K / group_size)): floating for int4, uint8 exponents (E8M0) for mxfp4
    zero    uint8, the shape of scale: int4 codes mean (code - zero) * scale; None: zero is 8

    :meth:`tensors` and :meth:`from_tensors` save and load it as plain tensors. ``version`` is that of this layout. Raises SettingsError,
    ShapeError, DtypeError, LayoutError for tensors that are no such weight.
    """

    format: str
    shape: tuple[int, ...]
    group_size: int
    codes: torch.Tensor = field(repr=False)
    scale: torch.Tensor = field(repr=False)
    zero: torch.Tensor | None = field(default=None, repr=False)
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise SettingsError(f"got a packed weight of version {self.version}, expected {VERSION}: pack it anew with this release")
        _check(self)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def dim(self) -> int:
        return len(self.shape)

    def dequantize(self, compute_dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The values w (.., N, K) that the codes mean."""
        from kernelgen import reference

        weight = reference.PackedWeight(self.format, self.shape, self.group_size, self.codes, self.scale, self.zero)
        return weight.dequantize(compute_dtype)

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same weight on another device."""
        zero = None if self.zero is None else self.zero.to(device)
        return replace(self, codes=self.codes.to(device), scale=self.scale.to(device), zero=zero)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything as plain tensors, for torch.save or safetensors."""
        about = [self.version, FORMATS.index(self.format), self.group_size, *self.shape]
        found = {"about": torch.tensor(about, dtype=torch.int64, device="cpu"), "codes": self.codes, "scale": self.scale}
        return found if self.zero is None else found | {"zero": self.zero}

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
        """The weight that :meth:`tensors` gave. Raises ShapeError for what is none, SettingsError for another version."""
        missing = [name for name in ("about", "codes", "scale") if name not in tensors]
        if missing:
            raise ShapeError(f"got tensors {', '.join(sorted(tensors)) or 'none'}, expected about, codes, scale (and zero), as "
                             "PackedWeight.tensors() gives them")
        version, form, group_size, *shape = (int(x) for x in tensors["about"].tolist())
        if version != VERSION or not 0 <= form < len(FORMATS):
            raise SettingsError(f"got a packed weight of version {version}, expected {VERSION}: pack it anew with this release")
        return PackedWeight(FORMATS[form], tuple(shape), group_size, tensors["codes"], tensors["scale"], tensors.get("zero"))

    @cached_property
    def layout(self) -> tuple[Any, ...]:
        """What of the tensors decides a prepared call: the weight does not change, so it is asked for once."""
        parts = (self.codes, self.scale, *(() if self.zero is None else (self.zero,)))
        return (self.format, self.shape, self.group_size, *((t.stride(), t.dtype, t.device, t.data_ptr() & 15) for t in parts))


@outside_graphs("a weight is packed")
def pack_weight(
    w: torch.Tensor, format: str = "int4", *, group_size: int = 128, symmetric: bool = True, scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
) -> PackedWeight:
    """Quantise w (.., N, K), a linear layer's weight, or take codes that are packed already, to a PackedWeight.

    format      "int4": groups of ``group_size`` (32, 64 or 128) along K share a scale of w's dtype, max|w| / 7 with codes
                -8 .. 7; not ``symmetric``: a scale and a zero point from the smallest and the largest value. "mxfp4":
                E2M1 codes in groups of 32 with a power of two as scale (OCP Microscaling Formats v1.0)
    w           float32, bfloat16 or float16, or codes (.., N, K / 2) uint8 with two to a byte, the even k low, and their
                ``scale`` (.., N, ceil(K / group_size)) and ``zero``
    scale, zero of a floating w: used as they are given

    Raises ShapeError, DtypeError, DeviceError, LayoutError, SettingsError.
    """
    check_tensors(w=w, scale=scale, zero=zero)
    if w.dim() < 2:
        raise ShapeError(f"w: got shape {shape_text(w)}, expected (.., N, K)")
    if w.dtype not in (torch.uint8, *_SCALES):
        raise DtypeError(f"w: got {w.dtype}, expected float32, bfloat16, float16, or uint8 codes")
    check_flags(symmetric=symmetric)
    size = whole(group_size)
    if format == "int4" and size not in GROUP_SIZES:
        raise SettingsError(f"group_size: got {group_size!r}, expected one of {', '.join(map(str, GROUP_SIZES))}")
    if format == "int4" and zero is not None and zero.dtype != torch.uint8:
        raise DtypeError(f"zero: got {zero.dtype}, expected uint8 with values 0 .. 15")
    if zero is not None and scale is None:
        raise ShapeError("zero: got one without scale, expected both: they are of one group")
    if format == "mxfp4" and (zero is not None or not symmetric):
        got = "symmetric=False" if zero is None else "zero"
        raise SettingsError(f"got {got} with mxfp4, expected none: its codes have a sign, and no zero points")
    if not symmetric and scale is not None and zero is None:
        raise ShapeError("zero: got None with a scale and symmetric=False, expected uint8 zero points of scale's shape")
    from kernelgen import reference  # slow to import, and packing is done beforehand

    made = reference.pack_weight(w, format, group_size=size or group_size, symmetric=symmetric, scale=scale, zero=zero)
    return PackedWeight(made.format, made.shape, made.group_size, made.codes, made.scale, made.zero)


def _check(w: PackedWeight) -> None:
    """Shapes and dtypes that kernels rely on, whoever made the weight."""
    mx = w.format == "mxfp4"
    if w.format not in FORMATS or w.group_size < 1 or (mx and (w.zero is not None or w.group_size != MX_GROUP)):
        zero = "" if w.zero is None else " with zero points"
        raise SettingsError(f"got {w}{zero}, expected int4, or mxfp4 in groups of {MX_GROUP} without zero points; make it by pack_weight")
    *lead, columns = w.shape
    groups = (*lead, -(-columns // w.group_size))
    for name, t, shape, dtypes in (
        ("codes", w.codes, (*lead, -(-columns // 2)), _BYTES), ("scale", w.scale, groups, _BYTES if mx else _SCALES),
        ("zero", w.zero, groups, _BYTES),
    ):
        if t is None or (t.shape == shape and t.dtype in dtypes and (shape[-1] <= 1 or t.stride(-1) == 1)):
            continue
        if tuple(t.shape) != shape:
            raise ShapeError(f"{name}: got shape {shape_text(t)}, expected {shape} for a weight {w.shape} in groups of {w.group_size}")
        if t.dtype not in dtypes:
            raise DtypeError(f"{name}: got {t.dtype}, expected {' or '.join(map(str, dtypes))} for {w.format}")
        raise LayoutError(f"{name}: got strides {t.stride()}, expected 1 in the last dimension; call {name}.contiguous()")
