"""Host side of gemm/gemm_mma: 16-bit matrix products with mma.sync and a fused epilogue, for sm_80 and later.

The kernel and its data flow are described in templates/include/kernelgen/gemm/gemm_mma.cuh; the choices made here,
with their measurements, in docs/design/gemm_portable.md.
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

# struct GemmMmaParams of the header.
PARAMS = ParamStruct((
    ("a", "ptr"), ("b", "ptr"), ("bias", "ptr"), ("c", "ptr"), ("out", "ptr"),
    ("a_batch", "i64"), ("a_stride", "i64"), ("b_batch", "i64"), ("b_stride", "i64"),
    ("c_batch", "i64"), ("c_row", "i64"), ("out_batch", "i64"), ("out_row", "i64"),
    ("m", "i32"), ("n", "i32"), ("k", "i32"), ("tiles_m", "i32"), ("tiles_n", "i32"), ("beta", "f32"),
))
ENTRY = "gemm_mma"

_INPUTS = ("bf16", "fp16")
_OUTPUTS = ("bf16", "fp16", "fp32")
_MAX_EXTENT = (1 << 31) - (1 << 16)  # tile indices past the end of m, n and k stay within int32
_MAX_BLOCKS = (1 << 31) - 1  # grid x
_REGISTERS_PER_THREAD = 255
_REGISTERS_PER_SM = 65536
# Registers besides accumulators and two sets of fragments (addresses of the copies, loop state). With 36 every config
# of _MEASURED passes and ptxas 13.0 spills in none of them.
_OTHER_REGISTERS = 36
_RESERVED_SHARED_MEMORY = 1024  # per block, taken by the driver

ACTIVATION_NAMES = {None: "kNone", "relu": "kRelu", "gelu": "kGelu", "gelu_tanh": "kGeluTanh", "silu": "kSilu",
                "swiglu": "kSilu", "geglu": "kGelu"}
GATES = {"gate_first": "kGateFirst", "up_first": "kUpFirst", "interleaved": "kInterleaved"}


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _tile_bytes(rows: int, columns: int) -> int:
    """Bytes of an OperandTile: a SharedTile (kernelgen/cuda/shared_tile.cuh) rounded up to 128."""
    chunks = columns // 8
    return _ceil_div(rows * 16 * (chunks if chunks % 8 == 0 else chunks | 1), 128) * 128


@dataclass(frozen=True)
class Config:
    """Tile shape and schedule.

    block_m, block_n, block_k  the block's part of the product and the depth of one slot of the ring
    warps_m, warps_n, warps_k  how warps divide them; warps_k sets of warps share the depth of every slot
    stages                     slots of the ring
    blocks_per_sm              bounds the registers so that as many blocks fit
    raster_rows                rows of tiles that neighbouring blocks walk column by column
    """

    block_m: int
    block_n: int
    block_k: int
    warps_m: int
    warps_n: int
    warps_k: int = 1
    stages: int = 3
    blocks_per_sm: int = 1
    raster_rows: int = 8

    def __str__(self) -> str:
        words = f"{self.block_m}x{self.block_n}x{self.block_k} w{self.warps_m}x{self.warps_n}"
        words += f"x{self.warps_k}" if self.warps_k > 1 else ""
        words += f" s{self.stages}"
        words += f" b{self.blocks_per_sm}" if self.blocks_per_sm > 1 else ""
        return words + (f" r{self.raster_rows}" if self.raster_rows != 8 else "")

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n * self.warps_k

    @property
    def registers(self) -> int:
        """Estimate per thread: accumulators, two sets of fragments, the rest."""
        rows, columns = self.block_m // self.warps_m, self.block_n // self.warps_n
        return rows * columns // 32 + 2 * (rows + columns) // 4 + _OTHER_REGISTERS

    def shared_memory(self, row_a: bool, row_b: bool) -> int:
        """Dynamic shared memory in bytes: GemmMma::kSharedBytes of the header."""
        a = _tile_bytes(self.block_m, self.block_k) if row_a else _tile_bytes(self.block_k, self.block_m)
        b = _tile_bytes(self.block_k, self.block_n) if row_b else _tile_bytes(self.block_n, self.block_k)
        slab = 16 * (self.block_n // self.warps_n + 8) * 4
        return max(self.stages * (a + b), self.threads // 32 * slab)


def gate_name(problem: GemmProblem) -> str:
    return GATES[problem.gate_up] if problem.gated else "kNone"


def _splits(problem: GemmProblem) -> bool:
    """Gate and up are halves of b, which the kernel interleaves while it copies."""
    return problem.gated and problem.gate_up != "interleaved"


def _access(problem: GemmProblem) -> int:
    """Bytes of one access to a and b. The up half of a row-order b starts N / 2 elements, N bytes, into the row."""
    access = problem.alignment
    if _splits(problem) and problem.b_order == "row":
        access = min(access, problem.n & -problem.n or 16)
    return access


def _outputs(problem: GemmProblem) -> int:
    return problem.n // 2 if problem.gated else problem.n


def _tiles(problem: GemmProblem, config: Config) -> tuple[int, int]:
    return _ceil_div(problem.m, config.block_m), _ceil_div(problem.n, config.block_n)


def supports(problem: GemmProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cuda" and target.capability >= 80, f"gemm_mma needs sm_80 or later, got {target}"),
        (p.a_dtype in _INPUTS and p.a_dtype == p.b_dtype, f"a and b are {p.a_dtype} and {p.b_dtype}, gemm_mma takes bf16 or fp16"),
        (p.out_dtype in _OUTPUTS, f"out dtype {p.out_dtype} is not one of {', '.join(_OUTPUTS)}"),
        (p.bias_dtype in (None, *_OUTPUTS), f"bias dtype {p.bias_dtype} is not one of {', '.join(_OUTPUTS)}"),
        (p.c_dtype in (None, *_OUTPUTS), f"c dtype {p.c_dtype} is not one of {', '.join(_OUTPUTS)}"),
        (p.activation is None or p.activation in ACTIVATIONS, f"activation {p.activation} is not in gemm_mma"),
        (p.scales is None and p.out_scale is None, f"scales={p.scales}, out_scale={p.out_scale} are not in gemm_mma"),
        (p.weight_format is None, f"packed {p.weight_format} weights are not in gemm_mma"),
        (max(p.m, p.n, p.k) <= _MAX_EXTENT, f"an extent of {max(p.m, p.n, p.k)} exceeds {_MAX_EXTENT}"),
        (p.alignment >= 2, f"alignment {p.alignment} is below an element's 2 bytes"),
    )


def legal(problem: GemmProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target: divisibility, registers, shared memory?"""
    c = config
    row_a, row_b = problem.a_order == "row", problem.b_order == "row"
    shared = c.shared_memory(row_a, row_b)
    rows, columns, steps = c.block_m // c.warps_m, c.block_n // c.warps_n, c.block_k // (16 * c.warps_k)
    limit = min(_REGISTERS_PER_THREAD, _REGISTERS_PER_SM // (c.threads * c.blocks_per_sm))
    chunks = {"a": (c.block_k if row_a else c.block_m) // 8, "b": (c.block_n if row_b else c.block_k) // 8}
    tiles_m, tiles_n = _tiles(problem, c)
    per_sm = target.shared_memory_per_block + _RESERVED_SHARED_MEMORY
    return first_no(
        (all(x >= 16 and x & (x - 1) == 0 for x in (rows, columns)),
         f"a warp of config {c} owns {rows}x{columns}, not powers of two from 16"),
        (steps >= 1 and steps & (steps - 1) == 0 and c.block_k % 16 == 0,
         f"block_k {c.block_k} is no power of two of k16 steps for {c.warps_k} sets of warps"),
        (c.threads <= 1024 and c.stages >= 2, f"{c.threads} threads, {c.stages} stages: at most 1024 and at least 2"),
        (all(c.threads % n == 0 for n in chunks.values()), f"{c.threads} threads do not copy whole rows of {chunks} chunks"),
        (not _splits(problem) or row_b or c.threads // chunks["b"] % 8 == 0,
         f"{c.threads} threads copy {c.threads // chunks['b']} columns of b at a time, gate and up need a multiple of 8"),
        (c.registers <= limit, f"config {c} needs about {c.registers} registers, the limit is {limit}"),
        ((shared + _RESERVED_SHARED_MEMORY) * c.blocks_per_sm <= per_sm,
         f"config {c} needs {c.blocks_per_sm} x {shared} bytes of shared memory, {target} has {target.shared_memory_per_block}"),
        (tiles_m * tiles_n * problem.batch <= _MAX_BLOCKS,
         f"config {c} needs {tiles_m * tiles_n * problem.batch} blocks, the grid takes {_MAX_BLOCKS}"),
    )


@dataclass(frozen=True)
class _Measured:
    """A config and what it took on an H200 (2026-11-29, docs/design/gemm_portable.md), in nanoseconds per element of k.

    alone  a block that has its SM for itself
    full   an SM with blocks_per_sm blocks on it, wave after wave
    """

    config: Config
    alone: float
    full: float


_MEASURED = (
    _Measured(Config(256, 128, 64, 4, 2, stages=3), 16.0, 17.8),
    _Measured(Config(128, 256, 64, 2, 4, stages=3), 16.2, 17.9),
    _Measured(Config(128, 128, 64, 2, 2, stages=3, blocks_per_sm=2), 9.5, 18.1),
    _Measured(Config(128, 64, 128, 2, 2, 2, stages=4), 5.5, 5.6),
    _Measured(Config(128, 64, 64, 4, 1, stages=4, blocks_per_sm=2), 6.0, 10.6),
    _Measured(Config(64, 64, 128, 2, 2, 2, stages=5), 3.7, 3.7),
    _Measured(Config(64, 64, 64, 2, 2, stages=4, blocks_per_sm=3), 5.1, 9.5),
    _Measured(Config(64, 32, 128, 2, 1, 4, stages=6), 2.5, 2.3),
    _Measured(Config(32, 32, 256, 1, 1, 4, stages=5), 1.5, 1.45),
    _Measured(Config(16, 64, 128, 1, 1, 4, stages=8), 1.6, 1.6),
    _Measured(Config(16, 32, 256, 1, 1, 4, stages=6), 1.06, 1.3),
    _Measured(Config(16, 16, 256, 1, 1, 8, stages=8), 0.78, 1.05),
    # Of the 99 KB parts. Not measured there: the costs are those of the nearest tile above, plus a tenth.
    _Measured(Config(128, 128, 32, 2, 2, stages=4), 12.0, 12.0),
    _Measured(Config(64, 64, 64, 2, 2, stages=4), 5.6, 5.6),
    _Measured(Config(32, 64, 128, 1, 2, 2, stages=4), 3.3, 3.3),
    _Measured(Config(16, 64, 128, 1, 1, 4, stages=4), 2.5, 2.5),
)
# Start and end of a block, in nanoseconds: fits 1024^3 over all configs within 15 %. A full H200 copies 4300 bytes in one.
_BLOCK_NS, _BLOCK_NS_PER_OUTPUT = 1200.0, 3000.0 / 32768
_SM_BYTES_PER_NS = 4300 / 132


def _cost(problem: GemmProblem, target: Target, measured: _Measured) -> float:
    """Estimated nanoseconds: waves of blocks, and no faster than memory brings a and b."""
    p, c = problem, measured.config
    tiles_m, tiles_n = _tiles(p, c)
    per_sm = _ceil_div(tiles_m * tiles_n * p.batch, target.sm_count or 1)
    waves, rest = divmod(per_sm, c.blocks_per_sm)
    if waves == 1 and c.blocks_per_sm == 1:
        waves, rest = 0, 1
    share = (rest - 1) / max(c.blocks_per_sm - 1, 1)
    per_k = waves * measured.full + (measured.alone + share * (measured.full - measured.alone) if rest else 0.0)
    memory = 2 * p.batch * (p.m + p.n) / (_SM_BYTES_PER_NS * (target.sm_count or 1))
    ends = _BLOCK_NS + _BLOCK_NS_PER_OUTPUT * c.block_m * c.block_n  # those between two waves are part of `full`
    # Where memory is the limit, less work is still the better bet.
    return p.k * (max(per_k, memory) + per_k / 10) + ends


def candidates(problem: GemmProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first."""
    fitting = [m for m in _MEASURED if legal(problem, target, m.config)]
    for measured in sorted(fitting, key=lambda m: _cost(problem, target, m)):
        yield measured.config


def spec(problem: GemmProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, orders, alignment class, epilogue and config; no extents."""
    p, c = problem, config
    row_a, row_b = p.a_order == "row", p.b_order == "row"
    access, vector_out = _access(p), p.alignment == 16
    bias, addend = p.bias_dtype or p.out_dtype, p.c_dtype or p.out_dtype
    words = [p.a_dtype, p.out_dtype, ("r" if row_a else "c") + ("r" if row_b else "c")]
    words += [f"bias_{bias}"] if p.bias else []
    words += [p.activation] if p.activation else []
    words += [p.gate_up] if p.gated else []
    words += [f"c_{addend}"] if p.accumulate_c else []
    words += [] if access == 16 else [f"a{access}"]
    words += [] if vector_out else ["scalar_out"]
    words += str(c).split()
    parameters: dict[str, Any] = dict(
        element=p.a_dtype, out=DTYPES[p.out_dtype].cuda, bias_type=DTYPES[bias].cuda, c_type=DTYPES[addend].cuda,
        block_m=c.block_m, block_n=c.block_n, block_k=c.block_k, warps_m=c.warps_m, warps_n=c.warps_n, warps_k=c.warps_k,
        stages=c.stages, blocks_per_sm=c.blocks_per_sm, raster_rows=c.raster_rows, row_a=row_a, row_b=row_b, access=access,
        vector_out=vector_out, bias=p.bias, activation=ACTIVATION_NAMES[p.activation], gate=gate_name(p), accumulate=p.accumulate_c,
        shared_memory=c.shared_memory(row_a, row_b),
    )
    return KernelSpec.make(
        "gemm_mma_" + "_".join(words), "gemm/gemm_mma.cu.jinja", "nvrtc", parameters,
        params=PARAMS, params_type="kernelgen::GemmMmaParams", entries=(ENTRY,), target=target,
    )


def _scalars(problem: GemmProblem, config: Config, t: GemmTensors) -> dict[str, int | float]:
    """Everything of Params that is fixed by shapes, strides and scalars."""
    tiles_m, tiles_n = _tiles(problem, config)
    return {
        "a_batch": t.a.stride(0), "a_stride": t.a.stride(1 if problem.a_order == "row" else 2),
        "b_batch": t.b.stride(0) if problem.batched_b else 0, "b_stride": t.b.stride(1 if problem.b_order == "row" else 2),
        "c_batch": t.c.stride(0) if t.c is not None else 0, "c_row": t.c.stride(1) if t.c is not None else 0,
        "out_batch": t.out.stride(0), "out_row": t.out.stride(1),
        "m": problem.m, "n": problem.n, "k": problem.k, "tiles_m": tiles_m, "tiles_n": tiles_n, "beta": t.beta,
    }


def bind(problem: GemmProblem, config: Config, kernel: Any, tensors: GemmTensors) -> Callable[[GemmTensors], None]:
    """The closure of a repeated call: packs addresses, launches. An empty output launches nothing."""
    tiles_m, tiles_n = _tiles(problem, config)
    launch = kernel.prepare(
        tensors.a.device.index or 0, grid=(tiles_m * tiles_n * problem.batch, 1, 1), block=(config.threads, 1, 1),
        shared_memory=config.shared_memory(problem.a_order == "row", problem.b_order == "row"))
    tail = PARAMS.pack_scalars(_scalars(problem, config, tensors))
    pack = PARAMS.pointer_packer.pack
    with_bias, with_c = problem.bias, problem.accumulate_c

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
    base = GemmProblem(1, 4096, 4096, 4096, "bf16", "bf16", "bf16")
    half = replace(base, a_dtype="fp16", b_dtype="fp16", out_dtype="fp16")
    small = Config(64, 64, 64, 2, 2, stages=3)
    yield base, None
    yield replace(half, b_order="col"), None
    yield replace(base, a_order="col"), None
    yield replace(base, a_order="col", b_order="col", out_dtype="fp32"), None
    yield replace(base, m=16, b_order="col"), None
    yield replace(base, m=16, n=1000, bias=True, bias_dtype="bf16", activation="silu"), None
    for alignment, activation in ((8, "relu"), (4, "gelu"), (2, "gelu_tanh")):
        yield replace(base, alignment=alignment, activation=activation, bias=True, bias_dtype="fp32"), small
    yield replace(base, activation="swiglu", b_order="col"), None
    yield replace(base, activation="geglu", gate_up="up_first", bias=True, bias_dtype="bf16"), small
    yield replace(half, activation="swiglu", gate_up="interleaved", bias=True, bias_dtype="fp16"), small
    yield replace(half, out_dtype="fp32", accumulate_c=True, c_dtype="fp32"), small
    yield replace(base, alignment=2, b_order="col", activation="swiglu", accumulate_c=True, c_dtype="bf16"), small


FAMILY = KernelFamily(
    name="gemm/gemm_mma", op="gemm", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage,
)
