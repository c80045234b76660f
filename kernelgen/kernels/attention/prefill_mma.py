"""Host side of attention/prefill_mma: dense and ragged attention forward with mma.sync, for sm_80 and later.

The kernel and its data flow are described in templates/include/kernelgen/attention/prefill_mma.cuh; the choices made
here, with their measurements, in docs/design/cuda_attention_mma.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kernelgen.kernels.base import KernelFamily
from kernelgen.params import ParamStruct
from kernelgen.problems.attention import AttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import AttentionTensors
from kernelgen.verdicts import Verdict, first_no

# struct PrefillMmaParams of the header.
PARAMS = ParamStruct((
    ("q", "ptr"), ("k", "ptr"), ("v", "ptr"), ("out", "ptr"), ("lse", "ptr"),
    ("cu_seqlens_q", "ptr"), ("cu_seqlens_k", "ptr"), ("kv_lens", "ptr"),
    ("q_batch", "i64"), ("q_row", "i64"), ("q_head", "i64"),
    ("k_batch", "i64"), ("k_row", "i64"), ("k_head", "i64"),
    ("v_batch", "i64"), ("v_row", "i64"), ("v_head", "i64"),
    ("out_batch", "i64"), ("out_row", "i64"), ("out_head", "i64"),
    ("lse_batch", "i64"), ("lse_row", "i64"), ("lse_head", "i64"),
    ("seq_q", "i32"), ("seq_k", "i32"), ("batch", "i32"), ("group_size", "i32"),
    ("window_left", "i32"), ("window_right", "i32"), ("q_keep", "i32"), ("q_flip", "i32"),
    ("logit_scale", "f32"), ("cap_scale", "f32"),
))
ENTRY = "attention_prefill_mma"

_LOG2E = math.log2(math.e)
_MAX_TOKENS = 1 << 29  # positions plus window and lengths stay within int32
_MAX_GRID_YZ = 65535
_REGISTERS_PER_THREAD = 255
_REGISTERS_PER_SM = 65536
# Registers besides the output, score and query fragments (addresses, K or V fragments in flight, running maxima and
# sums). ptxas 13.0 spills in none of the table's configs, which reach 255 by this estimate.
_OTHER_REGISTERS = 47


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _tile_bytes(rows: int, columns: int) -> int:
    """Bytes of a SharedTile (kernelgen/cuda/shared_tile.cuh): rows that are no multiple of 128 bytes are padded."""
    chunks = columns // 8
    return rows * 16 * (chunks if chunks % 8 == 0 else chunks | 1)


@dataclass(frozen=True)
class Config:
    """Tile shape and schedule.

    block_q, block_k  queries of a block, keys of a tile; a warp owns block_q / warps rows
    stages            slots of the K and V rings. 1: V loads under Q K^T and the next K under P V. 2 and more: whole
                      tiles are loaded ahead, with one barrier per tile instead of two
    query_in_registers  keep Q's fragments in registers instead of re-reading them for each tile
    value_splits      blocks that share the value columns of a query tile; each computes the scores anew
    blocks_per_sm     bounds the registers so that as many blocks fit
    """

    block_q: int
    block_k: int
    warps: int
    stages: int = 1
    query_in_registers: bool = False
    value_splits: int = 1
    blocks_per_sm: int = 1

    def __str__(self) -> str:
        words = f"{self.block_q}x{self.block_k} w{self.warps} s{self.stages}"
        words += " qreg" if self.query_in_registers else ""
        words += f" split{self.value_splits}" if self.value_splits > 1 else ""
        return words + (f" b{self.blocks_per_sm}" if self.blocks_per_sm > 1 else "")

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def value_columns(self, head_dim_v: int) -> int:
        """Value columns that one block owns, padded to the 16 of an ldmatrix."""
        return _round_up(-(-head_dim_v // self.value_splits), 16)

    def shared_memory(self, head_dim: int, head_dim_v: int) -> int:
        """Dynamic shared memory in bytes: PrefillMma::kSharedBytes of the header."""
        depth, columns = _round_up(head_dim, 16), self.value_columns(head_dim_v)
        ring = self.stages * (_tile_bytes(self.block_k, depth) + _tile_bytes(self.block_k, columns))
        return max(_tile_bytes(self.block_q, depth) + ring, _tile_bytes(self.block_q, columns))

    def registers(self, head_dim: int, head_dim_v: int) -> int:
        """Estimate per thread: output and score accumulators, query fragments, the rest."""
        rows = self.block_q // self.warps
        output = rows * self.value_columns(head_dim_v) // 32
        scores = rows * self.block_k // 32
        queries = rows * _round_up(head_dim, 16) // 64 if self.query_in_registers else 0
        return output + scores + queries + _OTHER_REGISTERS


def supports(problem: AttentionProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    dims_fit = all(d % 8 == 0 and 8 <= d <= 512 for d in (p.head_dim, p.head_dim_v)) or (p.head_dim, p.head_dim_v) == (576, 512)
    return first_no(
        (target.kind == "cuda" and target.capability >= 80, f"prefill_mma needs sm_80 or later, got {target}"),
        (p.q_dtype in ("bf16", "fp16"), f"q dtype {p.q_dtype} is not bf16 or fp16"),
        (p.kv_dtype == p.q_dtype, f"key/value dtype {p.kv_dtype} differs from q dtype {p.q_dtype}"),
        (p.out_dtype == p.q_dtype, f"out dtype {p.out_dtype} differs from q dtype {p.q_dtype}"),
        (dims_fit, f"head dims {p.head_dim}/{p.head_dim_v} are not multiples of 8 from 8 to 512, nor 576/512"),
        (p.num_kv_heads > 0 and p.num_q_heads % p.num_kv_heads == 0,
         f"{p.num_q_heads} query heads are not a multiple of {p.num_kv_heads} key/value heads"),
        (max(p.seq_q, p.seq_k) <= _MAX_TOKENS, f"sequence of {max(p.seq_q, p.seq_k)} tokens exceeds {_MAX_TOKENS}"),
        (p.layout == "ragged" or p.batch <= _MAX_GRID_YZ, f"batch {p.batch} exceeds the {_MAX_GRID_YZ} of a dense grid"),
        (p.num_q_heads <= _MAX_GRID_YZ // 4, f"{p.num_q_heads} query heads exceed {_MAX_GRID_YZ // 4}"),
        (p.alignment >= 2, f"alignment {p.alignment} is below an element's 2 bytes"),
        (not p.alibi, "alibi is not in prefill_mma"),
        (not p.sinks, "sinks are not in prefill_mma"),
        (p.mask is None, f"mask={p.mask} is not in prefill_mma"),
        (not p.block_mask, "block_mask is not in prefill_mma"),
        (p.variant is None, f"variant {p.variant} is not in prefill_mma"),
        (p.scales is None, f"scales={p.scales} are not in prefill_mma"),
        (not p.requires_grad, "requires_grad: prefill_mma has no backward"),
    )


def legal(problem: AttentionProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target: divisibility, registers, shared memory?"""
    c, p = config, problem
    shared = c.shared_memory(p.head_dim, p.head_dim_v)
    limit = min(_REGISTERS_PER_THREAD, _REGISTERS_PER_SM // (c.threads * c.blocks_per_sm))
    return first_no(
        (c.block_q % (16 * c.warps) == 0, f"block_q {c.block_q} is not a multiple of 16 rows x {c.warps} warps"),
        (c.block_k % 16 == 0, f"block_k {c.block_k} is not a multiple of 16"),
        (c.warps <= 16 and c.stages >= 1, f"{c.warps} warps, {c.stages} stages: at most 16 and at least 1"),
        (c.value_splits == 1 or p.head_dim_v > (c.value_splits - 1) * c.value_columns(p.head_dim_v),
         f"{c.value_splits} value splits leave one without columns of {p.head_dim_v}"),
        (c.registers(p.head_dim, p.head_dim_v) <= limit,
         f"config {c} needs about {c.registers(p.head_dim, p.head_dim_v)} registers, the limit is {limit}"),
        (shared <= target.shared_memory_per_block,
         f"config {c} needs {shared} bytes of shared memory, {target} has {target.shared_memory_per_block}"),
    )


# (largest head dim, configs, best first). The head dim is the larger of D and Dv. A row ends with configs that are
# legal wherever the head dim fits, on 99 KB of shared memory too. The order up to 256 is measured (H200, bf16,
# tools/bench/results/h200_attention_prefill_mma.json); what only smaller chips reach is chosen by _resident_warps.
TABLE: tuple[tuple[int, tuple[Config, ...]], ...] = (
    (64, (Config(128, 64, 4, 2, True), Config(128, 64, 4, 1, True))),
    (96, (Config(128, 64, 4, 2), Config(128, 64, 4), Config(64, 64, 4))),
    (128, (Config(128, 64, 4), Config(128, 32, 4), Config(64, 64, 4))),
    (192, (Config(64, 64, 4, 1, True), Config(64, 64, 4), Config(64, 32, 4))),
    (256, (Config(64, 64, 4), Config(128, 64, 8), Config(64, 32, 4))),
    (576, (Config(64, 32, 4, value_splits=2), Config(64, 16, 4, value_splits=2), Config(32, 16, 2, value_splits=2))),
)
# Shorter query tiles for problems of few tiles, which they spread better over the SMs: B 1, S 512, D 128 runs at 1.70 x
# FlashAttention-2 instead of 1.01 x; B 4, S 1024, causal at 1.11 x instead of 1.00 x (same file).
_SMALL = (Config(64, 64, 4, 2, True), Config(64, 64, 4, 1, True))
_SMALL_HEAD_DIM = 128
_ENOUGH_WARPS = 8  # per SM: two per scheduler, so that one warp's softmax runs under another's products


def _resident_warps(problem: AttentionProblem, target: Target, config: Config) -> int:
    """Warps that fit on an SM, by shared memory (1 KB of each block is the system's) and registers."""
    shared = config.shared_memory(problem.head_dim, problem.head_dim_v) + 1024
    registers = _round_up(config.registers(problem.head_dim, problem.head_dim_v), 8)
    blocks = min((target.shared_memory_per_block + 1024) // shared, _REGISTERS_PER_SM // (config.threads * registers))
    return blocks * config.warps


def _few_tiles(problem: AttentionProblem, target: Target, config: Config) -> bool:
    """Less than a tile per SM; where the masks make tiles uneven, less than four (measured as _SMALL)."""
    uneven = problem.causal or problem.windowed
    return math.prod(_grid(problem, config)) < target.sm_count * (4 if uneven and problem.seq_q > config.block_q else 1)


def _configs(problem: AttentionProblem, target: Target) -> list[Config]:
    widest = max(problem.head_dim, problem.head_dim_v)
    row = next(configs for limit, configs in TABLE if widest <= limit)
    if problem.head_dim_v <= 256:
        row = tuple(replace(config, value_splits=1) for config in row)  # a wide D with a narrow Dv

    # Where shared memory is small, a config that keeps enough warps on an SM goes before a deeper pipeline that does not.
    def missing_warps(config: Config) -> int:
        return max(0, _ENOUGH_WARPS - _resident_warps(problem, target, config))

    # Batch-invariant calls must not let the batch size pick the tile, which decides the order of summation.
    small = widest <= _SMALL_HEAD_DIM and not problem.batch_invariant and _few_tiles(problem, target, row[0])
    return [*(sorted(_SMALL, key=missing_warps) if small else ()), *sorted(row, key=missing_warps)]


def candidates(problem: AttentionProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first."""
    seen = set()
    for config in _configs(problem, target):
        if config not in seen and legal(problem, target, config):
            seen.add(config)
            yield config


def spec(problem: AttentionProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtype, head dims, features in use, alignment class and config; nothing that varies per call."""
    p = problem
    right, left = p.causal or p.window[1] is not None, p.window[0] is not None
    dims = f"d{p.head_dim}" if p.head_dim == p.head_dim_v else f"d{p.head_dim}_{p.head_dim_v}"
    words = [p.q_dtype, dims]
    words += [word for word, on in (("left", left), ("right", right), ("cap", p.soft_cap), ("ragged", p.layout == "ragged"),
                                    ("kvlens", p.kv_lens), ("lse", p.return_lse)) if on]
    words += [f"a{p.alignment}"] if p.alignment < 16 else []
    words += str(config).split()
    parameters: dict[str, Any] = {
        "element": p.q_dtype, "head_dim": p.head_dim, "head_dim_v": p.head_dim_v, "ragged": p.layout == "ragged",
        "kv_lens": p.kv_lens, "bounded_left": left, "bounded_right": right, "soft_cap": p.soft_cap, "lse": p.return_lse,
        "alignment": p.alignment, "block_q": config.block_q, "block_k": config.block_k, "warps": config.warps,
        "stages": config.stages, "query_in_registers": config.query_in_registers, "value_splits": config.value_splits,
        "blocks_per_sm": config.blocks_per_sm, "shared_memory": config.shared_memory(p.head_dim, p.head_dim_v),
    }
    return KernelSpec.make(
        "attention_prefill_mma_" + "_".join(words), "attention/prefill_mma.cu.jinja", "nvrtc", parameters,
        params=PARAMS, params_type="kernelgen::PrefillMmaParams", entries=(ENTRY,), target=target,
    )


def _grid(problem: AttentionProblem, config: Config) -> tuple[int, int, int]:
    """(query tiles, heads x value splits, requests). Ragged: a bound on the tiles of all requests, from Tq alone."""
    tiles = -(-problem.seq_q // config.block_q)
    heads = problem.num_q_heads * config.value_splits
    if problem.layout == "ragged":
        return (tiles + problem.batch if tiles and problem.batch else 0, heads, 1)
    return (tiles, heads, problem.batch)


def _scalars(problem: AttentionProblem, t: AttentionTensors) -> dict[str, int | float]:
    """Everything of Params that is fixed by shapes, strides and scalars."""
    values: dict[str, int | float] = {}
    for name, tensor in (("q", t.q), ("k", t.k), ("v", t.v), ("out", t.out)):
        strides = tensor.stride() if problem.layout == "dense" else (0, *tensor.stride())
        values |= {f"{name}_batch": strides[0], f"{name}_row": strides[1], f"{name}_head": strides[2]}
    if t.lse is None:
        lse = (0, 0, 0)
    elif problem.layout == "dense":
        lse = (t.lse.stride(0), t.lse.stride(2), t.lse.stride(1))  # (B, Hq, Sq)
    else:
        lse = (0, t.lse.stride(0), t.lse.stride(1))  # (Tq, Hq)
    values |= {"lse_batch": lse[0], "lse_row": lse[1], "lse_head": lse[2]}

    # A window reaching over the whole problem is the same as none, and keeps the kernel's sums within int32.
    reach = problem.seq_q + problem.seq_k
    left, right = problem.window
    right = min(right if right is not None else reach, 0 if problem.causal else reach)
    values |= {"window_left": min(left if left is not None else reach, reach), "window_right": right}

    # The kernel wants a positive factor: the sign, and a scale of 0, go into the queries.
    scale, cap = float(t.scale), t.soft_cap
    keep, flip = (0, 0) if scale == 0.0 else (-1, 0 if scale > 0.0 else -0x7FFF8000)  # 0x80008000: both sign bits
    size = abs(scale) or 1.0
    values |= {"q_keep": keep, "q_flip": flip, "logit_scale": (abs(cap) if cap else size) * _LOG2E,
               "cap_scale": size / abs(cap) if cap else 0.0}
    values |= {"seq_q": problem.seq_q, "seq_k": problem.seq_k, "batch": problem.batch, "group_size": problem.group_size}
    return values


def bind(problem: AttentionProblem, config: Config, kernel: Any, tensors: AttentionTensors) -> Callable[[AttentionTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    device = tensors.q.device.index or 0
    launch = kernel.prepare(device, grid=_grid(problem, config), block=(config.threads, 1, 1),
                            shared_memory=config.shared_memory(problem.head_dim, problem.head_dim_v))
    tail = PARAMS.pack_scalars(_scalars(problem, tensors))
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
    base = AttentionProblem("dense", 2, 1000, 1000, 16, 4, 128, 128, "bf16", "bf16", "bf16")
    yield base, None
    yield replace(base, causal=True, return_lse=True), None
    yield replace(base, head_dim=64, head_dim_v=64, causal=True, q_dtype="fp16", kv_dtype="fp16", out_dtype="fp16"), None
    yield replace(base, head_dim=72, head_dim_v=40, window=(100, 20), soft_cap=True, kv_lens=True), None
    yield replace(base, head_dim=512, head_dim_v=512, causal=True, return_lse=True), None
    yield replace(base, layout="ragged", head_dim=96, head_dim_v=96, causal=True, return_lse=True), None
    yield replace(base, layout="ragged", head_dim=64, head_dim_v=64, kv_lens=True), None
    for alignment in (8, 4, 2):
        yield replace(base, head_dim=32, head_dim_v=32, alignment=alignment), None
    yield replace(base, head_dim=64, head_dim_v=64, causal=True), Config(64, 64, 4, stages=3, query_in_registers=True)


FAMILY = KernelFamily(
    name="attention/prefill_mma", op="attention", target_kind="cuda", toolchain="nvrtc", supports=supports,
    candidates=candidates, legal=legal, spec=spec, bind=bind, coverage=coverage,
)
