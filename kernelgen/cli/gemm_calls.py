"""The matrix products that the command line can describe."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from kernelgen.cli.options import (
    ALIGNMENT,
    DTYPE,
    FP8,
    GRAD,
    NONDETERMINISTIC,
    Call,
    Dims,
    EpilogueName,
    Form,
    Options,
    choice,
    element,
    flag,
    index,
    meta,
    number,
    torch_dtype,
)

GATE_UP = choice("--gate-up", ("gate_first", "up_first", "interleaved"), "Where gate and up lie.", default="gate_first",
                 show_default=True)
ACTIVATION = choice("--activation", ("relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"), "")
# Shapes of scale_a and scale_b per fp8 recipe, in extents; kb and nb count blocks of 128.
_SCALES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tensor": ((), ()), "row": (("m", "one"), ("one", "n")), "block_128x128": (("m", "kb"), ("kb", "nb")),
    "block_1x128": (("m", "kb"), ("kb", "n")),
}
_OUT_ALIGNMENT = click.option("--out-alignment", type=click.Choice(("1", "2", "4", "8", "16")), help="As --alignment, of c and out; that "
                              "is of a and b.")
_EPILOGUE: tuple[Callable[..., Any], ...] = (
    flag("--bias"), element("--bias-dtype", "With a bias of this type (default: the output's)."), ACTIVATION, GATE_UP,
    flag("--c", "Add c (a residual)."), element("--c-dtype", "With a c of this type (default: the output's)."),
    element("--out-dtype", "Element type of the output (default: a's)."), choice("--scales", tuple(_SCALES), "Recipe of fp8 inputs."),
    element("--b-dtype", "Element type of b beside an fp8 a (default: a's)."),
    choice("--out-scale", ("tensor", "row", "block_1x128"), "Quantise the output."),
    choice("--accumulate", ("float32", "fast"), "", default="float32", show_default=True),
    choice("--weight", ("int4", "mxfp4"), "b is a packed weight."),
    click.option("--group-size", type=click.Choice(("32", "64", "128")), default="128", show_default=True, help="Of int4 weights."),
    element("--weight-scale-dtype", "Element type of the scales of int4 weights (default: a's)."),
    flag("--zero-points", "int4 weights with zero points."), NONDETERMINISTIC, DTYPE, ALIGNMENT, _OUT_ALIGNMENT, GRAD,
)
_ORDERS = (
    choice("--a-order", ("row", "col"), "Which dimension of a is contiguous.", default="row", show_default=True),
    choice("--b-order", ("row", "col"), "Which dimension of b (K, N) is contiguous. A Linear weight w (N, K) used as w.t() is col.",
           default="row", show_default=True),
)


def _matrix(shape: tuple[int, ...], order: str, dtype: str, *, grad: bool = False) -> Any:
    """(.., R, C), in column order as the transpose of a contiguous (.., C, R)."""
    if order == "row":
        return meta(shape, dtype, grad=grad)
    return meta((*shape[:-2], shape[-1], shape[-2]), dtype, grad=grad).transpose(-1, -2)


def _weight(o: Options, lead: tuple[int, ...], k: int, n: int) -> Any:
    """b (.., K, N), packed where asked for."""
    if not o["weight"]:
        return _matrix((*lead, k, n), o["b_order"], o["b_dtype"] or o["dtype"])
    import torch

    from kernelgen.ops.weights import PackedWeight

    mx = o["weight"] == "mxfp4"
    group = 32 if mx else int(o["group_size"])
    shape, groups = (*lead, n, k), (*lead, n, -(-k // group))
    bytes_of = lambda shape: torch.empty(shape, dtype=torch.uint8, device="meta")  # noqa: E731
    scale = bytes_of(groups) if mx else meta(groups, o["weight_scale_dtype"] or o["dtype"])
    zero = bytes_of(groups) if o["zero_points"] else None
    return PackedWeight(o["weight"], shape, group, bytes_of((*lead, n, -(-k // 2))), scale, zero)


def _side_dtype(o: Options) -> str:
    """Of bias and c: the output's; float32 beside codes."""
    out_dtype: str = o["out_dtype"] or ("bf16" if o["dtype"] in FP8 else o["dtype"])
    return "fp32" if out_dtype in FP8 else out_dtype


