"""Host side of rope/rope_cpu: rotary position embedding in generated C++."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kernelgen.cache_tensors import RopeTensors
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.rope.rope import PARAMS, coverage_problems, data_verdict, pointer_packing, scalars, words_of
from kernelgen.problems.cache_ops import RopeProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no, no, yes

ENTRY = "rope_cpu"
# Elements of a task: some ten microseconds of work, which hides the cost of handing a task out.
_TASK_ELEMENTS = 1 << 15


@dataclass(frozen=True)
class Config:
    """Tokens of a task."""

    task_tokens: int

    def __str__(self) -> str:
        return f"{self.task_tokens} tokens"


def supports(problem: RopeProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    return first_no((target.kind == "cpu", f"rope_cpu needs a CPU, got {target}")) and data_verdict(problem)


def legal(problem: RopeProblem, target: Target, config: Config) -> Verdict:
    return yes() if config.task_tokens >= 1 else no(f"config {config} has an empty task")


def candidates(problem: RopeProblem, target: Target) -> Iterator[Config]:
    """One config: tasks of about _TASK_ELEMENTS."""
    p = problem
    yield Config(max(1, _TASK_ELEMENTS // max((p.q_heads + p.k_heads) * p.head_dim, 1)))


def spec(problem: RopeProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, pairing and where angles come from."""
    turn = problem.rotation
    parameters: dict[str, Any] = dict(
        element=DTYPES[problem.dtype].cpp, table=DTYPES[turn.cache_dtype or "fp64"].cpp, cached=turn.cache_dtype is not None,
        interleaved=turn.interleaved)
    return KernelSpec.make(
        "rope_cpu_" + "_".join(words_of(problem)), "rope/rope_cpu.cc.jinja", "cxx", parameters,
        params=PARAMS, params_type="kernelgen::RopeParams", entries=(ENTRY,), target=target)


def bind(problem: RopeProblem, config: Config, kernel: Any, tensors: RopeTensors) -> Callable[[RopeTensors], None]:
    """The closure of a repeated call: packs addresses, runs the tasks."""
    p = problem
    launch = kernel.prepare(phases=((0, -(-p.tokens // config.task_tokens)),), scratch_bytes=2 * 8 * p.rotation.dim)
    tail = scalars(p, tensors, config.task_tokens)
    addresses = pointer_packing()

    def run(t: RopeTensors) -> None:
        launch(addresses(t) + tail)

    return run


def coverage() -> Iterable[tuple[RopeProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    for problem in coverage_problems():
        yield problem, None


FAMILY = KernelFamily(
    name="rope/rope_cpu", op="rope", target_kind="cpu", toolchain="cxx", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage,
)
