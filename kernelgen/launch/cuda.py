"""CUDA kernels: a cubin entry, launched by the C++ launcher, or through cuda-core where that cannot be built."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from kernelgen.errors import CompileError, KernelgenError, LaunchError, ToolchainMissing
from kernelgen.forks import Lock
from kernelgen.launch.host import launcher
from kernelgen.params import ParamStruct
from kernelgen.specs import KernelSpec

logger = logging.getLogger("kernelgen")

# struct LaunchHeader and struct TensorMapRecipe of templates/host/launcher.cc.
LAUNCH_HEADER = struct.Struct("<Qi3I3I3IIIII")
TENSOR_MAP_RECIPE = struct.Struct("<8I5Q4Q5I5I")
_STATIC_SHARED_MEMORY_LIMIT = 48 * 1024  # above it a kernel must opt in (CUDA C++ Programming Guide)


@dataclass(frozen=True)
class TensorMapRecipe:
    """A TMA descriptor to encode at launch: which pointer of Params, and the arguments of cuTensorMapEncodeTiled.

    ``field`` and ``pointer`` name fields of the kernel's ParamStruct. Enumerations carry the driver API's numbers.
    ``strides`` are in bytes and leave out the innermost dimension.
    """

    field: str
    pointer: str
    data_type: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    interleave: int = 0
    l2_promotion: int = 2
    oob_fill: int = 0

    def pack(self, offsets: dict[str, int]) -> bytes:
        rank = len(self.dims)
        if not (1 <= rank <= 5 and len(self.box) == rank and len(self.strides) == rank - 1):
            raise LaunchError(f"tensor map {self.field}: dims {self.dims}, strides {self.strides}, box {self.box} disagree in rank")
        return TENSOR_MAP_RECIPE.pack(
            offsets[self.field], offsets[self.pointer], self.data_type, rank, self.interleave, self.swizzle,
            self.l2_promotion, self.oob_fill, *(*self.dims, *([0] * (5 - rank))), *(*self.strides, *([0] * (5 - rank))),
            *(*self.box, *([0] * (5 - rank))), *([1] * rank + [0] * (5 - rank)),
        )


_entries: dict[tuple[int, str], int] = {}
_allowed: dict[tuple[int, int], int] = {}  # dynamic shared memory of a kernel on a device
_allowing = Lock()


@dataclass(frozen=True)
class CudaKernel:
    """A loaded CUDA kernel; ``handle`` is a CUkernel, valid on every device of the process."""

    spec: KernelSpec
    handle: int
    image: bytes

    def entry(self, name: str, params: ParamStruct | None = None) -> CudaKernel:
        """Another entry of the same binary, as a kernel of its own; ``params``: its arguments, where they are not the spec's."""
        key = (self.handle, name)
        if self.handle and key not in _entries:  # a prepared call of each shape asks for it, and the driver would load the binary again
            _entries[key] = self.handle if name == self.spec.entries[0] else launcher().cuda_load(self.image, name)
        return CudaKernel(replace(self.spec, entries=(name,), params=params or self.spec.params), _entries.get(key, 0), self.image)

    def prepare(
        self,
        device: int,
        *,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_memory: int = 0,
        cluster: tuple[int, int, int] = (1, 1, 1),
        programmatic: bool = False,
        carveout: int | None = None,
        tensor_maps: Sequence[TensorMapRecipe] = (),
        arguments: Sequence[int] = (),
        params_bytes: int | None = None,
    ) -> Callable[[bytes], None]:
        """Freeze a launch on ``device``. Returns ``launch(params)`` for torch's current stream of that device.

        ``shared_memory``: dynamic, in bytes. ``carveout``: percent of an SM's memory that are shared memory rather than L1 (default: what
        the driver finds enough). Kernels that run beside each other (``programmatic``) need the same. ``arguments``: where each one lies in
        the packed bytes, ``params_bytes`` of them, for a kernel that takes them one by one. An empty grid launches nothing.
        Raises LaunchError.
        """
        if 0 in grid:
            return lambda params: None
        if self.handle == 0:
            from kernelgen.launch.fallback import prepare_with_cuda_core

            return prepare_with_cuda_core(self, device, grid, block, shared_memory, cluster, programmatic, tensor_maps, carveout, arguments)
        module = launcher()
        _allow_shared_memory(self.handle, device, shared_memory)
        if carveout is not None:
            module.cuda_prefer_carveout(self.handle, device, carveout)
        offsets = dict(self.spec.params.offsets)
        config = LAUNCH_HEADER.pack(
            self.handle, device, *grid, *block, *cluster, shared_memory, int(programmatic), len(tensor_maps),
            self.spec.params.size if params_bytes is None else params_bytes,
        ) + b"".join(recipe.pack(offsets) for recipe in tensor_maps) + struct.pack(f"<{len(arguments)}I", *arguments)
        run, stream_of = module.cuda_launch, torch._C._cuda_getCurrentRawStream

        def launch(params: bytes) -> None:
            run(config, params, stream_of(device))

        return launch


def _allow_shared_memory(handle: int, device: int, size: int) -> None:
    """Ask for dynamic shared memory above 48 KiB. Calls of one kernel with less and with more may both be prepared: what was allowed once
    stays allowed.
    """
    with _allowing:
        if size > _allowed.get((handle, device), _STATIC_SHARED_MEMORY_LIMIT):
            launcher().cuda_allow_shared_memory(handle, device, size)
            _allowed[handle, device] = size


@lru_cache(maxsize=1)
def launcher_problem() -> str:
    """Why the C++ launcher cannot be had, or "". A machine with a GPU and no compiler still runs, by cuda-core."""
    try:
        launcher()
    except (ToolchainMissing, CompileError, ImportError, KernelgenError) as error:
        logger.warning("launching through cuda-core, which costs a little more per call: %s", str(error).splitlines()[0])
        return str(error)
    return ""


def load_cuda_kernel(spec: KernelSpec, image: bytes) -> CudaKernel:
    """Load a cubin. Raises LaunchError with the driver's reason."""
    if launcher_problem():
        return CudaKernel(spec, 0, image)
    return CudaKernel(spec, launcher().cuda_load(image, spec.entries[0]), image)
