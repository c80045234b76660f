"""Host side of attention/prefill_sm90: dense and ragged attention forward on Hopper with TMA and WGMMA.

The kernel and its data flow are described in templates/include/kernelgen/attention/prefill_sm90.cuh; the choices made here, with their
measurements, in docs/design/prefill_sm90.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any

from kernelgen.kernels import counters
from kernelgen.kernels.attention import mma
from kernelgen.kernels.attention.mma import HALVES, address, round_up
from kernelgen.kernels.attention.prefill_mma import check_factor, supports_unplanned
from kernelgen.kernels.attention.prefill_mma import scalars_of as scalars_of_all
from kernelgen.kernels.attention.prefill_sm90_configs import TABLE, Config
from kernelgen.kernels.attention.prefill_sm90_split import (
    MERGE_ENTRY,
    MERGE_THREADS,
    bind_split,
    divides,
    leading,
    of_few_queries,
    packed_heads,
    queries_of,
)
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.tensor_map import head_map
from kernelgen.params import ParamStruct
from kernelgen.problems.attention import AttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target, target_of
from kernelgen.tensors import AttentionTensors
from kernelgen.verdicts import Verdict, first_no, no

# struct PrefillSm90Params of sm90_params.cuh.
_CALL = ("q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "kv_lens")
_RARE = ("sinks", "alibi_slopes", "mask", "mask_indptr", "variant_words")
PARAMS = ParamStruct((
    *((name, "ptr") for name in (*_CALL, "counter", *_RARE)),
    *((name, "i64") for name in (
        "k_batch", "k_row", "k_head", "out_batch", "out_row", "out_head", "lse_batch", "lse_row", "lse_head", "alibi_batch", "alibi_head",
        "mask_batch", "mask_row", "mask_head", "mask_key")),
    *((name, "i32") for name in (
        "seq_q", "seq_k", "batch", "group_size", "num_q_heads", "row_tiles", "tiles", "section", "window_left", "window_right",
        "q_keep", "q_flip")),
    ("logit_scale", "f32"), ("cap_scale", "f32"), ("splits", "i32"),
), tensor_maps=("map_q", "map_k", "map_v", "map_out"))
ENTRY = "attention_prefill_sm90"

_BOX = 64  # columns of a box: 128 bytes
_MAX_TILES = 2**31 - 1 - 2**16  # they and the blocks of a launch are counted in int32
_OTHER_REGISTERS = 32  # of a consumer's thread, beside scores, weights and output
_TALL = Config(2, 128)  # whose tiles Row.idle means
_SYSTEM_BYTES = 1024  # of shared memory that each block leaves to the system


def supports(problem: AttentionProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cuda" and target.capability == 90, f"prefill_sm90 needs sm_90a, got {target}"),
        (p.q_dtype in HALVES and p.kv_dtype == p.q_dtype, f"dtypes {p.q_dtype}/{p.kv_dtype}: prefill_sm90 has bf16 and fp16"),
        (p.alignment >= 16, f"alignment {p.alignment}: TMA needs addresses and strides of 16 bytes"),
        (p.head_dim <= 256 and p.head_dim_v <= 256, f"head dims {p.head_dim}/{p.head_dim_v} exceed 256"),
        (p.softmax, f"variant {p.variant} has no softmax"),
        (not p.scales, "scales of q, k or v are not in prefill_sm90"),
        (bool(common := supports_unplanned(p, target, "prefill_sm90")), common.reason),
    )


def shared_memory(problem: AttentionProblem, config: Config) -> int:
    """Dynamic shared memory in bytes of a launch: Sm90Shape::kSharedBytes."""
    c = config
    depth, columns = round_up(problem.head_dim, _BOX), round_up(problem.head_dim_v, _BOX)
    queries, out = 64 * 2 * depth, 64 * 2 * columns
    apart = 0 if c.splits > 1 else out // c.out_parts  # partial results leave from registers
    of_consumer = max(queries, out) if c.out_over_query else queries + apart
    tiles = c.consumers * of_consumer + c.block_k * 2 * (c.stages * depth + c.value_ring * columns)
    barriers = 16 * c.stages + 24 * c.value_ring + 16 * c.consumers
    return round_up(round_up(tiles + barriers, 16) + 2 * 16 + 2 * 32 + c.value_ring * 16, 128)


def registers_of(problem: AttentionProblem, config: Config) -> int:
    """Estimate for a consumer's thread: scores, weights, output, the rest."""
    return config.block_k * 3 // 4 + round_up(problem.head_dim_v, 16) // 2 + _OTHER_REGISTERS


