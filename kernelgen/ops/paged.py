"""plan_attention: attention over a paged cache as a plan (lengths, flags) that runs once per layer.

In this release the float64 oracle runs every plan: it reads lengths back to the host, so it cannot be captured in a
CUDA graph. What a call means does not change when kernels join.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import choose, no_backend_error, prepare
from kernelgen.dtypes import dtype_name
from kernelgen.errors import DeviceError, DtypeError, NoBackendError, SettingsError, ShapeError
from kernelgen.ops.attention import Window, check_window
from kernelgen.ops.checks import check_last_contiguous, check_output, check_rank, check_tensors, shape_text
from kernelgen.ops.page_table import Lengths, PageTable, check_starts, index_values
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.reference.checks import check_option
from kernelgen.reference.masks import Variant
from kernelgen.reference.paged import split_cache
from kernelgen.settings import settings
from kernelgen.targets import Target, target_of

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Scale = torch.Tensor | float
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class PagedTensors(NamedTuple):
    """q, out (Tq, Hq, D or Dv); caches (pages, page_size, Hkv, D or Dv) as views; starts (B + 1) of the query rows."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    table: PageTable
    starts: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    scale: float
    soft_cap: float | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    mask: torch.Tensor | None
    q_scale: Scale | None
    k_scale: Scale | None
    v_scale: Scale | None
    variant: Any
    rotation: int | None


class _Lengths:
    """The part of a plan that update() refills: the page table and the query starts, in memory of the plan."""

    def __init__(self, table: PageTable, starts: torch.Tensor) -> None:
        self.table, self.starts = table, starts

    @property
    def rows(self) -> int | None:
        return int(self.starts[-1]) if self.starts.device.type == "cpu" else None


