"""Host side of cache/append_cpu: new tokens into a paged cache, with quantisation and rotation, in generated C++."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kernelgen.cache_tensors import AppendTensors
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.cache.append import (
    CPU_TYPES,
    PARAMS,
    coverage,
    data_verdict,
    pointer_packing,
    scalars,
    type_parameters,
    words_of,
)
from kernelgen.kernels.rowwise import TaskConfig, legal_tasks, repeated
from kernelgen.problems.cache_ops import AppendProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

ENTRY = "append_cpu"
_ROTATING = ("fp32", "bf16", "fp16", "fp64")
_TASK_ELEMENTS = 1 << 16


def supports(problem: AppendProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    return first_no((target.kind == "cpu", f"append_cpu needs a CPU, got {target}")) and data_verdict(problem, _ROTATING)


def candidates(problem: AppendProblem, target: Target) -> Iterator[TaskConfig]:
    p = problem
    yield TaskConfig.of(p.heads * (p.head_dim + p.head_dim_v) + p.q_heads * p.head_dim, _TASK_ELEMENTS)


def spec(problem: AppendProblem, target: Target, config: TaskConfig) -> KernelSpec:
    """The specialisation: dtypes (sizes, where a side is copied) and rotation."""
    return KernelSpec.make(
        "append_cpu_" + "_".join(words_of(problem)), "cache/append_cpu.cc.jinja", "cxx", type_parameters(problem, CPU_TYPES),
        params=PARAMS, params_type="kernelgen::AppendParams", entries=(ENTRY,), target=target)


def bind(problem: AppendProblem, config: TaskConfig, kernel: Any, tensors: AppendTensors) -> Callable[[AppendTensors], None]:
    """The closure of a repeated call: packs addresses, runs the tasks."""
    p = problem
    scratch = 0 if p.rotation is None else 2 * 8 * p.rotation.dim + 4 * p.head_dim
    launch = kernel.prepare(phases=((0, config.tasks(p.tokens)),), scratch_bytes=scratch)
    return repeated(launch, pointer_packing(), scalars(p, tensors, config.rows))


FAMILY = KernelFamily(
    name="cache/append_cpu", op="append", target_kind="cpu", toolchain="cxx", supports=supports, candidates=candidates,
    legal=legal_tasks, spec=spec, bind=bind, coverage=coverage,
)
