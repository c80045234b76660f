"""moe_sort, moe_permute and moe_unpermute: what a mixture-of-experts layer is made of beside its products, through the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import choose, prepare
from kernelgen.dtypes import dtype_name
from kernelgen.errors import DtypeError, ShapeError
from kernelgen.guard import ORDINARY, check_backend, check_required, needs_torch, operator, record, through_torch, watched, whole
from kernelgen.library.written import wrote
from kernelgen.moe_tensors import MoESort, PermuteTensors, SortTensors, UnpermuteTensors
from kernelgen.ops.checks import (
    check_apart,
    check_last_contiguous,
    check_no_output_with_grad,
    check_output,
    check_rank,
    check_side_dtype,
    check_tensors,
    meeting_any,
    shape_text,
)
from kernelgen.ops.expert_map import INDICES, ExpertMap, as_table, local_range, map_key, table_on
from kernelgen.ops.memo import layout_of, new_memo, remember
from kernelgen.problems.common import alignment_of
from kernelgen.problems.moe import MoePermuteProblem, MoeSortProblem, MoeUnpermuteProblem
from kernelgen.settings import settings
from kernelgen.targets import Target, target_of

_calls = new_memo()


@operator("moe_sort")
def moe_sort(ids: torch.Tensor, num_experts: int, *, expert_map: ExpertMap | None = None, backend: str = "auto") -> MoESort:
    """Group the slots of ids (T, k) int32 or int64 by local expert, within one in the order of (token, slot).

    Returns MoESort(offsets (E) end offsets, token_of_row (T * k), row_of_slot (T, k)), all int32, -1 where there is none: rows
    behind the last offset, and slots that are skipped. Nothing waits for the device. ``expert_map`` and which ids are skipped:
    as in ``moe``; a list of numbers is copied to the device. Raises ShapeError, DtypeError, DeviceError, LayoutError,
    NoBackendError.
    """
    ranged = isinstance(expert_map, (tuple, range))
    key: Any = None
    if type(ids) in ORDINARY and (ranged or expert_map is None or type(expert_map) in ORDINARY) and not watched():
        key = ("sort", layout_of(ids), type(num_experts), num_experts, map_key(expert_map), backend)
        try:
            call = _calls.get(key)
        except TypeError:  # an option that has no hash is no legal one
            key = call = None
        if call is not None:
            return call(ids, expert_map)
    elif through_torch(ids, expert_map):
        sort: MoESort = record("moe_sort", locals())
        return sort
    check_backend(backend)
    problem, tensors = _describe_sort(ids, num_experts, expert_map)
    decision, run = prepare(problem, target_of(ids.device), backend, tensors)
    if key is not None and decision.chosen is not None and decision.chosen.backend == "generated":
        remember(_calls, key, _prepared_sort(problem, tensors, run))
    run(tensors)
    return MoESort(tensors.offsets, tensors.token_of_row, tensors.row_of_slot)


def _prepared_sort(p: MoeSortProblem, sample: SortTensors, run: Any) -> Callable[..., MoESort]:
    """The repeated call of a bound kernel, which only re-reads addresses."""
    first, table = sample.first, p.expert_map == "table"

    def call(ids: torch.Tensor, expert_map: Any) -> MoESort:
        sort = new_sort(p, ids.device)
        run(SortTensors(ids, *sort, as_table(expert_map) if table else None, first))
        return sort

    return call


def new_sort(p: MoeSortProblem, device: torch.device) -> MoESort:
    """Memory for a sort, in one piece."""
    memory = torch.empty(p.experts + 2 * p.slots, dtype=torch.int32, device=device)
    offsets, rows, slots = memory.split((p.experts, p.slots, p.slots))
    return MoESort(offsets, rows, slots.view(p.tokens, p.k))


@operator("moe_permute")
def moe_permute(x: torch.Tensor, sort: MoESort, *, weights: torch.Tensor | None = None, backend: str = "auto") -> torch.Tensor:
    """x (T, H) to rows (T * k, H) in the sort's order and x's dtype; rows past its last offset are unspecified.

    x float64, float32, bfloat16, float16 or fp8 codes (their float32 scales are another call). ``weights`` (T, k), float32 or x's
    dtype, multiply rows that are no codes. A row number of the sort outside 0 .. T * k - 1 is skipped (one that is not -1 is a
    ShapeError under KERNELGEN_CHECK=1). Raises ShapeError, DtypeError,
    DeviceError, LayoutError, NoBackendError.
    """
    slots = getattr(sort, "row_of_slot", None)
    key: Any = None
    if type(x) in ORDINARY and type(slots) in ORDINARY and not watched():
        key = ("permute", layout_of(x), layout_of(slots), layout_of(weights), backend, _wants_gradient(x, weights), settings().check)
        try:
            call = _calls.get(key)
        except TypeError:  # an option that has no hash is no legal one
            key = call = None
        if call is not None:
            return call(x, slots, weights)
    elif through_torch(x, slots, weights):
        recorded: torch.Tensor = record("moe_permute", locals())
        return recorded
    check_backend(backend)
    problem, tensors = _describe_permute(x, sort, weights)
    if settings().check:
        _check_numbers(tensors.row_of_slot)
    decision, run = prepare(problem, target_of(x.device), backend, tensors)
    if key is not None and _may_be_prepared(decision, tensors.row_of_slot, slots):
        shape = tuple(tensors.rows.shape)

        def again(x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
            rows = x.new_empty(shape)
            run(PermuteTensors(x, slots, rows, weights))
            return rows

        remember(_calls, key, again)
    result: torch.Tensor | None = run(tensors)
    return tensors.rows if result is None else result


@operator("moe_unpermute")
def moe_unpermute(
    rows: torch.Tensor, sort: MoESort, weights: torch.Tensor | None, *, addend: torch.Tensor | None = None,
    out: torch.Tensor | None = None, backend: str = "auto",
) -> torch.Tensor:
    """out[t] = sum over slots s of weights[t, s] * rows[row_of_slot[t, s]]: (T, H) in rows' dtype.

    rows (T * k, H) float64, float32, bfloat16 or float16; weights (T, k), float32 or rows' dtype, None for ones. Skipped slots add
    nothing, nor does a row number of the sort outside 0 .. T * k - 1 (as in ``moe_permute``). The sum is in float32 (float64 of
    float64 rows), in the order of the slots, then ``addend`` (T, H), and rounded once. ``out`` shares no memory with what is read.
    Raises ShapeError, DtypeError, DeviceError, LayoutError, NoBackendError.
    """
    slots = getattr(sort, "row_of_slot", None)
    key: Any = None
    if type(rows) in ORDINARY and type(slots) in ORDINARY and not watched():
        key = ("unpermute", *map(layout_of, (rows, slots, weights, addend)), layout_of(out, written=True), backend,
               _wants_gradient(rows, weights, addend), settings().check)
        try:
            call = _calls.get(key)
        except TypeError:  # an option that has no hash is no legal one
            key = call = None
        if call is not None:
            return call(rows, slots, weights, addend, out)
    elif through_torch(rows, slots, weights):
        recorded: torch.Tensor = record("moe_unpermute", locals())
        return recorded
    check_backend(backend)
    problem, tensors = _describe_unpermute(rows, sort, weights, addend, out)
    if settings().check:
        _check_numbers(tensors.row_of_slot)
    decision, run = prepare(problem, target_of(rows.device), backend, tensors)
    if key is not None and _may_be_prepared(decision, tensors.row_of_slot, slots):
        shape, meets = tuple(tensors.out.shape), meeting_any(tensors.out, tensors.rows, tensors.row_of_slot, weights, addend)

        def again(
            rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None, addend: torch.Tensor | None, out: torch.Tensor | None,
        ) -> torch.Tensor:
            if out is None:
                out = rows.new_empty(shape)
            else:
                if meets(out, rows, slots, weights, addend):
                    check_apart("out", out, rows=rows, sort=slots, weights=weights, addend=addend)
                wrote(out)
            run(UnpermuteTensors(rows, slots, out, weights, addend))
            return out

        remember(_calls, key, again)
    result: torch.Tensor | None = run(tensors)
    wrote(out)
    return tensors.out if result is None else result


def _wants_gradient(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)


def _may_be_prepared(decision: Decision, seen: torch.Tensor, given: Any) -> bool:
    """A generated kernel bound to the caller's own slots re-reads their address."""
    return decision.chosen is not None and decision.chosen.backend == "generated" and seen is given and not settings().check


