"""The C++ toolchain: generated C++17 to a shared library with plain extern "C" entries."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from functools import cache
from pathlib import Path

from kernelgen.cache.keys import Request, ToolchainId
from kernelgen.cache.store import Artifact, BuildOutput
from kernelgen.errors import ToolchainMissing
from kernelgen.launch.cpu import CpuKernel, load_cpu_kernel
from kernelgen.render import Source
from kernelgen.settings import settings
from kernelgen.specs import KernelSpec
from kernelgen.targets import CPU_ISA_LEVELS, Target
from kernelgen.toolchains import process
from kernelgen.toolchains.base import PARAMS_ABI, Toolchain, compile_error

_CANDIDATES = ("c++", "g++", "clang++")
# -ffp-contract=fast lets the compiler fuse multiply-add, as every BLAS does; inf and NaN keep their IEEE meaning.
# -fno-math-errno: kernels never read errno, and sqrt becomes one instruction.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno",
          "-fno-exceptions", "-fno-rtti", "-Wall", "-Wno-psabi", "-Wno-unknown-pragmas")


@cache
def _compiler(cxx: str | None) -> tuple[tuple[str, ...], str]:
    """(command words, what the compiler says of itself). CXX may carry arguments ("ccache g++").

    One run of ``-v`` tells whether it works, its version and its target: each run of a compiler driver costs
    milliseconds of the first call. The name it was called by and its paths are left out, so that the same compiler
    under two names is one.
    """
    searched = []
    for candidate in [cxx] if cxx else _CANDIDATES:
        words = shlex.split(candidate)
        searched.append(f"CXX={candidate}" if cxx else candidate)
        if not words or shutil.which(words[0]) is None:
            continue
        try:
            probe = subprocess.run([*words, "-v"], capture_output=True, text=True, errors="replace", check=False,
                                   env=_compiler_environment())
        except OSError:  # there, and no program: a script without its first line, another machine's binary
            continue
        lines = (probe.stdout + probe.stderr).splitlines()
        version = next((line.strip() for line in lines if re.match(r"(gcc|.*clang) version ", line)), "")
        machine = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("Target:")), "")
        if probe.returncode == 0 and version:
            return tuple(words), f"{version} {machine}"
    raise ToolchainMissing(
        f"no C++17 compiler works: searched {', '.join(searched)} on PATH={os.environ.get('PATH', '')!r}; "
        "install g++ or clang++, or set CXX to its command"
    )


class Cxx(Toolchain):
    name = "cxx"

    def command(self) -> tuple[str, ...]:
        """Compiler command words. Raises ToolchainMissing."""
        return _compiler(settings().cxx)[0]

    def identity(self) -> ToolchainId:
        return ToolchainId("cxx", _compiler(settings().cxx)[1], PARAMS_ABI)

    def flags(self, target: Target) -> tuple[str, ...]:
        return _FLAGS + CPU_ISA_LEVELS[target.isa][0]

    def compile(self, source: Source, request: Request, folder: Path) -> BuildOutput:
        for name, text in source.includes:
            path = folder / "include" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        # Relative names and no shell: the folder's own path may hold spaces, '$' or '#'.
        command = [*self.command(), *request.flags, "-Iinclude", source.file_name, "-o", "kernel.so"]
        what = f"{request.name} for {request.target} (cxx)"
        seconds = run_compiler(command, folder, source, what)
        return BuildOutput("kernel.so", {"seconds": seconds})

    def load(self, spec: KernelSpec, artifact: Artifact) -> CpuKernel:
        return load_cpu_kernel(spec, artifact.file("kernel.so"))


def run_compiler(command: list[str], folder: Path, source: Source, what: str) -> float:
    """Run a compiler in ``folder``, write build.log, check status and product (the last argument). Returns seconds."""
    start = time.perf_counter()
    try:
        code, output = process.run(command, folder, _compiler_environment())
    except OSError as error:
        if not folder.is_dir():  # the cache was removed; its error is clearer
            raise
        raise ToolchainMissing(f"{what}: the compiler {command[0]!r} cannot be started ({error.strerror or error}); "
                               "install g++ or clang++, or set CXX to its command") from error
    seconds = time.perf_counter() - start
    (folder / "build.log").write_text(f"$ {shlex.join(command)}\n{output}\nexit status {code}\n", encoding="utf-8")
    product = folder / command[-1]
    if code == 0 and product.is_file() and product.stat().st_size > 0:
        return seconds
    status, hint = f"exit status {code}", ""
    if code in (-9, 137) or "Killed signal" in output:
        status = "killed (signal 9)"
        hint = "the system most likely ran out of memory; set KERNELGEN_MAX_JOBS=1 to compile one kernel at a time"
    elif code < 0:
        status = f"killed by signal {-code}"
    elif code == 0:
        status = f"exit status 0, but no {command[-1]} was written"
        hint = "the command is not a working compiler"
    elif "No space left on device" in output:
        hint = "the disk is full; free space, or set KERNELGEN_CACHE_DIR (the product) or TMPDIR (the compiler's own files) to another disk"
    raise compile_error(what=what, command=command, output=output, source=source, folder=folder, status=status, hint=hint)


def _compiler_environment() -> dict[str, str]:
    """The caller's environment with messages in English and without variables that change code generation unseen."""
    hidden = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "GCC_EXEC_PREFIX", "COMPILER_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return environment | {"LC_ALL": "C"}


TOOLCHAIN = Cxx()
