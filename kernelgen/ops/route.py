"""route: router logits to experts and weights, through the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import choose, prepare
from kernelgen.dtypes import dtype_name
from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.guard import (
    ORDINARY,
    check_backend,
    check_flags,
    check_required,
    needs_torch,
    operator,
    record,
    through_torch,
    watched,
    whole,
)
from kernelgen.library.written import wrote
from kernelgen.moe_tensors import RouteTensors
from kernelgen.ops.checks import check_last_contiguous, check_output, check_rank, check_side_dtype, check_tensors, number, shape_text
from kernelgen.ops.memo import layout_of, new_memo, remember
from kernelgen.problems.common import alignment_of
from kernelgen.problems.moe import RouteProblem
from kernelgen.reference.checks import check_option
from kernelgen.reference.route import METHODS
from kernelgen.targets import Target, target_of

_FLOATS = ("fp64", "fp32", "bf16", "fp16")
_calls = new_memo()


@operator("route")
def route(
    logits: torch.Tensor, k: int, *, method: str = "softmax", renormalize: bool = True, bias: torch.Tensor | None = None,
    num_groups: int | None = None, topk_groups: int | None = None, scaling: float = 1.0, counts: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k experts of each token and their weights, best first: logits (T, E) to weights (T, k) float32, ids (T, k) int32.

    method   softmax       probabilities over all experts, the k largest; divided by their sum if ``renormalize``
             topk_softmax  softmax over the k largest logits
             sigmoid       sigmoid scores, the k largest (of score + bias), divided by their sum if ``renormalize``
             deepseek_v3   chosen by sigmoid + ``bias``, within the best ``topk_groups`` of ``num_groups`` where these are
                           given (a group counts its two best); weights are the unbiased scores, divided by their sum
             llama4        sigmoid of the k largest logits
    bias     (E), of logits' dtype or float32; every weight is finally multiplied by ``scaling``
    counts   (E) int32, contiguous: how often each expert was chosen is added to it

    Ties go to the lowest id. A NaN logit counts as -inf; a row with nothing above -inf gives ids 0 .. k - 1 and equal
    weights. Scores are float32 (float64 of float64 logits). Raises ShapeError (k outside 1 .. E, groups that do not divide E
    or are too few for k), DtypeError, DeviceError, LayoutError, SettingsError (method, or an argument that it does not take),
    NoBackendError.
    """
    key: Any = None
    if type(logits) in ORDINARY and type(scaling) in (float, int) and not watched():
        key = (layout_of(logits), logits.requires_grad and torch.is_grad_enabled(), type(k), k, method, renormalize, layout_of(bias),
               num_groups, topk_groups, scaling, layout_of(counts), backend)
        try:
            call = _calls.get(key)
        except TypeError:  # an option that has no hash is no legal one
            key = call = None
        if call is not None:
            return call(logits, bias, counts)
    elif through_torch(logits):
        recorded: tuple[torch.Tensor, torch.Tensor] = record("route", locals())
        return recorded
    check_backend(backend)
    problem, tensors = _describe(logits, k, method, renormalize, bias, num_groups, topk_groups, scaling, counts)
    decision, run = prepare(problem, target_of(logits.device), backend, tensors)
    if key is not None and decision.chosen is not None and decision.chosen.backend == "generated":
        remember(_calls, key, _prepared(tensors, run))
    result = run(tensors)
    wrote(counts)
    return (tensors.weights, tensors.ids) if result is None else result


