"""Host side of gemm/gemm_cpu: matrix products of 16 to 64-bit, fp8 and packed operands with a fused epilogue in generated C++.

The kernel and its data flow are described in templates/include/kernelgen/gemm/gemm_cpu.h; the choices made here, with
their measurements, in docs/design/gemm_portable.md. Grouped products (grouped_gemm_cpu.py) share the kernel and most of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm.activations import ACTIVATION_NAMES, activation_words, added, function_parameters, gate_name
from kernelgen.kernels.gemm.row_totals import with_totals
from kernelgen.params import ParamStruct
from kernelgen.problems.gemm import FUNCTION, MORE_ACTIVATIONS, GemmProblem, GroupedGemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import GemmTensors, GroupedGemmTensors
from kernelgen.verdicts import Verdict, first_no

_POINTERS = ("a", "b", "bias", "c", "out", "scale_a", "scale_b", "zero_b", "ends", "codes", "out_scale")
_NUMBERS = (
    "a_batch", "a_row", "a_column", "b_batch", "b_row", "b_column", "bias_batch", "c_batch", "c_row", "out_batch", "out_row",
    "scale_a_batch", "scale_a_row", "scale_a_segment", "scale_b_batch", "scale_b_segment", "scale_b_column",
    "zero_b_batch", "zero_b_segment", "zero_b_column", "codes_batch", "codes_row",
    "out_scale_batch", "out_scale_row", "out_scale_block", "batch", "m", "n", "k", "block_m", "block_n", "block_k",
    "tasks_m", "tasks_n", "b_offset", "scales_offset", "sums_offset", "amax_offset", "quantize_rows", "quantize_tasks",
)
# struct GemmCpuParams of gemm_params.h.
PARAMS = ParamStruct((*((name, "ptr") for name in _POINTERS), *((name, "i64") for name in _NUMBERS),
                      *((name, "f64") for name in ("beta", "alpha", "limit"))))
ENTRIES = ("gemm_cpu", "find_largest", "quantize")  # the first alone where the output is not quantised

FLOATS, FP8 = ("fp32", "bf16", "fp16"), ("e4m3", "e5m2")
_GROUPINGS = {None: "kNone", "rows": "kRows", "masked": "kMasked", "k": "kK"}
_RECIPES = {"tensor": "kTensor", "row": "kRow", "block_1x128": "kBlock1x128"}
_CODES = {"e4m3": "kernelgen::Fp8E4M3", "e5m2": "kernelgen::Fp8E5M2"}
_PACKED = {"int4": "kernelgen::Int4", "mxfp4": "kernelgen::Mxfp4"}
_BLOCK = 128  # elements of k, and columns of b, that share a scale of an fp8 block recipe


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(value: int, unit: int) -> int:
    return _ceil_div(value, unit) * unit


def grouping(problem: GemmProblem) -> str | None:
    return problem.grouping if isinstance(problem, GroupedGemmProblem) else None


def segment(problem: GemmProblem) -> int | None:
    """Elements of k that share a scale, where scales change along k."""
    if problem.weight_format:
        return problem.group_size
    return _BLOCK if problem.scales in ("block_128x128", "block_1x128") else None


@dataclass(frozen=True)
class Tiling:
    """The register tile of a dtype at an ISA level; the rendered file asserts that the header agrees.

    rows, vecs   of the tile: rows of a by registers of columns of b
    width        columns of b
    depth        elements of k in one step: 2 where bf16 pairs are multiplied
    packed, sum  bytes of an element as packed, of an accumulator
    """

    rows: int
    vecs: int
    width: int
    depth: int
    packed: int
    sum: int

    @staticmethod
    def of(problem: GemmProblem, isa: str, thin: bool = False) -> Tiling:
        wide = isa != "x86-64-v3"
        # What is exact in bf16 is multiplied in pairs. The thin form widens all but bf16 on both sides as it reads.
        narrow = problem.a_dtype == problem.b_dtype == "bf16" if thin else problem.a_dtype in ("bf16", *FP8)
        pairs = isa == "x86-64-v4-bf16" and narrow
        sum_bytes = 8 if problem.a_dtype == "fp64" else 4
        # Both fill the registers with accumulators (microkernel.h); gate and up want an even number of registers.
        rows, vecs = (8, 2) if wide else (6, 2) if problem.gated else (4, 3)
        return Tiling(rows, vecs, vecs * (64 if wide else 32) // sum_bytes, 2 if pairs else 1, 2 if pairs else sum_bytes, sum_bytes)


@dataclass(frozen=True)
class Config:
    """Blocks of a task, in outputs and in elements of k. None is compiled in; block_k decides the order of summation.

    thin  the form for up to four rows, which reads b where it lies (gemm_thin.h); its tasks own all rows and all of k. In a
          grouped product: for the groups that have no more
    """

    block_m: int
    block_n: int
    block_k: int
    thin: bool = False

    def __str__(self) -> str:
        return f"thin x{self.block_n}" if self.thin else f"{self.block_m}x{self.block_n}x{self.block_k}"


def _operand_verdict(p: GemmProblem) -> Verdict:
    if p.weight_format:
        return first_no(
            (p.a_dtype in FLOATS, f"a is {p.a_dtype} beside a packed weight, gemm_cpu takes one of {', '.join(FLOATS)}"),
            (p.weight_format in _PACKED, f"packed {p.weight_format} weights are not in gemm_cpu"),
            ((p.group_size or 0) % 16 == 0, f"groups of {p.group_size} are no multiple of 16"),
        )
    if p.a_dtype in FP8:
        return first_no(
            (p.b_dtype in FP8, f"a and b are {p.a_dtype} and {p.b_dtype}, expected two fp8 types"),
            (p.scales is not None, f"{p.a_dtype} operands without scales are not in gemm_cpu"),
        )
    return first_no(
        (p.a_dtype in (*FLOATS, "fp64") and p.a_dtype == p.b_dtype,
         f"a and b are {p.a_dtype} and {p.b_dtype}, gemm_cpu takes one of fp64, fp32, bf16 and fp16, or two fp8 types"),
        (p.scales is None, f"scales={p.scales} of {p.a_dtype} operands are not in gemm_cpu"),
    )


def supports(problem: GemmProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    family = ("fp64",) if p.a_dtype == "fp64" else FLOATS
    outputs = FP8 if p.out_scale and p.a_dtype != "fp64" else family
    operands = _operand_verdict(p)
    return first_no(
        (target.kind == "cpu", f"gemm_cpu needs a CPU, got {target}"),
        (operands.ok, operands.reason),
        (not (p.gathered or p.scattered), "gathered and scattered rows are not in gemm_cpu"),
        (p.out_dtype in outputs, f"out dtype {p.out_dtype} with {p.a_dtype} inputs and out_scale={p.out_scale} is not one of "
                                 f"{', '.join(outputs)}"),
        (p.bias_dtype in (None, *family), f"bias dtype {p.bias_dtype} with {p.a_dtype} inputs is not one of {', '.join(family)}"),
        (p.c_dtype in (None, *family), f"c dtype {p.c_dtype} with {p.a_dtype} inputs is not one of {', '.join(family)}"),
        (p.activation in (None, FUNCTION, *MORE_ACTIVATIONS), f"activation {p.activation} is not in gemm_cpu"),
    )


# Of the thin form: the largest m for which it beats packing b in every dtype and order (Zen 4, 2048 x 2048 b).
THIN_ROWS = 4
# Scratch of a thread: must stay inside its share of the L3 cache to be of any use.
_SCRATCH_LIMIT = 64 << 20


def _thin_scratch(problem: GemmProblem, target: Target, config: Config) -> int:
    """Rows of a, sums, and the sums of one segment with its scales."""
    t, halves = Tiling.of(problem, target.isa, thin=True), 2 if problem.gated else 1
    register = (64 if target.isa != "x86-64-v3" else 32) // t.sum * t.depth
    rows = round_up(THIN_ROWS * round_up(problem.k, register) * t.packed, 64)
    return rows + (THIN_ROWS * (halves + 1) + 1) * config.block_n * t.sum


def _scratch(problem: GemmProblem, target: Target, config: Config) -> tuple[int, int, int, int]:
    """Bytes in front of b's panel, of the scales and of the sums, and of all scratch. 64 bytes lie between them, so that
    no two panels share a cache line."""
    t, c = Tiling.of(problem, target.isa), config
    rows, outputs = round_up(c.block_m, t.rows), t.width // 2 if problem.gated else t.width
    b = round_up(rows * c.block_k * t.packed, 64) + 64
    scales = b + round_up(t.width * c.block_k * t.packed, 64) + 64
    segments = _ceil_div(c.block_k, segment(problem) or c.block_k)
    sums = scales + (round_up(segments * (t.width + rows) * t.sum, 64) + 64 if segment(problem) else 0)
    tiles = (rows // t.rows) * _ceil_div(c.block_n, outputs) if problem.k > c.block_k else 1
    total = sums + tiles * t.rows * t.width * t.sum
    if c.thin:
        thin = _thin_scratch(problem, target, c)
        total = thin if grouping(problem) is None else max(thin, total)
    return b, scales, sums, total


def _scattered(problem: GemmProblem) -> bool:
    """Gate columns lie apart in rows of b: the thin form does not read such."""
    return problem.gated and problem.gate_up == "interleaved" and problem.b_order == "row"


def legal(problem: GemmProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit: whole steps of k, scratch?"""
    c, t, grouped = config, Tiling.of(problem, target.isa), grouping(problem)
    scratch, part = _scratch(problem, target, c)[3], segment(problem)
    return first_no(
        (not c.thin or grouped is not None or problem.m <= THIN_ROWS, f"config {c} takes up to {THIN_ROWS} rows, got m={problem.m}"),
        (not c.thin or grouped != "k", f"config {c} owns all of k, got groups of it"),
        (not c.thin or not _scattered(problem), f"config {c} needs gate columns beside each other, got interleaved ones in row order"),
        (min(c.block_m, c.block_n, c.block_k) >= 1, f"config {c} has an empty block"),
        (c.block_k % (part or t.depth) == 0, f"block_k {c.block_k} is not a multiple of the {part or t.depth} elements of a "
                                             f"{'segment' if part else 'step'}"),
        (grouped != "k" or not part or c.block_k == part, f"block_k {c.block_k}: a group of k may begin inside a segment, expected {part}"),
        (scratch <= _SCRATCH_LIMIT, f"config {c} needs {scratch} bytes of scratch a thread, at most {_SCRATCH_LIMIT}"),
    )


