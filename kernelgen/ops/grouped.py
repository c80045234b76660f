"""grouped_gemm and grouped_gemm_masked: one product per group, the groups' sizes being values on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index as operator_index
from typing import Any, NamedTuple

import torch

from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import choose, prepare
from kernelgen.dtypes import dtype_name
from kernelgen.errors import DtypeError, ShapeError
from kernelgen.guard import ORDINARY, check_backend, check_flags, check_required, needs_torch, operator, record, through_torch, watched
from kernelgen.library.written import wrote
from kernelgen.ops.checks import check_apart, check_tensors, index_tensor, shape_text
from kernelgen.ops.gemm import deliver, describe_b, is_view, packed_parts
from kernelgen.ops.memo import layout_of, new_memo, remember
from kernelgen.ops.products import (
    Epilogue,
    Output,
    Result,
    Weight,
    alignment_of_operands,
    as_batch,
    beta_of,
    check_addend,
    check_bias,
    check_operands,
    check_options,
    check_results_apart,
    make_result,
    meeting,
    order_of,
    other_addend,
    outputs_of,
    scale_view,
    split_output,
)
from kernelgen.ops.weights import PackedWeight
from kernelgen.problems.common import alignment_of
from kernelgen.problems.gemm import GroupedGemmProblem
from kernelgen.settings import settings
from kernelgen.targets import Target, target_of
from kernelgen.tensors import GroupedGemmTensors

Ends = torch.Tensor | Sequence[int]
_calls = new_memo()


class _Described(NamedTuple):
    """A checked call."""

    problem: GroupedGemmProblem
    tensors: GroupedGemmTensors
    result: Result


@operator("grouped_gemm")
def grouped_gemm(
    a: torch.Tensor, b: Weight, offsets: Ends, *, bias: torch.Tensor | None = None, activation: str | None = None,
    gate_up: str = "gate_first", c: torch.Tensor | None = None, beta: float = 1.0, scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None, accumulate: str = "float32", out_dtype: torch.dtype | None = None,
    out_scale: str | None = None, out: Output = None, deterministic: bool = True, backend: str = "auto",
) -> Any:
    """One product per group; ``offsets`` (E) int32 are where groups end, as in torch._grouped_mm. No size need be a multiple.

    a (T, K) @ b (E, K, N), or a PackedWeight of (E, N, K): rows grouped, to (T, N). Rows outside any group are not read, and
    left untouched in ``out`` (unspecified without it). a (M, T) @ b (T, N): K grouped, to (E, M, N); an empty group gives
    the epilogue of zeros. bias (N) or (E, N); c the shape of the result; scales as in ``gemm`` for all of a and of b, scale_b
    also (E), one for each matrix; blocks along a grouped K count from its start, not from the group's. The rest, the dtypes
    and the errors as in ``gemm``; with ``out_scale`` the result is (fp8 codes, float32 scale), of rows in groups alone.

    Offsets that fall or leave the matrix are a ShapeError on the CPU and under KERNELGEN_CHECK=1; else they are cut off.
    """
    e = Epilogue(bias, activation, gate_up, c, beta, accumulate, out_dtype, out_scale, out, deterministic)
    return _call(False, a, b, offsets, scale_a, scale_b, e, backend)


@operator("grouped_gemm_masked")
def grouped_gemm_masked(
    a: torch.Tensor, b: Weight, counts: Ends, *, bias: torch.Tensor | None = None, activation: str | None = None,
    gate_up: str = "gate_first", c: torch.Tensor | None = None, beta: float = 1.0, scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None, accumulate: str = "float32", out_dtype: torch.dtype | None = None,
    out_scale: str | None = None, out: Output = None, deterministic: bool = True, backend: str = "auto",
) -> Any:
    """a (E, Mmax, K) @ b (E, K, N) for the first counts[e] rows of each e, to (E, Mmax, N).

    ``counts`` (E) int32. Other rows are not read, and left untouched in ``out`` (unspecified without it). Otherwise as
    grouped_gemm.
    """
    e = Epilogue(bias, activation, gate_up, c, beta, accumulate, out_dtype, out_scale, out, deterministic)
    return _call(True, a, b, counts, scale_a, scale_b, e, backend)


def _call(
    masked: bool, a: torch.Tensor, b: Weight, ends: Ends, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, e: Epilogue,
    backend: str,
) -> Any:
    key = _signature(masked, a, b, ends, scale_a, scale_b, e, backend)
    if key is None and through_torch(a, getattr(b, "codes", b), ends):
        values = e._asdict() | dict(a=a, b=b, offsets=ends, counts=ends, scale_a=scale_a, scale_b=scale_b, backend=backend)
        return record("grouped_gemm_masked" if masked else "grouped_gemm", values)
    try:
        call = _calls.get(key)
    except TypeError:  # an option that has no hash is no legal one
        key = call = None
    if call is not None:
        return call(a, b, ends, scale_a, scale_b, e)
    check_backend(backend)
    described = _describe(masked, a, b, ends, scale_a, scale_b, e)
    decision, run = prepare(described.problem, target_of(a.device), backend, described.tensors)
    generated = decision.chosen is not None and decision.chosen.backend == "generated"
    if key is not None and generated:
        remember(_calls, key, _prepared(described, run))
    t = described.tensors
    value = deliver(run(t), t.out, t.out_scale, described.result)
    wrote(e.out)
    return value


def _signature(
    masked: bool, a: torch.Tensor, b: Weight, ends: Ends, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, e: Epilogue,
    backend: str,
) -> Any:
    """What decides a prepared call; None where a call is not remembered."""
    packed = isinstance(b, PackedWeight)
    if type(a) not in ORDINARY or not (packed or type(b) in ORDINARY) or type(ends) not in ORDINARY or watched():
        return None
    if type(e.beta) not in (float, int) or type(e.deterministic) is not bool or not a.data_ptr():
        return None
    tensors = (a, b, scale_a, scale_b, e.bias, e.c)
    return (
        masked, layout_of(a), b.layout if isinstance(b, PackedWeight) else layout_of(b), layout_of(ends), layout_of(scale_a),
        layout_of(scale_b), layout_of(e.bias), layout_of(e.c),
        layout_of(e.out, written=True) if type(e.out) is not tuple else tuple([layout_of(t, written=True) for t in e.out]),
        e.activation, e.gate_up, e.beta, e.accumulate, e.out_dtype, e.out_scale, e.deterministic, backend,
        torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors),
    )


def _prepared(sample: _Described, run: Any) -> Callable[..., Any]:
    """The repeated call of a bound kernel: reads addresses, and on the CPU the values of ``ends``."""
    out, scale, problem = sample.result.out, sample.result.scale, sample.problem
    shape, dtype, beta = tuple(out.shape), out.dtype, sample.tensors.beta
    scale_shape = None if scale is None else tuple(scale.shape)
    packed, meets = problem.weight_format is not None, meeting(out, sample.tensors)

    def call(a: torch.Tensor, b: Any, ends: Any, scale_a: Any, scale_b: Any, e: Epilogue) -> Any:
        zero = scale = None
        if packed:
            b, scale_b, zero = b.codes, b.scale, b.zero
        _check_ends(problem.grouping, ends, _limit(problem))
        out, scale = split_output(e.out, e.out_scale)
        if out is None:
            out = a.new_empty(shape, dtype=dtype)
        else:
            if meets(out, a, b, e.c):
                check_apart("out", out, a=a, b=b, c=other_addend(e.c, beta, out))
            wrote(e.out)
        if scale_shape is not None and scale is None:
            scale = a.new_empty(scale_shape, dtype=torch.float32)
        ends = ends.to(torch.int32).contiguous()  # itself, where it is so already: kernels read them one behind the other
        run(GroupedGemmTensors(a, b, out, ends, e.bias, e.c, beta, scale_a, scale_b, zero, scale))
        return out if scale is None else (out, scale)

    return call


def explain_grouped_gemm(*args: Any, target: Target, backend: str, live: bool, masked: bool = False, **kwargs: Any) -> Decision:
    """The decision for a grouped call with these arguments, without running it."""
    values = dict(zip(("a", "b", "counts" if masked else "offsets"), args)) | kwargs
    ends = values.pop("counts" if masked else "offsets")
    options: dict[str, Any] = dict(bias=None, activation=None, gate_up="gate_first", c=None, beta=1.0, accumulate="float32",
                                   out_dtype=None, out_scale=None, out=None, deterministic=True)
    e = Epilogue(**{name: values.pop(name, default) for name, default in options.items()})
    scales: dict[str, Any] = dict(scale_a=None, scale_b=None)
    return choose(_describe(masked, ends=ends, e=e, **(scales | values)).problem, target, backend, live=live)


def explain_grouped_gemm_masked(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for a masked call, without running it."""
    return explain_grouped_gemm(*args, target=target, backend=backend, live=live, masked=True, **kwargs)


