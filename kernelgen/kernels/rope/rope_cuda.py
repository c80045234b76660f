"""Host side of rope/rope_cuda: rotary position embedding for sm_80 and later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kernelgen.cache_tensors import RopeTensors
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.rope.access import rope_access, table_bytes, units_of_head
from kernelgen.kernels.rope.rope import PARAMS, coverage_problems, data_verdict, pointer_packing, scalars, words_of
from kernelgen.problems.cache_ops import RopeProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

ENTRY = "rope_cuda"
_MAX_BLOCKS = (1 << 31) - 1  # grid x
_THREADS = (64, 128, 256)


@dataclass(frozen=True)
class Config:
    """Threads of a block, which takes one token."""

    threads: int

    def __str__(self) -> str:
        return f"t{self.threads}"


def _access(p: RopeProblem) -> int:
    return rope_access(p.dtype, p.alignment, p.rotation, p.head_dim)


def _units(p: RopeProblem) -> int:
    return (p.q_heads + p.k_heads) * units_of_head(_access(p), p.rotation, p.head_dim, passing=not p.in_place)


def supports(problem: RopeProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cuda" and target.capability >= 80, f"rope_cuda needs sm_80 or later, got {target}"),
        (p.tokens <= _MAX_BLOCKS, f"{p.tokens} tokens exceed the grid's {_MAX_BLOCKS}"),
        ((p.q_heads + p.k_heads) * p.head_dim < 1 << 31, f"{p.q_heads} heads of {p.head_dim} exceed 2^31 elements of a token"),
    ) and data_verdict(p)


def legal(problem: RopeProblem, target: Target, config: Config) -> Verdict:
    """Any token fits any block of whole warps."""
    return first_no((config.threads in _THREADS, f"{config.threads} threads are not one of {', '.join(map(str, _THREADS))}"))


def candidates(problem: RopeProblem, target: Target) -> Iterator[Config]:
    """The smallest block with a thread per unit, else the largest."""
    units = _units(problem)
    yield from sorted((Config(threads) for threads in _THREADS), key=lambda c: (c.threads < min(units, _THREADS[-1]), c.threads))


def spec(problem: RopeProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, pairing, where angles come from, access width and config."""
    turn, access = problem.rotation, _access(problem)
    parameters: dict[str, Any] = dict(
        element=DTYPES[problem.dtype].cuda, table=DTYPES[turn.cache_dtype or "fp64"].cuda, cached=turn.cache_dtype is not None,
        interleaved=turn.interleaved, access=access, threads=config.threads)
    return KernelSpec.make(
        "rope_cuda_" + "_".join([*words_of(problem), f"a{access}", str(config)]), "rope/rope_cuda.cu.jinja", "nvrtc", parameters,
        params=PARAMS, params_type="kernelgen::RopeParams", entries=(ENTRY,), target=target)


def bind(problem: RopeProblem, config: Config, kernel: Any, tensors: RopeTensors) -> Callable[[RopeTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    p = problem
    launch = kernel.prepare(
        tensors.q.device.index or 0, grid=(p.tokens if _units(p) else 0, 1, 1), block=(config.threads, 1, 1),
        shared_memory=table_bytes(p.rotation, p.dtype))
    tail = scalars(p, tensors, 0)
    addresses = pointer_packing()

    def run(t: RopeTensors) -> None:
        launch(addresses(t) + tail)

    return run


def coverage() -> Iterable[tuple[RopeProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    for problem in coverage_problems():
        yield problem, None


FAMILY = KernelFamily(
    name="rope/rope_cuda", op="rope", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage,
)
