"""Host side of moe/permute_cuda: tokens copied to the rows of their experts, for sm_80 and later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.moe.rows import (
    STRIDES_OF_SCALES,
    address,
    copied_bytes,
    elements,
    permute_coverage,
    permute_verdict,
    strides_of_scales,
)
from kernelgen.kernels.rowwise import MAX_BLOCKS, TokenConfig, dependent, legal_tokens, token_configs
from kernelgen.moe_tensors import PermuteTensors
from kernelgen.params import ParamStruct
from kernelgen.problems.moe import MoePermuteProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

# struct MoePermuteParams of the header.
PARAMS = ParamStruct((
    ("x", "ptr"), ("row_of_slot", "ptr"), ("rows", "ptr"), ("weights", "ptr"), ("scale", "ptr"), ("scale_rows", "ptr"),
    ("x_stride", "i64"), ("row_stride", "i64"), ("weight_stride", "i64"), *((name, "i64") for name in STRIDES_OF_SCALES),
    ("width", "i64"), ("k", "i32"), ("scales", "i32"),
))
ENTRY = "moe_permute_cuda"

_FLOATS = ("fp32", "bf16", "fp16")
_UNITS = {1: "kernelgen::uint8_t", 2: "kernelgen::uint16_t", 4: "kernelgen::uint32_t", 8: "uint2", 16: "uint4"}
_MAX_BLOCKS_Y = 65535


def _access(p: MoePermuteProblem) -> int:
    """Units of an element or, copied, one unit of bytes."""
    return 1 if p.copies else elements(p.alignment, p.width, p.dtype)


def _accesses(p: MoePermuteProblem) -> int:
    """Of a row."""
    return p.width * DTYPES[p.dtype].bytes // copied_bytes(p) if p.copies else p.width // _access(p)


def supports(problem: MoePermuteProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    return first_no(
        (target.kind == "cuda" and target.capability >= 80, f"moe_permute_cuda needs sm_80 or later, got {target}"),
        (problem.tokens <= MAX_BLOCKS, f"{problem.tokens} tokens exceed the grid's {MAX_BLOCKS}"),
    ) and permute_verdict(problem, _FLOATS)


def candidates(problem: MoePermuteProblem, target: Target) -> Iterator[TokenConfig]:
    return token_configs(_accesses(problem))


def spec(problem: MoePermuteProblem, target: Target, config: TokenConfig) -> KernelSpec:
    """The specialisation: bytes of an access, or the type that is multiplied; weights, scales and config."""
    p = problem
    unit = _UNITS[copied_bytes(p)] if p.copies else DTYPES[p.dtype].cuda
    what = f"b{copied_bytes(p)}" if p.copies else f"{p.dtype}_a{_access(p)}"
    words = [what, *([f"weights_{p.weight_dtype}"] if p.weight_dtype else []), *(["scales"] if p.scales is not None else []), str(config)]
    return KernelSpec.make(
        "moe_permute_cuda_" + "_".join(words), "moe/permute_cuda.cu.jinja", "nvrtc",
        dict(unit=unit, weight_type=DTYPES[p.weight_dtype or "fp32"].cuda, access=_access(p), copies=p.copies,
             weighted=p.weight_dtype is not None, has_scales=p.scales is not None, threads=config.threads),
        params=PARAMS, params_type="kernelgen::MoePermuteParams", entries=(ENTRY,), target=target)


def bind(problem: MoePermuteProblem, config: TokenConfig, kernel: Any, tensors: PermuteTensors) -> Callable[[PermuteTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    p, t = problem, tensors
    accesses = _accesses(p)
    columns = max(1, min(-(-accesses // config.threads), _MAX_BLOCKS_Y))
    work = p.tokens if p.k and (accesses or p.scales) else 0
    launch = kernel.prepare(
        t.x.device.index or 0, grid=(work, columns, 1), block=(config.threads, 1, 1), programmatic=dependent(t.x.device))
    size = DTYPES[p.dtype].bytes
    per_unit = copied_bytes(p) if p.copies else size
    tail = PARAMS.pack_scalars({
        "x_stride": t.x.stride(0) * size // per_unit if p.tokens > 1 else 0, "row_stride": t.rows.stride(0) * size // per_unit,
        "weight_stride": t.weights.stride(0) if t.weights is not None else 0,
        "width": p.width * size // per_unit, "k": p.k, "scales": p.scales or 0} | strides_of_scales(t))
    pack = PARAMS.pointer_packer.pack

    def run(t: PermuteTensors) -> None:
        launch(pack(t.x.data_ptr(), t.row_of_slot.data_ptr(), t.rows.data_ptr(), address(t.weights), address(t.scale),
                    address(t.scale_rows)) + tail)

    return run


def coverage() -> Iterable[tuple[MoePermuteProblem, TokenConfig | None]]:
    """Problems that together reach every branch of the template."""
    return permute_coverage(_FLOATS)


FAMILY = KernelFamily(
    name="moe/permute_cuda", op="moe_permute", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal_tokens, spec=spec, bind=bind, coverage=coverage,
)
