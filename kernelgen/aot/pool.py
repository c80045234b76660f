"""Many kernels compiled in several processes, limited by cores and memory: NVRTC compiles one at a time in each."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from typing import Any

from kernelgen import build, settings
from kernelgen.cache.jobs import job_limit
from kernelgen.cache.progress import Progress, many, quiet
from kernelgen.cache.store import Artifact
from kernelgen.errors import CacheError, KernelgenError, ToolchainMissing
from kernelgen.specs import KernelSpec
from kernelgen.toolchains import toolchain

_MEMORY_PER_PROCESS = 2**30  # torch is imported in each
WORTH_A_PROCESS = 2  # kernels; fewer are compiled before a process has started


@dataclass(frozen=True)
class Built:
    """What became of one kernel.

    built    by this call; False: it was in the cache, or failed
    seconds  of its build; ``size``: bytes of the binary, ``stored``: of all files of the entry
    registers, spill_bytes   by ptxas; None for a CPU kernel
    error    why there is none, or "";  cache: the cache is at fault, and no other kernel can be stored either
    """

    spec: KernelSpec
    built: bool = False
    seconds: float = 0.0
    size: int = 0
    stored: int = 0
    registers: int | None = None
    spill_bytes: int | None = None
    path: str = ""
    error: str = ""
    cache: bool = False


def build_specs(specs: Iterable[KernelSpec], processes: int | None = None) -> list[Built]:
    """Make sure that every spec is in the cache under this machine's compilers; one row each, in order. Failures stop no others.

    ``processes``: at most so many (default: as many as cores and memory allow); 1 compiles here. Raises CacheError where the
    cache cannot be written: that fails every kernel alike.
    """
    wanted = list(dict.fromkeys(specs))
    rows = {spec: row for spec in wanted if (row := _found(spec)) is not None}
    missing = [spec for spec in wanted if spec not in rows]
    if missing:
        limit = min(job_limit(_MEMORY_PER_PROCESS, processes), -(-len(missing) // WORTH_A_PROCESS))
        with many(len(missing)) as display:
            for row in _here(missing) if limit == 1 else _in_processes(missing, limit):
                _finished(display, row)
                rows[row.spec] = row
                if row.cache:
                    raise CacheError(row.error)
    return [rows[spec] for spec in wanted]


def _finished(display: Progress, row: Built) -> None:
    display.finished(row.spec.name, row.seconds, KernelgenError(row.error) if row.error else None)


def _here(specs: list[KernelSpec]) -> Iterable[Built]:
    return (_build(spec) for spec in specs)


def _in_processes(specs: list[KernelSpec], limit: int) -> Iterable[Built]:
    """Rows as they are done. A process that is killed (out of memory, most likely) breaks its pool: what is left is compiled one at a
    time then, and only what kills its process again is given up."""
    left = dict.fromkeys(specs)
    while left:
        broken = False
        pool = ProcessPoolExecutor(limit, get_context("spawn"), _adopt, (settings.settings(),))
        try:
            # One at a time: the pool fails every waiting job with the one that broke it.
            batch = list(left) if limit > 1 else [next(iter(left))]
            running: dict[Future[Built], KernelSpec] = {pool.submit(_worker, spec): spec for spec in batch}
            for future in as_completed(running):
                spec = running[future]
                try:
                    row = future.result()
                except BrokenProcessPool:
                    broken = True
                    if limit > 1:
                        continue
                    row = Built(spec, error=f"{spec}: the compiling process was killed, most likely for memory; --jobs 1 needs the least")
                del left[spec]
                yield row
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        limit = 1 if broken else limit


def _found(spec: KernelSpec) -> Built | None:
    """The row of a kernel that this machine's compiler would not build again."""
    try:
        request, _ = build.request_of(spec)
        artifact = build.store().get(request, toolchain(spec.toolchain).identity())
    except ToolchainMissing:
        return None
    return None if artifact is None else _row(spec, artifact, built=False, seconds=0.0)


def _row(spec: KernelSpec, artifact: Artifact, *, built: bool, seconds: float) -> Built:
    meta = artifact.meta
    # Without ptxas' own report the stack is what is known: of a kernel that has no arrays there it is what was spilled.
    spills = meta.get("spill_stores", 0) + meta.get("spill_loads", meta.get("stack_bytes", 0)) if "registers" in meta else None
    return Built(spec, built, seconds, meta["files"][meta["binary"]]["size"], sum(f["size"] for f in meta["files"].values()),
                 meta.get("registers"), spills, str(artifact.path))


def _adopt(parent: Any) -> None:
    """A new process has the parent's settings, whatever the environment says, and ends with the parent."""
    settings.adopt(parent)
    threading.Thread(target=_end_with_parent, name="kernelgen-parent", daemon=True).start()


def _end_with_parent() -> None:
    """The pool's own end is a message of the parent. One that was killed sends none, and its processes would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # a compiler that runs is killed by its own watcher


def _build(spec: KernelSpec) -> Built:
    start = time.perf_counter()
    try:
        with quiet():  # the display counts this build
            artifact, built = build.build(spec)
    except KernelgenError as error:
        return Built(spec, seconds=time.perf_counter() - start, error=str(error).splitlines()[0], cache=isinstance(error, CacheError))
    return _row(spec, artifact, built=built, seconds=time.perf_counter() - start)


_worker = _build  # what a process runs; tests put another in its place
