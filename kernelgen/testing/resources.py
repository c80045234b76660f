"""What ptxas says of compiled kernels, against a committed table: shared by the compile tests of the CUDA kernels."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from kernelgen import build
from kernelgen.cache.jobs import build_many
from kernelgen.kernels.base import KernelFamily
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target

# Every architecture that has instructions or limits of its own among those the kernels run on.
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
_MEMORY_PER_JOB = 2**28


def compiled(specs: Iterable[KernelSpec]) -> dict[str, dict[str, Any]]:
    """Spec name -> meta of its artifact, compiled in parallel. Raises the first CompileError."""
    wanted = list(specs)
    jobs = build_many([partial(build.build, spec) for spec in wanted], labels=[str(s) for s in wanted],
                      memory_per_job_bytes=_MEMORY_PER_JOB)
    return {spec.name: dict(job.result()[0].meta) for spec, job in zip(wanted, jobs)}


def covered(family: KernelFamily, target: Target) -> list[KernelSpec]:
    """Specs of everything in the family's coverage(), with the chooser's config where it names none that fits the target.

    None where the family is written for other GPUs.
    """
    if family.capabilities and target.capability not in family.capabilities:
        return []
    specs = []
    for problem, config in family.coverage():
        assert family.supports(problem, target), problem
        if config is None or not family.legal(problem, target, config):  # 99 KB of shared memory on some parts
            config = next(iter(family.candidates(problem, target)))
            assert family.legal(problem, target, config), (problem, config)
        specs.append(family.spec(problem, target, config))
    return specs


def _shared_memory(spec: KernelSpec) -> int:
    """Dynamic shared memory in bytes: a parameter of the kernels that use any."""
    value = dict(spec.parameters).get("shared_memory", 0)
    return value if isinstance(value, int) else 0


def measured(specs: Iterable[KernelSpec]) -> dict[str, dict[str, int]]:
    """One row of a table per kernel: registers, spilled bytes, dynamic shared memory."""
    wanted = list(specs)
    reports = compiled(wanted)
    return {
        spec.name: {
            "registers": reports[spec.name]["registers"],
            "spill_bytes": reports[spec.name]["spill_stores"] + reports[spec.name]["spill_loads"],
            "shared_memory": _shared_memory(spec),
        }
        for spec in wanted
    }


def assert_within_table(specs: Iterable[KernelSpec], table: Path, arch: str) -> None:
    """No spills, no more registers than committed, the same shared memory, and exactly the kernels of the table."""
    expected, got = json.loads(table.read_text())[arch], measured(specs)
    assert sorted(got) == sorted(expected), f"the tuned kernels changed: write {table.name} anew (see the test's docstring)"
    for name, row in got.items():
        assert row["spill_bytes"] == 0, f"{name} on {arch} spills"
        assert row["registers"] <= expected[name]["registers"], f"{name} on {arch}: {row} against {expected[name]}"
        assert row["shared_memory"] == expected[name]["shared_memory"], f"{name} on {arch}"
