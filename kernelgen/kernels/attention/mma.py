"""What the attention kernels with mma.sync share on the host: the config, the options of a rendered kernel, scalars.

The kernels are described in templates/include/kernelgen/attention/mma_body.cuh and mma_shape.cuh.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernelgen.problems.attention import AttentionProblem
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.verdicts import Verdict, first_no

Problem = AttentionProblem | PagedAttentionProblem

FP8 = ("e4m3", "e5m2")
HALVES = ("bf16", "fp16")
LOG2E = math.log2(math.e)
MAX_REGISTERS = 255
REGISTERS_PER_SM = 65536
MASK_FORMS = {None: "kNoMask", "dense": "kDenseMask", "flat": "kFlatMask", "packed": "kPackedMask"}
# Registers besides the output, score and query fragments (addresses, K or V fragments in flight, running maxima and
# sums). ptxas 13.0 spills in none of the table's configs, which reach 255 by this estimate.
_OTHER_REGISTERS = 47


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _tile_bytes(rows: int, columns: int) -> int:
    """Bytes of a SharedTile (kernelgen/cuda/shared_tile.cuh): rows that are no multiple of 128 bytes are padded."""
    chunks = columns // 8
    return rows * 16 * (chunks if chunks % 8 == 0 else chunks | 1)


@dataclass(frozen=True)
class Config:
    """Tile shape and schedule.

    block_q, block_k  rows of a block, keys of a tile; a warp owns block_q / warps rows
    stages            slots of the K and V rings. 1: V loads under Q K^T and the next K under P V. 2 and more: whole
                      tiles are loaded ahead, with one barrier per tile instead of two. fp8 keys: slots of bytes, each
                      loaded a whole tile or more ahead
    query_in_registers  keep Q's fragments in registers instead of re-reading them for each tile
    value_splits      blocks that share the value columns of a query tile; each computes the scores anew
    blocks_per_sm     bounds the registers so that as many blocks fit
    key_warps         warps that share a block's keys: each walks tiles of its own without any barrier (warps = 1)
    """

    block_q: int
    block_k: int
    warps: int
    stages: int = 1
    query_in_registers: bool = False
    value_splits: int = 1
    blocks_per_sm: int = 1
    key_warps: int = 1

    def __str__(self) -> str:
        words = f"{self.block_q}x{self.block_k} w{self.warps} s{self.stages}"
        words += " qreg" if self.query_in_registers else ""
        words += f" split{self.value_splits}" if self.value_splits > 1 else ""
        words += f" keys{self.key_warps}" if self.key_warps > 1 else ""
        return words + (f" b{self.blocks_per_sm}" if self.blocks_per_sm > 1 else "")

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.key_warps

    def value_columns(self, head_dim_v: int) -> int:
        """Value columns that one block owns, padded to the 16 of an ldmatrix."""
        return round_up(-(-head_dim_v // self.value_splits), 16)

    def shared_memory(
        self, head_dim: int, head_dim_v: int, *, fp8: bool = False, page_scales: bool = False, plain_rope: int = 0,
    ) -> int:
        """Dynamic shared memory in bytes: AttentionShape::kSharedBytes of mma_shape.cuh. plain_rope: columns, see there."""
        depth, columns = round_up(head_dim, 16), self.value_columns(head_dim_v)
        key_depth = round_up(head_dim - plain_rope, 16)
        slots = 1 if fp8 else self.stages
        group = _tile_bytes(self.block_q, depth) + slots * (_tile_bytes(self.block_k, key_depth) + _tile_bytes(self.block_k, columns))
        group += self.stages * self.block_k * (key_depth + columns) if fp8 else 0
        group += (self.stages + 1) * 2 * self.block_k * 4 if page_scales else 0
        group += (self.stages + 1) * _tile_bytes(self.block_k, round_up(plain_rope, 16)) if plain_rope else 0
        row_tiles = self.block_q // self.warps // 16
        exchange = (self.key_warps - 1) * (row_tiles * columns // 2 + 4 * row_tiles) * 32 * 4
        return max(self.key_warps * group, _tile_bytes(self.block_q, columns), exchange)

    def registers(self, head_dim: int, head_dim_v: int) -> int:
        """Estimate per thread: output and score accumulators, query fragments, the rest."""
        rows = self.block_q // self.warps
        output = rows * self.value_columns(head_dim_v) // 32
        scores = rows * self.block_k // 32
        queries = rows * round_up(head_dim, 16) // 64 if self.query_in_registers else 0
        return output + scores + queries + _OTHER_REGISTERS


def plain_rope(problem: Problem) -> int:
    """Columns of a rope part in the type of the products beside an fp8 latent part; 0 for none."""
    if not isinstance(problem, PagedAttentionProblem) or problem.rope_dtype in ("", problem.kv_dtype):
        return 0
    return problem.rope_dim


def shared_memory_of(problem: Problem, config: Config) -> int:
    """Dynamic shared memory of a launch."""
    page_scales = isinstance(problem, PagedAttentionProblem) and problem.kv_scales == "page"
    return config.shared_memory(problem.head_dim, problem.head_dim_v, fp8=problem.kv_dtype in FP8, page_scales=page_scales,
                                plain_rope=plain_rope(problem))


def shared_memory_bound(problem: Problem, config: Config) -> int:
    """What a config is chosen by: the most for either type of a rope part, which only the run of a plan knows."""
    if not isinstance(problem, PagedAttentionProblem) or problem.rope_dim == 0 or problem.kv_dtype not in FP8:
        return shared_memory_of(problem, config)
    kinds = ("", problem.q_dtype) if problem.q_dtype in HALVES else ("",)
    return max(shared_memory_of(replace(problem, rope_dtype=kind), config) for kind in kinds)


def element_of(problem: Problem) -> str:
    """What the tensor cores multiply: the 16-bit type among queries and keys, bf16 where both are fp8."""
    return next((d for d in (problem.kv_dtype, problem.q_dtype) if d in HALVES), "bf16")


def supports_common(problem: Problem) -> Verdict:
    """Types, head dims and features that both kernels treat alike."""
    p = problem
    dims_fit = all(d % 8 == 0 and 8 <= d <= 512 for d in (p.head_dim, p.head_dim_v)) or (p.head_dim, p.head_dim_v) == (576, 512)
    return first_no(
        (p.q_dtype in HALVES + FP8, f"q dtype {p.q_dtype} is not bf16, fp16 or fp8"),
        (p.kv_dtype in FP8 or p.kv_dtype == p.q_dtype or (p.q_dtype in FP8 and p.kv_dtype in HALVES),
         f"key/value dtype {p.kv_dtype} is neither fp8 nor q dtype {p.q_dtype}"),
        (dims_fit, f"head dims {p.head_dim}/{p.head_dim_v} are not multiples of 8 from 8 to 512, nor 576/512"),
        (p.num_kv_heads > 0 and p.num_q_heads % p.num_kv_heads == 0,
         f"{p.num_q_heads} query heads are not a multiple of {p.num_kv_heads} key/value heads"),
        (p.alignment >= (1 if p.kv_dtype in FP8 else 2), f"alignment {p.alignment} is below an element's bytes"),
        (p.variant is None or hasattr(p.variant, "code"), f"variant {p.variant} is not traced"),
        (p.softmax or not p.return_lse, f"variant {p.variant} has no softmax and therefore no LSE"),
        (p.softmax or not p.sinks, f"variant {p.variant} has no softmax that sinks could be a term of"),
    )


def legal_common(problem: Problem, shared_limit: int, config: Config, target: Any) -> Verdict:
    """Does the config fit the problem and the target: divisibility, registers, shared memory?"""
    c, p = config, problem
    shared = shared_memory_bound(p, c)
    limit = min(MAX_REGISTERS, REGISTERS_PER_SM // (c.threads * c.blocks_per_sm))
    registers = c.registers(p.head_dim, p.head_dim_v)
    return first_no(
        (c.block_q % (16 * c.warps) == 0, f"block_q {c.block_q} is not a multiple of 16 rows x {c.warps} warps"),
        (c.block_k % 16 == 0, f"block_k {c.block_k} is not a multiple of 16"),
        (c.warps <= 16 and c.stages >= 1, f"{c.warps} warps, {c.stages} stages: at most 16 and at least 1"),
        (c.key_warps == 1 or c.warps == 1, f"{c.key_warps} key warps need 1 warp of rows, got {c.warps}"),
        (c.value_splits == 1 or p.head_dim_v > (c.value_splits - 1) * c.value_columns(p.head_dim_v),
         f"{c.value_splits} value splits leave one without columns of {p.head_dim_v}"),
        (registers <= limit, f"config {c} needs about {registers} registers, the limit is {limit}"),
        (shared <= shared_limit, f"config {c} needs {shared} bytes of shared memory, {target} has {shared_limit}"),
    )


def options(problem: Problem, config: Config, **layout: Any) -> dict[str, Any]:
    """Parameters of templates/attention/mma_options.cuh.jinja; ``layout`` adds or replaces what one kernel has."""
    p, c = problem, config
    page_scales = isinstance(p, PagedAttentionProblem) and p.kv_scales == "page"
    values: dict[str, Any] = {
        "element": element_of(p), "query_element": p.q_dtype, "key_element": p.kv_dtype,
        "head_dim": p.head_dim, "head_dim_v": p.head_dim_v, "rope_dim": 0, "plain_rope": plain_rope(p) > 0,
        "ragged": False, "kv_lens": False, "flat_grid": False,
        "bounded_left": p.window[0] is not None, "bounded_right": p.causal or p.window[1] is not None,
        "soft_cap": p.soft_cap, "lse": p.return_lse, "alibi": p.alibi, "sinks": p.sinks, "scales": scaled(p),
        "page_scales": page_scales, "mask_form": MASK_FORMS[p.mask],
        "variant": p.variant is not None, "variant_code": "" if p.variant is None else p.variant.code(),
        "alignment": p.alignment, "block_q": c.block_q, "block_k": c.block_k, "warps": c.warps, "stages": c.stages,
        "query_in_registers": c.query_in_registers, "value_splits": c.value_splits, "key_warps": c.key_warps,
        "blocks_per_sm": c.blocks_per_sm, "shared_memory": shared_memory_of(p, c),
    }
    return values | layout


def scaled(problem: Problem) -> bool:
    """Scale tensors may be given."""
    given = (problem.kv_scales is not None or problem.q_scale) if isinstance(problem, PagedAttentionProblem) else problem.scales
    return bool(given)


def natural(problem: Problem) -> bool:
    """The kernel computes each logit in natural units: kNatural of mma_shape.cuh."""
    return problem.alibi or problem.variant is not None or scaled(problem)


def words_of(parameters: dict[str, Any], config: Config) -> list[str]:
    """The parts of a spec's name that its parameters decide."""
    v = parameters
    types = [v["query_element"]] + ([v["key_element"]] if v["key_element"] != v["query_element"] else [])
    types += [f"to_{v['out_element']}"] if v["out_element"] != v["element"] else []
    dims = f"d{v['head_dim']}" if v["head_dim"] == v["head_dim_v"] else f"d{v['head_dim']}_{v['head_dim_v']}"
    flags = (("left", "bounded_left"), ("right", "bounded_right"), ("cap", "soft_cap"), ("ragged", "ragged"), ("kvlens", "kv_lens"),
             ("lse", "lse"), ("flatgrid", "flat_grid"), ("alibi", "alibi"), ("sinks", "sinks"), ("scales", "scales"),
             ("pagescales", "page_scales"))
    words = [*types, dims, *(word for word, name in flags if v[name])]
    words += [f"{'plain' if v['plain_rope'] else ''}rope{v['rope_dim']}"] if v["rope_dim"] else []
    words += [form for form, name in MASK_FORMS.items() if form and name == v["mask_form"]]
    # Two variants have two names; the text itself is a parameter.
    words += [f"variant{zlib.crc32(v['variant_code'].encode()):08x}"] if v["variant_code"] else []
    words += [f"a{v['alignment']}"] if v["alignment"] < 16 else []
    return words + str(config).split()


