"""The calls that the command line can describe: per op its options, and the arguments that they mean.

Everything a generated kernel compiles in can be said here: what `prebuild` cannot describe, KERNELGEN_JIT=0 cannot run.
Tensors are made on the meta device, so that no size is too large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import click

Options = dict[str, Any]
_FP8 = ("e4m3", "e5m2")


@dataclass(frozen=True)
class Call:
    """Arguments of ``kernelgen.explain``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Form:
    """How one op is described: ``options`` of its command, and ``call`` from their values."""

    help: str
    options: tuple[Callable[..., Any], ...]
    call: Callable[[Options], Call]


class Whole(click.ParamType):
    """A whole number, from ``low`` up."""

    def __init__(self, low: int = 0) -> None:
        self.low, self.name = low, "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if not value.isdecimal() or int(value) < self.low:
            self.fail(f"got {value!r}, expected a whole number of at least {self.low}", param, ctx)
        return int(value)


class Dims(click.ParamType):
    """Whole numbers joined by commas (or x); ``form`` names them, one letter group each. No form: any number of them."""

    def __init__(self, form: str = "", *, example: str, least: int = 0) -> None:
        self.name, self.form, self.example, self.least = form or "N,N,...", form, example, least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.replace("x", ",").split(",")]
        wanted = self.form.count(",") + 1 if self.form else len(parts)
        if len(parts) != wanted or not all(p.isdecimal() and int(p) >= self.least for p in parts):
            count = f"{wanted} whole numbers" if self.form else "whole numbers"
            least = f" of at least {self.least}" if self.least else ""
            self.fail(f"got {value!r}, expected {count}{least}{f' {self.form}' if self.form else ''}, e.g. {self.example}", param, ctx)
        return tuple(int(p) for p in parts)


class Window(click.ParamType):
    """LEFT,RIGHT in keys, '-' for an unbounded side."""

    name = "LEFT,RIGHT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int | None, int | None]:
        if isinstance(value, tuple):
            return value
        parts = [p.strip() for p in value.split(",")]
        if len(parts) != 2 or not all(p in ("", "-") or p.isdecimal() for p in parts):
            self.fail(f"got {value!r}, expected LEFT,RIGHT in keys with '-' for an unbounded side, e.g. 128,0", param, ctx)
        left, right = (None if p in ("", "-") else int(p) for p in parts)
        return left, right


class Dtype(click.ParamType):
    """A dtype name, to its kernelgen name."""

    name = "DTYPE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from kernelgen.dtypes import parse_dtype
        from kernelgen.errors import DtypeError

        try:
            return parse_dtype(value)
        except DtypeError as error:
            self.fail(str(error), param, ctx)


def _flag(name: str, help: str = "") -> Callable[..., Any]:
    return click.option(name, is_flag=True, help=help)


def _number(name: str, help: str, *, low: int = 0, **more: Any) -> Callable[..., Any]:
    return click.option(name, type=Whole(low), help=help, **more)


def _choice(name: str, values: tuple[str, ...], help: str, **more: Any) -> Callable[..., Any]:
    return click.option(name, type=click.Choice(values), help=help, **more)


def _dtype(name: str, help: str, **more: Any) -> Callable[..., Any]:
    return click.option(name, type=Dtype(), help=help, **more)


def _meta(shape: tuple[int, ...], dtype: str, *, grad: bool = False) -> Any:
    import torch

    from kernelgen.dtypes import DTYPES

    return torch.empty(shape, dtype=DTYPES[dtype].torch, device="meta", requires_grad=grad)


def _index(*shape: int) -> Any:
    import torch

    return torch.empty(shape, dtype=torch.int32, device="meta")


def _torch_dtype(name: str | None) -> Any:
    from kernelgen.dtypes import DTYPES

    return None if name is None else DTYPES[name].torch


_DTYPE = _dtype("--dtype", "Element type.", default="bf16", show_default=True)
_GRAD = _flag("--grad", "An input requires a gradient.")
_NONDETERMINISTIC = _flag("--nondeterministic", "deterministic=False.")
_GATE_UP = _choice("--gate-up", ("gate_first", "up_first", "interleaved"), "Where gate and up lie.", default="gate_first",
                   show_default=True)
# A tensor from a slice may start or step anywhere: the kernels then read in smaller accesses.
_ALIGNMENT = click.option("--alignment", type=click.Choice(("1", "2", "4", "8", "16")), help="At most so many bytes divide the "
                          "addresses and strides of the call (default: what fresh tensors of these shapes have).")