def _features(o: Options, lead: tuple[int, ...], m: int, n: int, k: int) -> dict[str, Any]:
    """Keyword arguments that all products share; ``lead``: leading dimensions of the output."""
    outputs = n // 2 if o["activation"] in ("swiglu", "geglu") else n
    side_dtype = _side_dtype(o)
    kwargs: dict[str, Any] = {
        "activation": o["activation"], "gate_up": o["gate_up"], "out_dtype": torch_dtype(o["out_dtype"]), "accumulate": o["accumulate"],
        "out_scale": o["out_scale"], "deterministic": not o["nondeterministic"],
        "bias": meta((n,), o["bias_dtype"] or side_dtype) if o["bias"] or o["bias_dtype"] else None,
        "c": meta((*lead, m, outputs), o["c_dtype"] or side_dtype) if o["c"] or o["c_dtype"] else None,
    }
    if o["scales"]:
        size = {"m": m, "n": n, "one": 1, "kb": -(-k // 128), "nb": -(-n // 128)}
        for name, shape in zip(("scale_a", "scale_b"), _SCALES[o["scales"]]):
            kwargs[name] = meta(tuple(size[d] for d in shape), "fp32")
    return kwargs


def _gemm(o: Options) -> Call:
    m, n, k = o["mnk"]
    lead = () if o["batch"] is None else (o["batch"],)
    if o["batched_b"] and not lead:
        raise click.UsageError("--batched-b: got no --batch, expected one: b has the leading dimension of a")
    a = _matrix((*lead, m, k), o["a_order"], o["dtype"], grad=o["grad"])
    return Call((a, _weight(o, lead if o["batched_b"] else (), k, n)), _features(o, lead, m, n, k) | {"epilogue": o["epilogue"]})


def _grouped(o: Options, *, masked: bool) -> Call:
    (m, n, k), groups = o["mnk"], o["groups"]
    by_k = not masked and o["k_grouped"]
    a = _matrix((groups, m, k) if masked else (m, k), o["a_order"], o["dtype"], grad=o["grad"])
    features = _features(o, (groups,) if masked or by_k else (), m, n, k)
    if o["bias_per_group"]:
        features["bias"] = meta((groups, n), o["bias_dtype"] or _side_dtype(o))
    return Call((a, _weight(o, () if by_k else (groups,), k, n), index(groups)), features)


def _quantize_fp8(o: Options) -> Call:
    lead = () if o["batch"] is None else (o["batch"],)
    return Call((meta((*lead, *o["x"]), o["dtype"], grad=o["grad"]), o["recipe"]), {
        "dtype": torch_dtype(o["code_dtype"]), "activation": o["activation"], "gate_up": o["gate_up"]})


FORMS: dict[str, Form] = {
    "gemm": Form("activation(a @ b + bias) + beta * c.", (
        click.option("--mnk", type=Dims("M,N,K", example="512,4096,4096"), required=True, help="Extents; N is that of b."),
        *_ORDERS, number("--batch", "a is (BATCH, M, K)."), flag("--batched-b", "b is (BATCH, K, N)."),
        click.option("--epilogue", type=EpilogueName(), is_flag=False, flag_value=EpilogueName.plain,
                     help="With a kernelgen.epilogue: an importable one, or a function that makes it (default: one that changes nothing)."),
        *_EPILOGUE,
    ), _gemm),
    "grouped_gemm": Form("One product per group of rows, or of K.", (
        click.option("--mnk", type=Dims("M,N,K", example="4096,4096,7168"), required=True, help="Extents; what is grouped is counted "
                     "for all groups together."),
        number("--groups", "Groups.", required=True), flag("--k-grouped", "Groups of K, not of rows."), *_ORDERS,
        flag("--bias-per-group"), *_EPILOGUE,
    ), partial(_grouped, masked=False)),
    "grouped_gemm_masked": Form("One product per group, of which the first rows count.", (
        click.option("--mnk", type=Dims("M,N,K", example="256,4096,7168"), required=True, help="Extents of one group."),
        number("--groups", "Groups.", required=True), *_ORDERS, flag("--bias-per-group"), *_EPILOGUE,
    ), partial(_grouped, masked=True)),
    "quantize_fp8": Form("Floating values to fp8 codes and their scales.", (
        click.option("--x", type=Dims("ROWS,WIDTH", example="512,4096"), required=True, help="Shape of x."),
        number("--batch", "x is (BATCH, ROWS, WIDTH)."),
        choice("--recipe", ("tensor", "row", "block_1x128", "block_128x128"), "Which codes share a scale.", default="tensor",
               show_default=True),
        element("--code-dtype", "e4m3 or e5m2.", default="e4m3", show_default=True), ACTIVATION, GATE_UP, DTYPE, ALIGNMENT, GRAD,
    ), _quantize_fp8),
}
