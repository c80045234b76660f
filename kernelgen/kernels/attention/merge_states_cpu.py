"""Host side of attention/merge_states_cpu: partial attention results combined by their LSE, in generated C++."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from kernelgen.cache_tensors import MergeTensors
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.attention.merge_states import PARAMS, pointer_packing, scalars
from kernelgen.kernels.attention.merge_states import coverage as shared_coverage
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.rowwise import TaskConfig, legal_tasks, repeated
from kernelgen.problems.cache_ops import MergeProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

ENTRY = "merge_states_cpu"
_DTYPES = ("fp32", "bf16", "fp16", "fp64")
_TASK_ELEMENTS = 1 << 16  # read by a task


def supports(problem: MergeProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cpu", f"merge_states_cpu needs a CPU, got {target}"),
        (p.dtype in _DTYPES, f"dtype {p.dtype} is not one of {', '.join(_DTYPES)}"),
        (p.lse_dtype == "fp32", f"lses of {p.lse_dtype} are not fp32"),
    )


def candidates(problem: MergeProblem, target: Target) -> Iterator[TaskConfig]:
    yield TaskConfig.of(problem.sides * problem.head_dim, _TASK_ELEMENTS)


def spec(problem: MergeProblem, target: Target, config: TaskConfig) -> KernelSpec:
    """The specialisation: the dtype."""
    return KernelSpec.make(
        f"merge_states_cpu_{problem.dtype}", "attention/merge_states_cpu.cc.jinja", "cxx", {"element": DTYPES[problem.dtype].cpp},
        params=PARAMS, params_type="kernelgen::MergeParams", entries=(ENTRY,), target=target)


def bind(problem: MergeProblem, config: TaskConfig, kernel: Any, tensors: MergeTensors) -> Callable[[MergeTensors], None]:
    """The closure of a repeated call: packs addresses, runs the tasks."""
    p = problem
    launch = kernel.prepare(phases=((0, config.tasks(p.tokens * p.heads)),), scratch_bytes=max(16 * p.sides, 1))
    return repeated(launch, pointer_packing(), scalars(p, tensors, config.rows))


def coverage() -> Iterator[tuple[MergeProblem, None]]:
    """The shared problems, and the dtype that only this kernel has."""
    yield from shared_coverage()
    yield replace(next(shared_coverage())[0], dtype="fp64"), None


FAMILY = KernelFamily(
    name="attention/merge_states_cpu", op="merge_states", target_kind="cpu", toolchain="cxx", supports=supports,
    candidates=candidates, legal=legal_tasks, spec=spec, bind=bind, coverage=coverage,
)
