"""GemmProblem: out = epilogue(a @ b), plain or batched, as CONTRACTS describes the call, without tensors."""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.problems.common import flag_words

GATED_ACTIVATIONS = ("swiglu", "geglu")
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu") + GATED_ACTIVATIONS


@dataclass(frozen=True)
class GemmProblem:
    """One matrix product.

    batch            product of the leading dimensions (1 for a plain product); ``batched_b``: b has them too
    m, n, k          a (.., M, K) @ b (K, N); n is b's N, also where a gated activation halves the output
    a_order, b_order "row" (last dimension contiguous) or "col" (first of the two contiguous)
    activation       None or a name of ACTIVATIONS
    gate_up          "gate_first", "up_first" or "interleaved"; only gated activations look at it
    scales           None, "tensor", "row", "block_128x128", "block_1x128" (fp8 recipe)
    weight_format    None, "int4" or "mxfp4" (packed weights)
    alignment        as in AttentionProblem, over a, b, c, out
    """

    batch: int
    m: int
    n: int
    k: int
    a_dtype: str
    b_dtype: str
    out_dtype: str
    a_order: str = "row"
    b_order: str = "row"
    batched_b: bool = False
    bias: bool = False
    activation: str | None = None
    gate_up: str = "gate_first"
    accumulate_c: bool = False
    scales: str | None = None
    out_scale: str | None = None
    accumulate: str = "float32"
    weight_format: str | None = None
    deterministic: bool = True
    alignment: int = 16
    bias_dtype: str | None = None
    c_dtype: str | None = None
    requires_grad: bool = False

    op = "gemm"

    @property
    def gated(self) -> bool:
        return self.activation in GATED_ACTIVATIONS

    def __str__(self) -> str:
        words = flag_words(bias=self.bias, accumulate_c=self.accumulate_c, nondeterministic=not self.deterministic, grad=self.requires_grad)
        for label, value in (("activation", self.activation), ("scales", self.scales), ("out_scale", self.out_scale),
                             ("weight", self.weight_format)):
            if value:
                words += f" {label}={value}"
        if self.gated:
            words += f" {self.gate_up}"
        if self.alignment < 16:
            words += f" align={self.alignment}"
        batch = f"b={self.batch} " if self.batch != 1 or self.batched_b else ""
        dtype = self.a_dtype if self.a_dtype == self.b_dtype else f"{self.a_dtype}x{self.b_dtype}"
        return (f"gemm[{batch}m={self.m} n={self.n} k={self.k} {dtype}->{self.out_dtype} "
                f"a={self.a_order} b={self.b_order}{words}]")
