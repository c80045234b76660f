"""gemm: one matrix product with a fused epilogue, through the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import choose, prepare
from kernelgen.dtypes import dtype_name
from kernelgen.errors import ShapeError
from kernelgen.guard import (
    ORDINARY,
    address_of,
    check_backend,
    check_flags,
    check_required,
    needs_torch,
    operator,
    record,
    through_torch,
    watched,
)
from kernelgen.library.written import wrote
from kernelgen.ops.checks import check_apart, check_tensors, shape_text
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
    check_apart_from_extras,
    check_bias,
    check_function,
    check_operands,
    check_options,
    check_results_apart,
    make_result,
    meeting,
    operand_scales,
    order_of,
    other_addend,
    outputs_of,
    scale_view,
    split_output,
)
from kernelgen.ops.weights import PackedWeight
from kernelgen.problems.common import alignment_of
from kernelgen.problems.gemm import FUNCTION, GemmProblem
from kernelgen.targets import Target, target_of
from kernelgen.tensors import GemmTensors
from kernelgen.variants.epilogue_function import EpilogueFunction

_calls = new_memo()


class Described(NamedTuple):
    """A checked call."""

    problem: GemmProblem
    tensors: GemmTensors
    result: Result


@operator("gemm")
def gemm(
    a: torch.Tensor, b: Weight, *, bias: torch.Tensor | None = None, activation: str | None = None,
    gate_up: str = "gate_first", c: torch.Tensor | None = None, beta: float = 1.0, scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None, accumulate: str = "float32", out_dtype: torch.dtype | None = None,
    out_scale: str | None = None, out: Output = None, epilogue: EpilogueFunction | None = None, deterministic: bool = True,
    backend: str = "auto",
) -> Any:
    """activation(a @ b + bias) + beta * c, accumulated in float32 (float64 for float64 tensors).

    a (.., M, K), b (K, N) or batched (.., K, N); any order by strides, so a Linear weight goes in as ``w.t()``; b may be a
    PackedWeight of (N, K) or (.., N, K). bias (N); activation one of relu, gelu, gelu_tanh, silu, or gated: swiglu,
    geglu, which halve N (``gate_up`` says how gate and up lie along N: "gate_first", "up_first", "interleaved"); c has the
    shape of the output, and is not read where beta is 0. Returns (.., M, N) in ``out_dtype``, default a's dtype (bfloat16
    for fp8). ``out`` may be c itself, and must not overlap anything else.

    fp8 inputs take float32 ``scale_a``, ``scale_b`` of any strides, whose shapes say the recipe: scalars; (M, 1) and (1, N),
    either of which may be a scalar; (M, ceil(K/128)) with (ceil(K/128), ceil(N/128)) or (ceil(K/128), N); leading dimensions as
    the operand's or none. ``accumulate="fast"`` leaves the sums to the tensor core, whose error grows with K.

    With ``out_scale`` ("tensor", "row", "block_1x128") the result is (fp8 codes, float32 scale) as from quantize_fp8, and
    ``out`` the codes, or both.

    ``epilogue``, made by :func:`kernelgen.epilogue`, is a function of yours in the place of bias, activation and c. Where it reduces
    over rows the result is (out, {name: (.., M) float32}), and ``out`` the former.

    Raises ShapeError, DtypeError, DeviceError, LayoutError, SettingsError; NoBackendError with the table of reasons; CompileError.
    """
    key: Any = None
    packed = type(b) is PackedWeight
    if (type(a) in ORDINARY and (packed or type(b) in ORDINARY) and type(deterministic) is bool and type(beta) in (float, int)
            and not watched() and a.layout == torch.strided and (packed or b.layout == torch.strided)):
        grad = torch.is_grad_enabled() and any(
            getattr(t, "requires_grad", False) for t in (a, b, bias, c, scale_a, scale_b))
        address_a, address_b = a.data_ptr(), 16 if packed else b.data_ptr()  # type: ignore[union-attr]
        key = (
            a.shape, b.shape, a.stride(), b.layout if packed else b.stride(), a.dtype, None if packed else b.dtype, a.device,  # type: ignore[union-attr]
            b.device, (address_a | address_b) & 15, layout_of(bias), activation, gate_up, accumulate, out_dtype, deterministic,
            backend, grad, layout_of(c), beta, layout_of(scale_a), layout_of(scale_b), out_scale,
            layout_of(out, written=True) if type(out) is not tuple else tuple([layout_of(t, written=True) for t in out]),
            getattr(epilogue, "layout", epilogue),  # what is no epilogue is not like none
        )
        if not (address_a and address_b) or a.is_neg() or (not packed and b.is_neg()):  # type: ignore[union-attr]
            key = None  # nothing there, or not as it seems: the long way looks closer
        try:
            call = _calls.get(key)
        except TypeError:  # an option that has no hash is no legal one
            key = call = None
        if call is not None:
            return call(a, b, bias, c, scale_a, scale_b, out, epilogue)
    elif through_torch(a, getattr(b, "codes", b)):
        return record("gemm", locals())
    check_backend(backend)
    asked = Epilogue(bias, activation, gate_up, c, beta, accumulate, out_dtype, out_scale, out, deterministic, epilogue)
    call = _describe(a, b, scale_a, scale_b, asked)
    decision, run = prepare(call.problem, target_of(a.device), backend, call.tensors)
    if key is not None and _all_views(a, b, scale_a, scale_b, c, call.result):
        # The prepared call re-reads addresses, which a copy would not follow.
        generated = decision.chosen is not None and decision.chosen.backend == "generated"
        if generated:
            remember(_calls, key, _prepared_generated(call, run))
        elif not packed and c is scale_a is out_scale and not len(call.result.totals):
            remember(_calls, key, _prepared(call.tensors, call.result.shape, run))
    value = deliver(run(call.tensors), call.tensors.out, call.tensors.out_scale, call.result)
    wrote(out)
    return (value[0], dict(zip(epilogue.names_of_totals(), value[1]))) if len(call.result.totals) and epilogue else value


def _new_totals(a: torch.Tensor, count: int) -> Any:
    return a.new_empty((count, *a.shape[:-1]), dtype=torch.float64 if a.dtype == torch.float64 else torch.float32) if count else ()


def deliver(value: Any, out: torch.Tensor, scale: torch.Tensor | None, result: Result) -> Any:
    """What the caller gets: a backend's own result where it gave one, else what it wrote (``out`` and ``scale``, views or copies
    of the caller's tensors)."""
    if value is not None:
        if not isinstance(value, tuple):
            return value.view(result.shape)
        if len(result.totals):
            return value[0].view(result.shape), tuple([t.view(result.shape[:-1]) for t in value[1]])
        assert result.scale is not None
        return value[0].view(result.shape), value[1].reshape(result.scale.shape)
    if not is_view(result.out):
        result.out.copy_(out.view(result.shape))
    if result.scale is None:
        return (result.out, result.totals) if len(result.totals) else result.out
    if scale is not None and not is_view(result.scale):
        result.scale.copy_(scale.view(result.scale.shape))
    return result.out, result.scale