_HEADS = (
    _number("--kv-heads", "Key/value heads (default: as many as query heads)."),
    _number("--head-dim-v", "Head dim of v (default: that of q)."),
    click.option("--window", type=Window(), help="LEFT,RIGHT in keys; '-' for unbounded."),
    click.option("--soft-cap", type=float, help="Cap of the scores."),
    _flag("--alibi", "With ALiBi slopes."), _flag("--sinks", "With attention sinks."),
    _flag("--variant", "With a score or mask variant."), _flag("--batch-invariant"), _NONDETERMINISTIC,
)
_ATTENTION = (
    _number("--kv-len", "Length of k (default: that of q)."), *_HEADS, _flag("--causal"), _flag("--lse", "Also return the log-sum-exp."),
    _flag("--kv-lens", "With kv_lens, the keys in use of each request."), _flag("--block-mask", "With a block mask."),
    _flag("--scales", "With fp8 scales."), _dtype("--kv-dtype", "Element type of k and v (default: q's)."),
    _dtype("--out-dtype", "Element type of the output (an fp8 q gives bf16)."), _DTYPE, _ALIGNMENT, _GRAD,
)
# Shapes of scale_a and scale_b per fp8 recipe, in extents; kb and nb count blocks of 128.
_SCALES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tensor": ((), ()), "row": (("m", "one"), ("one", "n")), "block_128x128": (("m", "kb"), ("kb", "nb")),
    "block_1x128": (("m", "kb"), ("kb", "n")),
}


def _attention(o: Options, *, ragged: bool) -> Call:
    *lead, heads, dim = o["q"]
    kv_heads = heads if o["kv_heads"] is None else o["kv_heads"]
    keys = lead[-1] if o["kv_len"] is None else o["kv_len"]
    dim_v = dim if o["head_dim_v"] is None else o["head_dim_v"]
    batch = o["batch"] if ragged else lead[0]
    kv_dtype = o["kv_dtype"] or o["dtype"]
    q = _meta(o["q"], o["dtype"], grad=o["grad"])
    k, v = (_meta((*lead[:-1], keys, kv_heads, d), kv_dtype) for d in (dim, dim_v))
    kwargs: dict[str, Any] = {
        "causal": o["causal"], "window": o["window"], "soft_cap": o["soft_cap"], "return_lse": o["lse"],
        "deterministic": not o["nondeterministic"], "batch_invariant": o["batch_invariant"],
        "alibi_slopes": _meta((heads,), "fp32") if o["alibi"] else None, "sinks": _meta((heads,), "fp32") if o["sinks"] else None,
        "mask": _attention_mask(o["mask"], (batch, heads, lead[-1], keys)), "kv_lens": _index(batch) if o["kv_lens"] else None,
        "variant": _variant() if o["variant"] else None, "block_mask": _block_mask() if o["block_mask"] else None,
        "out": _meta((*lead, heads, dim_v), o["out_dtype"]) if o["out_dtype"] else None,
    }
    if o["scales"]:
        types = (("q", o["dtype"]), ("k", kv_dtype), ("v", kv_dtype))
        scaled = {f"{name}_scale": _meta((), "fp32") for name, dtype in types if dtype in _FP8}
        if not scaled:
            raise click.UsageError(f"--scales: got --dtype {o['dtype']}, expected an fp8 --dtype or --kv-dtype ({', '.join(_FP8)})")
        kwargs |= scaled
    starts = (_index(batch + 1), _index(batch + 1)) if ragged else ()
    return Call((q, k, v, *starts), kwargs)


