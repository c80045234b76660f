"""Host side of gemm/mixed_sm90: 16-bit rows times a packed 4-bit b on Hopper, the codes decoded in registers for WGMMA.

The kernel and its data flow: templates/include/kernelgen/gemm/mixed_sm90.cuh; choices and measurements: docs/design/hopper.md. What
gemm/grouped_mixed_sm90 shares with it is here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm.activations import ACTIVATION_NAMES, gate_name, splits
from kernelgen.kernels.gemm.dense_sm90 import PARAMS
from kernelgen.kernels.gemm.sm90 import MMA_ROWS, round_up, scalars
from kernelgen.kernels.tensor_map import tensor_map
from kernelgen.problems.gemm import MORE_ACTIVATIONS, GemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target, target_of
from kernelgen.tensors import GemmTensors
from kernelgen.verdicts import Verdict, first_no, no

ENTRY = "gemm_mixed_sm90"
_TABLE_BYTES = 256 * 32 * 4
_BLOCK = 64  # elements of k: kBlock of the header
_CODES = {"int4": "int4_code", "mxfp4": "e2m1"}
_OUTPUTS = ("bf16", "fp16", "fp32")
_MAX_EXTENT = (1 << 31) - (1 << 10)  # tile indices past the end of m, n and k stay within int32


@dataclass(frozen=True)
class Config:
    """Tile shape and schedule.

    tokens     rows of a of a tile: N of the WGMMA
    stages     of the ring
    blocks_k   64s of k of a stage
    consumers  warpgroups that multiply, 64 columns of b each
    table      decoding by a table in shared memory
    apart      a group of products for each 16 of k, between which the next codes are decoded
    band_rows  rows of tiles that are walked column by column
    """

    tokens: int
    stages: int
    blocks_k: int = 1
    consumers: int = 2
    table: bool = False
    apart: bool = False
    band_rows: int = 16

    def __str__(self) -> str:
        words = f"{self.block_n}x{self.tokens} s{self.stages} k{self.blocks_k * _BLOCK}"
        return words + (" table" if self.table else "") + (" apart" if self.apart else "")

    @property
    def block_m(self) -> int:
        return self.tokens

    @property
    def block_n(self) -> int:
        return self.consumers * MMA_ROWS

    @property
    def stage_bytes(self) -> int:
        return self.blocks_k * (self.tokens * 2 * _BLOCK + self.block_n * _BLOCK // 2)


def shared_memory(problem: GemmProblem, config: Config) -> int:
    """Dynamic shared memory in bytes of a launch: MixedSm90::kSharedBytes of the header."""
    c = config
    outputs = MMA_ROWS // (2 if problem.gated else 1)
    slab = (32 if c.tokens % 32 == 0 else 16) * (outputs * DTYPES[problem.out_dtype].bytes + 16)
    table = _TABLE_BYTES if c.table else 0
    return c.stages * c.stage_bytes + c.consumers * round_up(slab, 128) + table + round_up(2 * c.stages * 8, 128)


def supports(problem: GemmProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    return supports_mixed(problem, target, ENTRY)


def supports_mixed(problem: GemmProblem, target: Target, name: str) -> Verdict:
    """What codes, TMA and the epilogue need."""
    p = problem
    group = p.group_size or 0
    if p.weight_format not in _CODES:
        return no(f"b is {p.b_dtype}, {name} takes packed weights")
    return first_no(
        (target.kind == "cuda" and target.capability == 90, f"{name} needs sm_90a, got {target}"),
        (p.a_dtype == "bf16" or p.a_dtype == "fp16" and p.weight_format == "int4" and p.scale_dtype == "fp16",
         f"a is {p.a_dtype} beside {p.weight_format} with scales of {p.scale_dtype}: {name} multiplies codes by their scales in a's type, "
         "and only bf16 holds all of them"),
        (p.weight_format != "int4" or p.out_dtype in ("bf16", p.a_dtype),
         f"out dtype {p.out_dtype}: {name} rounds int4 codes times their scale to {p.a_dtype}, which a wider result would show"),
        (p.out_scale is None and p.out_dtype in _OUTPUTS, f"out dtype {p.out_dtype} with out_scale={p.out_scale} is not in {name}"),
        (not p.accumulate_c, f"c is not in {name}"),
        (not p.gathered, f"gathered rows are not in {name}"),
        (p.bias_dtype in (None, *_OUTPUTS), f"bias dtype {p.bias_dtype} is not one of {', '.join(_OUTPUTS)}"),
        (p.activation is None or p.activation in MORE_ACTIVATIONS, f"activation {p.activation} is not in {name}"),
        (p.a_order == "row", f"a has M contiguous, {name} needs K contiguous"),
        (p.alignment == 16 and p.k % 32 == 0,
         f"rows of a or codes are aligned to {p.alignment} bytes, K is {p.k}: TMA needs 16 and a multiple of 32"),
        (group == 32 or group > 0 and group % _BLOCK == 0, f"groups of {p.group_size}, {name} takes 32 and multiples of 64"),
        (p.scale_dtype in (*_OUTPUTS, "e8m0"), f"weight scales of {p.scale_dtype} are not in {name}"),
        (max(p.m, p.n, p.k) <= _MAX_EXTENT, f"an extent of {max(p.m, p.n, p.k)} exceeds {_MAX_EXTENT}"),
        (min(p.m, p.n, p.k, p.batch) > 0, "an extent is 0: there is nothing for TMA to load"),
    )


def legal(problem: GemmProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target: registers, shared memory, boxes?"""
    c, shared = config, shared_memory(problem, config)
    return first_no(
        (1 <= c.consumers <= 3 and c.blocks_k in (1, 2) and c.stages >= 2 and c.band_rows >= 1,
         f"config {c}: expected 1 to 3 consumers, 1 or 2 blocks of k in a stage and 2 stages or more"),
        (c.tokens % 16 == 0 and 16 <= c.tokens <= 256, f"config {c}: a tile has 16 to 256 rows, in steps of 16"),
        (shared <= target.shared_memory_per_block,
         f"config {c} needs {shared} bytes of shared memory, {target} has {target.shared_memory_per_block}"),
    )