def legal(problem: AttentionProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target: registers, shared memory, what a box holds?"""
    c = config
    if not (1 <= c.consumers <= 3 and 1 <= c.resident <= 3):
        return no(f"{c.consumers} consumers, {c.resident} blocks of an SM: 1 to 3")
    shared, registers = shared_memory(problem, c), registers_of(problem, c)
    return first_no(
        (c.block_k % 16 == 0 and 16 <= c.block_k <= 256, f"block_k {c.block_k} is not a multiple of 16 up to 256"),
        (min(c.stages, c.value_ring) >= 2, f"{c.stages} stages of keys, {c.value_ring} of values, at least 2"),
        (c.diagonal in (0, 1) or (c.diagonal == 2 and c.block_k % 32 == 0),
         f"diagonal {c.diagonal} beside {c.block_k} keys: 0, 1, or 2 beside a multiple of 32"),
        (c.multicast == 0 or (c.multicast == 1 and c.resident == 1),
         f"multicast {c.multicast}, {c.resident} blocks of an SM: 0, or 1 of one block"),
        (c.multicast == 0 or (problem.layout == "dense" and not problem.causal and not problem.windowed),
         "multicast 1: row tiles of a head that see the same keys, dense and without a causal mask or window"),
        (c.out_parts in (1, 2) and (c.out_parts == 1 or (not c.out_over_query and round_up(problem.head_dim_v, _BOX) % (2 * _BOX) == 0)),
         f"{c.out_parts} parts of results of {problem.head_dim_v} columns: 1, or 2 of whole boxes of {_BOX} beside the queries"),
        (bool(divided := divides(problem, c)), divided.reason),
        (row_tiles_of(problem, c)[1] <= _MAX_TILES,
         f"{row_tiles_of(problem, c)[1]} row tiles of {problem.num_q_heads} heads, at most {_MAX_TILES}"),
        (registers <= c.registers, f"config {c} needs about {registers} registers, a consumer has {c.registers}"),
        (c.resident * (shared + _SYSTEM_BYTES) <= target.shared_memory_per_block + _SYSTEM_BYTES,
         f"config {c} needs {shared} bytes of shared memory, {c.resident} times; {target} has {target.shared_memory_per_block}"),
    )


def _keys(problem: AttentionProblem) -> int | None:
    """Keys of a request, of ragged ones the mean; None where a batch-invariant call may not look at what the batch decides."""
    if problem.layout == "dense":
        return problem.seq_k
    return None if problem.batch_invariant else problem.seq_k // max(problem.batch, 1)


def candidates(problem: AttentionProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first."""
    p, keys = problem, _keys(problem)
    widest = max(p.head_dim, p.head_dim_v)
    masked = bool(p.causal or p.windowed or p.mask or p.variant)
    idle = not p.batch_invariant and 0 < row_tiles_of(p, _TALL)[1] <= (target.sm_count or 0) // 2
    rows = (row for row in TABLE if widest <= row.head_dim and row.masked == masked and (idle or not row.idle))
    fitting = next((row for row in rows if row.keys is None or (keys is not None and keys <= row.keys)), None)
    wanted: Iterable[Config] = fitting.configs if fitting else ()
    few = of_few_queries(p, target)
    wanted = chain(few, wanted) if leading(p, target) else chain(wanted, few)
    return (c for c in wanted if legal(p, target, c))


def grid(problem: AttentionProblem, target: Target) -> Iterator[Config]:
    """What a search looks at beside the candidates: every tile and schedule that is legal, with as many stages as fit."""
    for consumers, resident in ((1, 1), (1, 2), (1, 3), (2, 1), (3, 1)):
        for block_k in range(48, 257, 16):
            for pingpong, over in itertools.product((True, False) if consumers > 1 else (False,), (False, True)):
                found = (Config(consumers, block_k, stages, pingpong, over, resident) for stages in (4, 3, 2))
                config = next((c for c in found if legal(problem, target, c)), None)
                if config:
                    yield config


def described(problem: AttentionProblem, config: Config) -> tuple[dict[str, Any], list[str]]:
    """(parameters, words of the name) of a specialisation: dtype, head dims, features in use and config; nothing that varies per call."""
    p, c = problem, replace(config, section=Config.section, splits=min(config.splits, 2))  # of which numbers are scalars
    tile = mma.Config(c.block_q, c.block_k, 4 * c.consumers, c.stages)
    parameters = mma.options(
        p, tile, ragged=p.layout == "ragged", kv_lens=p.kv_lens, out_element=p.out_dtype, shared_memory=shared_memory(p, c),
        value_stages=c.value_ring, early_keys=c.early_keys, pingpong=c.pingpong, out_over_query=c.out_over_query,
        resident=c.resident, diagonal=c.diagonal, out_parts=c.out_parts, multicast=c.multicast, page_rows=0,
        packed_heads=packed_heads(p, c), split=c.splits > 1, **({"merge_threads": MERGE_THREADS} if c.splits > 1 else {}),
        mma_columns=" ".join(str(n) for n in sorted({c.block_k, c.block_k // (2 if c.diagonal == 2 else 1), round_up(p.head_dim_v, 16)})))
    words = [*mma.words_of(parameters, tile)[:-len(str(tile).split())], *str(c).split()]
    return parameters, [{"gqa": f"gqa{packed_heads(p, c)}", "split2": "split"}.get(word, word) for word in words]


def spec(problem: AttentionProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation of a config."""
    parameters, words = described(problem, config)
    return KernelSpec.make(
        "_".join([ENTRY, *words]), "attention/prefill_sm90.cu.jinja", "nvrtc", parameters,
        params=PARAMS, params_type="kernelgen::PrefillSm90Params", entries=(ENTRY, *([MERGE_ENTRY] if config.splits > 1 else [])),
        target=target,
    )


def row_tiles_of(problem: AttentionProblem, config: Config) -> tuple[int, int]:
    """(row tiles of a dense request, row tiles in all; ragged: a bound from Tq alone), of a cluster where blocks share keys; parts of
    them where keys are split."""
    p, c, packed = problem, config, packed_heads(problem, config)
    tiles = -(-p.seq_q // (queries_of(p, c) * c.blocks))
    heads = p.num_q_heads // packed
    if p.layout == "ragged":
        return 0, (tiles + p.batch if tiles and p.batch else 0) * heads * c.splits
    return tiles * c.splits, tiles * p.batch * heads * c.splits


def _section(problem: AttentionProblem, config: Config) -> int:
    """Query heads whose tiles are dealt out together, whole groups of them."""
    p = problem
    of_group = max(p.seq_k * (p.head_dim + p.head_dim_v) * 2, 1)
    groups = 1 << max(((config.section << 20) // of_group).bit_length() - 1, 0)
    return max(min(groups, p.batch * p.num_kv_heads), 1) * p.group_size


def scalars_of(problem: AttentionProblem, config: Config, t: AttentionTensors) -> dict[str, int | float]:
    """Everything of Params that is fixed by shapes, strides and scalars."""
    row_tiles, tiles = row_tiles_of(problem, config)
    values = scalars_of_all(problem, t) | {
        "num_q_heads": problem.num_q_heads, "row_tiles": row_tiles, "tiles": tiles, "section": _section(problem, config),
        "splits": config.splits}
    return {name: values[name] for name in PARAMS.scalars}


def bind(problem: AttentionProblem, config: Config, kernel: Any, tensors: AttentionTensors) -> Callable[[AttentionTensors], None]:
    """The closure of a repeated call: packs addresses, launches."""
    p, c, t = problem, config, tensors
    device = t.q.device.index or 0
    check_factor(p, t)
    keys = c.block_k // c.blocks
    packed = packed_heads(p, c)
    boxes = [("q", t.q, 64 // packed, packed), ("k", t.k, keys, 1), ("v", t.v, keys, 1)]
    boxes += [("out", t.out, 64 // packed, packed)] if p.layout == "dense" and c.splits == 1 else []
    maps = [head_map(f"map_{name}", name, x, (_BOX, rows), heads) for name, x, rows, heads in boxes]
    clusters = min(row_tiles_of(p, c)[1], max((target_of(t.q.device).sm_count or 1) * c.resident // c.blocks, 1))
    launch = kernel.prepare(device, grid=(clusters * c.blocks, 1, 1), block=(c.threads, 1, 1), cluster=(c.blocks, 1, 1), programmatic=True,
                            shared_memory=shared_memory(p, c), tensor_maps=maps)
    tail, blank = PARAMS.pack_scalars(scalars_of(p, c, t)), bytes(128 * len(PARAMS.tensor_maps))
    pack = PARAMS.pointer_packer.pack
    call, rare = attrgetter(*_CALL), attrgetter(*_RARE) if p.alibi or p.sinks or p.mask or p.variant else None
    if t.q.device.type == "cuda":
        counters.provide(device)
    none = (0,) * len(_RARE)
    if c.splits > 1:
        return bind_split(p, c, kernel, device, launch, lambda pointers: blank + pack(*pointers) + tail, call, rare)

    def run(t: AttentionTensors) -> None:
        counter, memory = counters.counter(device)
        launch(blank + pack(*map(address, call(t)), counter, *(map(address, rare(t)) if rare else none)) + tail)
        del memory

    return run


def coverage() -> Iterable[tuple[AttentionProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = AttentionProblem("dense", 2, 1000, 1000, 16, 4, 128, 128, "bf16", "bf16", "bf16")
    yield base, None
    yield replace(base, causal=True, return_lse=True), None
    yield replace(base, head_dim=64, head_dim_v=64, causal=True, q_dtype="fp16", kv_dtype="fp16", out_dtype="fp16"), None
    yield replace(base, head_dim=72, head_dim_v=40, window=(100, 20), soft_cap=True, kv_lens=True), None
    yield replace(base, head_dim=256, head_dim_v=256, causal=True, return_lse=True), None
    yield replace(base, head_dim=192, causal=True), None
    yield replace(base, layout="ragged", head_dim=96, head_dim_v=96, causal=True, return_lse=True), None
    yield replace(base, layout="ragged", head_dim=64, head_dim_v=64, kv_lens=True), None
    yield replace(base, causal=True), Config(1, 128, pingpong=False)
    yield replace(base, causal=True), Config(2, 128, 2, False)
    yield base, Config(2, 128, 3, value_stages=2)
    yield replace(base, causal=True), Config(2, 128, diagonal=2)
    yield base, Config(2, 128, early_keys=True)
    yield replace(base, head_dim=256, head_dim_v=256), Config(2, 80, out_over_query=True, early_keys=True)
    yield base, Config(2, 128, early_keys=True, multicast=1)
    yield replace(base, head_dim=256, head_dim_v=256, causal=True), Config(2, 64, early_keys=True, diagonal=1, out_parts=2)
    yield replace(base, causal=True, return_lse=True), Config(2, 128, pack_gqa=True)
    yield replace(base, causal=True, sinks=True, return_lse=True), Config(2, 128, 3, splits=4)
    yield replace(base, layout="ragged", causal=True, num_q_heads=12), Config(1, 128, 3, False, early_keys=True, pack_gqa=True, splits=4)
    yield replace(base, alibi=True, sinks=True, causal=True, return_lse=True), None
    yield replace(base, layout="ragged", alibi=True, sinks=True, soft_cap=True, head_dim=64, head_dim_v=64), None
    yield replace(base, mask="dense", head_dim=64, head_dim_v=64), None
    yield replace(base, layout="ragged", mask="packed", causal=True, kv_lens=True, head_dim=96, head_dim_v=96), None


FAMILY = KernelFamily(
    name="attention/prefill_sm90", op="attention", target_kind="cuda", toolchain="nvrtc", supports=supports,
    candidates=candidates, legal=legal, spec=spec, bind=bind, coverage=coverage, capabilities=(90,), grid=grid,
)
