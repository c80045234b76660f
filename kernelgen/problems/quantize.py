"""QuantizeProblem: floating values to fp8 codes and their scales."""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.problems.common import flag_words
from kernelgen.problems.gemm import GATED_ACTIVATIONS

RECIPES = ("tensor", "row", "block_1x128", "block_128x128")


@dataclass(frozen=True)
class QuantizeProblem:
    """activation(x (batch, rows, width or 2 width)) to codes (batch, rows, width) and float32 scales.

    recipe       one of RECIPES: which codes share a scale; blocks of 128 rows begin anew in every batch entry
    activation   None, or as in GemmProblem; a gated one halves the width of x, and ``gate_up`` says how
    alignment    as in AttentionProblem, over x and codes
    """

    batch: int
    rows: int
    width: int
    dtype: str
    code_dtype: str = "e4m3"
    recipe: str = "tensor"
    activation: str | None = None
    gate_up: str = "gate_first"
    alignment: int = 16
    requires_grad: bool = False

    op = "quantize_fp8"
    limited = False

    @property
    def gated(self) -> bool:
        return self.activation in GATED_ACTIVATIONS

    def __str__(self) -> str:
        words = f" activation={self.activation}" if self.activation else ""
        words += f" {self.gate_up}" if self.gated else ""
        words += " limited" if self.limited else ""
        words += f" align={self.alignment}" if self.alignment < 16 else ""
        batch = f"b={self.batch} " if self.batch != 1 else ""
        return (f"quantize_fp8[{batch}rows={self.rows} width={self.width} {self.dtype}->{self.code_dtype} {self.recipe}{words}"
                f"{flag_words(grad=self.requires_grad)}]")


@dataclass(frozen=True)
class LimitedQuantizeProblem(QuantizeProblem):
    """Of which only the first rows mean anything, as many as the tensors' ``row_ends`` says on the device. A kernel may stop there; what
    it writes behind is unspecified. A step of a composition, never a call of its own; not of recipe "tensor".
    """

    limited = True
