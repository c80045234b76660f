"""Host side of gemm/gemm_cpu: matrix products with a fused epilogue in generated C++.

The kernel and its data flow are described in templates/include/kernelgen/gemm/gemm_cpu.h; the choices made here, with
their measurements, in docs/design/gemm_portable.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.params import ParamStruct
from kernelgen.problems.gemm import ACTIVATIONS, GemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import GemmTensors
from kernelgen.verdicts import Verdict, first_no

# struct GemmCpuParams of the header.
PARAMS = ParamStruct((
    ("a", "ptr"), ("b", "ptr"), ("bias", "ptr"), ("c", "ptr"), ("out", "ptr"),
    ("a_batch", "i64"), ("a_row", "i64"), ("a_column", "i64"), ("b_batch", "i64"), ("b_row", "i64"), ("b_column", "i64"),
    ("c_batch", "i64"), ("c_row", "i64"), ("out_batch", "i64"), ("out_row", "i64"),
    ("m", "i64"), ("n", "i64"), ("k", "i64"), ("block_m", "i64"), ("block_n", "i64"), ("block_k", "i64"),
    ("tasks_m", "i64"), ("tasks_n", "i64"), ("b_offset", "i64"), ("sums_offset", "i64"), ("beta", "f64"),
))
ENTRY = "gemm_cpu"

_FLOATS = ("fp32", "bf16", "fp16")
_ACTIVATIONS = {None: "kNone", "relu": "kRelu", "gelu": "kGelu", "gelu_tanh": "kGeluTanh", "silu": "kSilu",
                "swiglu": "kSilu", "geglu": "kGelu"}
_GATES = {"gate_first": "kGateFirst", "up_first": "kUpFirst", "interleaved": "kInterleaved"}


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(value: int, unit: int) -> int:
    return _ceil_div(value, unit) * unit


@dataclass(frozen=True)
class Tiling:
    """The register tile of a dtype at an ISA level; the rendered file asserts that the header agrees.

    rows, vecs   of the tile: rows of a by registers of columns of b
    width        columns of b
    depth        elements of k in one step: 2 where bf16 pairs are multiplied
    packed, sum  bytes of an element as packed, of an accumulator
    """

    rows: int
    vecs: int
    width: int
    depth: int
    packed: int
    sum: int

    @staticmethod
    def of(problem: GemmProblem, isa: str) -> Tiling:
        wide = isa != "x86-64-v3"
        pairs = isa == "x86-64-v4-bf16" and problem.a_dtype == "bf16"
        sum_bytes = 8 if problem.a_dtype == "fp64" else 4
        # Both fill the registers with accumulators (microkernel.h); gate and up want an even number of registers.
        rows, vecs = (8, 2) if wide else (6, 2) if problem.gated else (4, 3)
        return Tiling(rows, vecs, vecs * (64 if wide else 32) // sum_bytes, 2 if pairs else 1, 2 if pairs else sum_bytes, sum_bytes)


@dataclass(frozen=True)
class Config:
    """Blocks of a task, in outputs and in elements of k. None is compiled in; block_k decides the order of summation.

    thin  the form for up to four rows, which reads b where it lies (gemm_thin.h); its tasks own all rows and all of k
    """

    block_m: int
    block_n: int
    block_k: int
    thin: bool = False

    def __str__(self) -> str:
        return f"thin x{self.block_n}" if self.thin else f"{self.block_m}x{self.block_n}x{self.block_k}"


def _outputs(problem: GemmProblem) -> int:
    return problem.n // 2 if problem.gated else problem.n


def supports(problem: GemmProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    family = ("fp64",) if p.a_dtype == "fp64" else _FLOATS
    return first_no(
        (target.kind == "cpu", f"gemm_cpu needs a CPU, got {target}"),
        (p.a_dtype in (*_FLOATS, "fp64") and p.a_dtype == p.b_dtype,
         f"a and b are {p.a_dtype} and {p.b_dtype}, gemm_cpu takes one of fp64, fp32, bf16 and fp16"),
        (p.out_dtype in family, f"out dtype {p.out_dtype} with {p.a_dtype} inputs is not one of {', '.join(family)}"),
        (p.bias_dtype in (None, *family), f"bias dtype {p.bias_dtype} with {p.a_dtype} inputs is not one of {', '.join(family)}"),
        (p.c_dtype in (None, *family), f"c dtype {p.c_dtype} with {p.a_dtype} inputs is not one of {', '.join(family)}"),
        (p.activation is None or p.activation in ACTIVATIONS, f"activation {p.activation} is not in gemm_cpu"),
        (p.scales is None and p.out_scale is None, f"scales={p.scales}, out_scale={p.out_scale} are not in gemm_cpu"),
        (p.weight_format is None, f"packed {p.weight_format} weights are not in gemm_cpu"),
    )


# Of the thin form: the largest m for which it beats packing b in every dtype and order (Zen 4, 2048 x 2048 b).
_THIN_ROWS = 4
# Scratch of a thread: must stay inside its share of the L3 cache to be of any use.
_SCRATCH_LIMIT = 64 << 20


def _offsets(problem: GemmProblem, target: Target, config: Config) -> tuple[int, int, int]:
    """Bytes in front of b's panel and of the sums, and of all scratch. 64 bytes lie between them, so that
    no two panels share a cache line."""
    t, c = Tiling.of(problem, target.isa), config
    if c.thin:
        register = (64 if target.isa != "x86-64-v3" else 32) // t.sum * t.depth
        sums = _round_up(_THIN_ROWS * _round_up(problem.k, register) * t.packed, 64)
        return 0, sums, sums + _THIN_ROWS * c.block_n * (2 if problem.gated else 1) * t.sum
    rows, outputs = _round_up(c.block_m, t.rows), t.width // 2 if problem.gated else t.width
    b = _round_up(rows * c.block_k * t.packed, 64) + 64
    sums = b + _round_up(t.width * c.block_k * t.packed, 64) + 64
    tiles = (rows // t.rows) * _ceil_div(c.block_n, outputs) if problem.k > c.block_k else 1
    return b, sums, sums + tiles * t.rows * t.width * t.sum


def legal(problem: GemmProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit: whole steps of k, scratch?"""
    c, t = config, Tiling.of(problem, target.isa)
    scratch = _offsets(problem, target, c)[2]
    scattered = problem.gated and problem.gate_up == "interleaved" and problem.b_order == "row"
    return first_no(
        (not c.thin or problem.m <= _THIN_ROWS, f"config {c} takes up to {_THIN_ROWS} rows, got m={problem.m}"),
        (not c.thin or not scattered, f"config {c} needs gate columns beside each other, got interleaved ones in row order"),
        (min(c.block_m, c.block_n, c.block_k) >= 1, f"config {c} has an empty block"),
        (c.block_k % t.depth == 0, f"block_k {c.block_k} is not a multiple of the {t.depth} elements of a step"),
        (scratch <= _SCRATCH_LIMIT, f"config {c} needs {scratch} bytes of scratch a thread, at most {_SCRATCH_LIMIT}"),
    )