def _attention_mask(kind: str | None, sizes: tuple[int, int, int, int]) -> Any:
    import torch

    batch, heads, rows, keys = sizes
    if kind is None:
        return None
    if kind == "dense":
        return torch.empty((batch, heads, rows, keys), dtype=torch.bool, device="meta")
    bits = rows * keys
    return torch.empty(bits if kind == "flat" else -(-bits // 8), dtype=torch.bool if kind == "flat" else torch.uint8, device="meta")


def _block_mask() -> Any:
    """Anything with the fields of a block mask: only its presence decides."""
    return SimpleNamespace(kv_counts=None, kv_indices=None, block_size=128)


def _variant() -> Any:
    from kernelgen.reference.masks import Variant

    return Variant()


def _gemm(o: Options) -> Call:
    m, n, k = o["mnk"]
    lead = () if o["batch"] is None else (o["batch"],)
    if o["batched_b"] and not lead:
        raise click.UsageError("--batched-b: got no --batch, expected one: b has the leading dimension of a")
    a = _matrix((*lead, m, k), o["a_order"], o["dtype"], grad=o["grad"])
    b = _matrix((*(lead if o["batched_b"] else ()), k, n), o["b_order"], o["dtype"])
    outputs = n // 2 if o["activation"] in ("swiglu", "geglu") else n
    out_dtype = o["out_dtype"] or ("bf16" if o["dtype"] in _FP8 else o["dtype"])
    kwargs: dict[str, Any] = {
        "activation": o["activation"], "gate_up": o["gate_up"], "out_dtype": _torch_dtype(o["out_dtype"]), "accumulate": o["accumulate"],
        "out_scale": o["out_scale"], "deterministic": not o["nondeterministic"],
        "bias": _meta((n,), o["bias_dtype"] or out_dtype) if o["bias"] or o["bias_dtype"] else None,
        "c": _meta((*lead, m, outputs), o["c_dtype"] or out_dtype) if o["c"] or o["c_dtype"] else None,
    }
    if o["scales"]:
        size = {"m": m, "n": n, "one": 1, "kb": -(-k // 128), "nb": -(-n // 128)}
        for name, shape in zip(("scale_a", "scale_b"), _SCALES[o["scales"]]):
            kwargs[name] = _meta(tuple(size[d] for d in shape), "fp32")
    return Call((a, b), kwargs)


def _matrix(shape: tuple[int, ...], order: str, dtype: str, *, grad: bool = False) -> Any:
    """(.., R, C), in column order as the transpose of a contiguous (.., C, R)."""
    if order == "row":
        return _meta(shape, dtype, grad=grad)
    return _meta((*shape[:-2], shape[-1], shape[-2]), dtype, grad=grad).transpose(-1, -2)


def _rmsnorm(o: Options) -> Call:
    rows, width = o["x"]
    return Call((_meta((rows, width), o["dtype"], grad=o["grad"]), _meta((width,), o["weight_dtype"] or o["dtype"])),
                {"residual": _meta((rows, width), o["dtype"]) if o["residual"] else None})


def _silu_and_mul(o: Options) -> Call:
    return Call((_meta(o["x"], o["dtype"], grad=o["grad"]),), {})


def _moe(o: Options) -> Call:
    from kernelgen.reference.activation import is_gated

    t, h, i, e, k, dtype = (o[name] for name in ("tokens", "hidden", "intermediate", "experts", "k", "dtype"))
    halves, weights = 2 if is_gated(o["activation"]) else 1, o["weight_dtype"] or dtype
    w13, w2 = (e, halves * i, h), (e, h, i)
    kwargs: dict[str, Any] = {
        "activation": o["activation"], "alpha": o["alpha"], "limit": o["limit"], "gate_up": o["gate_up"],
        "bias13": _meta(w13[:2], dtype) if o["bias13"] else None, "bias2": _meta(w2[:2], dtype) if o["bias2"] else None,
        "weights_on_input": o["weights_on_input"], "deterministic": not o["nondeterministic"],
        "expert_map": {None: None, "range": (0, e), "table": _index(e)}[o["expert_map"]],
    }
    if o["shared"] is not None:
        kwargs["shared"] = (_meta((halves * o["shared"], h), dtype), _meta((h, o["shared"]), dtype))
    if o["scales"]:
        shapes = {"tensor": lambda _: (), "expert": lambda w: w[:1], "channel": lambda w: w[:2],
                  "block_128x128": lambda w: (w[0], -(-w[1] // 128), -(-w[2] // 128))}
        kwargs |= {name: _meta(shapes[o["scales"]](w), "fp32") for name, w in (("scale13", w13), ("scale2", w2))}
    return Call((_meta((t, h), dtype, grad=o["grad"]), _meta(w13, weights), _meta(w2, weights), _meta((t, k), "fp32"), _index(t, k)),
                kwargs)


def _route(o: Options) -> Call:
    return Call((_meta((o["tokens"], o["experts"]), o["dtype"], grad=o["grad"]), o["k"]), {
        "method": o["method"], "renormalize": not o["no_renormalize"], "num_groups": o["num_groups"], "topk_groups": o["topk_groups"],
        "bias": _meta((o["experts"],), "fp32") if o["bias"] else None})


def _paged(o: Options) -> Call:
    kv_lens = _lengths(o, "kv_lens", "kv_len", None)
    q_lens = _lengths(o, "q_lens", "q_len", len(kv_lens))
    if len(q_lens) != len(kv_lens):
        raise click.UsageError(f"got {len(q_lens)} query lengths and {len(kv_lens)} key lengths, expected one of each per request")
    return Call((_page_table(o["table"], kv_lens, o["page_size"]),), {
        "num_q_heads": o["q_heads"], "num_kv_heads": o["q_heads"] if o["kv_heads"] is None else o["kv_heads"],
        "head_dim": o["head_dim"], "head_dim_v": o["head_dim_v"], "q_lens": q_lens, "q_dtype": _torch_dtype(o["dtype"]),
        "kv_dtype": _torch_dtype(o["kv_dtype"]), "kv_layout": o["kv_layout"], "causal": not o["no_causal"], "window": o["window"],
        "soft_cap": o["soft_cap"], "alibi": o["alibi"], "sinks": o["sinks"], "mask": o["mask"], "kv_scales": o["kv_scales"],
        "variant": _variant() if o["variant"] else None, "rotation": 0 if o["rotation"] else None,
        "batch_invariant": o["batch_invariant"], "deterministic": not o["nondeterministic"]})


def _lengths(o: Options, many: str, one: str, batch: int | None) -> list[int]:
    """Lengths of the requests: a list, or one number for each of --batch."""
    listed, single = (f"--{name.replace('_', '-')}" for name in (many, one))
    if o[many] is not None and o[one] is not None:
        raise click.UsageError(f"got {listed} and {single}, expected one of them")
    if o[many] is not None:
        if batch is None and o["batch"] not in (None, len(o[many])):
            raise click.UsageError(f"got --batch {o['batch']} and {len(o[many])} lengths in {listed}, expected as many")
        return list(o[many])
    if batch is not None:
        return [1 if o[one] is None else o[one]] * batch
    if o[one] is None:
        raise click.UsageError(f"got no {listed}, expected it, or {single} with --batch")
    return [o[one]] * (1 if o["batch"] is None else o["batch"])


def _page_table(form: str, lengths: list[int], page_size: int) -> Any:
    import torch

    from kernelgen import PageTable

    pages = [-(-n // page_size) for n in lengths]
    if form == "blocks":
        return PageTable.from_blocks(torch.zeros((len(pages), max(pages, default=0)), dtype=torch.int32), lengths, page_size)
    starts = [sum(pages[:i]) for i in range(len(pages) + 1)]
    last = [n - (count - 1) * page_size if count else 0 for n, count in zip(lengths, pages)]
    return PageTable.from_csr(starts, torch.zeros(starts[-1], dtype=torch.int32), last, page_size)


FORMS: dict[str, Form] = {
    "attention": Form("Attention of a dense batch.", (
        click.option("--q", type=Dims("B,SQ,HQ,D", example="2,4096,32,128"), required=True, help="Shape of q."),
        *_ATTENTION, _choice("--mask", ("dense",), "With a mask."),
    ), partial(_attention, ragged=False)),
    "attention_varlen": Form("Attention over requests packed along one token axis (ragged).", (
        click.option("--q", type=Dims("T,HQ,D", example="8192,32,128"), required=True, help="Shape of q."),
        _number("--batch", "Requests.", default="1", show_default=True),
        *_ATTENTION, _choice("--mask", ("flat", "packed"), "With a mask."),
    ), partial(_attention, ragged=True)),
    "paged_attention": Form("Attention over a paged cache, as plan_attention describes it.", (
        click.option("--kv-lens", type=Dims(example="1000,37"), help="Keys in use of each request."),
        click.option("--q-lens", type=Dims(example="1,128"), help="Query rows of each request (default: 1, a decode)."),
        _number("--batch", "Requests, all of --kv-len keys."), _number("--kv-len", "Keys in use of every request."),
        _number("--q-len", "Query rows of every request."),
        _number("--page-size", "Tokens of a page.", low=1, default="16", show_default=True),
        _number("--q-heads", "Query heads.", required=True), _number("--head-dim", "Head dim of q and k.", required=True), *_HEADS,
        _flag("--no-causal"), _choice("--table", ("blocks", "csr"), "Form of the page table.", default="blocks", show_default=True),
        _choice("--kv-layout", ("NHD", "HND"), "Layout of a page.", default="NHD", show_default=True),
        _choice("--mask", ("dense", "packed"), "With a mask."), _flag("--rotation", "The cached keys are rotated."),
        _choice("--kv-scales", ("tensor", "head", "request_head", "page"), "Scales of an fp8 cache."),
        _dtype("--kv-dtype", "Element type of the cache (default: q's)."), _DTYPE,
    ), _paged),
    "gemm": Form("activation(a @ b + bias) + beta * c.", (
        click.option("--mnk", type=Dims("M,N,K", example="512,4096,4096"), required=True, help="Extents; N is that of b."),
        _choice("--a-order", ("row", "col"), "Which dimension of a is contiguous.", default="row", show_default=True),
        _choice("--b-order", ("row", "col"), "Which dimension of b (K, N) is contiguous. A Linear weight w (N, K) used as w.t() is col.",
                default="row", show_default=True),
        _number("--batch", "a is (BATCH, M, K)."), _flag("--batched-b", "b is (BATCH, K, N)."),
        _flag("--bias"), _dtype("--bias-dtype", "With a bias of this type (default: the output's)."),
        _choice("--activation", ("relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"), ""), _GATE_UP,
        _flag("--c", "Add c (a residual)."), _dtype("--c-dtype", "With a c of this type (default: the output's)."),
        _dtype("--out-dtype", "Element type of the output (default: a's)."), _choice("--scales", tuple(_SCALES), "Recipe of fp8 inputs."),
        _choice("--out-scale", ("tensor", "row", "block_1x128"), "Quantise the output."),
        _choice("--accumulate", ("float32", "fast"), "", default="float32", show_default=True),
        _NONDETERMINISTIC, _DTYPE, _ALIGNMENT, _GRAD,
    ), _gemm),
    "moe": Form("A mixture-of-experts layer.", (
        *(_number(f"--{name}", help, required=True) for name, help in (
            ("tokens", "Rows of x."), ("hidden", "Width of x."), ("intermediate", "I of w13 (E, 2 I, H) and w2 (E, H, I)."),
            ("experts", "Experts whose weights are here."), ("k", "Experts of a token."))),
        click.option("--activation", default="swiglu", show_default=True, help="As in kernelgen.moe."), _GATE_UP,
        click.option("--alpha", type=float, help="Of swiglu_oai."), click.option("--limit", type=float, help="Clamp of gate and up."),
        _flag("--bias13"), _flag("--bias2"), _number("--shared", "Intermediate size of a shared expert."),
        _choice("--expert-map", ("table", "range"), "With an expert map."), _flag("--weights-on-input"),
        _dtype("--weight-dtype", "Element type of w13 and w2 (default: x's)."),
        _choice("--scales", ("tensor", "expert", "channel", "block_128x128"), "Recipe of fp8 weights."),
        _NONDETERMINISTIC, _DTYPE, _ALIGNMENT, _GRAD,
    ), _moe),
    "route": Form("Router logits to experts and weights.", (
        *(_number(f"--{name}", help, required=True) for name, help in (
            ("tokens", "Rows of the logits."), ("experts", "Columns of the logits."), ("k", "Experts of a token."))),
        _choice("--method", ("softmax", "topk_softmax", "sigmoid", "deepseek_v3", "llama4"), "", default="softmax", show_default=True),
        _flag("--no-renormalize"), _flag("--bias", "With a selection bias."), _number("--num-groups", "Groups of experts."),
        _number("--topk-groups", "Groups that are kept."), _DTYPE, _ALIGNMENT, _GRAD,
    ), _route),
    "rmsnorm": Form("Row-wise RMS normalisation.", (
        click.option("--x", type=Dims("ROWS,WIDTH", example="512,4096"), required=True, help="Shape of x."),
        _dtype("--weight-dtype", "Element type of the weight (default: x's)."), _flag("--residual", "With a residual."),
        _DTYPE, _ALIGNMENT, _GRAD,
    ), _rmsnorm),
    "silu_and_mul": Form("silu(first half) * second half of each row.", (
        click.option("--x", type=Dims("ROWS,WIDTH", example="512,8192"), required=True, help="Shape of x; the output is half as wide."),
        _DTYPE, _ALIGNMENT, _GRAD,
    ), _silu_and_mul),
}
