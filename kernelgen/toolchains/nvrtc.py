"""The NVRTC toolchain: generated CUDA C++ to a cubin, with the library and headers that CUDA builds of torch bring.

No nvcc, no host compiler. Kernel headers travel in memory, so no include path of ours reaches the compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import re
import struct
import time
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from kernelgen.cache.keys import Request, ToolchainId
from kernelgen.cache.store import Artifact, BuildOutput
from kernelgen.errors import ToolchainMissing
from kernelgen.launch.cuda import CudaKernel, load_cuda_kernel
from kernelgen.render import Source
from kernelgen.settings import settings
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.toolchains.base import PARAMS_ABI, Toolchain, compile_error

# -default-device: a helper function without __device__ is still device code. Line info costs nothing at run time and
# lets profilers show the source. The ptxas report goes to the log and from there to meta.json.
_FLAGS = ("--std=c++17", "-default-device", "--generate-line-info", "--ptxas-options=-v")
# Toolkit headers a kernel may include; their text is part of the compiler's identity, as two toolkits may share a version.
_TOOLKIT_HEADERS = ("cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp16.h", "cuda_fp16.hpp", "cuda_fp8.h", "cuda_fp8.hpp")
_INSTALL = "install it with `pip install 'kernelgen[cuda]'`"


def import_bindings() -> None:
    """Import the Python side of NVRTC where torch is a CUDA build, so that the first call need not. Loads no library."""
    import torch

    if torch.version.cuda is not None:
        with contextlib.suppress(ImportError):
            from cuda import pathfinder  # noqa: F401
            from cuda.bindings import nvrtc  # noqa: F401


@lru_cache(maxsize=1)
def _library() -> tuple[Any, str, tuple[int, int]]:
    """(bindings module, path of libnvrtc, version). Raises ToolchainMissing."""
    try:
        from cuda import pathfinder
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ToolchainMissing(f"NVRTC needs cuda-bindings and cuda-pathfinder ({error}); {_INSTALL}") from error
    try:
        loaded = pathfinder.load_nvidia_dynamic_lib("nvrtc")
        status, major, minor = nvrtc.nvrtcVersion()
        # NVRTC opens its builtins by bare name at the first compile, and two threads doing so at once can fail. Where
        # the file is not beside the library the system's search path holds it.
        builtins = Path(loaded.abs_path).with_name(f"libnvrtc-builtins.so.{major}.{minor}")
        if builtins.is_file():
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    except RuntimeError as error:  # pathfinder's not-found errors and bindings' missing-symbol errors
        raise ToolchainMissing(f"libnvrtc was not found: {error}; {_INSTALL}") from error
    if int(status) != 0:
        raise ToolchainMissing(f"nvrtcVersion failed with status {int(status)}; {_INSTALL}")
    return nvrtc, loaded.abs_path, (major, minor)


@cache
def _header_folder(cuda_home: Path | None) -> Path:
    """The folder with cuda_fp16.h. Raises ToolchainMissing."""
    searched = []
    if cuda_home is not None:
        searched.append(cuda_home / "include")
    else:
        from cuda import pathfinder

        found = pathfinder.find_nvidia_header_directory("cudart")
        if found:
            searched.append(Path(found))
        searched.append(Path("/usr/local/cuda/include"))
    for folder in searched:
        if (folder / "cuda_fp16.h").is_file():
            return folder
    raise ToolchainMissing(f"CUDA headers were not found: searched {', '.join(map(str, searched))}; {_INSTALL}, or set CUDA_HOME")


def _build_id(path: str) -> str:
    """The GNU build id of a shared library: its own name for its content, read from the ELF notes."""
    with open(path, "rb") as f:
        header = f.read(64)
        if header[:5] != b"\x7fELF\x02":
            return ""
        offset, = struct.unpack_from("<Q", header, 32)
        size, count = struct.unpack_from("<HH", header, 54)
        for i in range(count):
            f.seek(offset + i * size)
            kind, _, start, _, _, length = struct.unpack("<IIQQQQ", f.read(40))
            if kind != 4:  # PT_NOTE
                continue
            f.seek(start)
            notes = f.read(min(length, 1 << 16))
            at = notes.find(b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0")
            if at >= 0:
                return notes[at + 16:at + 36].hex()
    return ""


@cache
def _identity(path: str, version: tuple[int, int], headers: Path) -> ToolchainId:
    digest = hashlib.sha256()
    for name in _TOOLKIT_HEADERS:
        digest.update((headers / name).read_bytes())
    compiler = f"NVRTC {version[0]}.{version[1]} build {_build_id(path) or 'unknown'} headers {digest.hexdigest()[:16]}"
    return ToolchainId("nvrtc", compiler, PARAMS_ABI, cuda_major=version[0])


def _text(get_size: Any, get: Any, program: Any) -> bytes:
    """What NVRTC writes into memory of ours.

    A bytes object of one byte is shared by the whole process: an empty log's terminator, written into b" ", turned every space that
    Python encoded afterwards into a NUL. Longer objects are our own.
    """
    _, size = get_size(program)
    data = bytes(max(size, 2))
    get(program, data)
    return data[:size]


_ENTRY = re.compile(r"Compiling entry function '(?P<entry>[^']+)'")
_USED = re.compile(r"Used (?P<registers>\d+) registers(?:, used \d+ barriers)?(?:, (?P<stack>\d+) bytes cumulative stack size)?")
_SPILL = re.compile(r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")
_SHARED = re.compile(r"(?P<shared>\d+) bytes smem")


def resources(log: str) -> dict[str, int]:
    """Registers, spills and static shared memory from the ptxas report: of several entries the largest of each."""
    starts = [m.start() for m in _ENTRY.finditer(log)] or [0]
    parts = [log[start:end] for start, end in zip(starts, [*starts[1:], len(log)])]
    report: dict[str, int] = {}
    for pattern, names in (
        (_USED, {"registers": "registers"}), (_SPILL, {"stack": "stack_bytes", "stores": "spill_stores", "loads": "spill_loads"}),
        (_SHARED, {"shared": "static_shared_memory"}),
    ):
        for m in filter(None, map(pattern.search, parts)):
            report |= {key: max(report.get(key, 0), int(m[name])) for name, key in names.items()}
    return report


class Nvrtc(Toolchain):
    name = "nvrtc"

    @property
    def cuda_major(self) -> int | None:  # type: ignore[override]
        """Major version of the CUDA that loads the cubin: torch's, which a prebuilt cubin must fit."""
        import torch

        return int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None

    def identity(self) -> ToolchainId:
        _, path, version = _library()
        return _identity(path, version, _header_folder(settings().cuda_home))

    def flags(self, target: Target) -> tuple[str, ...]:
        return (f"--gpu-architecture={target.arch}", *_FLAGS)

    def compile(self, source: Source, request: Request, folder: Path) -> BuildOutput:
        nvrtc, _, _ = _library()
        headers = _header_folder(settings().cuda_home)
        # cccl: pip's cuda_fp16.h includes <nv/target>, which lies there.
        options = [*request.flags, f"-I{headers}", f"-I{headers / 'cccl'}"]
        names = [name.encode() for name, _ in source.includes]
        texts = [text.encode() for _, text in source.includes]
        text = (source.banner + source.text).encode()
        what = f"{request.name} for {request.target} (nvrtc)"
        start = time.perf_counter()
        status, program = nvrtc.nvrtcCreateProgram(text, source.file_name.encode(), len(names), texts, names)
        if int(status) != 0:
            raise compile_error(what=what, command="nvrtcCreateProgram", output="", source=source, folder=folder, status=str(status))
        try:
            (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
            log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0 \n").decode(errors="replace")
            command = "nvrtc " + " ".join([*options, source.file_name])
            (folder / "build.log").write_text(f"$ {command}\n{log}\nstatus {status.name}\n", encoding="utf-8")
            if int(status) != 0:
                raise compile_error(what=what, command=command, output=log, source=source, folder=folder, status=status.name)
            cubin = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        (folder / "kernel.cubin").write_bytes(cubin)
        return BuildOutput("kernel.cubin", {"seconds": time.perf_counter() - start, **resources(log)})

    def load(self, spec: KernelSpec, artifact: Artifact) -> CudaKernel:
        return load_cuda_kernel(spec, artifact.read("kernel.cubin"))


TOOLCHAIN = Nvrtc()
