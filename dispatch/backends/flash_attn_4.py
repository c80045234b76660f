"""FlashAttention-4 (package flash-attn-4, module flash_attn.cute): CuTe-DSL kernels that are compiled at first use.

It shares the namespace ``flash_attn`` with FlashAttention-2, which need not be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kernelgen.dispatch.backends.base import Backend, Properties
from kernelgen.dispatch.backends.wrapped import (
    HALVES,
    HIDDEN_VALUES,
    aligned,
    block_tables,
    copy_owned,
    deliver,
    found_version,
    hides_keys_in_use,
    longest,
    on_cuda,
    on_host,
    ordinary,
    positive_scale,
    refused,
    sizes,
    values_in_use,
    window_of,
    with_comment,
)
from kernelgen.dispatch.libraries import Library
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no, no, yes

LIBRARY = Library("flash_attn.cute", "flash-attn-4", at_least="4.0.0", checked="4.0.0b36")
NAME = "FlashAttention-4"
# (head_dim, head_dim_v) by capability beyond the ranges, which end at LARGEST; interface._validate_head_dims of 4.0.0b36.
LARGEST = {90: 256, 100: 128, 103: 128, 110: 128}
PAIRS = {100: ((192, 128), (256, 256)), 103: ((192, 128), (256, 256)), 110: ((192, 128), (256, 256))}
# Keys of a tile on some target: a page of so many is loaded whole, others row by row with zeros past a request's length.
TILES = (64, 80, 96, 112, 128, 144)
_TAKEN = ("ragged", "window", "window_right", "soft_cap", "sinks", "kv_lens", "lse", "gradient")


def supports(p: Any, target: Target) -> Verdict:
    """Attention, dense and ragged."""
    return first_no(
        on_cuda(target, NAME, tuple(LARGEST)),
        (p.q_dtype in HALVES and p.q_dtype == p.kv_dtype == p.out_dtype,
         f"{NAME} takes one of {', '.join(HALVES)} for q, k, v and out on {target}, got {p.q_dtype}/{p.kv_dtype} to {p.out_dtype}"),
        refused(p, NAME, _TAKEN),
        *_dims(p, target),
        aligned(p, NAME),
        ordinary(p, NAME), sizes(p, NAME),
        (not p.requires_grad or p.head_dim == p.head_dim_v <= 128,
         f"{NAME}'s backward was only tried for equal head dims up to 128, got {p.head_dim}/{p.head_dim_v}"),
        _capped_lse(p),
        (not (p.requires_grad and p.kv_lens), f"{NAME}'s gradient through kv_lens was not tried"),
        (not (p.requires_grad and p.sinks), f"{NAME}'s gradient of sinks was not tried"),
    )


def _dims(p: Any, target: Target) -> Iterator[tuple[bool, str]]:
    most, pairs = LARGEST.get(target.capability, 0), PAIRS.get(target.capability, ())
    dims = (p.head_dim, p.head_dim_v)
    ok = dims in pairs or (all(8 <= d <= most and d % 8 == 0 for d in dims))
    more = f", or one of {', '.join(f'{a}/{b}' for a, b in pairs)}" if pairs else ""
    yield ok, f"{NAME} takes head dims of 8 to {most}{more} on {target}, got {dims[0]}/{dims[1]}"


def _capped_lse(p: Any) -> tuple[bool, str]:
    """Measured on an H200: 1.6 x what an LSE may be off, as the tanh of its soft-cap is an approximation."""
    return not (p.soft_cap and p.return_lse), f"{NAME}'s LSE under a soft-cap is not exact enough"


def supports_paged(p: Any, target: Target) -> Verdict:
    return first_no(
        on_cuda(target, NAME, tuple(LARGEST)),
        (p.q_dtype in HALVES and p.q_dtype == p.kv_dtype and p.out_dtype in ("", p.q_dtype),
         f"{NAME} takes one of {', '.join(HALVES)} for q, the cache and out on {target}, got {p.q_dtype}/{p.kv_dtype}"),
        refused(p, NAME, _TAKEN),
        *_dims(p, target),
        (p.head_dim % 16 == 0 and p.head_dim_v % 16 == 0,
         f"{NAME}'s paged loads take head dims in multiples of 16, got {p.head_dim}/{p.head_dim_v}"),
        aligned(p, NAME),
        _capped_lse(p),
        (p.page_size not in TILES, f"{NAME} reads a page whole where it is a tile of keys, NaN of unused slots included: a page of "
         f"{p.page_size} tokens may be one"),
        on_host(p, NAME), ordinary(p, NAME), sizes(p, NAME),
    )


def _window(p: Any) -> dict[str, Any]:
    left, right = window_of(p, None)
    plain = p.causal and left is None
    return {"causal": plain, "window_size_left": left, "window_size_right": None if plain else right}


def _forward(p: Any, t: Any, **more: Any) -> None:
    """The forward alone, into the call's own memory."""
    from flash_attn.cute import interface

    q, scale = positive_scale(t.q, t.scale)
    dense = getattr(p, "layout", "") == "dense"
    # (H, T) is how it stores the LSE of ragged rows.
    lse = None if t.lse is None else t.lse if dense else torch.empty(t.lse.shape[::-1], dtype=torch.float32, device=q.device)
    out = t.out if _fits(t.out) else torch.empty(t.out.shape, dtype=t.out.dtype, device=q.device)
    if lse is not None and dense and not lse.is_contiguous():
        lse = torch.empty(lse.shape, dtype=torch.float32, device=q.device)
    interface._flash_attn_fwd(q, **more, softmax_scale=scale, softcap=t.soft_cap or 0.0, learnable_sink=t.sinks, out=out, lse=lse,
                              return_lse=lse is not None, **_window(p))
    for target, result in ((t.lse, lse if lse is None or dense else lse.t()), (t.out, out)):
        if result is not None and result is not target:
            target.copy_(result) if dense else copy_owned(t, target, result)