def _describe(
    masked: bool, a: torch.Tensor, b: Weight, ends: Ends, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, e: Epilogue,
) -> _Described:
    """Check everything, allocate the output."""
    parts = packed_parts(b)
    check_required(a=a, b=parts[0])
    out, out_scale = split_output(e.out, e.out_scale)
    check_tensors(a=a, b=parts[0], bias=e.bias, c=e.c, scale_a=scale_a, scale_b=scale_b, out=out, out_scale=out_scale)
    check_flags(deterministic=e.deterministic)
    check_operands(a, b, scale_a, scale_b)
    check_options(e)
    grouping, groups, (m, k, n) = _extents(masked, a, b, ends)
    limit = k if grouping == "k" else m
    name = "counts" if masked else "offsets"
    ends = _ends(name, ends, groups, a.device)
    _check_ends(grouping, ends, limit)
    outputs = outputs_of(e.activation, n)
    shape = (m, outputs) if grouping == "rows" else (groups, m, outputs)
    check_bias(e.bias, n, groups)
    check_addend(e.c, shape)
    grad = needs_torch(a, parts[0], e.bias, e.c, scale_a, scale_b)
    result = make_result(e, a, shape, grad=grad)
    if e.out is not None:
        check_results_apart(result, e, a=a, b=parts[0], scale_a=scale_a, scale_b=scale_b, **{name: ends})
    a3, out3, c3 = as_batch(a), as_batch(result.out), None if e.c is None else as_batch(e.c)
    b3, scales, view_a, view_b, zero, words = describe_b(a, b, scale_a, scale_b)
    bias = e.bias if e.bias is None or e.bias.dim() == 2 else e.bias.unsqueeze(0).expand(groups, n)
    problem = GroupedGemmProblem(
        batch=groups, m=m, n=n, k=k, grouping=grouping, a_dtype=dtype_name(a.dtype), out_dtype=dtype_name(result.dtype),
        a_order=order_of("a", a3), batched_b=grouping != "k", bias=e.bias is not None, activation=e.activation, gate_up=e.gate_up,
        accumulate_c=e.c is not None, scales=scales, out_scale=e.out_scale, accumulate=e.accumulate, deterministic=bool(e.deterministic),
        requires_grad=grad,
        bias_dtype=dtype_name(e.bias.dtype) if e.bias is not None else None, c_dtype=dtype_name(e.c.dtype) if e.c is not None else None,
        alignment=alignment_of_operands(a3, b3), out_alignment=alignment_of(c3, out3), **words,
    )
    tensors = GroupedGemmTensors(a3, b3, out3, ends, bias, c3, beta_of(e), view_a, view_b, zero, scale_view(e.out_scale, result.scale))
    assert all(map(is_view, (a, result.out, result.scale))), "at most three dimensions are their own view"
    return _Described(problem, tensors, result)


