"""Host side of moe/permute_triton and moe/unpermute_triton: rows of tokens spread and gathered, in Triton. An experiment: no dispatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.moe.rows import (
    STRIDES_OF_SCALES,
    address,
    permute_coverage,
    permute_verdict,
    strides_of_scales,
    unpermute_coverage,
    unpermute_verdict,
)
from kernelgen.params import ParamStruct
from kernelgen.problems.moe import MoePermuteProblem, MoeUnpermuteProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no, yes

_FLOATS = ("fp32", "bf16", "fp16")
PERMUTE = ParamStruct((
    *((name, "ptr") for name in ("x", "row_of_slot", "rows", "weights", "scale", "scale_rows")),
    *((name, "i64") for name in ("x_stride", "row_stride", "weight_stride", *STRIDES_OF_SCALES, "tokens")), ("width", "i32"),
))
UNPERMUTE = ParamStruct((
    *((name, "ptr") for name in ("rows", "row_of_slot", "out", "weights", "addend")),
    *((name, "i64") for name in ("row_stride", "out_stride", "weight_stride", "addend_stride", "tokens")), ("width", "i32"),
))
_UNITS = {1: ("u8", 1), 2: ("fp16", 2), 4: ("i32", 4), 8: ("i32", 4), 16: ("i32", 4)}


@dataclass(frozen=True)
class Config:
    """Columns of a program, its warps, whether loads leave L2 first, and whether it is set up while the kernel in front runs."""

    block: int
    warps: int
    stream: bool = False
    dependent: bool = True

    def __str__(self) -> str:
        return f"b{self.block} w{self.warps}" + (" stream" if self.stream else "") + ("" if self.dependent else " after")


def _bytes(p: MoePermuteProblem) -> int:
    """That divide every row and address of a copy."""
    bits = p.alignment | (p.width * DTYPES[p.dtype].bytes) | 16
    return bits & -bits


def _unit(p: MoePermuteProblem) -> tuple[str, int]:
    return _UNITS[_bytes(p)] if p.copies else (p.dtype, DTYPES[p.dtype].bytes)


def _columns(p: MoePermuteProblem) -> int:
    return p.width * DTYPES[p.dtype].bytes // _unit(p)[1]


def _supports(verdict: Callable[[Any, Any], Verdict]) -> Callable[[Any, Target], Verdict]:
    return lambda p, target: first_no(
        (target.kind == "cuda" and target.capability >= 90, f"needs sm_90 or later, got {target}"),
        (p.width < 1 << 30, f"rows of {p.width}"),
        (max(p.tokens, 1) <= (1 << 31) - 1, f"{p.tokens} tokens"),
    ) and verdict(p, _FLOATS)


# 16 bytes a thread, or twice those.
_COPYING = ((512, 4), (256, 2), (1024, 8), (1024, 4), (128, 1), (2048, 8))
_ADDING = (Config(1024, 4), Config(1024, 4, stream=True), Config(256, 1), Config(512, 2), Config(2048, 8), Config(2048, 4))


def permute_candidates(p: MoePermuteProblem, target: Target) -> Iterator[Config]:
    yield from (Config(*shape) for shape in _COPYING)


def unpermute_candidates(p: MoeUnpermuteProblem, target: Target) -> Iterator[Config]:
    yield from _ADDING


def _divisible(aligned: bool, pointers: Iterable[str], strides: Iterable[str], elements: int) -> dict[str, int]:
    return dict.fromkeys(pointers, 16) | dict.fromkeys((*strides, "width"), elements) if aligned and elements > 1 else {}


def permute_spec(p: MoePermuteProblem, target: Target, c: Config) -> KernelSpec:
    (unit, size), scales = _unit(p), p.scales or 0
    aligned = _bytes(p) == 16
    constants = {"K": p.k, "BLOCK": c.block, "WEIGHTED": p.weight_dtype is not None, "COPIES": p.copies, "SCALES": scales,
                 "PADDED": 1 << max(scales - 1, 0).bit_length(), "DEPENDENT": c.dependent}
    pointers = {"x": unit, "row_of_slot": "i32", "rows": unit, "weights": p.weight_dtype or "fp32", "scale": "fp32", "scale_rows": "fp32"}
    words = [unit, f"k{p.k}", p.weight_dtype or "", "copies" if p.copies else "", f"s{scales}", "aligned" if aligned else "",
             *str(c).split()]
    divisible = _divisible(aligned, ("x", "rows"), ("x_stride", "row_stride"), 16 // size)
    return _spec("permute", words, PERMUTE, constants, pointers, divisible, c, target)


def unpermute_spec(p: MoeUnpermuteProblem, target: Target, c: Config) -> KernelSpec:
    size = max(DTYPES[d].bytes for d in (p.dtype, p.out_dtype, p.addend or p.dtype))
    aligned = p.alignment == 16 and p.width % (16 // size) == 0
    constants = {"K": p.k, "BLOCK": c.block, "WEIGHTED": p.weight_dtype is not None, "ADDEND": p.addend is not None, "STREAM": c.stream,
                 "DEPENDENT": c.dependent}
    pointers = {"rows": p.dtype, "row_of_slot": "i32", "out": p.out_dtype, "weights": p.weight_dtype or "fp32",
                "addend": p.addend or "fp32"}
    words = [p.dtype, p.out_dtype, f"k{p.k}", p.weight_dtype or "", p.addend or "", "aligned" if aligned else "", *str(c).split()]
    divisible = _divisible(aligned, ("rows", "out", "addend"), ("row_stride", "out_stride", "addend_stride"), 16 // size)
    return _spec("unpermute", words, UNPERMUTE, constants, pointers, divisible, c, target)


def _spec(entry: str, words: list[str], params: ParamStruct, constants: dict[str, Any], pointers: dict[str, str], divisible: dict[str, int],
          c: Config, target: Target) -> KernelSpec:
    return KernelSpec.make(f"moe_{entry}_triton_" + "_".join(w for w in words if w), "moe/rows_triton.py.jinja", "triton", {
        "entry": entry, "fixed": repr(constants), "pointers": repr(pointers), "divisible": repr(divisible), "warps": c.warps,
        "dependent": c.dependent}, params=params, params_type="", entries=(entry,), target=target)


def permute_bind(p: MoePermuteProblem, c: Config, kernel: Any, tensors: Any) -> Callable[[Any], None]:
    t, per, columns = tensors, _unit(p)[1], _columns(p)
    size = DTYPES[p.dtype].bytes
    parts = max(-(-columns // c.block), 1)
    launch = kernel.prepare(t.x.device.index or 0, (p.tokens if p.k and (columns or p.scales) else 0, parts, 1))
    tail = PERMUTE.pack_scalars({
        "x_stride": t.x.stride(0) * size // per if p.tokens > 1 else 0, "row_stride": t.rows.stride(0) * size // per,
        "weight_stride": t.weights.stride(0) if t.weights is not None else 0, "tokens": p.tokens, "width": columns} | strides_of_scales(t))
    pack = PERMUTE.pointer_packer.pack

    def run(t: Any) -> None:
        launch(pack(t.x.data_ptr(), t.row_of_slot.data_ptr(), t.rows.data_ptr(), address(t.weights), address(t.scale),
                    address(t.scale_rows)) + tail)

    return run


def unpermute_bind(p: MoeUnpermuteProblem, c: Config, kernel: Any, tensors: Any) -> Callable[[Any], None]:
    t = tensors
    launch = kernel.prepare(t.out.device.index or 0, (p.tokens, -(-p.width // c.block), 1))
    tail = UNPERMUTE.pack_scalars({
        "row_stride": t.rows.stride(0), "out_stride": t.out.stride(0), "weight_stride": t.weights.stride(0) if t.weights is not None else 0,
        "addend_stride": t.addend.stride(0) if t.addend is not None else 0, "tokens": p.tokens, "width": p.width})
    pack = UNPERMUTE.pointer_packer.pack

    def run(t: Any) -> None:
        launch(pack(t.rows.data_ptr(), t.row_of_slot.data_ptr(), t.out.data_ptr(), address(t.weights), address(t.addend)) + tail)

    return run


PERMUTE_FAMILY = KernelFamily(
    name="moe/permute_triton", op="moe_permute", target_kind="cuda", toolchain="triton", supports=_supports(permute_verdict),
    candidates=permute_candidates, legal=lambda p, target, c: yes(), spec=permute_spec, bind=permute_bind,
    coverage=lambda: permute_coverage(_FLOATS))
UNPERMUTE_FAMILY = KernelFamily(
    name="moe/unpermute_triton", op="moe_unpermute", target_kind="cuda", toolchain="triton", supports=_supports(unpermute_verdict),
    candidates=unpermute_candidates, legal=lambda p, target, c: yes(), spec=unpermute_spec, bind=unpermute_bind,
    coverage=lambda: unpermute_coverage(_FLOATS))