def _prepared_generated(sample: Described, run: Any) -> Callable[..., Any]:
    """The repeated call of a bound kernel, which only re-reads addresses: no views are needed."""
    out, scale = sample.result.out, sample.result.scale
    shape, dtype, same, beta = tuple(out.shape), out.dtype, out.dtype == sample.tensors.a.dtype, sample.tensors.beta
    scale_shape = None if scale is None else tuple(scale.shape)
    packed, pack, device = sample.problem.weight_format is not None, GemmTensors, out.device
    meets, count = meeting(out, sample.tensors), len(sample.result.totals)
    rows = (count, *sample.tensors.out.shape[:2])

    def call(a: torch.Tensor, b: Any, bias: Any, c: Any, scale_a: Any, scale_b: Any, out: Any, epilogue: Any) -> Any:
        zero = scale = None
        if packed:
            b, scale_b, zero = b.codes, b.scale, b.zero
        given = out
        if scale_shape is not None:
            out, scale = split_output(out, "")
            scale = a.new_empty(scale_shape, dtype=torch.float32) if scale is None else scale
        if out is not None:
            if meets(out, a, b, c):
                check_apart("out", out, a=a, b=b, c=other_addend(c, beta, out))
            check_apart_from_extras(out, epilogue)
            wrote(given)
        else:
            out = a.new_empty(shape) if same else a.new_empty(shape, dtype=dtype)
        if epilogue is None:
            run(pack(a, b, out, bias, c, beta, scale_a, scale_b, zero, scale))
        else:
            totals = _new_totals(a, count)
            run(pack(a, b, out, scale_a=scale_a, scale_b=scale_b, zero_b=zero, epilogue=epilogue, words=epilogue.words(device),
                     totals=totals.view(rows) if count else ()))
            if count:
                return out, dict(zip(epilogue.names_of_totals(), totals))
        return out if scale is None else (out, scale)

    return call


