"""plan_mla: multi-head latent attention in its absorbed form over a paged latent cache (DeepSeek-V2, section 2.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import choose
from kernelgen.dtypes import dtype_name
from kernelgen.errors import DeviceError, DtypeError, NoBackendError, SettingsError, ShapeError
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
from kernelgen.library.forms import Copied
from kernelgen.library.written import wrote
from kernelgen.ops.checks import check_last_contiguous, check_output, check_rank, check_tensors, number, shape_text
from kernelgen.ops.features import AttentionFeatures, check_features
from kernelgen.ops.memo import layout_of, new_memo, remember
from kernelgen.ops.page_table import Lengths, PageTable
from kernelgen.ops.paged import (
    State,
    bind_run,
    check_table,
    decide,
    plan_device,
    size_classes,
    start_plan,
    update_plan,
)
from kernelgen.ops.plan_checks import check_bounds, check_rows
from kernelgen.ops.planning import Batch, GraphBounds, check_pages, read_batch
from kernelgen.ops.query_lengths import query_starts
from kernelgen.ops.scales import Scale, head_scale, page_scale
from kernelgen.problems.common import alignment_of
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.reference.checks import check_option
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.tensors import PagedTensors, PlanArrays

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_OF_FEATURES = ("causal", "scale", "kv_scales", "batch_invariant")
_decisions = new_memo()


@dataclass(frozen=True, eq=False, repr=False)
class MLAPlan(Copied):
    """Made by :func:`plan_mla`; fields as in AttentionPlan."""

    problem: PagedAttentionProblem
    decision: Decision
    device: torch.device
    scale: float
    backend: str
    handle: int
    captured: bool
    _state: State
    _runs: dict[Any, Callable[..., Any]]

    @operator("mla_run")
    def run(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, ckv_cache: torch.Tensor, k_rope_cache: torch.Tensor | None = None, *,
        k_scale: Scale | None = None, return_lse: bool = False, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """softmax(scale * (q_nope ckv^T + q_rope k_rope^T)) ckv: out (Tq, Hq, R), and with ``return_lse`` LSE (Tq, Hq).

        q_nope (Tq, Hq, R), q_rope (Tq, Hq, P); ckv_cache (pages, page_size, R) with k_rope_cache (pages, page_size, P), or
        one (pages, page_size, R + P) tensor. Beside an fp8 ckv_cache, k_rope_cache may have the dtype of q. k_scale float32, of the
        fp8 parts of the cache: scalar, (B, 1) or (pages, 1) as planned.
        Raises ShapeError, DtypeError, DeviceError, LayoutError; NoBackendError for a q that wants a gradient.
        """
        if (watched() or type(q_nope) not in ORDINARY) and through_torch(q_nope):
            return record("mla_run", {"plan": self, **locals()})
        state = self._state
        if settings().check:
            check_pages(state.arrays, self.problem.page_size, ckv_cache.shape[0])
        key: Any = None
        if not watched():
            key = (state.key, *map(layout_of, (q_nope, q_rope, ckv_cache, k_rope_cache)), layout_of(out, written=True),
                   layout_of(lse, written=True), return_lse, state.rows,
                   k_scale if k_scale is None or isinstance(k_scale, float) else layout_of(k_scale),
                   torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in (q_nope, q_rope)))
            known = self._runs.get(key)
            if known is not None and q_nope.shape[0] >= state.least_rows:
                return known(state.arrays, q_nope, q_rope, ckv_cache, k_rope_cache, k_scale, out, lse)
        call = self._prepare(q_nope, q_rope, ckv_cache, k_rope_cache, k_scale, return_lse, out, lse)
        if key is not None:
            remember(self._runs, key, call)
        return call(state.arrays, q_nope, q_rope, ckv_cache, k_rope_cache, k_scale, out, lse)

    @outside_graphs("a plan is made and updated")
    def update(self, page_table: PageTable, q_lens: Lengths | None = None) -> None:
        """As AttentionPlan.update."""
        update_plan(self, page_table, q_lens)

    def __repr__(self) -> str:
        chosen = self.decision.chosen
        return f"MLAPlan({self.problem} by {chosen.label if chosen else 'nothing'})"

    def _prepare(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, ckv_cache: torch.Tensor, k_rope_cache: torch.Tensor | None,
        k_scale: Scale | None, return_lse: bool, out: torch.Tensor | None, lse: torch.Tensor | None,
    ) -> Callable[..., Any]:
        """Check a call, bind what runs it; returns the closure of a repeated call with the same layouts. It serves every plan of the
        same kind, so it does not hold on to this one."""
        p, batch = self.problem, self._state.arrays.batch
        latent = p.head_dim_v
        if self.decision.chosen is not None and self.decision.chosen.backend == "generated":
            check_plain("plan.run", q_nope=q_nope, q_rope=q_rope, ckv_cache=ckv_cache, k_rope_cache=k_rope_cache, out=out, lse=lse)
        _check_call(self, q_nope, q_rope, ckv_cache, k_rope_cache)
        if k_scale is not None and ckv_cache.dtype not in _FP8:
            raise DtypeError(f"k_scale: got one for a cache of {ckv_cache.dtype}, expected an fp8 cache")
        if (k_scale is None) != (p.kv_scales is None):
            got, expected = ("none", "one") if k_scale is None else ("one", "none")
            raise SettingsError(f"k_scale: got {got}, expected {expected}: the plan was made with kv_scales={p.kv_scales!r}; give its "
                                "kind to plan_mla")
        pages = ckv_cache.shape[0]
        shape = (q_nope.shape[0], p.num_q_heads, latent)
        out_dtype = out.dtype if out is not None and q_nope.dtype in _FP8 else torch.bfloat16 if q_nope.dtype in _FP8 else q_nope.dtype
        if out is not None:
            check_output("out", out, shape, out_dtype, q_nope.device)
        if lse is not None:
            check_output("lse", lse, shape[:2], torch.float32, q_nope.device)
        with_lse, with_output = return_lse or lse is not None, not (out is None and lse is None)
        # One scale serves keys and values, as the values are the latent part of the keys. A number is folded into the scale of the
        # logits, but beside a rope part that is not fp8 and has no scale: there it is a factor of the latent products alone.
        factor = 1.0 if k_scale is None or isinstance(k_scale, torch.Tensor) else number("k_scale", k_scale)
        plain_rope = k_rope_cache is not None and k_rope_cache.dtype not in _FP8
        logit_factor, k_factor = (1.0, factor) if plain_rope else (factor, 1.0)

        logit_scale = self.scale * logit_factor

        def gather(arrays: PlanArrays, q_nope: torch.Tensor, q_rope: torch.Tensor, ckv: torch.Tensor, k_rope: torch.Tensor | None,
                   k_scale: Scale | None, out: torch.Tensor | None, lse: torch.Tensor | None) -> PagedTensors:
            if k_rope is None:
                ckv, k_rope = ckv[..., :latent], ckv[..., latent:]
            if p.kv_scales == "page":
                scale = page_scale("k_scale", k_scale, pages, 1, q_nope.device)
            else:
                scale = head_scale("k_scale", k_scale, batch, 1, q_nope.device, p.kv_scales)
            return PagedTensors(
                q_nope, ckv.unsqueeze(2), ckv.unsqueeze(2), arrays,
                torch.empty(shape, dtype=out_dtype, device=q_nope.device) if out is None else out,
                torch.empty(shape[:2], dtype=torch.float32, device=q_nope.device) if lse is None and with_lse else lse,
                logit_scale, k_scale=scale, v_scale=scale, v_factor=factor, q_rope=q_rope, k_rope_cache=k_rope.unsqueeze(2),
                k_factor=k_factor,
            )

        first = gather(self._state.arrays, q_nope, q_rope, ckv_cache, k_rope_cache, k_scale, out, lse)
        assert first.k_rope_cache is not None
        problem = replace(
            p, return_lse=with_lse, out_dtype=dtype_name(first.out.dtype), kv_scales=p.kv_scales if first.k_scale is not None else None,
            rope_dtype=dtype_name(first.k_rope_cache.dtype),
            alignment=alignment_of(first.q, first.q_rope, first.k_cache, first.k_rope_cache, first.out),
        )
        run = bind_run(self, problem, first)

        def call(*given: Any) -> Any:
            t = gather(*given)
            run(t)
            if with_output:
                wrote(*given[-2:])
            return (t.out, t.lse) if return_lse else t.out

        return call


def _check_call(plan: MLAPlan, q_nope: torch.Tensor, q_rope: torch.Tensor, ckv: torch.Tensor, k_rope: torch.Tensor | None) -> None:
    p = plan.problem
    latent, rope = p.head_dim_v, p.rope_dim
    check_required(q_nope=q_nope, q_rope=q_rope, ckv_cache=ckv)
    check_tensors(q_nope=q_nope, q_rope=q_rope, ckv_cache=ckv, k_rope_cache=k_rope)
    check_rank("q_nope", q_nope, 3, "(Tq, Hq, R)")
    check_rank("ckv_cache", ckv, 3, "(pages, page_size, R)")
    check_last_contiguous(q_nope=q_nope, q_rope=q_rope, ckv_cache=ckv, k_rope_cache=k_rope)
    if q_nope.device != plan.device:
        raise DeviceError(f"q_nope is on {q_nope.device}, expected {plan.device} as planned")
    width = latent if k_rope is not None else latent + rope
    check_rows("q_nope", q_nope, plan._state)
    rows = q_nope.shape[0]
    for name, t, shape in (("q_nope", q_nope, (rows, p.num_q_heads, latent)), ("q_rope", q_rope, (rows, p.num_q_heads, rope)),
                           ("ckv_cache", ckv, (ckv.shape[0], p.page_size, width)),
                           ("k_rope_cache", k_rope, (ckv.shape[0], p.page_size, rope))):
        if t is not None and tuple(t.shape) != shape:
            raise ShapeError(f"{name}: got shape {shape_text(t)}, expected {shape} as planned")
    for name, t, dtype in (("q_nope", q_nope, p.q_dtype), ("q_rope", q_rope, p.q_dtype), ("ckv_cache", ckv, p.kv_dtype)):
        if dtype_name(t.dtype) != dtype:
            raise DtypeError(f"{name}: got {t.dtype}, expected {dtype} as planned; nothing is cast silently")
    if k_rope is not None and k_rope.dtype not in (ckv.dtype, q_rope.dtype):
        raise DtypeError(f"k_rope_cache: got {k_rope.dtype}, expected {ckv.dtype} or {q_rope.dtype}")
    if torch.is_grad_enabled() and (q_nope.requires_grad or q_rope.requires_grad):
        raise NoBackendError("MLA over a paged cache has no gradient: call under torch.no_grad()")


@outside_graphs("a plan is made and updated")
def plan_mla(
    page_table: PageTable, *, num_heads: int, q_lens: Lengths | None = None, cu_seqlens_q: Lengths | None = None, q_dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None, causal: bool = True, scale: float | None = None, head_dim_latent: int = 512,
    head_dim_rope: int = 64, kv_scales: str | None = None, batch_invariant: bool = False, deterministic: bool = True,
    cuda_graph_bounds: GraphBounds | None = None, backend: str = "auto", device: torch.device | str | None = None,
    features: AttentionFeatures | None = None,
) -> MLAPlan:
    """A plan for latent attention over the requests of a page table; ``plan.run(...)`` once per layer.

    All ``num_heads`` query heads share one latent head of head_dim_latent + head_dim_rope entries, both multiples of 8.
    ``scale`` is the model's own: there is no default. ``kv_scales``: None, "tensor", "request_head" or "page", for an fp8
    cache. ``features`` (:class:`AttentionFeatures`, such as its preset ``deepseek``): causal, scale, kv_scales and
    batch_invariant in one object, beside the rules of plan_attention; any other feature is an error. Query lengths, device and
    bounds as in plan_attention. Raises ShapeError, DtypeError, DeviceError, SettingsError; NoBackendError with the table of reasons.
    """
    if features is not None:
        causal, scale, kv_scales, batch_invariant = check_features(features).of_latent(
            causal=causal, scale=scale, kv_scales=kv_scales, batch_invariant=batch_invariant)
    if scale is None:
        raise SettingsError("scale: got None, expected the model's own: it is not the latent head's; give it to plan_mla or in features "
                            "(AttentionFeatures.deepseek)")
    check_table(page_table)
    check_bounds(cuda_graph_bounds)
    where = plan_device(page_table, device)
    batch = read_batch(page_table, query_starts(q_lens, cu_seqlens_q, page_table.batch))
    key = (size_classes(batch, cuda_graph_bounds), where, num_heads, q_dtype, kv_dtype, causal, head_dim_latent, head_dim_rope,
           kv_scales, batch_invariant, deterministic, backend)
    known = _decisions.get(key)
    if known is None:
        problem = _describe(batch, num_heads, q_dtype, kv_dtype, causal, head_dim_latent, head_dim_rope, kv_scales, batch_invariant,
                            deterministic, cuda_graph_bounds)
        known = decide(problem, where, backend)
        remember(_decisions, key, known)
    plan: MLAPlan = start_plan(MLAPlan, known, batch, where, cuda_graph_bounds, scale=number("scale", scale),
                               backend=backend)
    return plan


def _describe(
    batch: Batch, num_heads: int, q_dtype: torch.dtype, kv_dtype: torch.dtype | None, causal: bool, head_dim_latent: int,
    head_dim_rope: int, kv_scales: str | None, batch_invariant: bool, deterministic: bool, bounds: GraphBounds | None = None,
) -> PagedAttentionProblem:
    check_flags(causal=causal, batch_invariant=batch_invariant, deterministic=deterministic)
    heads = whole(num_heads)
    if heads is None or heads < 1:
        raise ShapeError(f"num_heads: got {num_heads!r}, expected a whole number of at least 1")
    latent, rope = (_head_dim(name, size, limit)
                    for name, size, limit in (("head_dim_latent", head_dim_latent, 512), ("head_dim_rope", head_dim_rope, 64)))
    kv_dtype = q_dtype if kv_dtype is None else kv_dtype
    if q_dtype != kv_dtype and kv_dtype not in _FP8:
        raise DtypeError(f"got q_dtype {q_dtype} and kv_dtype {kv_dtype}, expected one dtype, or an fp8 cache")
    check_option("kv_scales", kv_scales, (None, "tensor", "request_head", "page"))
    if kv_scales is not None and kv_dtype not in _FP8:
        raise DtypeError(f"kv_scales: got {kv_scales!r} with a {kv_dtype} cache, expected an fp8 one; leave kv_scales out")
    return PagedAttentionProblem(
        **size_classes(batch, bounds)._asdict(), num_q_heads=heads, num_kv_heads=1, head_dim=latent + rope,
        head_dim_v=latent, rope_dim=rope, q_dtype=dtype_name(q_dtype), kv_dtype=dtype_name(kv_dtype),
        causal=bool(causal), kv_scales=kv_scales, deterministic=bool(deterministic), batch_invariant=bool(batch_invariant),
    )


def _head_dim(name: str, size: Any, limit: int) -> int:
    value = whole(size)
    if value is None or value % 8 or not 8 <= value <= limit:
        raise ShapeError(f"{name}: got {size!r}, expected a multiple of 8 from 8 to {limit}")
    return value


def explain_mla(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for a plan with the arguments of :func:`plan_mla`, without making it. q_dtype: bfloat16 by default."""
    defaults: dict[str, Any] = {
        "q_lens": None, "cu_seqlens_q": None, "q_dtype": torch.bfloat16, "kv_dtype": None, "causal": True, "head_dim_latent": 512,
        "head_dim_rope": 64, "kv_scales": None, "batch_invariant": False, "deterministic": True,
    }
    features = kwargs.pop("features", None)
    if features is not None:
        given = {name: kwargs[name] for name in _OF_FEATURES if name in kwargs}
        kwargs |= dict(zip(_OF_FEATURES, check_features(features).of_latent(**given)))
    values = defaults | dict(zip(("page_table",), args)) | kwargs
    for name in ("scale", "device"):  # change no choice
        values.pop(name, None)
    table, bounds = values.pop("page_table"), values.pop("cuda_graph_bounds", None)
    check_table(table)
    batch = read_batch(table, query_starts(values.pop("q_lens"), values.pop("cu_seqlens_q"), table.batch))
    return choose(_describe(batch, **values, bounds=bounds), target, backend, live=live)
