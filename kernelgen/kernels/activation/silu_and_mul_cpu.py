"""Host side of activation/silu_and_mul_cpu: silu of the first half of each row times the second, in generated C++."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.params import ParamStruct
from kernelgen.problems.rows import SiluAndMulProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import SiluAndMulTensors
from kernelgen.verdicts import Verdict, first_no, no, yes

# struct SiluAndMulCpuParams of the header.
PARAMS = ParamStruct((
    ("x", "ptr"), ("out", "ptr"), ("rows", "i64"), ("width", "i64"), ("x_stride", "i64"), ("out_stride", "i64"),
    ("task_rows", "i64"), ("task_columns", "i64"), ("tasks_per_row", "i64"),
))
ENTRY = "silu_and_mul_cpu"

_DTYPES = ("fp32", "bf16", "fp16", "fp64")
# Elements of a task: some ten microseconds of work, which hides the cost of handing a task out.
_TASK_ELEMENTS = 1 << 14


@dataclass(frozen=True)
class Config:
    """Rows and columns of a task."""

    task_rows: int
    task_columns: int

    def __str__(self) -> str:
        return f"{self.task_rows}x{self.task_columns}"


def supports(problem: SiluAndMulProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    return first_no(
        (target.kind == "cpu", f"silu_and_mul_cpu needs a CPU, got {target}"),
        (problem.dtype in _DTYPES, f"dtype {problem.dtype} is not one of {', '.join(_DTYPES)}"),
    )


def legal(problem: SiluAndMulProblem, target: Target, config: Config) -> Verdict:
    return yes() if min(config.task_rows, config.task_columns) >= 1 else no(f"config {config} has an empty task")


def candidates(problem: SiluAndMulProblem, target: Target) -> Iterator[Config]:
    """One config: tasks of about _TASK_ELEMENTS; wide rows are divided, narrow ones collected."""
    columns = max(1, min(problem.width, _TASK_ELEMENTS))
    yield Config(max(1, _TASK_ELEMENTS // columns), columns)


def spec(problem: SiluAndMulProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: the dtype."""
    return KernelSpec.make(
        f"silu_and_mul_cpu_{problem.dtype}", "activation/silu_and_mul_cpu.cc.jinja", "cxx",
        {"element": DTYPES[problem.dtype].cpp}, params=PARAMS, params_type="kernelgen::SiluAndMulCpuParams",
        entries=(ENTRY,), target=target)


def bind(
    problem: SiluAndMulProblem, config: Config, kernel: Any, tensors: SiluAndMulTensors,
) -> Callable[[SiluAndMulTensors], None]:
    """The closure of a repeated call: packs addresses, runs the tasks."""
    p, c = problem, config
    per_row = -(-p.width // c.task_columns)
    launch = kernel.prepare(phases=((0, -(-p.rows // c.task_rows) * per_row),))
    tail = PARAMS.pack_scalars({
        "rows": p.rows, "width": p.width, "x_stride": tensors.x.stride(0), "out_stride": tensors.out.stride(0),
        "task_rows": c.task_rows, "task_columns": c.task_columns, "tasks_per_row": per_row})
    pack = PARAMS.pointer_packer.pack

    def run(t: SiluAndMulTensors) -> None:
        launch(pack(t.x.data_ptr(), t.out.data_ptr()) + tail)

    return run


def coverage() -> Iterable[tuple[SiluAndMulProblem, Config | None]]:
    """One problem per dtype: there are no other branches."""
    for dtype in _DTYPES:
        yield SiluAndMulProblem(64, 1001, dtype), None


FAMILY = KernelFamily(
    name="activation/silu_and_mul_cpu", op="silu_and_mul", target_kind="cpu", toolchain="cxx", supports=supports,
    candidates=candidates, legal=legal, spec=spec, bind=bind, coverage=coverage,
)
