"""GemmProblem and GroupedGemmProblem: out = epilogue(a @ b), as CONTRACTS describes the calls, without tensors.

What the tensors of a call look like to a kernel, scales included: GemmTensors and GroupedGemmTensors in tensors.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelgen.problems.common import flag_words

GATED_ACTIVATIONS = ("swiglu", "geglu")
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu") + GATED_ACTIVATIONS
# What moe asks for beside them, of kernels whose verdict names MORE_ACTIVATIONS: the same arithmetic with other functions, and
# with gate and up clamped first (the tensors carry alpha and limit).
MORE_GATED = ("geglu_tanh", "reglu", "swiglu_oai", "swiglu_clamped", "geglu_clamped", "geglu_tanh_clamped", "reglu_clamped")
MORE_ACTIVATIONS = (*ACTIVATIONS, "relu2", *MORE_GATED)
# The activation of a problem with a user's epilogue: none of those that verdicts list, so that only who asks for ``epilogue`` has it.
FUNCTION = "function"


@dataclass(frozen=True)
class GemmProblem:
    """One matrix product.

    batch            product of the leading dimensions (1 for a plain product); ``batched_b``: b has them too
    m, n, k          a (.., M, K) @ b (K, N); n is b's N, also where a gated activation halves the output
    a_order, b_order "row" (last dimension contiguous) or "col" (first of the two contiguous)
    activation       None or a name of ACTIVATIONS; moe also asks for others of MORE_ACTIVATIONS; FUNCTION: ``epilogue``
    epilogue         None, or the TracedEpilogue in the place of bias, activation and c
    gate_up          "gate_first", "up_first" or "interleaved"; only gated activations look at it
    scales           fp8 recipe: None; "tensor" (one scale each); "row" (one per row of a, one per column of b; one of the two may
                     be a single scale, whose strides are 0); "block_128x128" or "block_1x128" (what b's blocks are; a's are 1 x 128)
    out_scale        None, "tensor", "row" or "block_1x128": the output is quantised to ``out_dtype``, an fp8 type
    accumulate       "float32": error does not grow with K; "fast": what the tensor core's own sums give
    weight_format    None, "int4" or "mxfp4": b is packed. ``b_dtype`` says the same; ``group_size``: elements of K that share a
                     scale; ``scale_dtype``: type of the scales, "e8m0" for mxfp4; ``zero_points``: int4 with zero points
    alignment        as in AttentionProblem, of a and b (its codes where it is packed); ``out_alignment``: of c and out. Scales count in
                     neither
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
    out_alignment: int = 16
    bias_dtype: str | None = None
    c_dtype: str | None = None
    requires_grad: bool = False
    group_size: int | None = None
    scale_dtype: str | None = None
    zero_points: bool = False
    epilogue: Any = None

    op = "gemm"
    gathered = False
    scattered = False

    @property
    def outputs(self) -> int:
        """Columns of the output."""
        return self.n // 2 if self.gated else self.n

    @property
    def gated(self) -> bool:
        gated_function = self.epilogue is not None and self.epilogue.gated
        return self.activation in GATED_ACTIVATIONS or self.activation in MORE_GATED or gated_function

    @property
    def clamped(self) -> bool:
        """Gate and up are clamped to the tensors' ``limit``."""
        return self.activation == "swiglu_oai" or (self.activation or "").endswith("_clamped")

    def __str__(self) -> str:
        batch = f"b={self.batch} " if self.batch != 1 or self.batched_b else ""
        return f"gemm[{batch}{self._words()}]"

    def _words(self) -> str:
        """Extents, types, orders, features."""
        words = flag_words(bias=self.bias, accumulate_c=self.accumulate_c, zero_points=self.zero_points,
                           nondeterministic=not self.deterministic, grad=self.requires_grad)
        named = ("activation", self.activation) if self.epilogue is None else ("epilogue", self.epilogue)
        reduces = None if self.epilogue is None else "+".join(self.epilogue.kinds)
        for label, value in (named, ("reduces", reduces), ("scales", self.scales), ("out_scale", self.out_scale),
                             ("weight", self.weight_format), ("group", self.group_size)):
            if value:
                words += f" {label}={value}"
        if self.gated:
            words += f" {self.gate_up}"
        if self.accumulate != "float32":
            words += f" accumulate={self.accumulate}"
        for label, value in (("align", self.alignment), ("out_align", self.out_alignment)):
            if value < 16:
                words += f" {label}={value}"
        dtype = self.a_dtype if self.a_dtype == self.b_dtype else f"{self.a_dtype}x{self.b_dtype}"
        return (f"m={self.m} n={self.n} k={self.k} {dtype}->{self.out_dtype} "
                f"a={self.a_order} b={self.b_order}{words}")


@dataclass(frozen=True)
class GroupedGemmProblem(GemmProblem):
    """One product per group, the groups' sizes being values on the device: the fields of GemmProblem, read so:

    grouping   "rows"    a (m, k) @ b (batch, k, n) to (m, n): rows of a in groups, one behind the other
               "masked"  a (batch, m, k) @ b (batch, k, n) to (batch, m, n): the first rows of each a count
               "k"       a (m, k) @ b (k, n) to (batch, m, n): K in groups, one behind the other
    batch      number of groups
    m, k       of all groups together where they are what is grouped
    batched_b  b has one matrix per group: true but for "k"
    """

    grouping: str = "rows"

    op = "grouped_gemm"

    def __str__(self) -> str:
        gathered = "gathered " if self.gathered else "scattered " if self.scattered else ""
        return f"grouped_gemm[{self.grouping} {gathered}groups={self.batch} {self._words()}]"


@dataclass(frozen=True)
class GatheredGemmProblem(GroupedGemmProblem):
    """Of which a has ``tokens`` rows, and the tensors' ``rows`` names that of each of the m rows of the product. A step of a composition,
    never a call of its own; grouping "rows".
    """

    tokens: int = 0

    gathered = True


@dataclass(frozen=True)
class ScatteredGemmProblem(GroupedGemmProblem):
    """Of which out has ``tokens`` rows: each of the m rows of the product is multiplied by its entry of the tensors' ``row_weights``,
    rounded, and added to the row of out that ``rows`` names. What is added first differs from call to call. A step of a composition;
    grouping "rows".
    """

    tokens: int = 0

    scattered = True
