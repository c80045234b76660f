"""Host side of moe/unpermute_cpu: each token's rows, weighted and added up in the order of its slots, in generated C++."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.moe.rows import HALF_OR_MORE, address, unpermute_coverage, unpermute_verdict
from kernelgen.kernels.rowwise import TaskConfig, legal_tasks
from kernelgen.moe_tensors import UnpermuteTensors
from kernelgen.params import ParamStruct
from kernelgen.problems.moe import MoeUnpermuteProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

# struct MoeUnpermuteCpuParams of the header.
PARAMS = ParamStruct((
    ("rows", "ptr"), ("row_of_slot", "ptr"), ("out", "ptr"), ("weights", "ptr"), ("addend", "ptr"),
    ("row_stride", "i64"), ("out_stride", "i64"), ("weight_stride", "i64"), ("addend_stride", "i64"), ("width", "i64"), ("k", "i64"),
    ("tokens", "i64"), ("task_tokens", "i64"),
))
ENTRY = "moe_unpermute_cpu"
_TASK_ELEMENTS = 1 << 15


def supports(problem: MoeUnpermuteProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    same = (p.dtype == "fp64") == (p.out_dtype == "fp64") and (p.addend is None or (p.addend == "fp64") == (p.dtype == "fp64"))
    return first_no(
        (target.kind == "cpu", f"moe_unpermute_cpu needs a CPU, got {target}"),
        (same, f"rows of {p.dtype}, out of {p.out_dtype}, addend of {p.addend}: fp64 goes with fp64 only"),
    ) and unpermute_verdict(p, HALF_OR_MORE)


def candidates(problem: MoeUnpermuteProblem, target: Target) -> Iterator[TaskConfig]:
    """One config: tokens with about _TASK_ELEMENTS elements to add."""
    yield TaskConfig.of(problem.width * max(problem.k, 1), _TASK_ELEMENTS)


def spec(problem: MoeUnpermuteProblem, target: Target, config: TaskConfig) -> KernelSpec:
    """The specialisation: dtypes, weights, addend."""
    p = problem
    words = [p.dtype, p.out_dtype, *([f"weights_{p.weight_dtype}"] if p.weight_dtype else []),
             *([f"addend_{p.addend}"] if p.addend else [])]
    return KernelSpec.make(
        "moe_unpermute_cpu_" + "_".join(words), "moe/unpermute_cpu.cc.jinja", "cxx",
        dict(element=DTYPES[p.dtype].cpp, out=DTYPES[p.out_dtype].cpp, weight_type=DTYPES[p.weight_dtype or "fp32"].cpp,
             addend_type=DTYPES[p.addend or p.out_dtype].cpp, weighted=p.weight_dtype is not None, has_addend=p.addend is not None),
        params=PARAMS, params_type="kernelgen::MoeUnpermuteCpuParams", entries=(ENTRY,), target=target)


def bind(problem: MoeUnpermuteProblem, config: TaskConfig, kernel: Any, tensors: UnpermuteTensors) -> Callable[[UnpermuteTensors], None]:
    """The closure of a repeated call: packs addresses, runs the tasks."""
    p, t = problem, tensors
    launch = kernel.prepare(phases=((0, config.tasks(p.tokens)),), scratch_bytes=max(64, 16 * p.k))
    tail = PARAMS.pack_scalars({
        "row_stride": t.rows.stride(0), "out_stride": t.out.stride(0), "weight_stride": t.weights.stride(0) if t.weights is not None else 0,
        "addend_stride": t.addend.stride(0) if t.addend is not None else 0, "width": p.width, "k": p.k, "tokens": p.tokens,
        "task_tokens": config.rows})
    pack = PARAMS.pointer_packer.pack

    def run(t: UnpermuteTensors) -> None:
        launch(pack(t.rows.data_ptr(), t.row_of_slot.data_ptr(), t.out.data_ptr(), address(t.weights), address(t.addend)) + tail)

    return run


def coverage() -> Iterable[tuple[MoeUnpermuteProblem, TaskConfig | None]]:
    """Problems that together reach every branch of the template."""
    return unpermute_coverage(HALF_OR_MORE)


FAMILY = KernelFamily(
    name="moe/unpermute_cpu", op="moe_unpermute", target_kind="cpu", toolchain="cxx", supports=supports, candidates=candidates,
    legal=legal_tasks, spec=spec, bind=bind, coverage=coverage,
)
