"""The CuTe-DSL toolchain: a rendered Python file, traced and compiled in a process of its own, to a shared library with TVM-FFI entries.

A template defines ``entries()``: name -> (function, arguments) as cute.compile takes them, with fake tensors. It may import the library in
templates/cute/ as ``kernelgen_cute``. To run a kernel that is built, only libtvm_ffi and libcute_dsl_runtime are needed.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shlex
import shutil
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from kernelgen.cache.keys import Request, ToolchainId
from kernelgen.cache.store import Artifact, BuildOutput
from kernelgen.errors import ToolchainMissing
from kernelgen.launch.cute import CuteKernel, load_cute_kernel
from kernelgen.render import Source
from kernelgen.settings import settings
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.toolchains import process
from kernelgen.toolchains.base import PARAMS_ABI, Toolchain, compile_error
from kernelgen.toolchains.cubin import resources
from kernelgen.toolchains.python_child import compile_in_child, places

INSTALL = "install it with `pip install 'kernelgen[cutedsl]'`"
_PACKAGE = "nvidia_cutlass_dsl"
# Of the host side of a kernel, by machine: the level and its features. The DSL would take the processor that compiles.
_HOST_LEVELS = {"x86_64": ("x86-64-v2", ("+cx16", "+popcnt", "+sahf", "+sse3", "+sse4.1", "+sse4.2", "+ssse3"))}
# Variables of the DSL: dumps, caches, architectures.
_HIDDEN = ("CUTE_DSL_", "CUTLASS_")


def roots() -> list[Path]:
    """Folders of the DSL's packages. Nothing is imported: a GPU host may have the run-time library alone."""
    return places(_PACKAGE)


def flavours(pattern: str) -> dict[int, Path]:
    """CUDA major version -> file, of what ``pattern`` (with one "{}" for the version) finds below the packages."""
    found: dict[int, Path] = {}
    for root in roots():
        for path in root.glob(pattern.format("*")):
            version = re.search(r"cu(\d+)", str(path.relative_to(root)))
            if version:
                found.setdefault(int(version.group(1)), path)
    return found


def runtime_libraries() -> dict[int, Path]:
    """CUDA major version -> libcute_dsl_runtime, of those that are installed."""
    return flavours("cu{}/lib/libcute_dsl_runtime.so")


def runtime_problem(major: int | None) -> str:
    """Why no kernel of that CUDA version can be loaded, or ""."""
    found = runtime_libraries()
    if major in found:
        return ""
    have = ", ".join(f"CUDA {version}" for version in sorted(found)) or "none"
    return (f"a CuTe-DSL kernel needs the run-time library for CUDA {major} (libcute_dsl_runtime.so); installed: {have}; "
            f"`pip install nvidia-cutlass-dsl-libs-cu{major}` brings it")


