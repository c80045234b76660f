"""gemm: one matrix product with a fused epilogue, through the dispatcher."""

from __future__ import annotations

import math
from typing import Any

import torch

from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import choose, prepare
from kernelgen.dtypes import dtype_name
from kernelgen.errors import DtypeError, LayoutError, SettingsError, ShapeError
from kernelgen.guard import ORDINARY, address_of, check_backend, check_flags, check_required, needs_torch, watched
from kernelgen.ops.checks import check_no_output_with_grad, check_output, check_same_dtype, check_tensors, number, shape_text
from kernelgen.ops.memo import layout_of, new_memo, remember
from kernelgen.problems.common import alignment_of
from kernelgen.problems.gemm import ACTIVATIONS, GATED_ACTIVATIONS, GemmProblem
from kernelgen.targets import Target, target_of
from kernelgen.tensors import GemmTensors

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_GATE_ORDERS = ("gate_first", "up_first", "interleaved")
_calls = new_memo()


def gemm(
    a: torch.Tensor, b: torch.Tensor, *, bias: torch.Tensor | None = None, activation: str | None = None,
    gate_up: str = "gate_first", c: torch.Tensor | None = None, beta: float = 1.0, scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None, accumulate: str = "float32", out_dtype: torch.dtype | None = None,
    out_scale: str | None = None, out: torch.Tensor | None = None, deterministic: bool = True, backend: str = "auto",
) -> Any:
    """activation(a @ b + bias) + beta * c, accumulated in float32 (float64 for float64 tensors).

    a (.., M, K), b (K, N) or batched (.., K, N); any order by strides, so a Linear weight goes in as ``w.t()``.
    bias (N); activation one of relu, gelu, gelu_tanh, silu, or gated: swiglu, geglu, which halve N (``gate_up`` says
    how gate and up lie along N: "gate_first", "up_first", "interleaved"); c has the shape of the output. fp8 inputs
    take float32 ``scale_a``, ``scale_b`` whose shapes say the recipe (CONTRACTS: GEMM). Returns (.., M, N) in
    ``out_dtype``, default a's dtype (bfloat16 for fp8). With ``out_scale`` ("tensor", "row", "block_1x128") the result is
    (fp8 codes, float32 scale) as from quantize_fp8. ``out`` may be c itself, and must not overlap anything else.

    Raises ShapeError, DtypeError, DeviceError, LayoutError, SettingsError; NoBackendError with the table of reasons; CompileError.
    """
    key: Any = None
    if (c is None and scale_a is None and scale_b is None and out_scale is None and type(a) in ORDINARY and type(b) in ORDINARY
            and type(deterministic) is bool and not watched() and a.layout == b.layout == torch.strided):
        grad = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or getattr(bias, "requires_grad", False))
        address_a, address_b = a.data_ptr(), b.data_ptr()
        key = (
            a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, a.device, b.device, (address_a | address_b) & 15,
            layout_of(bias), activation, gate_up, accumulate, out_dtype, deterministic, backend, grad, layout_of(out),
        )
        if not (address_a and address_b) or a.is_neg() or b.is_neg():
            key = None  # nothing there, or not as it seems: the long way looks closer
        try:
            call = _calls.get(key)
        except TypeError:  # an option that has no hash is no legal one
            key = call = None
        if call is not None:
            return call(a, b, bias, out)
    check_backend(backend)
    problem, tensors, shape = _describe(
        a, b, bias, activation, gate_up, c, beta, scale_a, scale_b, accumulate, out_dtype, out_scale, out, deterministic)
    decision, run = prepare(problem, target_of(a.device), backend, tensors)
    views = _is_view(a) and _is_view(b) and _is_view(out)
    if key is not None and views:  # the prepared call re-reads addresses, which a copy would not follow
        generated = decision.chosen is not None and decision.chosen.backend == "generated"
        remember(_calls, key, (_prepared_generated if generated else _prepared)(tensors, shape, run))
    result = run(tensors)
    if isinstance(result, tuple):
        return _with_scale(result, shape, out)
    if result is not None:
        return result.view(shape)
    if out is None:
        return tensors.out.view(shape)
    return out if _is_view(out) else out.copy_(tensors.out.view(shape))


def _with_scale(result: tuple[torch.Tensor, torch.Tensor], shape: tuple[int, ...], out: torch.Tensor | None) -> Any:
    """(fp8 codes, scale) of a quantised result in the caller's shape."""
    codes, scale = result[0].view(shape), result[1]
    if scale.dim() == 3:
        scale = scale.reshape(*shape[:-2], *scale.shape[-2:])
    return (codes if out is None else out.copy_(codes)), scale


