"""Host side of quantize/quantize_fp8_cuda: fp8 codes and scales of every recipe, after an optional activation, for sm_80 and later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm.activations import ACTIVATION_NAMES, gate_name
from kernelgen.kernels.rowwise import MAX_BLOCKS
from kernelgen.params import ParamStruct
from kernelgen.problems.gemm import ACTIVATIONS
from kernelgen.problems.quantize import RECIPES, QuantizeProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target, target_of
from kernelgen.tensors import QuantizeTensors
from kernelgen.verdicts import Verdict, first_no

# struct QuantizeParams of the header.
PARAMS = ParamStruct((
    ("x", "ptr"), ("codes", "ptr"), ("scale", "ptr"), ("partial", "ptr"), ("row_ends", "ptr"),
    ("x_batch", "i64"), ("x_row", "i64"), ("codes_batch", "i64"), ("codes_row", "i64"),
    ("scale_batch", "i64"), ("scale_row", "i64"), ("scale_block", "i64"), ("rows", "i64"), ("width", "i64"),
    ("batch", "i32"), ("row_units", "i32"), ("column_units", "i32"), ("partials", "i32"),
))
PARAMS_TYPE = "kernelgen::QuantizeParams"
ENTRY, PARTIALS = "quantize_fp8_cuda", "quantize_fp8_partials"

_INPUTS = ("fp32", "bf16", "fp16")
_CODES = {"e4m3": "kernelgen::fp8_e4m3", "e5m2": "kernelgen::fp8_e5m2"}
_RECIPE_NAMES = {"tensor": "kTensor", "row": "kRow", "block_1x128": "kBlock1x128", "block_128x128": "kBlock128x128"}
_PIECE, _BLOCK = 8, 128
_REGISTERS_PER_SM = 65536
_OTHER_REGISTERS = 40  # besides the kept floats; with it ptxas 13.0 spills in no config of _SHAPES
_BLOCKS_PER_SM = 8     # of the grid that shares a tensor
_MANY = 8              # rows of an SM from which on a block owns one


@dataclass(frozen=True)
class Config:
    """``lanes`` of a block's ``threads`` own what shares a scale; ``kept`` pieces of 8 elements per thread stay in registers
    (0: rows of any width, read twice). Per tensor: a warp takes ``kept`` pieces per thread at a time. ``units`` of 1 x 128: a block
    owns a row, a team so many units of it (0: a team owns one unit, anywhere).
    """

    threads: int
    lanes: int
    kept: int
    units: int = 0

    def __str__(self) -> str:
        return f"t{self.threads} l{self.lanes} k{self.kept}" + (f" u{self.units}" if self.units else "")

    @property
    def held(self) -> int:
        """Elements of a row that a team keeps."""
        return self.lanes * self.kept * _PIECE


# The first that keeps a row is taken: few pieces per thread in blocks as small as that allows.
_SHAPES: dict[str, tuple[Config, ...]] = {
    "tensor": (Config(256, 32, 4), Config(256, 32, 1)),
    "row": (Config(128, 32, 1), Config(128, 32, 2), Config(128, 32, 4), Config(128, 128, 2), Config(256, 256, 2), Config(256, 256, 4),
            Config(512, 512, 4), Config(512, 512, 8), Config(512, 512, 0)),
    "block_1x128": (*(Config(threads, 16, 1, units) for units in (1, 2, 3, 4) for threads in (128, 224, 256)),
                    Config(256, 16, 1)),
    "block_128x128": (Config(256, 256, 8),),
}


def _access(p: QuantizeProblem) -> tuple[int, int]:
    """Elements of one access to x and to the codes. The second half of a gated row begins ``width`` elements into it."""
    size = DTYPES[p.dtype].bytes
    bits = p.alignment | 16
    if p.gated and p.gate_up != "interleaved":
        bits |= p.width * size
    return max(1, (bits & -bits) // size), min(_PIECE, p.alignment)


def supports(problem: QuantizeProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    rows, columns = _units(p, _SHAPES[p.recipe][-1]) if p.recipe in RECIPES else (0, 0)
    return first_no(
        (target.kind == "cuda" and target.capability >= 80, f"quantize_fp8_cuda needs sm_80 or later, got {target}"),
        (p.recipe in RECIPES, f"recipe {p.recipe} is not one of {', '.join(RECIPES)}"),
        (p.dtype in _INPUTS, f"dtype {p.dtype} is not one of {', '.join(_INPUTS)}"),
        (p.code_dtype in _CODES, f"code dtype {p.code_dtype} is not one of {', '.join(_CODES)}"),
        (p.activation is None or p.activation in ACTIVATIONS, f"activation {p.activation} is not in quantize_fp8_cuda"),
        (p.batch * rows * columns <= MAX_BLOCKS, f"{p.batch * rows * columns} scales or segments exceed {MAX_BLOCKS}"),
    )


def legal(problem: QuantizeProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem: a team that the recipe knows, its pieces in the registers?"""
    p, c = problem, config
    team = {"tensor": c.lanes == 32, "row": c.lanes in (32, c.threads), "block_1x128": (c.lanes, c.kept) == (16, 1),
            "block_128x128": c.lanes == c.threads and c.threads * c.kept * _PIECE == _BLOCK * _BLOCK}
    registers = c.kept * _PIECE + _OTHER_REGISTERS
    return first_no(
        (c.threads % 32 == 0 and c.threads <= 1024, f"{c.threads} threads are not 1 to 32 whole warps"),
        (team[p.recipe], f"config {c} has no team for recipe {p.recipe}"),
        (c.units == 0 or p.recipe == "block_1x128" and c.threads // c.lanes * c.units * _BLOCK >= p.width,
         f"config {c} has no teams for all of a row of {p.width} by recipe {p.recipe}"),
        (c.kept > 0 or p.recipe == "row", f"config {c} keeps nothing, which only rows allow"),
        (p.recipe != "row" or c.kept == 0 or c.held >= p.width, f"config {c} keeps {c.held} elements of a row of {p.width}"),
        (registers <= _REGISTERS_PER_SM // c.threads,
         f"config {c} needs about {registers} registers, {c.threads} threads have {_REGISTERS_PER_SM // c.threads} each"),
    )


