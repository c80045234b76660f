"""Host side of attention/merge_states_cpu: partial attention results combined by their LSE, in generated C++."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kernelgen.cache_tensors import MergeTensors
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.attention.merge_states import PARAMS, coverage_problems, pointer_packing, scalars
from kernelgen.kernels.base import KernelFamily
from kernelgen.problems.cache_ops import MergeProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no, no, yes

ENTRY = "merge_states_cpu"
_DTYPES = ("fp32", "bf16", "fp16", "fp64")
# Elements read by a task: some ten microseconds of work, which hides the cost of handing a task out.
_TASK_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Config:
    """(token, head) rows of a task."""

    task_rows: int

    def __str__(self) -> str:
        return f"{self.task_rows} rows"


def supports(problem: MergeProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cpu", f"merge_states_cpu needs a CPU, got {target}"),
        (p.dtype in _DTYPES, f"dtype {p.dtype} is not one of {', '.join(_DTYPES)}"),
        (p.lse_dtype == "fp32", f"lses of {p.lse_dtype} are not fp32"),
    )


def legal(problem: MergeProblem, target: Target, config: Config) -> Verdict:
    return yes() if config.task_rows >= 1 else no(f"config {config} has an empty task")


def candidates(problem: MergeProblem, target: Target) -> Iterator[Config]:
    """One config: tasks of about _TASK_ELEMENTS."""
    yield Config(max(1, _TASK_ELEMENTS // max(problem.sides * problem.head_dim, 1)))


def spec(problem: MergeProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: the dtype."""
    return KernelSpec.make(
        f"merge_states_cpu_{problem.dtype}", "attention/merge_states_cpu.cc.jinja", "cxx", {"element": DTYPES[problem.dtype].cpp},
        params=PARAMS, params_type="kernelgen::MergeParams", entries=(ENTRY,), target=target)


def bind(problem: MergeProblem, config: Config, kernel: Any, tensors: MergeTensors) -> Callable[[MergeTensors], None]:
    """The closure of a repeated call: packs addresses, runs the tasks."""
    p = problem
    launch = kernel.prepare(phases=((0, -(-p.tokens * p.heads // config.task_rows)),), scratch_bytes=max(16 * p.sides, 1))
    tail = scalars(p, tensors, config.task_rows)
    addresses = pointer_packing()

    def run(t: MergeTensors) -> None:
        launch(addresses(t) + tail)

    return run


def coverage() -> Iterable[tuple[MergeProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    for problem in coverage_problems():
        yield problem, None
    yield replace(next(coverage_problems()), dtype="fp64"), None


FAMILY = KernelFamily(
    name="attention/merge_states_cpu", op="merge_states", target_kind="cpu", toolchain="cxx", supports=supports,
    candidates=candidates, legal=legal, spec=spec, bind=bind, coverage=coverage,
)