def _prepared(sample: GemmTensors, shape: tuple[int, ...], run: Any) -> Callable[..., Any]:
    """The repeated call of a wrapped backend: three-dimensional views of the operands, one allocation, run."""
    dtype, device, flat, meets = sample.out.dtype, sample.out.device, sample.out.shape, meeting(sample.out, sample)

    def call(a: torch.Tensor, b: torch.Tensor, bias: Any, c: Any, scale_a: Any, scale_b: Any, out: Any, epilogue: Any) -> torch.Tensor:
        target = torch.empty(flat, dtype=dtype, device=device) if out is None else as_batch(out)
        if out is not None and meets(out, a, b, None):
            check_apart("out", out, a=a, b=b)
        check_apart_from_extras(out, epilogue)
        result = run(GemmTensors(as_batch(a), as_batch(b), target, bias, epilogue=epilogue))
        if result is not None:
            return result.view(shape)
        return target.view(shape) if out is None else out  # torch's operators count what they write

    return call


def explain_gemm(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for a gemm call with these arguments, without running it."""
    values = dict(zip(("a", "b"), args)) | kwargs
    return choose(_describe(**_described_by(values)).problem, target, backend, live=live)


def _described_by(values: dict[str, Any]) -> dict[str, Any]:
    """Arguments of gemm as those of _describe."""
    defaults: dict[str, Any] = dict(bias=None, activation=None, gate_up="gate_first", c=None, beta=1.0, accumulate="float32",
                                    out_dtype=None, out_scale=None, out=None, deterministic=True)
    values["function"] = values.pop("epilogue", None)
    defaults["function"] = None
    epilogue = Epilogue(**{name: values.pop(name, default) for name, default in defaults.items()})
    return dict(scale_a=None, scale_b=None) | values | dict(e=epilogue)


def is_view(t: torch.Tensor | None) -> bool:
    """Whether :func:`as_batch` makes no copy."""
    return t is None or t.dim() <= 3 or address_of(as_batch(t)) == address_of(t)


def _all_views(a: torch.Tensor, b: Weight, scale_a: Any, scale_b: Any, c: Any, result: Result) -> bool:
    parts = [b.codes, b.scale, b.zero] if isinstance(b, PackedWeight) else [b]
    return all(map(is_view, (a, *parts, scale_a, scale_b, c, result.out, result.scale)))


def _describe(a: torch.Tensor, b: Weight, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, e: Epilogue) -> Described:
    """Check everything, allocate the output."""
    parts = packed_parts(b)
    check_required(a=a, b=parts[0])
    check_tensors(a=a, b=parts[0], bias=e.bias, c=e.c, scale_a=scale_a, scale_b=scale_b,
                  **dict(zip(("out", "out_scale"), split_output(e.out, e.out_scale))))
    check_flags(deterministic=e.deterministic)
    for name, t, rank in (("a", a, a.dim()), ("b", parts[0], len(b.shape))):
        if rank < 2:
            raise ShapeError(f"{name}: got shape {shape_text(t)}, expected at least 2 dimensions")
    check_operands(a, b, scale_a, scale_b)
    lead, (k, n) = tuple(b.shape[:-2]), reversed(b.shape[-2:]) if isinstance(b, PackedWeight) else b.shape[-2:]
    if a.shape[-1] != k:
        raise ShapeError(f"got K = {a.shape[-1]} in a {shape_text(a)} and {k} in b {(*lead, k, n)}, expected one value")
    if lead and a.shape[:-2] != lead:
        raise ShapeError(f"got a {shape_text(a)} and b {(*lead, k, n)}, expected the same leading dimensions, or b (K, N)")
    check_options(e)
    if e.function is not None:
        check_function(e, (*a.shape[:-1], n), a.device)
    traced = None if e.function is None else e.function.traced
    shape = (*a.shape[:-1], n // 2 if traced is not None and traced.gated else outputs_of(e.activation, n))
    check_bias(e.bias, n)
    check_addend(e.c, shape)
    grad = needs_torch(a, parts[0], e.bias, e.c, scale_a, scale_b, *(e.function.tensors.values() if e.function is not None else ()))
    result = make_result(e, a, shape, grad=grad)
    if e.function is not None:
        result = result._replace(totals=_new_totals(a, len(e.function.names_of_totals())))
    if e.out is not None:
        check_results_apart(result, e, a=a, b=parts[0], scale_a=scale_a, scale_b=scale_b)
        check_apart_from_extras(result.out, e.function)
    # With a shared b the batch stays: folding it into M would ask for more of a's strides. What does not fold is copied, and an
    # output copied back in the end.
    a3, out3, c3 = as_batch(a), as_batch(result.out), None if e.c is None else as_batch(e.c)
    b3, scales, view_a, view_b, zero, words = describe_b(a, b, scale_a, scale_b)
    problem = GemmProblem(
        batch=a3.shape[0], m=a.shape[-2], n=n, k=k, a_dtype=dtype_name(a.dtype), out_dtype=dtype_name(result.dtype),
        a_order=order_of("a", a3), batched_b=bool(lead), bias=e.bias is not None,
        activation=e.activation if traced is None else FUNCTION, epilogue=traced,
        gate_up=e.gate_up, accumulate_c=e.c is not None, scales=scales, out_scale=e.out_scale,
        accumulate=e.accumulate, deterministic=bool(e.deterministic), requires_grad=grad,
        bias_dtype=dtype_name(e.bias.dtype) if e.bias is not None else None, c_dtype=dtype_name(e.c.dtype) if e.c is not None else None,
        alignment=alignment_of_operands(a3, b3), out_alignment=alignment_of(c3, out3), **words,
    )
    out_scale = scale_view(e.out_scale, result.scale)
    words_of = None if e.function is None or a.device.type == "meta" else e.function.words(a.device)
    tensors = GemmTensors(a3, b3, out3, e.bias, c3, beta_of(e), view_a, view_b, zero, out_scale, epilogue=e.function, words=words_of,
                          totals=result.totals.view(len(result.totals), *a3.shape[:2]) if len(result.totals) else ())
    return Described(problem, tensors, result)


def packed_parts(b: Weight) -> tuple[Any, ...]:
    """The tensors of b: itself, or codes, scale and zero."""
    return (b.codes, b.scale, b.zero) if isinstance(b, PackedWeight) else (b,)


def describe_b(
    a: torch.Tensor, b: Weight, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None,
) -> tuple[torch.Tensor, str | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, dict[str, Any]]:
    """(b, recipe, scale_a, scale_b, zero_b) as GemmTensors has them, and the fields of the problem that b decides."""
    if isinstance(b, PackedWeight):
        scale_name = "e8m0" if b.format == "mxfp4" else dtype_name(b.scale.dtype)
        words = dict(b_dtype=b.format, b_order="col", weight_format=b.format, group_size=b.group_size, scale_dtype=scale_name,
                     zero_points=b.zero is not None)
        zero = None if b.zero is None else as_batch(b.zero).mT
        return as_batch(b.codes), None, None, as_batch(b.scale).mT, zero, words
    recipe, view_a, view_b = operand_scales(a, b, scale_a, scale_b)
    b3 = as_batch(b)
    return b3, recipe, view_a, view_b, None, dict(b_dtype=dtype_name(b.dtype), b_order=order_of("b", b3))