# A panel of b takes three quarters of a 32 KB L1; 512 rows of a in panels of that depth take 400 KB of L2. Between half
# and twice these sizes the speed of a Zen 4 core stays within 3 %.
_PANEL_BYTES = 24 << 10
_ROWS = 512
_COLUMNS = 1024


def _block_k(problem: GemmProblem, target: Target) -> int:
    """The depth of a panel. Never depends on extents: it fixes the bits."""
    t = Tiling.of(problem, target.isa)
    return _PANEL_BYTES // (t.width * t.packed)


def candidates(problem: GemmProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first: few rows take the thin form; blocks are halved until every core has four tasks."""
    rows, columns, block_k = _ROWS, _COLUMNS, _block_k(problem, target)
    wanted = 4 * max(target.sm_count, 1)
    thin = Config(_THIN_ROWS, max(64, min(_COLUMNS, _round_up(_ceil_div(_outputs(problem), wanted), 64))), block_k, thin=True)

    def tasks() -> int:
        return _ceil_div(problem.m, rows) * _ceil_div(_outputs(problem), columns) * problem.batch

    while tasks() < wanted and (rows > 32 or columns > 64):
        if columns >= 2 * rows:
            columns //= 2
        else:
            rows //= 2
    for option in dict.fromkeys((thin, Config(rows, columns, block_k), Config(_ROWS, _COLUMNS, block_k))):
        if legal(problem, target, option):
            yield option


def spec(problem: GemmProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes and epilogue. Orders, extents and blocks are run-time values."""
    p, t = problem, Tiling.of(problem, target.isa)
    bias, addend = p.bias_dtype or p.out_dtype, p.c_dtype or p.out_dtype
    words = [*(["thin"] if config.thin else []), p.a_dtype, p.out_dtype]
    words += [f"bias_{bias}"] if p.bias else []
    words += [p.activation] if p.activation else []
    words += [p.gate_up] if p.gated else []
    words += [f"c_{addend}"] if p.accumulate_c else []
    parameters: dict[str, Any] = dict(
        element=DTYPES[p.a_dtype].cpp, out=DTYPES[p.out_dtype].cpp, bias_type=DTYPES[bias].cpp, c_type=DTYPES[addend].cpp,
        tile_rows=t.rows, tile_vecs=t.vecs, tile_width=t.width, depth=t.depth, packed_bytes=t.packed, sum_bytes=t.sum,
        bias=p.bias, activation=_ACTIVATIONS[p.activation], gate=_GATES[p.gate_up] if p.gated else "kNone",
        accumulate=p.accumulate_c, header="gemm_thin" if config.thin else "gemm_cpu",
        kernel="GemmThinCpu" if config.thin else "GemmCpu",
    )
    return KernelSpec.make(
        "gemm_cpu_" + "_".join(words), "gemm/gemm_cpu.cc.jinja", "cxx", parameters,
        params=PARAMS, params_type="kernelgen::GemmCpuParams", entries=(ENTRY,), target=target,
    )


def bind(problem: GemmProblem, config: Config, kernel: Any, tensors: GemmTensors) -> Callable[[GemmTensors], None]:
    """The closure of a repeated call: packs addresses, runs the tasks. An empty output has none."""
    p, t = problem, tensors
    outputs = _outputs(p)
    target = kernel.spec.target
    depth = Tiling.of(p, target.isa).depth
    block_k = min(config.block_k, max(_round_up(p.k, depth), depth))
    c = replace(config, block_m=min(config.block_m, max(p.m, 1)), block_n=min(config.block_n, max(outputs, 1)), block_k=block_k)
    tasks_m, tasks_n = 1 if c.thin and p.m else _ceil_div(p.m, c.block_m), _ceil_div(outputs, c.block_n)
    b_offset, sums_offset, scratch = _offsets(p, target, c)
    launch = kernel.prepare(phases=((0, tasks_m * tasks_n * p.batch),), scratch_bytes=scratch)
    # With k = 1 a column order may come with any stride along k; the thin form tells the orders apart by it.
    tail = PARAMS.pack_scalars({
        "a_batch": t.a.stride(0), "a_row": t.a.stride(1), "a_column": t.a.stride(2),
        "b_batch": t.b.stride(0) if p.batched_b else 0, "b_row": 1 if p.b_order == "col" else t.b.stride(1), "b_column": t.b.stride(2),
        "c_batch": t.c.stride(0) if t.c is not None else 0, "c_row": t.c.stride(1) if t.c is not None else 0,
        "out_batch": t.out.stride(0), "out_row": t.out.stride(1), "m": p.m, "n": outputs, "k": p.k,
        "block_m": c.block_m, "block_n": c.block_n, "block_k": c.block_k, "tasks_m": tasks_m, "tasks_n": tasks_n,
        "b_offset": b_offset, "sums_offset": sums_offset, "beta": t.beta,
    })
    pack = PARAMS.pointer_packer.pack
    with_bias, with_c = p.bias, p.accumulate_c

    def run(t: GemmTensors) -> None:
        launch(pack(
            t.a.data_ptr(), t.b.data_ptr(),
            t.bias.data_ptr() if with_bias else 0,  # type: ignore[union-attr]
            t.c.data_ptr() if with_c else 0,  # type: ignore[union-attr]
            t.out.data_ptr(),
        ) + tail)

    return run


def coverage() -> Iterable[tuple[GemmProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = GemmProblem(1, 200, 200, 200, "fp32", "fp32", "fp32")
    yield base, None
    for dtype in ("bf16", "fp16", "fp64"):
        yield replace(base, a_dtype=dtype, b_dtype=dtype, out_dtype=dtype, b_order="col"), None
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        yield replace(base, activation=activation, bias=True, bias_dtype="fp32"), None
    yield replace(base, a_dtype="bf16", b_dtype="bf16", activation="swiglu", bias=True, bias_dtype="bf16"), None
    yield replace(base, activation="geglu", gate_up="up_first", accumulate_c=True, c_dtype="bf16"), None
    yield replace(base, a_dtype="fp16", b_dtype="fp16", out_dtype="bf16", activation="swiglu", gate_up="interleaved"), None
    for dtype in ("fp32", "bf16", "fp16", "fp64"):
        yield replace(base, m=3, a_dtype=dtype, b_dtype=dtype, out_dtype=dtype), None
    yield replace(base, m=1, activation="swiglu", bias=True, bias_dtype="fp32"), None


FAMILY = KernelFamily(
    name="gemm/gemm_cpu", op="gemm", target_kind="cpu", toolchain="cxx", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage,
)
