"""Compile many kernels before anything is timed, in several processes: NVRTC compiles one at a time in each."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from kernelgen import build, settings
from kernelgen.cache.jobs import job_limit
from kernelgen.cache.progress import many
from kernelgen.dispatch.decision import Decision
from kernelgen.errors import KernelgenError
from kernelgen.kernels.base import families
from kernelgen.specs import KernelSpec
from kernelgen.toolchains import toolchain
from kernelgen.toolchains.base import PARAMS_ABI

_MEMORY_PER_PROCESS = 2**30  # torch is imported in each
_WORTH_A_PROCESS = 2  # kernels; fewer are compiled before a process has started


def spec_of(decision: Decision) -> KernelSpec | None:
    """The kernel that a decision compiles; None where it chose none of ours."""
    chosen = decision.chosen
    if chosen is None or chosen.backend != "generated":
        return None
    family = next(f for f in families(decision.problem.op, decision.target.kind) if f.name == chosen.kernel)
    return family.spec(decision.problem, decision.target, chosen.config)


def prebuild(specs: Iterable[KernelSpec], processes: int | None = None) -> dict[KernelSpec, str]:
    """Make sure that every spec is in the cache. Returns those that failed, with the reason.

    ``processes``: at most so many (default: as many as cores and memory allow); 1 compiles here.
    """
    missing = [spec for spec in dict.fromkeys(specs) if not _cached(spec)]
    if not missing:
        return {}
    limit = min(job_limit(_MEMORY_PER_PROCESS, processes), -(-len(missing) // _WORTH_A_PROCESS))
    failed: dict[KernelSpec, str] = {}
    with many(len(missing)) as display:
        if limit == 1:
            for spec in missing:
                seconds, failed[spec] = _build(spec)
                display.finished(spec.name, seconds, KernelgenError(failed[spec]) if failed[spec] else None)
        else:
            with ProcessPoolExecutor(limit, get_context("spawn"), _adopt, (settings.settings(),)) as pool:
                running = {pool.submit(_build, spec): spec for spec in missing}
                for future in as_completed(running):
                    spec = running[future]
                    seconds, failed[spec] = future.result()
                    display.finished(spec.name, seconds, KernelgenError(failed[spec]) if failed[spec] else None)
    return {spec: reason for spec, reason in failed.items() if reason}


def _cached(spec: KernelSpec) -> bool:
    request, _ = build.request_of(spec)
    return build.store().get(request, None, binding_abi=PARAMS_ABI, cuda_major=toolchain(spec.toolchain).cuda_major) is not None


def _adopt(parent: Any) -> None:
    """A new process has the parent's settings, whatever the environment says."""
    settings._current = parent


def _build(spec: KernelSpec) -> tuple[float, str]:
    """(seconds, why it failed or "")."""
    start = time.perf_counter()
    try:
        build.build(spec)
    except KernelgenError as error:
        return time.perf_counter() - start, str(error).splitlines()[0]
    return time.perf_counter() - start, ""
