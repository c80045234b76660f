"""cascade_attention: requests that share prefixes, in any number of levels, each level's keys read once per group."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from kernelgen.errors import DtypeError, NoBackendError, SettingsError, ShapeError
from kernelgen.guard import check_flags, operator, record, through_torch
from kernelgen.ops.attention import Window, check_window
from kernelgen.ops.checks import check_output, check_rank
from kernelgen.ops.features import AttentionFeatures, check_features
from kernelgen.ops.joined import Joined, Level, join_levels
from kernelgen.ops.page_table import Lengths, PageTable
from kernelgen.ops.paged import Cache, plan_attention
from kernelgen.ops.scales import Scale
from kernelgen.ops.variants import check_has_lse
from kernelgen.reference.paged import split_cache
from kernelgen.reference.plain import default_out_dtype
from kernelgen.settings import settings

logger = logging.getLogger("kernelgen")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@operator("cascade_attention")
def cascade_attention(
    q: torch.Tensor, kv_cache: Cache, levels: Sequence[Level], *, kv_layout: str = "NHD", causal: bool = True,
    window: Window | None = None, scale: float | None = None, soft_cap: float | None = None, alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, mask: torch.Tensor | None = None, variant: Any = None, q_scale: Scale | None = None,
    k_scale: Scale | None = None, v_scale: Scale | None = None, kv_scales: str | None = None, rotation: int | None = None,
    batch_invariant: bool = False, deterministic: bool = True, return_lse: bool = False, out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, backend: str = "auto", features: AttentionFeatures | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (Tq, Hq, D) over shared prefixes and own keys, all in one cache.

    ``levels``: (page table, cu_seqlens_q) from the outermost prefix to the requests' own keys. Each level's query starts cut
    the same Tq rows, and a request of an inner level lies within one request of every outer level. A row attends to the keys
    of its levels one after another as if they were one cache: positions align at the bottom right of the joined keys, so
    causality hides own keys only, where a request has at least as many as rows (where lengths are on a device, it must). Other
    arguments as in plan_attention and AttentionPlan.run; of ``features``, alibi, sinks and mask say which tensors belong to the call.
    Returns out (Tq, Hq, Dv) and with ``return_lse`` the LSE (Tq, Hq).

    Every level is one planned call, and the results are merged by their LSE (Juravsky et al. 2024, Hydragen): a prefix is read
    once per group. Where positions or indices of the joined keys matter, one planned call over a joined page table runs the
    innermost requests instead, each reading all its keys: with a window, ALiBi, a mask of sum(Sq_b * Sk_b), a variant, scales
    per request ((B, Hq), (B, Hkv)), and with ``batch_invariant``: who shares a prefix is a matter of the rest of the batch, so a
    request gets the bits that a plan over its own pages gives it. Then lengths on a device cost one wait for it. A level that ends
    within a page is joined by smaller pages of the same memory; if pages are no whole number of token strides apart, or not the same
    for keys and values, there are none, and ``backend="auto"`` runs the float64 oracle (with ``batch_invariant``: an error).

    Raises ShapeError, also for lengths that do not cut q; DtypeError, DeviceError, SettingsError; NoBackendError.
    """
    if not levels:
        raise ShapeError("levels: got none, expected at least one (page table, cu_seqlens_q)")
    if through_torch(q):
        return record("cascade_attention", locals())
    check_rank("q", q, 3, "(Tq, Hq, D)")
    if return_lse or lse is not None:
        check_has_lse(variant)
    if out is not None and out.dtype != q.dtype and q.dtype not in _FP8:
        raise DtypeError(f"out: got {out.dtype}, expected {q.dtype}")
    asked = settings().backend if backend == "auto" else backend
    if features is not None:
        causal, window, scale, soft_cap, alibi, sink, kind, variant, kv_scales, rotation, batch_invariant = check_features(features).beside(
            causal=causal, window=window, scale=scale, soft_cap=soft_cap, variant=variant, kv_scales=kv_scales, rotation=rotation,
            batch_invariant=batch_invariant)
        _check_given(alibi_slopes=(alibi, alibi_slopes), sinks=(sink, sinks), mask=(kind, mask))
    check_flags(batch_invariant=batch_invariant, deterministic=deterministic)
    layer: dict[str, Any] = dict(
        kv_layout=kv_layout, causal=causal, window=window, scale=scale, soft_cap=soft_cap, alibi_slopes=alibi_slopes, sinks=sinks,
        mask=mask, variant=variant, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, kv_scales=kv_scales, rotation=rotation)
    promised: dict[str, Any] = dict(batch_invariant=batch_invariant, deterministic=deterministic)
    if asked == "reference":
        return _reference(q, kv_cache, levels, out, lse, return_lse, **layer)
    joined = {"window": check_window(window) != (None, None), "alibi_slopes": alibi_slopes is not None, "mask": mask is not None,
              "variant": variant is not None, "kv_scales='request_head'": kv_scales == "request_head",
              "more causal rows than own keys": causal and len(levels) > 1 and _reaches_prefix(*levels[-1]),
              "q_scale by request": isinstance(q_scale, torch.Tensor) and q_scale.dim() == 2,
              "batch_invariant": batch_invariant and len(levels) > 1}
    reasons = [name for name, given in joined.items() if given]
    if reasons:
        found = join_levels(levels, q.shape[0], *split_cache(kv_cache, kv_layout))
        if isinstance(found, Joined):
            return _run_joined(found, q, kv_cache, out, lse, return_lse, backend, **layer, **promised)
        if asked != "auto" or batch_invariant:  # whether keys can be joined depends on all requests
            raise NoBackendError(f"cascade_attention: with {', '.join(reasons)} backend {asked!r} needs one page table over the joined "
                                 f"keys, but {found}; let prefixes end with their page, or take backend='reference'")
        _warn(f"cascade_attention with {', '.join(reasons)} runs the float64 oracle: {found}")
        return _reference(q, kv_cache, levels, out, lse, return_lse, **layer)
    cache_k = kv_cache if isinstance(kv_cache, torch.Tensor) else kv_cache[0]
    cache_v = kv_cache if isinstance(kv_cache, torch.Tensor) else kv_cache[1]
    heads = cache_k.shape[-2] if kv_layout == "NHD" else cache_k.shape[-3]
    results = []
    for index, (table, starts) in enumerate(levels):
        own = index == len(levels) - 1
        plan = plan_attention(
            table, num_q_heads=q.shape[1], num_kv_heads=heads, head_dim=q.shape[2], head_dim_v=cache_v.shape[-1], cu_seqlens_q=starts,
            q_dtype=q.dtype, kv_dtype=cache_k.dtype, kv_layout=kv_layout, causal=causal and own, scale=scale, soft_cap=soft_cap,
            sinks=sinks is not None and own, kv_scales=kv_scales, rotation=rotation, backend=backend, device=q.device, **promised)
        results.append(plan.run(q, kv_cache, sinks=sinks if own else None, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
                                return_lse=True))
    return _deliver(*_merge(results), out, lse, return_lse)


