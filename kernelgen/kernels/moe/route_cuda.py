"""Host side of moe/route_cuda: router logits to experts and weights, a warp per token, for sm_80 and later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.moe import route
from kernelgen.kernels.moe.route import known_method, pointer_packing, weighting, words_of
from kernelgen.kernels.rowwise import MAX_BLOCKS, dependent, repeated
from kernelgen.moe_tensors import RouteTensors
from kernelgen.params import ParamStruct
from kernelgen.problems.moe import RouteProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

# struct RouteCudaParams of the header.
PARAMS = ParamStruct((
    ("logits", "ptr"), ("bias", "ptr"), ("weights", "ptr"), ("ids", "ptr"), ("counts", "ptr"),
    ("tokens", "i64"), ("logits_row", "i64"), ("experts", "i32"), ("k", "i32"), ("groups", "i32"),
    ("group_size", "i32"), ("kept_groups", "i32"), ("scaling", "f32"),
))
ENTRY = "route_cuda"
MAX_EXPERTS, MAX_K = 1024, 32

_DTYPES = ("fp32", "bf16", "fp16")
_WARP = 32
# Logits per lane that are compiled. A multiple of 4 lets a lane load 8 bytes or more at a time.
_CLASSES = (1, 2, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class Config:
    """Warps, and so tokens, of a block."""

    warps: int

    def __str__(self) -> str:
        return f"w{self.warps}"


def values_per_lane(experts: int) -> int:
    """The smallest compiled class that holds a row."""
    return next(v for v in _CLASSES if v * _WARP >= experts)


def _access(values: int, size: int, alignment: int) -> int:
    """Elements of one load: a power of two that divides a lane's values, of at most 16 aligned bytes."""
    return min(values & -values, max(1, min(16, alignment) // size))


def group_lanes(problem: RouteProblem) -> int:
    """Lanes that hold a group, where these are neighbours in a power of two; 0: groups are looked up in shared memory."""
    p = problem
    if not p.grouped or p.num_groups is None:
        return 0
    values, size = values_per_lane(p.experts), p.experts // p.num_groups
    lanes = size // values
    return lanes if size % values == 0 and lanes & (lanes - 1) == 0 and 0 < lanes <= _WARP else 0


def supports(problem: RouteProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cuda" and target.capability >= 80, f"route_cuda needs sm_80 or later, got {target}"),
        (p.dtype in _DTYPES, f"dtype {p.dtype} is not one of {', '.join(_DTYPES)}"),
        (p.bias_dtype in (None, *_DTYPES), f"bias dtype {p.bias_dtype} is not one of {', '.join(_DTYPES)}"),
        known_method(p),
        (p.experts <= MAX_EXPERTS, f"{p.experts} experts exceed the {MAX_EXPERTS} that a warp holds"),
        (p.k <= MAX_K, f"k = {p.k} exceeds the {MAX_K} lanes of a warp, one per chosen expert"),
        (p.tokens <= MAX_BLOCKS, f"{p.tokens} tokens exceed {MAX_BLOCKS}"),
    )


def legal(problem: RouteProblem, target: Target, config: Config) -> Verdict:
    return first_no((1 <= config.warps <= 4, f"config {config} is not of 1 to 4 warps, which bound the shared memory of groups"))


def candidates(problem: RouteProblem, target: Target) -> Iterator[Config]:
    """A warp for each of an SM's schedulers, then smaller blocks."""
    for warps in (4, 2, 1):
        yield Config(warps)


def spec(problem: RouteProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, class of experts, access width, method; neither experts nor k themselves."""
    p = problem
    values, lanes = values_per_lane(p.experts), group_lanes(p)
    bias = p.bias_dtype or p.dtype
    access, bias_access = (_access(values, DTYPES[d].bytes, p.alignment) for d in (p.dtype, bias))
    parameters: dict[str, Any] = dict(
        element=DTYPES[p.dtype].cuda, bias_type=DTYPES[bias].cuda, weighting=weighting(p), warps=config.warps, values=values,
        access=access, bias_access=bias_access, has_bias=p.bias, grouped=p.grouped, group_lanes=lanes, counts=p.counts)
    name = ["route_cuda", *words_of(p), f"v{values}", f"a{access}x{bias_access}" if p.bias else f"a{access}",
            *([f"g{lanes}"] if p.grouped else []), str(config)]
    return KernelSpec.make(
        "_".join(name), "moe/route_cuda.cu.jinja", "nvrtc", parameters, params=PARAMS, params_type="kernelgen::RouteCudaParams",
        entries=(ENTRY,), target=target)


def bind(problem: RouteProblem, config: Config, kernel: Any, tensors: RouteTensors) -> Callable[[RouteTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    p, t = problem, tensors
    launch = kernel.prepare(
        t.logits.device.index or 0, grid=(-(-p.tokens // config.warps), 1, 1), block=(config.warps * _WARP, 1, 1),
        programmatic=dependent(t.logits.device))
    tail = PARAMS.pack_scalars({
        "tokens": p.tokens, "logits_row": t.logits.stride(0), "experts": p.experts, "k": p.k, "groups": p.num_groups or 1,
        "group_size": p.experts // (p.num_groups or 1), "kept_groups": p.topk_groups or 1, "scaling": t.scaling})
    return repeated(launch, pointer_packing(PARAMS), tail)


def coverage() -> Iterable[tuple[RouteProblem, Config | None]]:
    return route.coverage(_DTYPES)


FAMILY = KernelFamily(
    name="moe/route_cuda", op="route", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage,
)
