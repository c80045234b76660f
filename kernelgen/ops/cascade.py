"""cascade_attention: requests that share prefixes, in any number of levels, each level's keys read once per group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernelgen.errors import NoBackendError, ShapeError
from kernelgen.ops.attention import Window, check_window
from kernelgen.ops.checks import check_output, check_rank
from kernelgen.ops.page_table import Lengths, PageTable
from kernelgen.ops.paged import Cache, plan_attention
from kernelgen.ops.scales import Scale
from kernelgen.ops.variants import check_has_lse
from kernelgen.reference.plain import default_out_dtype
from kernelgen.settings import settings

Level = tuple[PageTable, Lengths]


def cascade_attention(
    q: torch.Tensor, kv_cache: Cache, levels: Sequence[Level], *, kv_layout: str = "NHD", causal: bool = True,
    window: Window | None = None, scale: float | None = None, soft_cap: float | None = None, alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, mask: torch.Tensor | None = None, variant: Any = None, q_scale: Scale | None = None,
    k_scale: Scale | None = None, v_scale: Scale | None = None, kv_scales: str | None = None, rotation: int | None = None,
    return_lse: bool = False, out: torch.Tensor | None = None, lse: torch.Tensor | None = None, backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (Tq, Hq, D) over shared prefixes and own keys, all in one cache.

    ``levels``: (page table, cu_seqlens_q) from the outermost prefix to the requests' own keys. Each level's query starts cut
    the same Tq rows, and a request of an inner level lies within one request of every outer level. A row attends to the keys
    of its levels one after another as if they were one cache: positions align at the bottom right of the joined keys, so
    causality only ever hides own keys. Other arguments as in plan_attention and AttentionPlan.run. Returns out (Tq, Hq, Dv)
    and with ``return_lse`` the LSE (Tq, Hq).

    Every level is one planned call, and the results are merged by their LSE (Juravsky et al. 2024, Hydragen). Where positions
    or indices of the joined keys matter (window, ALiBi, mask, variant, per-request scales) the float64 oracle runs instead.

    Raises ShapeError, also for lengths that do not cut q; DtypeError, DeviceError, SettingsError; NoBackendError.
    """
    if not levels:
        raise ShapeError("levels: got none, expected at least one (page table, cu_seqlens_q)")
    check_rank("q", q, 3, "(Tq, Hq, D)")
    if return_lse or lse is not None:
        check_has_lse(variant)
    joined = {"window": check_window(window) != (None, None), "alibi_slopes": alibi_slopes is not None, "mask": mask is not None,
              "variant": variant is not None, "kv_scales='request_head'": kv_scales == "request_head",
              "q_scale by request": isinstance(q_scale, torch.Tensor) and q_scale.dim() == 2}
    reasons = [name for name, given in joined.items() if given]
    asked = settings().backend if backend == "auto" else backend
    if asked == "reference" or (reasons and asked == "auto"):
        return _reference(
            q, kv_cache, levels, out, lse, return_lse, kv_layout=kv_layout, causal=causal, window=window, scale=scale, soft_cap=soft_cap,
            alibi_slopes=alibi_slopes, sinks=sinks, mask=mask, variant=variant, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
            kv_scales=kv_scales, rotation=rotation)
    if reasons:
        raise NoBackendError(f"cascade_attention: backend {asked!r} merges levels and cannot with {', '.join(reasons)}, which see "
                             "positions of the joined keys; leave it out or take backend='reference'")
    cache_k = kv_cache if isinstance(kv_cache, torch.Tensor) else kv_cache[0]
    cache_v = kv_cache if isinstance(kv_cache, torch.Tensor) else kv_cache[1]
    heads = cache_k.shape[-2] if kv_layout == "NHD" else cache_k.shape[-3]
    results = []
    for index, (table, starts) in enumerate(levels):
        own = index == len(levels) - 1
        plan = plan_attention(
            table, num_q_heads=q.shape[1], num_kv_heads=heads, head_dim=q.shape[2], head_dim_v=cache_v.shape[-1], cu_seqlens_q=starts,
            q_dtype=q.dtype, kv_dtype=cache_k.dtype, kv_layout=kv_layout, causal=causal and own, scale=scale, soft_cap=soft_cap,
            sinks=sinks is not None and own, kv_scales=kv_scales, rotation=rotation, backend=backend, device=q.device)
        results.append(plan.run(q, kv_cache, sinks=sinks if own else None, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
                                return_lse=True))
    return _deliver(*_merge(results), out, lse, return_lse)


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
