"""Host side of cache/append_cuda: new tokens into a paged cache, with quantisation and rotation, for sm_80 and later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kernelgen.cache_tensors import AppendTensors
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.cache.append import (
    CUDA_TYPES,
    PARAMS,
    coverage,
    data_verdict,
    pointer_packing,
    scalars,
    type_parameters,
    words_of,
)
from kernelgen.kernels.rope.access import copy_access, rotation_access, table_bytes, units_of_head
from kernelgen.kernels.rowwise import MAX_BLOCKS, TokenConfig, legal_tokens, repeated, token_configs
from kernelgen.problems.cache_ops import AppendProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

ENTRY = "append_cuda"
_ROTATING = ("fp32", "bf16", "fp16")


def _access(p: AppendProblem) -> tuple[int, int]:
    """Elements of one access to keys (and queries) and to values."""
    def copied(dtype: str, cache: str, width: int) -> int:
        return copy_access(((DTYPES[dtype].bytes, p.alignment), (DTYPES[cache].bytes, p.cache_alignment)), width)

    k, v = copied(p.k_dtype, p.k_cache_dtype, p.head_dim), copied(p.v_dtype, p.v_cache_dtype, p.head_dim_v)
    return (k if p.rotation is None else rotation_access(k, p.rotation, p.head_dim)), v


def supports(problem: AppendProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cuda" and target.capability >= 80, f"append_cuda needs sm_80 or later, got {target}"),
        (p.tokens <= MAX_BLOCKS, f"{p.tokens} tokens exceed the grid's {MAX_BLOCKS}"),
        ((p.heads + p.q_heads) * (p.head_dim + p.head_dim_v) < 1 << 31, f"{p.heads} heads of {p.head_dim} exceed 2^31 elements of a token"),
    ) and data_verdict(p, _ROTATING)


def _units(p: AppendProblem) -> int:
    k, v = _access(p)
    keys = p.head_dim // k if p.rotation is None else units_of_head(k, p.rotation, p.head_dim)
    return (p.heads + p.q_heads) * keys + p.heads * (p.head_dim_v // v)


def candidates(problem: AppendProblem, target: Target) -> Iterator[TokenConfig]:
    return token_configs(_units(problem))


def spec(problem: AppendProblem, target: Target, config: TokenConfig) -> KernelSpec:
    """The specialisation: dtypes (sizes, where a side is copied), access widths, rotation and config."""
    k_access, v_access = _access(problem)
    parameters = type_parameters(problem, CUDA_TYPES) | dict(k_access=k_access, v_access=v_access, threads=config.threads)
    return KernelSpec.make(
        "append_cuda_" + "_".join([*words_of(problem), f"a{k_access}x{v_access}", str(config)]), "cache/append_cuda.cu.jinja", "nvrtc",
        parameters, params=PARAMS, params_type="kernelgen::AppendParams", entries=(ENTRY,), target=target)


def bind(problem: AppendProblem, config: TokenConfig, kernel: Any, tensors: AppendTensors) -> Callable[[AppendTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    p = problem
    shared = 0 if p.rotation is None else table_bytes(p.rotation, p.k_dtype)
    launch = kernel.prepare(
        tensors.k.device.index or 0, grid=(p.tokens if _units(p) else 0, 1, 1), block=(config.threads, 1, 1), shared_memory=shared)
    return repeated(launch, pointer_packing(), scalars(p, tensors, 0))


FAMILY = KernelFamily(
    name="cache/append_cuda", op="append", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal_tokens, spec=spec, bind=bind, coverage=coverage,
)
