"""Host side of attention/prefill_mma: dense and ragged attention forward with mma.sync, for sm_80 and later.

The kernel and its data flow are described in templates/include/kernelgen/attention/prefill_mma.cuh; the choices made
here, with their measurements, in docs/design/cuda_attention_mma.md.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from kernelgen.errors import NoBackendError
from kernelgen.kernels.attention.mma import (
    FP8,
    HALVES,
    REGISTERS_PER_SM,
    Config,
    address,
    legal_common,
    logit_scalars,
    options,
    round_up,
    scaled,
    shared_memory_of,
    supports_common,
    two_strides,
    words_of,
)
from kernelgen.kernels.base import KernelFamily
from kernelgen.params import ParamStruct
from kernelgen.problems.attention import AttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import AttentionTensors
from kernelgen.verdicts import Verdict, first_no

# struct PrefillMmaParams of mma_dense.cuh. The pointers of rarer features come last: the plain call packs the first ones.
_PLAIN = ("q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "kv_lens")
_RARE = ("sinks", "alibi_slopes", "mask", "mask_indptr", "variant_words", "q_scale", "k_scale", "v_scale")
PARAMS = ParamStruct((
    *((name, "ptr") for name in _PLAIN + _RARE),
    ("q_batch", "i64"), ("q_row", "i64"), ("q_head", "i64"),
    ("k_batch", "i64"), ("k_row", "i64"), ("k_head", "i64"),
    ("v_batch", "i64"), ("v_row", "i64"), ("v_head", "i64"),
    ("out_batch", "i64"), ("out_row", "i64"), ("out_head", "i64"),
    ("lse_batch", "i64"), ("lse_row", "i64"), ("lse_head", "i64"),
    ("alibi_batch", "i64"), ("alibi_head", "i64"),
    ("mask_batch", "i64"), ("mask_row", "i64"), ("mask_head", "i64"), ("mask_key", "i64"),
    ("q_scale_batch", "i64"), ("q_scale_head", "i64"), ("k_scale_batch", "i64"), ("k_scale_head", "i64"),
    ("v_scale_batch", "i64"), ("v_scale_head", "i64"),
    ("seq_q", "i32"), ("seq_k", "i32"), ("batch", "i32"), ("group_size", "i32"),
    ("window_left", "i32"), ("window_right", "i32"), ("q_keep", "i32"), ("q_flip", "i32"),
    ("logit_scale", "f32"), ("cap_scale", "f32"), ("v_factor", "f32"), ("grid_tiles", "i32"), ("grid_parts", "i32"),
))
ENTRY = "attention_prefill_mma"

MAX_TOKENS = 1 << 29  # positions plus window and lengths stay within int32
_MAX_GRID_X, _MAX_GRID_YZ = 2**31 - 1, 65535


def supports(problem: AttentionProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (bool(unplanned := supports_unplanned(p, target, "prefill_mma")), unplanned.reason),
    )


def supports_unplanned(problem: AttentionProblem, target: Target, name: str) -> Verdict:
    """What every kernel with mma.sync asks of a dense or ragged call; ``name``: whose verdict it becomes."""
    p = problem
    out_fits = p.out_dtype in HALVES if p.q_dtype in FP8 else p.out_dtype == p.q_dtype
    return first_no(
        (target.kind == "cuda" and target.capability >= 80, f"{name} needs sm_80 or later, got {target}"),
        (bool(common := supports_common(p)), common.reason),
        (out_fits, f"out dtype {p.out_dtype} does not fit q dtype {p.q_dtype}"),
        (max(p.seq_q, p.seq_k) <= MAX_TOKENS, f"sequence of {max(p.seq_q, p.seq_k)} tokens exceeds {MAX_TOKENS}"),
        (not p.block_mask, f"block_mask is not in {name}"),
        (not p.requires_grad, f"requires_grad: {name} has no backward"),
    )


def legal(problem: AttentionProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target: divisibility, registers, shared memory?"""
    return first_no(
        (config.key_warps == 1, f"{config.key_warps} key warps: only planned kernels split keys over warps"),
        (math.prod(_extents(problem, config)) <= _MAX_GRID_X or not _flat_grid(problem, config),
         f"batch {problem.batch} with {problem.num_q_heads} query heads and {problem.seq_q} rows: {math.prod(_extents(problem, config))} "
         f"blocks, at most {_MAX_GRID_X}"),
        (bool(common := legal_common(problem, target.shared_memory_per_block, config, target)), common.reason),
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
    shared = shared_memory_of(problem, config) + 1024
    registers = round_up(config.registers(problem.head_dim, problem.head_dim_v), 8)
    blocks = min((target.shared_memory_per_block + 1024) // shared, REGISTERS_PER_SM // (config.threads * registers))
    return blocks * config.warps


def _few_tiles(problem: AttentionProblem, target: Target, config: Config) -> bool:
    """Less than a tile per SM; where the masks make tiles uneven, less than four (measured as _SMALL)."""
    uneven = problem.causal or problem.windowed
    return math.prod(_extents(problem, config)) < target.sm_count * (4 if uneven and problem.seq_q > config.block_q else 1)


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
    parameters = options(p, config, ragged=p.layout == "ragged", kv_lens=p.kv_lens, out_element=p.out_dtype,
                         flat_grid=_flat_grid(p, config))
    return KernelSpec.make(
        "_".join(["attention_prefill_mma", *words_of(parameters, config)]), "attention/prefill_mma.cu.jinja", "nvrtc", parameters,
        params=PARAMS, params_type="kernelgen::PrefillMmaParams", entries=(ENTRY,), target=target,
    )


def _extents(problem: AttentionProblem, config: Config) -> tuple[int, int, int]:
    """(query tiles, heads x value splits, requests). Ragged: a bound on the tiles of all requests, from Tq alone."""
    tiles = -(-problem.seq_q // config.block_q)
    heads = problem.num_q_heads * config.value_splits
    if problem.layout == "ragged":
        return (tiles + problem.batch if tiles and problem.batch else 0, heads, 1)
    return (tiles, heads, problem.batch)


def _flat_grid(problem: AttentionProblem, config: Config) -> bool:
    """More heads or requests than a grid has in y and z: a kernel of its own takes all of them in x."""
    return max(_extents(problem, config)[1:]) > _MAX_GRID_YZ


def _grid(problem: AttentionProblem, config: Config) -> tuple[int, int, int]:
    """Of the launch: the extents, or their product in one dimension."""
    extents = _extents(problem, config)
    return (math.prod(extents), 1, 1) if _flat_grid(problem, config) else extents


def scalars_of(problem: AttentionProblem, t: AttentionTensors) -> dict[str, int | float]:
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

    values |= logit_scalars(problem, float(t.scale), t.soft_cap) | {"v_factor": float(t.v_factor)}
    for name, scales in (("q_scale", t.q_scale), ("k_scale", t.k_scale), ("v_scale", t.v_scale), ("alibi", t.alibi_slopes)):
        first, second = two_strides(scales)
        values |= {f"{name}_batch": first, f"{name}_head": second}
    mask = t.mask.stride() if t.mask is not None and problem.mask == "dense" else (0, 0, 0, 0)
    values |= {"mask_batch": mask[0], "mask_head": mask[1], "mask_row": mask[2], "mask_key": mask[3]}
    values |= {"seq_q": problem.seq_q, "seq_k": problem.seq_k, "batch": problem.batch, "group_size": problem.group_size}
    return values


def check_factor(problem: AttentionProblem, t: AttentionTensors) -> None:
    """Only the kernels of fp8 values have a factor for them."""
    if problem.kv_dtype in HALVES and not scaled(problem) and t.v_factor != 1.0:
        raise NoBackendError(f"v_factor: got {t.v_factor} for {problem.kv_dtype} values without scales, expected 1")


def bind(problem: AttentionProblem, config: Config, kernel: Any, tensors: AttentionTensors) -> Callable[[AttentionTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    device = tensors.q.device.index or 0
    check_factor(problem, tensors)
    launch = kernel.prepare(device, grid=_grid(problem, config), block=(config.threads, 1, 1),
                            shared_memory=shared_memory_of(problem, config))
    extents = dict(zip(("grid_tiles", "grid_parts"), _extents(problem, config)))
    scalars = PARAMS.pack_scalars(scalars_of(problem, tensors) | extents)
    with_lse, ragged, with_lens = problem.return_lse, problem.layout == "ragged", problem.kv_lens
    pack_plain, pack_rare = struct.Struct(f"<{len(_PLAIN)}Q").pack, struct.Struct(f"<{len(_RARE)}Q").pack
    rare = problem.alibi or problem.sinks or problem.mask or problem.variant or scaled(problem)
    tail = scalars if rare else bytes(8 * len(_RARE)) + scalars

    def plain(t: AttentionTensors) -> bytes:
        return pack_plain(
            t.q.data_ptr(), t.k.data_ptr(), t.v.data_ptr(), t.out.data_ptr(),
            t.lse.data_ptr() if with_lse else 0,  # type: ignore[union-attr]
            t.cu_seqlens_q.data_ptr() if ragged else 0,  # type: ignore[union-attr]
            t.cu_seqlens_k.data_ptr() if ragged else 0,  # type: ignore[union-attr]
            t.kv_lens.data_ptr() if with_lens else 0,  # type: ignore[union-attr]
        )

    def run(t: AttentionTensors) -> None:
        launch(plain(t) + tail)

    def run_with_rare(t: AttentionTensors) -> None:
        launch(plain(t) + pack_rare(*(address(getattr(t, name)) for name in _RARE)) + tail)

    return run_with_rare if rare else run


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
    yield replace(base, num_q_heads=70000, num_kv_heads=70000, seq_q=100, seq_k=100, causal=True), None
    yield replace(base, alibi=True, sinks=True, causal=True, return_lse=True), None
    yield replace(base, layout="ragged", alibi=True, sinks=True, soft_cap=True, head_dim=64, head_dim_v=64), None
    yield replace(base, mask="dense", head_dim=64, head_dim_v=64), None
    yield replace(base, layout="ragged", mask="flat", soft_cap=True, head_dim=64, head_dim_v=64), None
    yield replace(base, layout="ragged", mask="packed", causal=True, kv_lens=True, head_dim=96, head_dim_v=96), None
    fp8 = replace(base, kv_dtype="e4m3", scales="head", causal=True)
    yield fp8, None
    yield replace(fp8, q_dtype="fp16", kv_dtype="e5m2", out_dtype="fp16", head_dim=72, head_dim_v=40, alignment=8), None
    yield replace(fp8, q_dtype="e4m3", layout="ragged", scales="request_head"), None
    yield replace(fp8, q_dtype="e5m2", kv_dtype="fp16", scales="tensor", head_dim=64, head_dim_v=64, alignment=1 << 1), None
    yield replace(fp8, kv_dtype="e5m2", scales=None, head_dim=512, head_dim_v=512, alignment=1), None


FAMILY = KernelFamily(
    name="attention/prefill_mma", op="attention", target_kind="cuda", toolchain="nvrtc", supports=supports,
    candidates=candidates, legal=legal, spec=spec, bind=bind, coverage=coverage,
)
