"""Host side of rope/rope_cpu: rotary position embedding in generated C++."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kernelgen.cache_tensors import RopeTensors
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.rope.rope import PARAMS, coverage, data_verdict, pointer_packing, rotation_parameters, scalars, words_of
from kernelgen.kernels.rowwise import TaskConfig, legal_tasks, repeated
from kernelgen.problems.cache_ops import RopeProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

ENTRY = "rope_cpu"
_TASK_ELEMENTS = 1 << 15


def supports(problem: RopeProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    return first_no((target.kind == "cpu", f"rope_cpu needs a CPU, got {target}")) and data_verdict(problem)


def candidates(problem: RopeProblem, target: Target) -> Iterator[TaskConfig]:
    yield TaskConfig.of((problem.q_heads + problem.k_heads) * problem.head_dim, _TASK_ELEMENTS)


def spec(problem: RopeProblem, target: Target, config: TaskConfig) -> KernelSpec:
    """The specialisation: dtypes, pairing and where angles come from."""
    parameters = rotation_parameters(problem.rotation, "cpp") | {"element": DTYPES[problem.dtype].cpp}
    return KernelSpec.make(
        "rope_cpu_" + "_".join(words_of(problem)), "rope/rope_cpu.cc.jinja", "cxx", parameters,
        params=PARAMS, params_type="kernelgen::RopeParams", entries=(ENTRY,), target=target)


def bind(problem: RopeProblem, config: TaskConfig, kernel: Any, tensors: RopeTensors) -> Callable[[RopeTensors], None]:
    """The closure of a repeated call: packs addresses, runs the tasks."""
    p = problem
    launch = kernel.prepare(phases=((0, config.tasks(p.tokens)),), scratch_bytes=2 * 8 * p.rotation.dim)
    return repeated(launch, pointer_packing(), scalars(p, tensors, config.rows))


FAMILY = KernelFamily(
    name="rope/rope_cpu", op="rope", target_kind="cpu", toolchain="cxx", supports=supports, candidates=candidates,
    legal=legal_tasks, spec=spec, bind=bind, coverage=coverage,
)
