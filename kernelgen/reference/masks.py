"""Who may attend to whom: positions, causal and windowed masks, given masks, block masks, ALiBi and variants.

Positions are aligned at the bottom right: of ``Sq`` queries and ``Sk`` keys in use, query i stands at position
``i + Sk - Sq`` and key j at position j. Every function here works on index tensors that broadcast to
``(B, Hq, Sq, Sk)``, so that dense, ragged and paged attention share one definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kernelgen.errors import DtypeError, SettingsError, ShapeError, VariantError
from kernelgen.library.forms import variants
from kernelgen.reference.checks import to_compute

Window = tuple[int | None, int | None]
NORMALIZATIONS = ("softmax", "none")


@dataclass(frozen=True)
class Grid:
    """Index tensors of one block of logits, each broadcastable to ``(B, Hq, Sq, Sk)``.

    ``q_index`` counts a request's query rows from 0; ``q_pos`` is the same row aligned at the bottom right.
    ``q_len`` and ``kv_len`` are the request's lengths in use.
    """

    batch: torch.Tensor
    head: torch.Tensor
    kv_head: torch.Tensor
    q_index: torch.Tensor
    q_pos: torch.Tensor
    k_pos: torch.Tensor
    q_len: torch.Tensor
    kv_len: torch.Tensor


class VariantContext:
    """What a variant's functions see: the fields of :class:`Grid`, and every extra tensor and scalar by its name."""

    def __init__(self, grid: Grid, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> None:
        self.batch, self.head, self.kv_head = grid.batch, grid.head, grid.kv_head
        self.q_index, self.q_pos, self.k_pos = grid.q_index, grid.q_pos, grid.k_pos
        self.q_len, self.kv_len = grid.q_len, grid.kv_len
        taken = set(vars(self))
        for name, value in {**tensors, **scalars}.items():
            if name in taken:
                raise SettingsError(f"variant: the extra value {name!r} hides a field of the context; rename it")
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the variant's context has no {name!r}; it has {', '.join(sorted(vars(self)))}")


@dataclass(frozen=True)
class Variant:
    """``score(score, ctx) -> score`` and ``mask(ctx) -> bool`` as plain Python over broadcasting tensors.

    ``score`` sees the logit after scale, soft-cap and ALiBi and before any mask. ``mask`` says True = may attend and
    is combined with every other mask by "and". ``normalization`` "none": the score is the weight itself,
    ``out = sum score * v`` over the keys that are left, and there is no LSE. ``name`` is for people.
    """

    score: Callable[[torch.Tensor, Any], torch.Tensor] | None = None
    mask: Callable[[Any], torch.Tensor] | None = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)
    normalization: str = "softmax"
    name: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", variants.add(self))  # what graphs know it by


class VariantLike(Protocol):
    """Anything with the first four fields of :class:`Variant`."""

    score: Any
    mask: Any
    tensors: Any
    scalars: Any


def variant_context(variant: VariantLike, grid: Grid, compute_dtype: torch.dtype) -> VariantContext:
    """Context for one block; floating extra tensors are converted to the compute dtype, integers to int64."""
    tensors = {}
    for name, t in dict(variant.tensors).items():
        if t.is_floating_point():
            tensors[name] = to_compute(t, compute_dtype)
        else:
            tensors[name] = t if t.dtype == torch.bool else t.to(torch.int64)
    return VariantContext(grid, tensors, dict(variant.scalars))


def variant_score(variant: VariantLike, scores: torch.Tensor, context: VariantContext) -> torch.Tensor:
    """The scores that a variant makes of ``scores``, in their type. Raises VariantError for a function without result."""
    if variant.score is None:
        return scores
    made = variant.score(scores, context)
    if not isinstance(made, (torch.Tensor, float)):
        raise VariantError(f"variant: the score function returned {type(made).__name__}, expected a floating-point tensor")
    return torch.as_tensor(made, device=scores.device).to(scores.dtype).expand(scores.shape)


def variant_mask(variant: VariantLike, context: VariantContext) -> torch.Tensor | bool:
    """Keys that a variant leaves. Raises VariantError unless they are bool."""
    allowed = True if variant.mask is None else variant.mask(context)
    if not (isinstance(allowed, bool) or (isinstance(allowed, torch.Tensor) and allowed.dtype == torch.bool)):
        raise VariantError(f"variant: the mask function returned {getattr(allowed, 'dtype', type(allowed).__name__)}, expected bool")
    return allowed


