"""The launcher library: shipped in the wheel, else built once with the C++ compiler and cached like any artifact."""

from __future__ import annotations

import contextlib
import os
import threading
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelgen.errors import ArtifactMissingError, KernelgenError, LaunchError
from kernelgen.forks import Lock
from kernelgen.render import Source, include_closure, template_text

if TYPE_CHECKING:
    from kernelgen.cache.keys import Request

LAUNCHER_TEMPLATE = "host/launcher.cc"
# -O2 and no LTO: the launcher is a few hundred lines, and its build time is part of the first call from a checkout.
LAUNCHER_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
SHIPPED = "_lib/launcher.so"


def launcher_source() -> Source:
    text = template_text(LAUNCHER_TEMPLATE)
    lines = tuple((LAUNCHER_TEMPLATE, n + 1) for n in range(text.count("\n") + 1))
    return Source(text, "", include_closure(text), lines, "launcher.cc")


def launcher_request(source: Source) -> Request:
    from kernelgen.cache.keys import Request

    return Request("launcher", source.text, source.includes, LAUNCHER_FLAGS, "host-x86-64")


def shipped_launcher() -> Path | None:
    """The library of the wheel, or None in a checkout."""
    resource = files("kernelgen").joinpath(*SHIPPED.split("/"))
    with as_file(resource) as path:
        return path if path.is_file() else None


def _built_launcher() -> Path:
    """Build with g++ through the cache. Raises ToolchainMissing, CompileError, ArtifactMissingError."""
    from tvm_ffi import libinfo

    from kernelgen.build import fetch
    from kernelgen.cache.keys import ToolchainId
    from kernelgen.cache.store import BuildOutput
    from kernelgen.toolchains import toolchain
    from kernelgen.toolchains.base import PARAMS_ABI
    from kernelgen.toolchains.cxx import Cxx, run_compiler

    cxx = toolchain("cxx")
    assert isinstance(cxx, Cxx)
    source = launcher_source()
    request = launcher_request(source)

    def identity() -> ToolchainId:
        import tvm_ffi

        own = cxx.identity()
        # The TVM-FFI headers are compiled in: their release is part of what the compiler sees.
        return ToolchainId("cxx", own.compiler, PARAMS_ABI, cxx_abi=f"tvm-ffi {tvm_ffi.__version__}")

    def build(folder: Path) -> BuildOutput:
        for name, text in source.includes:
            path = folder / "include" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        # The symbols of libtvm_ffi are resolved against the copy that the tvm_ffi module has loaded already.
        command = [*cxx.command(), *LAUNCHER_FLAGS, "-Iinclude", "-I", libinfo.find_include_path(), source.file_name,
                   "-ldl", "-o", "launcher.so"]
        return BuildOutput("launcher.so", {"seconds": run_compiler(command, folder, source, "launcher")})

    try:
        artifact, _ = fetch(request, identity, build, source)
    except ArtifactMissingError as error:
        raise error.with_command("kernelgen prebuild --spec 'silu_and_mul --x 1,64' --target cpu   # any prebuild builds it too") from None
    return artifact.file("launcher.so")


def load_error(what: str, path: Path, error: Exception) -> LaunchError:
    """Why a library of the cache cannot be loaded, and what helps: a damaged file and a forbidden one look alike to dlopen."""
    try:
        forbidden = bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    except OSError:
        forbidden = False
    if forbidden or "failed to map segment" in str(error):
        return LaunchError(f"{what}: cannot load {path}: {error}; its file system does not allow programs to run from it (mounted "
                           "noexec); set KERNELGEN_CACHE_DIR to a folder on one that does")
    return LaunchError(f"{what}: cannot load {path}: {error}; `kernelgen cache verify` checks the cache")


_module: Any = None
_loading = Lock()


def launcher() -> Any:
    """The loaded launcher module: cuda_load, cuda_allow_shared_memory, cuda_launch, cpu_launch, and plan.py's functions.

    Raises ToolchainMissing or CompileError where it has to be built and cannot be; the next call tries again.
    """
    global _module
    if _module is None:
        with _loading:
            if _module is None:
                import tvm_ffi

                tvm_ffi.register_error("LaunchError", LaunchError)
                path = shipped_launcher() or _built_launcher()
                try:
                    _module = tvm_ffi.load_module(str(path))
                except (OSError, RuntimeError) as error:
                    raise load_error("the launcher", path, error) from error
    return _module


def loaded() -> Any:
    """The launcher module where something has loaded it, else None."""
    return _module


def start_launcher() -> None:
    """Get the launcher in the background, so that its one-time build runs beside the first kernel's compile.

    A failure is kept quiet here: the caller of :func:`launcher` meets it.
    """
    if _module is not None:
        return

    def attempt() -> None:
        with contextlib.suppress(KernelgenError):
            launcher()

    threading.Thread(target=attempt, name="kernelgen-launcher", daemon=True).start()