_TOKENS = (16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_MAX_STAGES = 24
_SHALLOW = 64  # rows of a tile up to which stages have two blocks of k
# Cycles of 64 of k for a tile by its consumers, of no rows and of each row, its beginning and end included: two and three fitted to
# tools/bench/results/tried/h200_mixed_sm90*.json (three by a table and with products apart), one reasoned. And bytes that an SM takes
# from L2 in one.
_CYCLES = {1: (450.0, 3.0), 2: (563.0, 3.55), 3: (630.0, 5.0)}
_INGEST, _START = 45, 500


def _configs(problem: GemmProblem, target: Target) -> Iterator[Config]:
    """With as many stages as fit. A table, products apart and three consumers where a GPU has shown them: few rows beside mxfp4."""
    for tokens in _TOKENS:
        few, measured = tokens <= _SHALLOW, tokens <= _SHALLOW // 2 and problem.weight_format == "mxfp4"
        for consumers in (3, 2, 1) if measured else (2, 1):
            new = consumers == 3
            configs = (Config(tokens, stages, 2 if few else 1, consumers, new, new) for stages in range(_MAX_STAGES, 2, -1))
            config = next((c for c in configs if legal(problem, target, c)), None)
            if config:
                yield config


def cost(problem: GemmProblem, target: Target, config: Config, tiles_m: float, rounds: bool) -> float:
    """Cycles of the busiest SM. ``tiles_m``: of rows, all in all; ``rounds``: whole rounds of tiles, as their number is known."""
    p, c, sms = problem, config, target.sm_count or 132
    tiles = tiles_m * -(-p.n // c.block_n)
    each = float(-(-tiles // sms)) if rounds else max(1.0, tiles / sms)
    base, of_row = _CYCLES[c.consumers]
    step = max(base + of_row * c.tokens, (c.block_n * _BLOCK // 2 + c.tokens * 2 * _BLOCK) / _INGEST)
    return each * (-(-p.k // _BLOCK) * step + _START)


def candidates(problem: GemmProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first."""
    yield from sorted(_configs(problem, target), key=lambda c: cost(problem, target, c, problem.batch * -(-problem.m // c.tokens), True))


def spec(problem: GemmProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, group, epilogue and config; no extents."""
    return spec_of(problem, target, config, ENTRY, "kNone")


def spec_of(problem: GemmProblem, target: Target, config: Config, entry: str, grouping: str) -> KernelSpec:
    """That of a dense or grouped product; ``grouping``: of grouping.cuh."""
    p, c = problem, config
    scale = "uint8_t" if p.scale_dtype == "e8m0" else None
    out = DTYPES[p.out_dtype].cuda
    parameters: dict[str, Any] = dict(
        element=p.a_dtype, code=_CODES[p.weight_format or ""], out=out, entry=entry, grouping=grouping,
        scale_type=f"kernelgen::{scale}" if scale else DTYPES[p.scale_dtype or ""].cuda,
        bias_type=DTYPES[p.bias_dtype].cuda if p.bias_dtype else out, activation=ACTIVATION_NAMES[p.activation], gate=gate_name(p),
        clamped=p.clamped, bias=p.bias, vector_out=p.out_alignment == 16, group=p.group_size, zero=p.zero_points, tokens=c.tokens,
        consumers=c.consumers, blocks_k=c.blocks_k, stages=c.stages, band_rows=c.band_rows, table=c.table, apart=c.apart,
        mma_columns=str(c.tokens), shared_memory=shared_memory(p, c))
    words = [entry, p.a_dtype, p.weight_format, f"g{p.group_size}", p.scale_dtype, p.out_dtype, *(["zeros"] if p.zero_points else []),
             *([f"bias_{p.bias_dtype or p.out_dtype}"] if p.bias else []), *([p.activation] if p.activation else []),
             *([p.gate_up] if p.gated else []), *([] if p.out_alignment == 16 else ["scalar_out"]), *str(c).split()]
    return KernelSpec.make(
        "_".join(str(word) for word in words), "gemm/mixed_sm90.cu.jinja", "nvrtc", parameters, params=PARAMS,
        params_type="kernelgen::DenseSm90Params", entries=(entry,), target=target)


def bind(problem: GemmProblem, config: Config, kernel: Any, tensors: GemmTensors) -> Callable[[GemmTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    p, c = problem, config
    tiles_m, tiles_n = -(-p.m // c.block_m), -(-p.n // c.block_n)
    return closure(p, c, kernel, tensors, tiles_m, tiles_n, tiles_m * tiles_n * p.batch, c.tokens)


def closure(problem: GemmProblem, config: Config, kernel: Any, tensors: Any, tiles_m: int, tiles_n: int, tiles: int,
            box_a: int) -> Callable[[Any], None]:
    """That of a dense or grouped product. ``tiles``: of all batch entries, at most; ``box_a``: rows of a box of a."""
    p, c, t = problem, config, tensors
    row_bytes = c.blocks_k * _BLOCK // 2
    maps = [tensor_map("map_a", "a", t.a, (_BLOCK, box_a)),
            tensor_map("map_b", "b", t.b, (row_bytes, c.block_n // (2 if splits(p) else 1)), row_bytes=row_bytes)]
    sms = target_of(t.a.device).sm_count
    launch = kernel.prepare(
        t.a.device.index or 0, grid=(min(tiles, max(1, sms)), 1, 1), block=(128 * (c.consumers + 1), 1, 1), programmatic=True,
        shared_memory=shared_memory(p, c), tensor_maps=maps)
    zeros = (0, 0, 0) if t.zero_b is None else (t.zero_b.stride(0) if t.zero_b.shape[0] > 1 else 0, *t.zero_b.stride()[1:])
    tail = PARAMS.pack_scalars(scalars(p, t) | dict(zip(("scale_a_batch", "scale_a_block", "scale_a_row"), zeros)) | {
        "tiles_m": tiles_m, "tiles_n": tiles_n, "tiles": tiles, "groups": p.batch, "batched_a": int(t.a.shape[0] > 1),
        "scales_by_tma": 0, "a_row": 0, "out_scale_batch": 0, "out_scale_row": 0, "out_scale_block": 0})
    blank, pack = bytes(128 * len(PARAMS.tensor_maps)), PARAMS.pointer_packer.pack
    grouped, with_bias, with_zeros = p.op == "grouped_gemm", p.bias, p.zero_points

    def run(t: Any) -> None:
        launch(blank + pack(
            t.a.data_ptr(), t.b.data_ptr(), t.out.data_ptr(), t.bias.data_ptr() if with_bias else 0, 0,
            t.zero_b.data_ptr() if with_zeros else 0, t.scale_b.data_ptr(), 0, t.ends.data_ptr() if grouped else 0, 0, 0, 0) + tail)

    return run


def coverage() -> Iterable[tuple[GemmProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = GemmProblem(1, 512, 8192, 8192, "bf16", "int4", "bf16", b_order="col", weight_format="int4", group_size=128, scale_dtype="bf16")
    half: dict[str, Any] = dict(a_dtype="fp16", out_dtype="fp16", scale_dtype="fp16")
    yield base, None
    yield replace(base, m=32, zero_points=True, bias=True, bias_dtype="fp32", activation="silu"), None
    yield replace(base, group_size=32, zero_points=True, activation="swiglu", **half), Config(128, 6)
    yield replace(base, group_size=64, activation="geglu", gate_up="up_first"), Config(48, 8, 2, 1)
    yield replace(base, m=48, zero_points=True), Config(48, 6, 2, 3, True, True)
    mxfp4 = replace(base, b_dtype="mxfp4", weight_format="mxfp4", group_size=32, scale_dtype="e8m0")
    yield mxfp4, Config(256, 5)
    yield replace(mxfp4, out_dtype="fp32", out_alignment=4, activation="gelu"), Config(16, 12, 2)


FAMILY = KernelFamily(
    name="gemm/mixed_sm90", op="gemm", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage, capabilities=(90,),
)