def logit_scalars(problem: Problem, scale: float, soft_cap: float | None) -> dict[str, int | float]:
    """q_keep, q_flip, logit_scale, cap_scale. The kernel wants a positive factor: the sign, and a scale of 0, go into the
    queries."""
    keep, flip = (0, 0) if scale == 0.0 else (-1, 0 if scale > 0.0 else -0x7FFF8000)  # 0x80008000: both sign bits
    size, unit = abs(scale) or 1.0, 1.0 if natural(problem) else LOG2E
    return {"q_keep": keep, "q_flip": flip, "logit_scale": (abs(soft_cap) if soft_cap else size) * unit,
            "cap_scale": size / abs(soft_cap) if soft_cap else 0.0}


def two_strides(t: torch.Tensor | None) -> tuple[int, int]:
    """Strides (request or page, head) of a float32 tensor seen as 2-D: a missing dimension, or one of size 1, has 0."""
    if t is None:
        return (0, 0)
    sizes, strides = (1,) * (2 - t.dim()) + tuple(t.shape), (0,) * (2 - t.dim()) + t.stride()
    first, second = (stride if size > 1 else 0 for size, stride in zip(sizes, strides))
    return (first, second)


def address(t: torch.Tensor | None) -> int:
    """Where a tensor is, 0 for none."""
    return 0 if t is None else t.data_ptr()
