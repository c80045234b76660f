"""Host side of norm/rmsnorm_cpu: row-wise RMS normalisation with an optional residual, in generated C++."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.rowwise import TaskConfig, legal_tasks
from kernelgen.params import ParamStruct
from kernelgen.problems.rows import RmsNormProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import RmsNormTensors
from kernelgen.verdicts import Verdict, first_no

# struct RmsNormCpuParams of the header.
PARAMS = ParamStruct((
    ("x", "ptr"), ("weight", "ptr"), ("out", "ptr"), ("residual", "ptr"),
    ("rows", "i64"), ("width", "i64"), ("x_stride", "i64"), ("out_stride", "i64"), ("residual_stride", "i64"),
    ("task_rows", "i64"), ("eps", "f64"),
))
ENTRY = "rmsnorm_cpu"

_FLOATS = ("fp32", "bf16", "fp16")
_TASK_ELEMENTS = 1 << 15


def supports(problem: RmsNormProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    weights = ("fp64",) if p.dtype == "fp64" else _FLOATS
    return first_no(
        (target.kind == "cpu", f"rmsnorm_cpu needs a CPU, got {target}"),
        (p.dtype in (*_FLOATS, "fp64"), f"dtype {p.dtype} is not one of fp64, {', '.join(_FLOATS)}"),
        (p.weight_dtype in weights, f"weight dtype {p.weight_dtype} with {p.dtype} is not one of {', '.join(weights)}"),
    )


def candidates(problem: RmsNormProblem, target: Target) -> Iterator[TaskConfig]:
    yield TaskConfig.of(problem.width, _TASK_ELEMENTS)


def spec(problem: RmsNormProblem, target: Target, config: TaskConfig) -> KernelSpec:
    """The specialisation: dtypes and residual."""
    p = problem
    words = [p.dtype, *([f"w_{p.weight_dtype}"] if p.weight_dtype != p.dtype else []), *(["residual"] if p.residual else [])]
    parameters: dict[str, Any] = dict(
        element=DTYPES[p.dtype].cpp, weight=DTYPES[p.weight_dtype].cpp, residual=p.residual)
    return KernelSpec.make(
        "rmsnorm_cpu_" + "_".join(words), "norm/rmsnorm_cpu.cc.jinja", "cxx", parameters,
        params=PARAMS, params_type="kernelgen::RmsNormCpuParams", entries=(ENTRY,), target=target)


def bind(problem: RmsNormProblem, config: TaskConfig, kernel: Any, tensors: RmsNormTensors) -> Callable[[RmsNormTensors], None]:
    """The closure of a repeated call: packs addresses, runs the tasks."""
    p, t = problem, tensors
    launch = kernel.prepare(phases=((0, config.tasks(p.rows) if p.width else 0),))
    tail = PARAMS.pack_scalars({
        "rows": p.rows, "width": p.width, "x_stride": t.x.stride(0), "out_stride": t.out.stride(0),
        "residual_stride": t.residual.stride(0) if t.residual is not None else 0, "task_rows": config.rows, "eps": t.eps})
    pack = PARAMS.pointer_packer.pack
    residual = p.residual

    def run(t: RmsNormTensors) -> None:
        launch(pack(t.x.data_ptr(), t.weight.data_ptr(), t.out.data_ptr(),
                    t.residual.data_ptr() if residual else 0) + tail)  # type: ignore[union-attr]

    return run


def coverage() -> Iterable[tuple[RmsNormProblem, TaskConfig | None]]:
    """Problems that together reach every branch of the template."""
    for dtype, weight, residual in (("fp32", "fp32", False), ("bf16", "bf16", True), ("fp16", "fp32", True), ("fp64", "fp64", False)):
        yield RmsNormProblem(64, 1001, dtype, weight, residual), None


FAMILY = KernelFamily(
    name="norm/rmsnorm_cpu", op="rmsnorm", target_kind="cpu", toolchain="cxx", supports=supports, candidates=candidates,
    legal=legal_tasks, spec=spec, bind=bind, coverage=coverage,
)
