"""Spec to loaded kernel: render, ask the cache, compile on a miss, load. Everything that compiles goes through here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelgen.cache.keys import Request, ToolchainId
from kernelgen.cache.store import Artifact, BuildOutput, Store
from kernelgen.errors import ArtifactMissingError, CacheError, ToolchainMissing
from kernelgen.forks import Lock
from kernelgen.kernels.base import LoadedKernel
from kernelgen.launch.host import start_launcher
from kernelgen.render import Source, render
from kernelgen.settings import settings
from kernelgen.specs import KernelSpec
from kernelgen.toolchains import toolchain
from kernelgen.toolchains.base import PARAMS_ABI

_NEAR_MISSES = 3  # that an error lists


@dataclass(frozen=True)
class BuildReport:
    """Where the time of one kernel went, in seconds; ``compiled`` is False when the cache served it. ``compiler``: whose it is."""

    spec: str
    compiled: bool
    render: float
    compile: float
    load: float
    artifact: str
    compiler: str = ""


_store: Store | None = None
_kernels: dict[KernelSpec, LoadedKernel] = {}
_reports: dict[KernelSpec, BuildReport] = {}
_locks: dict[KernelSpec, Lock] = {}
_guard = Lock()


def store() -> Store:
    """The process's artifact store, by the settings of its first use."""
    global _store
    if _store is None:
        _store = Store(settings().cache_dir, settings().cache_layers, packaged=_packaged)
    return _store


def _packaged() -> Sequence[Path]:
    from kernelgen.cache.packaged import packaged_bundles  # importlib.metadata: only a miss pays for it

    return packaged_bundles()


def forget() -> None:
    """Drop loaded kernels and the store (tests that change the cache folder call this). Files stay."""
    global _store
    with _guard:
        _store = None
        _kernels.clear()
        _reports.clear()


def request_of(spec: KernelSpec) -> tuple[Request, Source]:
    """The content-only request of a spec, and its rendered source."""
    source = render(spec)
    flags = toolchain(spec.toolchain).flags(spec.target) + spec.flags
    return Request(spec.name, source.text, source.includes, flags, spec.target.arch), source


def fetch(
    request: Request, identity: Callable[[], ToolchainId], build: Callable[[Path], BuildOutput], source: Source,
    cuda_major: int | None = None,
) -> tuple[Artifact, bool]:
    """An artifact of ``request``: the compiler's own entry, else any that fits when there is no compiler, else built.

    Returns (artifact, built by this call). Raises ArtifactMissingError under KERNELGEN_JIT=0, ToolchainMissing
    without a compiler, CompileError.
    """
    missing: ToolchainMissing | None = None
    if settings().jit:
        try:
            own = identity()
        except ToolchainMissing as error:
            missing = error
        else:
            return store().get_or_build(request, own, build, banner=source.banner, source_name=source.file_name)
    found = store().get(request, None, binding_abi=PARAMS_ABI, cuda_major=cuda_major)
    if found is not None:
        return found, False
    if missing is not None:
        raise missing
    raise _missing(request, cuda_major)


def _missing(request: Request, cuda_major: int | None) -> ArtifactMissingError:
    try:
        places = ", ".join(map(str, store().search_path)) or "nothing: there is no cache, layer or installed bundle"
        near = store().near_misses(request, binding_abi=PARAMS_ABI, cuda_major=cuda_major)
    except CacheError as error:
        places, near = str(error), []
    shown = [f"  does not fit: {line}" for line in near[:_NEAR_MISSES]]
    more = [f"  ... and {len(near) - _NEAR_MISSES} more"] if len(near) > _NEAR_MISSES else []
    return ArtifactMissingError("\n".join([
        f"no prebuilt artifact of {request.name} for {request.target} fits, and compiling is off (KERNELGEN_JIT=0)",
        f"  searched: {places}", *shown, *more]), spec=request.name, target=request.target)


def kernel(spec: KernelSpec) -> LoadedKernel:
    """The loaded kernel of a spec; built at most once per process and once per cache. Thread-safe."""
    loaded = _kernels.get(spec)
    if loaded is not None:
        return loaded
    with _guard:
        lock = _locks.setdefault(spec, Lock())
    with lock:
        loaded = _kernels.get(spec)
        if loaded is None:
            loaded = _kernels[spec] = _load(spec)
    return loaded


def build(spec: KernelSpec) -> tuple[Artifact, bool]:
    """Make sure the artifact exists, without loading it (prebuild, compile checks). Works without the device."""
    return _artifact(spec, *request_of(spec))


def _artifact(spec: KernelSpec, request: Request, source: Source) -> tuple[Artifact, bool]:
    tool = toolchain(spec.toolchain)
    return fetch(request, tool.identity, lambda folder: tool.compile(source, request, folder), source, tool.cuda_major)


def _load(spec: KernelSpec) -> LoadedKernel:
    start_launcher()
    start = time.perf_counter()
    request, source = request_of(spec)
    rendered = time.perf_counter()
    artifact, built = _artifact(spec, request, source)
    compiled = time.perf_counter()
    loaded = toolchain(spec.toolchain).load(spec, artifact)
    done = time.perf_counter()
    _reports[spec] = BuildReport(str(spec), built, rendered - start, compiled - rendered if built else 0.0,
                                 done - compiled + (0.0 if built else compiled - rendered), str(artifact.path),
                                 artifact.toolchain.compiler)
    return loaded


def report_of(spec: KernelSpec) -> BuildReport | None:
    """The report of a kernel that this process loaded."""
    return _reports.get(spec)


def reports() -> list[BuildReport]:
    """One report per kernel that this process loaded, in order."""
    return list(_reports.values())
