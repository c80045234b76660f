"""plan_attention: attention over a paged cache as a plan (lengths, flags) that runs once per layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import choose, no_backend_error, prepare
from kernelgen.dtypes import dtype_name
from kernelgen.errors import DeviceError, DtypeError, KernelgenError, NoBackendError, SettingsError, ShapeError
from kernelgen.guard import (
    ORDINARY,
    check_flags,
    check_plain,
    check_required,
    operator,
    outside_graphs,
    record,
    through_torch,
    watched,
    whole,
)
from kernelgen.kernels.base import OURS, division_of
from kernelgen.library.forms import Copied, plans
from kernelgen.library.written import wrote
from kernelgen.ops.attention import Window, check_sinks, check_soft_cap, check_window
from kernelgen.ops.checks import check_last_contiguous, check_output, check_rank, check_tensors, number, shape_text
from kernelgen.ops.features import FEATURES, AttentionFeatures, check_features
from kernelgen.ops.memo import layout_of, new_memo, remember, unusual
from kernelgen.ops.page_table import Lengths, PageTable
from kernelgen.ops.plan_checks import check_alibi, check_bounds, check_kinds, check_mask_form, check_rows, check_sizes
from kernelgen.ops.planning import (
    Batch,
    GraphBounds,
    Shape,
    check_mask,
    check_pages,
    make_arrays,
    make_bounded_arrays,
    mask_entries,
    page_numbers,
    read_batch,
    refill,
    to_host,
)
from kernelgen.ops.query_lengths import query_starts
from kernelgen.ops.scales import Scale, head_scale, page_scale, split_numbers
from kernelgen.ops.variants import bind_words, check_has_lse, trace_or_name, with_arguments
from kernelgen.problems.common import alignment_of
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.reference.checks import check_option
from kernelgen.reference.paged import split_cache
from kernelgen.reference.rotation import rotate
from kernelgen.settings import settings
from kernelgen.targets import Target, target_of
from kernelgen.tensors import PagedTensors, PlanArrays

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

_decisions = new_memo()
Decided = tuple[Decision, Shape, dict[Any, Callable[..., Any]]]


class State:
    """The part of a plan that update() refills."""

    starts: torch.Tensor | None
    rows: int | None  # of q, where the host knows them
    least_rows: int  # of q within graph bounds
    mask_entries: int | None  # of a ragged mask, where the host knows them

    def __init__(self, arrays: PlanArrays | None, bounds: GraphBounds | None, shape: Shape, key: Any) -> None:
        self.arrays: Any = arrays
        self.bounds = bounds
        self.shape = shape
        self.key = key  # what a prepared run depends on beside layouts

    def fits(self, q: torch.Tensor, mask: torch.Tensor | None) -> bool:
        """A run that was bound for these layouts still covers the lengths of the last update."""
        return q.shape[0] >= self.least_rows and (mask is None or self.mask_entries is None or self.mask_fits(mask))

    def mask_fits(self, mask: torch.Tensor) -> bool:
        entries = self.mask_entries or 0
        needed = -(-entries // 8) if mask.dtype == torch.uint8 else entries
        return mask.shape[0] == needed or (self.bounds is not None and mask.shape[0] > needed)


class _Address:
    """All that a bound kernel asks of a tensor."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