def _prepared_generated(sample: GemmTensors, shape: tuple[int, ...], run: Any) -> Any:
    """The repeated call of a bound kernel, which only re-reads addresses: no views are needed."""
    dtype, same = sample.out.dtype, sample.out.dtype == sample.a.dtype
    pack = GemmTensors

    def call(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        if out is None:
            out = a.new_empty(shape) if same else a.new_empty(shape, dtype=dtype)
        run(pack(a, b, out, bias))
        return out

    return call


def _prepared(sample: GemmTensors, shape: tuple[int, ...], run: Any) -> Any:
    """The repeated call of a wrapped backend: three-dimensional views of the operands, one allocation, run."""
    dtype, device, flat = sample.out.dtype, sample.out.device, sample.out.shape

    def call(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        target = torch.empty(flat, dtype=dtype, device=device) if out is None else _as_batch(out)
        result = run(GemmTensors(_as_batch(a), _as_batch(b), target, bias))
        if result is not None:
            return result.view(shape)
        return target.view(shape) if out is None else out

    return call


def explain_gemm(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for a gemm call with these arguments, without running it."""
    defaults = dict(
        bias=None, activation=None, gate_up="gate_first", c=None, beta=1.0, scale_a=None, scale_b=None, accumulate="float32",
        out_dtype=None, out_scale=None, out=None, deterministic=True,
    )
    problem, _, _ = _describe(**(defaults | dict(zip(("a", "b"), args)) | kwargs))
    return choose(problem, target, backend, live=live)


def _as_batch(t: torch.Tensor) -> torch.Tensor:
    """(.., R, C) as (B, R, C): a view, or a copy where the leading dimensions do not fold into one stride."""
    return t if t.dim() == 3 else t.unsqueeze(0) if t.dim() == 2 else t.reshape(math.prod(t.shape[:-2]), *t.shape[-2:])


def _is_view(t: torch.Tensor | None) -> bool:
    """Whether :func:`_as_batch` makes no copy."""
    return t is None or t.dim() <= 3 or address_of(_as_batch(t)) == address_of(t)


def _fold(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands as (B, R, C). With a shared b the batch stays: folding it into M would ask for more of a's strides."""
    if b.dim() > 2 and a.shape[:-2] != b.shape[:-2]:
        raise ShapeError(f"got a {shape_text(a)} and b {shape_text(b)}, expected the same leading dimensions, or b (K, N)")
    return _as_batch(a), _as_batch(b)


def _order(name: str, t: torch.Tensor) -> str:
    """"row" if the last dimension is contiguous, "col" if the one before is; size-1 dimensions count as either."""
    rows, columns = t.shape[-2:]
    if columns <= 1 or t.stride(-1) == 1:
        return "row"
    if rows <= 1 or t.stride(-2) == 1:
        return "col"
    raise LayoutError(
        f"{name}: got strides {t.stride()} of {shape_text(t)}, expected stride 1 in one of the last two dimensions; "
        f"call {name}.contiguous()"
    )


def _describe(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str | None, gate_up: str, c: torch.Tensor | None,
    beta: float, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, accumulate: str, out_dtype: torch.dtype | None,
    out_scale: str | None, out: torch.Tensor | None, deterministic: bool,
) -> tuple[GemmProblem, GemmTensors, tuple[int, ...]]:
    """Check everything, allocate the output; also returns the caller's output shape."""
    check_required(a=a, b=b)
    check_tensors(a=a, b=b, bias=bias, c=c, scale_a=scale_a, scale_b=scale_b, out=out)
    check_flags(deterministic=deterministic)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise DtypeError(f"out_dtype: got {out_dtype!r}, expected a torch dtype such as torch.bfloat16")
    for name, t in (("a", a), ("b", b)):
        if t.dim() < 2:
            raise ShapeError(f"{name}: got shape {shape_text(t)}, expected at least 2 dimensions")
        dtype_name(t.dtype)
    if not (a.dtype in _FP8 and b.dtype in _FP8):
        check_same_dtype(a=a, b=b)
        if scale_a is not None or scale_b is not None:
            raise DtypeError(f"scale_a, scale_b: got one with {a.dtype} operands, expected fp8 ones; scale the result instead")
    elif scale_a is None or scale_b is None:
        raise DtypeError(f"got {a.dtype} without scale_a and scale_b, expected both float32 scales for fp8")
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(f"got K = {a.shape[-1]} in a {shape_text(a)} and {b.shape[-2]} in b {shape_text(b)}, expected one value")
    _check_options(activation, gate_up, accumulate, out_scale)
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if activation in GATED_ACTIVATIONS and n % 2:
        raise ShapeError(f"got N = {n} for {activation}, expected an even N: gate and up lie side by side")
    if bias is not None:
        if tuple(bias.shape) != (n,):
            raise ShapeError(f"bias: got shape {shape_text(bias)}, expected ({n}), the N of b")
        if n > 1 and bias.stride(0) != 1:
            raise LayoutError(f"bias: got stride {bias.stride(0)}, expected 1; call bias.contiguous()")
    a3, b3 = _fold(a, b)
    if out_scale is not None:
        out_dtype = out_dtype or torch.float8_e4m3fn
        if out_dtype not in _FP8:
            raise DtypeError(f"out_dtype: got {out_dtype} with out_scale, expected float8_e4m3fn or float8_e5m2")
    dtype = out_dtype or (out.dtype if out is not None else torch.bfloat16 if a.dtype in _FP8 else a.dtype)
    shape = (*a.shape[:-1], n // 2 if activation in GATED_ACTIVATIONS else n)
    grad = needs_torch(a, b, bias, c)
    if grad:
        check_no_output_with_grad(out=out)
    if out is None:
        out3 = torch.empty((math.prod(a.shape[:-2]), *shape[-2:]), dtype=dtype, device=a.device)
    else:
        check_output("out", out, shape, dtype, a.device)
        out3 = _as_batch(out)  # a copy where out does not fold; gemm() writes it back
    c3 = None
    if c is not None:
        if tuple(c.shape) != shape:
            raise ShapeError(f"c: got shape {shape_text(c)}, expected {shape}, the shape of the output")
        if shape[-1] > 1 and c.stride(-1) != 1:
            raise LayoutError(f"c: got stride {c.stride(-1)} in the last dimension, expected 1; call c.contiguous()")
        c3 = _as_batch(c)
    problem = GemmProblem(
        batch=a3.shape[0], m=m, n=n, k=k, a_dtype=dtype_name(a.dtype), b_dtype=dtype_name(b.dtype), out_dtype=dtype_name(dtype),
        a_order=_order("a", a3), b_order=_order("b", b3), batched_b=b.dim() > 2, bias=bias is not None, activation=activation,
        gate_up=gate_up, accumulate_c=c is not None, scales=_recipe(a, b, scale_a, scale_b), out_scale=out_scale,
        accumulate=accumulate, deterministic=deterministic, alignment=_alignment(a3, b3, c3, out3), requires_grad=grad,
        bias_dtype=dtype_name(bias.dtype) if bias is not None else None, c_dtype=dtype_name(c.dtype) if c is not None else None,
    )
    return problem, GemmTensors(a3, b3, out3, bias, c3, number("beta", beta), scale_a, scale_b), shape


def _alignment(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor) -> int:
    """Alignment class with each operand seen along its contiguous dimension."""
    views = [x.transpose(-1, -2) if _order("", x) == "col" else x for x in (a, b)]
    return alignment_of(*views, c, out)


def _check_options(activation: str | None, gate_up: str, accumulate: str, out_scale: str | None) -> None:
    for name, got, legal in (
        ("activation", activation, (None, *ACTIVATIONS)), ("gate_up", gate_up, _GATE_ORDERS),
        ("accumulate", accumulate, ("float32", "fast")), ("out_scale", out_scale, (None, "tensor", "row", "block_1x128")),
    ):
        if got not in legal:
            raise SettingsError(f"{name}: got {got!r}, expected one of {', '.join(map(str, legal))}")


def _recipe(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None) -> str | None:
    """Which fp8 recipe the scales' shapes spell. Backends check the details."""
    if scale_a is None and scale_b is None:
        return None
    if scale_a is None or scale_b is None:
        raise ShapeError("got one of scale_a and scale_b, expected both or none")
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    blocks = -(-k // 128)
    shapes = (tuple(scale_a.shape[-2:]), tuple(scale_b.shape[-2:]))
    if scale_a.numel() == 1 and scale_b.numel() == 1:
        return "tensor"
    table = {((m, 1), (1, n)): "row", ((m, blocks), (blocks, -(-n // 128))): "block_128x128", ((m, blocks), (blocks, n)): "block_1x128"}
    if shapes not in table:
        listed = "; ".join(f"{x} with {y}" for x, y in table)
        raise ShapeError(f"got scale_a {shapes[0]} and scale_b {shapes[1]}, expected scalars or one of: {listed}")
    return table[shapes]
