"""Host side of quantize/quantize_fp8_triton: quantize_fp8_cuda's sibling in Triton for scales of 1 x 128, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.params import ParamStruct
from kernelgen.problems.quantize import QuantizeProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import QuantizeTensors
from kernelgen.verdicts import Verdict, first_no

PARAMS = ParamStruct((
    *((name, "ptr") for name in ("x", "codes", "scale", "row_ends")),
    *((name, "i64") for name in ("x_batch", "x_row", "codes_batch", "codes_row", "scale_batch", "scale_row", "scale_block")),
    ("rows", "i32"), ("width", "i32"),
))
_MOST_ENTRIES, _MANY, _NARROW = 65535, 8192, 1024
_CODES = {"e4m3": ("fp8e4nv", 448.0), "e5m2": ("fp8e5", 57344.0)}


@dataclass(frozen=True)
class Config:
    """Rows of a program, groups of each, and warps."""

    rows: int
    groups: int
    warps: int
    dependent: bool = True

    def __str__(self) -> str:
        return f"{self.rows}x{self.groups} w{self.warps}" + ("" if self.dependent else " after")


def supports(p: QuantizeProblem, target: Target) -> Verdict:
    return first_no(
        (target.kind == "cuda" and target.capability >= 90, f"quantize_fp8_triton needs sm_90 or later, got {target}"),
        (p.recipe == "block_1x128" and p.activation is None,
         f"recipe {p.recipe} with activation={p.activation}: quantize_fp8_triton has block_1x128 without one"),
        (p.dtype in ("fp32", "bf16", "fp16"), f"dtype {p.dtype} is not one of fp32, bf16, fp16"),
        (p.code_dtype in _CODES, f"code dtype {p.code_dtype} is not in quantize_fp8_triton"),
        (p.batch <= _MOST_ENTRIES and p.rows < 1 << 31 and p.width < 1 << 24, f"{p.batch} x {p.rows} x {p.width} exceed the grid"),
    )


def candidates(p: QuantizeProblem, target: Target) -> Iterator[Config]:
    """Best guess first, by widths of 768, 2,048 and 7,168 (H200, 2026-12-01): 16 elements a thread where rows have as many groups."""
    half, pairs = Config(1, 8, 4), Config(2, 8, 8)
    narrow = (pairs, half) if p.rows * p.batch >= _MANY else (half, pairs)
    yield from (*narrow, Config(1, 16, 4)) if p.width <= _NARROW else (Config(1, 16, 4), *narrow)


def legal(p: QuantizeProblem, target: Target, config: Config) -> Verdict:
    units = config.rows * config.groups
    return first_no((units & (units - 1) == 0 and config.warps in (1, 2, 4, 8, 16), f"config {config}: no powers of two"))


def spec(p: QuantizeProblem, target: Target, c: Config) -> KernelSpec:
    code, largest = _CODES[p.code_dtype]
    size = DTYPES[p.dtype].bytes
    aligned = p.alignment == 16
    divisible = {"x": 16, "codes": 16, "x_row": 16 // size, "codes_row": 16, "x_batch": 16 // size, "codes_batch": 16,
                 } | ({"width": 16} if p.width % 16 == 0 else {}) if aligned else {}
    words = [p.dtype, p.code_dtype, "limited" if p.limited else "", "aligned" if aligned else "", "whole" if p.width % 16 == 0 else "",
             *str(c).split()]
    return KernelSpec.make("quantize_fp8_triton_" + "_".join(w for w in words if w), "quantize/quantize_fp8_triton.py.jinja", "triton", {
        "dtype": p.dtype, "code": code, "largest": largest, "limited": p.limited, "dependent": c.dependent, "rows": c.rows,
        "groups": c.groups, "warps": c.warps, "divisible": repr(divisible)}, params=PARAMS, params_type="", entries=("quantize",),
        target=target)


def bind(p: QuantizeProblem, c: Config, kernel: Any, tensors: QuantizeTensors) -> Callable[[QuantizeTensors], None]:
    t = tensors
    groups = -(-p.width // 128)
    launch = kernel.prepare(t.codes.device.index or 0, (-(-p.rows // c.rows), -(-groups // c.groups), p.batch))
    tail = PARAMS.pack_scalars({
        "x_batch": t.x.stride(0) if p.batch > 1 else 0, "x_row": t.x.stride(1) if p.rows > 1 else 0,
        "codes_batch": t.codes.stride(0) if p.batch > 1 else 0, "codes_row": t.codes.stride(1) if p.rows > 1 else 0,
        "scale_batch": t.scale.stride(0), "scale_row": t.scale.stride(1), "scale_block": t.scale.stride(2),
        "rows": p.rows, "width": p.width})
    pack = PARAMS.pointer_packer.pack

    def run(t: QuantizeTensors) -> None:
        launch(pack(t.x.data_ptr(), t.codes.data_ptr(), t.scale.data_ptr(), t.row_ends.data_ptr() if t.row_ends is not None else 0) + tail)

    return run


def coverage() -> Iterable[tuple[QuantizeProblem, Config | None]]:
    base = QuantizeProblem(1, 4096, 7168, "bf16", recipe="block_1x128")
    yield base, None
    yield replace(base, dtype="fp32", code_dtype="e5m2", alignment=4, width=1001), None


FAMILY = KernelFamily(
    name="quantize/quantize_fp8_triton", op="quantize_fp8", target_kind="cuda", toolchain="triton", supports=supports,
    candidates=candidates, legal=legal, spec=spec, bind=bind, coverage=coverage, capabilities=(90,))
