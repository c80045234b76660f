"""Argument checks and conversions that every oracle shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kernelgen.errors import DeviceError, DtypeError, SettingsError, ShapeError

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
COMPUTE_DTYPES = (torch.float64, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)


def is_fp8(x: torch.Tensor) -> bool:
    """True for the two fp8 element types of the contract."""
    return x.dtype in FP8_DTYPES


def to_compute(x: torch.Tensor, compute_dtype: torch.dtype) -> torch.Tensor:
    """x in the compute dtype; exact for every narrower element type, and differentiable."""
    return x if x.dtype == compute_dtype else x.to(compute_dtype)


def check_compute_dtype(compute_dtype: torch.dtype) -> None:
    if compute_dtype not in COMPUTE_DTYPES:
        raise DtypeError(f"compute_dtype: got {compute_dtype}, expected torch.float64 or torch.float32")


def check_option(name: str, value: object, legal: Iterable[object]) -> None:
    """Raise SettingsError that lists the legal values."""
    legal = tuple(legal)
    if value not in legal:
        raise SettingsError(f"{name}: got {value!r}, expected one of {', '.join(repr(v) for v in legal)}")


def check_rank(name: str, x: torch.Tensor, ranks: Sequence[int], layout: str) -> None:
    if x.dim() not in ranks:
        raise ShapeError(f"{name}: got shape {tuple(x.shape)}, expected {layout}")


def check_shape(name: str, x: torch.Tensor, expected: Sequence[int], layout: str) -> None:
    if tuple(x.shape) != tuple(expected):
        raise ShapeError(f"{name}: got shape {tuple(x.shape)}, expected {layout} = {tuple(expected)}")


def check_float(**tensors: torch.Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and not x.is_floating_point():
            raise DtypeError(f"{name}: got {x.dtype}, expected a floating-point tensor")


def check_same_device(**tensors: Any) -> None:
    """Tensors (other values are ignored) must live on one device."""
    found = {name: x.device for name, x in tensors.items() if isinstance(x, torch.Tensor)}
    if len(set(found.values())) > 1:
        places = ", ".join(f"{name} on {device}" for name, device in found.items())
        raise DeviceError(f"got tensors on different devices ({places}), expected one device; move them together")


def check_attention_dtypes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """One floating dtype for q, k and v, or an fp8 k and v of one dtype beside any floating q."""
    check_float(q=q, k=k, v=v)
    if k.dtype == v.dtype and (q.dtype == k.dtype or is_fp8(k)):
        return
    raise DtypeError(f"got q {q.dtype}, k {k.dtype}, v {v.dtype}, expected one dtype, or fp8 k and v of one dtype; "
                     "convert explicitly, nothing is cast silently")


def as_index_list(name: str, x: torch.Tensor | Sequence[int]) -> list[int]:
    """Host integers of a 1-D index tensor or a plain sequence."""
    if isinstance(x, torch.Tensor):
        if x.dtype not in INDEX_DTYPES:
            raise DtypeError(f"{name}: got {x.dtype}, expected int32 or int64")
        check_rank(name, x, (1,), "a 1-D tensor")
        return [int(i) for i in x.tolist()]
    return [int(i) for i in x]


def as_boundaries(name: str, x: torch.Tensor | Sequence[int], total: int) -> list[int]:
    """Host values of cumulative lengths (B + 1): 0 first, never falling, at most ``total`` at the end."""
    ends = as_index_list(name, x)
    if not ends or ends[0] != 0 or any(a > b for a, b in zip(ends, ends[1:])):
        raise ShapeError(f"{name}: got {ends}, expected B + 1 values that start at 0 and never fall")
    if ends[-1] > total:
        raise ShapeError(f"{name}: ends at {ends[-1]}, but there are only {total} rows")
    return ends


def as_lengths(name: str, x: torch.Tensor | Sequence[int], batch: int, capacities: Sequence[int]) -> list[int]:
    """Host values of one length per request, each within its capacity."""
    lengths = as_index_list(name, x)
    if len(lengths) != batch:
        raise ShapeError(f"{name}: got {len(lengths)} lengths, expected one for each of {batch} requests")
    for b, (length, capacity) in enumerate(zip(lengths, capacities)):
        if not 0 <= length <= capacity:
            raise ShapeError(f"{name}: request {b} has length {length}, expected 0 .. {capacity}")
    return lengths


def as_scale(name: str, scale: torch.Tensor | float, device: torch.device, compute_dtype: torch.dtype) -> torch.Tensor:
    """A scale as a tensor of the compute dtype; a tensor must be float32 and live on ``device``."""
    if not isinstance(scale, torch.Tensor):
        return torch.tensor(float(scale), dtype=compute_dtype, device=device)
    if scale.dtype != torch.float32:
        raise DtypeError(f"{name}: got {scale.dtype}, expected float32")
    if scale.device != device:
        raise DeviceError(f"{name}: on {scale.device}, expected {device} like the tensor it scales")
    return to_compute(scale, compute_dtype)
