"""Host side of gemm/dense_sm90_cute: 16-bit products on Hopper in CuTe-DSL, whose epilogue is a traced Python function.

What a call asks for (bias, activation, beta * c) is such a function too, made here. The kernel: templates/gemm/dense_sm90_cute.py.jinja;
state and measurements: docs/design/toolchains_cute_triton.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm.mma import RESERVED_SHARED_MEMORY
from kernelgen.kernels.gemm.row_totals import partials
from kernelgen.kernels.gemm.sm90 import MMA_ROWS, ROW_BYTES, round_up, supports_common
from kernelgen.params import ParamStruct
from kernelgen.problems.gemm import GemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target, target_of
from kernelgen.tensors import GemmTensors
from kernelgen.variants.arguments import readable
from kernelgen.variants.epilogue import TracedEpilogue, trace_epilogue
from kernelgen.variants.traced import ExtraTensor
from kernelgen.verdicts import Verdict, first_no

_DSL = {"bf16": "BFloat16", "fp16": "Float16"}
_TORCH = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_MAX_SUMS = {1: 256, 2: 200, 3: 112}  # accumulators that leave a consumer's registers room for the rest
_ACTIVATIONS: dict[str | None, Callable[[Any], Any]] = {
    None: lambda x: x, "relu": torch.relu, "silu": torch.nn.functional.silu,
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5))),
    "gelu_tanh": lambda x: x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)),
}


_GATES = {"swiglu": "silu", "geglu": "gelu"}


@dataclass(frozen=True)
class Config:
    """Tunables: a consumer has ``repeats`` x 64 rows and ``block_n`` columns of a tile of ``consumers`` such parts, or with ``pingpong``
    tiles of its own; ``cluster_m`` x ``cluster_n`` blocks share what they load; ``slabs`` of 64 rows x 128 bytes on their way out for each
    consumer; tiles go in bands of ``band`` along M."""

    repeats: int
    consumers: int
    block_n: int
    stages: int
    cluster_m: int = 1
    cluster_n: int = 1
    pingpong: bool = False
    slabs: int = 2
    band: int = 8

    @property
    def block_m(self) -> int:
        return MMA_ROWS * self.repeats * (1 if self.pingpong else self.consumers)

    @property
    def blocks(self) -> int:
        return self.cluster_m * self.cluster_n

    def __str__(self) -> str:
        parts = [f"{self.block_m}x{self.block_n} s{self.stages}", f"c{self.cluster_m}x{self.cluster_n}" if self.blocks > 1 else "",
                 "pingpong" if self.pingpong else f"w{self.consumers}", f"o{self.slabs}" if self.slabs != 2 else "",
                 f"band{self.band}" if self.band != 8 else ""]
        return " ".join(p for p in parts if p)


def shared_memory(problem: GemmProblem, c: Config) -> int:
    """Bytes of the struct of the template, with what aligns its parts."""
    return 1024 + c.stages * (c.block_m + c.block_n) * ROW_BYTES + c.consumers * c.slabs * MMA_ROWS * ROW_BYTES


def supports(problem: Any, target: Target) -> Verdict:
    p = problem
    return supports_common(p, target, "dense_sm90_cute") and first_no(
        (p.a_dtype in _DSL, f"a and b are {p.a_dtype}, dense_sm90_cute takes bf16 or fp16"),
        ((p.a_order, p.b_order) == ("row", "col"), f"orders {p.a_order}, {p.b_order}: dense_sm90_cute takes K contiguous in both"),
        (p.out_dtype in _DSL and p.out_scale is None, f"out dtype {p.out_dtype} with out_scale={p.out_scale}: bf16 or fp16"),
        (p.epilogue is None or not p.epilogue.outside_dsl, f"epilogue: {getattr(p.epilogue, 'outside_dsl', '')}"),
        (p.epilogue is not None or p.activation in (*_ACTIVATIONS, *_GATES), f"activation {p.activation} is not in dense_sm90_cute"),
        (not p.gated or p.gate_up != "interleaved", "gate and up columns take turns: dense_sm90_cute takes halves"),
        (p.epilogue is None or not p.gated or p.gate_up == "gate_first", "a function's gate lies behind what it gates: gate_first"),
        (not p.requires_grad, "a gradient is asked for, and the kernel has no backward"),
        (p.out_alignment == 16, f"rows of c or out are aligned to {p.out_alignment} bytes, TMA needs 16"),
        (p.outputs % 8 == 0, f"rows of {p.outputs} results end within 16 bytes, and the copy engine would write them whole"),
    )


def legal(problem: GemmProblem, target: Target, config: Config) -> Verdict:
    c = config
    sums, shared = c.repeats * c.block_n // 2, shared_memory(problem, c)
    return first_no(
        (c.repeats >= 1 and c.consumers in _MAX_SUMS and c.stages >= 2 and c.slabs >= 1 and c.band >= 1,
         f"config {c}: expected 1 to 3 consumers, 2 stages or more"),
        (not c.pingpong or c.consumers == 2, f"config {c}: two consumers take turns"),
        (c.blocks in (1, 2), f"config {c}: clusters of up to 2 blocks"),
        (c.block_n % (MMA_ROWS * (2 if problem.gated else 1)) == 0 and c.block_n <= 256,
         f"block_n {c.block_n}: a multiple of 64, of a gate of 128, at most 256"),
        (c.block_m // c.cluster_n <= 256, f"config {c}: a box has at most 256 rows"),
        (sums <= _MAX_SUMS.get(c.consumers, 0), f"config {c} has {sums} accumulators per thread"),
        (shared <= target.shared_memory_per_block - RESERVED_SHARED_MEMORY,
         f"config {c} needs {shared} bytes of shared memory, {target} has {target.shared_memory_per_block}"),
    )


_CONFIGS = (
    Config(2, 2, 128, 5, cluster_m=2, pingpong=True), Config(2, 2, 128, 5, pingpong=True), Config(1, 2, 256, 4, cluster_m=2),
    Config(2, 2, 128, 4, cluster_n=2), Config(2, 2, 128, 4), Config(1, 2, 256, 4), Config(1, 2, 192, 5, pingpong=True),
    Config(1, 2, 128, 6), Config(1, 2, 128, 6, pingpong=True), Config(1, 1, 128, 8), Config(1, 1, 64, 8),
)
# Where consumers share a tile nothing hides its epilogue, which takes as long as so many steps of K; their products took 0.93 of the time
# of those that take turns (fitted to five shapes, H200, 2026-11-30, docs/design/toolchains_cute_triton.md). Small tiles were not timed.
_EPILOGUE_STEPS, _SHARED_TILES, _SMALL_TILES = 6, 0.93, 1.15


def _work(problem: GemmProblem, target: Target, c: Config) -> float:
    """Waves of tiles by their area and depth."""
    p, columns = problem, c.block_n // (2 if problem.gated else 1)
    tiles = -(-p.m // (c.block_m * c.cluster_m)) * -(-p.outputs // (columns * c.cluster_n)) * p.batch
    waves = -(-tiles // max(1, (target.sm_count or 132) // c.blocks))
    steps = -(-p.k // 64) + (1 if c.pingpong else _EPILOGUE_STEPS)
    area = c.block_m * c.block_n
    return waves * steps * area * (_SMALL_TILES if area < 128 * 128 else 1 if c.pingpong else _SHARED_TILES)


def candidates(problem: GemmProblem, target: Target) -> Iterator[Config]:
    return (c for c in sorted(_CONFIGS, key=lambda c: _work(problem, target, c)) if legal(problem, target, c))


@lru_cache(maxsize=256)
def epilogue_of(bias: str | None, activation: str | None, gate_up: str, c: str | None) -> TracedEpilogue:
    """What a call asks for, as a function. c comes behind the activation, and where beta is 0 its values do not matter."""
    def end(x: Any, ctx: Any) -> Any:
        return torch.where(ctx.beta != 0, x + ctx.beta * ctx.c[ctx.batch, ctx.row, ctx.column], x) if c is not None else x

    def plain(x: Any, ctx: Any) -> Any:
        return end(_ACTIVATIONS[activation](x + ctx.bias[ctx.column] if bias is not None else x), ctx)

    def gated(x: Any, y: Any, ctx: Any) -> Any:
        if bias is not None:
            x, y = x + ctx.bias[ctx.column], y + ctx.bias[ctx.column + ctx.bias.shape[0] // 2]
        gate, up = (x, y) if gate_up == "gate_first" else (y, x)
        return end(_ACTIVATIONS[_GATES[activation or ""]](gate) * up, ctx)

    tensors = ({"bias": ExtraTensor("bias", _TORCH[bias], 1)} if bias is not None else {}) | (
        {"c": ExtraTensor("c", _TORCH[c], 3)} if c is not None else {})
    numbers = {"beta": 1.0} if c is not None else {}
    return trace_epilogue(gated, tensors, numbers, True) if activation in _GATES else trace_epilogue(plain, tensors, numbers)


def _epilogue(p: GemmProblem) -> TracedEpilogue:
    if isinstance(p.epilogue, TracedEpilogue):
        return p.epilogue
    return epilogue_of((p.bias_dtype or p.out_dtype) if p.bias else None, p.activation, p.gate_up if p.gated else "",
                       (p.c_dtype or p.out_dtype) if p.accumulate_c else None)


def spec(problem: GemmProblem, target: Target, config: Config, epilogue: TracedEpilogue | None = None) -> KernelSpec:
    """``epilogue``: in the place of what the problem asks for."""
    p, c, e = problem, config, epilogue or _epilogue(problem)
    parameters: dict[str, Any] = {
        "kinds": e.kinds,
        "operand": _DSL[p.a_dtype], "output": _DSL[p.out_dtype], "block_n": c.block_n, "repeats": c.repeats, "consumers": c.consumers,
        "stages": c.stages, "cluster_m": c.cluster_m, "cluster_n": c.cluster_n, "pingpong": c.pingpong, "slabs": c.slabs, "band": c.band,
        "batched_b": p.batched_b, "gated": p.gated, "epilogue": e.code, "extra": tuple(zip(e.names, e.declarations)),
        "stand_ins": e.stand_ins, "given": "".join(f", extra_{name}" for name in e.names),
    }
    words = ["gemm_dense_sm90_cute", p.a_dtype, p.out_dtype, "batched" if p.batched_b else "",
             p.activation if p.gated else "", f"e{e.digest}" if e.result.op != "score" or e.totals else "", *str(c).split()]
    return KernelSpec.make("_".join(w for w in words if w), "gemm/dense_sm90_cute.py.jinja", "cutedsl", parameters, params=ParamStruct(()),
                           params_type="", entries=("gemm",), target=target)


def view_of(sample: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    """What a later call gives in the place of ``sample``, as the kernel takes it: moe/layer's tensors then say no more than addresses.
    Strides of dimensions of one entry say nothing either, and the kernel checks that all are multiples of 16 bytes."""
    unit, last = 16 // sample.element_size(), sample.dim() - (1 if sample.stride(-1) == 1 else 2)
    strides = tuple(s if d == last or s % unit == 0 else round_up(max(1, s), unit) if n == 1 else s
                    for d, (s, n) in enumerate(zip(sample.stride(), sample.shape)))
    shape, dtype = sample.shape, sample.dtype

    def view(x: Any) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return x if x.shape == shape and x.stride() == strides else x.as_strided(shape, strides)
        return x.memory.view(dtype).as_strided(shape, strides, (x.address - x.memory.data_ptr()) // dtype.itemsize)

    return view


def bind(problem: GemmProblem, config: Config, kernel: Any, tensors: GemmTensors) -> Callable[[GemmTensors], None]:
    """The closure of a repeated call."""
    e = _epilogue(problem)
    if e.totals:
        tiles = -(-problem.outputs // (config.block_n // (2 if problem.gated else 1)))
        return _closure(config, kernel, tensors,
                        lambda t: [partials(problem, t, tiles), t.totals, *(readable(t.epilogue.tensors[x.name]) for x in e.tensors)],
                        lambda t: [t.epilogue.scalars[x.name] for x in e.scalars])
    if problem.epilogue is not None:
        return _closure(config, kernel, tensors, lambda t: [readable(t.epilogue.tensors[x.name]) for x in e.tensors],
                        lambda t: [t.epilogue.scalars[x.name] for x in e.scalars])
    return closure(config, kernel, tensors, tuple(s.name for s in e.scalars), tuple(t.name for t in e.tensors))


def closure(config: Config, kernel: Any, tensors: Any, scalars: tuple[str, ...], extra: tuple[str, ...]) -> Callable[[Any], None]:
    """``scalars`` and ``extra``: the tensors' fields of the epilogue's values. The former are what they are in this call."""
    numbers = [getattr(tensors, name) for name in scalars]
    return _closure(config, kernel, tensors, lambda t: [getattr(t, name) for name in extra], lambda t: numbers)


def _closure(config: Config, kernel: Any, tensors: Any, extra: Callable[[Any], list[Any]], numbers: Callable[[Any], list[Any]],
             ) -> Callable[[Any], None]:
    t, function = tensors, kernel.entry("gemm")
    blocks = max(1, target_of(t.a.device).sm_count // config.blocks) if t.a.device.type == "cuda" else 1
    a, b, out = view_of(t.a), view_of(t.b), view_of(t.out)

    def run(t: Any) -> None:
        function(a(t.a), b(t.b), out(t.out), *extra(t), *numbers(t), blocks)

    return run


def coverage() -> Iterable[tuple[GemmProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = GemmProblem(1, 4096, 4096, 4096, "bf16", "bf16", "bf16", b_order="col")
    half = replace(base, a_dtype="fp16", b_dtype="fp16", out_dtype="fp16")
    yield base, Config(2, 2, 128, 5, cluster_m=2, pingpong=True)
    yield (replace(half, bias=True, bias_dtype="fp16", activation="silu", accumulate_c=True, c_dtype="fp16"),
           Config(2, 2, 128, 4, cluster_n=2))
    yield replace(base, batch=3, batched_b=True, bias=True, bias_dtype="fp32", activation="gelu"), Config(1, 1, 64, 8, slabs=1)
    yield replace(base, activation="swiglu", bias=True, bias_dtype="bf16"), Config(1, 2, 256, 4, cluster_m=2)


FAMILY = KernelFamily(
    name="gemm/dense_sm90_cute", op="gemm", target_kind="cuda", toolchain="cutedsl", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage, capabilities=(90,),
)
