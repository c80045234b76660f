"""Compile many kernels before anything is timed (kernelgen/aot/pool.py)."""

from __future__ import annotations

from collections.abc import Iterable

from kernelgen import build
from kernelgen.aot.pool import build_specs
from kernelgen.aot.specs import specs_of
from kernelgen.dispatch.decision import Decision
from kernelgen.specs import KernelSpec
from kernelgen.toolchains import toolchain
from kernelgen.toolchains.base import PARAMS_ABI


def spec_of(decision: Decision) -> KernelSpec | None:
    """The kernel that a decision compiles; None where it chose none of ours."""
    return next(iter(specs_of(decision)), None)


def prebuild(specs: Iterable[KernelSpec], processes: int | None = None) -> dict[KernelSpec, str]:
    """Make sure that every spec is in the cache. Returns those that failed, with the reason.

    ``processes``: at most so many (default: as many as cores and memory allow); 1 compiles here.
    """
    missing = [spec for spec in dict.fromkeys(specs) if not _cached(spec)]
    return {row.spec: row.error for row in build_specs(missing, processes) if row.error}


def _cached(spec: KernelSpec) -> bool:
    request, _ = build.request_of(spec)
    return build.store().get(request, None, binding_abi=PARAMS_ABI, cuda_major=toolchain(spec.toolchain).cuda_major) is not None
