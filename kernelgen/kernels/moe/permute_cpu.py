"""Host side of moe/permute_cpu: tokens copied to the rows of their experts, in generated C++."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.moe.rows import HALF_OR_MORE, STRIDES_OF_SCALES, address, permute_coverage, permute_verdict, strides_of_scales
from kernelgen.kernels.rowwise import TaskConfig, legal_tasks
from kernelgen.moe_tensors import PermuteTensors
from kernelgen.params import ParamStruct
from kernelgen.problems.moe import MoePermuteProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

# struct MoePermuteCpuParams of the header.
PARAMS = ParamStruct((
    ("x", "ptr"), ("row_of_slot", "ptr"), ("rows", "ptr"), ("weights", "ptr"), ("scale", "ptr"), ("scale_rows", "ptr"),
    ("x_stride", "i64"), ("row_stride", "i64"), ("weight_stride", "i64"), *((name, "i64") for name in STRIDES_OF_SCALES),
    ("width", "i64"), ("k", "i64"), ("scales", "i64"), ("tokens", "i64"), ("task_tokens", "i64"),
))
ENTRY = "moe_permute_cpu"
_TASK_ELEMENTS = 1 << 15


def supports(problem: MoePermuteProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    return first_no((target.kind == "cpu", f"moe_permute_cpu needs a CPU, got {target}")) and permute_verdict(problem, HALF_OR_MORE)


def candidates(problem: MoePermuteProblem, target: Target) -> Iterator[TaskConfig]:
    """One config: tokens with about _TASK_ELEMENTS copied elements."""
    yield TaskConfig.of(problem.width * max(problem.k, 1), _TASK_ELEMENTS)


def spec(problem: MoePermuteProblem, target: Target, config: TaskConfig) -> KernelSpec:
    """The specialisation: size of an element, or its type where it is multiplied; weights and scales."""
    p = problem
    size = DTYPES[p.dtype].bytes
    words = [f"b{size}" if p.copies else p.dtype, *([f"weights_{p.weight_dtype}"] if p.weight_dtype else []),
             *(["scales"] if p.scales is not None else [])]
    return KernelSpec.make(
        "moe_permute_cpu_" + "_".join(words), "moe/permute_cpu.cc.jinja", "cxx",
        dict(element=f"uint{8 * size}_t" if p.copies else DTYPES[p.dtype].cpp, weight_type=DTYPES[p.weight_dtype or "fp32"].cpp,
             copies=p.copies, weighted=p.weight_dtype is not None, has_scales=p.scales is not None),
        params=PARAMS, params_type="kernelgen::MoePermuteCpuParams", entries=(ENTRY,), target=target)


def bind(problem: MoePermuteProblem, config: TaskConfig, kernel: Any, tensors: PermuteTensors) -> Callable[[PermuteTensors], None]:
    """The closure of a repeated call: packs addresses, runs the tasks."""
    p, t = problem, tensors
    launch = kernel.prepare(phases=((0, config.tasks(p.tokens)),))
    tail = PARAMS.pack_scalars({
        "x_stride": t.x.stride(0), "row_stride": t.rows.stride(0), "weight_stride": t.weights.stride(0) if t.weights is not None else 0,
        "width": p.width, "k": p.k, "scales": p.scales or 0, "tokens": p.tokens, "task_tokens": config.rows} | strides_of_scales(t))
    pack = PARAMS.pointer_packer.pack

    def run(t: PermuteTensors) -> None:
        launch(pack(t.x.data_ptr(), t.row_of_slot.data_ptr(), t.rows.data_ptr(), address(t.weights), address(t.scale),
                    address(t.scale_rows)) + tail)

    return run


def coverage() -> Iterable[tuple[MoePermuteProblem, TaskConfig | None]]:
    """Problems that together reach every branch of the template."""
    return permute_coverage(HALF_OR_MORE)


FAMILY = KernelFamily(
    name="moe/permute_cpu", op="moe_permute", target_kind="cpu", toolchain="cxx", supports=supports, candidates=candidates,
    legal=legal_tasks, spec=spec, bind=bind, coverage=coverage,
)
