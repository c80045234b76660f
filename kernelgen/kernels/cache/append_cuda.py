"""Host side of cache/append_cuda: new tokens into a paged cache, with quantisation and rotation, for sm_80 and later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kernelgen.cache_tensors import AppendTensors
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.cache.append import PARAMS, coverage_problems, data_verdict, pointer_packing, quantises, scalars, words_of
from kernelgen.kernels.rope.access import copy_access, rotation_access, table_bytes, units_of_head
from kernelgen.problems.cache_ops import AppendProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

ENTRY = "append_cuda"
_ROTATING = ("fp32", "bf16", "fp16")
_CODES = {"e4m3": "__nv_fp8_e4m3", "e5m2": "__nv_fp8_e5m2"}
_WORDS = {1: "kernelgen::uint8_t", 2: "kernelgen::uint16_t", 4: "kernelgen::uint32_t", 8: "kernelgen::uint64_t"}
_MAX_BLOCKS = (1 << 31) - 1  # grid x
_THREADS = (64, 128, 256)


@dataclass(frozen=True)
class Config:
    """Threads of a block, which takes one token."""

    threads: int

    def __str__(self) -> str:
        return f"t{self.threads}"


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
        (p.tokens <= _MAX_BLOCKS, f"{p.tokens} tokens exceed the grid's {_MAX_BLOCKS}"),
        ((p.heads + p.q_heads) * (p.head_dim + p.head_dim_v) < 1 << 31, f"{p.heads} heads of {p.head_dim} exceed 2^31 elements of a token"),
    ) and data_verdict(p, _ROTATING)


def legal(problem: AppendProblem, target: Target, config: Config) -> Verdict:
    """Any token fits any block of whole warps."""
    return first_no((config.threads in _THREADS, f"{config.threads} threads are not one of {', '.join(map(str, _THREADS))}"))


def _units(p: AppendProblem) -> int:
    k, v = _access(p)
    keys = p.head_dim // k if p.rotation is None else units_of_head(k, p.rotation, p.head_dim)
    return (p.heads + p.q_heads) * keys + p.heads * (p.head_dim_v // v)


def candidates(problem: AppendProblem, target: Target) -> Iterator[Config]:
    """The smallest block with a thread per access, else the largest."""
    units = _units(problem)
    yield from sorted((Config(threads) for threads in _THREADS), key=lambda c: (c.threads < min(units, _THREADS[-1]), c.threads))


def _types(dtype: str, cache_dtype: str, typed: bool) -> tuple[str, str]:
    """CUDA types of the tokens and of the cache; words for a plain copy."""
    if quantises(dtype, cache_dtype):
        return DTYPES[dtype].cuda, _CODES[cache_dtype]
    word = DTYPES[dtype].cuda if typed else _WORDS[DTYPES[dtype].bytes]
    return word, word


def spec(problem: AppendProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes (sizes, where a side is copied), access widths, rotation and config."""
    p, turn = problem, problem.rotation
    k, k_code = _types(p.k_dtype, p.k_cache_dtype, turn is not None)
    v, v_code = _types(p.v_dtype, p.v_cache_dtype, False)
    k_access, v_access = _access(p)
    parameters: dict[str, Any] = dict(
        k=k, k_code=k_code, k_access=k_access, v=v, v_code=v_code, v_access=v_access, rope=turn is not None, threads=config.threads)
    if turn is not None:
        parameters |= dict(table=DTYPES[turn.cache_dtype or "fp64"].cuda, cached=turn.cache_dtype is not None, interleaved=turn.interleaved)
    return KernelSpec.make(
        "append_cuda_" + "_".join([*words_of(p), f"a{k_access}x{v_access}", str(config)]), "cache/append_cuda.cu.jinja", "nvrtc",
        parameters, params=PARAMS, params_type="kernelgen::AppendParams", entries=(ENTRY,), target=target)


def bind(problem: AppendProblem, config: Config, kernel: Any, tensors: AppendTensors) -> Callable[[AppendTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    p = problem
    shared = 0 if p.rotation is None else table_bytes(p.rotation, p.k_dtype)
    launch = kernel.prepare(
        tensors.k.device.index or 0, grid=(p.tokens if _units(p) else 0, 1, 1), block=(config.threads, 1, 1), shared_memory=shared)
    tail = scalars(p, tensors, 0)
    addresses = pointer_packing()

    def run(t: AppendTensors) -> None:
        launch(addresses(t) + tail)

    return run


def coverage() -> Iterable[tuple[AppendProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    for problem in coverage_problems():
        yield problem, None


FAMILY = KernelFamily(
    name="cache/append_cuda", op="append", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage,
)
