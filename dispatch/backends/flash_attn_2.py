"""FlashAttention-2 (package flash-attn, module flash_attn).

Not to be had where it could be run so far: its verdicts and how it is called are tested with recorded versions and a stand-in; its
kernels are torch's flash_forward (dispatch/backends/torch_attention.py), which was run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kernelgen.dispatch.backends.base import Backend, Properties
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
    needs_version,
    on_cuda,
    on_host,
    ordinary,
    positive_scale,
    refused,
    sizes,
    window_of,
    with_comment,
)
from kernelgen.dispatch.libraries import Library, release
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no, no, yes

LIBRARY = Library("flash_attn.flash_attn_interface", "flash-attn", at_least="2.1.0", checked="2.8.3")
NAME = "flash-attn"
# feature -> first version that has it (its changelog); the causal mask is aligned bottom right since 2.1.
SINCE = {"window": "2.3.0", "alibi": "2.4.0", "paged": "2.5.0", "soft_cap": "2.6.0", "lse_rows": "2.6.0", "deterministic": "2.4.1"}
# Tokens that a page must be a multiple of, by the first version for which it holds: csrc/flash_attn/flash_api.cpp.
PAGE_MULTIPLES = (("2.5.0", 256),)
_TAKEN = ("ragged", "window", "window_right", "soft_cap", "alibi", "kv_lens", "lse", "gradient")


def page_multiple(version: str) -> int:
    """What pages must be a multiple of in this version, 0 where it has no paged caches."""
    return next((size for first, size in reversed(PAGE_MULTIPLES) if release(version) >= release(first)), 0)


def _versions(p: Any, version: str) -> Iterator[tuple[bool, str]]:
    asked = {"window": p.windowed, "alibi": p.alibi, "soft_cap": p.soft_cap, "paged": p.op == "paged_attention",
             "lse_rows": p.return_lse and getattr(p, "layout", "") != "dense",
             "deterministic": getattr(p, "requires_grad", False) and p.deterministic}
    words = {"soft_cap": "a soft-cap", "paged": "paged caches", "lse_rows": "the LSE of ragged rows one behind the other",
             "window": "a window", "alibi": "ALiBi slopes", "deterministic": "a deterministic backward"}
    for name, first in SINCE.items():
        passed, reason = needs_version(NAME, version, first, words[name])
        yield passed or not asked[name], reason


def supports(p: Any, target: Target, version: str) -> Verdict:
    """Attention, and paged attention, by flash-attn ``version``."""
    paged, page = p.op == "paged_attention", page_multiple(version)
    verdict = first_no(
        on_cuda(target, NAME),
        (p.q_dtype in HALVES and p.q_dtype == p.kv_dtype and p.out_dtype in ("", p.q_dtype),
         f"{NAME} takes one of {', '.join(HALVES)} for q, k, v and out, got {p.q_dtype}/{p.kv_dtype} to {p.out_dtype or p.q_dtype}"),
        refused(p, NAME, _TAKEN),
        *_versions(p, version),
        (p.head_dim == p.head_dim_v <= 256, f"{NAME} takes equal head dims up to 256, got {p.head_dim}/{p.head_dim_v}"),
        (not (paged and page and p.page_size % page), f"{NAME} {version} takes pages in multiples of {page} tokens, got "
         f"{p.page_size if paged else 0}"),
        aligned(p, NAME),
        (paged or p.layout == "ragged" or not loses_keys(p), f"{NAME} loses keys of rows before the first key in a window without a right "
         f"end: takes at most {(p.seq_k or 0) + 1} queries here, got {p.seq_q}"),
        (not (p.alibi and getattr(p, "requires_grad", False)), f"{NAME} has no gradient of alibi_slopes"),
        (not (getattr(p, "kv_lens", False) and p.requires_grad), f"{NAME} has no gradient through kv_lens"),
        (not (getattr(p, "kv_lens", False) and p.layout == "ragged"), f"{NAME} has no kv_lens of ragged keys"),
        (not (getattr(p, "requires_grad", False) and p.return_lse), f"the LSE of {NAME} has no gradient"),
        on_host(p, NAME) if paged else PASSED, ordinary(p, NAME), sizes(p, NAME),
    )
    return yes(HIDDEN_VALUES) if verdict and hides_keys_in_use(p) else verdict


def natural(lse: torch.Tensor) -> torch.Tensor:
    """It stores +inf for a row without keys."""
    return torch.where(lse == float("inf"), float("-inf"), lse)


def _arguments(p: Any, t: Any, version: str) -> dict[str, Any]:
    """Keyword arguments of all its functions; those that are at rest stay out, as old versions have not all of them."""
    given: dict[str, Any] = {"causal": p.causal}
    if p.windowed:
        left, right = window_of(p)
        given["window_size"] = (left, right)
    if t.soft_cap:
        given["softcap"] = t.soft_cap
    if t.alibi_slopes is not None:
        given["alibi_slopes"] = t.alibi_slopes
    return given


def _longest(queries: int, keys: int) -> tuple[int, int]:
    """At least two queries: for one it takes it that every request has one."""
    return max(queries, 2), longest_keys(queries, keys)


def _attention(p: Any, version: str) -> Callable[[Any], Any]:
    def run(t: Any) -> Any:
        import flash_attn

        q, scale = positive_scale(t.q, t.scale)
        given = _arguments(p, t, version) | {"softmax_scale": scale}
        if p.kv_lens:
            found = flash_attn.flash_attn_with_kvcache(q, t.k, t.v, cache_seqlens=t.kv_lens, return_softmax_lse=p.return_lse, **given)
        else:
            given["return_attn_probs"] = p.return_lse
            if p.requires_grad and release(version) >= release(SINCE["deterministic"]):
                given["deterministic"] = p.deterministic
            if p.layout == "dense":
                found = flash_attn.flash_attn_func(q, t.k, t.v, **given)
            else:  # without a sync no more is known of the longest request than the tokens of all
                longest_q, longest_k = _longest(p.seq_q, p.seq_k)
                found = flash_attn.flash_attn_varlen_func(q, t.k, t.v, t.cu_seqlens_q, t.cu_seqlens_k, longest_q, longest_k, **given)
        return _hand_over(p, t, found)

    return run


def _hand_over(p: Any, t: Any, found: Any) -> Any:
    out, lse = (found[0], natural(found[1])) if p.return_lse else (found, None)
    if getattr(p, "requires_grad", False) or getattr(p, "layout", "") == "dense":
        return deliver(p, t, out, lse)
    copy_owned(t, t.out, out)
    if lse is not None:
        copy_owned(t, t.lse, lse.t())
    return None


def _paged(p: Any, version: str) -> Callable[[Any], Any]:
    def run(t: Any) -> Any:
        import flash_attn

        q, scale = positive_scale(t.q, t.scale)
        a, (rows, keys) = t.arrays, longest(t.arrays)
        starts_k = torch.nn.functional.pad(a.kv_lens.cumsum(0, dtype=torch.int32), (1, 0))
        found = flash_attn.flash_attn_varlen_func(
            q, t.k_cache, t.v_cache, a.q_indptr, starts_k, *_longest(rows, keys), softmax_scale=scale, return_attn_probs=p.return_lse,
            block_table=block_tables(a, p.page_size), **_arguments(p, t, version))
        return _hand_over(p, t, found)

    return run


class FlashAttention2(Backend):
    name = "flash_attn_2"
    library = LIBRARY

    def candidates(self, problem: Any, target: Target, live: bool) -> Iterator[tuple[str, Any, Verdict]]:
        if problem.op not in ("attention", "paged_attention"):
            yield "", None, no(f"{NAME} has attention only, not {problem.op}")
            return
        here, version = found_version(LIBRARY, live)
        yield "", None, with_comment(supports(problem, target, version), here.reason) if here else here

    def prepare(self, problem: Any, target: Target, kernel: str, config: Any, tensors: Any) -> Callable[[Any], Any]:
        make = _attention if problem.op == "attention" else _paged
        return make(problem, LIBRARY.version() or LIBRARY.checked)

    def properties(self, problem: Any, kernel: str) -> Properties:
        return Properties(deterministic=True, backward=problem.op == "attention")


BACKEND = FlashAttention2()
