"""merge_states: partial attention results combined, through the dispatcher."""

from __future__ import annotations

from typing import Any

import torch

from kernelgen import reference
from kernelgen.cache_tensors import MergeTensors
from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import choose, prepare
from kernelgen.dtypes import dtype_name
from kernelgen.errors import DtypeError, ShapeError
from kernelgen.guard import check_backend, check_required, needs_torch, operator, record, through_torch, watched
from kernelgen.library.written import wrote
from kernelgen.ops.checks import check_last_contiguous, check_no_output_with_grad, check_output, check_rank, check_tensors, shape_text
from kernelgen.ops.memo import layout_of, new_memo, remember
from kernelgen.problems.cache_ops import MergeProblem
from kernelgen.problems.common import alignment_of
from kernelgen.targets import Target, target_of

_calls = new_memo()


@operator("merge_states")
def merge_states(
    outs: torch.Tensor, lses: torch.Tensor, *, out: torch.Tensor | None = None, lse: torch.Tensor | None = None, backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over disjoint sets of keys, merged: outs (n, T, H, D), lses (n, T, H) natural log to (out, lse).

    out (T, H, D) in outs' dtype, lse (T, H) float32; computed in float32 (float64 for float64 outs). A side with LSE
    -inf adds nothing, whatever its out holds; -inf on every side gives 0 and -inf; a side of +inf is the result. Strides are
    free but for outs' last dimension. Sinks must be in one of the sides only.

    Raises ShapeError, DtypeError, DeviceError, LayoutError, SettingsError, NoBackendError.
    """
    check_required(outs=outs, lses=lses)
    grad = needs_torch(outs, lses)
    key = None if watched() else (
        layout_of(outs), layout_of(lses), layout_of(out, written=True), layout_of(lse, written=True), backend, grad)
    try:
        call = _calls.get(key)
    except TypeError:  # an option that has no hash is no legal one
        key = call = None
    if call is not None:
        return call(outs, lses, out, lse)
    if through_torch(outs, lses):
        recorded: tuple[torch.Tensor, torch.Tensor] = record("merge_states", locals())
        return recorded
    check_backend(backend)
    problem, tensors = _describe(outs, lses, out, lse, grad)
    _, run = prepare(problem, target_of(outs.device), backend, tensors)

    def repeated(outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None) -> Any:
        if out is None:
            out = outs.new_empty(outs.shape[1:])
        else:
            wrote(out)
        if lse is None:
            lse = outs.new_empty(lses.shape[1:], dtype=torch.float32)
        else:
            wrote(lse)
        result = run(MergeTensors(outs, lses, out, lse))
        return (out, lse) if result is None else result

    if key is not None:
        remember(_calls, key, repeated)
    result = run(tensors)
    wrote(out, lse)
    return (tensors.out, tensors.lse) if result is None else result


def explain_merge_states(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for a merge_states call, without running it."""
    values: dict[str, Any] = dict(lses=None, out=None, lse=None) | dict(zip(("outs", "lses"), args)) | kwargs
    outs = values["outs"]
    if values["lses"] is None:
        values["lses"] = torch.empty(outs.shape[:-1], dtype=torch.float32, device=outs.device)
    grad = torch.is_grad_enabled() and (outs.requires_grad or values["lses"].requires_grad)
    return choose(_describe(**values, grad=grad)[0], target, backend, live=live)


def run_reference(problem: MergeProblem, t: MergeTensors) -> tuple[torch.Tensor, torch.Tensor] | None:
    out, lse = reference.merge_states(t.outs, t.lses)
    if problem.requires_grad:
        return out.to(t.outs.dtype), lse.to(torch.float32)
    t.out.copy_(out)
    t.lse.copy_(lse)
    return None


def _describe(
    outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None, grad: bool,
) -> tuple[MergeProblem, MergeTensors]:
    check_tensors(outs=outs, lses=lses, out=out, lse=lse)
    check_rank("outs", outs, 4, "(n, T, H, D)")
    if lses.shape != outs.shape[:3]:
        raise ShapeError(f"lses: got shape {shape_text(lses)}, expected {tuple(outs.shape[:3])}, the (n, T, H) of outs")
    for name, t in (("outs", outs), ("lses", lses)):
        if not t.is_floating_point():
            raise DtypeError(f"{name}: got {t.dtype}, expected a floating-point tensor")
    check_last_contiguous(outs=outs)
    if grad:
        check_no_output_with_grad(out=out, lse=lse)
    sides, tokens, heads, head_dim = outs.shape
    if out is None:
        out = torch.empty((tokens, heads, head_dim), dtype=outs.dtype, device=outs.device)
    check_output("out", out, (tokens, heads, head_dim), outs.dtype, outs.device)
    if lse is None:
        lse = torch.empty((tokens, heads), dtype=torch.float32, device=outs.device)
    check_output("lse", lse, (tokens, heads), torch.float32, outs.device)
    problem = MergeProblem(
        sides, tokens, heads, head_dim, dtype_name(outs.dtype), dtype_name(lses.dtype), alignment_of(outs, out), grad)
    return problem, MergeTensors(outs, lses, out, lse)
