"""Host side of moe/sort_cpu: slots grouped by expert, in generated C++."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.moe.sort_cuda import MAPS
from kernelgen.kernels.rowwise import TaskConfig, legal_tasks
from kernelgen.moe_tensors import SortTensors
from kernelgen.params import ParamStruct
from kernelgen.problems.moe import MoeSortProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

# struct MoeSortCpuParams of the header.
PARAMS = ParamStruct((
    ("ids", "ptr"), ("expert_map", "ptr"), ("offsets", "ptr"), ("token_of_row", "ptr"), ("row_of_slot", "ptr"),
    ("ids_row", "i64"), ("first", "i64"), ("tokens", "i64"), ("k", "i64"), ("experts", "i64"), ("mapped", "i64"),
))
ENTRY = "moe_sort_cpu"
_INDICES = {"int32": "int32_t", "int64": "int64_t"}


def supports(problem: MoeSortProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cpu", f"moe_sort_cpu needs a CPU, got {target}"),
        (p.id_dtype in _INDICES, f"ids of {p.id_dtype} are not one of {', '.join(_INDICES)}"),
        (p.weight_dtype is None, "moe_sort_cpu gives rows no weights"),
        (p.slots < 1 << 31, f"{p.slots} slots do not fit int32 rows"),
    )


def candidates(problem: MoeSortProblem, target: Target) -> Iterator[TaskConfig]:
    """One task: a slot takes a few nanoseconds, the products behind it thousands of times that."""
    yield TaskConfig(max(1, problem.tokens))


def spec(problem: MoeSortProblem, target: Target, config: TaskConfig) -> KernelSpec:
    """The specialisation: type of the ids, kind of map."""
    p = problem
    return KernelSpec.make(
        f"moe_sort_cpu_{p.id_dtype}_{p.expert_map or 'ids'}", "moe/sort_cpu.cc.jinja", "cxx",
        dict(index=_INDICES[p.id_dtype], map=MAPS[p.expert_map]), params=PARAMS, params_type="kernelgen::MoeSortCpuParams",
        entries=(ENTRY,), target=target)


def bind(problem: MoeSortProblem, config: TaskConfig, kernel: Any, tensors: SortTensors) -> Callable[[SortTensors], None]:
    """The closure of a repeated call: packs addresses, runs the task."""
    p, t = problem, tensors
    launch = kernel.prepare(phases=((0, 1),), scratch_bytes=max(64, 4 * p.experts))
    tail = PARAMS.pack_scalars({
        "ids_row": t.ids.stride(0), "first": t.first, "tokens": p.tokens, "k": p.k, "experts": p.experts,
        "mapped": 0 if t.expert_map is None else t.expert_map.shape[0]})
    pack = PARAMS.pointer_packer.pack

    def run(t: SortTensors) -> None:
        launch(pack(t.ids.data_ptr(), 0 if t.expert_map is None else t.expert_map.data_ptr(), t.offsets.data_ptr(),
                    t.token_of_row.data_ptr(), t.row_of_slot.data_ptr()) + tail)

    return run


def coverage() -> Iterable[tuple[MoeSortProblem, TaskConfig | None]]:
    """Problems that together reach every branch of the template."""
    base = MoeSortProblem(64, 8, 32)
    yield base, None
    yield replace(base, id_dtype="int64", expert_map="table"), None
    yield replace(base, expert_map="range"), None


FAMILY = KernelFamily(
    name="moe/sort_cpu", op="moe_sort", target_kind="cpu", toolchain="cxx", supports=supports, candidates=candidates,
    legal=legal_tasks, spec=spec, bind=bind, coverage=coverage,
)
