"""Matrix products of every recipe, dense and in groups, beside what torch has for them; GemmWorkload is the plain case of suites.

b is always a weight: the transpose of a contiguous (N, K), or of (E, N, K). Operands can be made on the meta device, for decisions
about problems that nobody wants to allocate.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

import kernelgen
from kernelgen.bench.workloads.base import Candidate, Workload, normal, not_installed
from kernelgen.dispatch.backends.product_steps import blocks_of_rows
from kernelgen.dtypes import DTYPES
from kernelgen.ops.gemm import describe_b
from kernelgen.ops.products import as_batch
from kernelgen.ops.weights import PackedWeight
from kernelgen.targets import Target
from kernelgen.tensors import GemmTensors
from kernelgen.testing.tolerance import Comparison, compare

BLOCK, INT4_GROUP, MX_GROUP = 128, 128, 32
_SAMPLE = 128  # rows of an output, and _SAMPLE_COLUMNS columns, that the check looks at: half of them at either end
_SAMPLE_COLUMNS = 2048


@dataclass(frozen=True)
class Recipe:
    """Types of a product. ``scales``, ``accumulate`` and ``weight`` (packed b) as in GemmProblem."""

    name: str
    dtype: str
    scales: str | None = None
    accumulate: str = "float32"
    weight: str | None = None

    @property
    def out(self) -> torch.dtype:
        return torch.bfloat16 if self.scales else DTYPES[self.dtype].torch

    @property
    def weight_bytes(self) -> float:
        """Of an element of b, its scale included."""
        if self.weight is None:
            return DTYPES[self.dtype].bytes
        return 0.5 + (1 / MX_GROUP if self.weight == "mxfp4" else DTYPES[self.dtype].bytes / INT4_GROUP)

    @property
    def ulps(self) -> Callable[[int], float]:
        """K -> ulps of the output that an element may be off, beside what compare() derives.

        "fast" leaves fp8 sums to the tensor core, which cuts them off after some 13 bits every 32 of K: a bf16 has 8.
        """
        return (lambda k: 2.0 + k / 32 / 2**5) if self.accumulate == "fast" else (lambda k: 2.0)


RECIPES: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe("fp32", "fp32"), Recipe("bf16", "bf16"), Recipe("fp16", "fp16"),
        Recipe("fp8-tensor", "e4m3", "tensor"), Recipe("fp8-tensor-fast", "e4m3", "tensor", "fast"),
        Recipe("fp8-row", "e4m3", "row"), Recipe("fp8-row-fast", "e4m3", "row", "fast"),
        Recipe("fp8-block", "e4m3", "block_128x128"), Recipe("fp8-block-1x128", "e4m3", "block_1x128"),
        Recipe("int4", "bf16", weight="int4"), Recipe("mxfp4", "bf16", weight="mxfp4"),
    )
}


# (N, K) of weights, and the rows of a that they are tried with.
SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "deepseek-v3": ((2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)),
    "llama-qwen": ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (57344, 8192)),
}
ROWS = (1, 8, 16, 32, 64, 128, 512, 4096)


@dataclass(frozen=True)
class ProductCase:
    """(M, K) @ (K, N) by a recipe of RECIPES."""

    recipe: str
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"gemm[{self.recipe} m={self.m} n={self.n} k={self.k}]"


@dataclass(frozen=True)
class GroupedCase:
    """``groups`` products of ``rows`` rows each.

    form   "rows": one behind the other; "padded": each padded to a multiple of 128 rows, which are multiplied too; "masked": in
           slabs of that size, of which the counts of rows in use lie on the device
    """

    recipe: str
    form: str
    groups: int
    rows: int
    n: int
    k: int

    @property
    def capacity(self) -> int:
        """Rows that a group has room for."""
        return self.rows if self.form == "rows" else -(-self.rows // BLOCK) * BLOCK

    def __str__(self) -> str:
        return f"grouped[{self.recipe} {self.form} groups={self.groups} rows={self.rows} n={self.n} k={self.k}]"


@dataclass(frozen=True)
class BatchedCase:
    """``batch`` products, as MLA absorbs its weights: one for each head, whose rows lie between those of the other heads, (M, batch, K).

    b_order  "row": weights (batch, K, N); "col": (batch, N, K)
    """

    batch: int
    m: int
    n: int
    k: int
    b_order: str
    recipe: str = "bf16"

    def __str__(self) -> str:
        return f"gemm[{self.recipe} batch={self.batch} m={self.m} n={self.n} k={self.k} {self.b_order}]"


class Operands(NamedTuple):
    """``scale_a_blocks``: scale_a as FlashInfer reads it (``blocks_of_rows``). ``ends``: of groups, or their counts."""

    a: torch.Tensor
    b: Any
    out: torch.Tensor
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    scale_a_blocks: torch.Tensor | None = None
    ends: torch.Tensor | None = None


class Maker:
    """Random tensors of a device, or none at all on "meta"."""

    def __init__(self, device: torch.device | str, generator: torch.Generator | None) -> None:
        self.device, self.generator = torch.device(device), generator

    def values(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.generator is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return normal(shape, torch.bfloat16, self.generator).to(dtype) if dtype.itemsize == 1 else normal(shape, dtype, self.generator)

    def scales(self, shape: tuple[int, ...]) -> torch.Tensor:
        if self.generator is None:
            return torch.empty(shape, device=self.device)
        return torch.rand(shape, device=self.device, generator=self.generator) + 0.5

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def bytes(self, shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        if self.generator is None:
            return self.empty(shape, torch.uint8)
        return torch.randint(low, high, shape, device=self.device, generator=self.generator, dtype=torch.uint8)

    def packed(self, form: str, n: int, k: int, dtype: torch.dtype) -> PackedWeight:
        """Random codes; scales of 0.5 - 1.5, or powers of two from 1/16 to 8."""
        codes = self.bytes((n, k // 2), 0, 256)
        if form == "mxfp4":
            return PackedWeight(form, (n, k), MX_GROUP, codes, self.bytes((n, k // MX_GROUP), 123, 131))
        return PackedWeight(form, (n, k), INT4_GROUP, codes, self.scales((n, k // INT4_GROUP)).to(dtype))

    def scale_pair(self, recipe: str | None, m: int, n: int, k: int, lead: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
        """scale_a, scale_b and scale_a_blocks. Blocks of a lie M-contiguous, those of b K-contiguous: as torch wants them."""
        if recipe is None:
            return {}
        blocks = -(-k // BLOCK)
        if recipe == "tensor":
            return {"scale_a": self.scales(()), "scale_b": self.scales(())}
        if recipe == "row":
            return {"scale_a": self.scales((m, 1)), "scale_b": self.scales((*lead, 1, n))}
        scale_a = self.scales((blocks, m)).mT
        scale_b = self.scales((*lead, n if recipe == "block_1x128" else -(-n // BLOCK), blocks)).mT
        return {"scale_a": scale_a, "scale_b": scale_b, "scale_a_blocks": blocks_of_rows(scale_a)}


class _Products(Workload):
    """What dense products and those in groups share."""

    recipe: Recipe
    op: str

    def operands(self, generator: torch.Generator) -> Operands:
        return self.made(Maker(generator.device, generator))

    @abstractmethod
    def made(self, maker: Maker) -> Operands:
        """Operands by a maker."""

    @abstractmethod
    def arguments(self, o: Operands) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Of the public call, ``out`` and backend left out."""

    def call(self, o: Operands) -> torch.Tensor:
        words, options = self.arguments(o)
        getattr(kernelgen, self.op)(*words, **options, out=o.out, backend="generated")
        return o.out

    def decision(self, operands: Any, target: Target | None = None) -> Any:
        words, options = self.arguments(operands)
        return kernelgen.explain(self.op, *words, **options, out=operands.out, target=target, backend="generated")

    def decision_without_operands(self, target: Target) -> Any:
        return self.decision(self.made(Maker("meta", None)), target)