def check_window(window: Window | None) -> Window:
    """(left, right) with None for an unbounded side. Raises SettingsError for anything else."""
    if window is None:
        return (None, None)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise SettingsError(f"window: got {window!r}, expected (left, right), None = unbounded")
    for side, keys in zip(("left", "right"), window):
        if keys is not None and keys < 0:
            raise SettingsError(f"window: got {side} = {keys}, expected None or a count >= 0")
    return (window[0], window[1])


def position_mask(grid: Grid, causal: bool, window: Window) -> torch.Tensor:
    """Keys in use that causality and the window leave: bool, broadcastable to ``(B, Hq, Sq, Sk)``.

    The window counts keys inclusively: (left, right) sees positions p - left .. p + right, so (0, 0) is the own key.
    """
    left, right = window
    allowed = grid.k_pos < grid.kv_len
    if causal:
        allowed = allowed & (grid.k_pos <= grid.q_pos)
    if left is not None:
        allowed = allowed & (grid.k_pos >= grid.q_pos - left)
    if right is not None:
        allowed = allowed & (grid.k_pos <= grid.q_pos + right)
    return allowed


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Slopes (num_heads) float32 of ALiBi (Press et al. 2021, section 3 and its code for other head counts).

    For a power of two n: 2^(-8/n), 2^(-16/n), ... Otherwise those of the next lower power of two, followed by every
    second slope of the next higher one.
    """
    if num_heads < 1:
        raise ShapeError(f"num_heads: got {num_heads}, expected at least 1")
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / lower) for i in range(lower)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / lower) for i in range(num_heads - lower)]
    return torch.tensor(slopes, dtype=torch.float32)


def alibi_bias(grid: Grid, slopes: torch.Tensor, compute_dtype: torch.dtype) -> torch.Tensor:
    """``-slope * |j - position(i)|``; slopes ``(Hq)`` or ``(B, Hq)``, B indexed by ``grid.batch``."""
    slopes = to_compute(slopes, compute_dtype)
    per_head = slopes[grid.head] if slopes.dim() == 1 else slopes[grid.batch, grid.head]
    return -per_head * (grid.k_pos - grid.q_pos).abs().to(compute_dtype)


def check_alibi(slopes: torch.Tensor, batch: int, num_heads: int) -> None:
    if slopes.dtype != torch.float32:
        raise DtypeError(f"alibi_slopes: got {slopes.dtype}, expected float32")
    if tuple(slopes.shape) not in ((num_heads,), (batch, num_heads)):
        raise ShapeError(f"alibi_slopes: got shape {tuple(slopes.shape)}, expected (Hq) = ({num_heads},) or "
                         f"(B, Hq) = ({batch}, {num_heads})")


def dense_mask(mask: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """A given bool mask as a 4-D tensor that broadcasts to ``(B, Hq, Sq, Sk)``; Sk is the key tensor's length."""
    if mask.dtype != torch.bool:
        raise DtypeError(f"mask: got {mask.dtype}, expected bool, True = may attend")
    fits = mask.dim() <= 4 and all(m in (1, s) for m, s in zip(reversed(mask.shape), reversed(shape)))
    if not fits:
        raise ShapeError(f"mask: got shape {tuple(mask.shape)}, expected one that broadcasts to "
                         f"(B, Hq, Sq, Sk) = {shape}")
    return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """A bool mask, flattened, as uint8: bit i of the stream is bit ``i % 8`` (from the lowest) of byte ``i // 8``."""
    flat = mask.reshape(-1)
    padded = torch.zeros(-(-flat.numel() // 8) * 8, dtype=torch.int32, device=mask.device)
    padded[: flat.numel()] = flat.to(torch.int32)
    weights = 1 << torch.arange(8, dtype=torch.int32, device=mask.device)
    return (padded.reshape(-1, 8) * weights).sum(1).to(torch.uint8)


def unpack_mask(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` bits of little-endian packed bytes as a flat bool tensor."""
    shifts = torch.arange(8, dtype=torch.int32, device=packed.device)
    bits = (packed.to(torch.int32)[:, None] >> shifts) & 1
    return bits.reshape(-1)[:count].bool()


def ragged_masks(mask: torch.Tensor, q_lens: list[int], kv_lens: list[int]) -> list[torch.Tensor]:
    """One bool ``(Sq_b, Sk_b)`` per request from a flat bool mask or from one packed stream of the same bits.

    The stream is continuous: requests follow each other without padding, and only the last byte may hold spare bits.
    """
    sizes = [sq * sk for sq, sk in zip(q_lens, kv_lens)]
    total = sum(sizes)
    if mask.dtype == torch.bool:
        expected, layout = total, "sum(Sq_b * Sk_b)"
    elif mask.dtype == torch.uint8:
        expected, layout = math.ceil(total / 8), "ceil(sum(Sq_b * Sk_b) / 8) bytes"
    else:
        raise DtypeError(f"mask: got {mask.dtype}, expected a flat bool mask or uint8 packed bits")
    if tuple(mask.shape) != (expected,):
        raise ShapeError(f"mask: got shape {tuple(mask.shape)}, expected {layout} = ({expected},)")
    flat = mask if mask.dtype == torch.bool else unpack_mask(mask, total)
    return [part.reshape(sq, sk) for part, sq, sk in zip(flat.split(sizes), q_lens, kv_lens)]


class BlockMaskLike(Protocol):
    """``kv_counts (.., nQ)``, ``kv_indices (.., nQ, n)`` and ``block_size``, one int or (query rows, keys)."""

    kv_counts: torch.Tensor
    kv_indices: torch.Tensor
    block_size: Any


@dataclass(frozen=True)
class BlockMask:
    """Key blocks that each block of query rows may attend to.

    ``kv_counts (.., nQ)`` int and ``kv_indices (.., nQ, n)`` int; the leading dimensions are none (shared) or
    ``(B | 1, Hq | 1)``. Entries past a row's count are never read; a used entry past the last key block is ignored.
    Query blocks are cut by row number within the request, key blocks by key number.
    """

    kv_counts: torch.Tensor
    kv_indices: torch.Tensor
    block_size: int | tuple[int, int]


def block_mask_dense(block_mask: BlockMaskLike, batch: int, num_heads: int, q_len: int, kv_len: int) -> torch.Tensor:
    """A block mask as bool ``(B | 1, Hq | 1, Sq, Sk)``. Raises ShapeError if it does not cover the queries."""
    size = block_mask.block_size
    rows, keys = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    blocks_q, blocks_k = math.ceil(q_len / rows), math.ceil(kv_len / keys)
    counts, indices = block_mask.kv_counts, block_mask.kv_indices
    if counts.dim() == 1:
        counts, indices = counts[None, None], indices[None, None]
    lead_ok = counts.dim() == 3 and counts.shape[0] in (1, batch) and counts.shape[1] in (1, num_heads)
    if not lead_ok or counts.shape[2] < blocks_q or tuple(indices.shape[:3]) != tuple(counts.shape):
        raise ShapeError(f"block_mask: got kv_counts {tuple(block_mask.kv_counts.shape)} and kv_indices "
                         f"{tuple(block_mask.kv_indices.shape)}, expected ([B, Hq,] nQ[, n]) with nQ >= {blocks_q} for "
                         f"{q_len} query rows in blocks of {rows}, B = {batch}, Hq = {num_heads}")
    counts, indices = counts[:, :, :blocks_q], indices[:, :, :blocks_q]
    used = torch.arange(indices.shape[3], device=indices.device) < counts[..., None]
    if bool((used & (indices < 0)).any()):
        raise ShapeError("block_mask: a used entry of kv_indices is negative")
    # Unused entries may hold anything, and a shared mask may name blocks past a short request's end: both go to a
    # spare column that is cut off again.
    target = torch.where(used & (indices < blocks_k), indices.long(), blocks_k)
    blocks = torch.zeros(*counts.shape, blocks_k + 1, dtype=torch.bool, device=counts.device)
    blocks.scatter_(3, target, True)
    full = blocks[..., :blocks_k].repeat_interleave(rows, 2).repeat_interleave(keys, 3)
    return full[:, :, :q_len, :kv_len]