@dataclass(frozen=True, eq=False, repr=False)
class AttentionPlan(Copied):
    """Made by :func:`plan_attention`. ``problem`` is what it was made for, ``decision`` what runs it and why.

    Counts of tokens in ``problem`` are rounded up to powers of two: a choice may depend on no more than that.
    """

    problem: PagedAttentionProblem
    decision: Decision
    device: torch.device
    scale: float
    soft_cap: float | None
    variant: Any
    rotation: int | None
    backend: str
    handle: int  # what graphs know it by
    captured: bool  # its memory stays where it is: a CUDA graph may hold it
    _state: State
    _runs: dict[Any, Callable[..., Any]]

    @operator("attention_run")
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
        plain = (alibi_slopes is None and sinks is None and mask is None and q_scale is None and k_scale is None and v_scale is None
                 and variant_args is None and type(q) in ORDINARY and type(kv_cache) in ORDINARY and not watched())
        if plain and isinstance(kv_cache, torch.Tensor):  # the second for the type checker
            state, address, pages = self._state, q.data_ptr(), kv_cache.data_ptr()
            short = (state.key, state.rows, q.shape, q.stride(), q.dtype, q.device, kv_cache.shape, kv_cache.stride(), kv_cache.dtype,
                     kv_cache.device, (address | pages) & 15, return_lse, None if out is None else layout_of(out, written=True),
                     None if lse is None else layout_of(lse, written=True), q.requires_grad and torch.is_grad_enabled())
            known = self._runs.get(short)
            if (known is not None and address and pages and q.shape[0] >= state.least_rows and not (q.is_neg() or kv_cache.is_neg())
                    and not settings().check):
                return known(state.arrays, q, kv_cache, out, lse)
        elif (watched() or type(q) not in ORDINARY) and through_torch(q):
            return record("attention_run", {"plan": self, **locals()})
        key: Any = None
        if settings().check:
            self._check_contents(kv_cache, mask)
        if variant_args is None and not watched():
            cache = tuple(map(layout_of, kv_cache)) if isinstance(kv_cache, (tuple, list)) else layout_of(kv_cache)
            key = (self._state.key, layout_of(q), cache, layout_of(out, written=True), layout_of(lse, written=True), return_lse,
                   self._state.rows,
                   *(x if x is None or isinstance(x, float) else layout_of(x)
                     for x in (alibi_slopes, sinks, mask, q_scale, k_scale, v_scale)),
                   torch.is_grad_enabled() and isinstance(q, torch.Tensor) and q.requires_grad)
            known = self._runs.get(key)
            if known is not None and self._state.fits(q, mask):
                return known(self._state.arrays, q, kv_cache, alibi_slopes, sinks, mask, q_scale, k_scale, v_scale, out, lse)
        call, quick = self._prepare(q, kv_cache, alibi_slopes, sinks, mask, q_scale, k_scale, v_scale, variant_args, return_lse, out, lse)
        if key is not None:
            remember(self._runs, key, call)
        if plain and quick is not None and not unusual(key):
            remember(self._runs, short, quick)
        return call(self._state.arrays, q, kv_cache, alibi_slopes, sinks, mask, q_scale, k_scale, v_scale, out, lse)

    @outside_graphs("a plan is made and updated")
    def update(self, page_table: PageTable, q_lens: Lengths | None = None) -> None:
        """Take new lengths and pages; ``q_lens`` None: one query per request, or the planned starts if the batch is the same.

        With ``cuda_graph_bounds`` the plan's own memory is refilled, for any batch within the bounds; without, the batch
        stays that of the plan. Raises ShapeError for another page size or batch: make a new plan for these.
        """
        update_plan(self, page_table, q_lens)

    def __repr__(self) -> str:
        chosen = self.decision.chosen
        return f"AttentionPlan({self.problem} by {chosen.label if chosen else 'nothing'})"

    def _prepare(
        self, q: torch.Tensor, kv_cache: Cache, alibi_slopes: torch.Tensor | None, sinks: torch.Tensor | None,
        mask: torch.Tensor | None, q_scale: Scale | None, k_scale: Scale | None, v_scale: Scale | None,
        variant_args: Mapping[str, Any] | None, return_lse: bool, out: torch.Tensor | None, lse: torch.Tensor | None,
    ) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """Check a call, bind what runs it; returns the closure of a repeated call with the same layouts, and a shorter one for a
        plain call, which only passes addresses. Both serve every plan of the same kind, so neither holds on to this one."""
        ours = self.decision.chosen is not None and self.decision.chosen.backend in OURS
        if ours:
            check_plain("plan.run", q=q, kv_cache=kv_cache, out=out, lse=lse)
        p, soft_cap = self.problem, self.soft_cap
        k_cache, v_cache = self._check_call(q, kv_cache, alibi_slopes, sinks, mask, q_scale, k_scale, v_scale)
        out_dtype = out.dtype if out is not None and q.dtype in _FP8 else torch.bfloat16 if q.dtype in _FP8 else q.dtype
        shape = (q.shape[0], p.num_q_heads, p.head_dim_v)
        if out is not None:
            check_output("out", out, shape, out_dtype, q.device)
        if lse is not None:
            check_output("lse", lse, shape[:2], torch.float32, q.device)
        with_lse, with_output = return_lse or lse is not None, not (out is None and lse is None)
        if with_lse:
            check_has_lse(self.variant)
        batch, pages, kind = self._state.arrays.batch, k_cache.shape[0], p.kv_scales
        if alibi_slopes is not None:
            check_alibi(alibi_slopes, batch, p.num_q_heads)
        logit_factor, v_factor, tensors = split_numbers(q_scale, k_scale, v_scale)
        scale, rotation, variant = self.scale * logit_factor, self.rotation, with_arguments(self.variant, variant_args)
        words = bind_words(variant, p.variant, q.device)

        device = self.device

        def seen(name: str, value: Scale | None) -> torch.Tensor | None:
            if kind == "page":
                return page_scale(name, value, pages, p.num_kv_heads, device)
            return head_scale(name, value, batch, p.num_kv_heads, device, kind)

        layout = p.kv_layout

        def gather(
            arrays: PlanArrays, q: torch.Tensor, kv_cache: Cache, alibi_slopes: torch.Tensor | None, sinks: torch.Tensor | None,
            mask: torch.Tensor | None, q_scale: Scale | None, k_scale: Scale | None, v_scale: Scale | None,
            out: torch.Tensor | None, lse: torch.Tensor | None,
        ) -> PagedTensors:
            k_cache, v_cache = split_cache(kv_cache, layout)
            if out is None:
                out = torch.empty(shape, dtype=out_dtype, device=q.device)
            if lse is None and with_lse:
                lse = torch.empty(shape[:2], dtype=torch.float32, device=q.device)
            if ours and rotation is not None:
                q = rotate(q, rotation, compute_dtype=torch.float32).to(q.dtype)
            return PagedTensors(
                q, k_cache, v_cache, arrays, out, lse, scale, soft_cap,
                None if alibi_slopes is None else alibi_slopes.expand(batch, -1),
                sinks, mask, head_scale("q_scale", q_scale, batch, p.num_q_heads, q.device) if tensors[0] else None,
                seen("k_scale", k_scale) if tensors[1] else None, seen("v_scale", v_scale) if tensors[2] else None, v_factor, words,
                variant=variant, rotation=None if ours else rotation,
            )

        first = gather(self._state.arrays, q, kv_cache, alibi_slopes, sinks, mask, q_scale, k_scale, v_scale, out, lse)
        problem = replace(
            p, q_scale=first.q_scale is not None, return_lse=with_lse, out_dtype=dtype_name(first.out.dtype),
            kv_scales=p.kv_scales if first.k_scale is not None or first.v_scale is not None else None,
            alignment=alignment_of(first.q, first.k_cache, first.v_cache, first.out),
        )
        run = bind_run(self, problem, first)

        def call(*given: Any) -> Any:
            t = gather(*given)
            run(t)
            if with_output:
                wrote(*given[-2:])
            return (t.out, t.lse) if return_lse else t.out

        same, behind = out_dtype == q.dtype, first.v_cache.data_ptr() - first.k_cache.data_ptr()

        def quick(arrays: PlanArrays, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None) -> Any:
            if out is None:
                out = q.new_empty(shape) if same else q.new_empty(shape, dtype=out_dtype)
            else:
                wrote(out)
            if lse is not None:
                wrote(lse)
            elif with_lse:
                lse = q.new_empty(shape[:2], dtype=torch.float32)
            values: Any = _Address(cache.data_ptr() + behind)
            run(PagedTensors(q, cache, values, arrays, out, lse, scale, soft_cap))
            return (out, lse) if return_lse else out

        fits = ours and rotation is None and words is None and isinstance(kv_cache, torch.Tensor)
        return call, quick if fits else None

    def _check_contents(self, kv_cache: Cache, mask: torch.Tensor | None) -> None:
        arrays, first = self._state.arrays, kv_cache if isinstance(kv_cache, torch.Tensor) else kv_cache[0]
        check_pages(arrays, self.problem.page_size, first.shape[0])
        if mask is not None and arrays.mask_indptr is not None and self._state.mask_entries is None:
            check_mask(mask, arrays.mask_indptr)

    def _check_call(
        self, q: torch.Tensor, kv_cache: Cache, alibi_slopes: torch.Tensor | None, sinks: torch.Tensor | None,
        mask: torch.Tensor | None, q_scale: Scale | None, k_scale: Scale | None, v_scale: Scale | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Check the tensors against the plan; returns the two caches as (pages, page_size, Hkv, D) views."""
        p = self.problem
        check_required(q=q)
        if isinstance(kv_cache, list):
            kv_cache = tuple(kv_cache)
        if not isinstance(kv_cache, torch.Tensor) and not (isinstance(kv_cache, tuple) and len(kv_cache) == 2):
            raise ShapeError(f"kv_cache: got {type(kv_cache).__name__}, expected one 5-D tensor or a pair of 4-D tensors")
        parts = (kv_cache, None) if isinstance(kv_cache, torch.Tensor) else kv_cache
        if isinstance(kv_cache, tuple):
            check_required(kv_cache=kv_cache[0], v_cache=kv_cache[1])
        check_tensors(q=q, kv_cache=parts[0], v_cache=parts[1], alibi_slopes=alibi_slopes, sinks=sinks, mask=mask)
        check_rank("q", q, 3, "(Tq, Hq, D)")
        check_last_contiguous(q=q, kv_cache=parts[0], v_cache=parts[1])
        if q.device != self.device:
            raise DeviceError(f"q is on {q.device}, expected {self.device} as planned; plan with device={str(q.device)!r}")
        if tuple(q.shape[1:]) != (p.num_q_heads, p.head_dim):
            raise ShapeError(f"q: got shape {shape_text(q)}, expected (Tq, {p.num_q_heads}, {p.head_dim}) as planned")
        check_rows("q", q, self._state)
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
        if q_scale is not None and q.dtype not in _FP8:
            raise DtypeError(f"q_scale: got one for {q.dtype}, expected an fp8 q; leave q_scale out")
        if sinks is not None:
            check_sinks(sinks, p.num_q_heads)
        if mask is not None:
            check_mask_form(mask, p.mask, self._state)
        if torch.is_grad_enabled() and q.requires_grad:
            raise NoBackendError("paged attention has no gradient: use attention or attention_varlen, or torch.no_grad()")
        return k_cache, v_cache


@outside_graphs("a plan is made and updated")
def plan_attention(
    page_table: PageTable, *, num_q_heads: int, num_kv_heads: int, head_dim: int, head_dim_v: int | None = None,
    q_lens: Lengths | None = None, cu_seqlens_q: Lengths | None = None, q_dtype: torch.dtype, kv_dtype: torch.dtype | None = None,
    kv_layout: str = "NHD", causal: bool = True, window: Window | None = None, scale: float | None = None,
    soft_cap: float | None = None, alibi: bool = False, sinks: bool = False, mask: str | None = None, variant: Any = None,
    kv_scales: str | None = None, rotation: int | None = None, batch_invariant: bool = False, deterministic: bool = True,
    cuda_graph_bounds: Any = None, backend: str = "auto", device: torch.device | str | None = None,
    features: AttentionFeatures | None = None,
) -> AttentionPlan:
    """A plan for attention over the requests of a page table; ``plan.run(q, kv_cache)`` once per layer.

    Query lengths: ``q_lens`` (B) or ``cu_seqlens_q`` (B + 1), on the host or the device; neither = one query per
    request (decode). ``device``: where q and the cache are, by default where the table's page numbers are.
    ``q_dtype``, ``kv_dtype`` (default: q's): one type, or an fp8 cache under any query type. ``mask``: "dense" (flat
    bool) or "packed" (bits); ``kv_scales``: "tensor", "head", "request_head" or "page"; ``rotation``: Hadamard sign seed
    with which the cached keys were rotated. causal, window, scale, soft_cap, variant: as in ``attention``.
    ``features`` (:class:`AttentionFeatures`, with presets for families of models): causal .. batch_invariant in one object; one of
    these arguments beside it, at another value than its default, is an error.

    The plan copies lengths. Page numbers stay where the table has them: leave those of used pages unchanged until the runs are
    done (with ``cuda_graph_bounds`` they are copied). Every other tensor is given to run.

    ``cuda_graph_bounds`` (:class:`GraphBounds`): the plan may be captured in a CUDA graph and updated within them; its
    memory is allocated for them at once.

    Raises ShapeError, DtypeError, DeviceError, SettingsError; NoBackendError with the table of reasons.
    """
    if features is not None:
        layer = check_features(features)
        causal, window, scale, soft_cap, alibi, sinks, mask, variant, kv_scales, rotation, batch_invariant = layer.beside(
            causal=causal, window=window, scale=scale, soft_cap=soft_cap, alibi=alibi, sinks=sinks, mask=mask, variant=variant,
            kv_scales=kv_scales, rotation=rotation, batch_invariant=batch_invariant)
    check_table(page_table)
    check_bounds(cuda_graph_bounds)
    where = plan_device(page_table, device)
    batch = read_batch(page_table, query_starts(q_lens, cu_seqlens_q, page_table.batch))
    key: Any = None
    if not isinstance(window, list):
        traced = None if variant is None else trace_or_name(variant, backend, sinks=sinks)
        key = (size_classes(batch, cuda_graph_bounds), where, num_q_heads, num_kv_heads, head_dim, head_dim_v, q_dtype, kv_dtype,
               kv_layout, causal, window, soft_cap, alibi, sinks, mask, traced, kv_scales, rotation is None, batch_invariant, deterministic,
               backend)
    known = _decisions.get(key) if key is not None else None
    if known is None:
        problem = _describe(
            batch, num_q_heads, num_kv_heads, head_dim, head_dim_v, q_dtype, kv_dtype, kv_layout, causal, window, soft_cap, alibi, sinks,
            mask, variant, kv_scales, rotation, batch_invariant, deterministic, backend, cuda_graph_bounds,
        )
        known = decide(problem, where, backend)
        if key is not None:
            remember(_decisions, key, known)
    if rotation is not None:
        rotation = check_rotation(rotation)
    if variant is not None:  # prepared runs hold its tensors and scalars
        known = (*known[:2], {})
    return start_plan(AttentionPlan, known, batch, where, cuda_graph_bounds, soft_cap=float(soft_cap) if soft_cap else None,
                      scale=head_dim**-0.5 if scale is None else number("scale", scale), variant=variant, rotation=rotation,
                      backend=backend)


def check_rotation(seed: Any) -> int:
    if (value := whole(seed)) is None:
        raise SettingsError(f"rotation: got {seed!r}, expected a whole number, the seed of the signs")
    return value


def plan_device(table: PageTable, device: torch.device | str | None) -> torch.device:
    """Where q and the cache of a plan are."""
    if device is None:
        return table.device
    where = torch.device(device)
    if where.type != "cuda" or where.index is not None:
        return where
    if not torch.cuda.is_available():
        raise DeviceError("device: got 'cuda', expected a device that is there: torch finds no GPU")
    return torch.device("cuda", torch.cuda.current_device())


def decide(problem: PagedAttentionProblem, device: torch.device, backend: str) -> Decided:
    """The decision for a plan, how its arrays are cut, and room for the runs of plans of this kind.

    Raises NoBackendError where nothing can run it.
    """
    decision = choose(problem, target_of(device), backend)
    if decision.chosen is None:
        raise no_backend_error(decision, settings().backend if backend == "auto" else backend)
    p = problem
    return decision, Shape(p.group_size, p.num_kv_heads, p.head_dim_v, p.mask is not None, division_of(decision)), {}


def update_plan(plan: Any, page_table: PageTable, q_lens: Lengths | None) -> None:
    """Take new lengths and pages into an AttentionPlan or MLAPlan."""
    p, state = plan.problem, plan._state
    check_table(page_table)
    batch = state.arrays.batch
    fits = page_table.batch <= batch if state.bounds else page_table.batch == batch
    if not fits or page_table.page_size != p.page_size:
        raise ShapeError(
            f"got {page_table}, expected {batch} requests with pages of {p.page_size} as planned; make a new plan for others")
    if p.one_page and not page_table.one_page:
        raise ShapeError(f"got {page_table}, expected one page per request, a block table (B, 1), as planned; make a new plan for others")
    planned = q_lens is None and page_table.batch == batch
    starts = state.starts if planned else query_starts(q_lens, None, page_table.batch)
    _set_lengths(plan, read_batch(page_table, starts))


def bind_run(plan: Any, problem: PagedAttentionProblem, first: PagedTensors) -> Callable[[PagedTensors], Any]:
    """What runs the plan's problem, now that layouts are known. The plan's items must be those that it expects."""
    # The plan's own target: on a CPU the number of threads, which may have changed since, decides how a batch is cut.
    # and its own backend: what "auto" would take now may have been measured since, for another cut.
    chosen = plan.decision.chosen
    auto = plan.backend == "auto" and settings().backend == "auto"
    decision, run = prepare(problem, plan.decision.target, plan.backend if chosen is None else chosen.backend, first,
                            planned=plan.problem if auto else None)
    planned, needed = plan._state.shape.division, division_of(decision)
    if needed is not None and needed != planned:
        raise KernelgenError(f"{decision.chosen} cuts a batch by {needed}, the plan was cut by {planned}: please report {problem}")
    return run


def check_graph_bounds(decision: Decision, bounds: GraphBounds | None) -> None:
    """Only a kernel that reads the plan's arrays can be captured."""
    chosen = decision.chosen
    if bounds is not None and chosen is not None and chosen.backend not in OURS:
        raise NoBackendError(f"got cuda_graph_bounds, but {chosen.label} runs this plan: it reads lengths on the host and cannot be "
                             f"captured; leave cuda_graph_bounds out\n{decision}")


def start_plan(
    make: Any, decided: Decided, batch: Batch, device: torch.device, bounds: GraphBounds | None, **fields: Any,
) -> Any:
    """A plan of class ``make`` for a decision, with its arrays filled."""
    (decision, shape, runs), arrays = decided, None
    if bounds is not None:
        check_graph_bounds(decision, bounds)
        arrays = make_bounded_arrays(batch.size, bounds, page_numbers(batch.table).numel(), shape, device)
    state = State(arrays, bounds, shape, (fields["scale"], fields.get("soft_cap"), fields.get("rotation"), batch.size))
    plan = object.__new__(make)
    # What the frozen class's __init__ would do, one guarded assignment per field, at a fifth of its time.
    plan.__dict__.update(fields, problem=decision.problem, decision=decision, device=device, _state=state, _runs=runs,
                         handle=plans.add(plan), captured=bounds is not None)
    _set_lengths(plan, batch)
    return plan


def _set_lengths(plan: Any, batch: Batch) -> None:
    """Fill a plan's arrays, on the device where lengths are there and a kernel can plan them.

    A batch that does not fit raises before anything of the plan's state has changed.
    """
    state = plan._state
    shape, bounds = state.shape, state.bounds
    if bounds is None and batch.table.device != plan.device:
        raise DeviceError(f"page_table: got page numbers on {batch.table.device}, expected {plan.device}, where q and the cache are; "
                          "move them with .to()")
    starts = batch.starts
    if not batch.on_host:
        if plan.decision.chosen.backend in OURS and plan.device.type == "cuda":
            from kernelgen.kernels.attention.plan_cuda import plan_on_device

            state.arrays = plan_on_device(batch, shape, plan.device, bounds, state.arrays if bounds else None)
            state.starts, state.rows, state.least_rows, state.mask_entries = starts, batch.rows, 0, None
            return
        batch = to_host(batch)
    if bounds is None:
        state.arrays = make_arrays(batch, shape, plan.device)
    else:
        refill(state.arrays, batch, bounds, shape)
    # With bounds, rows past the batch's last are left unwritten.
    state.starts, state.rows, state.least_rows = starts, None if bounds else batch.rows, batch.rows if bounds else 0
    state.mask_entries = mask_entries(batch) if shape.mask else None


def explain_paged_attention(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for a plan with the arguments of :func:`plan_attention`, without making it. q_dtype: bfloat16 by default."""
    defaults: dict[str, Any] = {
        "head_dim_v": None, "q_lens": None, "cu_seqlens_q": None, "q_dtype": torch.bfloat16, "kv_dtype": None, "kv_layout": "NHD",
        "causal": True, "window": None, "soft_cap": None, "alibi": False, "sinks": False, "mask": None, "variant": None,
        "kv_scales": None, "rotation": None, "batch_invariant": False, "deterministic": True,
    }
    features = kwargs.pop("features", None)
    if features is not None:
        given = {name: kwargs[name] for name in FEATURES if name in kwargs}
        kwargs |= dict(zip(FEATURES, check_features(features).beside(**given)))
    values = defaults | dict(zip(("page_table",), args)) | kwargs
    for name in ("scale", "device"):  # change no choice
        values.pop(name, None)
    table, bounds = values.pop("page_table"), values.pop("cuda_graph_bounds", None)
    check_table(table)
    batch = read_batch(table, query_starts(values.pop("q_lens"), values.pop("cu_seqlens_q"), table.batch))
    return choose(_describe(batch, **values, backend=backend, bounds=bounds), target, backend, live=live)


def _describe(
    batch: Batch, num_q_heads: int, num_kv_heads: int, head_dim: int, head_dim_v: int | None, q_dtype: torch.dtype,
    kv_dtype: torch.dtype | None, kv_layout: str, causal: bool, window: Window | None, soft_cap: float | None, alibi: bool, sinks: bool,
    mask: str | None, variant: Any, kv_scales: str | None, rotation: int | None, batch_invariant: bool, deterministic: bool, backend: str,
    bounds: GraphBounds | None = None,
) -> PagedAttentionProblem:
    """Check the plan's arguments."""
    dv = head_dim if head_dim_v is None else head_dim_v
    num_q_heads, num_kv_heads, head_dim, dv = check_sizes(num_q_heads, num_kv_heads, head_dim, dv)
    check_flags(causal=causal, alibi=alibi, sinks=sinks, batch_invariant=batch_invariant, deterministic=deterministic)
    kv_dtype = q_dtype if kv_dtype is None else kv_dtype
    if q_dtype != kv_dtype and kv_dtype not in _FP8:
        raise DtypeError(f"got q_dtype {q_dtype} and kv_dtype {kv_dtype}, expected one dtype, or an fp8 cache")
    check_option("kv_layout", kv_layout, ("NHD", "HND"))
    check_kinds(mask, kv_scales)
    if kv_scales is not None and kv_dtype not in _FP8:
        raise DtypeError(f"kv_scales: got {kv_scales!r} with a {kv_dtype} cache, expected an fp8 one; leave kv_scales out")
    check_soft_cap(soft_cap)
    return PagedAttentionProblem(
        **size_classes(batch, bounds)._asdict(), num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, head_dim_v=dv,
        q_dtype=dtype_name(q_dtype), kv_dtype=dtype_name(kv_dtype), kv_layout=kv_layout, causal=bool(causal),
        window=check_window(window), soft_cap=bool(soft_cap), alibi=bool(alibi), sinks=bool(sinks), mask=mask,
        variant=trace_or_name(variant, backend, sinks=sinks), kv_scales=kv_scales, rotation=rotation is not None,
        deterministic=bool(deterministic), batch_invariant=bool(batch_invariant),
    )


def check_table(page_table: PageTable) -> None:
    if not isinstance(page_table, PageTable):
        raise DtypeError(f"page_table: got {type(page_table).__name__}, expected a PageTable, as PageTable.from_blocks makes it")


class SizeClasses(NamedTuple):
    """The fields of a problem that come from lengths and pages."""

    batch: int
    seq_q: int | None
    max_seq_q: int | None
    seq_k: int | None
    page_size: int
    table: str
    one_page: bool


def size_classes(batch: Batch, bounds: GraphBounds | None = None) -> SizeClasses:
    """Counts are rounded up to powers of two, so that few plans need a decision of their own.

    What is compiled in must hold for every update within ``bounds``.
    """
    table, size = batch.table, batch.size
    page_size = table.page_size
    one_page = table.width == 1 and (bounds is None or bounds.max_seq_k <= page_size)
    return SizeClasses(_class(size), _class(batch.rows), _class(batch.max_q), _class(batch.keys), page_size, table.form, one_page)


def _class(count: int | None) -> Any:
    return 1 << (count - 1).bit_length() if count else count
