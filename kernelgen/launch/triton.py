"""Triton kernels: a cubin with separate arguments, and pointers behind them of which its caller knows nothing."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kernelgen.cache.store import Artifact
from kernelgen.errors import LaunchError
from kernelgen.launch.cuda import CudaKernel, load_cuda_kernel
from kernelgen.specs import KernelSpec

_WARP = 32


@dataclass(frozen=True)
class TritonKernel:
    """A loaded kernel. ``hidden``: pointers behind its own arguments; ``scratch``: bytes for each block of the memory that the first of
    them points to, mostly 0."""

    spec: KernelSpec
    binary: CudaKernel
    threads: int
    shared_memory: int
    blocks_per_cluster: int
    programmatic: bool
    hidden: int
    scratch: int

    def prepare(self, device: int, grid: tuple[int, int, int]) -> Callable[[bytes], None]:
        """Freeze a launch on ``device``. Returns ``launch(params)`` with the packed struct of ``spec.params``, as CudaKernel.prepare."""
        if 0 in grid:
            return lambda params: None
        params = self.spec.params
        size = -(-params.size // 8) * 8
        offsets = [offset for _, offset in params.offsets] + [size + 8 * i for i in range(self.hidden)]
        cluster = self.blocks_per_cluster
        launch = self.binary.prepare(
            device, grid=(grid[0] * cluster, *grid[1:]), block=(self.threads, 1, 1), cluster=(cluster, 1, 1),
            shared_memory=self.shared_memory, programmatic=self.programmatic, arguments=tuple(offsets), params_bytes=size + 8 * self.hidden)
        tail = bytes(8 * self.hidden)
        if not self.scratch:
            return lambda packed: launch(packed + tail)
        need, rest = self.scratch * grid[0] * grid[1] * grid[2] * cluster, bytes(8 * (self.hidden - 1))

        def launch_with_scratch(packed: bytes) -> None:
            memory = torch.empty(need, dtype=torch.uint8, device=torch.device("cuda", device))  # freed in the stream's order
            launch(packed + struct.pack("<Q", memory.data_ptr()) + rest)

        return launch_with_scratch


def load_triton_kernel(spec: KernelSpec, artifact: Artifact) -> TritonKernel:
    """Load a cubin and what Triton said of it. Raises LaunchError for what no launch of ours gives."""
    meta = artifact.meta
    if meta["profile_scratch_bytes"] or meta["cooperative"]:
        raise LaunchError(f"{spec}: Triton compiled it with instrumentation or for a cooperative grid, which kernels here are not launched "
                          "with; build it without")
    named = replace(spec, entries=(meta["entry"],))
    return TritonKernel(spec, load_cuda_kernel(named, artifact.read("kernel.cubin")), _WARP * meta["num_warps"], meta["shared_memory"],
                        meta["num_ctas"], meta["programmatic"], meta["hidden_pointers"], meta["global_scratch_bytes"])
