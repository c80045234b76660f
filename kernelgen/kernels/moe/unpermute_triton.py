"""Host side of moe/unpermute_triton: moe/unpermute_cuda's sibling in Triton, with the same bits, for Hopper and later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.moe.rows import address, elements, unpermute_coverage, unpermute_verdict
from kernelgen.kernels.rowwise import MAX_BLOCKS
from kernelgen.moe_tensors import UnpermuteTensors
from kernelgen.params import ParamStruct
from kernelgen.problems.moe import MoeUnpermuteProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

PARAMS = ParamStruct((
    *((name, "ptr") for name in ("rows", "row_of_slot", "out", "weights", "addend")),
    *((name, "i64") for name in ("row_stride", "out_stride", "weight_stride", "addend_stride", "tokens")), ("width", "i32"),
))
_FLOATS = ("fp32", "bf16", "fp16")
_MOST_SLOTS = 16  # all of which are in flight
_FEW = 1 << 20  # results up to which small blocks are faster where tokens have several rows (H200, 2026-12-01)


@dataclass(frozen=True)
class Config:
    """Columns of a program and its warps; ``dependent``: it is set up while the kernel in front runs."""

    block: int
    warps: int
    dependent: bool = True

    def __str__(self) -> str:
        return f"b{self.block} w{self.warps}" + ("" if self.dependent else " after")


def supports(problem: MoeUnpermuteProblem, target: Target) -> Verdict:
    p = problem
    return first_no(
        (target.kind == "cuda" and target.capability >= 90, f"moe/unpermute_triton needs sm_90 or later, got {target}"),
        (p.k <= _MOST_SLOTS, f"{p.k} slots of a token, moe/unpermute_triton takes up to {_MOST_SLOTS}"),
        (p.tokens <= MAX_BLOCKS and p.width < 1 << 24, f"{p.tokens} tokens of {p.width} exceed the grid"),
    ) and unpermute_verdict(p, _FLOATS)


def candidates(problem: MoeUnpermuteProblem, target: Target) -> Iterator[Config]:
    """Best guess first: 16 bytes of 16-bit values a thread."""
    few = problem.k >= 4 and problem.tokens * problem.width <= _FEW
    yield from sorted((Config(1024, 4), Config(256, 1), Config(2048, 8)), key=lambda c: (c.block != 256) == few)


def legal(problem: MoeUnpermuteProblem, target: Target, config: Config) -> Verdict:
    c = config
    return first_no((c.block & (c.block - 1) == 0 and c.block >= 32 and c.warps in (1, 2, 4, 8, 16), f"config {c}: no powers of two"))


def spec(problem: MoeUnpermuteProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, slots, weights, addend, alignment and config."""
    p, c = problem, config
    access = elements(p.alignment, p.width, p.dtype, p.out_dtype, p.addend or p.dtype)
    strides = ("row_stride", "out_stride", "addend_stride", "width")
    divisible = dict.fromkeys(("rows", "out", "addend"), 16) | dict.fromkeys(strides, access) if p.alignment == 16 and access > 1 else {}
    fixed = {"K": p.k, "BLOCK": c.block, "WEIGHTED": p.weight_dtype is not None, "ADDEND": p.addend is not None, "DEPENDENT": c.dependent}
    pointers = {"rows": p.dtype, "row_of_slot": "i32", "out": p.out_dtype, "weights": p.weight_dtype or "fp32",
                "addend": p.addend or "fp32"}
    words = ["moe_unpermute_triton", p.dtype, p.out_dtype, f"k{p.k}", *([f"weights_{p.weight_dtype}"] if p.weight_dtype else []),
             *([f"addend_{p.addend}"] if p.addend else []), *([f"a{access}"] if divisible else []), *str(c).split()]
    return KernelSpec.make("_".join(words), "moe/unpermute_triton.py.jinja", "triton", {
        "fixed": repr(fixed), "pointers": repr(pointers), "divisible": repr(divisible), "warps": c.warps, "dependent": c.dependent},
        params=PARAMS, params_type="", entries=("unpermute",), target=target)


def bind(
    problem: MoeUnpermuteProblem, config: Config, kernel: Any, tensors: UnpermuteTensors,
) -> Callable[[UnpermuteTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    p, t = problem, tensors
    launch = kernel.prepare(t.out.device.index or 0, (p.tokens, -(-p.width // config.block), 1))
    tail = PARAMS.pack_scalars({
        "row_stride": t.rows.stride(0), "out_stride": t.out.stride(0), "weight_stride": t.weights.stride(0) if t.weights is not None else 0,
        "addend_stride": t.addend.stride(0) if t.addend is not None else 0, "tokens": p.tokens, "width": p.width})
    pack = PARAMS.pointer_packer.pack

    def run(t: UnpermuteTensors) -> None:
        launch(pack(t.rows.data_ptr(), t.row_of_slot.data_ptr(), t.out.data_ptr(), address(t.weights), address(t.addend)) + tail)

    return run


def coverage() -> Iterable[tuple[MoeUnpermuteProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    return unpermute_coverage(_FLOATS)


FAMILY = KernelFamily(
    name="moe/unpermute_triton", op="moe_unpermute", target_kind="cuda", toolchain="triton", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage, capabilities=(90,),
)
