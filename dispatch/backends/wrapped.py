"""What adapters of attention libraries share: refusing by name, and the cheap repairs that bring a result to our contract."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from kernelgen.dispatch.libraries import Library, release
from kernelgen.targets import Target
from kernelgen.tensors import HostLengths
from kernelgen.verdicts import Verdict, yes

HALVES = ("bf16", "fp16")
INT32 = 2**31
GRID = 65535  # most blocks of a CUDA grid in y and z: batch and heads lie there in most libraries

# Every feature of an attention call that a library may lack: name -> (is it asked for?, how a reason names it).
FEATURES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "ragged": (lambda p: getattr(p, "layout", "") == "ragged", "ragged requests (cu_seqlens)"),
    "window": (lambda p: p.windowed, "a window"),
    "window_right": (lambda p: p.window[1] is not None and not (p.causal or p.window[1] == 0), "a window with keys to the right"),
    "soft_cap": (lambda p: p.soft_cap, "a soft-cap (soft_cap)"),
    "alibi": (lambda p: p.alibi, "ALiBi (alibi_slopes)"),
    "sinks": (lambda p: p.sinks, "sinks"),
    "mask": (lambda p: p.mask is not None, "a mask tensor (mask)"),
    "variant": (lambda p: p.variant is not None, "a variant"),
    "block_mask": (lambda p: getattr(p, "block_mask", False), "a block mask"),
    "kv_lens": (lambda p: getattr(p, "kv_lens", False), "kv_lens"),
    "scales": (lambda p: (p.scales if hasattr(p, "scales") else p.kv_scales) not in (None, "number") or getattr(p, "q_scale", False),
               "fp8 scale tensors (q_scale, k_scale, v_scale); numbers are taken"),
    "rotation": (lambda p: getattr(p, "rotation", False), "a rotation of the cached keys"),
    "mla": (lambda p: getattr(p, "rope_dim", 0) > 0, "MLA"),
    "lse": (lambda p: p.return_lse, "an LSE (return_lse)"),
    "gradient": (lambda p: getattr(p, "requires_grad", False), "a gradient"),
}


_asked: tuple[Any, tuple[str, ...]] = (None, ())
PASSED = (True, "")


def asked_features(p: Any) -> tuple[str, ...]:
    """The names of FEATURES that a problem asks for. Every adapter wants to know, so the last answer is kept."""
    global _asked
    if _asked[0] is not p:
        _asked = p, tuple(name for name, (asked, _) in FEATURES.items() if asked(p))
    return _asked[1]


def refused(p: Any, library: str, taken: Collection[str]) -> tuple[bool, str]:
    """A check: does the library have every feature that is asked for? A call never runs without one."""
    for name in asked_features(p):
        if name not in taken:
            return False, f"{library} has not: {FEATURES[name][1]}"
    return PASSED


def sizes(p: Any, library: str, *, tokens: int = INT32, elements: int = 2**63) -> tuple[bool, str]:
    """A check of sizes in Python's integers, which do not overflow. ``tokens`` and ``elements`` are the first values too many."""
    rows = p.batch if getattr(p, "layout", "") == "dense" else 1
    q, k = rows * (p.seq_q or 0), rows * (p.seq_k or 0)
    largest = max(q * p.num_q_heads * max(p.head_dim, p.head_dim_v), k * p.num_kv_heads * max(p.head_dim, p.head_dim_v))
    for what, got, limit in (("query tokens", q, tokens), ("key tokens", k, tokens), ("requests", p.batch, GRID + 1),
                             ("query heads", p.num_q_heads, GRID + 1), ("elements of a tensor", largest, elements)):
        if got >= limit:
            return False, f"{library} takes at most {limit - 1} {what}, got {got}"
    return PASSED


def ordinary(p: Any, library: str) -> tuple[bool, str]:
    """A check: libraries differ in what they do without keys, requests or queries, so none is asked to; head dims in multiples of 8."""
    for what, n in (("batch", p.batch), ("query length", p.seq_q), ("key length", p.seq_k), ("query heads", p.num_q_heads),
                    ("key heads", p.num_kv_heads)):
        if n is not None and n <= 0:
            return False, f"{library} is not asked to run a problem with {what} of 0"
    for d in (p.head_dim, p.head_dim_v):
        if d <= 0 or d % 8:
            return False, f"{library} takes head dims in multiples of 8, got {d}"
    return PASSED


def aligned(p: Any, library: str) -> tuple[bool, str]:
    """A check of addresses and strides."""
    return PASSED if p.alignment >= 16 else (False, f"{library} wants 16-byte aligned tensors and strides, got {p.alignment}")


def found_version(library: Library, live: bool) -> tuple[Verdict, str]:
    """Is the library here, and which version counts. Of another machine nothing is known: then the version that was checked counts."""
    verdict, version = library.verdict(), library.version()
    if not live and version is None:
        return yes(f"where {library.distribution} {library.checked} is installed; it is not here"), library.checked
    return verdict, version or library.checked


