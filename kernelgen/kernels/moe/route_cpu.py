"""Host side of moe/route_cpu: router logits to experts and weights, in generated C++."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.moe import route
from kernelgen.kernels.moe.route import known_method, pointer_packing, weighting, words_of
from kernelgen.kernels.rowwise import TaskConfig, legal_tasks, repeated
from kernelgen.moe_tensors import RouteTensors
from kernelgen.params import ParamStruct
from kernelgen.problems.moe import RouteProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

# struct RouteCpuParams of the header.
PARAMS = ParamStruct((
    ("logits", "ptr"), ("bias", "ptr"), ("weights", "ptr"), ("ids", "ptr"), ("counts", "ptr"),
    ("tokens", "i64"), ("logits_row", "i64"), ("experts", "i64"), ("k", "i64"), ("groups", "i64"), ("kept_groups", "i64"),
    ("task_tokens", "i64"), ("scaling", "f64"),
))
ENTRY = "route_cpu"

_DTYPES = ("fp32", "bf16", "fp16", "fp64")
_TASK_ELEMENTS = 1 << 13  # logits: some ten microseconds
_LANES = 16               # what buffers are rounded up to: the longest register


def supports(problem: RouteProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cpu", f"route_cpu needs a CPU, got {target}"),
        (p.dtype in _DTYPES, f"dtype {p.dtype} is not one of {', '.join(_DTYPES)}"),
        (p.bias_dtype in (None, *_DTYPES), f"bias dtype {p.bias_dtype} is not one of {', '.join(_DTYPES)}"),
        known_method(p),
    )


def candidates(problem: RouteProblem, target: Target) -> Iterator[TaskConfig]:
    """One config: tokens with about _TASK_ELEMENTS logits."""
    yield TaskConfig.of(problem.experts, _TASK_ELEMENTS)


def spec(problem: RouteProblem, target: Target, config: TaskConfig) -> KernelSpec:
    """The specialisation: dtypes and method."""
    p = problem
    parameters: dict[str, Any] = dict(
        element=DTYPES[p.dtype].cpp, bias_type=DTYPES[p.bias_dtype or p.dtype].cpp, weighting=weighting(p), has_bias=p.bias,
        grouped=p.grouped, counts=p.counts)
    return KernelSpec.make(
        "_".join(["route_cpu", *words_of(p)]), "moe/route_cpu.cc.jinja", "cxx", parameters, params=PARAMS,
        params_type="kernelgen::RouteCpuParams", entries=(ENTRY,), target=target)


def _scratch(p: RouteProblem) -> int:
    """Bytes of RouteCpu's buffers: logits, keys, the chosen keys and weights, best two of each group, ids, kept groups."""
    size = 8 if p.dtype == "fp64" else 4
    experts, chosen, groups = (-(-n // _LANES) * _LANES for n in (p.experts, p.k, p.num_groups or 1))
    return size * (2 * experts + 2 * chosen + groups) + 8 * (chosen + groups)


def bind(problem: RouteProblem, config: TaskConfig, kernel: Any, tensors: RouteTensors) -> Callable[[RouteTensors], None]:
    """The closure of a repeated call: packs addresses, runs the tasks."""
    p, t = problem, tensors
    launch = kernel.prepare(phases=((0, config.tasks(p.tokens)),), scratch_bytes=_scratch(p))
    tail = PARAMS.pack_scalars({
        "tokens": p.tokens, "logits_row": t.logits.stride(0), "experts": p.experts, "k": p.k, "groups": p.num_groups or 1,
        "kept_groups": p.topk_groups or 1, "task_tokens": config.rows, "scaling": t.scaling})
    return repeated(launch, pointer_packing(PARAMS), tail)


def coverage() -> Iterable[tuple[RouteProblem, TaskConfig | None]]:
    return route.coverage(_DTYPES)


FAMILY = KernelFamily(
    name="moe/route_cpu", op="route", target_kind="cpu", toolchain="cxx", supports=supports, candidates=candidates,
    legal=legal_tasks, spec=spec, bind=bind, coverage=coverage,
)
