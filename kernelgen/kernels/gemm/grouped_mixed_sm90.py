"""Host side of gemm/grouped_mixed_sm90: gemm/mixed_sm90 with groups of rows, whose sizes are on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm.mixed_sm90 import Config, closure, cost, spec_of, supports_mixed
from kernelgen.kernels.gemm.mixed_sm90 import _configs as configs
from kernelgen.kernels.gemm.mixed_sm90 import legal as legal
from kernelgen.kernels.gemm.sm90 import most_tiles
from kernelgen.problems.gemm import GroupedGemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import GroupedGemmTensors
from kernelgen.verdicts import Verdict, first_no

ENTRY = "grouped_gemm_mixed_sm90"
_GROUPINGS = {"rows": "kRows", "masked": "kMasked"}


def supports(problem: GroupedGemmProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return supports_mixed(p, target, ENTRY) and first_no(
        (p.grouping in _GROUPINGS, f"grouping {p.grouping} is not one of {', '.join(_GROUPINGS)}"))


# Rows of a group scatter around their mean as those of random routing do: so many standard deviations, each as often.
_SCATTER = (-1.6, -1.0, -0.5, 0.0, 0.5, 1.0, 1.6)


def _tiles(p: GroupedGemmProblem, config: Config) -> float:
    """Of rows of all groups, as far as they can be known: masks of which a quarter is in use."""
    if p.grouping == "masked":
        return p.batch * -(-max(1, min(p.m, max(32, p.m // 4))) // config.tokens)
    used = p.batch * (1 - (1 - 1 / p.batch) ** p.m)  # groups with rows
    mean = p.m / used
    sizes = (max(1.0, mean + z * max(mean - 1, 0.0) ** 0.5) for z in _SCATTER)
    return used * sum(-(-size // config.tokens) for size in sizes) / len(_SCATTER)


def candidates(problem: GroupedGemmProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first."""
    yield from sorted(configs(problem, target), key=lambda c: cost(problem, target, c, _tiles(problem, c), False))


def spec(problem: GroupedGemmProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: grouping, dtypes, group, epilogue and config; no extents."""
    return spec_of(problem, target, config, f"{ENTRY}_{problem.grouping}", _GROUPINGS[problem.grouping])


def bind(
    problem: GroupedGemmProblem, config: Config, kernel: Any, tensors: GroupedGemmTensors,
) -> Callable[[GroupedGemmTensors], None]:
    """The closure of a repeated call: packs addresses, launches; never looks at the groups' sizes."""
    p, c = problem, config
    tiles_m, tiles_n = -(-p.m // c.block_m), -(-p.n // c.block_n)
    tiles = most_tiles(p, c.block_m, tiles_n)
    return closure(p, c, kernel, tensors, tiles_m, tiles_n, tiles, 32 if c.tokens % 32 == 0 else 16)


def coverage() -> Iterable[tuple[GroupedGemmProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = GroupedGemmProblem(
        128, 16384, 5760, 2880, "bf16", "mxfp4", "bf16", b_order="col", batched_b=True, weight_format="mxfp4", group_size=32,
        scale_dtype="e8m0")
    oai = replace(base, activation="swiglu_oai", bias=True, bias_dtype="bf16")
    yield base, None
    for gate_up in ("gate_first", "up_first", "interleaved"):
        yield replace(oai, gate_up=gate_up), Config(256, 5)
    yield replace(oai, m=256), None
    yield replace(base, grouping="masked", m=256, bias=True, bias_dtype="fp32"), None
    int4 = replace(base, b_dtype="int4", weight_format="int4", group_size=128, scale_dtype="bf16", zero_points=True)
    yield replace(int4, activation="swiglu"), Config(192, 6)


FAMILY = KernelFamily(
    name="gemm/grouped_mixed_sm90", op="grouped_gemm", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage, capabilities=(90,),
)
