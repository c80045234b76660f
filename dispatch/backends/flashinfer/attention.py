"""Dense and ragged attention by FlashInfer's ragged prefill wrapper: its FA2 and FA3 kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kernelgen.dispatch.backends.base import Properties
from kernelgen.dispatch.backends.flashinfer.wrappers import LN_2, as_given, wrapper
from kernelgen.dispatch.backends.wrapped import (
    HALVES,
    HIDDEN_VALUES,
    INT32,
    aligned,
    hides_keys_in_use,
    on_cuda,
    ordinary,
    positive_scale,
    refused,
    sizes,
    window_of,
)
from kernelgen.problems.attention import AttentionProblem
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no, no, yes

NAME = "FlashInfer"
# (head_dim, head_dim_v) that its prefill kernels are instantiated and tested for.
PAIRS = ((64, 64), (128, 128), (256, 256), (192, 128))
_TAKEN = ("ragged", "window", "soft_cap", "lse")
# Measured (H200, 2026-11-30): 3e-4 - 1.5e-3 beside the exact LSE, 130 - 730 x what the contract allows. fa3 sums what was not rounded yet.
ROUNDED_LSE = f"{NAME}'s fa2 sums probabilities rounded to 16 bits: its LSE is off by up to 1.5e-3"
READS_LENGTHS = "plans on the host: cu_seqlens is copied back at each call, which waits for the device"


def common(p: Any, target: Target, kernel: str) -> Iterator[tuple[bool, str]]:
    """Checks that dense, ragged and paged prefill share."""
    label = f"{NAME}'s {kernel}"
    yield on_cuda(target, label, (90,)) if kernel == "fa3" else on_cuda(target, label)
    yield refused(p, label, _TAKEN)
    yield not (kernel == "fa2" and p.return_lse), ROUNDED_LSE
    dims = (p.head_dim, p.head_dim_v)
    yield dims in PAIRS, f"{label} takes head dims {', '.join(f'{a}/{b}' for a, b in PAIRS)}, got {dims[0]}/{dims[1]}"
    yield aligned(p, label)
    yield ordinary(p, label)
    yield sizes(p, label, elements=INT32)


def supports(p: AttentionProblem, target: Target, kernel: str) -> Verdict:
    verdict = first_no(
        (p.q_dtype in HALVES and p.q_dtype == p.kv_dtype == p.out_dtype,
         f"{NAME}'s {kernel} takes one of {', '.join(HALVES)} for q, k, v and out here, got {p.q_dtype}/{p.kv_dtype} to {p.out_dtype}"),
        *common(p, target, kernel),
    )
    if not verdict:
        return verdict
    comments = (HIDDEN_VALUES if hides_keys_in_use(p) else "", READS_LENGTHS if p.layout == "ragged" else "")
    return yes("; ".join(c for c in comments if c))


def rows(p: AttentionProblem, target: Target) -> Iterator[tuple[str, Verdict]]:
    for kernel in ("fa2", "fa3"):
        yield kernel, supports(p, target, kernel)
    yield "cudnn", no("backend cudnn calls the same graphs without FlashInfer between")
    for kernel in ("cutlass", "cute-dsl"):
        yield kernel, no("not wrapped: for sm_100 and later, of which no GPU was at hand")
    yield "trtllm_fmha_v2", no("not wrapped: it stores no LSE, and where its diagonal lies for unlike lengths is undocumented")


def properties(p: AttentionProblem, kernel: str) -> Properties:
    # fa2 is planned without a split of the keys where that is asked for; a plan lies in memory that the next one reuses.
    return Properties(deterministic=True, batch_invariant=kernel == "fa2", graph_safe=False, backward=False)


def prepare(p: AttentionProblem, target: Target, kernel: str, tensors: Any) -> Callable[[Any], Any]:
    left, _ = window_of(p)
    # A dense batch is a ragged one whose lengths the host knows.
    dense_q, dense_k = (torch.arange(p.batch + 1, dtype=torch.int32, device="cpu") * n for n in (p.seq_q, p.seq_k))
    dense = p.layout == "dense"

    def run(t: Any) -> None:
        import flashinfer

        q, scale = positive_scale(t.q, t.scale)
        starts_q, starts_k = (dense_q, dense_k) if dense else (t.cu_seqlens_q.cpu(), t.cu_seqlens_k.cpu())
        key = (p, scale, t.soft_cap, None if dense else (tuple(starts_q.tolist()), tuple(starts_k.tolist())))
        split = {"disable_split_kv": True} if kernel == "fa2" and p.batch_invariant else {}

        def plan(w: Any) -> None:
            w.plan(starts_q, starts_k, p.num_q_heads, p.num_kv_heads, p.head_dim, head_dim_vo=p.head_dim_v, causal=p.causal,
                   window_left=left, logits_soft_cap=t.soft_cap, sm_scale=scale, q_data_type=q.dtype, kv_data_type=t.k.dtype, **split)

        planned = wrapper(q.device, f"ragged {kernel}",
                          lambda memory: flashinfer.BatchPrefillWithRaggedKVCacheWrapper(memory, "NHD", backend=kernel))
        w = planned.plan(key, None, plan)
        # Rows past the last request are not handed over: kernels neither read nor write them.
        count_q, count_k = int(starts_q[-1]), int(starts_k[-1])
        q, k, v, out = (x.reshape(-1, *x.shape[-2:])[:n].contiguous() for x, n in (
            (q, count_q), (t.k, count_k), (t.v, count_k), (as_given(t.out), count_q)))
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if t.lse is not None else None
        w.run(q, k, v, out=out, lse=lse, return_lse=lse is not None)
        if lse is not None:
            lse = lse.mul_(LN_2)
            (t.lse if dense else t.lse[:count_q]).copy_(lse.view(p.batch, p.seq_q, -1).transpose(1, 2) if dense else lse)
        if out.data_ptr() != t.out.data_ptr():
            (t.out if dense else t.out[:count_q]).copy_(out.view(t.out.shape) if dense else out)

    return run