class ProductWorkload(_Products):
    op = "gemm"

    def __init__(self, case: ProductCase, device: str) -> None:
        self.case, self.device, self.recipe, self.problem = case, device, RECIPES[case.recipe], str(case)
        m, n, k = case.m, case.n, case.k
        self.flops = 2.0 * m * n * k
        self.traffic = self.set_bytes = round(m * k * DTYPES[self.recipe.dtype].bytes + n * k * self.recipe.weight_bytes
                                              + m * n * self.recipe.out.itemsize)
        self._exact: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def made(self, maker: Maker) -> Operands:
        c, dtype = self.case, DTYPES[self.recipe.dtype].torch
        b = maker.packed(self.recipe.weight, c.n, c.k, dtype) if self.recipe.weight else maker.values((c.n, c.k), dtype).t()
        return Operands(maker.values((c.m, c.k), dtype), b, maker.empty((c.m, c.n), self.recipe.out),
                        **maker.scale_pair(self.recipe.scales, c.m, c.n, c.k))

    def arguments(self, o: Operands) -> tuple[tuple[Any, ...], dict[str, Any]]:
        scales = dict(scale_a=o.scale_a, scale_b=o.scale_b) if self.recipe.scales else {}
        return (o.a, o.b), dict(accumulate=self.recipe.accumulate, **scales)

    def tensors(self, o: Operands) -> GemmTensors:
        """As a kernel family binds them."""
        b, _, scale_a, scale_b, zero, _ = describe_b(o.a, o.b, o.scale_a, o.scale_b)
        return GemmTensors(as_batch(o.a), b, as_batch(o.out), scale_a=scale_a, scale_b=scale_b, zero_b=zero)

    def candidates(self) -> list[Candidate]:
        return [Candidate("kernelgen", self.call, peer=False), *_dense_peers(self.recipe)]

    def check(self, operands: Operands, result: torch.Tensor) -> Comparison:
        from kernelgen import reference

        o, c = operands, self.case
        rows, columns = _ends(c.m, _SAMPLE, 1, result.device), _ends(c.n, _SAMPLE_COLUMNS, BLOCK, result.device)
        # Once for all candidates: they are checked on the same operands.
        if self._exact is None or self._exact[0] != o.a.data_ptr():
            words: dict[str, Any] = dict(scale_a=_rows_of(o.scale_a, rows), scale_b=_columns_of(o.scale_b, columns, c.n))
            a, b = _taken(o.a, rows), _weight_columns(o.b, columns)
            exact = reference.gemm(a, b, **words)
            assert isinstance(exact, torch.Tensor)
            self._exact = o.a.data_ptr(), exact, reference.gemm_plain(a, b, out_dtype=self.recipe.out, **words)
        return compare(result[rows][:, columns], *self._exact[1:], what=self.problem, ulps=self.recipe.ulps(c.k))