def _extents(masked: bool, a: torch.Tensor, b: Weight, ends: Ends) -> tuple[str, int, tuple[int, int, int]]:
    """(grouping, groups, (m, k, n)) as GroupedGemmProblem counts them."""
    packed = isinstance(b, PackedWeight)
    rank_a, rank_b = a.dim(), len(b.shape)
    shape = (*b.shape[:-2], *reversed(b.shape[-2:])) if packed else tuple(b.shape)
    forms = {(3, 3): "masked"} if masked else {(2, 3): "rows", (2, 2): "k"}
    grouping = forms.get((rank_a, rank_b))
    if grouping is None or (packed and grouping == "k"):
        expected = "(E, Mmax, K) and (E, K, N)" if masked else "(T, K) and (E, K, N), or (M, T) and (T, N)"
        raise ShapeError(f"got a {shape_text(a)} and b {shape}, expected {expected}")
    if a.shape[-1] != shape[-2]:
        raise ShapeError(f"got K = {a.shape[-1]} in a {shape_text(a)} and {shape[-2]} in b {shape}, expected one value")
    if masked and a.shape[0] != shape[0]:
        raise ShapeError(f"got {a.shape[0]} groups in a {shape_text(a)} and {shape[0]} in b {shape}, expected one number")
    groups = shape[0] if grouping != "k" else len(ends)
    return grouping, groups, (a.shape[-2], a.shape[-1], shape[-1])


