"""The Triton toolchain: a rendered Python file to a cubin, in a process of its own, launched by our launcher like any other.

What a template says beside its kernel: workers/triton_worker.py. Its arguments are spec.params, rendered into it as ``arguments``; pointers
that Triton adds behind them come from what it says of the compiled kernel.
"""

from __future__ import annotations

import shutil
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from kernelgen.cache.keys import Request, ToolchainId
from kernelgen.cache.store import Artifact, BuildOutput
from kernelgen.errors import DeviceError, ToolchainMissing
from kernelgen.launch.triton import TritonKernel, load_triton_kernel
from kernelgen.render import Source
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.toolchains.base import PARAMS_ABI, Toolchain
from kernelgen.toolchains.cubin import resources
from kernelgen.toolchains.python_child import compile_in_child, places

INSTALL = "install it with `pip install 'kernelgen[triton]'`"
_DISTRIBUTIONS = ("triton", "pytorch-triton")
_FUSION = {"--fp-fusion=on": True, "--fp-fusion=off": False}  # of a * b + c
_TIMES = ("seconds", "import_seconds", "compile_seconds")
_LAUNCH = ("entry", "num_warps", "num_ctas", "shared_memory", "hidden_pointers", "global_scratch_bytes", "profile_scratch_bytes",
           "programmatic", "cooperative")


@lru_cache(maxsize=1)
def _identity() -> ToolchainId:
    for name in _DISTRIBUTIONS:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if places("triton"):
            return ToolchainId("triton", f"Triton {version}", PARAMS_ABI)
    raise ToolchainMissing(f"Triton is not installed: no package {' or '.join(_DISTRIBUTIONS)}; {INSTALL}")


class Triton(Toolchain):
    """Its cubins carry no CUDA version in their key: Triton's own ptxas is older than any driver that a supported torch runs with."""

    name = "triton"

    def identity(self) -> ToolchainId:
        return _identity()

    def flags(self, target: Target) -> tuple[str, ...]:
        """Contraction of a * b + c is said by name, as its default differs between compilers."""
        return (f"--gpu-architecture={target.arch}", "--fp-fusion=on")

    def compile(self, source: Source, request: Request, folder: Path) -> BuildOutput:
        capability = Target.parse(request.target).capability
        if capability == 0:
            raise DeviceError(f"{request.name}: got target {request.target}, expected a GPU's: Triton compiles for no CPU here")
        fusion = [_FUSION[flag] for flag in request.flags if flag in _FUSION][-1]
        dumps = folder / "dumps"
        dumps.mkdir()
        found = compile_in_child(
            "triton_worker", {"capability": capability, "fp_fusion": fusion}, folder=folder, source=source,
            what=f"{request.name} for {request.target} (triton)", hidden=("TRITON_", "MLIR_", "LLVM_"),
            environment={"TRITON_CACHE_DIR": str(dumps), "TRITON_DISABLE_LINE_INFO": "1", "TRITON_HOME": str(dumps)})
        shutil.rmtree(dumps)
        cubin = (folder / "kernel.cubin").read_bytes()
        return BuildOutput("kernel.cubin", {**{key: round(found[key], 4) for key in _TIMES}, **{key: found[key] for key in _LAUNCH},
                                            **resources(cubin)})

    def load(self, spec: KernelSpec, artifact: Artifact) -> TritonKernel:
        return load_triton_kernel(spec, artifact)


TOOLCHAIN = Triton()