@dataclass(frozen=True, eq=False, repr=False)
class AttentionPlan:
    """Made by :func:`plan_attention`. ``problem`` is what it was made for, ``decision`` what runs it and why."""

    problem: PagedAttentionProblem
    decision: Decision
    device: torch.device
    scale: float
    soft_cap: float | None
    variant: Any
    rotation: int | None
    backend: str
    _lengths: _Lengths

    def run(
        self, q: torch.Tensor, kv_cache: Cache, *, alibi_slopes: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
        mask: torch.Tensor | None = None, q_scale: Scale | None = None, k_scale: Scale | None = None, v_scale: Scale | None = None,
        variant_args: Mapping[str, Any] | None = None, return_lse: bool = False, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """q (Tq, Hq, D) over the cache: out (Tq, Hq, Dv), and with ``return_lse`` the natural-log LSE (Tq, Hq) float32.

        kv_cache  (pages, 2, page_size, Hkv, D) "NHD", (pages, 2, Hkv, page_size, D) "HND", or a pair of 4-D tensors
        alibi_slopes (Hq) or (B, Hq) float32, sinks (Hq) float32, mask (flat bool, or packed bits in uint8, of
                  sum(Sq_b * Sk_b)): given exactly where the plan says so
        k_scale, v_scale   float32, of the plan's kind: scalar, (Hkv), (B, Hkv) or (pages, Hkv); q_scale: scalar, (Hq)
                  or (B, Hq)
        variant_args   replace extra tensors and scalars of the plan's variant by name

        Raises ShapeError, DtypeError, DeviceError, LayoutError; SettingsError where the tensors do not fit the plan's
        flags; NoBackendError for a q that wants a gradient.
        """
        p = self.problem
        k_cache, v_cache = self._check_call(q, kv_cache, alibi_slopes, sinks, mask, k_scale, v_scale, out, lse)
        shape = (q.shape[0], p.num_q_heads, p.head_dim_v)
        if out is None:
            out = torch.empty(shape, dtype=torch.bfloat16 if q.dtype in _FP8 else q.dtype, device=q.device)
        else:
            check_output("out", out, shape, out.dtype if q.dtype in _FP8 else q.dtype, q.device)
        if lse is not None:
            check_output("lse", lse, shape[:2], torch.float32, q.device)
        elif return_lse:
            lse = torch.empty(shape[:2], dtype=torch.float32, device=q.device)
        tensors = PagedTensors(
            q, k_cache, v_cache, self._lengths.table, self._lengths.starts, out, lse, self.scale, self.soft_cap, alibi_slopes,
            sinks, mask, q_scale, k_scale, v_scale, _with_arguments(self.variant, variant_args), self.rotation,
        )
        _, run = prepare(p, target_of(q.device), self.backend, tensors)
        run(tensors)
        return (out, lse) if return_lse and lse is not None else out

    def update(self, page_table: PageTable, q_lens: Lengths | None = None) -> None:
        """Take new lengths and pages of as many requests; ``q_lens`` None keeps the query lengths.

        Raises ShapeError for another batch or page size: make a new plan for these.
        """
        p = self.problem
        _check_table(page_table)
        if (page_table.batch, page_table.page_size) != (p.batch, p.page_size):
            raise ShapeError(
                f"got {page_table}, expected {p.batch} requests with pages of {p.page_size} as planned; make a new plan for others")
        starts = self._lengths.starts if q_lens is None else _query_starts(q_lens, None, p.batch)
        self._lengths.table, self._lengths.starts = page_table.copy(), starts

    def __repr__(self) -> str:
        chosen = self.decision.chosen
        return f"AttentionPlan({self.problem} by {chosen.label if chosen else 'nothing'})"

    def _check_call(
        self, q: torch.Tensor, kv_cache: Cache, alibi_slopes: torch.Tensor | None, sinks: torch.Tensor | None,
        mask: torch.Tensor | None, k_scale: Scale | None, v_scale: Scale | None, out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Check the tensors against the plan; returns the two caches as (pages, page_size, Hkv, D) views."""
        p = self.problem
        if isinstance(kv_cache, list):
            kv_cache = tuple(kv_cache)
        if not isinstance(kv_cache, torch.Tensor) and not (isinstance(kv_cache, tuple) and len(kv_cache) == 2):
            raise ShapeError(f"kv_cache: got {type(kv_cache).__name__}, expected one 5-D tensor or a pair of 4-D tensors")
        parts = (kv_cache, None) if isinstance(kv_cache, torch.Tensor) else kv_cache
        check_tensors(q=q, kv_cache=parts[0], v_cache=parts[1], alibi_slopes=alibi_slopes, sinks=sinks, mask=mask, out=out, lse=lse)
        check_rank("q", q, 3, "(Tq, Hq, D)")
        check_last_contiguous(q=q, kv_cache=parts[0], v_cache=parts[1])
        if q.device != self.device:
            raise DeviceError(f"q is on {q.device}, expected {self.device} as planned; plan with device={str(q.device)!r}")
        if tuple(q.shape[1:]) != (p.num_q_heads, p.head_dim):
            raise ShapeError(f"q: got shape {shape_text(q)}, expected (Tq, {p.num_q_heads}, {p.head_dim}) as planned")
        rows = self._lengths.rows
        if rows is not None and q.shape[0] != rows:
            raise ShapeError(f"q: got {q.shape[0]} rows in {shape_text(q)}, expected {rows}, the sum of the planned query lengths")
        k_cache, v_cache = split_cache(kv_cache, p.kv_layout)
        for name, t, dim in (("k", k_cache, p.head_dim), ("v", v_cache, p.head_dim_v)):
            if tuple(t.shape[1:]) != (p.page_size, p.num_kv_heads, dim):
                raise ShapeError(f"kv_cache: got pages of {tuple(t.shape[1:])} (tokens, heads, head dim) for {name} in layout "
                                 f"{p.kv_layout}, expected ({p.page_size}, {p.num_kv_heads}, {dim}) as planned")
        for name, t, dtype in (("q", q, p.q_dtype), ("kv_cache", k_cache, p.kv_dtype), ("kv_cache", v_cache, p.kv_dtype)):
            if dtype_name(t.dtype) != dtype:
                raise DtypeError(f"{name}: got {t.dtype}, expected {dtype} as planned; nothing is cast silently")
        scales = p.kv_scales is not None
        for name, value, planned, flag in (
            ("alibi_slopes", alibi_slopes, p.alibi, "alibi"), ("sinks", sinks, p.sinks, "sinks"), ("mask", mask, p.mask, "mask"),
            ("k_scale", k_scale, scales, "kv_scales"), ("v_scale", v_scale, scales, "kv_scales"),
        ):
            if value is None and planned:
                raise SettingsError(f"{name}: got none, expected one: the plan was made with {flag}")
            if value is not None and not planned:
                raise SettingsError(f"{name}: got one, expected none: the plan was made without {flag}; give it to plan_attention")
        if mask is not None and mask.dtype != (torch.uint8 if p.mask == "packed" else torch.bool):
            form = "uint8 bits" if p.mask == "packed" else "flat bool"
            raise DtypeError(f"mask: got {mask.dtype}, expected {form} as planned (mask={p.mask!r})")
        if torch.is_grad_enabled() and q.requires_grad:
            raise NoBackendError("paged attention has no gradient: use attention or attention_varlen, or torch.no_grad()")
        return k_cache, v_cache


def plan_attention(
    page_table: PageTable, *, num_q_heads: int, num_kv_heads: int, head_dim: int, head_dim_v: int | None = None,
    q_lens: Lengths | None = None, cu_seqlens_q: Lengths | None = None, q_dtype: torch.dtype, kv_dtype: torch.dtype | None = None,
    kv_layout: str = "NHD", causal: bool = True, window: Window | None = None, scale: float | None = None,
    soft_cap: float | None = None, alibi: bool = False, sinks: bool = False, mask: str | None = None, variant: Any = None,
    kv_scales: str | None = None, rotation: int | None = None, batch_invariant: bool = False, deterministic: bool = True,
    cuda_graph_bounds: Any = None, backend: str = "auto", device: torch.device | str | None = None,
) -> AttentionPlan:
    """A plan for attention over the requests of a page table; ``plan.run(q, kv_cache)`` once per layer.

    Query lengths: ``q_lens`` (B) or ``cu_seqlens_q`` (B + 1), on the host or the device; neither = one query per
    request (decode). ``device``: where q and the cache are, by default where the table's page numbers are.
    ``q_dtype``, ``kv_dtype`` (default: q's): one type, or an fp8 cache under any query type. ``mask``: "dense" (flat
    bool) or "packed" (bits); ``kv_scales``: "tensor", "head", "request_head" or "page"; ``rotation``: Hadamard sign seed
    with which the cached keys were rotated. causal, window, scale, soft_cap, variant: as in ``attention``.

    The plan copies lengths and pages, and takes no other tensor: these are given to run.

    Raises ShapeError, DtypeError, DeviceError, SettingsError; NoBackendError with the table of reasons, also for
    ``cuda_graph_bounds``, which no backend of this release can keep.
    """
    if cuda_graph_bounds is not None:
        raise NoBackendError("got cuda_graph_bounds, but only the reference backend runs paged attention in this release, and it "
                             "reads lengths on the host: it cannot be captured; leave cuda_graph_bounds out and run eagerly")
    problem, starts = _describe(
        page_table, num_q_heads, num_kv_heads, head_dim, head_dim_v, q_lens, cu_seqlens_q, q_dtype, kv_dtype, kv_layout, causal,
        window, soft_cap, alibi, sinks, mask, variant, kv_scales, rotation, batch_invariant, deterministic,
    )
    where = page_table.device if device is None else torch.device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    decision = choose(problem, target_of(where), backend)
    if decision.chosen is None:
        raise no_backend_error(decision, settings().backend if backend == "auto" else backend)
    return AttentionPlan(
        problem, decision, where, head_dim**-0.5 if scale is None else float(scale), float(soft_cap) if soft_cap else None, variant,
        rotation, backend, _Lengths(page_table.copy(), starts),
    )


def explain_paged_attention(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for a plan with the arguments of :func:`plan_attention`, without making it. q_dtype: bfloat16 by default."""
    defaults: dict[str, Any] = {
        "head_dim_v": None, "q_lens": None, "cu_seqlens_q": None, "q_dtype": torch.bfloat16, "kv_dtype": None, "kv_layout": "NHD",
        "causal": True, "window": None, "soft_cap": None, "alibi": False, "sinks": False, "mask": None, "variant": None,
        "kv_scales": None, "rotation": None, "batch_invariant": False, "deterministic": True,
    }
    values = defaults | dict(zip(("page_table",), args)) | kwargs
    for name in ("scale", "device", "cuda_graph_bounds"):  # change no choice
        values.pop(name, None)
    problem, _ = _describe(**values)
    return choose(problem, target, backend, live=live)


def run_reference(problem: PagedAttentionProblem, t: PagedTensors) -> None:
    """The float64 oracle; fills out and lse."""
    from kernelgen import reference

    out, lse = reference.paged_attention(
        t.q, (t.k_cache, t.v_cache), t.table, cu_seqlens_q=t.starts, causal=problem.causal,
        window=problem.window if problem.windowed else None, scale=t.scale, soft_cap=t.soft_cap, alibi_slopes=t.alibi_slopes,
        sinks=t.sinks, mask=t.mask, variant=t.variant, q_scale=t.q_scale, k_scale=t.k_scale, v_scale=t.v_scale,
        kv_scales=problem.kv_scales, rotation=t.rotation, return_lse=True,
    )
    t.out.copy_(out)
    if t.lse is not None:
        t.lse.copy_(lse)


def _describe(
    page_table: PageTable, num_q_heads: int, num_kv_heads: int, head_dim: int, head_dim_v: int | None, q_lens: Lengths | None,
    cu_seqlens_q: Lengths | None, q_dtype: torch.dtype, kv_dtype: torch.dtype | None, kv_layout: str, causal: bool,
    window: Window | None, soft_cap: float | None, alibi: bool, sinks: bool, mask: str | None, variant: Any, kv_scales: str | None,
    rotation: int | None, batch_invariant: bool, deterministic: bool,
) -> tuple[PagedAttentionProblem, torch.Tensor]:
    """Check the plan's arguments; returns the problem and the query starts."""
    _check_table(page_table)
    dv = head_dim if head_dim_v is None else head_dim_v
    for name, size in (("head_dim", head_dim), ("head_dim_v", dv)):
        if size % 8 or not 8 <= size <= 512:
            raise ShapeError(f"{name}: got {size}, expected a multiple of 8 from 8 to 512 (for MLA caches of 576: plan_mla)")
    if num_kv_heads < 1 or num_q_heads < 0 or num_q_heads % num_kv_heads:
        raise ShapeError(f"got num_q_heads={num_q_heads} and num_kv_heads={num_kv_heads}, expected a multiple")
    kv_dtype = q_dtype if kv_dtype is None else kv_dtype
    if q_dtype != kv_dtype and kv_dtype not in _FP8:
        raise DtypeError(f"got q_dtype {q_dtype} and kv_dtype {kv_dtype}, expected one dtype, or an fp8 cache")
    for name, got, legal in (("kv_layout", kv_layout, ("NHD", "HND")), ("mask", mask, (None, "dense", "packed")),
                             ("kv_scales", kv_scales, (None, "tensor", "head", "request_head", "page"))):
        check_option(name, got, legal)
    if kv_scales is not None and kv_dtype not in _FP8:
        raise DtypeError(f"kv_scales: got {kv_scales!r} with a {kv_dtype} cache, expected an fp8 one; leave kv_scales out")
    if soft_cap is not None and not soft_cap >= 0:
        raise SettingsError(f"soft_cap: got {soft_cap}, expected a positive number, or None or 0 for no cap")
    starts = _query_starts(q_lens, cu_seqlens_q, page_table.batch)
    on_host = starts.device.type == "cpu"
    lengths = page_table.host_lengths()
    problem = PagedAttentionProblem(
        batch=page_table.batch, seq_q=int(starts[-1]) if on_host else None,
        max_seq_q=max(starts.diff().tolist(), default=0) if on_host else None, seq_k=None if lengths is None else sum(lengths),
        num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, head_dim_v=dv, page_size=page_table.page_size,
        q_dtype=dtype_name(q_dtype), kv_dtype=dtype_name(kv_dtype), table=page_table.form, kv_layout=kv_layout, causal=bool(causal),
        window=check_window(window), soft_cap=bool(soft_cap), alibi=bool(alibi), sinks=bool(sinks), mask=mask,
        variant=None if variant is None else str(getattr(variant, "name", "custom")), kv_scales=kv_scales,
        rotation=rotation is not None, deterministic=deterministic, batch_invariant=batch_invariant,
    )
    return problem, starts


def _check_table(page_table: PageTable) -> None:
    if not isinstance(page_table, PageTable):
        raise DtypeError(f"page_table: got {type(page_table).__name__}, expected a PageTable, as PageTable.from_blocks makes it")


def _query_starts(q_lens: Lengths | None, cu_seqlens_q: Lengths | None, batch: int) -> torch.Tensor:
    """Own int32 starts (B + 1) of the query rows, where the given lengths are. Host values are checked."""
    if q_lens is not None and cu_seqlens_q is not None:
        raise ShapeError("got q_lens and cu_seqlens_q, expected one of them")
    if cu_seqlens_q is not None:
        name, starts = "cu_seqlens_q", index_values("cu_seqlens_q", cu_seqlens_q).clone()
    elif q_lens is not None:
        lengths = index_values("q_lens", q_lens)
        name, starts = "q_lens", torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    else:
        return torch.arange(batch + 1, dtype=torch.int32)
    if starts.shape[0] != batch + 1:
        raise ShapeError(f"{name}: got {starts.shape[0] - 1} query lengths, expected {batch}, one per request of the page table")
    if starts.device.type == "cpu":
        check_starts(name, starts, None, "")
    return starts


def _with_arguments(variant: Any, arguments: Mapping[str, Any] | None) -> Any:
    """The variant with some of its extra tensors and scalars replaced by name."""
    if not arguments:
        return variant
    if variant is None:
        raise SettingsError(f"variant_args: got {', '.join(arguments)}, expected none: the plan was made without a variant")
    unknown = [name for name in arguments if name not in variant.tensors and name not in variant.scalars]
    if unknown:
        raise SettingsError(f"variant_args: got {', '.join(unknown)}, expected names out of "
                            f"{', '.join([*variant.tensors, *variant.scalars]) or 'an empty list'}")
    tensors, scalars = ({n: arguments.get(n, v) for n, v in values.items()} for values in (variant.tensors, variant.scalars))
    return Variant(variant.score, variant.mask, tensors, scalars)