def needs_version(library: str, found: str, needed: str, what: str) -> tuple[bool, str]:
    """A check: ``what`` exists since version ``needed``."""
    if release(found) >= release(needed):
        return PASSED
    return False, f"{library} {found} has not {what}: needs {needed} or later"


def on_cuda(target: Target, library: str, capabilities: Collection[int] = (), least: int = 80) -> tuple[bool, str]:
    """A check of the target."""
    if target.capability in capabilities or (not capabilities and target.kind == "cuda" and target.capability >= least):
        return PASSED
    if capabilities:
        return False, f"{library} runs on {', '.join(f'sm_{c}' for c in sorted(capabilities))}, got {target}"
    return False, f"{library} needs an NVIDIA GPU of sm_{least} or later, got {target}"


def with_comment(verdict: Verdict, comment: str) -> Verdict:
    """A yes keeps its comment and gets another."""
    return yes("; ".join(c for c in (verdict.reason, comment) if c)) if verdict else verdict


# What every library of tensor-core attention does with a value that a row may not see but whose tile it computes: 0 * NaN.
HIDDEN_VALUES = "may let a NaN or inf of a hidden key in use through"


def hides_keys_in_use(p: Any) -> bool:
    return p.causal or p.windowed or p.mask is not None or getattr(p, "layout", "") == "ragged"


def window_of(p: Any, unbounded: Any = -1) -> tuple[Any, Any]:
    """(left, right) with causal in it."""
    left, right = p.window
    if p.causal:
        right = 0
    return unbounded if left is None else left, unbounded if right is None else right


def loses_keys(p: Any) -> bool:
    """FlashAttention-2 and -3 take the longest length in the place of a right end that a window has not, counted from the row's own
    position: rows that stand before the first key lose the last ones. Where the longest length is an argument, ``longest_keys`` helps.
    """
    left, right = window_of(p, None)
    return left is not None and (right is None or right >= p.seq_k) and p.seq_q > p.seq_k + 1


def longest_keys(queries: int, keys: int) -> int:
    """A longest length for :func:`loses_keys` that no row's position is below."""
    return queries + keys


