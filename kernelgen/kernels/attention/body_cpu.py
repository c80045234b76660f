"""What the CPU attention families share: parameters, tile sizes, and the part of a spec that describes the features.

The kernels are described in templates/include/kernelgen/attention/body_cpu.h; the choices made here, with their
measurements, in docs/design/cpu_attention.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kernelgen.dtypes import DTYPES
from kernelgen.params import ParamStruct
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

PARAMS_TYPE = "kernelgen::AttentionCpuParams"
PARAMS = ParamStruct((
    ("q", "ptr"), ("k", "ptr"), ("v", "ptr"), ("out", "ptr"), ("lse", "ptr"),
    ("q_indptr", "ptr"), ("k_indptr", "ptr"), ("kv_lens", "ptr"), ("alibi_slopes", "ptr"), ("sinks", "ptr"),
    ("mask", "ptr"), ("mask_indptr", "ptr"), ("q_scale", "ptr"), ("k_scale", "ptr"), ("v_scale", "ptr"), ("variant_words", "ptr"),
    ("q_rope", "ptr"), ("k_rope", "ptr"), ("page_begin", "ptr"), ("page_indices", "ptr"), ("item_indptr", "ptr"), ("chunk", "ptr"),
    ("partial_out", "ptr"), ("partial_lse", "ptr"),
    ("q_batch", "i64"), ("q_row", "i64"), ("q_head", "i64"),
    ("k_batch", "i64"), ("k_row", "i64"), ("k_head", "i64"),
    ("v_batch", "i64"), ("v_row", "i64"), ("v_head", "i64"),
    ("out_batch", "i64"), ("out_row", "i64"), ("out_head", "i64"),
    ("lse_batch", "i64"), ("lse_row", "i64"), ("lse_head", "i64"),
    ("mask_batch", "i64"), ("mask_head", "i64"), ("mask_row", "i64"), ("mask_key", "i64"),
    ("alibi_batch", "i64"), ("alibi_head", "i64"), ("sink_head", "i64"),
    ("q_scale_batch", "i64"), ("q_scale_head", "i64"), ("k_scale_batch", "i64"), ("k_scale_head", "i64"),
    ("v_scale_batch", "i64"), ("v_scale_head", "i64"),
    ("q_rope_row", "i64"), ("q_rope_head", "i64"), ("k_rope_page", "i64"), ("k_rope_row", "i64"),
    ("batch", "i64"), ("seq_q", "i64"), ("seq_k", "i64"), ("num_kv_heads", "i64"), ("group_size", "i64"),
    ("task_rows", "i64"), ("page_size", "i64"), ("page_shift", "i64"),
    ("split_chunk", "i64"), ("splits", "i64"), ("slots", "i64"), ("min_chunk", "i64"), ("window_left", "i64"), ("window_right", "i64"),
    ("scale", "f64"), ("soft_cap", "f64"), ("v_factor", "f64"), ("k_factor", "f64"),
))
NO_SCALARS: dict[str, int | float] = dict.fromkeys(PARAMS.scalars, 0)

WIDE_DTYPES = ("fp64", "fp32", "bf16", "fp16")
FP8_DTYPES = ("e4m3", "e5m2")
# Problem mask -> enum class Mask of the headers.
DENSE_MASKS: dict[str | None, str] = {None: "kNone", "dense": "kStrided", "flat": "kFlat", "packed": "kPacked"}
PAGED_MASKS: dict[str | None, str] = {None: "kNone", "dense": "kFlat", "packed": "kPacked"}


# Keys of a tile. 64 costs 1 - 3 %, 256 gains nothing and needs twice the scratch (Zen 4, fp32 and bf16, D 128, 512 and
# 2048 tokens; docs/design/cpu_attention.md).
BLOCK_K = 128
# Panels of a block of rows, best first where there are rows enough. More rows share a packed tile: 2 panels cost 4 - 10 %
# against 8, 16 and 32 gain up to 3 % on long full attention, and need 1 MB of L2 beside the tile.
PANELS = (8, 4, 2, 1)
# Scratch of a thread: must stay well inside its share of the L2 and L3 caches to be of any use.
_SCRATCH_LIMIT = 64 << 20


@dataclass(frozen=True)
class Config:
    """block_rows: query rows of a task or item, each head of a group counting as one; block_k: keys of a tile.

    Only block_k is compiled in. It fixes the order of summation, so it never depends on batch or lengths.
    """

    block_rows: int
    block_k: int

    def __str__(self) -> str:
        return f"{self.block_rows}x{self.block_k}"


@dataclass(frozen=True)
class Features:
    """What the shared body compiles in. ``mask`` and ``scales`` name values of the headers' enums."""

    q_dtype: str
    kv_dtype: str
    out_dtype: str
    head_dim: int
    head_dim_v: int
    rope_dim: int
    left: bool
    right: bool
    soft_cap: bool
    alibi: bool
    sinks: bool
    mask: str
    variant: Any
    scales: str
    lse: bool
    rope_dtype: str = ""  # of the rope part of the keys, "" for the same

    @property
    def words(self) -> list[str]:
        """The features in use, for the name of a spec."""
        dtypes = [self.q_dtype]
        if self.kv_dtype != self.q_dtype:
            dtypes.append(self.kv_dtype)
        if self.out_dtype != ("bf16" if self.q_dtype in FP8_DTYPES else self.q_dtype):
            dtypes.append(f"to_{self.out_dtype}")
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}_{self.head_dim_v}"
        rope = f"rope_{self.rope_dtype}" if self.rope_dtype else "rope"
        flags = ((rope, self.rope_dim), ("left", self.left), ("right", self.right), ("cap", self.soft_cap), ("alibi", self.alibi),
                 ("sinks", self.sinks), (f"mask_{self.mask[1:].lower()}", self.mask != "kNone"),
                 (str(self.variant), self.variant is not None), (f"scales_{self.scales[1:].lower()}", self.scales != "kNone"),
                 ("lse", self.lse))
        return [*dtypes, dims, *(word for word, on in flags if on)]

    @property
    def variant_code(self) -> str:
        """C++ text of struct VariantFunctions, in the type of the logits."""
        return "" if self.variant is None else str(self.variant.code("double" if self.q_dtype == "fp64" else "float"))

    def parameters(self, tiling: Tiling, block_k: int) -> dict[str, Any]:
        """The template's parameters of struct CommonOptions and of the scratch assertions."""
        return dict(
            query=DTYPES[self.q_dtype].cpp, key_value=DTYPES[self.kv_dtype].cpp, output=DTYPES[self.out_dtype].cpp,
            rope=DTYPES[self.rope_dtype or self.kv_dtype].cpp,
            head_dim=self.head_dim, head_dim_v=self.head_dim_v, rope_dim=self.rope_dim, bounded_left=self.left,
            bounded_right=self.right, soft_cap=self.soft_cap, alibi=self.alibi, sinks=self.sinks, lse=self.lse, mask=self.mask,
            scales=self.scales, variant_code=self.variant_code, block_k=block_k,
            tile_bytes=tiling.tile_bytes(self.head_dim, self.head_dim_v, block_k),
            panel_bytes=tiling.panel_bytes(self.head_dim, self.head_dim_v), panel_rows=tiling.panel_rows,
        )