def _run_joined(
    joined: Joined, q: torch.Tensor, kv_cache: Cache, out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: bool, backend: str, *,
    kv_layout: str, alibi_slopes: torch.Tensor | None, sinks: torch.Tensor | None, mask: torch.Tensor | None, q_scale: Scale | None,
    k_scale: Scale | None, v_scale: Scale | None, **planned: Any,
) -> Any:
    """The joined requests as one planned call. ``planned``: the features that a plan takes as they are."""
    k_cache, v_cache = joined.k_cache, joined.v_cache
    own_pages = joined.per_page == 1
    kind = None if mask is None else "packed" if mask.dtype == torch.uint8 else "dense"
    plan = plan_attention(
        joined.table, num_q_heads=q.shape[1], num_kv_heads=k_cache.shape[2], head_dim=q.shape[2], head_dim_v=v_cache.shape[3],
        cu_seqlens_q=joined.starts, q_dtype=q.dtype, kv_dtype=k_cache.dtype, kv_layout=kv_layout if own_pages else "NHD",
        alibi=alibi_slopes is not None, sinks=sinks is not None, mask=kind, backend=backend, device=q.device, **planned)
    if planned["kv_scales"] == "page":
        pages = (kv_cache if isinstance(kv_cache, torch.Tensor) else kv_cache[0]).shape[0]
        k_scale, v_scale = joined.scale("k_scale", k_scale, pages), joined.scale("v_scale", v_scale, pages)
    return plan.run(q, kv_cache if own_pages else (k_cache, v_cache), alibi_slopes=alibi_slopes, sinks=sinks, mask=mask, q_scale=q_scale,
                    k_scale=k_scale, v_scale=v_scale, return_lse=return_lse, out=out, lse=lse)


def _check_given(**tensors: tuple[Any, torch.Tensor | None]) -> None:
    """The tensors of the call against what the features say of each."""
    for name, (feature, given) in tensors.items():
        if bool(feature) != (given is not None):
            got, expected = ("none", "one") if feature else ("one", "none")
            raise SettingsError(f"{name}: got {got}, expected {expected}: the features say so")
    kind, mask = tensors["mask"]
    if mask is not None and (kind == "packed") != (mask.dtype == torch.uint8):
        raise DtypeError(f"mask: got {mask.dtype}, expected {'packed bits in uint8' if kind == 'packed' else 'flat bool'}: the features "
                         f"say mask={kind!r}")


@lru_cache(maxsize=64)
def _warn(words: str) -> None:
    """Once per reason: the oracle is slower by orders of magnitude."""
    logger.warning(words)


def _reaches_prefix(table: PageTable, starts: Lengths) -> bool:
    """A request has more rows than own keys, so that its first rows stand within the prefix and causality hides part of it.

    Lengths on a device are not looked at.
    """
    lens = table.host_lengths()
    if lens is None or (isinstance(starts, torch.Tensor) and not starts.is_cpu):
        return False
    rows = np.diff(np.asarray(starts))
    return len(rows) == len(lens) and bool((rows > lens).any())


def _merge(results: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(results) == 1:
        return results[0][0], results[0][1]
    from kernelgen import merge_states

    return merge_states(torch.stack([o for o, _ in results]), torch.stack([s for _, s in results]))


def _deliver(value: torch.Tensor, log: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: bool) -> Any:
    if out is not None:
        check_output("out", out, tuple(value.shape), out.dtype, value.device)
        value = out.copy_(value)
    if lse is not None:
        check_output("lse", lse, tuple(log.shape), torch.float32, log.device)
        log = lse.copy_(log)
    return (value, log) if return_lse else value


def _reference(
    q: torch.Tensor, kv_cache: Cache, levels: Sequence[Level], out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: bool,
    **features: Any,
) -> Any:
    from kernelgen import reference

    value, log = reference.cascade_attention(q, kv_cache, list(levels), return_lse=True, **features)
    return _deliver(value.to(default_out_dtype(q.dtype)), log.float(), out, lse, return_lse)
