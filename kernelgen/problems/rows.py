"""Problems of the row-wise helpers: rmsnorm and silu_and_mul."""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.problems.common import flag_words


@dataclass(frozen=True)
class RmsNormProblem:
    """rows x width, normalised over width; ``residual``: added to x in place before the norm."""

    rows: int
    width: int
    dtype: str
    weight_dtype: str
    residual: bool = False
    alignment: int = 16
    requires_grad: bool = False

    op = "rmsnorm"

    def __str__(self) -> str:
        return f"rmsnorm[rows={self.rows} width={self.width} {self.dtype}{flag_words(residual=self.residual, grad=self.requires_grad)}]"


@dataclass(frozen=True)
class SiluAndMulProblem:
    """rows x (2 * width) to rows x width: silu(first half) * second half."""

    rows: int
    width: int
    dtype: str
    alignment: int = 16
    requires_grad: bool = False

    op = "silu_and_mul"

    def __str__(self) -> str:
        return f"silu_and_mul[rows={self.rows} width={self.width} {self.dtype}{flag_words(grad=self.requires_grad)}]"
