"""quantize_fp8: floating values to fp8 codes and their scales, through the dispatcher."""

from __future__ import annotations

from typing import Any

import torch

from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import choose, prepare
from kernelgen.dtypes import dtype_name
from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.guard import ORDINARY, check_backend, check_required, needs_torch, operator, record, through_torch, watched
from kernelgen.library.written import wrote
from kernelgen.ops.checks import check_apart, check_last_contiguous, check_no_output_with_grad, check_output, check_tensors, shape_text
from kernelgen.ops.gemm import deliver, is_view
from kernelgen.ops.memo import layout_of, new_memo, remember
from kernelgen.ops.products import FP8, GATE_ORDERS, Result, as_batch, check_scale_output, outputs_of, scale_shape, scale_view
from kernelgen.problems.common import alignment_of
from kernelgen.problems.gemm import ACTIVATIONS
from kernelgen.problems.quantize import RECIPES, QuantizeProblem
from kernelgen.targets import Target, target_of
from kernelgen.tensors import QuantizeTensors

Pair = tuple[torch.Tensor, torch.Tensor]
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_calls = new_memo()


@operator("quantize_fp8")
def quantize_fp8(
    x: torch.Tensor, recipe: str = "tensor", *, dtype: torch.dtype = torch.float8_e4m3fn, activation: str | None = None,
    gate_up: str = "gate_first", out: Pair | None = None, backend: str = "auto",
) -> Pair:
    """x (.., M, K) to fp8 codes (.., M, K) and their float32 scale, x = codes * scale up to rounding.

    Recipes and scale shapes: "tensor" (), "row" (.., M, 1), "block_1x128" (.., M, ceil(K/128)), "block_128x128" (..,
    ceil(M/128), ceil(K/128)). scale = amax / max(dtype), at least the smallest normal float, 1 where amax is 0; a NaN makes all
    that shares its scale NaN. ``dtype`` float8_e4m3fn or float8_e5m2. ``activation`` is applied first: relu, gelu, gelu_tanh,
    silu, or gated: swiglu (silu and mul), geglu, which halve K (``gate_up`` as in gemm). ``out``: (codes, scale) to write to; a
    scale of any strides, so that either of its dimensions may be the contiguous one.

    Raises ShapeError, DtypeError, DeviceError, LayoutError, SettingsError, NoBackendError, CompileError.
    """
    key: Any = None
    if type(x) in ORDINARY and not watched():
        key = (layout_of(x), x.requires_grad and torch.is_grad_enabled(), recipe, dtype, activation, gate_up, backend,
               None if type(out) is not tuple else tuple([layout_of(t, written=True) for t in out]))
        try:
            call = _calls.get(key) if out is None or type(out) is tuple else None
        except TypeError:
            key = call = None
        if call is not None:
            return call(x, out)
    elif through_torch(x):
        recorded: Pair = record("quantize_fp8", locals())
        return recorded
    check_backend(backend)
    problem, tensors, result = _describe(x, recipe, dtype, activation, gate_up, out)
    decision, run = prepare(problem, target_of(x.device), backend, tensors)
    generated = decision.chosen is not None and decision.chosen.backend == "generated"
    if key is not None and generated and x.data_ptr() and all(map(is_view, (x, result.out, result.scale))):
        remember(_calls, key, _prepared(result, run))
    value: Pair = deliver(run(tensors), tensors.codes, tensors.scale, result)
    wrote(out)
    return value


def _prepared(sample: Result, run: Any) -> Any:
    """The repeated call of a bound kernel, which only re-reads addresses."""
    assert sample.scale is not None
    shape, dtype, scale_of = sample.shape, sample.dtype, tuple(sample.scale.shape)

    def call(x: torch.Tensor, out: Pair | None) -> Pair:
        if out is None:
            out = x.new_empty(shape, dtype=dtype), x.new_empty(scale_of, dtype=torch.float32)
        else:
            check_apart("out codes", out[0], x=x)
            wrote(*out)
        run(QuantizeTensors(x, *out))
        return out

    return call


def explain_quantize_fp8(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for a quantize_fp8 call, without running it."""
    defaults: dict[str, Any] = dict(recipe="tensor", dtype=torch.float8_e4m3fn, activation=None, gate_up="gate_first", out=None)
    values = defaults | dict(zip(("x", "recipe"), args)) | kwargs
    return choose(_describe(**values)[0], target, backend, live=live)


def run_reference(problem: QuantizeProblem, t: QuantizeTensors) -> Pair | None:
    """The oracle, in float32 as kernels compute (float64 for float64 values)."""
    from kernelgen import reference

    compute = torch.float64 if t.x.dtype == torch.float64 else torch.float32
    codes, scale = reference.quantize_fp8(t.x, problem.recipe, dtype=t.codes.dtype, activation=problem.activation,
                                          gate_up=problem.gate_up, compute_dtype=compute)
    if problem.requires_grad:
        return codes, scale
    t.codes.copy_(codes)
    t.scale.copy_(scale)
    return None


def _describe(
    x: torch.Tensor, recipe: str, dtype: torch.dtype, activation: str | None, gate_up: str, out: Pair | None,
) -> tuple[QuantizeProblem, QuantizeTensors, Result]:
    check_required(x=x)
    for name, got, legal in (("recipe", recipe, RECIPES), ("activation", activation, (None, *ACTIVATIONS)),
                             ("gate_up", gate_up, GATE_ORDERS)):
        if got not in legal:
            raise SettingsError(f"{name}: got {got!r}, expected one of {', '.join(map(str, legal))}")
    if dtype not in FP8:
        raise DtypeError(f"dtype: got {dtype!r}, expected torch.float8_e4m3fn or torch.float8_e5m2")
    if x.dtype not in _FLOATS:
        raise DtypeError(f"x: got {x.dtype}, expected float32, bfloat16, float16 or float64")
    if x.dim() < 2:
        raise ShapeError(f"x: got shape {shape_text(x)}, expected (.., M, K)")
    if out is not None and (not isinstance(out, (tuple, list)) or len(out) != 2):
        raise DtypeError(f"out: got {type(out).__name__}, expected the pair (codes, scale)")
    codes, scale = out if out is not None else (None, None)
    check_tensors(x=x, codes=codes, scale=scale)
    check_last_contiguous(x=x)
    shape = (*x.shape[:-1], outputs_of(activation, x.shape[-1]))
    grad = needs_torch(x)
    if grad:
        check_no_output_with_grad(out=codes)
    if codes is None:
        codes = torch.empty(shape, dtype=dtype, device=x.device)
    if scale is None:
        scale = torch.empty(scale_shape(recipe, shape), dtype=torch.float32, device=x.device)
    check_output("out codes", codes, shape, dtype, x.device)
    check_scale_output("out scale", scale, scale_shape(recipe, shape), x.device)
    if out is not None:
        check_apart("out codes", out[0], x=x)
        check_apart("out scale", out[1], x=x, codes=codes)
    result = Result(codes, scale, shape, dtype)
    x3, codes3, view = as_batch(x), as_batch(codes), scale_view(recipe, scale)
    assert view is not None
    problem = QuantizeProblem(
        batch=codes3.shape[0], rows=codes3.shape[1], width=codes3.shape[2], dtype=dtype_name(x.dtype), code_dtype=dtype_name(dtype),
        recipe=recipe, activation=activation, gate_up=gate_up, alignment=alignment_of(x3, codes3), requires_grad=grad)
    return problem, QuantizeTensors(x3, codes3, view), result