# A panel of b takes three quarters of a 32 KB L1; 512 rows of a in panels of that depth take 400 KB of L2. Between half
# and twice these sizes the speed of a Zen 4 core stays within 3 %.
_PANEL_BYTES = 24 << 10
_ROWS = 512
_COLUMNS = 1024


def _block_k(problem: GemmProblem, target: Target) -> int:
    """The depth of a panel: whole segments. Never depends on extents: it fixes the bits."""
    t, part = Tiling.of(problem, target.isa), segment(problem)
    depth = _PANEL_BYTES // (t.width * t.packed)
    if part is None:
        return depth
    return part if grouping(problem) == "k" else max(depth // part, 1) * part


def candidates(problem: GemmProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first: few rows take the thin form; blocks are halved until every core has four tasks."""
    rows, columns, block_k = _ROWS, _COLUMNS, _block_k(problem, target)
    wanted = 4 * max(target.sm_count, 1)
    one_row_group = grouping(problem) == "rows"  # its rows are not counted once per group
    grouped_thin = grouping(problem) in ("rows", "masked")
    thin = Config(THIN_ROWS, max(64, min(_COLUMNS, round_up(_ceil_div(problem.outputs, wanted), 64))), block_k, thin=True)

    def tasks() -> int:
        return _ceil_div(problem.m, rows) * _ceil_div(problem.outputs, columns) * (1 if one_row_group else problem.batch)

    while tasks() < wanted and (rows > 32 or columns > 64):
        if columns >= 2 * rows:
            columns //= 2
        else:
            rows //= 2
    packed = Config(rows, columns, block_k)
    first = replace(packed, thin=True) if grouped_thin else thin
    for option in dict.fromkeys((first, packed, Config(_ROWS, _COLUMNS, block_k))):
        if legal(problem, target, option):
            yield option


def spec(problem: GemmProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, scales and epilogue. Orders, extents and blocks are run-time values."""
    p, grouped, part = problem, grouping(problem), segment(problem)
    t = Tiling.of(problem, target.isa, thin=config.thin and grouped is None)
    out = "fp32" if p.out_scale else p.out_dtype
    bias, addend = p.bias_dtype or out, p.c_dtype or out
    scaled = "kSegments" if part else "kProduct" if p.scales else "kNone"
    parameters: dict[str, Any] = dict(
        element=DTYPES[p.a_dtype].cpp, element_b=_PACKED[p.weight_format] if p.weight_format else DTYPES[p.b_dtype].cpp,
        out=DTYPES[out].cpp, bias_type=DTYPES[bias].cpp, c_type=DTYPES[addend].cpp, scale_type=_scale_type(p),
        tile_rows=t.rows, tile_vecs=t.vecs, tile_width=t.width, depth=t.depth, packed_bytes=t.packed, sum_bytes=t.sum,
        bias=p.bias, activation=ACTIVATION_NAMES[p.activation], gate=gate_name(p),
        **function_parameters(p, "double" if p.a_dtype == "fp64" else "float"), clamped=p.clamped,
        accumulate=p.accumulate_c, scales=scaled, segment=part or _BLOCK, scaled_a=p.scales is not None,
        scale_columns=_BLOCK if p.scales == "block_128x128" else 1, zero_points=p.zero_points, grouping=_GROUPINGS[grouped],
        code=_CODES[p.out_dtype] if p.out_scale else "", recipe=_RECIPES[p.out_scale] if p.out_scale else "",
        header="gemm_grouped" if grouped and config.thin else "gemm_thin" if config.thin else "gemm_cpu",
        kernel="GemmGroupedCpu" if grouped and config.thin else "GemmThinCpu" if config.thin else "GemmCpu",
    )
    return KernelSpec.make(
        "_".join(["gemm_cpu", *_spec_words(p, config, bias, addend)]), "gemm/gemm_cpu.cc.jinja", "cxx", parameters,
        params=PARAMS, params_type="kernelgen::GemmCpuParams", entries=ENTRIES if p.out_scale else ENTRIES[:1], target=target,
    )


def _scale_type(p: GemmProblem) -> str:
    """Of b."""
    return "kernelgen::E8M0" if p.scale_dtype == "e8m0" else DTYPES[p.scale_dtype].cpp if p.scale_dtype else "float"


def _spec_words(p: GemmProblem, config: Config, bias: str, addend: str) -> list[str]:
    grouped = grouping(p)
    words = [f"grouped_{grouped}"] if grouped else []
    words += ["thin"] if config.thin else []
    words += [p.a_dtype] if p.a_dtype == p.b_dtype else [p.a_dtype, p.b_dtype]
    words += [f"g{p.group_size}", p.scale_dtype or ""] if p.weight_format else []
    words += ["zero"] if p.zero_points else []
    words += [{"tensor": "scaled", "row": "scaled"}.get(p.scales, p.scales)] if p.scales else []
    words += [p.out_dtype]
    words += [f"bias_{bias}"] if p.bias else []
    words += activation_words(p)
    words += [f"c_{addend}"] if p.accumulate_c else []
    words += [f"to_{p.out_scale}"] if p.out_scale else []
    return words


# Elements of a task that quantises: some ten microseconds.
_QUANTIZE_ELEMENTS = 1 << 15


def _strides(t: torch.Tensor | None, *names: str) -> dict[str, int]:
    """A stride per name in order of dimensions; zeros without a tensor."""
    return {name: t.stride(i) if t is not None else 0 for i, name in enumerate(names)}


def _all_strides(p: GemmProblem, t: GemmTensors | GroupedGemmTensors) -> dict[str, int]:
    """Strides of every operand. What entries or groups share, or what is grouped itself, has a batch stride of 0."""
    packed = p.weight_format is not None
    strides = _strides(t.a, "a_batch", "a_row", "a_column") | _strides(t.b, "b_batch", *("b_column",) if packed else ("b_row", "b_column"))
    # With k = 1 a column order may come with any stride along k; the thin form tells the orders apart by it.
    strides |= {"b_row": 0} if packed else {"b_row": 1} if p.b_order == "col" else {}
    strides |= _strides(t.c, "c_batch", "c_row") | {"bias_batch": t.bias.stride(0) if t.bias is not None and t.bias.dim() == 2 else 0}
    strides |= _strides(t.scale_a, "scale_a_batch", "scale_a_row", "scale_a_segment")
    strides |= _strides(t.scale_b, "scale_b_batch", "scale_b_segment", "scale_b_column")
    strides |= _strides(t.zero_b, "zero_b_batch", "zero_b_segment", "zero_b_column")
    strides |= _strides(t.out if p.out_scale else None, "codes_batch", "codes_row")
    strides |= _strides(t.out_scale, "out_scale_batch", "out_scale_row", "out_scale_block")
    if p.out_scale:  # the workspace of sums is contiguous
        strides |= {"out_batch": p.m * p.outputs, "out_row": p.outputs}
    else:
        strides |= _strides(t.out, "out_batch", "out_row")
    one_a, one_b = grouping(p) in ("rows", "k"), not p.batched_b
    one_out = grouping(p) == "rows"
    shared = ["a_batch", "scale_a_batch"] * one_a + ["b_batch", "scale_b_batch", "zero_b_batch"] * one_b
    shared += ["c_batch", "out_batch", "codes_batch", "out_scale_batch"] * one_out
    return strides | dict.fromkeys(shared, 0)


def _fitted(p: GemmProblem, target: Target, config: Config) -> Config:
    """Blocks no larger than the problem."""
    depth = Tiling.of(p, target.isa).depth
    block_k = min(config.block_k, max(round_up(p.k, depth), depth))
    columns = round_up(p.outputs, 16) if config.thin else p.outputs  # the thin form adds whole registers
    return replace(config, block_m=min(config.block_m, max(p.m, 1)), block_n=min(config.block_n, max(columns, 1)), block_k=block_k)


def bind(
    problem: GemmProblem, config: Config, kernel: Any, tensors: GemmTensors | GroupedGemmTensors,
) -> Callable[[Any], None]:
    """The closure of a repeated call: packs addresses, runs the tasks. An empty output has none."""
    p, t, grouped = problem, tensors, grouping(problem)
    target = kernel.spec.target
    c = _fitted(p, target, config)
    entries = 1 if grouped == "rows" else p.batch
    tasks_n = _ceil_div(p.outputs, c.block_n)
    # Rows in groups: every group may end with a block that is not full.
    tasks_m = p.m // c.block_m + min(p.batch, p.m) if grouped == "rows" else _ceil_div(p.m, c.block_m)
    b_offset, scales_offset, sums_offset, scratch = _scratch(p, target, c)
    quantize_rows = max(1, _QUANTIZE_ELEMENTS // max(p.outputs, 1))
    quantize_tasks = max(entries, 1) * max(_ceil_div(p.m, quantize_rows), 1)
    phases = [(0, tasks_m * tasks_n * entries)]
    phases += [(1, quantize_tasks)] if p.out_scale == "tensor" else []
    phases += [(2, quantize_tasks)] if p.out_scale else []
    launch = kernel.prepare(phases=tuple(phases), scratch_bytes=scratch)
    tail = PARAMS.pack_scalars(_all_strides(p, t) | {
        "batch": p.batch, "m": p.m, "n": p.outputs, "k": p.k, "block_m": c.block_m, "block_n": c.block_n, "block_k": c.block_k,
        "tasks_m": tasks_m, "tasks_n": tasks_n, "b_offset": b_offset, "scales_offset": scales_offset, "sums_offset": sums_offset,
        "amax_offset": entries * p.m * p.outputs, "quantize_rows": quantize_rows, "quantize_tasks": quantize_tasks, "beta": t.beta,
        "alpha": t.alpha, "limit": t.limit,
    })
    pack = PARAMS.pointer_packer.pack
    work = entries * p.m * p.outputs + quantize_tasks if p.out_scale else 0

    def run(t: Any, parts: torch.Tensor | None = None) -> None:
        sums = torch.empty(work, dtype=torch.float32, device="cpu") if work else t.out
        launch(pack(
            t.a.data_ptr(), t.b.data_ptr(), _address(added(p, t)), _address(t.c), sums.data_ptr(), _address(t.scale_a), _address(t.scale_b),
            _address(t.zero_b), _address(t.ends) if grouped else 0, t.out.data_ptr() if work else _address(parts), _address(t.out_scale),
        ) + tail)

    return with_totals(p, tasks_n, run)


def _address(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def coverage() -> Iterable[tuple[GemmProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = GemmProblem(1, 200, 200, 200, "fp32", "fp32", "fp32")
    yield base, None
    for dtype in ("bf16", "fp16", "fp64"):
        yield replace(base, a_dtype=dtype, b_dtype=dtype, out_dtype=dtype, b_order="col"), None
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        yield replace(base, activation=activation, bias=True, bias_dtype="fp32"), None
    yield replace(base, a_dtype="bf16", b_dtype="bf16", activation="swiglu", bias=True, bias_dtype="bf16"), None
    yield replace(base, activation="geglu", gate_up="up_first", accumulate_c=True, c_dtype="bf16"), None
    yield replace(base, a_dtype="fp16", b_dtype="fp16", out_dtype="bf16", activation="swiglu", gate_up="interleaved"), None
    for dtype in ("fp32", "bf16", "fp16", "fp64"):
        yield replace(base, m=3, a_dtype=dtype, b_dtype=dtype, out_dtype=dtype), None
    yield replace(base, m=1, activation="swiglu", bias=True, bias_dtype="fp32"), None
    eight = replace(base, a_dtype="e4m3", b_dtype="e5m2", out_dtype="bf16")
    for m in (200, 3):
        yield replace(eight, m=m, scales="row"), None
        yield replace(eight, m=m, scales="block_128x128", activation="swiglu"), None
        yield replace(eight, m=m, scales="block_1x128"), None
        packed = replace(base, m=m, a_dtype="bf16", out_dtype="bf16", weight_format="int4", b_order="col", group_size=32)
        yield replace(packed, b_dtype="int4", scale_dtype="bf16", zero_points=True), None
        yield replace(packed, b_dtype="mxfp4", weight_format="mxfp4", scale_dtype="e8m0"), None
    for recipe in _RECIPES:
        yield replace(base, out_scale=recipe, out_dtype="e4m3"), None


FAMILY = KernelFamily(
    name="gemm/gemm_cpu", op="gemm", target_kind="cpu", toolchain="cxx", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage,
)
