"""CuTe-DSL kernels: a library with TVM-FFI entries, each of which encodes its tensor maps and launches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernelgen.cache.store import Artifact
from kernelgen.errors import LaunchError
from kernelgen.launch.host import load_error
from kernelgen.specs import KernelSpec

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextmanager
def _relaxed_capture() -> Iterator[None]:
    """A first call loads the kernel onto the device, which is legal while a stream is captured in this mode only."""
    try:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except OSError:  # no driver: the call will say so
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


class Entry:
    """One function of a kernel's library; the first call may be within a CUDA graph's capture."""

    __slots__ = ("_called", "_function")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._called = function, False

    def __call__(self, *arguments: Any) -> None:
        if self._called:
            self._function(*arguments)
            return
        with _relaxed_capture():
            self._function(*arguments)
        self._called = True


@dataclass(frozen=True)
class CuteKernel:
    """A loaded kernel. ``functions``: of ``spec.entries``, in order; each takes the arguments that the template gave its entry."""

    spec: KernelSpec
    functions: tuple[Entry, ...]

    def entry(self, name: str) -> Entry:
        """The function of that name. Raises ValueError for one that the spec does not list."""
        return self.functions[self.spec.entries.index(name)]


@cache
def _open_runtime(major: int | None) -> ctypes.CDLL:
    """libcute_dsl_runtime for a CUDA version; every kernel of the process stands on it. Raises LaunchError."""
    from kernelgen.toolchains.cutedsl import runtime_libraries, runtime_problem

    problem = runtime_problem(major)
    if major is None or problem:
        raise LaunchError(problem)
    path = runtime_libraries()[major]
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise LaunchError(f"{path} cannot be loaded: {error}") from error


def load_cute_kernel(spec: KernelSpec, artifact: Artifact) -> CuteKernel:
    """Open a built kernel. Raises LaunchError naming the file and the reason."""
    import tvm_ffi

    _open_runtime(artifact.toolchain.cuda_major)
    path = artifact.binary
    try:
        if path.suffix == ".o":
            module: Any = _link_in_memory(path)
            return CuteKernel(spec, tuple(Entry(getattr(module, name)) for name in spec.entries))
        module = tvm_ffi.load_module(str(path))
        return CuteKernel(spec, tuple(Entry(module[name]) for name in spec.entries))
    except (OSError, RuntimeError, AttributeError) as error:
        raise load_error(str(spec), path, error) from error


def _link_in_memory(path: Path) -> Any:
    """Where nothing could link the object when it was built: the DSL does, and has to be imported for it."""
    import sys

    from kernelgen.toolchains.cutedsl import INSTALL, roots

    packages = next((str(root / "dsl_packages") for root in roots() if (root / "dsl_packages").is_dir()), None)
    if packages is None:
        raise LaunchError(f"{path} was built where there was no linker, and only CuTe-DSL itself can load it; {INSTALL}, or build the "
                          "kernel where ld or a C++ compiler is in PATH")
    if packages not in sys.path:
        sys.path.append(packages)
    from cutlass.cute.runtime import load_module

    return load_module(str(path), enable_tvm_ffi=True)
