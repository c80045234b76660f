"""Host side of attention/merge_states_cuda: partial attention results combined by their LSE, for sm_80 and later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kernelgen.cache_tensors import MergeTensors
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.attention.merge_states import PARAMS, coverage, pointer_packing, scalars
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.rope.access import copy_access
from kernelgen.kernels.rowwise import MAX_BLOCKS, LanesConfig, lane_configs, legal_lanes, repeated
from kernelgen.problems.cache_ops import MergeProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

ENTRY = "merge_states_cuda"
_DTYPES = ("fp32", "bf16", "fp16")


def _access(p: MergeProblem) -> int:
    return copy_access(((DTYPES[p.dtype].bytes, p.alignment),), p.head_dim)


def supports(problem: MergeProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cuda" and target.capability >= 80, f"merge_states_cuda needs sm_80 or later, got {target}"),
        (p.dtype in _DTYPES, f"dtype {p.dtype} is not one of {', '.join(_DTYPES)}"),
        (p.lse_dtype == "fp32", f"lses of {p.lse_dtype} are not fp32"),
        (p.tokens * p.heads <= MAX_BLOCKS, f"{p.tokens * p.heads} rows exceed the grid's {MAX_BLOCKS}"),
    )


def candidates(problem: MergeProblem, target: Target) -> Iterator[LanesConfig]:
    return lane_configs(-(-problem.head_dim // _access(problem)), 128, (8, 16, 32, 64))


def spec(problem: MergeProblem, target: Target, config: LanesConfig) -> KernelSpec:
    """The specialisation: dtype, access width and config."""
    access = _access(problem)
    parameters: dict[str, Any] = dict(
        element=DTYPES[problem.dtype].cuda, threads=config.threads, lanes=config.lanes, access=access)
    return KernelSpec.make(
        f"merge_states_cuda_{problem.dtype}_a{access}_{'_'.join(str(config).split())}", "attention/merge_states_cuda.cu.jinja", "nvrtc",
        parameters, params=PARAMS, params_type="kernelgen::MergeParams", entries=(ENTRY,), target=target)


def bind(problem: MergeProblem, config: LanesConfig, kernel: Any, tensors: MergeTensors) -> Callable[[MergeTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    blocks = config.blocks(problem.tokens * problem.heads)
    launch = kernel.prepare(tensors.outs.device.index or 0, grid=(blocks, 1, 1), block=(config.threads, 1, 1))
    return repeated(launch, pointer_packing(), scalars(problem, tensors, 0))


FAMILY = KernelFamily(
    name="attention/merge_states_cuda", op="merge_states", target_kind="cuda", toolchain="nvrtc", supports=supports,
    candidates=candidates, legal=legal_lanes, spec=spec, bind=bind, coverage=coverage,
)
