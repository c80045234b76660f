"""Host side of quantize/quantize_fp8_cpu: floating values to fp8 codes and scales, optionally through an activation, in generated C++."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm.activations import ACTIVATION_NAMES, gate_name
from kernelgen.kernels.rowwise import TaskConfig, legal_tasks
from kernelgen.params import ParamStruct
from kernelgen.problems.gemm import ACTIVATIONS
from kernelgen.problems.quantize import QuantizeProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import QuantizeTensors
from kernelgen.verdicts import Verdict, first_no

# struct QuantizeCpuParams of the header.
PARAMS = ParamStruct((
    ("x", "ptr"), ("codes", "ptr"), ("scale", "ptr"), ("largest", "ptr"),
    ("x_batch", "i64"), ("x_row", "i64"), ("codes_batch", "i64"), ("codes_row", "i64"),
    ("scale_batch", "i64"), ("scale_row", "i64"), ("scale_block", "i64"), ("batch", "i64"), ("rows", "i64"), ("width", "i64"),
    ("task_rows", "i64"), ("batch_tasks", "i64"), ("tasks", "i64"),
))
ENTRIES = ("quantize_fp8_cpu", "find_largest")

_DTYPES = ("fp32", "bf16", "fp16")
CODES = {"e4m3": "kernelgen::Fp8E4M3", "e5m2": "kernelgen::Fp8E5M2"}
RECIPES = {"tensor": "kTensor", "row": "kRow", "block_1x128": "kBlock1x128", "block_128x128": "kBlock128x128"}
_BLOCK = 128
_TASK_ELEMENTS = 1 << 15  # some ten microseconds


def supports(problem: QuantizeProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cpu", f"quantize_fp8_cpu needs a CPU, got {target}"),
        (p.dtype in _DTYPES, f"dtype {p.dtype} is not one of {', '.join(_DTYPES)}"),
        (p.code_dtype in CODES, f"code dtype {p.code_dtype} is not one of {', '.join(CODES)}"),
        (p.activation is None or p.activation in ACTIVATIONS, f"activation {p.activation} is not in quantize_fp8_cpu"),
    )


def candidates(problem: QuantizeProblem, target: Target) -> Iterator[TaskConfig]:
    """One config: rows of blocks, else rows with about _TASK_ELEMENTS."""
    yield TaskConfig(_BLOCK) if problem.recipe == "block_128x128" else TaskConfig.of(problem.width, _TASK_ELEMENTS)


def spec(problem: QuantizeProblem, target: Target, config: TaskConfig) -> KernelSpec:
    """The specialisation: dtypes, recipe, activation."""
    p = problem
    words = [p.dtype, p.code_dtype, p.recipe, *([p.activation] if p.activation else []), *([p.gate_up] if p.gated else [])]
    parameters = {
        "element": DTYPES[p.dtype].cpp, "code": CODES[p.code_dtype], "recipe": RECIPES[p.recipe],
        "activation": ACTIVATION_NAMES[p.activation], "gate": gate_name(p),
    }
    return KernelSpec.make(
        "_".join(("quantize_fp8_cpu", *words)), "quantize/quantize_fp8_cpu.cc.jinja", "cxx", parameters, params=PARAMS,
        params_type="kernelgen::QuantizeCpuParams", entries=ENTRIES, target=target)


def bind(problem: QuantizeProblem, config: TaskConfig, kernel: Any, tensors: QuantizeTensors) -> Callable[[QuantizeTensors], None]:
    """The closure of a repeated call: packs addresses, runs the tasks."""
    p, t = problem, tensors
    shared = p.recipe == "tensor"
    batch_tasks, scratch = config.tasks(p.rows), 0
    tasks = batch_tasks * p.batch
    if shared:  # no values have a scale too
        batch_tasks, tasks = max(batch_tasks, 1), max(tasks, 1)
    if p.activation:
        scratch = 4 * (_BLOCK * _BLOCK if p.recipe.startswith("block") else p.width)
    launch = kernel.prepare(phases=(((1, tasks), (0, tasks)) if shared else ((0, tasks),)), scratch_bytes=scratch)
    tail = PARAMS.pack_scalars({
        "x_batch": t.x.stride(0), "x_row": t.x.stride(1), "codes_batch": t.codes.stride(0), "codes_row": t.codes.stride(1),
        "scale_batch": t.scale.stride(0), "scale_row": t.scale.stride(1), "scale_block": t.scale.stride(2), "batch": p.batch,
        "rows": p.rows, "width": p.width, "task_rows": config.rows, "batch_tasks": batch_tasks, "tasks": tasks})
    pack = PARAMS.pointer_packer.pack

    def run(t: QuantizeTensors) -> None:
        largest = torch.empty(tasks, dtype=torch.int32, device="cpu") if shared else None
        launch(pack(t.x.data_ptr(), t.codes.data_ptr(), t.scale.data_ptr(), 0 if largest is None else largest.data_ptr()) + tail)

    return run


def coverage() -> Iterable[tuple[QuantizeProblem, TaskConfig | None]]:
    """Problems that together reach every branch of the template."""
    for dtype in _DTYPES:
        for recipe in RECIPES:
            yield QuantizeProblem(2, 200, 300, dtype, recipe=recipe), None
    for recipe, activation, gate_up in (("tensor", "swiglu", "gate_first"), ("row", "geglu", "up_first"),
                                        ("block_128x128", "swiglu", "interleaved"), ("block_1x128", "silu", "gate_first")):
        yield QuantizeProblem(2, 200, 300, "bf16", "e5m2", recipe, activation, gate_up), None


FAMILY = KernelFamily(
    name="quantize/quantize_fp8_cpu", op="quantize_fp8", target_kind="cpu", toolchain="cxx", supports=supports,
    candidates=candidates, legal=legal_tasks, spec=spec, bind=bind, coverage=coverage,
)