def explain_moe_sort(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for a moe_sort call, without running it."""
    values: dict[str, Any] = dict(expert_map=None) | dict(zip(("ids", "num_experts"), args)) | kwargs
    if isinstance(values["expert_map"], torch.Tensor):
        values["expert_map"] = values["expert_map"].to(values["ids"].device)
    return choose(_describe_sort(**values)[0], target, backend, live=live)


def explain_moe_permute(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for a moe_permute call, without running it. ``sort`` may be the number of slots of a token."""
    values: dict[str, Any] = dict(weights=None) | dict(zip(("x", "sort"), args)) | kwargs
    values["sort"] = _imagined(values["x"], values["sort"])
    return choose(_describe_permute(**values)[0], target, backend, live=live)


def explain_moe_unpermute(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for a moe_unpermute call, without running it. ``sort`` may be the number of slots of a token."""
    values: dict[str, Any] = dict(weights=None, addend=None, out=None) | dict(zip(("rows", "sort", "weights"), args)) | kwargs
    values["sort"] = _imagined(values["rows"], values["sort"], rows=True)
    return choose(_describe_unpermute(**values)[0], target, backend, live=live)


def _imagined(t: torch.Tensor, sort: Any, *, rows: bool = False) -> Any:
    """A sort of as many slots as ``sort`` says, for decisions that need no more of it; one on the device of the data."""
    if isinstance(sort, MoESort):
        return MoESort(*(part.to(t.device) for part in sort))
    k = whole(sort)
    if k is None or k < 0:
        raise DtypeError(f"sort: got {sort!r}, expected the MoESort that moe_sort gives, or the number of slots of a token")
    sort = k
    tokens = t.shape[0] // max(sort, 1) if rows else t.shape[0]
    slots = torch.empty((tokens, sort), dtype=torch.int32, device=t.device)
    return MoESort(slots[:0, 0] if sort else slots.reshape(-1), slots.reshape(-1), slots)


def check_slot_ids(ids: torch.Tensor) -> None:
    check_rank("ids", ids, 2, "(T, k)")
    check_last_contiguous(ids=ids)
    if ids.dtype not in INDICES:
        raise DtypeError(f"ids: got {ids.dtype}, expected int32 (or int64)")


def _describe_sort(ids: torch.Tensor, num_experts: int, expert_map: ExpertMap | None) -> tuple[MoeSortProblem, SortTensors]:
    check_required(ids=ids)
    check_tensors(ids=ids, expert_map=expert_map if isinstance(expert_map, torch.Tensor) else None)
    check_slot_ids(ids)
    experts = whole(num_experts)
    if experts is None or experts < 0:
        raise ShapeError(f"num_experts: got {num_experts!r}, expected a whole number of experts")
    kind, first = local_range(expert_map, experts)
    problem = MoeSortProblem(ids.shape[0], ids.shape[1], experts, INDICES[ids.dtype], kind, needs_torch(ids))
    sort = new_sort(problem, ids.device)
    return problem, SortTensors(ids, *sort, table_on(expert_map, ids.device), first)


def _slots_of(name: str, t: torch.Tensor, sort: Any) -> tuple[torch.Tensor, int, int]:
    """(row_of_slot, tokens, k) of a sort whose tensors lie beside t."""
    slots = getattr(sort, "row_of_slot", None)
    if slots is None:
        raise DtypeError(f"sort: got {type(sort).__name__}, expected the MoESort that moe_sort gives")
    check_tensors(**{name: t, "sort.row_of_slot": slots})
    check_rank("sort.row_of_slot", slots, 2, "(T, k)")
    if slots.dtype != torch.int32:
        raise DtypeError(f"sort.row_of_slot: got {slots.dtype}, expected int32, as moe_sort gives it")
    return slots.contiguous(), slots.shape[0], slots.shape[1]


def _check_numbers(slots: torch.Tensor) -> None:
    """KERNELGEN_CHECK=1: a number of no row. Costs a device sync."""
    bad = (slots < -1) | (slots >= slots.numel())
    if bool(bad.any()):
        token, slot = (int(i) for i in bad.nonzero()[0])
        raise ShapeError(f"sort.row_of_slot: got {int(slots[token, slot])} for token {token}, slot {slot}, expected -1 to "
                         f"{slots.numel() - 1}; without KERNELGEN_CHECK=1 such a slot is skipped")


def _check_weights(weights: torch.Tensor | None, slots: torch.Tensor, dtype: torch.dtype) -> None:
    if weights is None:
        return
    check_tensors(weights=weights, ids=slots)
    if weights.shape != slots.shape:
        raise ShapeError(f"weights: got shape {shape_text(weights)}, expected {tuple(slots.shape)}, that of the sorted ids")
    check_side_dtype("weights", weights, dtype)
    check_last_contiguous(weights=weights)


def _describe_permute(x: torch.Tensor, sort: MoESort, weights: torch.Tensor | None) -> tuple[MoePermuteProblem, PermuteTensors]:
    check_required(x=x)
    check_rank("x", x, 2, "(T, H)")
    check_last_contiguous(x=x)
    slots, tokens, k = _slots_of("x", x, sort)
    if x.shape[0] != tokens:
        raise ShapeError(f"x: got {x.shape[0]} tokens in {shape_text(x)}, expected {tokens}, those of the sort")
    if weights is not None and dtype_name(x.dtype) in ("e4m3", "e5m2"):
        raise DtypeError(f"weights: got some with x of {x.dtype}, expected none: multiply its scale")
    _check_weights(weights, slots, x.dtype)
    rows = torch.empty((tokens * k, x.shape[1]), dtype=x.dtype, device=x.device)
    problem = MoePermuteProblem(tokens, k, x.shape[1], dtype_name(x.dtype), None if weights is None else dtype_name(weights.dtype),
                                alignment=alignment_of(x, rows), requires_grad=needs_torch(x, weights))
    return problem, PermuteTensors(x, slots, rows, weights)


def _describe_unpermute(
    rows: torch.Tensor, sort: MoESort, weights: torch.Tensor | None, addend: torch.Tensor | None, out: torch.Tensor | None,
) -> tuple[MoeUnpermuteProblem, UnpermuteTensors]:
    check_required(rows=rows)
    check_rank("rows", rows, 2, "(T * k, H)")
    check_last_contiguous(rows=rows, addend=addend)
    slots, tokens, k = _slots_of("rows", rows, sort)
    if rows.shape[0] != tokens * k:
        raise ShapeError(f"rows: got {rows.shape[0]} in {shape_text(rows)}, expected {tokens * k}, the slots of the sort")
    _check_weights(weights, slots, rows.dtype)
    shape = (tokens, rows.shape[1])
    check_tensors(rows=rows, addend=addend, out=out)
    if addend is not None and (tuple(addend.shape) != shape or addend.dtype != rows.dtype):
        raise ShapeError(f"addend: got {addend.dtype} {shape_text(addend)}, expected {rows.dtype} {shape}")
    grad = needs_torch(rows, weights, addend)
    if grad:
        check_no_output_with_grad(out=out)
    if out is None:
        out = torch.empty(shape, dtype=rows.dtype, device=rows.device)
    else:
        check_output("out", out, shape, rows.dtype, rows.device)
        check_apart("out", out, rows=rows, sort=slots, weights=weights, addend=addend)
    name = dtype_name(rows.dtype)
    if name in ("e4m3", "e5m2"):
        raise DtypeError(f"rows: got {rows.dtype}, expected float64, float32, bfloat16 or float16; dequantise them first")
    problem = MoeUnpermuteProblem(
        tokens, k, rows.shape[1], name, name, None if weights is None else dtype_name(weights.dtype), None if addend is None else name,
        alignment_of(rows, out, addend), grad)
    return problem, UnpermuteTensors(rows, slots, out, weights, addend)


def run_reference(problem: Any, t: Any) -> torch.Tensor | None:
    """The oracle: fills the outputs, or returns fresh ones where autograd needs the graph."""
    from kernelgen import reference

    if isinstance(problem, MoeSortProblem):
        expert_map = range(t.first, t.first + problem.experts) if problem.expert_map == "range" else t.expert_map
        sorted_ids = reference.moe_sort(t.ids, problem.experts, expert_map=expert_map)
        t.offsets.copy_(sorted_ids.offsets)
        t.token_of_row.copy_(sorted_ids.token_of_row)
        t.row_of_slot.copy_(sorted_ids.row_of_slot)
        return None
    row_of_slot = torch.where(t.row_of_slot < t.row_of_slot.numel(), t.row_of_slot, -1)
    sort = reference.MoESort(row_of_slot[:0, :0].reshape(-1), _tokens_of(row_of_slot), row_of_slot)
    if isinstance(problem, MoePermuteProblem):
        rows = reference.moe_permute(t.x, sort)
        if t.weights is not None:
            slots = row_of_slot.reshape(-1)
            factor = rows.new_zeros(rows.shape[0], 1)
            factor[slots[slots >= 0].long()] = t.weights.reshape(-1, 1)[slots >= 0].to(rows.dtype)
            rows = rows * factor
        if problem.requires_grad:
            return rows.to(t.rows.dtype)
        t.rows.copy_(rows)
        return None
    weights = torch.ones_like(t.row_of_slot, dtype=torch.float64) if t.weights is None else t.weights
    out = reference.moe_unpermute(t.rows, sort, weights)
    out = out if t.addend is None else out + t.addend
    if problem.requires_grad:
        return out.to(t.out.dtype)
    t.out.copy_(out)
    return None


def _tokens_of(row_of_slot: torch.Tensor) -> torch.Tensor:
    """token_of_row of these slots."""
    slots, tokens = row_of_slot.reshape(-1), torch.arange(row_of_slot.shape[0], dtype=torch.int32, device=row_of_slot.device)
    rows = torch.full_like(slots, -1)
    rows[slots[slots >= 0].long()] = tokens.repeat_interleave(row_of_slot.shape[1])[slots >= 0]
    return rows