def _prepared(sample: RouteTensors, run: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The repeated call of a bound kernel, which only re-reads addresses."""
    shape, scaling = tuple(sample.weights.shape), sample.scaling

    def call(logits: torch.Tensor, bias: torch.Tensor | None, counts: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)
        if counts is not None:
            wrote(counts)
        run(RouteTensors(logits, bias, weights, ids, scaling, counts))
        return weights, ids

    return call


def explain_route(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for a route call with these arguments, without running it."""
    defaults: dict[str, Any] = {
        "method": "softmax", "renormalize": True, "bias": None, "num_groups": None, "topk_groups": None, "scaling": 1.0, "counts": None,
    }
    problem, _ = _describe(**(defaults | dict(zip(("logits", "k"), args)) | kwargs))
    return choose(problem, target, backend, live=live)


def run_reference(p: RouteProblem, t: RouteTensors) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The oracle: fills the outputs, or returns fresh ones where autograd needs the graph."""
    from kernelgen import reference

    weights, ids = reference.route(t.logits, p.k, method=p.method, renormalize=p.renormalize, bias=t.bias, num_groups=p.num_groups,
                                   topk_groups=p.topk_groups, scaling=t.scaling)
    if t.counts is not None:
        t.counts.add_(torch.bincount(ids.reshape(-1), minlength=p.experts).to(torch.int32))
    if p.requires_grad:
        return weights.to(torch.float32), ids
    t.weights.copy_(weights)
    t.ids.copy_(ids)
    return None


def _describe(
    logits: torch.Tensor, k: int, method: str, renormalize: bool, bias: torch.Tensor | None, num_groups: int | None,
    topk_groups: int | None, scaling: float, counts: torch.Tensor | None,
) -> tuple[RouteProblem, RouteTensors]:
    """Check everything, allocate the outputs, and describe the call."""
    check_required(logits=logits)
    check_tensors(logits=logits, bias=bias, counts=counts)
    check_rank("logits", logits, 2, "(T, E)")
    check_last_contiguous(logits=logits, bias=bias)
    check_flags(renormalize=renormalize)
    if dtype_name(logits.dtype) not in _FLOATS:
        raise DtypeError(f"logits: got {logits.dtype}, expected float64, float32, bfloat16 or float16; dequantise it first")
    check_option("method", method, METHODS)
    tokens, experts = logits.shape
    slots = whole(k)
    if slots is None or not 1 <= slots <= experts:
        raise ShapeError(f"k: got {k!r}, expected a whole number from 1 to {experts}, the experts of logits {shape_text(logits)}")
    if bias is not None:
        if method not in ("sigmoid", "deepseek_v3"):
            raise SettingsError(f"bias: got one with method {method!r}, expected 'sigmoid' or 'deepseek_v3', which select by it")
        if tuple(bias.shape) != (experts,):
            raise ShapeError(f"bias: got shape {shape_text(bias)}, expected ({experts},) (one entry per expert)")
        check_side_dtype("bias", bias, logits.dtype)
    if counts is not None:
        check_output("counts", counts, (experts,), torch.int32, logits.device)
    num_groups, topk_groups = _group_counts(method, experts, slots, num_groups, topk_groups)
    problem = RouteProblem(
        tokens=tokens, experts=experts, k=slots, dtype=dtype_name(logits.dtype), method=method, renormalize=bool(renormalize),
        bias=bias is not None, num_groups=num_groups, topk_groups=topk_groups, requires_grad=needs_torch(logits, bias),
        alignment=alignment_of(logits, bias), bias_dtype=None if bias is None else dtype_name(bias.dtype), counts=counts is not None,
    )
    weights = torch.empty((tokens, slots), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, slots), dtype=torch.int32, device=logits.device)
    return problem, RouteTensors(logits, bias, weights, ids, number("scaling", scaling), counts)


def _group_counts(
    method: str, experts: int, k: int, num_groups: int | None, topk_groups: int | None,
) -> tuple[int, int] | tuple[None, None]:
    if num_groups is None and topk_groups is None:
        return None, None
    if num_groups is None or topk_groups is None:
        raise SettingsError(f"got num_groups={num_groups} and topk_groups={topk_groups}, expected both or neither")
    groups, kept = whole(num_groups), whole(topk_groups)
    if groups is None or kept is None:
        raise ShapeError(f"got num_groups={num_groups!r} and topk_groups={topk_groups!r}, expected whole numbers")
    if method != "deepseek_v3":
        raise SettingsError(f"num_groups: got one with method {method!r}, expected 'deepseek_v3', which selects in groups")
    if groups < 1 or experts % groups:
        raise ShapeError(f"num_groups: got {groups}, expected a divisor of {experts}, the number of experts")
    if not 1 <= kept <= groups:
        raise ShapeError(f"topk_groups: got {kept}, expected 1 to {groups}, the number of groups")
    room = experts // groups * kept
    if k > room:
        raise ShapeError(f"k: got {k}, expected at most {room}, the experts of {kept} kept groups; raise topk_groups")
    return groups, kept
