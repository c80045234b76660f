"""Host side of attention/merge_states_cuda: partial attention results combined by their LSE, for sm_80 and later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kernelgen.cache_tensors import MergeTensors
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.attention.merge_states import PARAMS, coverage_problems, pointer_packing, scalars
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.rope.access import copy_access
from kernelgen.problems.cache_ops import MergeProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

ENTRY = "merge_states_cuda"
_DTYPES = ("fp32", "bf16", "fp16")
_MAX_BLOCKS = (1 << 31) - 1  # grid x


@dataclass(frozen=True)
class Config:
    """``lanes`` neighbouring threads of a block's ``threads`` own a (token, head)."""

    threads: int
    lanes: int

    def __str__(self) -> str:
        return f"t{self.threads} l{self.lanes}"


def _access(p: MergeProblem) -> int:
    return copy_access(((DTYPES[p.dtype].bytes, p.alignment),), p.head_dim)


def supports(problem: MergeProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cuda" and target.capability >= 80, f"merge_states_cuda needs sm_80 or later, got {target}"),
        (p.dtype in _DTYPES, f"dtype {p.dtype} is not one of {', '.join(_DTYPES)}"),
        (p.lse_dtype == "fp32", f"lses of {p.lse_dtype} are not fp32"),
        (p.tokens * p.heads <= _MAX_BLOCKS, f"{p.tokens * p.heads} rows exceed the grid's {_MAX_BLOCKS}"),
    )


def legal(problem: MergeProblem, target: Target, config: Config) -> Verdict:
    """Any row fits any config; the block must be whole warps that the lanes divide."""
    c = config
    return first_no(
        (c.threads % 32 == 0 and c.threads <= 1024, f"{c.threads} threads are not 1 to 32 whole warps"),
        (c.lanes > 0 and c.threads % c.lanes == 0, f"{c.lanes} lanes do not divide {c.threads} threads"),
    )


def candidates(problem: MergeProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first: as many lanes as a row has accesses, up to two warps."""
    accesses = -(-problem.head_dim // _access(problem))
    yield from sorted((Config(128, lanes) for lanes in (8, 16, 32, 64)), key=lambda c: (c.lanes < min(accesses, 64), c.lanes))


def spec(problem: MergeProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtype, access width and config."""
    access = _access(problem)
    parameters: dict[str, Any] = dict(
        element=DTYPES[problem.dtype].cuda, threads=config.threads, lanes=config.lanes, access=access)
    return KernelSpec.make(
        f"merge_states_cuda_{problem.dtype}_a{access}_{'_'.join(str(config).split())}", "attention/merge_states_cuda.cu.jinja", "nvrtc",
        parameters, params=PARAMS, params_type="kernelgen::MergeParams", entries=(ENTRY,), target=target)


def bind(problem: MergeProblem, config: Config, kernel: Any, tensors: MergeTensors) -> Callable[[MergeTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    blocks = -(-problem.tokens * problem.heads // (config.threads // config.lanes))
    launch = kernel.prepare(tensors.outs.device.index or 0, grid=(blocks, 1, 1), block=(config.threads, 1, 1))
    tail = scalars(problem, tensors, 0)
    addresses = pointer_packing()

    def run(t: MergeTensors) -> None:
        launch(addresses(t) + tail)

    return run


def coverage() -> Iterable[tuple[MergeProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    for problem in coverage_problems():
        yield problem, None


FAMILY = KernelFamily(
    name="attention/merge_states_cuda", op="merge_states", target_kind="cuda", toolchain="nvrtc", supports=supports,
    candidates=candidates, legal=legal, spec=spec, bind=bind, coverage=coverage,
)
