"""What gemm and the grouped products check and describe alike: operands, recipes of scales, epilogues, outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernelgen.dtypes import dtype_name
from kernelgen.errors import DtypeError, LayoutError, SettingsError, ShapeError
from kernelgen.ops.checks import check_apart, check_no_output_with_grad, check_output, check_same_dtype, number, shape_text, span_of
from kernelgen.ops.weights import PackedWeight
from kernelgen.problems.common import alignment_of
from kernelgen.problems.gemm import ACTIVATIONS, GATED_ACTIVATIONS
from kernelgen.variants.epilogue_function import EpilogueFunction

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
BLOCK = 128
_SIDES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
GATE_ORDERS = ("gate_first", "up_first", "interleaved")
OUT_SCALES = ("tensor", "row", "block_1x128")

Weight = torch.Tensor | PackedWeight
Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


class Epilogue(NamedTuple):
    """The options of a product as the caller gave them; ``out`` is a tensor, or (codes, scale) with ``out_scale``."""

    bias: torch.Tensor | None
    activation: str | None
    gate_up: str
    c: torch.Tensor | None
    beta: Any
    accumulate: str
    out_dtype: torch.dtype | None
    out_scale: str | None
    out: Output
    deterministic: bool
    function: EpilogueFunction | None = None


class Result(NamedTuple):
    """Where a product goes: ``out`` and, quantised, ``scale``, of the caller's shapes; ``totals`` (totals, .., M)."""

    out: torch.Tensor
    scale: torch.Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    totals: Any = ()


