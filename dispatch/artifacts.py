"""Which artifact a generated kernel would load, for explain: it matters where nothing can be compiled here."""

from __future__ import annotations

from dataclasses import replace

from kernelgen import build
from kernelgen.dispatch.decision import Decision
from kernelgen.errors import CacheError, ToolchainMissing
from kernelgen.settings import settings
from kernelgen.specs import KernelSpec
from kernelgen.toolchains import toolchain
from kernelgen.toolchains.base import PARAMS_ABI


def with_artifacts(decision: Decision) -> Decision:
    """The decision, saying for every kernel of ours which artifact serves it. Unchanged where a compiler may be called."""
    from kernelgen.aot.specs import specs_of

    found = [_line(spec) for spec in specs_of(decision) if not (settings().jit and _compiles(spec))]
    return replace(decision, artifacts=tuple(found)) if found else decision


def _compiles(spec: KernelSpec) -> bool:
    try:
        toolchain(spec.toolchain).identity()
    except ToolchainMissing:
        return False
    return True


def _line(spec: KernelSpec) -> str:
    request, _ = build.request_of(spec)
    try:
        artifact = build.store().get(request, None, binding_abi=PARAMS_ABI, cuda_major=toolchain(spec.toolchain).cuda_major)
    except CacheError as error:
        return f"{spec.name}: {error}"
    if artifact is None:
        return f"{spec.name}: not prebuilt, and nothing is compiled here"
    return f"{spec.name}: by {artifact.toolchain.compiler}, {artifact.path}"