def _fits(out: torch.Tensor) -> bool:
    return 0 not in out.stride() and out.data_ptr() % 16 == 0 and all(s * out.element_size() % 16 == 0 for s in out.stride()[:-1])


def _ragged(t: Any) -> dict[str, Any]:
    # Without a sync no more is known of the longest request than the tokens of all.
    return {"cu_seqlens_q": t.cu_seqlens_q, "cu_seqlens_k": t.cu_seqlens_k, "max_seqlen_q": t.q.shape[0], "max_seqlen_k": t.k.shape[0]}


def _attention(p: Any) -> Callable[[Any], Any]:
    if not p.requires_grad:
        return lambda t: _forward(p, t, k=t.k, v=values_in_use(p, t), seqused_k=t.kv_lens, **({} if p.layout == "dense" else _ragged(t)))

    def run(t: Any) -> Any:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

        q, scale = positive_scale(t.q, t.scale)
        plain, left, right = _window(p).values()
        common = {"softmax_scale": scale, "softcap": t.soft_cap or 0.0, "learnable_sink": t.sinks, "deterministic": p.deterministic,
                  "causal": plain, "window_size": (left, right), "return_lse": t.lse is not None}
        if p.layout == "dense":
            out, lse = flash_attn_func(q, t.k, t.v, **common)
        else:
            out, lse = flash_attn_varlen_func(q, t.k, values_in_use(p, t), **_ragged(t), **common)
            lse = None if lse is None else lse.t()
        return deliver(p, t, out, lse)

    return run


def _paged(p: Any) -> Callable[[Any], Any]:
    def run(t: Any) -> Any:
        rows, _ = longest(t.arrays)
        _forward(p, t, k=t.k_cache, v=t.v_cache, cu_seqlens_q=t.arrays.q_indptr, seqused_k=t.arrays.kv_lens, max_seqlen_q=rows,
                 page_table=block_tables(t.arrays, p.page_size))

    return run


class FlashAttention4(Backend):
    name = "flash_attn_4"
    library = LIBRARY

    def candidates(self, problem: Any, target: Target, live: bool) -> Iterator[tuple[str, Any, Verdict]]:
        check = {"attention": supports, "paged_attention": supports_paged}.get(problem.op)
        if check is None:
            yield "", None, no(f"{NAME} has attention only, not {problem.op}")
            return
        here, _ = found_version(LIBRARY, live)
        verdict = check(problem, target)
        if verdict and hides_keys_in_use(problem):
            verdict = yes(HIDDEN_VALUES)
        yield "", None, with_comment(verdict, here.reason) if here else here

    def prepare(self, problem: Any, target: Target, kernel: str, config: Any, tensors: Any) -> Callable[[Any], Any]:
        return _attention(problem) if problem.op == "attention" else _paged(problem)

    def properties(self, problem: Any, kernel: str) -> Properties:
        # One block computes a row from all of its keys; the backward has a deterministic form, which is asked for.
        return Properties(deterministic=True, batch_invariant=False, graph_safe=True, backward=problem.op == "attention")


BACKEND = FlashAttention4()