def blocks_of(size: int) -> int:
    return -(-size // BLOCK)


def as_batch(t: torch.Tensor) -> torch.Tensor:
    """(.., R, C) as (B, R, C): a view, or a copy where the leading dimensions do not fold into one stride."""
    return t if t.dim() == 3 else t.unsqueeze(0) if t.dim() == 2 else t.reshape(math.prod(t.shape[:-2]), *t.shape[-2:])


def order_of(name: str, t: torch.Tensor) -> str:
    """"row" if the last dimension is contiguous, "col" if the one before is; size-1 dimensions count as either.

    Of a single column whose rows are neighbours it is "col": seen as rows of one element each it would have no alignment.
    """
    rows, columns = t.shape[-2:]
    if columns <= 1 and rows > 1 and t.stride(-2) == 1:
        return "col"
    if columns <= 1 or t.stride(-1) == 1:
        return "row"
    if rows <= 1 or t.stride(-2) == 1:
        return "col"
    raise LayoutError(
        f"{name}: got strides {t.stride()[-2:]} of its last two dimensions, ({rows}, {columns}), expected stride 1 in one of them; call "
        f"{name}.contiguous()"
    )


def alignment_of_operands(a: torch.Tensor, b: torch.Tensor) -> int:
    """Alignment class with each operand seen along its contiguous dimension; codes of a packed b along K."""
    return alignment_of(*(x.transpose(-1, -2) if x.dtype != torch.uint8 and order_of("", x) == "col" else x for x in (a, b)))


def split_output(out: Output, out_scale: str | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(out or codes, scale) of what the caller gave."""
    if not isinstance(out, (tuple, list)):
        return out, None
    if out_scale is None or len(out) != 2:
        raise DtypeError(f"out: got a pair with out_scale={out_scale!r}, expected a tensor; (codes, scale) with out_scale")
    return out[0], out[1]


def check_operands(a: torch.Tensor, b: Weight, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None) -> None:
    """Dtypes that multiply, and scales where these need them."""
    dtype_name(a.dtype)
    if isinstance(b, PackedWeight):
        if a.dtype in FP8 or a.dtype == torch.float64:
            raise DtypeError(f"a: got {a.dtype} with a packed weight, expected float32, bfloat16 or float16")
        if scale_a is not None or scale_b is not None:
            raise DtypeError("scale_a, scale_b: got one with a packed weight, expected none: the weight carries its own")
        return
    dtype_name(b.dtype)
    if not (a.dtype in FP8 and b.dtype in FP8):
        check_same_dtype(a=a, b=b)
        if scale_a is not None or scale_b is not None:
            raise DtypeError(f"scale_a, scale_b: got one with {a.dtype} operands, expected fp8 ones; scale the result instead")
    elif scale_a is None or scale_b is None:
        raise DtypeError(f"got {a.dtype} without scale_a and scale_b, expected both float32 scales for fp8")


def check_options(e: Epilogue) -> None:
    for name, got, legal in (
        ("activation", e.activation, (None, *ACTIVATIONS)), ("gate_up", e.gate_up, GATE_ORDERS),
        ("accumulate", e.accumulate, ("float32", "fast")), ("out_scale", e.out_scale, (None, *OUT_SCALES)),
    ):
        if got not in legal:
            raise SettingsError(f"{name}: got {got!r}, expected one of {', '.join(map(str, legal))}")
    if e.out_dtype is not None and not isinstance(e.out_dtype, torch.dtype):
        raise DtypeError(f"out_dtype: got {e.out_dtype!r}, expected a torch dtype such as torch.bfloat16")


def check_function(e: Epilogue, shape: tuple[int, ...], device: torch.device) -> None:
    """A user's epilogue, of a product of ``shape``. Raises SettingsError beside what it takes the place of."""
    if not isinstance(e.function, EpilogueFunction):
        raise SettingsError(f"epilogue: got a {type(e.function).__name__}, expected one made by kernelgen.epilogue(function)")
    for name, got in (("bias", e.bias), ("activation", e.activation), ("c", e.c), ("out_scale", e.out_scale)):
        if got is not None:
            raise SettingsError(f"{name}: got one beside an epilogue, expected none: write it into the function, or leave the epilogue out")
    e.function.check(shape, device)


def outputs_of(activation: str | None, n: int) -> int:
    """Columns of the output. Raises ShapeError where gate and up do not pair up."""
    if activation not in GATED_ACTIVATIONS:
        return n
    if n % 2:
        raise ShapeError(f"got N = {n} for {activation}, expected an even N: gate and up lie side by side")
    return n // 2


def _check_side(name: str, t: torch.Tensor) -> None:
    """Of what is added in float32: fp8 has no scale there, and whole numbers no meaning."""
    if t.dtype not in _SIDES:
        raise DtypeError(f"{name}: got {t.dtype}, expected float32, bfloat16, float16 or float64; convert with .to()")


def check_bias(bias: torch.Tensor | None, n: int, groups: int | None = None) -> None:
    """(N), or (E, N) of a product in groups."""
    if bias is None:
        return
    _check_side("bias", bias)
    forms = {(n,): f"({n}), the N of b"} | ({} if groups is None else {(groups, n): f"({groups}, {n})"})
    if tuple(bias.shape) not in forms:
        raise ShapeError(f"bias: got shape {shape_text(bias)}, expected {' or '.join(forms.values())}")
    if n > 1 and bias.stride(-1) != 1:
        raise LayoutError(f"bias: got stride {bias.stride(-1)}, expected 1; call bias.contiguous()")


def check_addend(c: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if c is None:
        return
    _check_side("c", c)
    if tuple(c.shape) != shape:
        raise ShapeError(f"c: got shape {shape_text(c)}, expected {shape}, the shape of the output")
    if shape[-1] > 1 and c.stride(-1) != 1:
        raise LayoutError(f"c: got stride {c.stride(-1)} in the last dimension, expected 1; call c.contiguous()")


def make_result(e: Epilogue, a: torch.Tensor, shape: tuple[int, ...], *, grad: bool) -> Result:
    """Check what the caller gave to write to, allocate the rest."""
    out, scale = split_output(e.out, e.out_scale)
    dtype = e.out_dtype or (out.dtype if out is not None else torch.bfloat16 if a.dtype in FP8 else a.dtype)
    if e.out_scale is not None:
        dtype = e.out_dtype or (out.dtype if out is not None else torch.float8_e4m3fn)
        if dtype not in FP8:
            raise DtypeError(f"out_dtype: got {dtype} with out_scale, expected float8_e4m3fn or float8_e5m2")
    elif dtype in FP8:
        raise DtypeError(f"out_dtype: got {dtype} without out_scale, expected it with one: the values need a scale")
    if grad:
        check_no_output_with_grad(out=out)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=a.device)
    else:
        check_output("out", out, shape, dtype, a.device)
    if e.out_scale is not None:
        wanted = scale_shape(e.out_scale, shape)
        if scale is None:
            scale = torch.empty(wanted, dtype=torch.float32, device=a.device)
        check_scale_output("out scale", scale, wanted, a.device)
    return Result(out, scale, shape, dtype)


def other_addend(c: torch.Tensor | None, beta: Any, out: torch.Tensor) -> torch.Tensor | None:
    """c where it is read, and is not out itself, element by element."""
    if c is None or c is out or beta == 0:
        return None
    return None if (c.data_ptr(), c.stride(), c.dtype) == (out.data_ptr(), out.stride(), out.dtype) else c


def check_results_apart(result: Result, e: Epilogue, **read: torch.Tensor | None) -> None:
    """Nothing that a product reads lies where it writes, but for c in its own place."""
    out, scale = split_output(e.out, e.out_scale)
    check_apart("out", out, bias=e.bias, c=other_addend(e.c, e.beta, result.out), **read)
    check_apart("out scale", scale, out=result.out, bias=e.bias, c=e.c, **read)


def check_apart_from_extras(out: torch.Tensor | None, function: EpilogueFunction | None) -> None:
    """An epilogue may read any element of its tensors, not only the one in the place that it writes."""
    if out is not None and function is not None:
        check_apart("out", out, **{f"extra tensor {name!r}": t for name, t in function.tensors.items()})


def meeting(out: torch.Tensor, t: Any) -> Callable[..., bool]:
    """(out, a, b, c) -> do the spans of memory of a prepared call meet? Then a closer look is due: :func:`check_apart`."""
    span, span_a, span_b, span_c = span_of(out), span_of(t.a), span_of(t.b), 0 if t.c is None else span_of(t.c)

    def meets(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None) -> bool:
        at = out.data_ptr()
        return (-span < at - a.data_ptr() < span_a or -span < at - b.data_ptr() < span_b
                or c is not None and c is not out and -span < at - c.data_ptr() < span_c)

    return meets


def scale_shape(recipe: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the scale of quantised values (.., M, K)."""
    rows, columns = shape[-2:]
    last = {"row": (rows, 1), "block_1x128": (rows, blocks_of(columns)), "block_128x128": (blocks_of(rows), blocks_of(columns))}
    return () if recipe == "tensor" else (*shape[:-2], *last[recipe])


def check_scale_output(name: str, scale: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """A scale to be written: any strides, so that either dimension may be the contiguous one."""
    if not isinstance(scale, torch.Tensor):
        raise DtypeError(f"{name}: got {type(scale).__name__}, expected a torch.Tensor")
    if scale.numel() == 0:  # no strides to look at
        scale = torch.empty_like(scale, memory_format=torch.contiguous_format)
    # Seen from its larger strides to its smaller ones it must be an ordinary output.
    order = sorted(range(scale.dim()), key=lambda d: scale.stride()[d], reverse=True)
    if scale.dim() == len(shape) and (not order or scale.stride(order[-1]) <= 1):
        scale, shape = scale.permute(order), tuple(shape[d] for d in order)
    check_output(name, scale, shape, torch.float32, device)


def scale_view(recipe: str | None, scale: torch.Tensor | None) -> torch.Tensor | None:
    """The scale of an output as kernels write it: (B, M, 1), (B, M, blocks) or one entry (1, 1, 1) with strides 0.

    A view whenever leading dimensions fold.
    """
    if scale is None:
        return None
    return scale.expand(1, 1, 1) if recipe == "tensor" else as_batch(scale)


def operand_scales(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None,
) -> tuple[str | None, torch.Tensor | None, torch.Tensor | None]:
    """The recipe that the scales' shapes spell, and both as GemmTensors wants them. a (.., M, K), b (.., K, N).

    scale_a: scalar, (M, 1), (M, ceil(K / 128)); scale_b: scalar, (1, N), (ceil(K / 128), ceil(N / 128)),
    (ceil(K / 128), N), or (E) of a stack of E matrices; leading dimensions as the operand's or none.
    """
    if scale_a is None or scale_b is None:
        return None, None, None
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale.dtype != torch.float32:
            raise DtypeError(f"{name}: got {scale.dtype}, expected float32; convert with .to()")
    (m, k), n = a.shape[-2:], b.shape[-1]
    blocks = blocks_of(k)
    forms_a = _forms("scale_a", scale_a, a, {"row": (m, 1), "block": (m, blocks)})
    forms_b = _forms("scale_b", scale_b, b, {"row": (1, n), "block_128x128": (blocks, blocks_of(n)), "block_1x128": (blocks, n)})
    for recipe, of_a, of_b in (
        ("tensor", ("tensor",), ("tensor",)), ("row", ("row", "tensor"), ("row", "expert", "tensor")),
        ("block_128x128", ("block",), ("block_128x128",)), ("block_1x128", ("block",), ("block_1x128",)),
    ):
        if forms_a & set(of_a) and forms_b & set(of_b):
            view_a, view_b = _expand(scale_a, a, (m, 1)), _expand(scale_b, b, (1, n))
            return recipe, view_a, view_b
    raise ShapeError(f"got scale_a {shape_text(scale_a)} and scale_b {shape_text(scale_b)}, expected scalars; (M, 1) and (1, N); or blocks "
                     f"of 128 on both sides: {(m, blocks)} with {(blocks, blocks_of(n))} or {(blocks, n)}")


def _forms(name: str, scale: torch.Tensor, operand: torch.Tensor, forms: dict[str, tuple[int, int]]) -> set[str]:
    """What the shape can mean; sizes for which two forms coincide give them one meaning too."""
    if scale.dim() <= 1 and scale.numel() == 1:
        return {"tensor"}
    lead = tuple(operand.shape[:-2])
    if name == "scale_b" and len(lead) == 1 and tuple(scale.shape) == lead:
        return {"expert"}
    found = {form for form, last in forms.items() if tuple(scale.shape[-2:]) == last} if scale.dim() >= 2 else set()
    if not found or tuple(scale.shape[:-2]) not in ((), lead):
        listed = ", ".join(f"{last}" for last in forms.values())
        raise ShapeError(f"{name}: got shape {shape_text(scale)}, expected a scalar, one of {listed}, with the leading dimensions {lead} "
                         "or none")
    return found


def _expand(scale: torch.Tensor, operand: torch.Tensor, last: tuple[int, int]) -> torch.Tensor:
    """As (B, R, C), stride 0 where an extent shares an entry. Blocks stay as they are."""
    batch = math.prod(operand.shape[:-2])
    if scale.dim() <= 1:  # scalar, or one per matrix of a stack
        return scale.reshape(-1, 1, 1).expand(batch, *last)
    if scale.dim() == 2:
        return scale.unsqueeze(0).expand(batch, *scale.shape)
    return as_batch(scale)


def beta_of(e: Epilogue) -> float:
    return number("beta", e.beta)
