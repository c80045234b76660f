"""Stand-ins for loaded kernels of CuTe-DSL and Triton: what a family's bind() takes, with tensors on the CPU."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernelgen.errors import LaunchError
from kernelgen.specs import KernelSpec
from kernelgen.testing.ptx_emulator.build import Edit, compiled, library


@dataclass(frozen=True)
class Emulated:
    """lazy    copies land, products run and stores read only when they are waited for
    stalls  warps fall behind at random
    edit    (file name, text) -> text of each source file, for tests that put a fault in
    change  the same of the PTX, text -> text: nothing is compiled again

    A fault that a run meets (a lane that waits for ever, an address outside of shared memory) is a LaunchError; stderr says what it was.
    """

    spec: KernelSpec
    folder: Path
    lazy: bool = False
    seed: int = 1
    stalls: bool = False
    edit: Edit | None = None
    change: Callable[[str], str] | None = None

    def _opened(self) -> tuple[ctypes.CDLL, dict[str, Any]]:
        made = compiled(self.spec, self.folder, self.edit)
        if self.change is not None:
            changed = replace(made, ptx=tuple(map(self.change, made.ptx)))
            if changed == made:
                raise ValueError(f"{self.spec}: the change of a test is none of its PTX")
            made = changed
        opened = ctypes.CDLL(str(library(made, self.folder)))
        opened.ptx_error.restype = ctypes.c_char_p
        return opened, made.report

    def _set(self, opened: ctypes.CDLL) -> None:
        opened.ptx_mode(self.lazy + 2 * self.stalls, ctypes.c_uint(self.seed))

    def _raise(self, opened: ctypes.CDLL) -> None:
        raise LaunchError(f"{self.spec}, emulated: {opened.ptx_error().decode()}")


class _DlTensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64))


class _Any(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint64))


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Addresses between which a tensor's elements lie."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) + 1 if x.numel() else 0
    return x.data_ptr(), x.data_ptr() + last * x.element_size()


_NONE, _INT, _BOOL, _FLOAT, _TENSOR = 0, 1, 2, 3, 7  # TVMFFITypeIndex
_CUDA = 2  # kDLCUDA: what the host code checks for, wherever the memory is
_CODES = {torch.bfloat16: 4, torch.float16: 2, torch.float32: 2, torch.float64: 2, torch.int8: 0, torch.int16: 0, torch.int32: 0,
          torch.int64: 0, torch.uint8: 1, torch.bool: 6, torch.float8_e4m3fn: 10, torch.float8_e5m2: 12}


def _packed(value: Any, keep: list[Any]) -> _Any:
    """A Python argument as TVM-FFI passes it."""
    if isinstance(value, torch.Tensor):
        shape, strides = ((ctypes.c_int64 * max(1, value.dim()))(*x) for x in (value.shape, value.stride()))
        tensor = _DlTensor(value.data_ptr(), _CUDA, 0, value.dim(), _CODES[value.dtype], 8 * value.element_size(), 1, shape, strides, 0)
        keep += [tensor, shape, strides, value]
        return _Any(_TENSOR, 0, ctypes.addressof(tensor))
    if value is None:
        return _Any(_NONE, 0, 0)
    if isinstance(value, bool):
        return _Any(_BOOL, 0, int(value))
    if isinstance(value, int):
        return _Any(_INT, 0, value % 2**64)
    if isinstance(value, float):
        return _Any(_FLOAT, 0, struct.unpack("<Q", struct.pack("<d", value))[0])
    raise TypeError(f"an emulated kernel got an argument of type {type(value).__name__}, expected tensors, numbers or None")


@dataclass(frozen=True)
class EmulatedCute(Emulated):
    """As CuteKernel: ``entry(name)`` gives a function of the arguments that the template gave its entry. The compiled host side runs: it
    checks them, encodes tensor maps and launches, on a driver of the emulator.

    reachable   tensors whose addresses are among the arguments as numbers; without them a call with such numbers is not checked for what
                it reaches
    """

    reachable: tuple[torch.Tensor, ...] = ()

    def entry(self, name: str) -> Callable[..., None]:
        opened, _ = self._opened()
        function = getattr(opened, f"__tvm_ffi_{name}")

        def call(*arguments: Any) -> None:
            keep: list[Any] = []
            given, result = (_Any * max(1, len(arguments)))(*(_packed(x, keep) for x in arguments)), _Any()
            spans = [edge for x in (*arguments, *self.reachable) if isinstance(x, torch.Tensor) for edge in _span(x)]
            if not self.reachable and any(isinstance(x, int) and x >= 2**32 for x in arguments):  # addresses of who knows how much
                spans = []
            opened.ptx_tensors((ctypes.c_uint64 * max(1, len(spans)))(*spans), len(spans) // 2)
            self._set(opened)
            if function(None, ctypes.byref(given), len(arguments), ctypes.byref(result)) != 0:
                self._raise(opened)

        return call


@dataclass(frozen=True)
class EmulatedTriton(Emulated):
    """As TritonKernel: ``prepare(device, grid)`` gives launch(packed parameters)."""

    def prepare(self, device: int, grid: tuple[int, int, int]) -> Callable[[bytes], None]:
        if 0 in grid:
            return lambda packed: None
        opened, report = self._opened()
        layout, clusters = self.spec.params, report["num_ctas"]
        size = -(-layout.size // 8) * 8
        offsets = [offset for _, offset in layout.offsets] + [size + 8 * i for i in range(report["hidden_pointers"])]
        given = (ctypes.c_uint32 * len(offsets))(*offsets)
        sizes = [(ctypes.c_uint * 3)(*x) for x in ((grid[0] * clusters, *grid[1:]), (32 * report["num_warps"], 1, 1), (clusters, 1, 1))]

        def launch(packed: bytes) -> None:
            scratch = torch.empty(max(1, report["global_scratch_bytes"] * grid[0] * grid[1] * grid[2] * clusters), dtype=torch.uint8)
            hidden = struct.pack("<Q", scratch.data_ptr()) + bytes(8 * max(0, report["hidden_pointers"] - 1))
            self._set(opened)
            params = packed.ljust(size, b"\0") + hidden
            if opened.ptx_launch(report["entry"].encode(), *sizes, report["shared_memory"], params, given, len(offsets)):
                self._raise(opened)

        return launch
