"""The calls that the command line can describe: per op its options, and the arguments that they mean.

Everything a generated kernel compiles in can be said here: what `prebuild` cannot describe, KERNELGEN_JIT=0 cannot run.
Tensors are made on the meta device, so that no size is too large.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import click

from kernelgen.cli.cache_calls import FORMS as CACHE_FORMS
from kernelgen.cli.gemm_calls import FORMS as GEMM_FORMS
from kernelgen.cli.moe_calls import FORMS as MOE_FORMS
from kernelgen.cli.options import (
    ALIGNMENT,
    DTYPE,
    FP8,
    GRAD,
    HEADS,
    Call,
    Dims,
    Form,
    Options,
    choice,
    element,
    flag,
    index,
    meta,
    number,
)

_ATTENTION = (
    number("--kv-len", "Length of k (default: that of q)."), *HEADS, flag("--causal"), flag("--lse", "Also return the log-sum-exp."),
    flag("--kv-lens", "With kv_lens, the keys in use of each request."), flag("--block-mask", "With a block mask."),
    flag("--scales", "With fp8 scales."), element("--kv-dtype", "Element type of k and v (default: q's)."),
    element("--out-dtype", "Element type of the output (an fp8 q gives bf16)."), DTYPE, ALIGNMENT, GRAD,
)

def _attention(o: Options, *, ragged: bool) -> Call:
    *lead, heads, dim = o["q"]
    kv_heads = heads if o["kv_heads"] is None else o["kv_heads"]
    keys = lead[-1] if o["kv_len"] is None else o["kv_len"]
    dim_v = dim if o["head_dim_v"] is None else o["head_dim_v"]
    batch = o["batch"] if ragged else lead[0]
    kv_dtype = o["kv_dtype"] or o["dtype"]
    q = meta(o["q"], o["dtype"], grad=o["grad"])
    k, v = (meta((*lead[:-1], keys, kv_heads, d), kv_dtype) for d in (dim, dim_v))
    kwargs: dict[str, Any] = {
        "causal": o["causal"], "window": o["window"], "soft_cap": o["soft_cap"], "return_lse": o["lse"],
        "deterministic": not o["nondeterministic"], "batch_invariant": o["batch_invariant"],
        "alibi_slopes": meta((heads,), "fp32") if o["alibi"] else None, "sinks": meta((heads,), "fp32") if o["sinks"] else None,
        "mask": _attention_mask(o["mask"], (batch, heads, lead[-1], keys)), "kv_lens": index(batch) if o["kv_lens"] else None,
        "variant": o["variant"], "block_mask": _block_mask() if o["block_mask"] else None,
        "out": meta((*lead, heads, dim_v), o["out_dtype"]) if o["out_dtype"] else None,
    }
    if o["scales"]:
        types = (("q", o["dtype"]), ("k", kv_dtype), ("v", kv_dtype))
        scaled = {f"{name}_scale": meta((), "fp32") for name, dtype in types if dtype in FP8}
        if not scaled:
            raise click.UsageError(f"--scales: got --dtype {o['dtype']}, expected an fp8 --dtype or --kv-dtype ({', '.join(FP8)})")
        kwargs |= scaled
    starts = (index(batch + 1), index(batch + 1)) if ragged else ()
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


def _rmsnorm(o: Options) -> Call:
    rows, width = o["x"]
    return Call((meta((rows, width), o["dtype"], grad=o["grad"]), meta((width,), o["weight_dtype"] or o["dtype"])),
                {"residual": meta((rows, width), o["dtype"]) if o["residual"] else None})


def _silu_and_mul(o: Options) -> Call:
    return Call((meta(o["x"], o["dtype"], grad=o["grad"]),), {})


FORMS: dict[str, Form] = {
    "attention": Form("Attention of a dense batch.", (
        click.option("--q", type=Dims("B,SQ,HQ,D", example="2,4096,32,128"), required=True, help="Shape of q."),
        *_ATTENTION, choice("--mask", ("dense",), "With a mask."),
    ), partial(_attention, ragged=False)),
    "attention_varlen": Form("Attention over requests packed along one token axis (ragged).", (
        click.option("--q", type=Dims("T,HQ,D", example="8192,32,128"), required=True, help="Shape of q."),
        number("--batch", "Requests.", default="1", show_default=True),
        *_ATTENTION, choice("--mask", ("flat", "packed"), "With a mask."),
    ), partial(_attention, ragged=True)),
    "rmsnorm": Form("Row-wise RMS normalisation.", (
        click.option("--x", type=Dims("ROWS,WIDTH", example="512,4096"), required=True, help="Shape of x."),
        element("--weight-dtype", "Element type of the weight (default: x's)."), flag("--residual", "With a residual."),
        DTYPE, ALIGNMENT, GRAD,
    ), _rmsnorm),
    "silu_and_mul": Form("silu(first half) * second half of each row.", (
        click.option("--x", type=Dims("ROWS,WIDTH", example="512,8192"), required=True, help="Shape of x; the output is half as wide."),
        DTYPE, ALIGNMENT, GRAD,
    ), _silu_and_mul),
} | GEMM_FORMS | CACHE_FORMS | MOE_FORMS
