"""Dense and ragged attention, and the merging of partial results."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernelgen.errors import ShapeError
from kernelgen.reference.attend import Rules, attend, make_rules
from kernelgen.reference.checks import (
    as_boundaries,
    as_lengths,
    check_attention_dtypes,
    check_compute_dtype,
    check_rank,
    check_same_device,
    check_shape,
    to_compute,
)
from kernelgen.reference.masks import BlockMaskLike, VariantLike, Window, block_mask_dense, dense_mask, ragged_masks
from kernelgen.reference.quant import Scale, head_scale

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def check_heads(q_heads: int, kv_heads: int, q_dim: int, k_dim: int) -> None:
    """Raise ShapeError unless the query heads divide into groups and q and k share their head dimension."""
    if kv_heads == 0 or q_heads % kv_heads:
        raise ShapeError(f"got Hq = {q_heads} and Hkv = {kv_heads}, expected Hq to be a multiple of Hkv")
    if q_dim != k_dim:
        raise ShapeError(f"got head dimension {q_dim} of q and {k_dim} of k, expected equal ones")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, window: Window | None = None,
              scale: float | None = None, soft_cap: float | None = None, alibi_slopes: torch.Tensor | None = None,
              sinks: torch.Tensor | None = None, mask: torch.Tensor | None = None,
              block_mask: BlockMaskLike | None = None, variant: VariantLike | None = None,
              kv_lens: torch.Tensor | Sequence[int] | None = None, q_scale: Scale | None = None,
              k_scale: Scale | None = None, v_scale: Scale | None = None, return_lse: bool = False,
              compute_dtype: torch.dtype = torch.float64, p_dtype: torch.dtype | None = None) -> Result:
    """softmax(mask(bias(cap(scale * q k^T)))) v for a dense batch.

    Shapes: ``q (B, Sq, Hq, D)``, ``k (B, Sk, Hkv, D)``, ``v (B, Sk, Hkv, Dv)`` to ``out (B, Sq, Hq, Dv)`` and, with
    ``return_lse``, the natural-log ``lse (B, Hq, Sq)``, both in ``compute_dtype``.

    causal, window   positions are aligned at the bottom right; see :mod:`kernelgen.reference.masks`
    scale            default ``D ** -0.5``; soft_cap: ``s = cap * tanh(s / cap)``, None or 0 for none
    alibi_slopes     (Hq) or (B, Hq) float32, subtracts ``slope * |j - position(i)|``
    sinks            (Hq) float32, one more logit in the denominator (and so in the LSE), without a value
    mask             bool, broadcastable to (B, Hq, Sq, Sk), True = may attend; combined with every other mask by "and"
    block_mask       :class:`~kernelgen.reference.masks.BlockMask`
    variant          :class:`~kernelgen.reference.masks.Variant`; its score comes after ALiBi
    kv_lens          (B) keys in use of each request; the rest is never read and positions count from this length
    *_scale          fp8 scales: scalar, (H) or (B, H) float32, H the tensor's own heads
    p_dtype          rounds the softmax weights before the second product, for plain evaluations

    A row that may attend to nothing gives 0 and -inf (with a sink: 0 and the sink), also where the query is NaN. A NaN
    or inf of k or v reaches exactly the rows that may attend to it. A logit of exactly -inf has weight 0 but is no
    mask: 0 times an infinite value is NaN as IEEE has it. Gradients flow through every differentiable input; where
    only some rows may attend to a NaN key, the gradient of the other rows' q is NaN too.

    Raises ShapeError, DtypeError, DeviceError or SettingsError for bad input.
    """
    check_rank("q", q, (4,), "(B, Sq, Hq, D)")
    check_rank("k", k, (4,), "(B, Sk, Hkv, D)")
    check_same_device(q=q, k=k, v=v, mask=mask, alibi_slopes=alibi_slopes, sinks=sinks)
    check_attention_dtypes(q, k, v)
    batch, q_len, num_heads, head_dim = q.shape
    kv_size, num_kv_heads = k.shape[1:3]
    check_heads(num_heads, num_kv_heads, head_dim, k.shape[3])
    check_shape("k", k, (batch, kv_size, num_kv_heads, head_dim), "(B, Sk, Hkv, D)")
    check_shape("v", v, (batch, kv_size, num_kv_heads, v.shape[-1]), "(B, Sk, Hkv, Dv)")
    rules = make_rules(batch=batch, num_heads=num_heads, head_dim=head_dim, causal=causal, window=window, scale=scale,
                       soft_cap=soft_cap, alibi_slopes=alibi_slopes, sinks=sinks, variant=variant,
                       compute_dtype=compute_dtype, p_dtype=p_dtype)
    masks = [] if mask is None else [dense_mask(mask, (batch, num_heads, q_len, kv_size))]
    if block_mask is not None:
        masks.append(block_mask_dense(block_mask, batch, num_heads, q_len, kv_size))
    lengths = [kv_size] * batch if kv_lens is None else as_lengths("kv_lens", kv_lens, batch, [kv_size] * batch)
    out, lse = attend(
        scaled(q, "q_scale", q_scale, compute_dtype),
        scaled(k, "k_scale", k_scale, compute_dtype),
        scaled(v, "v_scale", v_scale, compute_dtype),
        rules,
        kv_lens=torch.tensor(lengths, dtype=torch.int64, device=q.device),
        batch_ids=torch.arange(batch, device=q.device),
        masks=masks,
    )
    return (out, lse) if return_lse else out


def scaled(x: torch.Tensor, name: str, scale: Scale | None, compute_dtype: torch.dtype) -> torch.Tensor:
    """``x (B, S, H, D)`` in the compute dtype, times its scale."""
    value = to_compute(x, compute_dtype)
    if scale is None:
        return value
    return value * head_scale(name, scale, x.shape[0], x.shape[2], x.device, compute_dtype)


def attention_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | Sequence[int],
                     cu_seqlens_k: torch.Tensor | Sequence[int], *, max_seqlen_q: int | None = None,
                     max_seqlen_k: int | None = None, causal: bool = False, window: Window | None = None,
                     scale: float | None = None, soft_cap: float | None = None,
                     alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
                     mask: torch.Tensor | None = None, block_mask: BlockMaskLike | None = None,
                     variant: VariantLike | None = None, kv_lens: torch.Tensor | Sequence[int] | None = None,
                     q_scale: Scale | None = None, k_scale: Scale | None = None, v_scale: Scale | None = None,
                     return_lse: bool = False, compute_dtype: torch.dtype = torch.float64,
                     p_dtype: torch.dtype | None = None) -> Result:
    """Attention over requests packed along one token axis.

    Shapes: ``q (Tq, Hq, D)``, ``k (Tk, Hkv, D)``, ``v (Tk, Hkv, Dv)``, ``cu_seqlens_* (B + 1)`` cumulative lengths, to
    ``out (Tq, Hq, Dv)`` and ``lse (Tq, Hq)``. ``mask``: flat bool of sum(Sq_b * Sk_b), or the same bits packed little
    endian in one uint8 stream; Sk_b is the length in use. ``kv_lens (B)``: only that prefix of request b's keys is in
    use. ``max_seqlen_*`` are hints of the public call and change nothing. A block mask counts rows and keys within
    each request. Rows past the last request are NaN in the result: the contract leaves them unwritten. Everything
    else as in :func:`attention`.
    """
    check_rank("q", q, (3,), "(Tq, Hq, D)")
    check_rank("k", k, (3,), "(Tk, Hkv, D)")
    check_same_device(q=q, k=k, v=v, mask=mask, alibi_slopes=alibi_slopes, sinks=sinks)
    check_attention_dtypes(q, k, v)
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    check_heads(num_heads, num_kv_heads, q.shape[2], k.shape[2])
    check_shape("v", v, (k.shape[0], num_kv_heads, v.shape[-1]), "(Tk, Hkv, Dv)")
    starts_q = as_boundaries("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    starts_k = as_boundaries("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    batch = len(starts_q) - 1
    if len(starts_k) - 1 != batch:
        raise ShapeError(f"got {batch} requests in cu_seqlens_q and {len(starts_k) - 1} in cu_seqlens_k, expected one "
                         "number")
    capacities = [b - a for a, b in zip(starts_k, starts_k[1:])]
    lengths = capacities if kv_lens is None else as_lengths("kv_lens", kv_lens, batch, capacities)
    rules = make_rules(batch=batch, num_heads=num_heads, head_dim=q.shape[2], causal=causal, window=window,
                       scale=scale, soft_cap=soft_cap, alibi_slopes=alibi_slopes, sinks=sinks, variant=variant,
                       compute_dtype=compute_dtype, p_dtype=p_dtype)
    sides = []
    for name, x, given in (("k_scale", k, k_scale), ("v_scale", v, v_scale)):
        factor = None if given is None else head_scale(name, given, batch, num_kv_heads, q.device, compute_dtype)
        rows = [to_compute(x[a : a + n], compute_dtype) for a, n in zip(starts_k, lengths)]
        sides.append([r if factor is None else r * _of_request(factor, b)[0] for b, r in enumerate(rows)])
    return attend_requests(to_compute(q, compute_dtype), starts_q, list(zip(*sides)), rules, mask=mask,
                           block_mask=block_mask, q_scale=q_scale, head_dim_v=v.shape[2], return_lse=return_lse)


def _of_request(x: torch.Tensor, b: int) -> torch.Tensor:
    """Request b of a tensor whose first dimension is B or 1, as a batch of one."""
    return x[b : b + 1] if x.shape[0] > 1 else x


def attend_requests(q: torch.Tensor, starts_q: list[int], keys: Sequence[tuple[torch.Tensor, torch.Tensor]],
                    rules: Rules, *, mask: torch.Tensor | None, block_mask: BlockMaskLike | None = None,
                    q_scale: Scale | None, head_dim_v: int, return_lse: bool) -> Result:
    """Ragged queries ``(Tq, Hq, D)`` against one ``(k (Sk, Hkv, D), v (Sk, Hkv, Dv))`` per request, all converted."""
    q_lens = [b - a for a, b in zip(starts_q, starts_q[1:])]
    masks = None if mask is None else ragged_masks(mask, q_lens, [k.shape[0] for k, _ in keys])
    batch, num_heads, dtype = len(q_lens), q.shape[1], rules.compute_dtype
    factor = None if q_scale is None else head_scale("q_scale", q_scale, batch, num_heads, q.device, dtype)
    outs, lses = [], []
    for b, (k, v) in enumerate(keys):
        rows = q[starts_q[b] : starts_q[b + 1]][None]
        given = [] if masks is None else [masks[b][None, None]]
        if block_mask is not None:
            given.append(_of_request(block_mask_dense(block_mask, batch, num_heads, q_lens[b], k.shape[0]), b))
        out, lse = attend(rows if factor is None else rows * _of_request(factor, b), k[None], v[None], rules,
                          kv_lens=torch.tensor([k.shape[0]], device=q.device),
                          batch_ids=torch.tensor([b], device=q.device), masks=given)
        outs.append(out[0])
        lses.append(lse[0].t())
    # Rows past the last request stay unwritten by contract; NaN makes a comparison that includes them fail.
    rest = q.shape[0] - starts_q[-1]
    outs.append(torch.full((rest, num_heads, head_dim_v), float("nan"), dtype=dtype, device=q.device))
    lses.append(torch.full((rest, num_heads), float("nan"), dtype=dtype, device=q.device))
    return (torch.cat(outs), torch.cat(lses)) if return_lse else torch.cat(outs)


def merge_states(outs: torch.Tensor, lses: torch.Tensor, *,
                 compute_dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine partial attention results over disjoint sets of keys.

    ``outs (n, T, H, D)`` any float dtype, ``lses (n, T, H)`` natural log, to ``out (T, H, D)`` and ``lse (T, H)``:
    ``lse = log(sum(exp(lse_i)))``, ``out = sum(exp(lse_i - lse) * out_i)``. A side of LSE -inf adds nothing whatever
    its out holds; all sides -inf (or n = 0) give 0 and -inf; one of +inf (of a sink of +inf) is the result. One non-empty
    side comes back exactly. Sinks must be in one of the sides only. Raises ShapeError.
    """
    check_compute_dtype(compute_dtype)
    check_rank("outs", outs, (4,), "(n, T, H, D)")
    check_shape("lses", lses, outs.shape[:3], "(n, T, H)")
    check_same_device(outs=outs, lses=lses)
    values, logs = to_compute(outs, compute_dtype), to_compute(lses, compute_dtype)
    # One empty side in front makes the maximum of no sides at all defined.
    peak = torch.cat([logs.new_full((1, *logs.shape[1:]), float("-inf")), logs]).amax(0)
    weights = torch.exp(torch.where(logs == float("inf"), 0.0, logs - torch.where(peak == float("-inf"), 0.0, peak)))
    total = weights.sum(0)
    empty = total == 0
    safe_total = torch.where(empty, 1.0, total)
    live = (logs != float("-inf")).unsqueeze(-1)
    out = torch.where(live, weights.unsqueeze(-1) * values, 0.0).sum(0) / safe_total.unsqueeze(-1)
    return out, torch.where(empty, float("-inf"), peak + torch.log(safe_total))
