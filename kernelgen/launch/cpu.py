"""CPU kernels: a shared library with extern "C" entries, run over tasks by the launcher's thread pool."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kernelgen.errors import LaunchError
from kernelgen.launch.host import launcher, load_error
from kernelgen.specs import KernelSpec

PHASE = struct.Struct("<Qq")  # struct Phase of templates/host/launcher.cc


@dataclass(frozen=True)
class CpuKernel:
    """A loaded CPU kernel. ``entries`` are the addresses of ``spec.entries``, in order."""

    spec: KernelSpec
    library: ctypes.CDLL
    entries: tuple[int, ...]

    def prepare(self, phases: tuple[tuple[int, int], ...], scratch_bytes: int = 0) -> Callable[[bytes], None]:
        """Freeze a launch: ``phases`` are (entry index, number of tasks), run one after another.

        Returns ``launch(params)`` with ``params`` the packed struct of ``spec.params``. Each phase's tasks run on up
        to ``torch.get_num_threads()`` threads; each thread gets ``scratch_bytes`` of 64-byte aligned memory.
        """
        packed = b"".join(PHASE.pack(self.entries[index], tasks) for index, tasks in phases)
        run = launcher().cpu_launch
        size = self.spec.params.size
        threads = torch.get_num_threads

        def launch(params: bytes) -> None:
            if len(params) != size:
                raise LaunchError(f"{self.spec}: got {len(params)} bytes of parameters, expected {size}")
            run(packed, params, threads(), scratch_bytes)

        return launch


def load_cpu_kernel(spec: KernelSpec, path: Path) -> CpuKernel:
    """dlopen a kernel library. Raises LaunchError naming the file and the loader's reason."""
    try:
        library = ctypes.CDLL(str(path))
        entries = tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in spec.entries)
    except (OSError, AttributeError) as error:
        raise load_error(str(spec), path, error) from error
    return CpuKernel(spec, library, entries)
