"""Host side of moe/unpermute_cuda: each token's rows, weighted and added up in the order of its slots, for sm_80 and later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.moe.rows import address, elements, unpermute_coverage, unpermute_verdict
from kernelgen.kernels.rowwise import TokenConfig, dependent, legal_tokens, token_configs
from kernelgen.moe_tensors import UnpermuteTensors
from kernelgen.params import ParamStruct
from kernelgen.problems.moe import MoeUnpermuteProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target, target_of
from kernelgen.verdicts import Verdict, first_no

# struct MoeUnpermuteParams of the header.
PARAMS = ParamStruct((
    ("rows", "ptr"), ("row_of_slot", "ptr"), ("out", "ptr"), ("weights", "ptr"), ("addend", "ptr"),
    ("row_stride", "i64"), ("out_stride", "i64"), ("weight_stride", "i64"), ("addend_stride", "i64"),
    ("tokens", "i64"), ("width", "i64"), ("k", "i32"), ("together", "i32"),
))
ENTRY = "moe_unpermute_cuda"

_FLOATS = ("fp32", "bf16", "fp16")
_WARP, _MAX_THREADS = 32, 256
_SMS = 132  # that few tokens are spread over, whatever the GPU
_THREADS_PER_SM = 768  # by their registers; more of the grid would only wait


def _access(p: MoeUnpermuteProblem) -> int:
    return elements(p.alignment, p.width, p.dtype, p.out_dtype, p.addend or p.dtype)


def _ahead(p: MoeUnpermuteProblem) -> int:
    """Rows that a warp has on their way."""
    return 2 if p.k <= 2 else 4 if p.k <= 4 else 8


def _segments(p: MoeUnpermuteProblem) -> int:
    """Of the columns, each a warp's access wide."""
    return -(-p.width // (_WARP * _access(p)))


def supports(problem: MoeUnpermuteProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    return first_no(
        (target.kind == "cuda" and target.capability >= 80, f"moe_unpermute_cuda needs sm_80 or later, got {target}"),
    ) and unpermute_verdict(problem, _FLOATS)


def candidates(problem: MoeUnpermuteProblem, target: Target) -> Iterator[TokenConfig]:
    """The smallest block whose threads fill all SMs, else the largest: few tokens are spread over many SMs."""
    wanted = min(_MAX_THREADS, _WARP * problem.tokens * _segments(problem) // _SMS)
    yield from token_configs(wanted)


def spec(problem: MoeUnpermuteProblem, target: Target, config: TokenConfig) -> KernelSpec:
    """The specialisation: dtypes, access width, weights, addend and config."""
    p = problem
    words = [p.dtype, p.out_dtype, *([f"weights_{p.weight_dtype}"] if p.weight_dtype else []),
             *([f"addend_{p.addend}"] if p.addend else []), f"a{_access(p)}", f"s{_ahead(p)}", str(config)]
    return KernelSpec.make(
        "moe_unpermute_cuda_" + "_".join(words), "moe/unpermute_cuda.cu.jinja", "nvrtc",
        dict(element=DTYPES[p.dtype].cuda, out=DTYPES[p.out_dtype].cuda, weight_type=DTYPES[p.weight_dtype or "fp32"].cuda,
             addend_type=DTYPES[p.addend or p.out_dtype].cuda, access=_access(p), weighted=p.weight_dtype is not None,
             has_addend=p.addend is not None, threads=config.threads, blocks=_THREADS_PER_SM // config.threads,
             ahead=_ahead(p)),
        params=PARAMS, params_type="kernelgen::MoeUnpermuteParams", entries=(ENTRY,), target=target)


def bind(
    problem: MoeUnpermuteProblem, config: TokenConfig, kernel: Any, tensors: UnpermuteTensors,
) -> Callable[[UnpermuteTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    p, t = problem, tensors
    most = target_of(t.out.device).sm_count * (_THREADS_PER_SM // config.threads)
    warps, segments = config.threads // _WARP, _segments(p)
    together = max(1, min(p.tokens, most * warps // segments))
    blocks = -(-together * segments // warps)
    launch = kernel.prepare(
        t.out.device.index or 0, grid=(blocks, 1, 1), block=(config.threads, 1, 1), programmatic=dependent(t.out.device))
    tail = PARAMS.pack_scalars({
        "row_stride": t.rows.stride(0), "out_stride": t.out.stride(0), "weight_stride": t.weights.stride(0) if t.weights is not None else 0,
        "addend_stride": t.addend.stride(0) if t.addend is not None else 0,
        "tokens": p.tokens, "width": p.width, "k": p.k, "together": together})
    pack = PARAMS.pointer_packer.pack

    def run(t: UnpermuteTensors) -> None:
        launch(pack(t.rows.data_ptr(), t.row_of_slot.data_ptr(), t.out.data_ptr(), address(t.weights), address(t.addend)) + tail)

    return run


def coverage() -> Iterable[tuple[MoeUnpermuteProblem, TokenConfig | None]]:
    """Problems that together reach every branch of the template."""
    return unpermute_coverage(_FLOATS)


FAMILY = KernelFamily(
    name="moe/unpermute_cuda", op="moe_unpermute", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal_tokens, spec=spec, bind=bind, coverage=coverage,
)
