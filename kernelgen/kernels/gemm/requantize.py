"""Products whose output is quantised: float32 results in a workspace, then the kernels of quantize/quantize_fp8_cuda on them.

One binary holds both, so that a spec is still one artifact. The workspace is written and read once more than a product with
a 16-bit output needs; a scale per tensor or row needs results of other blocks, and could not be found in the epilogue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernelgen.kernels.quantize import quantize_fp8_cuda
from kernelgen.problems.gemm import GemmProblem
from kernelgen.problems.quantize import QuantizeProblem
from kernelgen.targets import Target
from kernelgen.tensors import QuantizeTensors

TEMPLATE = "gemm/quantized.cu.jinja"


@dataclass(frozen=True)
class Requantization:
    """The second half of a product with ``out_scale``; ``limited``: only rows that belong to a group are quantised."""

    problem: QuantizeProblem
    config: quantize_fp8_cuda.Config
    limited: bool

    @staticmethod
    def of(problem: GemmProblem, target: Target, batch: int, rows: int, limited: bool = False) -> Requantization:
        width = problem.outputs * 4
        quantize = QuantizeProblem(batch, rows, problem.outputs, "fp32", problem.out_dtype, problem.out_scale or "tensor",
                                   alignment=min(problem.out_alignment, (width & -width) or 16, 16))
        return Requantization(quantize, next(iter(quantize_fp8_cuda.candidates(quantize, target))), limited)

    @property
    def entries(self) -> tuple[str, ...]:
        return quantize_fp8_cuda.entries(self.problem)

    @property
    def words(self) -> str:
        return "_".join(["quantized", self.problem.recipe, self.problem.code_dtype, *str(self.config).split()])

    def parameters(self, template: str) -> dict[str, Any]:
        """Of TEMPLATE, which includes the product's own."""
        options = quantize_fp8_cuda.parameters(self.problem, self.config, self.limited)
        return {"product_template": template, "quantize_assertions": quantize_fp8_cuda.PARAMS.assertions(quantize_fp8_cuda.PARAMS_TYPE),
                **{f"quantize_{name}": value for name, value in options.items()}}

    def bind(self, kernel: Any, t: Any, last_group: int = 0, pitch: int | None = None) -> Callable[[torch.Tensor, Any, int], None]:
        """(workspace, tensors of the product, address of ends) -> launches. ``last_group``: whose end is that of all rows; ``pitch``: of
        the workspace's rows, in floats, where they are longer than the output's."""
        *lead, width = t.out.shape
        sample = QuantizeTensors(
            torch.empty((*lead, pitch or width), dtype=torch.float32, device="meta")[..., :width], t.out, t.out_scale)
        quantize = quantize_fp8_cuda.bind_limited(self.problem, self.config, kernel, sample)
        return lambda workspace, t, ends: quantize(QuantizeTensors(workspace, t.out, t.out_scale), ends + 4 * last_group)
