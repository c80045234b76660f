"""Host side of rope/rope_cuda: rotary position embedding for sm_80 and later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kernelgen.cache_tensors import RopeTensors
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.rope.access import rope_access, table_bytes, units_of_head
from kernelgen.kernels.rope.rope import PARAMS, coverage, data_verdict, pointer_packing, rotation_parameters, scalars, words_of
from kernelgen.kernels.rowwise import MAX_BLOCKS, TokenConfig, legal_tokens, repeated, token_configs
from kernelgen.problems.cache_ops import RopeProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

ENTRY = "rope_cuda"


def _access(p: RopeProblem) -> int:
    return rope_access(p.dtype, p.alignment, p.rotation, p.head_dim)


def _units(p: RopeProblem) -> int:
    return (p.q_heads + p.k_heads) * units_of_head(_access(p), p.rotation, p.head_dim, passing=not p.in_place)


def supports(problem: RopeProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cuda" and target.capability >= 80, f"rope_cuda needs sm_80 or later, got {target}"),
        (p.tokens <= MAX_BLOCKS, f"{p.tokens} tokens exceed the grid's {MAX_BLOCKS}"),
        ((p.q_heads + p.k_heads) * p.head_dim < 1 << 31, f"{p.q_heads} heads of {p.head_dim} exceed 2^31 elements of a token"),
    ) and data_verdict(p)


def candidates(problem: RopeProblem, target: Target) -> Iterator[TokenConfig]:
    return token_configs(_units(problem))


def spec(problem: RopeProblem, target: Target, config: TokenConfig) -> KernelSpec:
    """The specialisation: dtypes, pairing, where angles come from, access width and config."""
    access = _access(problem)
    parameters = rotation_parameters(problem.rotation, "cuda") | dict(
        element=DTYPES[problem.dtype].cuda, access=access, threads=config.threads)
    return KernelSpec.make(
        "rope_cuda_" + "_".join([*words_of(problem), f"a{access}", str(config)]), "rope/rope_cuda.cu.jinja", "nvrtc", parameters,
        params=PARAMS, params_type="kernelgen::RopeParams", entries=(ENTRY,), target=target)


def bind(problem: RopeProblem, config: TokenConfig, kernel: Any, tensors: RopeTensors) -> Callable[[RopeTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    p = problem
    launch = kernel.prepare(
        tensors.q.device.index or 0, grid=(p.tokens if _units(p) else 0, 1, 1), block=(config.threads, 1, 1),
        shared_memory=table_bytes(p.rotation, p.dtype))
    return repeated(launch, pointer_packing(), scalars(p, tensors, 0))


FAMILY = KernelFamily(
    name="rope/rope_cuda", op="rope", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal_tokens, spec=spec, bind=bind, coverage=coverage,
)
