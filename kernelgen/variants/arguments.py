"""The argument block of a variant: its extra tensors and scalars as 8-byte words on the device of the call.

    for each extra tensor that is read, in order of name: address, then for each dimension its size and its stride in elements
    then each scalar, in order of name: an integer (bool: 0 or 1), or the bits of a double
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from kernelgen.errors import DeviceError, DtypeError, ShapeError, VariantError
from kernelgen.forks import Lock
from kernelgen.lasting import capturing, lasting
from kernelgen.variants.expression import INT32
from kernelgen.variants.trace import extra_tensor
from kernelgen.variants.traced import TORCH_DTYPES, ExtraScalar, ExtraTensor, TracedVariant, scalar_kind

if TYPE_CHECKING:
    from kernelgen.variants.epilogue import TracedEpilogue

_KEPT_BLOCKS = 256

_blocks: OrderedDict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = OrderedDict()
_captured: dict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = {}
_spare: dict[torch.device, torch.Tensor] = {}
_lock = Lock()


def argument_words(variant: Any, traced: TracedVariant | TracedEpilogue) -> list[int]:
    """The words for the extra values of ``variant``, which must be of the kinds that ``traced`` was compiled for.

    Raises VariantError, DtypeError or ShapeError. The tensors must outlive every kernel that gets the words.
    """
    words: list[int] = []
    for spec in traced.tensors:
        words += _tensor_words(spec, variant.tensors.get(spec.name))
    for scalar in traced.scalars:
        words.append(_scalar_word(scalar, variant.scalars.get(scalar.name)))
    return words


def bind_words(variant: Any, traced: TracedVariant | TracedEpilogue, device: torch.device | str) -> torch.Tensor:
    """:func:`argument_words` as an int64 tensor on ``device``; the same words give the same tensor, and nothing is copied.

    Blocks are kept for the last 256 different sets of words, and those that a CUDA graph was captured with for ever. A set that is
    first seen in a capture, as that of tensors which torch.compile copies before it captures, is written by the graph itself. Raises
    also DeviceError.
    """
    words = tuple(argument_words(variant, traced))
    device = _indexed(torch.device(device))
    for spec in traced.tensors:
        tensor = variant.tensors[spec.name]
        if tensor.device != device:
            raise DeviceError(f"variant: extra tensor {spec.name!r} is on {tensor.device}, expected {device} as the call's tensors")
    key = (device, words)
    captured = device.type == "cuda" and capturing(device)
    with _lock:
        found = _blocks.get(key)
        if captured:
            if found is None:
                return _written(words, device)
            _captured[key] = found
        elif found is None:
            found = _blocks[key] = lasting(torch.tensor(words, dtype=torch.int64, device="cpu"), device, "a variant's arguments")
            while len(_blocks) > _KEPT_BLOCKS:
                _blocks.popitem(last=False)
        else:
            _blocks.move_to_end(key)
    return found


def _written(words: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """By kernels, a word each: a copy from the host could not be captured."""
    block = torch.empty(len(words), dtype=torch.int64, device=device)
    for place, word in zip(block, words):
        place.fill_(word)
    return block


def _indexed(device: torch.device) -> torch.device:
    """"cuda" as the tensors of the current device name it."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _tensor_words(spec: ExtraTensor, tensor: Any) -> list[int]:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype is not TORCH_DTYPES[spec.dtype] or tensor.dim() != spec.rank:
        raise _mismatch(spec, tensor)
    if tensor.numel() == 0:
        # There is no element to read. Every index leads to one zero instead, so that a masked key's dropped read is harmless.
        return [_spare_zero(tensor.device).data_ptr(), *([1, 0] * spec.rank)]
    words = [tensor.data_ptr()]
    for size, stride in zip(tensor.shape, tensor.stride()):
        words += [size, stride]
    return words


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor for a kernel that takes it whole: one without elements is a zero, as in the argument block."""
    if tensor.numel():
        return tensor
    return _spare_zero(tensor.device).view(tensor.dtype)[:1].view((1,) * tensor.dim())


def _mismatch(spec: ExtraTensor, tensor: Any) -> Exception:
    if tensor is None:
        return VariantError(f"variant: extra tensor {spec.name!r} is missing")
    given = extra_tensor(spec.name, tensor)
    if given.dtype != spec.dtype:
        return DtypeError(f"variant: extra tensor {spec.name!r} has dtype {given.dtype}, expected {spec.dtype}, as when it was traced")
    return ShapeError(f"variant: extra tensor {spec.name!r} has shape {tuple(tensor.shape)}, expected {spec.rank} dimensions, "
                      "as when it was traced")


def _spare_zero(device: torch.device) -> torch.Tensor:
    if device not in _spare:
        _spare[device] = lasting(torch.zeros(8, dtype=torch.uint8, device="cpu"), device, "a variant's empty tensor")
    return _spare[device]


def _scalar_word(spec: ExtraScalar, x: Any) -> int:
    if x is None:
        raise VariantError(f"variant: scalar {spec.name!r} is missing")
    kind = scalar_kind(spec.name, x)
    if spec.kind == "float" and kind != "bool":
        return struct.unpack("q", struct.pack("d", float(x)))[0]
    fits = kind == spec.kind or (spec.kind == "int64" and kind == "int32")
    if not fits:
        legal = f"an integer in {INT32[0]} .. {INT32[1]}" if spec.kind == "int32" else f"a value of kind {spec.kind}"
        raise VariantError(f"variant: scalar {spec.name!r} is {x!r}, expected {legal} as when the variant was traced")
    return int(x)
