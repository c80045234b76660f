"""Host side of gemm/product_triton and gemm/grouped_product_triton: portable products for what has no template, in Triton.

They are those of dispatch's backend "triton": dispatch/backends/triton.py. The kernel: templates/gemm/product_triton.py.jinja.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.params import ParamStruct
from kernelgen.problems.gemm import ACTIVATIONS, GemmProblem, GroupedGemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no, yes

FLOATS = ("fp64", "fp32", "bf16", "fp16")
PARAMS = ParamStruct((
    *((name, "ptr") for name in ("a", "b", "out", "ends", "bias", "c")),
    *((name, "i64") for name in ("a_batch", "a_row", "a_column", "b_batch", "b_row", "b_column", "out_batch", "out_row", "bias_batch",
                                 "c_batch", "c_row")),
    *((name, "i32") for name in ("groups", "m", "n", "k", "tiles_m", "tiles_n")), ("beta", "f32"),
))
_OLDEST = 80
_MOST_BLOCKS = (1 << 31) - 1  # grid x
_MOST_EXTENT = (1 << 31) - (1 << 10)  # tile indices past the end stay within int32
_ACTIVATION_OF_GATE = {"swiglu": "silu", "geglu": "gelu"}


@dataclass(frozen=True)
class Config:
    """Rows, columns and depth of a tile, and its warps."""

    block_m: int
    block_n: int
    block_k: int
    warps: int = 8

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k} w{self.warps}"


def _tile(p: GemmProblem) -> Config:
    """As much as fits in registers (sm_90, Triton 3.6, no spills; 64 x 64 x 32 of float32 by 4 warps spilled 484 bytes). A gate has two
    tiles of sums."""
    if p.a_dtype == "fp64":
        return Config(32, 32, 16)
    return Config(64, 32 if p.gated else 64, 16) if p.a_dtype == "fp32" else Config(64, 64, 32)


def _grid(p: GemmProblem, c: Config) -> tuple[int, int, int]:
    """Tiles of rows, of columns, entries of the batch. Rows in groups take up to one part of a tile more per group."""
    grouping = getattr(p, "grouping", "")
    tiles_m = -(-p.m // c.block_m) + (p.batch if grouping == "rows" else 0)
    return tiles_m, -(-p.outputs // c.block_n), 1 if grouping == "rows" else p.batch


def supports(p: Any, target: Target) -> Verdict:
    tiles_m, tiles_n, entries = _grid(p, _tile(p))
    return first_no(
        (target.kind == "cuda" and target.capability >= _OLDEST, f"Triton's kernels are for sm_{_OLDEST} and later, got {target}"),
        (not p.gathered and not p.scattered, "rows of a are taken where they lie, not gathered, and those of out not scattered"),
        (p.weight_format is None, f"packed {p.weight_format} weights are not in this kernel"),
        (p.scales is None and p.out_scale is None, f"no scales, got scales={p.scales} out_scale={p.out_scale}"),
        (p.a_dtype in FLOATS and p.a_dtype == p.b_dtype, f"needs one of {', '.join(FLOATS)} for a and b; got {p.a_dtype}/{p.b_dtype}"),
        (p.activation in (None, *ACTIVATIONS), f"activation {p.activation} is one of moe's own"),
        (p.a_dtype != "fp64" or not p.accumulate_c, "beta * c of float64: the kernel takes beta as float32"),
        (not p.requires_grad, "a gradient is asked for, and the kernel has no backward"),
        (max(p.m, p.n, p.k, p.batch) <= _MOST_EXTENT, f"an extent of {max(p.m, p.n, p.k, p.batch)} exceeds {_MOST_EXTENT}"),
        (tiles_m * tiles_n * entries <= _MOST_BLOCKS, f"{tiles_m * tiles_n * entries} tiles, a grid has {_MOST_BLOCKS}"),
    )


def candidates(p: Any, target: Target) -> Iterator[Config]:
    yield _tile(p)


def legal(p: Any, target: Target, config: Config) -> Verdict:
    return yes()


def spec(p: Any, target: Target, c: Config) -> KernelSpec:
    grouping, sums = getattr(p, "grouping", ""), "fp64" if p.a_dtype == "fp64" else "fp32"
    bias, addend = p.bias_dtype or "fp32", p.c_dtype or "fp32"
    parameters = {
        "a_dtype": p.a_dtype, "b_dtype": p.b_dtype, "out_dtype": p.out_dtype, "bias_dtype": bias, "c_dtype": addend,
        "a_bytes": DTYPES[p.a_dtype].bytes, "b_bytes": DTYPES[p.b_dtype].bytes, "out_bytes": DTYPES[p.out_dtype].bytes,
        "sums": {"fp64": "float64", "fp32": "float32"}[sums], "exact": p.a_dtype in ("fp32", "fp64"), "grouping": grouping,
        "activation": _ACTIVATION_OF_GATE.get(p.activation, p.activation or ""), "gates": p.gate_up if p.gated else "", "bias": p.bias,
        "addend": p.accumulate_c, "a_by_rows": p.a_order == "row", "b_by_rows": p.b_order == "row", "aligned": p.alignment == 16,
        "out_aligned": p.out_alignment == 16, "block_m": c.block_m, "block_n": c.block_n, "block_k": c.block_k, "warps": c.warps,
    }
    words = ["product_triton", grouping, p.a_dtype, p.out_dtype, p.a_order, p.b_order, p.activation or "", "bias" if p.bias else "",
             "c" if p.accumulate_c else ""]
    return KernelSpec.make("_".join(w for w in words if w), "gemm/product_triton.py.jinja", "triton", parameters, params=PARAMS,
                           params_type="", entries=("product",), target=target)


def bind(p: Any, c: Config, kernel: Any, tensors: Any) -> Callable[[Any], None]:
    """The closure of a repeated call: packs addresses, launches."""
    t, grouping = tensors, getattr(p, "grouping", "")
    tiles_m, tiles_n, entries = _grid(p, c)
    launch = kernel.prepare(t.a.device.index or 0, (tiles_m * tiles_n * entries, 1, 1))
    bias_batch = t.bias.stride(0) if t.bias is not None and t.bias.dim() == 2 else 0
    tail = PARAMS.pack_scalars({
        "a_batch": t.a.stride(0) if t.a.shape[0] > 1 else 0, "a_row": t.a.stride(1), "a_column": t.a.stride(2),
        "b_batch": t.b.stride(0) if t.b.shape[0] > 1 else 0, "b_row": t.b.stride(1), "b_column": t.b.stride(2),
        "out_batch": t.out.stride(0), "out_row": t.out.stride(1), "bias_batch": bias_batch,
        "c_batch": t.c.stride(0) if t.c is not None else 0, "c_row": t.c.stride(1) if t.c is not None else 0,
        "groups": p.batch, "m": p.m, "n": p.n, "k": p.k, "tiles_m": tiles_m, "tiles_n": tiles_n, "beta": float(t.beta)})
    pack = PARAMS.pointer_packer.pack

    def run(t: Any) -> None:
        launch(pack(t.a.data_ptr(), t.b.data_ptr(), t.out.data_ptr(), t.ends.data_ptr() if grouping else 0,
                    t.bias.data_ptr() if t.bias is not None else 0, t.c.data_ptr() if t.c is not None else 0) + tail)

    return run


def coverage() -> Iterable[tuple[Any, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = GemmProblem(1, 96, 96, 96, "fp32", "fp32", "fp32", b_order="col")
    yield base, None
    yield replace(base, a_dtype="fp64", b_dtype="fp64", out_dtype="fp64", a_order="col", alignment=8, out_alignment=8), None
    yield replace(base, a_dtype="bf16", b_dtype="bf16", out_dtype="bf16", bias=True, bias_dtype="bf16", activation="gelu_tanh",
                  accumulate_c=True, c_dtype="bf16", alignment=2), None
    yield replace(base, activation="relu", bias=True, bias_dtype="fp32", b_order="row"), None
    yield replace(base, activation="swiglu", gate_up="interleaved"), None


def grouped_coverage() -> Iterable[tuple[Any, Config | None]]:
    base = GroupedGemmProblem(4, 96, 96, 96, "fp32", "fp32", "fp32", batched_b=True)
    yield base, None
    yield replace(base, activation="geglu", bias=True, bias_dtype="fp32", gate_up="up_first"), None
    yield replace(base, a_dtype="fp16", b_dtype="fp16", out_dtype="fp16", grouping="masked", b_order="col", activation="silu"), None
    yield replace(base, a_dtype="fp64", b_dtype="fp64", out_dtype="fp64", grouping="k", batched_b=False, activation="swiglu"), None


FAMILY = KernelFamily(
    name="gemm/product_triton", op="gemm", target_kind="cuda", toolchain="triton", supports=supports, candidates=candidates, legal=legal,
    spec=spec, bind=bind, coverage=coverage,
)
GROUPED = replace(FAMILY, name="gemm/grouped_product_triton", op="grouped_gemm", coverage=grouped_coverage)
