"""Paged attention by FlashInfer: batch prefill (FA2, FA3), batch decode (CUDA cores) and TensorRT-LLM's XQA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from kernelgen.dispatch.backends.base import Properties
from kernelgen.dispatch.backends.flashinfer.attention import NAME, common
from kernelgen.dispatch.backends.flashinfer.wrappers import LN_2, WORKSPACE, as_given, workspace, wrapper
from kernelgen.dispatch.backends.wrapped import (
    HALVES,
    HIDDEN_VALUES,
    INT32,
    aligned,
    block_tables,
    host_lengths,
    longest,
    on_cuda,
    on_host,
    ordinary,
    positive_scale,
    refused,
    remembered,
    repair_empty_rows,
    sizes,
    window_of,
)
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no, no, yes

GROUPS = (1, 2, 3, 4, 6, 8, 16)  # query heads of a key/value head that its decode kernel is compiled for
DECODE_DIMS = (64, 128, 256)
XQA_PAGES = (16, 32, 64, 128)
XQA_CAPABILITIES = (90, 100, 103, 120, 121)


def _dtypes(p: PagedAttentionProblem, kernel: str, caches: tuple[str, ...]) -> tuple[bool, str]:
    ok = p.q_dtype in HALVES and p.kv_dtype in (p.q_dtype, *caches) and p.out_dtype in ("", p.q_dtype)
    more = f" or {', '.join(caches)}" if caches else ""
    return ok, (f"{NAME}'s {kernel} takes one of {', '.join(HALVES)} for q and out and the same{more} for the cache, got "
                f"{p.q_dtype}/{p.kv_dtype} to {p.out_dtype or p.q_dtype}")


def supports_prefill(p: PagedAttentionProblem, target: Target, kernel: str) -> Verdict:
    verdict = first_no(
        _dtypes(p, kernel, ("e4m3", "e5m2") if kernel == "fa2" else ()),
        *common(p, target, kernel),
        on_host(p, NAME),
    )
    return yes(HIDDEN_VALUES) if verdict and (p.max_seq_q or 0) > 1 else verdict


def supports_decode(p: PagedAttentionProblem, target: Target) -> Verdict:
    label = f"{NAME}'s decode"
    return first_no(
        on_cuda(target, label),
        _dtypes(p, "decode", ("e4m3", "e5m2")),
        refused(p, label, ("window", "window_right", "soft_cap", "lse")),
        *_one_query(p, label),
        (p.group_size in GROUPS, f"{label} takes groups of {', '.join(map(str, GROUPS))} query heads, got {p.group_size}"),
        (p.head_dim == p.head_dim_v and p.head_dim in DECODE_DIMS,
         f"{label} takes head dims {', '.join(map(str, DECODE_DIMS))}, equal for keys and values, got {p.head_dim}/{p.head_dim_v}"),
        aligned(p, label),
        ordinary(p, label), sizes(p, label, elements=INT32),
    )


def _one_query(p: PagedAttentionProblem, label: str) -> Iterator[tuple[bool, str]]:
    yield on_host(p, label)
    yield p.max_seq_q == 1, f"{label} takes one query per request, got up to {p.max_seq_q}"


def supports_xqa(p: PagedAttentionProblem, target: Target) -> Verdict:
    label = f"{NAME}'s xqa"
    return first_no(
        on_cuda(target, label, XQA_CAPABILITIES),
        _dtypes(p, "xqa", ()),
        refused(p, label, ("window", "window_right", "sinks")),
        *_one_query(p, label),
        (p.page_size in XQA_PAGES, f"{label} takes pages of {', '.join(map(str, XQA_PAGES))} tokens, got {p.page_size}"),
        (p.head_dim == p.head_dim_v and p.head_dim % 16 == 0 and 16 <= p.head_dim <= 256,
         f"{label} takes head dims in multiples of 16 up to 256, equal for keys and values, got {p.head_dim}/{p.head_dim_v}"),
        (p.group_size <= 16, f"{label} takes groups of at most 16 query heads, got {p.group_size}"),
        aligned(p, label),
        ordinary(p, label), sizes(p, label, elements=INT32),
    )


def rows(p: PagedAttentionProblem, target: Target) -> Iterator[tuple[str, Verdict]]:
    for kernel in ("fa2", "fa3"):
        yield kernel, supports_prefill(p, target, kernel)
    yield "decode", supports_decode(p, target)
    yield "xqa", supports_xqa(p, target)
    yield "cudnn", no("backend cudnn calls the same graphs without FlashInfer between")
    yield "trtllm_fmha_v2", no("not wrapped: it wants keys and values of a page in one tensor, which a plan does not know before it runs")


def properties(p: PagedAttentionProblem, kernel: str) -> Properties:
    # fa2 is planned without a split of the keys where that is asked for; a plan lies in memory that the next one reuses.
    return Properties(deterministic=True, batch_invariant=kernel == "fa2", graph_safe=False, backward=False)


def _page_arrays(p: PagedAttentionProblem, arrays: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(starts in the page numbers, page numbers of the requests one behind the other on the device, tokens of each last page)."""
    host = host_lengths(arrays)
    lens, begin = host.kv_lens.astype(np.int64), host.page_begin.astype(np.int64)
    pages = -(-lens // p.page_size)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(pages)])
    place = np.repeat(begin - starts[:-1], pages) + np.arange(starts[-1])
    numbers = arrays.page_indices
    found = numbers[torch.from_numpy(place).to(numbers.device)] if len(place) else numbers.new_zeros(0)
    last = lens - np.maximum(pages - 1, 0) * p.page_size
    return torch.from_numpy(starts.astype(np.int32)), found.to(torch.int32), torch.from_numpy(last.astype(np.int32))


def _caches(p: PagedAttentionProblem, t: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if p.kv_layout == "HND":
        return t.k_cache.transpose(1, 2), t.v_cache.transpose(1, 2)
    return t.k_cache, t.v_cache


def _finish(t: Any, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    if t.v_factor != 1:
        out.mul_(t.v_factor)
    if lse is not None:
        t.lse.copy_(lse.mul_(LN_2))
    if out is not t.out:
        t.out.copy_(out)


def _lse(t: Any, rows: int) -> torch.Tensor | None:
    return None if t.lse is None else torch.empty((rows, t.lse.shape[1]), dtype=torch.float32, device=t.q.device)


def _prefill(p: PagedAttentionProblem, kernel: str) -> Callable[[Any], Any]:
    left, _ = window_of(p)

    def run(t: Any) -> None:
        import flashinfer

        q, scale = positive_scale(t.q, t.scale)
        a = t.arrays
        key = (p, scale, t.soft_cap)
        split = {"disable_split_kv": True} if kernel == "fa2" and p.batch_invariant else {}

        def plan(w: Any) -> None:
            starts, numbers, last = _page_arrays(p, a)
            w.plan(torch.from_numpy(host_lengths(a).starts), starts, numbers, last, p.num_q_heads, p.num_kv_heads, p.head_dim, p.page_size,
                   head_dim_vo=p.head_dim_v, causal=p.causal, sm_scale=scale, window_left=left, logits_soft_cap=t.soft_cap,
                   q_data_type=q.dtype, kv_data_type=t.k_cache.dtype, **split)

        planned = wrapper(q.device, f"paged {kernel} {p.kv_layout}",
                          lambda memory: flashinfer.BatchPrefillWithPagedKVCacheWrapper(memory, p.kv_layout, backend=kernel))
        w = planned.plan(key, a.lengths, plan)
        out, lse = as_given(t.out), _lse(t, q.shape[0])
        w.run(q.contiguous(), _caches(p, t), out=out, lse=lse, return_lse=lse is not None)
        _finish(t, out, lse)

    return run


def _every_request(t: Any, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One row per request, and which of them are rows of q (None: all): a request without a query gets a zero."""
    a = t.arrays
    starts = host_lengths(a).starts
    if starts[-1] == a.batch:
        return q.contiguous(), None
    place = remembered(a, "rows", lambda: torch.from_numpy(np.flatnonzero(np.diff(starts))).to(q.device))
    full = q.new_zeros(a.batch, *q.shape[1:])
    full[place] = q
    return full, place


def _decode(p: PagedAttentionProblem) -> Callable[[Any], Any]:
    left = -1 if p.window[0] is None else p.window[0]

    def run(t: Any) -> None:
        import flashinfer

        q, scale = positive_scale(t.q, t.scale)
        q, place = _every_request(t, q)
        a, key = t.arrays, (p, scale, t.soft_cap)

        def plan(w: Any) -> None:
            starts, numbers, last = _page_arrays(p, a)
            w.plan(starts, numbers, last, p.num_q_heads, p.num_kv_heads, p.head_dim, p.page_size, sm_scale=scale, window_left=left,
                   logits_soft_cap=t.soft_cap, q_data_type=q.dtype, kv_data_type=t.k_cache.dtype)

        planned = wrapper(q.device, f"decode {p.kv_layout}",
                          lambda memory: flashinfer.BatchDecodeWithPagedKVCacheWrapper(memory, p.kv_layout, backend="fa2"))
        w = planned.plan(key, a.lengths, plan)
        _by_request(t, place, lambda out, lse: w.run(q, _caches(p, t), out=out, lse=lse, return_lse=lse is not None))

    return run


def _by_request(t: Any, place: torch.Tensor | None, run: Callable[[torch.Tensor, torch.Tensor | None], Any]) -> None:
    if place is None:
        out, lse = as_given(t.out), _lse(t, t.q.shape[0])
        run(out, lse)
    else:
        out, lse = t.out.new_empty(t.arrays.batch, *t.out.shape[1:]), _lse(t, t.arrays.batch)
        run(out, lse)
        out, lse = out[place], None if lse is None else lse[place]
    _finish(t, out, lse)


def _xqa(p: PagedAttentionProblem) -> Callable[[Any], Any]:
    left = -1 if p.window[0] is None else p.window[0]

    def run(t: Any) -> None:
        from flashinfer.decode import xqa_batch_decode_with_kv_cache

        q, scale = positive_scale(t.q, t.scale)
        q, place = _every_request(t, q)
        a = t.arrays
        memory = workspace(q.device, "xqa", WORKSPACE + 8 * 2**20)  # it keeps semaphores in the first 8 MiB, 0 between calls

        def call(out: torch.Tensor, lse: torch.Tensor | None) -> None:
            xqa_batch_decode_with_kv_cache(
                q, _caches(p, t), memory, block_tables(a, p.page_size), a.kv_lens, max(longest(a)[1], 1), bmm1_scale=scale,
                window_left=left, out=out, sinks=t.sinks, kv_layout=p.kv_layout)

        _by_request(t, place, call)
        if not host_lengths(a).kv_lens.all():  # it leaves NaN in a row without keys
            repair_empty_rows(p, t, t.out, None)

    return run


def prepare(p: PagedAttentionProblem, target: Target, kernel: str, tensors: Any) -> Callable[[Any], Any]:
    if kernel in ("fa2", "fa3"):
        return _prefill(p, kernel)
    return _decode(p) if kernel == "decode" else _xqa(p)