@lru_cache(maxsize=1)
def _driver_major() -> int | None:
    """What the driver supports, or None without one. Asks no device."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int(0)
        if library.cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value // 1000
    except (OSError, AttributeError):
        pass
    return None


def _newest(major: int | None, found: dict[int, Path]) -> int:
    """As the DSL chooses: the newest that the driver supports. Raises ToolchainMissing."""
    fitting = [version for version in found if major is None or version <= major]
    if not fitting:
        have = ", ".join(f"CUDA {version}" for version in sorted(found))
        raise ToolchainMissing(f"CuTe-DSL's run-time library is for {have}, the driver supports CUDA {major}; install the one for CUDA "
                               f"{major}: `pip install nvidia-cutlass-dsl-libs-cu{major}`")
    return max(fitting)


@lru_cache(maxsize=1)
def _identity() -> ToolchainId:
    """Raises ToolchainMissing, which is not remembered."""
    try:
        version = metadata.version("nvidia-cutlass-dsl-libs-base")
    except metadata.PackageNotFoundError as error:
        raise ToolchainMissing(f"CuTe-DSL is not installed: no package nvidia-cutlass-dsl-libs-base; {INSTALL}") from error
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    compilers = flavours("dsl_packages/cutlass/_mlir/_mlir_libs/_cutlass_ir.cu{}." + f"cpython-{python.replace('.', '')}-*.so")
    libraries = runtime_libraries()
    both = {major: path for major, path in compilers.items() if major in libraries}
    if not both:
        has = ", ".join(f"CUDA {m}" for m in sorted(libraries)) or "none"
        raise ToolchainMissing(f"CuTe-DSL {version} has no compiler for Python {python} with a run-time library beside it (run-time "
                               f"libraries: {has}); {INSTALL}")
    return ToolchainId("cutedsl", f"CuTe-DSL {version}", PARAMS_ABI, cuda_major=_newest(_driver_major(), both))


class CuteDsl(Toolchain):
    name = "cutedsl"

    @property
    def cuda_major(self) -> int | None:  # type: ignore[override]
        """Of the CUDA that loads a prebuilt kernel: torch's."""
        import torch

        return int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None

    def identity(self) -> ToolchainId:
        return _identity()

    def flags(self, target: Target) -> tuple[str, ...]:
        level, _ = _HOST_LEVELS.get(platform.machine(), ("native", ()))
        return (f"--gpu-architecture={target.arch}", f"--host-level={level}", "--enable-tvm-ffi")

    def compile(self, source: Source, request: Request, folder: Path) -> BuildOutput:
        what = f"{request.name} for {request.target} (cutedsl)"
        level, features = _HOST_LEVELS.get(platform.machine(), ("", ()))
        own = ("--gpu-architecture=", "--host-level=")  # what the DSL calls otherwise, or does not have
        options = [*(flag for flag in request.flags if not flag.startswith(own)), "--gpu-arch", request.target]
        dumps = folder / "dumps"
        dumps.mkdir()
        packages = next(str(root / "dsl_packages") for root in roots() if (root / "dsl_packages").is_dir())
        found = compile_in_child(
            "cutedsl_worker", {"arch": request.target, "options": shlex.join([*options, "--keep-cubin", "--dump-dir", "dumps"]),
                               "host_cpu": level, "host_features": features},
            folder=folder, source=source, what=what, path=(packages,), hidden=_HIDDEN,
            environment={"CUTE_DSL_DISABLE_FILE_CACHING": "1", "CUTE_DSL_CACHE_DIR": str(dumps)})
        shutil.rmtree(dumps)
        if found["flavour"] != self.identity().cuda_major:
            raise ToolchainMissing(f"{what}: CuTe-DSL took its compiler for CUDA {found['flavour']}, expected that for CUDA "
                                   f"{self.identity().cuda_major}: a driver was installed or removed meanwhile; start the process again")
        report: dict[str, int] = {}
        for name in found["entries"]:
            cubin = folder / f"{name}.cubin"
            for key, value in resources(cubin.read_bytes()).items():
                report[key] = max(report.get(key, 0), value)
            cubin.unlink()
        binary = link([f"{name}.o" for name in found["entries"]], folder, source, what)
        times = {key: round(found[key], 4) for key in ("seconds", "import_seconds", "compile_seconds", "export_seconds")}
        return BuildOutput(binary, {**times, "entries": found["entries"], **report})

    def load(self, spec: KernelSpec, artifact: Artifact) -> CuteKernel:
        return load_cute_kernel(spec, artifact)

    def unloadable(self) -> str:
        return runtime_problem(self.cuda_major)


def link(objects: list[str], folder: Path, source: Source, what: str) -> str:
    """One library of the objects; where there is no linker, the only object stays as it is and the DSL links it in memory at each load."""
    linker = _linker()
    if linker is None:
        if len(objects) == 1:
            return objects[0]
        raise ToolchainMissing(f"{what}: several entries need a linker: none of ld, c++, g++, clang++ is in PATH")
    command = [*linker, "-shared", "-o", "kernel.so", *objects]
    code, output = process.run(command, folder, {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"})
    if code != 0 or not (folder / "kernel.so").is_file():
        raise compile_error(what=what, command=command, output=output, source=source, folder=folder, status=f"exit status {code}")
    for name in objects:
        (folder / name).unlink()
    return "kernel.so"


def _linker() -> tuple[str, ...] | None:
    if shutil.which("ld"):
        return ("ld",)
    names = (settings().cxx, "c++", "g++", "clang++")
    return next((tuple(shlex.split(name)) for name in names if name and shutil.which(shlex.split(name)[0])), None)


TOOLCHAIN = CuteDsl()