class GroupedWorkload(_Products):
    def __init__(self, case: GroupedCase, device: str) -> None:
        self.case, self.device, self.recipe, self.problem = case, device, RECIPES[case.recipe], str(case)
        self.op = "grouped_gemm_masked" if case.form == "masked" else "grouped_gemm"
        used, total, size = case.groups * case.rows, case.groups * case.capacity, DTYPES[self.recipe.dtype].bytes
        self.flops = 2.0 * used * case.n * case.k
        weights = case.groups * case.n * case.k * size
        self.traffic = used * (case.k * size + case.n * self.recipe.out.itemsize) + weights
        self.set_bytes = total * (case.k * size + case.n * self.recipe.out.itemsize) + weights

    def made(self, maker: Maker) -> Operands:
        c, dtype = self.case, DTYPES[self.recipe.dtype].torch
        total, masked = c.groups * c.capacity, c.form == "masked"
        a, out = maker.values((total, c.k), dtype), maker.empty((total, c.n), self.recipe.out)
        scales = maker.scale_pair(self.recipe.scales, total, c.n, c.k, (c.groups,))
        ends = [c.rows] * c.groups if masked else [c.capacity * (i + 1) for i in range(c.groups)]
        if masked:
            a, out = a.view(c.groups, c.capacity, c.k), out.view(c.groups, c.capacity, c.n)
            if self.recipe.scales not in (None, "tensor"):
                # (blocks, E * rows) seen as (E, rows, blocks): each group's scales as those of a product of its own.
                scales["scale_a"] = scales["scale_a"].unflatten(0, (c.groups, c.capacity))
        b = maker.values((c.groups, c.n, c.k), dtype).mT
        return Operands(a, b, out, **scales, ends=torch.tensor(ends, dtype=torch.int32, device=maker.device))

    def arguments(self, o: Operands) -> tuple[tuple[Any, ...], dict[str, Any]]:
        scales = dict(scale_a=o.scale_a, scale_b=o.scale_b) if self.recipe.scales else {}
        return (o.a, o.b, o.ends), dict(accumulate=self.recipe.accumulate, **scales)

    def candidates(self) -> list[Candidate]:
        return [Candidate("kernelgen", self.call, peer=False), *_grouped_peers(self.recipe, self.case.form)]

    def check(self, operands: Operands, result: torch.Tensor) -> Comparison:
        """The first and the last group."""
        from kernelgen import reference

        o, c = operands, self.case
        got, exact, plain = [], [], []
        a, out = o.a.reshape(-1, c.k), result.reshape(-1, c.n)
        scale_a = o.scale_a if o.scale_a is None or o.scale_a.dim() < 2 else o.scale_a.reshape(-1, o.scale_a.shape[-1])
        for group in (0, c.groups - 1):
            rows = group * c.capacity + _ends(c.rows, _SAMPLE, 1, result.device)
            columns = _ends(c.n, _SAMPLE_COLUMNS, BLOCK, result.device)
            scale_b = o.scale_b if o.scale_b is None or o.scale_b.dim() < 2 else o.scale_b[group]
            words: dict[str, Any] = dict(scale_a=_rows_of(scale_a, rows), scale_b=_columns_of(scale_b, columns, c.n))
            one, b = _taken(a, rows), _taken(o.b[group], columns, 1)
            value = reference.gemm(one, b, **words)
            assert isinstance(value, torch.Tensor)
            got.append(out[rows][:, columns])
            exact.append(value)
            plain.append(reference.gemm_plain(one, b, out_dtype=self.recipe.out, **words))
        return compare(torch.cat(got), torch.cat(exact), torch.cat(plain), what=self.problem, ulps=self.recipe.ulps(c.k))