@dataclass(frozen=True)
class Tiling:
    """What the headers derive from dtypes, features and ISA level; the rendered file asserts that both sides agree.

    tile_rows    keys (or value columns) of a register tile
    panel_rows   query rows of a panel: the lanes across a register tile
    operand      bytes of an element as multiplied;  scalar: bytes of an accumulator
    pairs        operands are bf16 pairs
    lane_ids     a panel says which row and head each lane holds
    """

    tile_rows: int
    panel_rows: int
    operand: int
    scalar: int
    pairs: bool
    lane_ids: bool = False

    @staticmethod
    def of(features: Features, target: Target) -> Tiling:
        f = features
        wide = target.isa != "x86-64-v3"
        pairs = target.isa == "x86-64-v4-bf16" and f.q_dtype == f.kv_dtype == "bf16" and f.scales == "kNone"
        scalar = 8 if f.q_dtype == "fp64" else 4
        tile_rows, registers = (8, 2) if wide else (4, 3)
        lanes = (64 if wide else 32) // scalar
        lane_ids = f.alibi or f.mask != "kNone" or f.variant is not None
        return Tiling(tile_rows, registers * lanes, 2 if pairs else scalar, scalar, pairs, lane_ids)

    def tile_bytes(self, head_dim: int, head_dim_v: int, block_k: int) -> int:
        """Scratch for one tile of keys and values and one panel's scores and weights: kTileBytes of the headers."""
        keys = self.operand * block_k * head_dim
        values = (head_dim_v // self.tile_rows) * (self.operand * block_k * self.tile_rows + 64)
        weights = self.operand * block_k * self.panel_rows if self.pairs else 0
        return keys + values + self.scalar * block_k * self.panel_rows + weights

    def panel_bytes(self, head_dim: int, head_dim_v: int) -> int:
        """Scratch of one panel: sizeof(Panel) of the headers."""
        lane = self.operand * head_dim + self.scalar * (head_dim_v + 2) + 16
        ids = self.panel_rows * (self.scalar + 8) if self.lane_ids else 8
        return round_up(self.panel_rows * lane + 40 + ids, 64)


def scratch_bytes(features: Features, target: Target, config: Config) -> int:
    """Memory that each thread needs."""
    tiling, dims = Tiling.of(features, target), (features.head_dim, features.head_dim_v)
    panels = -(-config.block_rows // tiling.panel_rows)
    return tiling.tile_bytes(*dims, config.block_k) + panels * tiling.panel_bytes(*dims)


def fits(features: Features, target: Target, config: Config) -> Verdict:
    """Does the config fit: whole panels, whole register tiles, scratch?"""
    panel, scratch = Tiling.of(features, target).panel_rows, scratch_bytes(features, target, config)
    return first_no(
        (config.block_rows >= 1 and config.block_rows % panel == 0,
         f"block_rows {config.block_rows} is not a multiple of a panel's {panel} rows"),
        (config.block_k >= 8 and config.block_k % 8 == 0, f"block_k {config.block_k} is not a multiple of 8"),
        (scratch <= _SCRATCH_LIMIT, f"config {config} needs {scratch} bytes of scratch a thread, at most {_SCRATCH_LIMIT}"),
    )


def common_checks(kernel: str, problem: Any, target: Target, out_dtype: str, masks: Iterable[str | None]) -> list[tuple[bool, str]]:
    """What both kernels ask of dtypes, head dims, heads, masks and variants, for first_no."""
    p, outs = problem, ("bf16", "fp16", "fp32") if problem.q_dtype in FP8_DTYPES else (problem.q_dtype,)
    return [
        (target.kind == "cpu", f"{kernel} needs a CPU, got {target}"),
        (dtypes_fit(p.q_dtype, p.kv_dtype),
         f"q dtype {p.q_dtype} with key/value dtype {p.kv_dtype} is neither one wide type nor fp8 keys and values"),
        (out_dtype in outs, f"out dtype {out_dtype} for q dtype {p.q_dtype}"),
        (head_dims_fit(p.head_dim, p.head_dim_v), f"head dims {p.head_dim}/{p.head_dim_v} are not multiples of 8 up to 576/512"),
        (p.num_kv_heads > 0 and p.num_q_heads % p.num_kv_heads == 0,
         f"{p.num_q_heads} query heads are not a multiple of {p.num_kv_heads} key/value heads"),
        (p.mask in masks, f"mask={p.mask} is not one of {', '.join(map(str, masks))}"),
        (not isinstance(p.variant, str), f"variant {p.variant} cannot be traced"),
        (p.softmax or not p.return_lse, f"variant {p.variant} has no softmax and therefore no LSE"),
        (p.softmax or not p.sinks, f"variant {p.variant} has no softmax that sinks could be a term of"),
    ]


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def head_dims_fit(head_dim: int, head_dim_v: int) -> bool:
    return head_dim % 8 == 0 and head_dim_v % 8 == 0 and 8 <= head_dim <= 576 and 8 <= head_dim_v <= 512


def dtypes_fit(q_dtype: str, kv_dtype: str) -> bool:
    """One type for all, or fp8 keys and values under any query."""
    if kv_dtype in FP8_DTYPES:
        return q_dtype in WIDE_DTYPES + FP8_DTYPES
    return q_dtype == kv_dtype and q_dtype in WIDE_DTYPES


def step(tensor: torch.Tensor, dim: int) -> int:
    """The stride of a dimension, 0 where it broadcasts."""
    return tensor.stride(dim) if tensor.shape[dim] > 1 else 0


def per_head_strides(tensor: torch.Tensor | None, name: str) -> dict[str, int]:
    """``NAME_batch`` and ``NAME_head`` of a (B or 1, H or 1) tensor; a (H) tensor is the same for every request."""
    if tensor is None:
        return {}
    batch = step(tensor, 0) if tensor.dim() == 2 else 0
    return {f"{name}_batch": batch, f"{name}_head": step(tensor, -1)}


def address(get: Callable[[Any], torch.Tensor | None], on: bool) -> Callable[[Any], int]:
    """The address of a tensor of the call, 0 where the kernel does not use it."""
    if not on:
        return _nothing

    def read(tensors: Any) -> int:
        tensor = get(tensors)
        return 0 if tensor is None else tensor.data_ptr()

    return read


def _nothing(tensors: Any) -> int:
    return 0