def candidates(problem: QuantizeProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first."""
    fitting = [c for c in _SHAPES[problem.recipe] if legal(problem, target, c)]
    if problem.recipe == "tensor":  # narrow rows leave most lanes of a long segment idle
        fitting.sort(key=lambda c: c.held > 2 * problem.width)
    if problem.recipe == "block_1x128":  # blocks that own a row: of many rows, with no idle team, loads of several units in flight
        units, many = -(-problem.width // _BLOCK), problem.rows * problem.batch >= _MANY * (target.sm_count or 1)
        fitting.sort(key=lambda c: ((c.units > 0) != many, c.threads // c.lanes * c.units - units if c.units else 0, -c.units))
    yield from fitting


def _units(p: QuantizeProblem, c: Config) -> tuple[int, int]:
    """Along rows and columns of a batch entry."""
    columns = {"tensor": -(-p.width // max(c.held, 1)), "row": 1}.get(p.recipe, -(-p.width // _BLOCK))
    return -(-p.rows // _BLOCK) if p.recipe == "block_128x128" else p.rows, columns


def entries(problem: QuantizeProblem) -> tuple[str, ...]:
    """The kernels of a call, the last one first."""
    return (ENTRY, PARTIALS) if problem.recipe == "tensor" else (ENTRY,)


def parameters(problem: QuantizeProblem, config: Config, limited: bool) -> dict[str, Any]:
    """What the template sees: dtypes, recipe, activation, access widths and config; no extents."""
    p, c = problem, config
    access_x, access_codes = _access(p)
    return dict(
        element=DTYPES[p.dtype].cuda, code=_CODES[p.code_dtype], recipe=_RECIPE_NAMES[p.recipe],
        activation=ACTIVATION_NAMES[p.activation], gate=gate_name(p), threads=c.threads, lanes=c.lanes,
        kept=c.kept, units=c.units, access_x=access_x, access_codes=access_codes, limited=limited)


def spec(problem: QuantizeProblem, target: Target, config: Config, limited: bool = False) -> KernelSpec:
    """The specialisation. ``limited``: rows end where a tensor on the device says."""
    p, limited = problem, limited or problem.limited
    access_x, access_codes = _access(p)
    words = [p.dtype, p.code_dtype, p.recipe, *([p.activation] if p.activation else []), *([p.gate_up] if p.gated else []),
             f"a{access_x}x{access_codes}", *(["limited"] if limited else []), *str(config).split()]
    return KernelSpec.make(
        "quantize_fp8_cuda_" + "_".join(words), "quantize/quantize_fp8_cuda.cu.jinja", "nvrtc", parameters(p, config, limited),
        params=PARAMS, params_type=PARAMS_TYPE, entries=entries(p), target=target)


def bind(problem: QuantizeProblem, config: Config, kernel: Any, tensors: QuantizeTensors) -> Callable[[QuantizeTensors], None]:
    """The closure of a repeated call: packs addresses, launches; per tensor twice, with a workspace of a word per block."""
    quantize = bind_limited(problem, config, kernel, tensors)
    if problem.limited:
        return lambda t: quantize(t, t.row_ends.data_ptr())  # type: ignore[union-attr]
    return lambda t: quantize(t, 0)


def bind_limited(
    problem: QuantizeProblem, config: Config, kernel: Any, tensors: QuantizeTensors,
) -> Callable[[QuantizeTensors, int], None]:
    """As bind(), for a kernel made with ``limited``: run(tensors, address of (batch) int32 with the rows that exist)."""
    p, c, t = problem, config, tensors
    device = t.codes.device
    row_units, column_units = _units(p, c)
    blocks = p.batch * p.rows if c.units else -(-p.batch * row_units * column_units // (c.threads // c.lanes))
    tensor = p.recipe == "tensor"
    if tensor:  # also without elements: the scale is written
        blocks = max(1, min(blocks, _BLOCKS_PER_SM * max(1, target_of(device).sm_count)))
    shape: dict[str, Any] = dict(grid=(blocks, 1, 1), block=(c.threads, 1, 1))
    index = device.index or 0
    own = kernel.spec.entries[0]  # of a product's binary it is another one
    kernels = [kernel if name == own else kernel.entry(name, PARAMS) for name in reversed(entries(p))]
    launches = [k.prepare(index, **shape) for k in kernels]
    tail = PARAMS.pack_scalars({
        "x_batch": t.x.stride(0), "x_row": t.x.stride(1), "codes_batch": t.codes.stride(0), "codes_row": t.codes.stride(1),
        "scale_batch": t.scale.stride(0), "scale_row": t.scale.stride(1), "scale_block": t.scale.stride(2),
        "rows": p.rows, "width": p.width, "batch": p.batch, "row_units": row_units, "column_units": column_units, "partials": blocks})
    pack = PARAMS.pointer_packer.pack

    def run(t: QuantizeTensors, row_ends: int) -> None:
        partial = torch.empty(blocks, dtype=torch.int32, device=device) if tensor else None
        params = pack(t.x.data_ptr(), t.codes.data_ptr(), t.scale.data_ptr(), 0 if partial is None else partial.data_ptr(), row_ends)
        for launch in launches:
            launch(params + tail)

    return run


def coverage() -> Iterable[tuple[QuantizeProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = QuantizeProblem(1, 4096, 7168, "bf16")
    yield base, None
    yield replace(base, recipe="row"), None
    yield replace(base, recipe="row", width=1 << 20, activation="swiglu"), None
    yield replace(base, recipe="row", width=200, dtype="fp16", code_dtype="e5m2", alignment=8, activation="gelu"), None
    yield replace(base, recipe="block_1x128", activation="swiglu"), None
    yield replace(base, recipe="block_1x128", width=1001, alignment=1, dtype="fp32", activation="geglu", gate_up="up_first"), None
    yield replace(base, recipe="block_1x128", activation="swiglu", gate_up="interleaved"), None
    yield replace(base, recipe="block_128x128"), None
    yield replace(base, recipe="block_128x128", dtype="fp32", code_dtype="e5m2"), None


FAMILY = KernelFamily(
    name="quantize/quantize_fp8_cuda", op="quantize_fp8", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage,
)