class BatchedWorkload(_Products):
    op = "gemm"

    def __init__(self, case: BatchedCase, device: str) -> None:
        self.case, self.device, self.recipe, self.problem = case, device, RECIPES[case.recipe], str(case)
        c = case
        self.flops = 2.0 * c.batch * c.m * c.n * c.k
        self.traffic = self.set_bytes = c.batch * (c.m * c.k + c.k * c.n + c.m * c.n) * self.recipe.out.itemsize

    def made(self, maker: Maker) -> Operands:
        c, dtype = self.case, DTYPES[self.recipe.dtype].torch
        row = c.b_order == "row"
        b = maker.values((c.batch, c.k, c.n) if row else (c.batch, c.n, c.k), dtype)
        a, out = maker.values((c.m, c.batch, c.k), dtype), maker.empty((c.m, c.batch, c.n), self.recipe.out)
        return Operands(a.transpose(0, 1), b if row else b.mT, out.transpose(0, 1))

    def arguments(self, o: Operands) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (o.a, o.b), {}

    def candidates(self) -> list[Candidate]:
        return [Candidate("kernelgen", self.call, peer=False), Candidate("torch", lambda o: torch.bmm(o.a, o.b, out=o.out))]

    def check(self, operands: Operands, result: torch.Tensor) -> Comparison:
        """The first and the last entry."""
        from kernelgen import reference

        rows = _ends(self.case.m, _SAMPLE, 1, result.device)
        a, b, got = (x[[0, -1]] for x in (operands.a[:, rows], operands.b, result[:, rows]))
        exact = reference.gemm(a, b)
        assert isinstance(exact, torch.Tensor)
        return compare(got, exact, reference.gemm_plain(a, b, out_dtype=self.recipe.out), what=self.problem)


