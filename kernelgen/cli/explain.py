"""``kernelgen explain`` and ``kernelgen prebuild``: the same description of a call, printed or compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from kernelgen.dispatch.decision import Decision
from kernelgen.errors import NoBackendError, ShapeError


def _dims(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.replace("x", ",").split(",")
    if not all(p.strip().isdecimal() for p in parts):
        raise ShapeError(f"got shape {text!r}, expected whole numbers joined by commas, e.g. 2,4096,32,128")
    return tuple(int(p) for p in parts)


def _window(text: str | None) -> tuple[int | None, int | None] | None:
    if text is None:
        return None
    parts = [p.strip() for p in text.split(",")]
    if len(parts) != 2 or not all(p in ("", "-") or p.isdecimal() for p in parts):
        raise ShapeError(f"got window {text!r}, expected LEFT,RIGHT in keys with '-' for an unbounded side, e.g. 128,0")
    left, right = (None if p in ("", "-") else int(p) for p in parts)
    return left, right


def _attention(o: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    q = _dims(o["q"])
    if q is None:
        raise ShapeError("attention needs --q B,SQ,HQ,D (or T,HQ,D for ragged), e.g. --q 2,4096,32,128 --kv-heads 8")
    heads, keys = (default if o[name] is None else o[name] for name, default in (("kv_heads", q[-2]), ("kv_len", q[-3])))
    k = _dims(o["k"]) or (*q[:-3], keys, heads, q[-1])
    v = _dims(o["v"]) or (*k[:-1], k[-1] if o["head_dim_v"] is None else o["head_dim_v"])
    named = {"causal": o["causal"], "window": _window(o["window"]), "soft_cap": o["soft_cap"], "return_lse": o["lse"]}
    if len(q) == 3:
        import torch

        index = torch.empty((o["batch"] or 1) + 1, dtype=torch.int32, device="meta")
        return [q, k, v, index, index], named
    return [q, k, v], named


def _gemm(o: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    sizes = _dims(o["mnk"])
    if sizes is None or len(sizes) != 3:
        raise ShapeError("gemm needs --mnk M,N,K, e.g. --mnk 512,4096,4096")
    m, n, k = sizes
    named: dict[str, Any] = {"activation": o["activation"]}
    if o["bias"]:
        named["bias"] = (n,)
    return [(m, k), (k, n)], named


def _rows(o: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    x = _dims(o["x"])
    if x is None:
        raise ShapeError("this op needs --x ROWS,WIDTH, e.g. --x 512,4096")
    return [x], {}


def _rope(o: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    q = _dims(o["q"])
    if q is None or len(q) < 2:
        raise ShapeError("rope needs --q T,HQ,D, e.g. --q 512,32,128 --kv-heads 8")
    heads = q[-2] if o["kv_heads"] is None else o["kv_heads"]
    return [q, (*q[:-2], heads, q[-1])], {}


def _append_kv(o: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    k = _dims(o["k"])
    if k is None or len(k) != 3:
        raise ShapeError("append_kv needs --k T,HKV,D, e.g. --k 512,8,128 (into pages of 16, NHD)")
    return [(1, 2, 16, *k[1:]), k, k], {}


_ARGUMENTS: dict[str, Callable[[dict[str, Any]], tuple[list[Any], dict[str, Any]]]] = {
    "attention": _attention, "attention_varlen": _attention, "gemm": _gemm, "rmsnorm": _rows, "silu_and_mul": _rows,
    "rope": _rope, "append_kv": _append_kv,
}
_OPTIONS = [
    click.argument("op", type=click.Choice(list(_ARGUMENTS))),
    click.option("--q", help="Shape of q: B,SQ,HQ,D, or T,HQ,D for ragged."),
    click.option("--k", help="Shape of k; default: q's with --kv-heads and --kv-len."),
    click.option("--v", help="Shape of v; default: k's with --head-dim-v."),
    click.option("--kv-heads", type=int, help="Key/value heads (default: as many as query heads)."),
    click.option("--kv-len", type=int, help="Key length (default: query length)."),
    click.option("--head-dim-v", type=int, help="Head dim of v (default: that of q)."),
    click.option("--batch", type=int, help="Requests of a ragged call."),
    click.option("--causal", is_flag=True),
    click.option("--window", help="LEFT,RIGHT in keys; '-' for unbounded."),
    click.option("--soft-cap", type=float),
    click.option("--lse", is_flag=True, help="Also return the log-sum-exp."),
    click.option("--mnk", help="M,N,K of a gemm."),
    click.option("--bias", is_flag=True),
    click.option("--activation", help="relu, gelu, gelu_tanh, silu, swiglu or geglu."),
    click.option("--x", help="Shape of x for row-wise ops."),
    click.option("--dtype", default="bf16", show_default=True),
    click.option("--target", help="sm_90a, sm_80, cpu, cpu-x86-64-v3, ... (default: this machine)."),
    click.option("--backend", default="auto", show_default=True),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
]


def _with_options(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def _decide(op: str, options: dict[str, Any]) -> Decision:
    from kernelgen.dispatch.explain import explain as explain_call

    values, named = _ARGUMENTS[op](options)
    return explain_call(op, *values, target=options["target"], backend=options["backend"], dtype=options["dtype"], **named)


@click.command()
@_with_options
def explain(op: str, as_json: bool, **options: Any) -> None:
    """Show which backend a call of OP takes and why. Works without a GPU: give --target."""
    decision = _decide(op, options)
    if as_json:
        click.echo(json.dumps({"problem": str(decision.problem), "target": str(decision.target), "candidates": decision.table()}, indent=2))
    else:
        click.echo(str(decision))


@click.command()
@_with_options
def prebuild(op: str, as_json: bool, **options: Any) -> None:
    """Compile the kernel that a call of OP needs, for any target, and the launcher. Needs no GPU.

    With `kernelgen cache export` the result runs on machines without a compiler (KERNELGEN_CACHE_LAYERS).
    """
    from kernelgen import build
    from kernelgen.kernels.base import families
    from kernelgen.launch.host import launcher

    decision = _decide(op, {**options, "backend": "generated"})
    if decision.chosen is None:
        raise NoBackendError(f"nothing to build:\n{decision}")
    chosen = decision.chosen
    family = next(f for f in families(decision.problem.op) if f.name == chosen.kernel)
    spec = family.spec(decision.problem, decision.target, chosen.config)
    artifact, built = build.build(spec)
    launcher()
    report = {"spec": str(spec), "built": built, "seconds": artifact.meta.get("seconds"), "path": str(artifact.path)}
    click.echo(json.dumps(report, indent=2) if as_json else f"{spec}: {'built' if built else 'already there'} ({artifact.path})")
