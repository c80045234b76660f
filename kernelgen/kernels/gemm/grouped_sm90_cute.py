"""Host side of gemm/grouped_sm90_cute: 16-bit products of groups of rows on Hopper in CuTe-DSL, the groups' sizes on the device.

What a call asks for is a traced epilogue, as in gemm/dense_sm90_cute, whose main loop and way out this kernel has (templates/cute). The
kernel: templates/gemm/grouped_sm90_cute.py.jinja; state: docs/design/toolchains_cute_triton.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from kernelgen.kernels import counters
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm.dense_sm90_cute import _ACTIVATIONS as _PLAIN
from kernelgen.kernels.gemm.dense_sm90_cute import _DSL, _TORCH, _work, view_of
from kernelgen.kernels.gemm.dense_sm90_cute import Config as DenseConfig
from kernelgen.kernels.gemm.dense_sm90_cute import legal as legal_dense
from kernelgen.kernels.gemm.sm90 import most_tiles, supports_common
from kernelgen.params import ParamStruct
from kernelgen.problems.gemm import GatheredGemmProblem, GroupedGemmProblem, ScatteredGemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target, target_of
from kernelgen.tensors import GroupedGemmTensors
from kernelgen.variants.epilogue import TracedEpilogue, trace_epilogue
from kernelgen.variants.traced import ExtraTensor
from kernelgen.verdicts import Verdict, first_no

_GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
_FLOOR = -110.0  # at and below it the smooth activations are 0 in float32, at -inf too: kActivationFloor of activations.cuh


def _floored(name: str) -> Callable[[Any], Any]:
    return lambda x: _PLAIN[name](torch.where(x < _FLOOR, _FLOOR, x))


_ACTIVATIONS: dict[str | None, Callable[[Any], Any]] = {
    **_PLAIN, "relu2": lambda x: torch.relu(x) * torch.relu(x), **{name: _floored(name) for name in ("silu", "gelu", "gelu_tanh")}}
_SMS = 132  # of an H200, where a target does not say
_GATHERING = 320  # columns (H200, 2026-12-01: 366 us by 128x256, 500 and 533 by 128x128 of 32,768 rows, N 1536, K 2048)
_GATHERED_ROWS = 128  # of a tile, whose addresses fit into the registers of the warps that bring them


@dataclass(frozen=True)
class Config(DenseConfig):
    """``dealt``: blocks take tiles from a counter as they get on, instead of every so manieth."""

    dealt: bool = False

    def __str__(self) -> str:
        return super().__str__() + (" dealt" if self.dealt else "")


def supports(problem: GroupedGemmProblem, target: Target) -> Verdict:
    p = problem
    return supports_common(p, target, "grouped_sm90_cute") and first_no(
        (p.a_dtype in _DSL, f"a and b are {p.a_dtype}, grouped_sm90_cute takes bf16 or fp16"),
        (p.grouping in ("rows", "masked"), f"grouping {p.grouping} is not in grouped_sm90_cute"),
        ((p.a_order, p.b_order) == ("row", "col"), f"orders {p.a_order}, {p.b_order}: grouped_sm90_cute takes K contiguous in both"),
        (p.out_dtype in _DSL and p.out_scale is None, f"out dtype {p.out_dtype} with out_scale={p.out_scale}: bf16 or fp16"),
        (p.scales is None, f"scales={p.scales} are not in grouped_sm90_cute"),
        (not p.requires_grad, "a gradient is asked for, and the kernel has no backward"),
        (p.out_alignment == 16 and p.outputs % 8 == 0,
         f"rows of {p.outputs} results, c or out aligned to {p.out_alignment} bytes: they leave 16 bytes at a time"),
        (not (p.gathered or p.scattered) or p.grouping == "rows", f"rows of grouping {p.grouping} have no numbers"),
        (not isinstance(p, GatheredGemmProblem) or p.tokens * max(2 * p.k, 16) < 1 << 35, "gathered rows begin beyond 32 GB"),
        (not p.scattered or not p.accumulate_c, "rows are added to what is there, and c cannot be added too"),
    )


def legal(problem: GroupedGemmProblem, target: Target, config: Config) -> Verdict:
    p, c = problem, config
    columns = c.block_n // (2 if p.gated else 1)
    return legal_dense(p, target, c) and first_no(
        (c.blocks == 1, f"config {c}: neighbouring tiles of groups share nothing to multicast"),
        (not p.gathered or c.block_m <= _GATHERED_ROWS, f"config {c}: lanes that gather have registers for {_GATHERED_ROWS} rows"),
        # 536 - 736 bytes spilled, and 24 - 32.
        (c.repeats * c.block_n <= 256 or not (p.activation or p.bias or p.accumulate_c),
         f"config {c}: an epilogue leaves too few registers for {c.repeats * c.block_n // 2} sums"),
        (c.repeats == 1 or not (p.activation and p.accumulate_c),
         f"config {c}: c beside an activation leaves too few registers for sums of several times 64 rows"),
        (most_tiles(p, c.block_m, -(-p.outputs // columns)) < 1 << 30, f"config {c}: more tiles than int32 counts"),
    )


_CONFIGS = (
    Config(2, 2, 128, 5, pingpong=True), Config(2, 2, 192, 4, pingpong=True), Config(1, 2, 256, 4), Config(1, 2, 192, 5, pingpong=True),
    Config(2, 2, 128, 4), Config(1, 2, 128, 6), Config(1, 2, 128, 6, pingpong=True), Config(1, 1, 128, 8), Config(1, 1, 64, 8),
)


def candidates(problem: GroupedGemmProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first: by equal groups, masks of which a quarter is in use."""
    p = problem
    rows = -(-p.m // p.batch) if p.grouping == "rows" else max(min(p.m, 128), p.m // 4)
    expected = replace(p, m=max(1, rows))

    def dealt(c: Config) -> bool:
        """Wherever blocks come by more than one tile (H200, 2026-12-01, tools/bench/results/tried/h200_grouped_sm90_cute.json: 0.85 - 1.00
        x the time, of gathered rows, whose tiles of the same columns are then loaded together, 0.46 - 0.98 x)."""
        along_m, along_n = -(-expected.m // c.block_m), -(-p.outputs // (c.block_n // (2 if p.gated else 1)))
        return p.grouping == "rows" and along_m * along_n * min(p.batch, p.m) > (target.sm_count or _SMS)

    def cost(c: Config) -> float:
        """Bringing gathered rows takes as long as the products of so many columns, whatever the tile's are."""
        gathering = _GATHERING * min(expected.m, c.block_m) / (c.block_m * c.block_n) if p.gathered else 0.0
        return _work(expected, target, c) * max(1.0, gathering)

    ranked = sorted(_CONFIGS, key=cost)
    return (c for c in (replace(c, dealt=dealt(c)) for c in ranked) if legal(p, target, c))


@lru_cache(maxsize=256)
def epilogue_of(bias: str | None, activation: str | None, gate_up: str, c: str | None, masked: bool, weighted: bool) -> TracedEpilogue:
    """What a call asks for, as a function of sums whose batch is the group. c comes behind the activation, and where beta is 0 its values
    do not matter; weights of rows come last."""
    name, clamped = (activation or "").removesuffix("_clamped"), activation == "swiglu_oai" or (activation or "").endswith("_clamped")

    def end(x: Any, ctx: Any) -> Any:
        if c is not None:
            x = torch.where(ctx.beta != 0, x + ctx.beta * ctx.c[ctx.batch if masked else 0, ctx.row, ctx.column], x)
        return x * ctx.row_weights[ctx.row] if weighted else x

    def plain(x: Any, ctx: Any) -> Any:
        return end(_ACTIVATIONS[activation](x + ctx.bias[ctx.batch, ctx.column] if bias is not None else x), ctx)

    def gated(x: Any, y: Any, ctx: Any) -> Any:
        if bias is not None and gate_up == "interleaved":
            x, y = x + ctx.bias[ctx.batch, 2 * ctx.column], y + ctx.bias[ctx.batch, 2 * ctx.column + 1]
        elif bias is not None:
            x, y = x + ctx.bias[ctx.batch, ctx.column], y + ctx.bias[ctx.batch, ctx.column + ctx.bias.shape[1] // 2]
        gate, up = (y, x) if gate_up == "up_first" else (x, y)
        if clamped:
            gate, up = torch.clamp(gate, max=ctx.limit), torch.clamp(up, -ctx.limit, ctx.limit)
        if name == "swiglu_oai":
            power = ctx.alpha * gate
            return end(torch.where(power < _FLOOR, 0.0, gate * torch.sigmoid(power)) * (up + 1), ctx)
        return end(_ACTIVATIONS[_GATES[name]](gate) * up, ctx)

    tensors = {key: ExtraTensor(key, _TORCH[dtype], rank) for key, dtype, rank in (
        ("bias", bias, 2), ("c", c, 3), ("row_weights", "fp32" if weighted else None, 1)) if dtype is not None}
    return trace_epilogue(gated if gate_up else plain, tensors, {"beta": 1.0, "alpha": 1.0, "limit": 1.0}, bool(gate_up))


def _epilogue(p: GroupedGemmProblem) -> TracedEpilogue:
    return epilogue_of((p.bias_dtype or p.out_dtype) if p.bias else None, p.activation, p.gate_up if p.gated else "",
                       (p.c_dtype or p.out_dtype) if p.accumulate_c else None, p.grouping == "masked", p.scattered)


def spec(problem: GroupedGemmProblem, target: Target, config: Config, epilogue: TracedEpilogue | None = None) -> KernelSpec:
    """``epilogue``: in the place of what the problem asks for."""
    p, c, e = problem, config, epilogue or _epilogue(problem)
    parameters: dict[str, Any] = {
        "operand": _DSL[p.a_dtype], "output": _DSL[p.out_dtype], "block_n": c.block_n, "repeats": c.repeats, "consumers": c.consumers,
        "stages": c.stages, "pingpong": c.pingpong, "slabs": c.slabs, "band": c.band, "masked": p.grouping == "masked",
        "gated": p.gated, "interleaved": p.gated and p.gate_up == "interleaved", "gathered": p.gathered, "scattered": p.scattered,
        "dealt": c.dealt, "epilogue": e.code, "extra": tuple(zip(e.names, e.declarations)), "stand_ins": e.stand_ins,
        "given": "".join(f", extra_{name}" for name in e.names),
    }
    words = ["grouped_gemm_sm90_cute", "gathered" if p.gathered else "scattered" if p.scattered else p.grouping, p.a_dtype, p.out_dtype,
             *([p.activation or "gated", p.gate_up] if p.gated else []), f"e{e.digest}" if e.result.op != "score" else "", *str(c).split()]
    return KernelSpec.make("_".join(w for w in words if w), "gemm/grouped_sm90_cute.py.jinja", "cutedsl", parameters,
                           params=ParamStruct(()), params_type="", entries=("gemm",), target=target)


def bind(problem: GroupedGemmProblem, config: Config, kernel: Any, tensors: GroupedGemmTensors) -> Callable[[GroupedGemmTensors], None]:
    """The closure of a repeated call; it never looks at the groups' sizes."""
    e = _epilogue(problem)
    return closure(problem, config, kernel, tensors, tuple(s.name for s in e.scalars), tuple(t.name for t in e.tensors))


def closure(problem: GroupedGemmProblem, config: Config, kernel: Any, tensors: Any, scalars: tuple[str, ...],
            extra: tuple[str, ...]) -> Callable[[Any], None]:
    """``scalars`` and ``extra``: the tensors' fields of the epilogue's values."""
    p, c, t, function = problem, config, tensors, kernel.entry("gemm")
    sms = (target_of(t.a.device).sm_count if t.a.device.type == "cuda" else None) or _SMS
    tiles = most_tiles(p, c.block_m, -(-p.outputs // (c.block_n // (2 if p.gated else 1))))
    a, b, out, ends = view_of(t.a), view_of(t.b), view_of(t.out), view_of(t.ends)
    numbers = view_of(t.rows) if p.gathered or p.scattered else None
    read = [(name, view_of(getattr(t, name))) for name in extra]
    tail = (*(getattr(t, name) for name in scalars), p.m, min(tiles, sms))
    dealt, device = c.dealt, t.a.device
    if dealt and device.type == "cuda":
        counters.provide(device.index or 0)

    def run(t: Any) -> None:
        counter, memory = counters.counter(device.index or 0) if dealt else (0, None)
        groups = ends(t.ends)
        function(a(t.a), b(t.b), out(t.out), groups, groups if numbers is None else numbers(t.rows),
                 *[view(getattr(t, name)) for name, view in read], *tail, counter)
        del memory

    return run


def coverage() -> Iterable[tuple[GroupedGemmProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = GroupedGemmProblem(64, 4096, 4096, 7168, "bf16", "bf16", "bf16", b_order="col", batched_b=True)
    half = replace(base, a_dtype="fp16", b_dtype="fp16", out_dtype="fp16")
    yield base, Config(2, 2, 192, 4, pingpong=True, dealt=True)
    yield replace(half, grouping="masked", activation="swiglu", bias=True, bias_dtype="fp16"), Config(1, 2, 256, 4)
    yield replace(base, activation="swiglu_oai", bias=True, bias_dtype="bf16", gate_up="interleaved"), Config(1, 2, 128, 6)
    yield replace(base, bias=True, bias_dtype="fp32", accumulate_c=True, c_dtype="bf16", activation="relu2"), Config(1, 1, 128, 8, slabs=1)
    for problem, config in ((base, Config(2, 2, 128, 5, pingpong=True, dealt=True)),
                            (replace(base, activation="swiglu", gate_up="up_first"), Config(1, 2, 256, 4)), (half, Config(1, 1, 64, 8))):
        yield GatheredGemmProblem(**vars(problem), tokens=512), config
    for problem, config in ((base, Config(2, 2, 128, 5, pingpong=True)),
                            (replace(half, bias=True, bias_dtype="fp32"), Config(1, 2, 256, 4))):
        yield ScatteredGemmProblem(**vars(problem), tokens=512), config


FAMILY = KernelFamily(
    name="gemm/grouped_sm90_cute", op="grouped_gemm", target_kind="cuda", toolchain="cutedsl", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage, capabilities=(90,),
)
