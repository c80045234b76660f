"""What gemm/gemm_mma and gemm/grouped_mma share on the host: how a problem is multiplied, the config, spec and scalars.

The kernels are described in templates/include/kernelgen/gemm/gemm_mma.cuh and the headers it includes; the choices made
here, with their measurements, in docs/design/gemm_portable.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.gemm import row_totals
from kernelgen.kernels.gemm.activations import ACTIVATION_NAMES, activation_words, added, function_parameters, gate_name, splits
from kernelgen.params import ParamStruct
from kernelgen.problems.gemm import FUNCTION, MORE_ACTIVATIONS, GemmProblem
from kernelgen.targets import Target
from kernelgen.tensors import GemmTensors, GroupedGemmTensors
from kernelgen.verdicts import Verdict, first_no

# struct GemmMmaParams of mma_shape.cuh.
PARAMS = ParamStruct((
    ("a", "ptr"), ("b", "ptr"), ("bias", "ptr"), ("c", "ptr"), ("out", "ptr"), ("scale_a", "ptr"), ("scale_b", "ptr"), ("zero_b", "ptr"),
    ("ends", "ptr"),
    ("a_batch", "i64"), ("a_stride", "i64"), ("b_batch", "i64"), ("b_stride", "i64"), ("bias_batch", "i64"),
    ("c_batch", "i64"), ("c_row", "i64"), ("out_batch", "i64"), ("out_row", "i64"),
    ("scale_a_batch", "i64"), ("scale_a_row", "i64"), ("scale_a_block", "i64"),
    ("scale_b_batch", "i64"), ("scale_b_block", "i64"), ("scale_b_column", "i64"),
    ("zero_batch", "i64"), ("zero_block", "i64"), ("zero_column", "i64"),
    ("m", "i32"), ("n", "i32"), ("k", "i32"), ("tiles_m", "i32"), ("tiles_n", "i32"), ("groups", "i32"), ("beta", "f32"),
    ("alpha", "f32"), ("limit", "f32"),
))
PARAMS_TYPE = "kernelgen::GemmMmaParams"

HALVES, FP8, PACKED = ("bf16", "fp16"), ("e4m3", "e5m2"), ("int4", "mxfp4")
OUTPUTS = ("bf16", "fp16", "fp32")
MAX_BLOCKS = (1 << 31) - 1  # grid x
RESERVED_SHARED_MEMORY = 1024  # per block, taken by the driver
_MAX_EXTENT = (1 << 31) - (1 << 16)  # tile indices past the end of m, n and k stay within int32
_REGISTERS_PER_THREAD = 255
_REGISTERS_PER_SM = 65536
# Registers besides accumulators and fragments (addresses of the copies, loop state). With 36 every config of the tables in
# mma_configs.py passes and ptxas 13.0 spills in none of them.
_OTHER_REGISTERS = 36
_FP8_BLOCK = 128  # elements of k and columns that share a scale

_ELEMENTS = {"int4": "int4_code", "mxfp4": "e2m1"}
_SCALE_TYPES = {"e8m0": "kernelgen::uint8_t"}


class TileShape(Protocol):
    """A config, as far as it says what part of the output a block computes."""

    @property
    def block_m(self) -> int: ...

    @property
    def block_n(self) -> int: ...


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Form:
    """How operands become sums.

    bits_a, bits_b    of an element
    row_a, row_b      row order; a packed b has K contiguous
    step_k            elements of k that one load of fragments brings
    words_a, words_b  registers that it takes per 16 rows or columns
    promote_every     elements of k after which sums move on to a second set of accumulators; 0: never
    scale_depth, scale_columns  elements of k and columns that share an entry of scale_b in blocks
    block_scales_a, block_scales_b, row_scales, zero  which scales and zero points there are
    """

    bits_a: int
    bits_b: int
    row_a: bool
    row_b: bool
    step_k: int
    words_a: int
    words_b: int
    promote_every: int = 0
    scale_depth: int = _FP8_BLOCK
    scale_columns: int = 1
    block_scales_a: bool = False
    block_scales_b: bool = False
    row_scales: bool = False
    zero: bool = False

    @property
    def direct(self) -> bool:
        """Fragments are multiplied as they are loaded."""
        return self.step_k == 16 and not self.promote_every


@lru_cache(maxsize=1024)
def form_of(problem: GemmProblem) -> Form:
    """The form of a problem that ``supports_operands`` passes."""
    p = problem
    row_a, row_b = p.a_order == "row", p.b_order == "row" and p.weight_format is None
    if p.weight_format is not None:
        group = p.group_size or 0
        return Form(16, 4, row_a, row_b, 32, 8, 2, min(group & -group, _FP8_BLOCK), group, block_scales_b=True, zero=p.zero_points)
    if p.a_dtype in HALVES:
        return Form(16, 16, row_a, row_b, 16, 4, 4)
    blocks = p.scales in ("block_128x128", "block_1x128")
    return Form(
        8, 8, row_a, row_b, 32, 4, 4, _FP8_BLOCK if blocks or p.accumulate == "float32" else 0,
        scale_columns=_FP8_BLOCK if p.scales == "block_128x128" else 1, block_scales_a=blocks, block_scales_b=blocks,
        row_scales=p.scales in ("tensor", "row"))


def _tile_bytes(rows: int, columns: int, bits: int) -> int:
    """Bytes of an OperandTile: a SharedTile (kernelgen/cuda/shared_tile.cuh) rounded up to 128."""
    chunks = columns * bits // 128
    return ceil_div(rows * 16 * (chunks if chunks % 8 == 0 else chunks | 1), 128) * 128


@dataclass(frozen=True)
class Config:
    """Tile shape and schedule.

    block_m, block_n, block_k  the block's part of the product and the depth of one slot of the ring
    warps_m, warps_n, warps_k  how warps divide them; warps_k sets of warps share the depth of every slot
    stages                     slots of the ring
    blocks_per_sm              bounds the registers so that as many blocks fit
    raster_rows                rows of tiles that neighbouring blocks walk column by column
    """

    block_m: int
    block_n: int
    block_k: int
    warps_m: int
    warps_n: int
    warps_k: int = 1
    stages: int = 3
    blocks_per_sm: int = 1
    raster_rows: int = 8

    def __str__(self) -> str:
        words = f"{self.block_m}x{self.block_n}x{self.block_k} w{self.warps_m}x{self.warps_n}"
        words += f"x{self.warps_k}" if self.warps_k > 1 else ""
        words += f" s{self.stages}"
        words += f" b{self.blocks_per_sm}" if self.blocks_per_sm > 1 else ""
        return words + (f" r{self.raster_rows}" if self.raster_rows != 8 else "")

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n * self.warps_k

    @property
    def warp_tile(self) -> tuple[int, int, int]:
        return self.block_m // self.warps_m, self.block_n // self.warps_n, self.block_k // self.warps_k

    def registers(self, form: Form) -> int:
        """Estimate per thread: accumulators, two sets of loads, widened fragments, scales on their way, the rest."""
        rows, columns, _ = self.warp_tile
        sums = rows * columns // 32 * (2 if form.promote_every else 1)
        loads = 2 * (rows // 16 * form.words_a + columns // 16 * form.words_b)
        widened = 0 if form.direct else (rows // 16 * 4 if form.bits_a == 8 else 0) + 4
        staged = ceil_div(self.scale_entries(form), self.threads)
        return sums + loads + widened + staged + _OTHER_REGISTERS

    def scale_entries(self, form: Form) -> int:
        """Words of a slot's scales and zero points: MmaScales::kBytes / 4 of the header."""
        if not form.block_scales_b:
            return 0
        columns = (self.block_m if form.block_scales_a else 0) + self.block_n * (2 if form.zero else 1)
        return max(1, self.block_k // form.promote_every) * columns

    def shared_memory(self, form: Form) -> int:
        """Dynamic shared memory in bytes: GemmMma::kSharedBytes of the header."""
        a = (self.block_m, self.block_k) if form.row_a else (self.block_k, self.block_m)
        b = (self.block_k, self.block_n) if form.row_b else (self.block_n, self.block_k)
        slot = _tile_bytes(*a, form.bits_a) + _tile_bytes(*b, form.bits_b)
        slab = 16 * (self.block_n // self.warps_n + 8) * 4
        return max(self.stages * slot + (self.stages + 1) * 4 * self.scale_entries(form), self.threads // 32 * slab)


def access(problem: GemmProblem) -> int:
    """Bytes of one access to a and b. The up half of a row-order b starts N / 2 elements into the row, a group of rows anywhere in a
    column of a."""
    form = form_of(problem)
    # Elements are always aligned to their size; the class is that of both operands, a 4-bit b's bytes among them.
    bits = max(problem.alignment, min(form.bits_a, max(form.bits_b, 8)) // 8)
    if splits(problem) and form.row_b:
        bits |= problem.n // 2 * form.bits_b // 8
    if getattr(problem, "grouping", None) == "rows" and not form.row_a:
        bits |= form.bits_a // 8
    return bits & -bits


def tiles(problem: GemmProblem, config: TileShape) -> tuple[int, int]:
    """Along M and N, of one batch entry."""
    return ceil_div(problem.m, config.block_m), ceil_div(problem.n, config.block_n)


def supports_operands(problem: GemmProblem, target: Target, kernel: str) -> Verdict:
    """Can the kernels with mma.sync run the problem on the target at all?"""
    p = problem
    kinds = f"a and b are {p.a_dtype} and {p.b_dtype}, {kernel} takes one 16-bit type, two fp8 ones, or packed b beside a 16-bit a"
    known = (p.weight_format in PACKED and p.a_dtype in HALVES) if p.weight_format is not None else (
        p.a_dtype in FP8 and p.b_dtype in FP8 or p.a_dtype in HALVES and p.a_dtype == p.b_dtype)
    return first_no(
        (target.kind == "cuda" and target.capability >= 80, f"{kernel} needs sm_80 or later, got {target}"),
        (known, kinds),
        (not (p.gathered or p.scattered), f"gathered rows are not in {kernel}, nor scattered ones"),
        (p.out_dtype in (FP8 if p.out_scale else OUTPUTS),
         f"out dtype {p.out_dtype} with out_scale={p.out_scale} is not one of {', '.join(FP8 if p.out_scale else OUTPUTS)}"),
        (p.bias_dtype in (None, *OUTPUTS), f"bias dtype {p.bias_dtype} is not one of {', '.join(OUTPUTS)}"),
        (p.c_dtype in (None, *OUTPUTS), f"c dtype {p.c_dtype} is not one of {', '.join(OUTPUTS)}"),
        (p.activation in (None, *MORE_ACTIVATIONS) or (p.activation == FUNCTION and kernel == "gemm_mma"),
         f"activation {p.activation} is not in {kernel}"),
        (p.scales is None or p.a_dtype in FP8, f"scales={p.scales} with a {p.a_dtype}, {kernel} scales fp8 operands only"),
        (p.weight_format is None or (p.group_size or 0) % 32 == 0 and bool(p.group_size),
         f"a group of {p.group_size} elements shares a scale, {kernel} takes multiples of 32"),
        (p.weight_format is None or p.scale_dtype in (*OUTPUTS, "e8m0"), f"weight scales of {p.scale_dtype} are not in {kernel}"),
        (max(p.m, p.n, p.k) <= _MAX_EXTENT, f"an extent of {max(p.m, p.n, p.k)} exceeds {_MAX_EXTENT}"),
    )


def legal_config(problem: GemmProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the form and the target: divisibility, registers, shared memory?"""
    c, form = config, form_of(problem)
    shared = c.shared_memory(form)
    rows, columns, depth = c.warp_tile
    steps, every = depth // form.step_k, form.promote_every or depth
    limit = min(_REGISTERS_PER_THREAD, _REGISTERS_PER_SM // (c.threads * c.blocks_per_sm))
    lengths = {"a": (c.block_k if form.row_a else c.block_m) * form.bits_a, "b": (c.block_n if form.row_b else c.block_k) * form.bits_b}
    chunks = {name: bits // 128 for name, bits in lengths.items()}
    per_sm = target.shared_memory_per_block + RESERVED_SHARED_MEMORY
    registers, run = c.registers(form), 8 if not form.row_b else 128 // form.bits_b
    return first_no(
        (all(x >= 16 and x & (x - 1) == 0 for x in (rows, columns)),
         f"a warp of config {c} owns {rows}x{columns}, not powers of two from 16"),
        (steps >= 1 and steps & (steps - 1) == 0 and c.block_k % (form.step_k * c.warps_k) == 0,
         f"block_k {c.block_k} is no power of two of steps of {form.step_k} for {c.warps_k} sets of warps"),
        (depth % every == 0 or every % depth == 0, f"a warp's {depth} elements of k do not fit scales of {every} of them"),
        (c.block_k % every == 0 or not form.block_scales_b, f"block_k {c.block_k} is no multiple of the {every} elements of a scale"),
        (c.threads <= 1024 and c.stages >= 2, f"{c.threads} threads, {c.stages} stages: at most 1024 and at least 2"),
        (all(n >= 1 and bits % 128 == 0 and c.threads % n == 0 for n, bits in zip(chunks.values(), lengths.values())),
         f"{c.threads} threads do not copy whole rows of {chunks} chunks"),
        (not splits(problem) or form.row_b or c.threads // chunks["b"] % 8 == 0,
         f"{c.threads} threads copy {c.threads // max(chunks['b'], 1)} columns of b at a time, gate and up need a multiple of 8"),
        (not splits(problem) or columns % (2 * run) == 0, f"a warp's {columns} columns do not hold gate and up in runs of {run}"),
        (registers <= limit, f"config {c} needs about {registers} registers, the limit is {limit}"),
        ((shared + RESERVED_SHARED_MEMORY) * c.blocks_per_sm <= per_sm,
         f"config {c} needs {c.blocks_per_sm} x {shared} bytes of shared memory, {target} has {target.shared_memory_per_block}"),
    )


def spec_words(problem: GemmProblem, config: TileShape) -> str:
    """The part of a spec's name that says dtypes, orders, epilogue and config."""
    p, form = problem, form_of(problem)
    out_dtype = kernel_out_dtype(p)
    bias, addend = p.bias_dtype or out_dtype, p.c_dtype or out_dtype
    words = [p.a_dtype if p.a_dtype == p.b_dtype else f"{p.a_dtype}x{p.b_dtype}", out_dtype,
             ("r" if form.row_a else "c") + ("r" if form.row_b else "c")]
    words += [p.scales] if p.scales in ("block_128x128", "block_1x128") else ["scaled"] if form.row_scales else []
    words += ["fast"] if form.bits_a == 8 and not form.promote_every else []
    words += [f"g{p.group_size}_{p.scale_dtype}"] if p.weight_format else []
    words += ["zeros"] if form.zero else []
    words += [f"bias_{bias}"] if p.bias else []
    words += activation_words(p)
    words += [f"c_{addend}"] if p.accumulate_c else []
    words += [] if access(p) == 16 else [f"a{access(p)}"]
    words += [] if _vector_out(p) else ["scalar_out"]
    return "_".join(words + str(config).split())


def kernel_out_dtype(problem: GemmProblem) -> str:
    """What the product's kernel writes: float32 where another one quantises it."""
    return "fp32" if problem.out_scale else problem.out_dtype


def operand_parameters(problem: GemmProblem, grouping: str = "kNone") -> dict[str, Any]:
    """What templates/gemm/mma_options.cuh.jinja and the epilogues see of dtypes and features; no extents, and nothing of a config."""
    p, out_dtype = problem, kernel_out_dtype(problem)
    scale = p.scale_dtype if p.weight_format and p.scale_dtype else "fp32"
    return dict(
        element_a=p.a_dtype, element_b=_ELEMENTS.get(p.b_dtype, p.b_dtype), product=p.a_dtype if p.a_dtype in HALVES else "fp16",
        out=DTYPES[out_dtype].cuda, bias_type=DTYPES[p.bias_dtype or out_dtype].cuda, c_type=DTYPES[p.c_dtype or out_dtype].cuda,
        scale_type=_SCALE_TYPES.get(scale) or DTYPES[scale].cuda, activation=ACTIVATION_NAMES[p.activation], gate=gate_name(p),
        grouping=grouping, **function_parameters(p), **row_totals.parameters(p), clamped=p.clamped, bias=p.bias,
        accumulate=p.accumulate_c, vector_out=_vector_out(p),
    )


def spec_parameters(problem: GemmProblem, config: Config, grouping: str = "kNone") -> dict[str, Any]:
    """What the templates of gemm_mma and grouped_gemm_mma see: the operands, their orders, alignment class and config; no extents."""
    p, c, form = problem, config, form_of(problem)
    return operand_parameters(p, grouping) | dict(
        block_m=c.block_m, block_n=c.block_n, block_k=c.block_k, warps_m=c.warps_m, warps_n=c.warps_n, warps_k=c.warps_k,
        stages=c.stages, blocks_per_sm=c.blocks_per_sm, raster_rows=c.raster_rows, row_a=form.row_a, row_b=form.row_b, access=access(p),
        promote_every=form.promote_every, scale_depth=form.scale_depth, scale_columns=form.scale_columns,
        block_scales_a=form.block_scales_a, block_scales_b=form.block_scales_b, row_scales=form.row_scales, zero=form.zero,
        shared_memory=c.shared_memory(form),
    )


def _vector_out(p: GemmProblem) -> bool:
    """Rows of c and out take 16-byte accesses; those of a workspace are as long as the output is wide."""
    return p.out_alignment == 16 and (p.out_scale is None or p.outputs % 4 == 0)


def _batch_stride(t: torch.Tensor | None, size: int = 1) -> int:
    """Of the first dimension, times ``size``; 0 where its one entry is shared."""
    return 0 if t is None or t.shape[0] == 1 else t.stride(0) * size


def _strides(t: torch.Tensor | None, names: tuple[str, str], dims: tuple[int, int]) -> dict[str, int]:
    return {name: 0 if t is None else t.stride(dim) for name, dim in zip(names, dims)}


def scalars(problem: GemmProblem, config: TileShape, t: GemmTensors | GroupedGemmTensors) -> dict[str, int | float]:
    """Everything of Params that is fixed by shapes, strides and scalars."""
    p, form = problem, form_of(problem)
    tiles_m, tiles_n = tiles(p, config)
    size_a, size_b = t.a.element_size(), t.b.element_size()
    # A packed b is (.., N, K / 2): its rows are columns of the product. A workspace is contiguous.
    dim_b = 1 if form.row_b or p.weight_format else 2
    out = torch.empty(t.out.shape, device="meta") if p.out_scale else t.out
    values: dict[str, int | float] = {
        "a_batch": _batch_stride(t.a, size_a), "a_stride": t.a.stride(1 if form.row_a else 2) * size_a,
        "b_batch": _batch_stride(t.b, size_b), "b_stride": t.b.stride(dim_b) * size_b,
        "bias_batch": _batch_stride(t.bias) if t.bias is not None and t.bias.dim() == 2 else 0,
        "c_batch": _batch_stride(t.c), "c_row": t.c.stride(1) if t.c is not None else 0,
        "out_batch": _batch_stride(out), "out_row": out.stride(1),
        "scale_a_batch": _batch_stride(t.scale_a), "scale_b_batch": _batch_stride(t.scale_b), "zero_batch": _batch_stride(t.zero_b),
        "m": p.m, "n": p.n, "k": p.k, "tiles_m": tiles_m, "tiles_n": tiles_n, "groups": p.batch, "beta": t.beta,
        "alpha": t.alpha, "limit": t.limit,
    }
    values |= _strides(t.scale_a, ("scale_a_row", "scale_a_block"), (1, 2))
    values |= _strides(t.scale_b, ("scale_b_block", "scale_b_column"), (1, 2))
    return values | _strides(t.zero_b, ("zero_block", "zero_column"), (1, 2))


def _addresses(problem: GemmProblem) -> Callable[[Any, torch.Tensor, int], bytes]:
    """(tensors, out, address of ends) -> the pointers of Params, null where the problem has no such tensor."""
    p, form = problem, form_of(problem)
    pack = PARAMS.pointer_packer.pack
    scaled = form.row_scales or form.block_scales_b
    scaled_a = scaled and p.weight_format is None
    with_bias, with_c = p.bias or p.epilogue is not None, p.accumulate_c or row_totals.reduces(p)

    def pointers(t: Any, out: torch.Tensor, ends: int) -> bytes:
        return pack(
            t.a.data_ptr(), t.b.data_ptr(), added(p, t).data_ptr() if with_bias else 0, t.c.data_ptr() if with_c else 0,
            out.data_ptr(), t.scale_a.data_ptr() if scaled_a else 0, t.scale_b.data_ptr() if scaled else 0,
            t.zero_b.data_ptr() if form.zero else 0, ends)

    return pointers


def closure(
    problem: GemmProblem, config: TileShape, launch: Callable[[bytes], None], tensors: Any,
    quantize: Callable[[torch.Tensor, Any, int], None] | None = None,
) -> Callable[[Any], None]:
    """The closure of a repeated call: packs addresses, launches. ``quantize(workspace, tensors, address of ends)`` follows."""
    tail, pointers = PARAMS.pack_scalars(scalars(problem, config, tensors)), _addresses(problem)
    grouped, shape, device = problem.op == "grouped_gemm", tuple(tensors.out.shape), tensors.out.device

    def run(t: Any, parts: torch.Tensor | None = None) -> None:
        if parts is not None:
            t = t._replace(c=parts)  # where the kernel finds them
        ends = t.ends.data_ptr() if grouped else 0
        if quantize is None:
            launch(pointers(t, t.out, ends) + tail)
            return
        workspace = torch.empty(shape, dtype=torch.float32, device=device)
        launch(pointers(t, workspace, ends) + tail)
        quantize(workspace, t, ends)

    return run
