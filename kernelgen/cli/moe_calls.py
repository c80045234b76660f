"""The calls of mixture-of-experts that the command line can describe: see calls.py."""

from __future__ import annotations

from typing import Any

import click

from kernelgen.cli.gemm_calls import GATE_UP
from kernelgen.cli.options import ALIGNMENT, DTYPE, GRAD, NONDETERMINISTIC, Call, Form, Options, choice, element, flag, index, meta, number
from kernelgen.errors import ShapeError


def _moe(o: Options) -> Call:
    from kernelgen.reference.activation import is_gated

    t, h, i, e, k, dtype = (o[name] for name in ("tokens", "hidden", "intermediate", "experts", "k", "dtype"))
    halves, weights = 2 if is_gated(o["activation"]) else 1, o["weight_dtype"] or dtype
    w13, w2, bias = (e, halves * i, h), (e, h, i), o["bias_dtype"] or dtype
    if o["packed"] and (o["weight_dtype"] or o["scales"]):
        raise ShapeError("got --packed with --weight-dtype or --scales, expected it alone: packed weights carry their scales")
    kwargs: dict[str, Any] = {
        "activation": o["activation"], "alpha": o["alpha"], "limit": o["limit"], "gate_up": o["gate_up"],
        "bias13": meta(w13[:2], bias) if o["bias13"] else None, "bias2": meta(w2[:2], bias) if o["bias2"] else None,
        "weights_on_input": o["weights_on_input"], "deterministic": not o["nondeterministic"],
        "expert_map": {None: None, "range": (0, e), "table": index(e)}[o["expert_map"]],
    }
    if o["shared"] is not None:
        kwargs["shared"] = (meta((halves * o["shared"], h), dtype), meta((h, o["shared"]), dtype))
    if o["scales"]:
        shapes = {"tensor": lambda _: (), "expert": lambda w: w[:1], "channel": lambda w: w[:2],
                  "block_128x128": lambda w: (w[0], -(-w[1] // 128), -(-w[2] // 128))}
        kwargs |= {name: meta(shapes[o["scales"]](w), "fp32") for name, w in (("scale13", w13), ("scale2", w2))}
    experts = [_packed(o, shape) if o["packed"] else meta(shape, weights) for shape in (w13, w2)]
    ids = index(t, k)
    return Call((meta((t, h), dtype, grad=o["grad"]), *experts, meta((t, k), o["slot_dtype"] or "fp32"),
                 ids.long() if o["wide_ids"] else ids), kwargs)


def _packed(o: Options, shape: tuple[int, int, int]) -> Any:
    """A packed weight (E, N, K)."""
    import torch

    from kernelgen.ops.weights import PackedWeight

    group = 32 if o["packed"] == "mxfp4" else int(o["group_size"])
    scales = (*shape[:2], -(-shape[2] // group))
    codes, exponents = (torch.empty(s, dtype=torch.uint8, device="meta") for s in ((*shape[:2], -(-shape[2] // 2)), scales))
    scale = exponents if o["packed"] == "mxfp4" else meta(scales, o["dtype"])
    return PackedWeight(o["packed"], shape, group, codes, scale, exponents if o["zero_points"] else None)


def _route(o: Options) -> Call:
    return Call((meta((o["tokens"], o["experts"]), o["dtype"], grad=o["grad"]), o["k"]), {
        "method": o["method"], "renormalize": not o["no_renormalize"], "num_groups": o["num_groups"], "topk_groups": o["topk_groups"],
        "bias": meta((o["experts"],), o["bias_dtype"]) if o["bias"] else None, "counts": index(o["experts"]) if o["counts"] else None})


def _moe_sort(o: Options) -> Call:
    experts = o["experts"]
    expert_map = {None: None, "range": (0, experts), "table": index(experts)}[o["expert_map"]]
    ids = meta((o["tokens"], o["k"]), "fp32").to(index(1).dtype)
    return Call((ids.long() if o["wide_ids"] else ids, experts), {"expert_map": expert_map})


def _moe_permute(o: Options) -> Call:
    weights = meta((o["tokens"], o["k"]), o["weight_dtype"]) if o["weight_dtype"] else None
    return Call((meta((o["tokens"], o["hidden"]), o["dtype"], grad=o["grad"]), o["k"]), {"weights": weights})


def _moe_unpermute(o: Options) -> Call:
    weights = meta((o["tokens"], o["k"]), o["weight_dtype"]) if o["weight_dtype"] else None
    addend = meta((o["tokens"], o["hidden"]), o["dtype"]) if o["addend"] else None
    return Call((meta((o["tokens"] * o["k"], o["hidden"]), o["dtype"], grad=o["grad"]), o["k"], weights), {"addend": addend})


_SLOTS = (number("--tokens", "Tokens.", required=True), number("--k", "Experts of a token.", required=True))
_ROWS = (*_SLOTS, number("--hidden", "Width of a row.", required=True),
         element("--weight-dtype", "With weights of the slots, of this type."))
FORMS: dict[str, Form] = {
    "moe_sort": Form("Slots of tokens grouped by expert.", (
        *_SLOTS, number("--experts", "Experts that are here.", required=True),
        choice("--expert-map", ("table", "range"), "With an expert map."),
        flag("--wide-ids", "Ids of 64 bits."), DTYPE,
    ), _moe_sort),
    "moe_permute": Form("Tokens to the rows of their experts.", (*_ROWS, DTYPE, ALIGNMENT, GRAD), _moe_permute),
    "moe_unpermute": Form("The weighted sum of each token's rows.", (
        *_ROWS, flag("--addend", "With something added last."), DTYPE, ALIGNMENT, GRAD), _moe_unpermute),
    "moe": Form("A mixture-of-experts layer.", (
        *(number(f"--{name}", help, required=True) for name, help in (
            ("tokens", "Rows of x."), ("hidden", "Width of x."), ("intermediate", "I of w13 (E, 2 I, H) and w2 (E, H, I)."),
            ("experts", "Experts whose weights are here."), ("k", "Experts of a token."))),
        click.option("--activation", default="swiglu", show_default=True, help="As in kernelgen.moe."), GATE_UP,
        click.option("--alpha", type=float, help="Of swiglu_oai."), click.option("--limit", type=float, help="Clamp of gate and up."),
        flag("--bias13"), flag("--bias2"), number("--shared", "Intermediate size of a shared expert."),
        choice("--expert-map", ("table", "range"), "With an expert map."), flag("--weights-on-input"),
        element("--weight-dtype", "Element type of w13 and w2 (default: x's)."),
        choice("--scales", ("tensor", "expert", "channel", "block_128x128"), "Recipe of fp8 weights."),
        choice("--packed", ("int4", "mxfp4"), "Packed weights."), flag("--zero-points", "Of packed int4 weights."),
        click.option("--group-size", type=click.Choice(("32", "64", "128")), default="128", show_default=True,
                     help="Of packed int4 weights."),
        element("--bias-dtype", "Element type of the biases (default: x's)."), element("--slot-dtype", "Of the slots' weights (fp32)."),
        flag("--wide-ids", "Ids of 64 bits."),
        NONDETERMINISTIC, DTYPE, ALIGNMENT, GRAD,
    ), _moe),
    "route": Form("Router logits to experts and weights.", (
        *(number(f"--{name}", help, required=True) for name, help in (
            ("tokens", "Rows of the logits."), ("experts", "Columns of the logits."), ("k", "Experts of a token."))),
        choice("--method", ("softmax", "topk_softmax", "sigmoid", "deepseek_v3", "llama4"), "", default="softmax", show_default=True),
        flag("--no-renormalize"), flag("--bias", "With a selection bias."), number("--num-groups", "Groups of experts."),
        number("--topk-groups", "Groups that are kept."),
        element("--bias-dtype", "Element type of the bias.", default="fp32", show_default=True),
        flag("--counts", "Count the experts chosen."),
        DTYPE, ALIGNMENT, GRAD,
    ), _route),
}
