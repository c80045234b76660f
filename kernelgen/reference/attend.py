"""The one softmax behind every attention oracle, on dense blocks of converted inputs.

Everything that distinguishes dense, ragged, paged, latent and cascade attention happens before this file: they hand
over ``q (B, Sq, Hq, D)``, ``k (B, Sk, Hkv, D)`` and ``v (B, Sk, Hkv, Dv)`` in the compute dtype with the number of
keys in use, and get ``out (B, Sq, Hq, Dv)`` and ``lse (B, Hq, Sq)`` back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.reference.checks import FP8_DTYPES, check_compute_dtype, to_compute
from kernelgen.reference.masks import (
    Grid,
    VariantLike,
    Window,
    alibi_bias,
    check_alibi,
    check_window,
    position_mask,
    variant_context,
    variant_mask,
    variant_score,
)

# Logits per block; bounds the memory of one step to about half a gigabyte in float64, temporaries included.
BLOCK_ELEMENTS = 1 << 23
_SUM_BLOCK = 32  # terms of one float64 sum

# Of queries and keys; a test of kernels on tensor cores puts in its place how those add up (kernelgen/testing/gemm.py).
product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul


@dataclass(frozen=True)
class Rules:
    """The features of one call, checked and defaulted; ``p_dtype``: see :func:`round_weights`."""

    causal: bool
    window: Window
    scale: float
    soft_cap: float | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    variant: VariantLike | None
    compute_dtype: torch.dtype
    p_dtype: torch.dtype | None

    @property
    def softmax(self) -> bool:
        """False where a variant's score is the weight itself; there is no LSE then."""
        return getattr(self.variant, "normalization", "softmax") == "softmax"


def make_rules(*, batch: int, num_heads: int, head_dim: int, causal: bool, window: Window | None, scale: float | None,
               soft_cap: float | None, alibi_slopes: torch.Tensor | None, sinks: torch.Tensor | None,
               variant: VariantLike | None, compute_dtype: torch.dtype, p_dtype: torch.dtype | None) -> Rules:
    """Check the features and fill in the default scale. Raises a named ValueError for each illegal one."""
    check_compute_dtype(compute_dtype)
    if soft_cap is not None and not soft_cap >= 0:
        raise SettingsError(f"soft_cap: got {soft_cap}, expected a positive number, or None or 0 for no cap")
    if alibi_slopes is not None:
        check_alibi(alibi_slopes, batch, num_heads)
    if sinks is not None:
        if getattr(variant, "normalization", "softmax") != "softmax":
            raise SettingsError("sinks: got a tensor, expected None: a sink is a term of the softmax, and this variant has none")
        if sinks.dtype not in (torch.float32, compute_dtype):
            raise DtypeError(f"sinks: got {sinks.dtype}, expected float32")
        if tuple(sinks.shape) != (num_heads,):
            raise ShapeError(f"sinks: got shape {tuple(sinks.shape)}, expected (Hq) = ({num_heads},)")
        sinks = to_compute(sinks, compute_dtype)
    return Rules(causal, check_window(window), head_dim**-0.5 if scale is None else float(scale), soft_cap or None,
                 alibi_slopes, sinks, variant, compute_dtype, p_dtype)


