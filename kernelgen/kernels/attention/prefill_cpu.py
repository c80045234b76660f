"""Host side of attention/prefill_cpu: dense and ragged attention forward in generated C++.

The kernel and its data flow are described in templates/include/kernelgen/attention/prefill_cpu.h; the choices made
here, with their measurements, in docs/design/cpu_attention.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.params import ParamStruct
from kernelgen.problems.attention import AttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import AttentionTensors
from kernelgen.verdicts import Verdict, first_no

# struct PrefillCpuParams of the header.
PARAMS = ParamStruct((
    ("q", "ptr"), ("k", "ptr"), ("v", "ptr"), ("out", "ptr"), ("lse", "ptr"),
    ("cu_seqlens_q", "ptr"), ("cu_seqlens_k", "ptr"), ("kv_lens", "ptr"),
    ("q_batch", "i64"), ("q_row", "i64"), ("q_head", "i64"),
    ("k_batch", "i64"), ("k_row", "i64"), ("k_head", "i64"),
    ("v_batch", "i64"), ("v_row", "i64"), ("v_head", "i64"),
    ("out_batch", "i64"), ("out_row", "i64"), ("out_head", "i64"),
    ("lse_batch", "i64"), ("lse_row", "i64"), ("lse_head", "i64"),
    ("batch", "i64"), ("seq_q", "i64"), ("seq_k", "i64"), ("num_kv_heads", "i64"), ("group_size", "i64"),
    ("task_rows", "i64"), ("window_left", "i64"), ("window_right", "i64"),
    ("scale", "f64"), ("soft_cap", "f64"),
))
ENTRY = "attention_prefill_cpu"


@dataclass(frozen=True)
class Tiling:
    """What the header derives from dtype and ISA level; the rendered file asserts that both sides agree.

    tile_rows    keys (or value columns) of a register tile
    panel_rows   query rows of a panel: the lanes across a register tile
    operand      bytes of an element as multiplied;  scalar: bytes of an accumulator
    pairs        operands are bf16 pairs
    """

    tile_rows: int
    panel_rows: int
    operand: int
    scalar: int
    pairs: bool

    @staticmethod
    def of(dtype: str, isa: str) -> Tiling:
        wide = isa != "x86-64-v3"
        pairs = isa == "x86-64-v4-bf16" and dtype == "bf16"
        scalar = 8 if dtype == "fp64" else 4
        tile_rows, registers = (8, 2) if wide else (4, 3)
        lanes = (64 if wide else 32) // scalar
        return Tiling(tile_rows, registers * lanes, 2 if pairs else scalar, scalar, pairs)

    def tile_bytes(self, head_dim: int, head_dim_v: int, block_k: int) -> int:
        """Scratch for one tile of keys and values and one panel's scores and weights: kTileBytes of the header."""
        keys = self.operand * block_k * head_dim
        values = (head_dim_v // self.tile_rows) * (self.operand * block_k * self.tile_rows + 64)
        weights = self.operand * block_k * self.panel_rows if self.pairs else 0
        return keys + values + self.scalar * block_k * self.panel_rows + weights

    def panel_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Scratch of one panel: sizeof(Panel) of the header."""
        lane = self.operand * head_dim + self.scalar * (head_dim_v + 2) + 16
        return _round_up(self.panel_rows * lane + 32, 64)


@dataclass(frozen=True)
class Config:
    """task_rows: query rows of a task, each head of a group counting as one; block_k: keys of a tile.

    Only block_k is compiled in. It fixes the order of summation, so it never depends on batch or lengths.
    """

    task_rows: int
    block_k: int

    def __str__(self) -> str:
        return f"{self.task_rows}x{self.block_k}"


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def supports(problem: AttentionProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cpu", f"prefill_cpu needs a CPU, got {target}"),
        (p.q_dtype in ("fp64", "fp32", "bf16", "fp16"), f"q dtype {p.q_dtype} is not fp64, fp32, bf16 or fp16"),
        (p.kv_dtype == p.q_dtype, f"key/value dtype {p.kv_dtype} differs from q dtype {p.q_dtype}"),
        (p.out_dtype == p.q_dtype, f"out dtype {p.out_dtype} differs from q dtype {p.q_dtype}"),
        (all(d % 8 == 0 and 8 <= d <= 512 for d in (p.head_dim, p.head_dim_v)),
         f"head dims {p.head_dim}/{p.head_dim_v} are not multiples of 8 from 8 to 512"),
        (p.num_kv_heads > 0 and p.num_q_heads % p.num_kv_heads == 0,
         f"{p.num_q_heads} query heads are not a multiple of {p.num_kv_heads} key/value heads"),
        (not p.alibi, "alibi is not in prefill_cpu"),
        (not p.sinks, "sinks are not in prefill_cpu"),
        (p.mask is None, f"mask={p.mask} is not in prefill_cpu"),
        (not p.block_mask, "block_mask is not in prefill_cpu"),
        (p.variant is None, f"variant {p.variant} is not in prefill_cpu"),
        (p.scales is None, f"scales={p.scales} are not in prefill_cpu"),
        (not p.requires_grad, "requires_grad: prefill_cpu has no backward"),
    )


# Scratch of a thread: must stay well inside its share of the L2 and L3 caches to be of any use.
_SCRATCH_LIMIT = 64 << 20


def scratch_bytes(problem: AttentionProblem, target: Target, config: Config) -> int:
    """Memory that each thread needs."""
    tiling = Tiling.of(problem.q_dtype, target.isa)
    dims = (problem.head_dim, problem.head_dim_v)
    panels = -(-config.task_rows // tiling.panel_rows)
    return tiling.tile_bytes(*dims, config.block_k) + panels * tiling.panel_bytes(*dims)


def legal(problem: AttentionProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit: whole panels, whole register tiles, scratch?"""
    tiling = Tiling.of(problem.q_dtype, target.isa)
    scratch = scratch_bytes(problem, target, config)
    return first_no(
        (config.task_rows >= 1 and config.task_rows % tiling.panel_rows == 0,
         f"task_rows {config.task_rows} is not a multiple of a panel's {tiling.panel_rows} rows"),
        (config.block_k >= 8 and config.block_k % 8 == 0, f"block_k {config.block_k} is not a multiple of 8"),
        (scratch <= _SCRATCH_LIMIT,
         f"config {config} needs {scratch} bytes of scratch a thread, at most {_SCRATCH_LIMIT}"),
    )


# Keys of a tile. 64 costs 1 - 3 %, 256 gains nothing and needs twice the scratch (Zen 4, fp32 and bf16, D 128, 512 and
# 2048 tokens; docs/design/cpu_attention.md).
_BLOCK_K = 128
# Panels of a task, best first. More rows share a packed tile: 2 panels cost 4 - 10 % against 8, 16 and 32 gain up to
# 3 % on long full attention, and need 1 MB of L2 beside the tile.
_PANELS = (8, 4, 2, 1)
_TASKS_PER_THREAD = 4  # below that, shorter tasks: an uneven end would cost more than packing twice


def candidates(problem: AttentionProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first. They differ in task_rows alone: same binary, same bits."""
    panel = Tiling.of(problem.q_dtype, target.isa).panel_rows
    configs = [Config(count * panel, _BLOCK_K) for count in _PANELS]
    enough = [c for c in configs if _num_tasks(problem, c) >= _TASKS_PER_THREAD * target.sm_count]
    first = enough[0] if enough else configs[-1]
    for config in (first, *(c for c in configs if c != first)):
        if legal(problem, target, config):
            yield config


def spec(problem: AttentionProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtype, head dims, features in use and tile; nothing that varies per call."""
    p = problem
    right, left = p.causal or p.window[1] is not None, p.window[0] is not None
    dims = f"d{p.head_dim}" if p.head_dim == p.head_dim_v else f"d{p.head_dim}_{p.head_dim_v}"
    flags = (("left", left), ("right", right), ("cap", p.soft_cap), ("ragged", p.layout == "ragged"),
             ("kvlens", p.kv_lens), ("lse", p.return_lse))
    words = [p.q_dtype, dims, *(word for word, on in flags if on), f"k{config.block_k}"]
    tiling = Tiling.of(p.q_dtype, target.isa)
    parameters: dict[str, Any] = dict(
        element=DTYPES[p.q_dtype].cpp, head_dim=p.head_dim, head_dim_v=p.head_dim_v, ragged=p.layout == "ragged",
        kv_lens=p.kv_lens, bounded_left=left, bounded_right=right, soft_cap=p.soft_cap, lse=p.return_lse,
        block_k=config.block_k, tile_bytes=tiling.tile_bytes(p.head_dim, p.head_dim_v, config.block_k),
        panel_bytes=tiling.panel_bytes(p.head_dim, p.head_dim_v), panel_rows=tiling.panel_rows,
    )
    return KernelSpec.make(
        "attention_prefill_cpu_" + "_".join(words), "attention/prefill_cpu.cc.jinja", "cxx", parameters,
        params=PARAMS, params_type="kernelgen::PrefillCpuParams", entries=(ENTRY,), target=target,
    )


def _num_tasks(problem: AttentionProblem, config: Config) -> int:
    rows = problem.seq_q * problem.group_size
    if problem.layout == "ragged":
        # Every request may end in a partial block; the kernel finds out which tasks are empty.
        return (rows // config.task_rows + problem.batch) * problem.num_kv_heads if rows else 0
    return -(-rows // config.task_rows) * problem.batch * problem.num_kv_heads


def _scalars(problem: AttentionProblem, config: Config, t: AttentionTensors) -> dict[str, int | float]:
    """Everything of Params that is fixed by shapes, strides and scalars."""
    values: dict[str, int | float] = {}
    for name, tensor in (("q", t.q), ("k", t.k), ("v", t.v), ("out", t.out)):
        strides = tensor.stride() if problem.layout == "dense" else (0, *tensor.stride())
        values |= {f"{name}_batch": strides[0], f"{name}_row": strides[1], f"{name}_head": strides[2]}
    if t.lse is None:
        lse: tuple[int, ...] = (0, 0, 0)
    elif problem.layout == "dense":
        lse = (t.lse.stride(0), t.lse.stride(2), t.lse.stride(1))  # (B, Hq, Sq)
    else:
        lse = (0, *t.lse.stride())  # (Tq, Hq)
    values |= {"lse_batch": lse[0], "lse_row": lse[1], "lse_head": lse[2]}

    # A window reaching over the whole problem is the same as none, and keeps the kernel's sums within int64.
    reach = problem.seq_q + problem.seq_k
    left, right = (reach if side is None else min(side, reach) for side in problem.window)
    values |= {"window_left": left, "window_right": min(right, 0) if problem.causal else right}
    return values | {
        "batch": problem.batch, "seq_q": problem.seq_q, "seq_k": problem.seq_k, "num_kv_heads": problem.num_kv_heads,
        "group_size": problem.group_size, "task_rows": config.task_rows, "scale": float(t.scale),
        "soft_cap": float(t.soft_cap or 0.0),
    }


def bind(
    problem: AttentionProblem, config: Config, kernel: Any, tensors: AttentionTensors,
) -> Callable[[AttentionTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    launch = kernel.prepare(phases=((0, _num_tasks(problem, config)),),
                            scratch_bytes=scratch_bytes(problem, kernel.spec.target, config))
    tail = PARAMS.pack_scalars(_scalars(problem, config, tensors))
    pack = PARAMS.pointer_packer.pack
    with_lse, ragged, with_lens = problem.return_lse, problem.layout == "ragged", problem.kv_lens

    def run(t: AttentionTensors) -> None:
        launch(pack(
            t.q.data_ptr(), t.k.data_ptr(), t.v.data_ptr(), t.out.data_ptr(),
            t.lse.data_ptr() if with_lse else 0,  # type: ignore[union-attr]
            t.cu_seqlens_q.data_ptr() if ragged else 0,  # type: ignore[union-attr]
            t.cu_seqlens_k.data_ptr() if ragged else 0,  # type: ignore[union-attr]
            t.kv_lens.data_ptr() if with_lens else 0,  # type: ignore[union-attr]
        ) + tail)

    return run


def coverage() -> Iterable[tuple[AttentionProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = AttentionProblem("dense", 2, 1000, 1000, 16, 4, 128, 128, "fp32", "fp32", "fp32")

    def typed(dtype: str) -> AttentionProblem:
        return replace(base, q_dtype=dtype, kv_dtype=dtype, out_dtype=dtype)

    yield base, None
    yield replace(base, causal=True, return_lse=True), None
    yield replace(typed("bf16"), causal=True), None
    yield replace(typed("bf16"), head_dim=72, head_dim_v=40, window=(100, 20), soft_cap=True, kv_lens=True), None
    yield replace(typed("fp16"), layout="ragged", head_dim=96, head_dim_v=96, causal=True, return_lse=True), None
    yield replace(typed("fp64"), head_dim=64, head_dim_v=64, window=(100, None), soft_cap=True), None
    yield replace(base, head_dim=512, head_dim_v=512, causal=True), Config(96, 64)


FAMILY = KernelFamily(
    name="attention/prefill_cpu", op="attention", target_kind="cpu", toolchain="cxx", supports=supports,
    candidates=candidates, legal=legal, spec=spec, bind=bind, coverage=coverage,
)