def positive_scale(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Libraries take the largest score before they scale it: a scale below 0 goes into q, one of 0 makes q zero."""
    if scale > 0:
        return q, scale
    return (torch.zeros_like(q), 1.0) if scale == 0 else (q.neg(), -scale)


def rows_may_be_empty(p: Any) -> bool:
    """Can a row have no key, as far as the problem says?"""
    if getattr(p, "layout", "") != "dense" or p.kv_lens or p.mask is not None:
        return True
    left, right = window_of(p, None)
    return (p.seq_k == 0 or (right is not None and p.seq_q > p.seq_k + right)
            or (left is not None and right is not None and left + right < 0))


def empty_rows(p: Any, q_starts: torch.Tensor, kv_lens: torch.Tensor, rows: int) -> torch.Tensor:
    """(rows) bool: which of them no window lets see a key. q_starts (B + 1), kv_lens (B) on the device."""
    row = torch.arange(rows, device=q_starts.device, dtype=torch.int32)
    if kv_lens.shape[0] == 0:
        return torch.zeros(rows, dtype=torch.bool, device=q_starts.device)
    request = torch.bucketize(row, q_starts[1:], right=True).clamp_(max=kv_lens.shape[0] - 1)
    keys = kv_lens[request]
    position = row - q_starts[1:][request] + keys
    left, right = window_of(p, None)
    last = keys - 1 if right is None else torch.minimum(position + min(right, INT32 // 2), keys - 1)
    first = torch.zeros_like(keys) if left is None else (position - min(left, INT32 // 2)).clamp_(min=0)
    # Rows past the last request belong to the caller.
    return (last < first) & (row < q_starts[-1])


def dense_starts(p: Any, device: torch.device) -> torch.Tensor:
    """The starts of the query rows of a dense batch."""
    return torch.arange(p.batch + 1, device=device, dtype=torch.int32) * p.seq_q


def repair_empty_rows(p: Any, t: Any, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """0 and -inf (or the sink) in rows that see no key, in place. out (.., H, Dv); lse as the problem's layout has it."""
    dense = getattr(p, "layout", "") == "dense"
    if dense:
        starts = dense_starts(p, t.q.device)
        keys = t.kv_lens if t.kv_lens is not None else torch.full((p.batch,), p.seq_k, dtype=torch.int32, device=t.q.device)
        empty = empty_rows(p, starts, keys, p.batch * p.seq_q).view(p.batch, p.seq_q)
    elif hasattr(t, "arrays"):
        empty = empty_rows(p, t.arrays.q_indptr, t.arrays.kv_lens, t.q.shape[0])
    else:
        keys = t.cu_seqlens_k.diff() if t.kv_lens is None else t.kv_lens
        empty = empty_rows(p, t.cu_seqlens_q, keys, t.q.shape[0])
    out.masked_fill_(empty[..., None, None], 0)
    if lse is None:
        return
    where = empty.unsqueeze(1) if dense else empty.unsqueeze(-1)
    if t.sinks is None:
        lse.masked_fill_(where, float("-inf"))
    else:
        sinks = t.sinks.view(-1, 1) if dense else t.sinks
        lse.copy_(torch.where(where, sinks, lse))


def copy_owned(t: Any, target: torch.Tensor, result: torch.Tensor) -> None:
    """Copy ragged rows into a tensor of the call, but for those past the last request, which stay as they are."""
    starts = t.arrays.q_indptr if hasattr(t, "arrays") else t.cu_seqlens_q
    owned = torch.arange(target.shape[0], device=target.device) < starts[-1]
    target.copy_(torch.where(owned.view(-1, *(1,) * (target.dim() - 1)), result, target))


def values_in_use(p: Any, t: Any) -> torch.Tensor:
    """Dense or ragged values with 0 in place of what no request uses: a kernel's last tile may read it, and 0 * NaN is NaN."""
    if p.layout == "dense":
        if t.kv_lens is None:
            return t.v
        used = torch.arange(p.seq_k, device=t.v.device) < t.kv_lens.unsqueeze(1)
        return torch.where(used[..., None, None], t.v, 0)
    token, ends = torch.arange(t.v.shape[0], device=t.v.device, dtype=torch.int32), t.cu_seqlens_k[1:]
    used = token < t.cu_seqlens_k[-1]
    if t.kv_lens is not None:
        request = torch.bucketize(token, ends, right=True).clamp_(max=p.batch - 1)
        used &= token - t.cu_seqlens_k[:-1][request] < t.kv_lens[request]
    return torch.where(used[:, None, None], t.v, 0)


def deliver(p: Any, t: Any, out: torch.Tensor, lse: torch.Tensor | None) -> Any:
    """Hand over a library's own tensors: to autograd as they are, else copied into the call's outputs where they are not these."""
    if getattr(p, "requires_grad", False):
        return out, lse
    if out is not t.out:
        t.out.copy_(out)
    if t.lse is not None and lse is not None and lse is not t.lse:
        t.lse.copy_(lse)
    return None


_planned: WeakIdKeyDictionary = WeakIdKeyDictionary()


def remembered(arrays: Any, key: Any, make: Callable[[], Any]) -> Any:
    """Something made once per planned batch: it goes with the plan's arrays, which an update replaces."""
    kept = _planned.get(arrays.lengths)
    if kept is None:
        kept = _planned[arrays.lengths] = {}
    if key not in kept:
        kept[key] = make()
    return kept[key]


def host_lengths(arrays: Any) -> HostLengths:
    """What the plan read on the host. Arrays that were made for another backend have it not: then the device is waited for, once."""
    if arrays.host is not None:
        found: HostLengths = arrays.host
        return found

    def read() -> HostLengths:
        return HostLengths(*(x.cpu().numpy() for x in (arrays.q_indptr, arrays.kv_lens, arrays.page_begin)))

    lengths: HostLengths = remembered(arrays, "host", read)
    return lengths


def block_tables(arrays: Any, page_size: int, power: bool = False) -> torch.Tensor:
    """(B, pages of the longest request, at least 1) int32 page numbers; past a request's pages, where a table may hold junk, its first.

    ``power``: as many columns as the next power of two, for a library that compiles the width in.
    """

    def make() -> torch.Tensor:
        lens = host_lengths(arrays).kv_lens
        width = max(-(-int(lens.max(initial=0)) // page_size), 1)
        width = 1 << (width - 1).bit_length() if power else width
        column = torch.arange(width, device=arrays.lengths.device)
        used = column < ((arrays.kv_lens + (page_size - 1)) // page_size).unsqueeze(1)
        numbers = arrays.page_indices
        if numbers.shape[0] == 0:
            return torch.zeros(used.shape, dtype=torch.int32, device=used.device)
        place = (arrays.page_begin.unsqueeze(1) + column).clamp_(max=numbers.shape[0] - 1)
        first = torch.where(arrays.kv_lens > 0, numbers[place[:, 0]], 0)
        return torch.where(used, numbers[place], first.unsqueeze(1)).to(torch.int32)

    return remembered(arrays, ("blocks", page_size, power), make)


def longest(arrays: Any) -> tuple[int, int]:
    """(most query rows of a request, most keys of a request), as the plan read them on the host."""
    host = host_lengths(arrays)
    return int((host.starts[1:] - host.starts[:-1]).max(initial=0)), int(host.kv_lens.max(initial=0))


def on_host(p: Any, library: str) -> tuple[bool, str]:
    """A check: libraries plan on the host, and where lengths are on the device, copying them back would wait for it."""
    if p.seq_q is not None and p.max_seq_q is not None and p.seq_k is not None:
        return PASSED
    return False, f"{library} needs the lengths on the host, got them on the device; give seq_lens and q_lens on the host"