def round_weights(p: torch.Tensor, p_dtype: torch.dtype | None) -> torch.Tensor:
    """Softmax weights as a kernel's second matmul sees them: rounded to ``p_dtype``, unchanged for None.

    fp8 weights are rounded at 256 times their value, which is how fp8 kernels use the whole range of the type.
    """
    if p_dtype is None or p_dtype == p.dtype:
        return p
    if p_dtype in FP8_DTYPES:
        return (p * 256).to(p_dtype).to(p.dtype) / 256
    return p.to(p_dtype).to(p.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules, *, kv_lens: torch.Tensor,
           batch_ids: torch.Tensor, masks: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over blocks of batch entries and query rows.

    ``kv_lens (B)`` int64: keys in use; ``batch_ids (B)`` int64: the request numbers that variants and slopes see;
    ``masks``: bool, each 4-D and broadcastable to ``(B, Hq, Sq, Sk)``, combined by "and". The LSE of a variant without
    softmax is NaN.
    """
    batch, q_len, num_heads, _ = q.shape
    if batch == 0 or q_len == 0 or num_heads == 0:
        return q.new_zeros(batch, q_len, num_heads, v.shape[-1]), q.new_zeros(batch, num_heads, q_len)
    if k.shape[1] == 0:
        # One key that no row may attend to keeps a request without keys on the common path.
        k, v = (t.new_zeros(batch, 1, t.shape[2], t.shape[3]) for t in (k, v))
        masks, rules = [], Rules(**{**vars(rules), "variant": None})
    kv_size = k.shape[1]
    rows = max(1, min(q_len, BLOCK_ELEMENTS // (num_heads * kv_size)))
    requests = max(1, BLOCK_ELEMENTS // (num_heads * kv_size * q_len)) if rows == q_len else 1
    outs, lses = [], []
    for b in range(0, batch, requests):
        bs = slice(b, b + requests)
        parts = []
        for r in range(0, q_len, rows):
            rs = slice(r, r + rows)
            grid = make_grid(batch_ids[bs], num_heads, k.shape[2], r, min(r + rows, q_len), q_len, kv_lens[bs], kv_size)
            given = [_block_of(m, bs, rs) for m in masks]
            parts.append(_attend_block(q[bs, rs], k[bs], v[bs], rules, grid, given))
        outs.append(torch.cat([p[0] for p in parts], 1))
        lses.append(torch.cat([p[1] for p in parts], 2))
    return torch.cat(outs), torch.cat(lses)


def make_grid(batch_ids: torch.Tensor, num_heads: int, num_kv_heads: int, first: int, last: int, q_len: int,
              kv_lens: torch.Tensor, kv_size: int) -> Grid:
    """Index tensors for query rows ``first .. last - 1`` of ``q_len`` and all ``kv_size`` key slots."""
    device = kv_lens.device
    head = torch.arange(num_heads, device=device).view(1, -1, 1, 1)
    q_index = torch.arange(first, last, device=device).view(1, 1, -1, 1)
    kv_len = kv_lens.view(-1, 1, 1, 1)
    return Grid(batch=batch_ids.view(-1, 1, 1, 1), head=head, kv_head=head // (num_heads // num_kv_heads),
                q_index=q_index, q_pos=q_index + kv_len - q_len,
                k_pos=torch.arange(kv_size, device=device).view(1, 1, 1, -1),
                q_len=torch.full_like(kv_len, q_len), kv_len=kv_len)


def _block_of(mask: torch.Tensor, batch: slice, rows: slice) -> torch.Tensor:
    mask = mask[batch] if mask.shape[0] > 1 else mask
    return mask[:, :, rows] if mask.shape[2] > 1 else mask


def _attend_block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules, grid: Grid,
                  masks: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    batch, rows, num_heads, head_dim = q.shape
    kv_size, num_kv_heads = k.shape[1:3]
    folded = (batch, num_kv_heads, num_heads // num_kv_heads * rows)
    allowed = position_mask(grid, rules.causal, rules.window)
    for mask in masks:
        allowed = allowed & mask
    context = None
    if rules.variant is not None:
        context = variant_context(rules.variant, grid, rules.compute_dtype)
        allowed = allowed & variant_mask(rules.variant, context)
    # Contiguous, so that the strides of a given mask do not change the order of the sums below.
    allowed = allowed.expand(batch, num_heads, rows, kv_size).contiguous()

    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if not bool(torch.isfinite(k).all() & torch.isfinite(v).all()):
        usable = allowed.reshape(*folded, kv_size).any(2).unsqueeze(-1)
        k, v = torch.where(usable, k, 0.0), torch.where(usable, v, 0.0)

    # Query heads that share a key head are rows of one product: head h belongs to key head h // group.
    q = q.transpose(1, 2).reshape(*folded, head_dim)
    scores = _matmul(q, k.transpose(2, 3), product).view(batch, num_heads, rows, kv_size) * rules.scale
    if rules.soft_cap is not None:
        scores = rules.soft_cap * torch.tanh(scores / rules.soft_cap)
    if rules.alibi_slopes is not None:
        scores = scores + alibi_bias(grid, rules.alibi_slopes, rules.compute_dtype)
    if context is not None and rules.variant is not None:
        scores = variant_score(rules.variant, scores, context)
    if not rules.softmax:
        p = torch.where(allowed, scores, 0.0)
        out = _weighted_sum(round_weights(p, rules.p_dtype), v, allowed)
        return out.transpose(1, 2), torch.full_like(out[..., 0], float("nan"))
    scores = torch.where(allowed, scores, float("-inf"))

    # The maximum only guards exp against overflow, so it is a constant for gradients.
    peak = scores.detach().amax(-1, keepdim=True)
    p = torch.where(allowed, torch.exp(scores - _finite(peak)), 0.0)
    total = p.sum(-1, keepdim=True)
    weighted = _weighted_sum(round_weights(p, rules.p_dtype), v, allowed)
    if rules.sinks is not None:
        sink = rules.sinks.view(1, -1, 1, 1)
        top = torch.maximum(peak, sink.detach())
        shrink = torch.exp(peak - _finite(top))
        # A sink of +inf takes all of the weight: the difference from itself is 0.
        total = total * shrink + torch.exp(torch.where(sink == float("inf"), 0.0, sink - _finite(top)))
        weighted = weighted * shrink
        peak = top
    empty = total == 0
    safe_total = torch.where(empty, 1.0, total)
    out = torch.where(allowed.any(-1, keepdim=True), weighted / safe_total, 0.0)
    lse = torch.where(empty, float("-inf"), peak + torch.log(safe_total))
    return out.transpose(1, 2), lse.squeeze(-1)


def _finite(peak: torch.Tensor) -> torch.Tensor:
    """The row maximum with -inf (nothing to attend to) replaced by 0, so that -inf - peak is -inf and not NaN."""
    return torch.where(peak == float("-inf"), 0.0, peak)


def _weighted_sum(p: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """``p (B, Hq, Sq, Sk) @ v (B, Hkv, Sk, Dv)`` where a NaN or inf of v reaches only rows that may attend to it."""
    batch, num_heads, rows, kv_size = p.shape
    num_kv_heads = v.shape[1]
    finite = torch.isfinite(v)
    clean = torch.where(finite, v, 0.0)
    out = _matmul(p.reshape(batch, num_kv_heads, -1, kv_size), clean, torch.matmul).view(batch, num_heads, rows, v.shape[-1])
    for j in torch.nonzero(~finite.all(-1).all(1).all(0)).flatten().tolist():
        value = torch.where(finite[:, :, j], 0.0, v[:, :, j]).repeat_interleave(num_heads // num_kv_heads, 1)
        reached = allowed[..., j, None] & ~torch.isfinite(value)[:, :, None]
        out = out + torch.where(reached, p[..., j, None] * value[:, :, None], 0.0)
    return out


def _matmul(a: torch.Tensor, b: torch.Tensor, otherwise: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """a @ b. In float64, which nothing wider checks, terms are added up in blocks: a running sum of 1,300 like terms was seen to be
    off by 120 ulps, more than the kernels that it judges. The float32 evaluation stays what plain PyTorch gives."""
    if a.dtype != torch.float64 or a.shape[-1] <= _SUM_BLOCK:
        return otherwise(a, b)
    parts = (x @ y for x, y in zip(a.split(_SUM_BLOCK, -1), b.split(_SUM_BLOCK, -2)))  # one at a time: they may be large
    return sum(parts, next(parts))