Workloads = ProductWorkload | GroupedWorkload | BatchedWorkload


def product_workload(case: ProductCase | GroupedCase | BatchedCase, device: str) -> Workloads:
    if isinstance(case, BatchedCase):
        return BatchedWorkload(case, device)
    return ProductWorkload(case, device) if isinstance(case, ProductCase) else GroupedWorkload(case, device)


def _dense_peers(recipe: Recipe) -> list[Candidate]:
    if recipe.weight:
        return []  # torch has none that reads this layout: the bound of bytes is what a figure is held against
    if recipe.scales is None:
        return [Candidate("torch", lambda o: torch.matmul(o.a, o.b, out=o.out))]
    peers = [Candidate("scaled_mm", partial(_scaled_mm, fast=recipe.accumulate == "fast"))]
    if recipe.scales == "block_128x128":
        peers.append(Candidate("flashinfer", _flashinfer_block, missing=not_installed("flashinfer")))
    return peers


def _scaled_mm(o: Operands, fast: bool) -> torch.Tensor:
    assert o.scale_a is not None and o.scale_b is not None
    return torch._scaled_mm(o.a, o.b, o.scale_a, o.scale_b, out_dtype=o.out.dtype, use_fast_accum=fast)


def _flashinfer_block(o: Operands) -> torch.Tensor:
    from flashinfer.gemm import fp8_blockscale_gemm_sm90

    assert o.scale_b is not None
    return fp8_blockscale_gemm_sm90(o.a, o.b.t(), o.scale_a_blocks, o.scale_b.t(), out=o.out, out_dtype=o.out.dtype)


def _grouped_peers(recipe: Recipe, form: str) -> list[Candidate]:
    """torch's grouped products take rows in groups, bf16 or fp8 by row."""
    if form == "masked" or recipe.scales not in (None, "row"):
        return []
    if recipe.scales is None:
        return [Candidate("grouped_mm", lambda o: torch._grouped_mm(o.a, o.b, offs=o.ends, out_dtype=o.out.dtype))]
    return [Candidate("scaled_grouped_mm", lambda o: torch._scaled_grouped_mm(
        o.a, o.b, o.scale_a.view(-1), o.scale_b.view(o.b.shape[0], -1), offs=o.ends, out_dtype=o.out.dtype,
        use_fast_accum=recipe.accumulate == "fast"))]


def _ends(size: int, sample: int, unit: int, device: torch.device) -> torch.Tensor:
    """Indices of the first and the last half of a sample of ``size``, each beginning at a multiple of ``unit``."""
    if size <= sample:
        return torch.arange(size, device=device)
    last = max(sample // 2, (size - sample // 2) // unit * unit)
    return torch.cat([torch.arange(sample // 2, device=device), torch.arange(last, size, device=device)])


def _taken(x: torch.Tensor, index: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Rows or columns of an operand; fp8 as bytes, since torch indexes those on every device."""
    return x.view(torch.uint8).index_select(dim, index).view(x.dtype) if x.dtype.itemsize == 1 else x.index_select(dim, index)


def _rows_of(scale: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    return scale if scale is None or scale.dim() < 2 else scale[rows]


def _columns_of(scale: torch.Tensor | None, columns: torch.Tensor, n: int) -> torch.Tensor | None:
    """Of scale_b (.., N or blocks): the parts that begin at multiples of a block stay whole blocks."""
    if scale is None or scale.dim() < 2:
        return scale
    if scale.shape[-1] == n:
        return scale[..., columns]
    return scale[..., columns[columns % BLOCK == 0] // BLOCK]


def _weight_columns(b: Any, columns: torch.Tensor) -> Any:
    if not isinstance(b, PackedWeight):
        return _taken(b, columns, 1)
    return PackedWeight(b.format, (len(columns), b.shape[1]), b.group_size, b.codes[columns], b.scale[columns])
