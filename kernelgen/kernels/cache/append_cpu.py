"""Host side of cache/append_cpu: new tokens into a paged cache, with quantisation and rotation, in generated C++."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kernelgen.cache_tensors import AppendTensors
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.cache.append import PARAMS, coverage_problems, data_verdict, pointer_packing, quantises, scalars, words_of
from kernelgen.problems.cache_ops import AppendProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no, no, yes

ENTRY = "append_cpu"
_ROTATING = ("fp32", "bf16", "fp16", "fp64")
_CODES = {"e4m3": "kernelgen::Fp8E4M3", "e5m2": "kernelgen::Fp8E5M2"}
_WORDS = {1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 8: "uint64_t"}
# Elements of a task: some ten microseconds of work, which hides the cost of handing a task out.
_TASK_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Config:
    """Tokens of a task."""

    task_tokens: int

    def __str__(self) -> str:
        return f"{self.task_tokens} tokens"


def supports(problem: AppendProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    return first_no((target.kind == "cpu", f"append_cpu needs a CPU, got {target}")) and data_verdict(problem, _ROTATING)


def legal(problem: AppendProblem, target: Target, config: Config) -> Verdict:
    return yes() if config.task_tokens >= 1 else no(f"config {config} has an empty task")


def candidates(problem: AppendProblem, target: Target) -> Iterator[Config]:
    """One config: tasks of about _TASK_ELEMENTS."""
    p = problem
    elements = p.heads * (p.head_dim + p.head_dim_v) + p.q_heads * p.head_dim
    yield Config(max(1, _TASK_ELEMENTS // max(elements, 1)))


def _types(dtype: str, cache_dtype: str, typed: bool) -> tuple[str, str]:
    """C++ types of the tokens and of the cache; words for a plain copy."""
    if quantises(dtype, cache_dtype):
        return DTYPES[dtype].cpp, _CODES[cache_dtype]
    word = DTYPES[dtype].cpp if typed else _WORDS[DTYPES[dtype].bytes]
    return word, word


def spec(problem: AppendProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes (sizes, where a side is copied) and rotation."""
    p, turn = problem, problem.rotation
    k, k_code = _types(p.k_dtype, p.k_cache_dtype, turn is not None)
    v, v_code = _types(p.v_dtype, p.v_cache_dtype, False)
    parameters: dict[str, Any] = dict(k=k, k_code=k_code, v=v, v_code=v_code, rope=turn is not None)
    if turn is not None:
        parameters |= dict(table=DTYPES[turn.cache_dtype or "fp64"].cpp, cached=turn.cache_dtype is not None, interleaved=turn.interleaved)
    return KernelSpec.make(
        "append_cpu_" + "_".join(words_of(p)), "cache/append_cpu.cc.jinja", "cxx", parameters,
        params=PARAMS, params_type="kernelgen::AppendParams", entries=(ENTRY,), target=target)


def bind(problem: AppendProblem, config: Config, kernel: Any, tensors: AppendTensors) -> Callable[[AppendTensors], None]:
    """The closure of a repeated call: packs addresses, runs the tasks."""
    p = problem
    scratch = 0 if p.rotation is None else 2 * 8 * p.rotation.dim + 4 * p.head_dim
    launch = kernel.prepare(phases=((0, -(-p.tokens // config.task_tokens)),), scratch_bytes=scratch)
    tail = scalars(p, tensors, config.task_tokens)
    addresses = pointer_packing()

    def run(t: AppendTensors) -> None:
        launch(addresses(t) + tail)

    return run


def coverage() -> Iterable[tuple[AppendProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    for problem in coverage_problems():
        yield problem, None


FAMILY = KernelFamily(
    name="cache/append_cpu", op="append", target_kind="cpu", toolchain="cxx", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage,
)
