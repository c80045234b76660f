"""Argument checks that several ops share. Every message says got, expected and what to do."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernelgen.errors import DeviceError, DtypeError, LayoutError, SettingsError, ShapeError
from kernelgen.guard import address_of, check_memory
from kernelgen.library.written import no_gradient


def shape_text(t: torch.Tensor) -> str:
    return f"({', '.join(map(str, t.shape))})"


def check_tensors(**tensors: torch.Tensor | None) -> None:
    """Every given value is a torch tensor, all on one device."""
    device = None
    first = ""
    for name, t in tensors.items():
        if t is None:
            continue
        if not isinstance(t, torch.Tensor):
            raise DtypeError(f"{name}: got {type(t).__name__}, expected a torch.Tensor")
        if device is None:
            device, first = t.device, name
        elif t.device != device:
            raise DeviceError(f"{name} is on {t.device} and {first} on {device}, expected one device; move one with .to()")
        check_memory(name, t)


def check_last_contiguous(**tensors: torch.Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None and t.dim() and t.shape[-1] > 1 and t.stride(-1) != 1:
            raise LayoutError(
                f"{name}: got stride {t.stride(-1)} in the last dimension of {shape_text(t)}, expected 1; call {name}.contiguous()"
            )


def check_side_dtype(name: str, t: torch.Tensor, main: torch.dtype) -> None:
    """Of what stands beside the operands: their dtype, or float32."""
    if t.dtype not in (main, torch.float32):
        raise DtypeError(f"{name}: got {t.dtype}, expected {' or '.join(dict.fromkeys((str(main), 'torch.float32')))}; convert with .to()")


def check_rank(name: str, t: torch.Tensor, rank: int, layout: str) -> None:
    if t.dim() != rank:
        raise ShapeError(f"{name}: got shape {shape_text(t)}, expected {rank} dimensions {layout}")


def check_dim(name: str, t: torch.Tensor, dim: int, expected: int, why: str) -> None:
    if t.shape[dim] != expected:
        raise ShapeError(f"{name}: got {t.shape[dim]} in dimension {dim} of {shape_text(t)}, expected {expected} ({why})")


def check_same_dtype(**tensors: torch.Tensor) -> None:
    kinds = {name: t.dtype for name, t in tensors.items()}
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{name} {str(kind).removeprefix('torch.')}" for name, kind in kinds.items())
        raise DtypeError(f"got {listed}, expected one dtype; convert with .to(): nothing is cast silently")


def check_output(name: str, t: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tuple(t.shape) != shape:
        raise ShapeError(f"{name}: got shape {shape_text(t)}, expected {shape}")
    if t.dtype != dtype:
        raise DtypeError(f"{name}: got {t.dtype}, expected {dtype}")
    if t.device != device:
        raise DeviceError(f"{name} is on {t.device}, expected {device}")
    check_last_contiguous(**{name: t})
    reach = 0  # elements between the first and the last of what smaller strides span
    for stride, extent in sorted((stride, extent) for extent, stride in zip(t.shape, t.stride()) if extent > 1):
        if stride <= reach:
            raise LayoutError(f"{name}: got strides {t.stride()} of {shape_text(t)}, in which elements share memory, expected memory of "
                              "its own for every element")
        reach += stride * (extent - 1)
    if t.requires_grad:
        check_takes_no_gradient(name, t, leave=name.partition(" ")[0])


def span_of(t: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to behind its last."""
    return (sum((extent - 1) * stride for extent, stride in zip(t.shape, t.stride())) + 1) * t.element_size() if t.numel() else 0


