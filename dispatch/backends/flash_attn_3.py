"""FlashAttention-3 (module flash_attn_interface): Hopper, forward in 16 bits and fp8, backward.

Not to be had where it could be run so far: verdicts and calls are tested with recorded versions and a stand-in; of its kernels
FlashInfer's fa3 is a relative that was run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kernelgen.dispatch.backends.base import Backend, Properties
from kernelgen.dispatch.backends.flash_attn_2 import natural
from kernelgen.dispatch.backends.wrapped import (
    HALVES,
    HIDDEN_VALUES,
    PASSED,
    aligned,
    block_tables,
    copy_owned,
    deliver,
    found_version,
    hides_keys_in_use,
    longest,
    longest_keys,
    loses_keys,
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

LIBRARY = Library("flash_attn_interface", "flash_attn_3", at_least="3.0.0", checked="3.0.0")
NAME = "FlashAttention-3"
# Below its smallest tile of keys a page is gathered row by row, and rows past a request's length are zero; larger ones may be read
# whole, NaN of unused slots included.
LARGEST_PAGE = 64
_TAKEN = ("ragged", "window", "window_right", "soft_cap", "lse", "gradient")


def dims_fit(d: int, dv: int) -> bool:
    """hopper/flash_api.cpp: equal ones up to 256, and two families with wider or narrower values."""
    return (d == dv <= 256) or (d <= 64 and dv <= 512) or (128 < d <= 192 and 96 < dv <= 128)


def supports(p: Any, target: Target) -> Verdict:
    """Attention, and paged attention."""
    paged, grad = p.op == "paged_attention", getattr(p, "requires_grad", False)
    eight_bits = p.q_dtype == p.kv_dtype == "e4m3"
    verdict = first_no(
        on_cuda(target, NAME, (90,)),
        ((p.q_dtype in HALVES and p.q_dtype == p.kv_dtype and p.out_dtype in ("", p.q_dtype))
         or (eight_bits and p.out_dtype in ("", "bf16")),
         f"{NAME} takes one of {', '.join(HALVES)} throughout, or e4m3 with an output of bf16; got {p.q_dtype}/{p.kv_dtype} to "
         f"{p.out_dtype or 'its default'}"),
        refused(p, NAME, _TAKEN),
        (dims_fit(p.head_dim, p.head_dim_v),
         f"{NAME} takes equal head dims up to 256, D up to 64 with Dv up to 512, or D 136 - 192 with Dv 104 - 128; got "
         f"{p.head_dim}/{p.head_dim_v}"),
        (not (grad and (p.head_dim != p.head_dim_v or eight_bits)),
         f"{NAME}'s backward takes 16 bits and equal head dims, got {p.q_dtype}, {p.head_dim}/{p.head_dim_v}"),
        (not (grad and p.return_lse), f"the LSE of {NAME} has no gradient"),
        (not paged or p.page_size < LARGEST_PAGE, f"{NAME} may read whole pages from {LARGEST_PAGE} tokens on, NaN of unused slots "
         f"included, got pages of {p.page_size if paged else 0}"),
        (not (p.window[0] is not None and window_of(p, None)[1] is None and (paged or (p.layout == "dense" and loses_keys(p)))),
         f"{NAME} loses keys of rows before the first key in a window without a right end"),
        aligned(p, NAME),
        on_host(p, NAME) if paged else PASSED, ordinary(p, NAME), sizes(p, NAME),
    )
    return yes(HIDDEN_VALUES) if verdict and hides_keys_in_use(p) else verdict


def _arguments(p: Any, t: Any, scale: float) -> dict[str, Any]:
    return {"softmax_scale": scale, "causal": p.causal, "window_size": window_of(p) if p.windowed else (-1, -1),
            "softcap": t.soft_cap or 0.0}


def _finish(p: Any, t: Any, out: torch.Tensor, lse: torch.Tensor | None) -> Any:
    if t.v_factor != 1:
        out = out * t.v_factor
    lse = None if lse is None else natural(lse)
    if getattr(p, "requires_grad", False) or getattr(p, "layout", "") == "dense":
        return deliver(p, t, out, lse)
    copy_owned(t, t.out, out)
    if lse is not None and t.lse is not None:
        copy_owned(t, t.lse, lse.t())
    return None


def _attention(p: Any) -> Callable[[Any], Any]:
    def run(t: Any) -> Any:
        import flash_attn_interface as library

        q, scale = _scaled(p, t)
        given = _arguments(p, t, scale) | {"deterministic": p.deterministic, "return_attn_probs": p.return_lse}
        if p.layout == "dense":
            found = library.flash_attn_func(q, t.k, t.v, **given)
        else:
            found = library.flash_attn_varlen_func(q, t.k, values_in_use(p, t), t.cu_seqlens_q, t.cu_seqlens_k, p.seq_q,
                                                   longest_keys(p.seq_q, p.seq_k), **given)
        return _finish(p, t, *(found[:2] if p.return_lse else (found, None)))

    return run


def _scaled(p: Any, t: Any) -> tuple[torch.Tensor, float]:
    if p.q_dtype in HALVES:
        return positive_scale(t.q, t.scale)
    q, scale = positive_scale(t.q.float(), t.scale)  # fp8 has no arithmetic in torch; its values are negated without loss
    return (t.q, scale) if t.scale > 0 else (q.to(t.q.dtype), scale)


def _paged(p: Any) -> Callable[[Any], Any]:
    def run(t: Any) -> Any:
        import flash_attn_interface as library

        q, scale = _scaled(p, t)
        a, (rows, _) = t.arrays, longest(t.arrays)
        found = library.flash_attn_with_kvcache(
            q, t.k_cache, t.v_cache, cache_seqlens=a.kv_lens, page_table=block_tables(a, p.page_size), cu_seqlens_q=a.q_indptr,
            max_seqlen_q=rows, num_splits=1 if p.batch_invariant else 0, return_softmax_lse=p.return_lse, **_arguments(p, t, scale))
        return _finish(p, t, *(found[:2] if p.return_lse else (found, None)))

    return run


class FlashAttention3(Backend):
    name = "flash_attn_3"
    library = LIBRARY

    def candidates(self, problem: Any, target: Target, live: bool) -> Iterator[tuple[str, Any, Verdict]]:
        if problem.op not in ("attention", "paged_attention"):
            yield "", None, no(f"{NAME} has attention only, not {problem.op}")
            return
        here, _ = found_version(LIBRARY, live)
        yield "", None, with_comment(supports(problem, target), here.reason) if here else here

    def prepare(self, problem: Any, target: Target, kernel: str, config: Any, tensors: Any) -> Callable[[Any], Any]:
        return _attention(problem) if problem.op == "attention" else _paged(problem)

    def properties(self, problem: Any, kernel: str) -> Properties:
        return Properties(deterministic=True, backward=problem.op == "attention")


BACKEND = FlashAttention3()
