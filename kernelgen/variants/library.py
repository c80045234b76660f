"""Ready variants. Sizes that a model fixes are compiled in; what differs from call to call is a tensor or a scalar."""

from __future__ import annotations

import math
from typing import Any

import torch

from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.guard import whole
from kernelgen.reference.masks import Variant
from kernelgen.variants.make import variant


def _check_rank(name: str, x: Any, ranks: tuple[int, ...], layout: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise DtypeError(f"{name}: got a {type(x).__name__}, expected torch.Tensor")
    if x.dim() not in ranks:
        raise ShapeError(f"{name}: got shape {tuple(x.shape)}, expected {layout}")


def _check_integers(name: str, x: torch.Tensor) -> None:
    if x.dtype not in (torch.int32, torch.int64, torch.uint8):
        raise DtypeError(f"{name}: got {x.dtype}, expected int32 or int64")


def _check_positive(name: str, x: Any) -> int:
    value = whole(x)
    if value is None or value < 1:
        raise SettingsError(f"{name}: got {x!r}, expected an integer >= 1")
    return value


def alibi(slopes: torch.Tensor) -> Variant:
    """ALiBi: ``score - slope * |k_pos - q_pos|``, slopes ``(Hq)`` or ``(B, Hq)``, as the argument ``alibi_slopes``."""
    _check_rank("slopes", slopes, (1, 2), "(Hq) or (B, Hq)")
    shared = slopes.dim() == 1

    def score(score: Any, ctx: Any) -> Any:
        slope = ctx.slopes[ctx.head] if shared else ctx.slopes[ctx.batch, ctx.head]
        return score - slope * abs(ctx.k_pos - ctx.q_pos)

    return variant(score, tensors={"slopes": slopes}, name="alibi")


def sigmoid(bias: float = 0.0) -> Variant:
    """Sigmoid attention: weight ``1 / (1 + exp(-(score + bias)))``, nothing normalised; ``bias`` is often ``-log(kv_len)``.

    A softmax does not give this whatever is done to the score, so the variant has ``normalization="none"``: no LSE, no sinks.
    """
    return variant(lambda score, ctx: torch.sigmoid(score + ctx.bias), scalars={"bias": float(bias)}, normalization="none", name="sigmoid")


def document_mask(document_ids: torch.Tensor) -> Variant:
    """Attention within documents: a query sees the keys with its own id. ``document_ids (S)`` or ``(B, S)`` by position.

    Positions past the ids count as the last one, rows before the first key as the first. Composes with ``causal``.
    """
    _check_rank("document_ids", document_ids, (1, 2), "(S) or (B, S)")
    _check_integers("document_ids", document_ids)
    shared = document_ids.dim() == 1

    def mask(ctx: Any) -> Any:
        last = ctx.document_ids.shape[-1] - 1

        def document(position: Any) -> Any:
            position = torch.clamp(position, 0, last)
            return ctx.document_ids[position] if shared else ctx.document_ids[ctx.batch, position]

        return document(ctx.q_pos) == document(ctx.k_pos)

    return variant(mask=mask, tensors={"document_ids": document_ids}, name="document")


def prefix_lm(prefix_lens: torch.Tensor | int) -> Variant:
    """Prefix-LM: the first keys of a request are seen by all its queries, the others causally. ``prefix_lens`` (B) or one int.

    The causality is part of the variant: call with ``causal=False``.
    """
    one = whole(prefix_lens)
    if one is not None:
        return variant(mask=lambda ctx: (ctx.k_pos <= ctx.q_pos) | (ctx.k_pos < ctx.prefix_len), scalars={"prefix_len": one},
                       name="prefix_lm")
    _check_rank("prefix_lens", prefix_lens, (1,), "(B), or an int")
    assert isinstance(prefix_lens, torch.Tensor)
    _check_integers("prefix_lens", prefix_lens)
    return variant(mask=lambda ctx: (ctx.k_pos <= ctx.q_pos) | (ctx.k_pos < ctx.prefix_lens[ctx.batch]),
                   tensors={"prefix_lens": prefix_lens}, name="prefix_lm")


def chunked(chunk_size: int) -> Variant:
    """Chunked attention (Llama 4): query and key in the same chunk of ``chunk_size`` positions. Composes with ``causal``."""
    size = _check_positive("chunk_size", chunk_size)
    return variant(mask=lambda ctx: ctx.q_pos // size == ctx.k_pos // size, name="chunked")


def window(left: int | None = None, right: int | None = None) -> Variant:
    """The argument ``window`` with sizes that are not compiled in: positions ``q_pos - left .. q_pos + right``, None = unbounded."""
    for side, given in (("left", left), ("right", right)):
        if given is not None and ((keys := whole(given)) is None or keys < 0):
            raise SettingsError(f"window: got {side} = {given!r}, expected None or an integer >= 0")
    if left is None and right is None:
        raise SettingsError("window: got (None, None), expected a bound on one side at least")

    def mask(ctx: Any) -> Any:
        sides = []
        if left is not None:
            sides.append(ctx.k_pos >= ctx.q_pos - ctx.left)
        if right is not None:
            sides.append(ctx.k_pos <= ctx.q_pos + ctx.right)
        return sides[0] if len(sides) == 1 else sides[0] & sides[1]

    sizes = {side: int(keys) for side, keys in (("left", left), ("right", right)) if keys is not None}
    return variant(mask=mask, scalars=sizes, name="window")


def no_left_keys() -> Variant:
    """A window on 0 left keys: a query sees its own position and those after it."""
    return variant(mask=lambda ctx: ctx.k_pos >= ctx.q_pos, name="no_left_keys")


def relative_bias(table: torch.Tensor, max_distance: int | None = None) -> Variant:
    """A learned bias by clipped distance: ``score + table[head, clamp(k_pos - q_pos, -m, m) + m]``.

    ``table (Hq, 2 m + 1)`` in any floating type; ``max_distance`` m defaults to what the table holds.
    """
    _check_rank("table", table, (2,), "(Hq, 2 * max_distance + 1)")
    reach = (table.shape[1] - 1) // 2 if max_distance is None else max_distance
    if reach < 0 or table.shape[1] != 2 * reach + 1:
        raise ShapeError(f"table: got shape {tuple(table.shape)}, expected (Hq, 2 * max_distance + 1) = (Hq, {2 * reach + 1})")

    def score(score: Any, ctx: Any) -> Any:
        middle = ctx.table.shape[1] // 2
        return score + ctx.table[ctx.head, torch.clamp(ctx.k_pos - ctx.q_pos, -middle, middle) + middle]

    return variant(score, tensors={"table": table}, name="relative_bias")


def t5_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> torch.Tensor:
    """Bucket of each distance ``k_pos - q_pos`` in ``-max_distance .. max_distance``, int32.

    Half of a side's buckets hold one distance each, the others grow logarithmically up to ``max_distance``; every larger
    distance is in the last one. Bidirectional: keys after the query have the upper half of the buckets, otherwise they
    count as distance 0. The logarithm is float32 as in T5: on the edge of a bucket its rounding decides.
    """
    distance = torch.arange(-max_distance, max_distance + 1, device="cpu")
    side = num_buckets // 2 if bidirectional else num_buckets
    first = torch.where(distance > 0, side, 0) if bidirectional else torch.zeros_like(distance)
    steps = distance.abs() if bidirectional else (-distance).clamp(min=0)
    exact = side // 2
    growth = torch.log(steps.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (side - exact)
    grown = (exact + growth.long()).clamp(max=side - 1)
    return (first + torch.where(steps < exact, steps, grown)).to(torch.int32)


def t5_bias(table: torch.Tensor, max_distance: int = 128, bidirectional: bool = True) -> Variant:
    """The relative bias of T5: ``score + table[bucket(k_pos - q_pos), head]``, table ``(num_buckets, Hq)``.

    T5 does not scale its logits: call with ``scale=1.0``. ``bidirectional``: False for a decoder.
    """
    _check_rank("table", table, (2,), "(num_buckets, Hq)")
    num_buckets = table.shape[0]
    smallest = 4 if bidirectional else 2
    if num_buckets < smallest or _check_positive("max_distance", max_distance) <= num_buckets // smallest:
        raise SettingsError(f"t5_bias: got {num_buckets} buckets and max_distance {max_distance}, expected at least {smallest} buckets and "
                            f"a max_distance above {num_buckets // smallest}")

    def score(score: Any, ctx: Any) -> Any:
        reach = ctx.buckets.shape[0] // 2
        return score + ctx.table[ctx.buckets[torch.clamp(ctx.k_pos - ctx.q_pos, -reach, reach) + reach], ctx.head]

    buckets = t5_buckets(num_buckets, max_distance, bidirectional).to(table.device)
    return variant(score, tensors={"table": table, "buckets": buckets}, name="t5_bias")