def _ends(name: str, ends: Ends, groups: int, device: torch.device) -> torch.Tensor:
    """int32, contiguous, on the device of a. Plain numbers are copied there."""
    if not isinstance(ends, torch.Tensor):
        try:
            ends = torch.tensor([operator_index(end) for end in ends], dtype=torch.int32, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DtypeError(f"{name}: got {ends!r}, expected an int32 tensor or whole numbers") from error
    return index_tensor(name, ends, groups, device)


def _limit(problem: GroupedGemmProblem) -> int:
    return problem.k if problem.grouping == "k" else problem.m


def _check_ends(grouping: str, ends: torch.Tensor, limit: int) -> None:
    """The values, where they can be had without a wait or are asked for. Kernels stay inside the matrix whatever they are."""
    if ends.device.type == "meta" or (ends.device.type != "cpu" and not settings().check):
        return
    values = ends.tolist()
    if grouping == "masked":
        bad = next(((i, n) for i, n in enumerate(values) if not 0 <= n <= limit), None)
        if bad:
            raise ShapeError(f"counts: got {bad[1]} for group {bad[0]}, expected 0 to {limit}, the rows of a")
    elif values and (values[0] < 0 or values[-1] > limit or values != sorted(values)):
        raise ShapeError(f"offsets: got {values}, expected end offsets that never fall, from 0 up to {limit}")


def run_reference(problem: GroupedGemmProblem, t: GroupedGemmTensors) -> Any:
    """The float64 oracle. Only rows of groups are written."""
    from kernelgen import reference
    from kernelgen.dispatch.backends.reference import product_weight

    b, scale_b = product_weight(problem, t)
    words: dict[str, Any] = dict(
        bias=t.bias, activation=problem.activation, gate_up=problem.gate_up, beta=t.beta, scale_b=scale_b,
        out_scale=problem.out_scale, out_dtype=t.out.dtype if problem.out_scale else None)
    one_a = problem.grouping != "masked"
    a, scale_a = t.a[0] if one_a else t.a, t.scale_a[0] if one_a and t.scale_a is not None else t.scale_a
    c = t.c[0] if t.c is not None and problem.grouping == "rows" else t.c
    call = reference.grouped_gemm_masked if problem.grouping == "masked" else reference.grouped_gemm
    value = call(a, b, t.ends, c=c, scale_a=scale_a, **words)
    value, scale = value if isinstance(value, tuple) else (value, None)
    if problem.requires_grad:
        return (value, scale) if scale is not None else value.to(t.out.dtype)
    used = _rows_in_use(problem, t)
    for into, made in ((t.out, value), (t.out_scale, scale)):
        if into is None or made is None:
            continue
        if problem.out_scale == "tensor" and made is scale:
            into.copy_(made)
        else:
            made = made.to(into.dtype).reshape(into.shape)
            into.copy_(torch.where(used, made.float(), into.float()) if into.dtype.itemsize == 1 else torch.where(used, made, into))
    return None


def _rows_in_use(problem: GroupedGemmProblem, t: GroupedGemmTensors) -> torch.Tensor:
    """(batch of out, rows, 1) bool."""
    row = torch.arange(t.out.shape[1], device=t.out.device).view(1, -1, 1)
    if problem.grouping == "masked":
        return row < t.ends.view(-1, 1, 1)
    if problem.grouping == "rows":
        return row < (t.ends[-1] if t.ends.numel() else 0)
    return torch.ones_like(row, dtype=torch.bool)
