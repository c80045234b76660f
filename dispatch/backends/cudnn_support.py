"""What cuDNN's attention takes, by the version that is found: rules as data, and where the version comes from."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kernelgen.dispatch.backends.wrapped import (
    HALVES,
    INT32,
    PASSED,
    aligned,
    on_cuda,
    on_host,
    ordinary,
    refused,
    sizes,
    window_of,
)
from kernelgen.dispatch.libraries import Library
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

LIBRARY = Library("cudnn", "nvidia-cudnn-frontend", at_least="1.14.0", checked="1.32.0")
CHECKED_BACKEND = 91900
NAME = "cuDNN"
_TAKEN = ("ragged", "window", "window_right", "sinks", "kv_lens", "lse")


def words_of(version: int) -> str:
    """ "9.19.0" of 91900, "8.9.7" of 8907."""
    major, rest = divmod(version, 10_000 if version >= 10_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


@cache
def _found_backend() -> tuple[int, str]:
    if torch.backends.cudnn.is_available():
        try:
            return torch.backends.cudnn.version() or 0, ""
        except RuntimeError as error:  # a library that does not load, or not the one that torch was built for
            return 0, str(error).splitlines()[0]
    for distribution in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            parts = [int(x) for x in importlib.metadata.version(distribution).split(".")[:3]]
        except (importlib.metadata.PackageNotFoundError, ValueError):
            continue
        return parts[0] * 10_000 + parts[1] * 100 + parts[2], ""
    return 0, "libcudnn.so.9 is not there: torch has none, and no nvidia-cudnn package is installed"


def backend_version() -> tuple[int, str]:
    """(91900 for cuDNN 9.19.0, ""), or (0, why the library cannot be had). Asks torch, which has it loaded, or package metadata."""
    return _found_backend()


def forget() -> None:
    """Look again (tests)."""
    _found_backend.cache_clear()


@dataclass(frozen=True)
class Since:
    """What needs cuDNN ``version`` where ``when`` holds (support surface of the frontend 1.32 and its release notes)."""

    version: int
    words: str
    when: Callable[[Any, Target], bool]


def _paged(p: Any) -> bool:
    return p.op == "paged_attention"


def _ragged(p: Any) -> bool:
    return getattr(p, "layout", "") == "ragged" or (_paged(p) and (p.max_seq_q or 0) > 1)


def _bounded(p: Any) -> bool:
    """A diagonal with keys to its right hidden."""
    return window_of(p, None)[1] is not None


def _largest_dim(p: Any) -> int:
    return max(p.head_dim, p.head_dim_v)


SINCE = (
    Since(90000, "attention as this adapter asks for it", lambda p, target: True),
    Since(90500, "paged caches", lambda p, target: _paged(p)),
    Since(90700, "paged caches with several queries of a request", lambda p, target: _paged(p) and _ragged(p)),
    Since(91801, "ragged requests below sm_90", lambda p, target: _ragged(p) and target.capability < 90),
    Since(90600, "a bottom-right diagonal of any lengths", lambda p, target: _bounded(p)),
    Since(90901, "one query with a diagonal", lambda p, target: _bounded(p) and p.seq_q == 1),
    Since(90901, "head dims above 128 with a paged cache", lambda p, target: _paged(p) and _largest_dim(p) > 128),
    Since(90901, "head dims above 128 on sm_80", lambda p, target: target.capability < 90 and _largest_dim(p) > 128),
    Since(90901, "a window on sm_90", lambda p, target: p.window[0] is not None and target.capability == 90),
    Since(91002, "a window that does not end at the diagonal", lambda p, target: p.windowed and not p.causal),
    Since(91300, "sinks", lambda p, target: p.sinks),
)
# Releases that the frontend itself refuses for their faults.
BROKEN = (91000, 91001)
MOST_DIM = {80: 256, 86: 256, 89: 256, 90: 256, 100: 128, 103: 128}


def _versions(p: Any, target: Target, version: int) -> Iterator[tuple[bool, str]]:
    found = words_of(version)
    yield version not in BROKEN, f"cuDNN {found} has faults in attention that its frontend refuses; needs 9.10.2 or later"
    for rule in SINCE:
        yield version >= rule.version or not rule.when(p, target), (
            f"cuDNN {found} is too old for {rule.words}: needs {words_of(rule.version)} or later")
    yield not (version == 91400 and p.windowed and not p.causal and (p.seq_k or 0) > 1024), (
        f"cuDNN {found} is wrong for a window without causal over more than 1024 keys, got {p.seq_k}")


def supports(p: Any, target: Target, version: int) -> Verdict:
    """Attention and paged attention by cuDNN ``version``."""
    most, paged = MOST_DIM.get(target.capability, 0), _paged(p)
    dims, out = (p.head_dim, p.head_dim_v), p.out_dtype or p.q_dtype
    return first_no(
        on_cuda(target, NAME, tuple(MOST_DIM)),
        *_versions(p, target, version),
        (p.q_dtype not in ("e4m3", "e5m2"), f"{NAME} attends fp8 queries to a 16-bit output on Blackwell only, and this adapter has no fp8 "
         f"form; got {p.q_dtype} on {target}"),
        (p.q_dtype in HALVES and p.q_dtype == p.kv_dtype == out, f"{NAME} takes one of {', '.join(HALVES)} for q, k, v and out, got "
         f"{p.q_dtype}/{p.kv_dtype} to {out}"),
        refused(p, NAME, _TAKEN),
        (all(8 <= d <= most and d % 8 == 0 for d in dims) or (dims == (192, 128) and target.capability >= 100),
         f"{NAME} takes head dims in multiples of 8 up to {most} on {target}, got {dims[0]}/{dims[1]}"),
        (not paged or p.page_size == 1, f"{NAME} may read slots of a page that no request uses, and a NaN there reaches its result: only "
         f"pages of one token have none, got {p.page_size if paged else 0}"),
        (not (p.sinks and (p.max_seq_q if paged else p.seq_q) == 1), f"{NAME} has no sinks for one query per request"),
        aligned(p, NAME),
        on_host(p, NAME) if paged else PASSED, ordinary(p, NAME),
        # Offsets of ragged rows are 32-bit numbers of elements.
        sizes(p, NAME, elements=INT32 if _ragged(p) else 2**63),
    )
