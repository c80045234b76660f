"""Host side of moe/unpermute_triton and quantize/quantize_fp8_triton: siblings in Triton of moe/unpermute_cuda, and of quantize_fp8_cuda
for scales of 1 x 128, with the same bits, for Hopper and later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.moe.rows import address, elements, unpermute_coverage, unpermute_verdict
from kernelgen.kernels.rowwise import MAX_BLOCKS
from kernelgen.moe_tensors import UnpermuteTensors
from kernelgen.params import ParamStruct
from kernelgen.problems.moe import MoeUnpermuteProblem
from kernelgen.problems.quantize import QuantizeProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import QuantizeTensors
from kernelgen.verdicts import Verdict, first_no

_FLOATS = ("fp32", "bf16", "fp16")
_OF_SUMS, _OF_CODES = ("row_stride", "out_stride", "weight_stride", "addend_stride"), (
    "x_batch", "x_row", "codes_batch", "codes_row", "scale_batch", "scale_row", "scale_block")
SUMS = ParamStruct((*((name, "ptr") for name in ("rows", "row_of_slot", "out", "weights", "addend")),
                    *((name, "i64") for name in (*_OF_SUMS, "tokens")), ("width", "i32")))
CODES = ParamStruct((*((name, "ptr") for name in ("x", "codes", "scale", "row_ends")), *((name, "i64") for name in _OF_CODES),
                     ("rows", "i32"), ("width", "i32")))
_LARGEST = {"e4m3": ("fp8e4nv", 448.0), "e5m2": ("fp8e5", 57344.0)}
_MOST_SLOTS = 16  # all of which are in flight
_FEW = 1 << 20  # results up to which small programs are faster where tokens have several rows (H200, 2026-12-01)
_NARROW, _MANY = 1024, 8192  # columns of rows that have fewer than 16 groups, and rows (the same run)


@dataclass(frozen=True)
class Config:
    """Rows of a program, columns (or groups of 128) of each, and warps; ``dependent``: it is set up while the kernel in front runs."""

    rows: int
    columns: int
    warps: int
    dependent: bool = True

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns} w{self.warps}" + ("" if self.dependent else " after")


def legal(problem: Any, target: Target, config: Config) -> Verdict:
    c = config
    return first_no((all(n & (n - 1) == 0 for n in (c.rows, c.columns, c.warps)), f"config {c}: no powers of two"))


def _spec(template: str, words: Iterable[str], params: ParamStruct, c: Config, target: Target, **parts: dict[str, Any]) -> KernelSpec:
    name, entry = "_".join(word for word in (*words, *str(c).split()) if word), template.split("/")[1].split("_")[0]
    return KernelSpec.make(name, f"{template}.py.jinja", "triton", {
        "warps": c.warps, "dependent": c.dependent, **{key: repr(value) for key, value in parts.items()}}, params=params, params_type="",
        entries=(entry,), target=target)


def supports_sums(p: MoeUnpermuteProblem, target: Target) -> Verdict:
    return first_no(
        (target.kind == "cuda" and target.capability >= 90, f"unpermute_triton needs sm_90 or later, got {target}"),
        (p.k <= _MOST_SLOTS, f"{p.k} slots of a token, unpermute_triton takes up to {_MOST_SLOTS}"),
        (p.tokens <= MAX_BLOCKS and p.width < 1 << 24, f"{p.tokens} tokens of {p.width} exceed the grid"),
    ) and unpermute_verdict(p, _FLOATS)


def candidates_of_sums(p: MoeUnpermuteProblem, target: Target) -> Iterator[Config]:
    """Best guess first: 16 bytes of 16-bit values a thread."""
    few = p.k >= 4 and p.tokens * p.width <= _FEW
    yield from sorted((Config(1, 1024, 4), Config(1, 256, 1), Config(1, 2048, 8)), key=lambda c: (c.columns != 256) == few)


def spec_of_sums(p: MoeUnpermuteProblem, target: Target, c: Config) -> KernelSpec:
    """The specialisation: dtypes, slots, weights, addend, alignment and config."""
    access = elements(p.alignment, p.width, p.dtype, p.out_dtype, p.addend or p.dtype)
    strides = ("row_stride", "out_stride", "addend_stride", "width")
    divisible = dict.fromkeys(("rows", "out", "addend"), 16) | dict.fromkeys(strides, access) if p.alignment == 16 and access > 1 else {}
    weight, addend = p.weight_dtype, p.addend
    words = ("moe_unpermute_triton", p.dtype, p.out_dtype, f"k{p.k}", f"weights_{weight}" if weight else "",
             f"addend_{addend}" if addend else "", f"a{access}" if divisible else "")
    return _spec("moe/unpermute_triton", words, SUMS, c, target, divisible=divisible, fixed={
        "K": p.k, "BLOCK": c.columns, "WEIGHTED": weight is not None, "ADDEND": addend is not None, "DEPENDENT": c.dependent}, pointers={
        "rows": p.dtype, "row_of_slot": "i32", "out": p.out_dtype, "weights": weight or "fp32", "addend": addend or "fp32"})


def bind_sums(p: MoeUnpermuteProblem, c: Config, kernel: Any, tensors: UnpermuteTensors) -> Callable[[UnpermuteTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    t = tensors
    launch = kernel.prepare(t.out.device.index or 0, (p.tokens, -(-p.width // c.columns), 1))
    strides = (0 if x is None else x.stride(0) for x in (t.rows, t.out, t.weights, t.addend))
    tail = SUMS.pack_scalars(dict(zip(_OF_SUMS, strides)) | {"tokens": p.tokens, "width": p.width})
    pack = SUMS.pointer_packer.pack

    def run(t: UnpermuteTensors) -> None:
        launch(pack(t.rows.data_ptr(), t.row_of_slot.data_ptr(), t.out.data_ptr(), address(t.weights), address(t.addend)) + tail)

    return run


def supports_codes(p: QuantizeProblem, target: Target) -> Verdict:
    return first_no(
        (target.kind == "cuda" and target.capability >= 90, f"quantize_fp8_triton needs sm_90 or later, got {target}"),
        (p.recipe == "block_1x128" and p.activation is None,
         f"recipe {p.recipe} with activation={p.activation}: quantize_fp8_triton has block_1x128 without one"),
        (p.dtype in _FLOATS, f"dtype {p.dtype} is not one of {', '.join(_FLOATS)}"),
        (p.code_dtype in _LARGEST, f"code dtype {p.code_dtype} is not in quantize_fp8_triton"),
        (p.batch < 1 << 16 and p.rows < 1 << 31 and p.width < 1 << 24, f"{p.batch} x {p.rows} x {p.width} exceed the grid"),
    )


def candidates_of_codes(p: QuantizeProblem, target: Target) -> Iterator[Config]:
    """Best guess first: 16 elements a thread where rows have as many groups."""
    half, pairs = Config(1, 8, 4), Config(2, 8, 8)
    narrow = (pairs, half) if p.rows * p.batch >= _MANY else (half, pairs)
    yield from (*narrow, Config(1, 16, 4)) if p.width <= _NARROW else (Config(1, 16, 4), *narrow)


def spec_of_codes(p: QuantizeProblem, target: Target, c: Config) -> KernelSpec:
    code, largest = _LARGEST[p.code_dtype]
    wide = 16 // DTYPES[p.dtype].bytes
    aligned = {"x": 16, "codes": 16, "x_row": wide, "codes_row": 16, "x_batch": wide, "codes_batch": 16} if p.alignment == 16 else {}
    divisible = aligned | ({"width": 16} if aligned and p.width % 16 == 0 else {})
    words = ("quantize_fp8_triton", p.dtype, p.code_dtype, "limited" if p.limited else "", f"d{len(divisible)}")
    return _spec("quantize/quantize_fp8_triton", words, CODES, c, target, divisible=divisible, fixed={
        "ROWS": c.rows, "GROUPS": c.columns, "LARGEST": largest, "LIMITED": p.limited, "DEPENDENT": c.dependent},
        pointers={"x": p.dtype, "codes": code, "scale": "fp32", "row_ends": "i32"})


def bind_codes(p: QuantizeProblem, c: Config, kernel: Any, tensors: QuantizeTensors) -> Callable[[QuantizeTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    t = tensors
    launch = kernel.prepare(t.codes.device.index or 0, (-(-p.rows // c.rows), -(-p.width // (128 * c.columns)), p.batch))
    strides = [x.stride(i) if x.shape[i] > 1 else 0 for x in (t.x, t.codes) for i in (0, 1)] + list(t.scale.stride())
    tail = CODES.pack_scalars(dict(zip(_OF_CODES, strides)) | {"rows": p.rows, "width": p.width})
    pack = CODES.pointer_packer.pack

    def run(t: QuantizeTensors) -> None:
        launch(pack(t.x.data_ptr(), t.codes.data_ptr(), t.scale.data_ptr(), address(t.row_ends)) + tail)

    return run


def coverage_of_codes() -> Iterable[tuple[QuantizeProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = QuantizeProblem(1, 4096, 7168, "bf16", recipe="block_1x128")
    yield base, None
    yield replace(base, dtype="fp32", code_dtype="e5m2", alignment=4, width=1001), None


FAMILY = KernelFamily(
    name="moe/unpermute_triton", op="moe_unpermute", target_kind="cuda", toolchain="triton", supports=supports_sums,
    candidates=candidates_of_sums, legal=legal, spec=spec_of_sums, bind=bind_sums, coverage=lambda: unpermute_coverage(_FLOATS),
    capabilities=(90,),
)
QUANTIZE = replace(FAMILY, name="quantize/quantize_fp8_triton", op="quantize_fp8", supports=supports_codes, candidates=candidates_of_codes,
                   spec=spec_of_codes, bind=bind_codes, coverage=coverage_of_codes)