def _window(t: torch.Tensor, pitch: int) -> int:
    """Bytes of a tensor in each ``pitch`` bytes, where that many lie between its rows; else more than fit."""
    size, inner = t.element_size(), t.element_size()
    for extent, stride in zip(t.shape, t.stride()):
        if extent > 1 and stride * size < pitch:
            inner += (extent - 1) * stride * size
        elif extent > 1 and stride * size % pitch:
            return pitch + 1
    return inner


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Do two tensors share memory? Columns of one buffer do not, though its rows alternate between them."""
    begin, other = address_of(x), address_of(y)
    if not begin or not other or begin >= other + span_of(y) or other >= begin + span_of(x):
        return False
    pitches = [{stride * t.element_size() for extent, stride in zip(t.shape, t.stride()) if extent > 1} for t in (x, y)]
    for pitch in pitches[0] & pitches[1]:
        between = (other - begin) % pitch if pitch else 0
        if _window(x, pitch) <= between and between + _window(y, pitch) <= pitch:
            return False
    return True


def check_apart(name: str, written: torch.Tensor | None, /, **read: torch.Tensor | None) -> None:
    """Nothing that a call reads lies where it writes: a kernel would read what it has written already."""
    if written is None or written.device.type == "meta":
        return
    for other, t in read.items():
        if t is not None and overlap(written, t):
            raise LayoutError(f"{name}: got memory that {other} lies in, expected memory of its own; give another tensor, or none")


def meeting_any(written: torch.Tensor, *read: torch.Tensor | None) -> Callable[..., bool]:
    """(written, *read) -> do the spans of memory of such tensors of a prepared call meet? Then a closer look is due: check_apart."""
    span, spans = span_of(written), [0 if t is None else span_of(t) for t in read]

    def meets(written: torch.Tensor, *read: torch.Tensor | None) -> bool:
        at = written.data_ptr()
        return any(t is not None and -span < at - t.data_ptr() < reach for t, reach in zip(read, spans))

    return meets


def check_takes_no_gradient(name: str, t: torch.Tensor, *, leave: str = "") -> None:
    """A tensor that is written to past autograd, refused as the operator refuses it. ``leave``: the argument that may be left out.

    Prepared calls do not look: :func:`kernelgen.ops.memo.layout_of` keeps such a tensor from them.
    """
    if t.requires_grad and torch.is_grad_enabled():
        raise no_gradient(name, writes=True, leave=leave)


def index_tensor(name: str, t: torch.Tensor, length: int | None, device: torch.device) -> torch.Tensor:
    """An int32 contiguous vector on ``device``; int64 is converted once."""
    if not isinstance(t, torch.Tensor):
        raise DtypeError(f"{name}: got {type(t).__name__}, expected an int32 tensor")
    if t.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{name}: got {t.dtype}, expected int32 (or int64, converted once)")
    if t.dim() != 1 or (length is not None and t.shape[0] != length):
        raise ShapeError(f"{name}: got shape {shape_text(t)}, expected ({'n' if length is None else length})")
    if t.device != device:
        raise DeviceError(f"{name} is on {t.device}, expected {device}, where the other tensors are; move it with .to()")
    if t.dtype == torch.int64 and t.device.type == "cpu" and t.numel() and not -(2**31) <= int(t.min()) <= int(t.max()) < 2**31:
        raise ShapeError(f"{name}: got values from {int(t.min())} to {int(t.max())}, expected ones that an int32 holds")
    return t.to(torch.int32).contiguous()


def number(name: str, value: object) -> float:
    """A Python float. A tensor is read now, which costs a sync on a GPU: pass plain numbers on hot paths."""
    try:
        if isinstance(value, (str, bytes, bytearray)):  # which float() reads
            raise TypeError("text")
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise SettingsError(f"{name}: got {value!r}, expected a number") from error


def check_no_output_with_grad(**outputs: torch.Tensor | None) -> None:
    """torch's rule for ``out=``: it takes no part in autograd, so it is refused where a gradient is asked for."""
    for name, t in outputs.items():
        if t is not None:
            raise SettingsError(
                f"{name}: got a tensor while an input requires a gradient, or a transform of torch.func is active, expected none; leave "
                f"{name} out, or call under torch.no_grad() and outside of transforms"
            )
