"""Launching without the C++ launcher: cuda-core loads the cubin, the driver bindings launch it.

For a machine with a GPU but neither the wheel's launcher nor a host compiler. cuda-core's own ``launch`` takes scalars
and buffers but no struct by value, so the last step uses the bindings that cuda-core itself stands on.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kernelgen.errors import LaunchError

if TYPE_CHECKING:
    from kernelgen.launch.cuda import CudaKernel, TensorMapRecipe

_MAP_BYTES, _POINTER = 128, struct.Struct("<Q")


def _check(result: tuple[Any, ...], what: str) -> Any:
    if int(result[0]) != 0:
        raise LaunchError(f"{what}: {result[0].name}")
    return result[1] if len(result) > 1 else None


def load_with_cuda_core(image: bytes, entry: str) -> Any:
    """A cuda.core Kernel. Raises LaunchError where cuda-core is missing or refuses the cubin."""
    try:
        from cuda.core import ObjectCode
    except ImportError as error:
        raise LaunchError(
            f"no launcher: the C++ one could not be built and cuda-core is missing ({error}); "
            "install g++, or `pip install 'kernelgen[cuda]'`"
        ) from error
    return ObjectCode.from_cubin(image).get_kernel(entry)


def prepare_with_cuda_core(
    kernel: CudaKernel, device: int, grid: tuple[int, int, int], block: tuple[int, int, int], shared_memory: int,
    cluster: tuple[int, int, int], programmatic: bool, tensor_maps: Sequence[TensorMapRecipe], carveout: int | None = None,
    offsets_of_arguments: Sequence[int] = (),
) -> Callable[[bytes], None]:
    """As CudaKernel.prepare, by the driver bindings."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        loaded = load_with_cuda_core(kernel.image, kernel.spec.entries[0])
    function = driver.CUfunction(int(loaded.handle))
    if shared_memory > 48 * 1024:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuKernelSetAttribute(attribute, shared_memory, driver.CUkernel(int(loaded.handle)), device),
               "cuKernelSetAttribute")
    if carveout is not None:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        _check(driver.cuKernelSetAttribute(attribute, carveout, driver.CUkernel(int(loaded.handle)), device), "cuKernelSetAttribute")
    attributes = []
    if cluster != (1, 1, 1):
        item = driver.CUlaunchAttribute()
        item.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        item.value.clusterDim.x, item.value.clusterDim.y, item.value.clusterDim.z = cluster
        attributes.append(item)
    if programmatic:
        item = driver.CUlaunchAttribute()
        item.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        item.value.programmaticStreamSerializationAllowed = 1
        attributes.append(item)
    offsets = dict(kernel.spec.params.offsets)

    def launch(params: bytes, keep_alive: object = loaded) -> None:  # the kernel's library lives as long as this
        packed = bytearray(params)
        for recipe in tensor_maps:
            packed[offsets[recipe.field]:offsets[recipe.field] + _MAP_BYTES] = _encode(driver, recipe, packed, offsets)
        buffer = (ctypes.c_char * len(packed)).from_buffer(packed)
        starts = offsets_of_arguments or (0,)
        arguments = (ctypes.c_void_p * len(starts))(*(ctypes.addressof(buffer) + start for start in starts))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = shared_memory
        config.hStream = driver.CUstream(torch.cuda.current_stream(device).cuda_stream)
        config.attrs, config.numAttrs = attributes, len(attributes)
        with torch.cuda.device(device):
            _check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(arguments), 0), "cuLaunchKernelEx")

    return launch


def _encode(driver: Any, recipe: TensorMapRecipe, packed: bytearray, offsets: dict[str, int]) -> bytes:
    address, = _POINTER.unpack_from(packed, offsets[recipe.pointer])
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    descriptor = _check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType(recipe.data_type), len(recipe.dims), address, [wide(d) for d in recipe.dims],
            [wide(s) for s in recipe.strides], [narrow(b) for b in recipe.box], [narrow(1) for _ in recipe.dims],
            driver.CUtensorMapInterleave(recipe.interleave), driver.CUtensorMapSwizzle(recipe.swizzle),
            driver.CUtensorMapL2promotion(recipe.l2_promotion), driver.CUtensorMapFloatOOBfill(recipe.oob_fill),
        ),
        "cuTensorMapEncodeTiled",
    )
    return ctypes.string_at(descriptor.getPtr(), _MAP_BYTES)
