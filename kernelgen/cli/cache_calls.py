"""Calls around a paged cache: plans, and the small ops that write, rotate and merge. See calls.py."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import click

from kernelgen.cli.options import (
    ALIGNMENT,
    DTYPE,
    FP8,
    GRAD,
    HEADS,
    NONDETERMINISTIC,
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
    torch_dtype,
)

_PAGE_SIZE = number("--page-size", "Tokens of a page.", low=1, default="16", show_default=True)
_REQUESTS = (
    click.option("--kv-lens", type=Dims(example="1000,37"), help="Keys in use of each request."),
    click.option("--q-lens", type=Dims(example="1,128"), help="Query rows of each request (default: 1, a decode)."),
    number("--batch", "Requests, all of --kv-len keys."), number("--kv-len", "Keys in use of every request."),
    number("--q-len", "Query rows of every request."), _PAGE_SIZE,
    choice("--table", ("blocks", "csr", "contiguous"), "Form of the page table; contiguous: one page of --page-size tokens per request.",
           default="blocks", show_default=True),
    flag("--device-kv-lens", "The plan gets key lengths on the device."), flag("--device-q-lens", "It gets query lengths there."),
)
_RUN = (
    flag("--lse", "Also return the log-sum-exp."), element("--out-dtype", "Element type of the output (an fp8 q gives bf16)."),
    element("--kv-dtype", "Element type of the cache (default: q's)."), DTYPE, ALIGNMENT,
)
_SCALE_KINDS = ("number", "tensor", "head", "request_head", "page")
_PLACE = (
    number("--tokens", "New tokens.", required=True), _PAGE_SIZE,
    choice("--table", ("slots", "blocks", "csr"), "What says where tokens go: a slot mapping, or a page table.", default="slots",
           show_default=True),
)
_APPEND = (
    *_PLACE, number("--kv-heads", "Heads of k and v.", required=True), number("--head-dim", "Head dim of k.", required=True),
    number("--head-dim-v", "Head dim of v (default: that of k)."), element("--v-dtype", "Element type of v (default: that of k)."),
    element("--cache-dtype", "Element type of the cache (default: that of the tokens)."),
    element("--v-cache-dtype", "That of the values' cache (default: --cache-dtype)."),
    *(choice(f"--{side}-scale", _SCALE_KINDS, f"Form of {side}_scale, for an fp8 cache.") for side in "kv"),
)
_CACHE_ALIGNMENT = click.option("--cache-alignment", type=click.Choice(("1", "2", "4", "8", "16")), help="As --alignment, for the cache.")
_ROTATION = (
    number("--rotary-dim", "Entries of a head that rotate (default: all)."), flag("--interleaved", "Pairs are (2i, 2i + 1)."),
    element("--cos-sin-dtype", "Angles come from a cos_sin_cache of this type."),
)


def _paged(o: Options) -> Call:
    table, q_lens = _requests(o)
    return Call((table,), {
        "num_q_heads": o["q_heads"], "num_kv_heads": o["q_heads"] if o["kv_heads"] is None else o["kv_heads"],
        "head_dim": o["head_dim"], "head_dim_v": o["head_dim_v"], "q_lens": q_lens, "q_dtype": torch_dtype(o["dtype"]),
        "kv_dtype": torch_dtype(o["kv_dtype"]), "kv_layout": o["kv_layout"], "causal": not o["no_causal"], "window": o["window"],
        "soft_cap": o["soft_cap"], "alibi": o["alibi"], "sinks": o["sinks"], "mask": o["mask"], "kv_scales": o["kv_scales"],
        "variant": o["variant"], "rotation": 0 if o["rotation"] else None,
        "batch_invariant": o["batch_invariant"], "deterministic": not o["nondeterministic"]})


def _mla(o: Options) -> Call:
    table, q_lens = _requests(o)
    return Call((table,), {
        "num_heads": o["heads"], "q_lens": q_lens, "q_dtype": torch_dtype(o["dtype"]), "kv_dtype": torch_dtype(o["kv_dtype"]),
        "causal": not o["no_causal"], "head_dim_latent": o["head_dim_latent"], "head_dim_rope": o["head_dim_rope"],
        "kv_scales": o["kv_scales"], "batch_invariant": o["batch_invariant"], "deterministic": not o["nondeterministic"]})


def _at_run(o: Options, p: Any) -> dict[str, Any]:
    """What a plan learns from the tensors of its run: fresh ones of the planned shapes."""
    from kernelgen.problems.common import alignment_of

    latent, out = p.head_dim - p.rope_dim, o["out_dtype"] or ("bf16" if p.q_dtype in FP8 else p.q_dtype)
    rows, rope = 2 if p.seq_q is None else p.seq_q, (o["rope_dtype"] or p.kv_dtype) if p.rope_dim else ""
    of_rows = ((latent, p.q_dtype), (p.rope_dim, p.q_dtype), (p.head_dim_v, out))
    of_pages = ((latent, p.kv_dtype), (p.head_dim_v, p.kv_dtype), (p.rope_dim, rope))
    tensors = [meta((*lead, dim), dtype)
               for lead, parts in (((rows, p.num_q_heads), of_rows), ((2, p.page_size, p.num_kv_heads), of_pages))
               for dim, dtype in parts if dim]
    return {"return_lse": o["lse"], "out_dtype": out, "rope_dtype": rope, "q_scale": bool(o.get("q_scale")),
            "alignment": alignment_of(*tensors)}


def _requests(o: Options) -> tuple[Any, Any]:
    """(page table, query lengths) of a plan."""
    kv_lens = _lengths(o, "kv_lens", "kv_len", None)
    q_lens = _lengths(o, "q_lens", "q_len", len(kv_lens))
    if len(q_lens) != len(kv_lens):
        raise click.UsageError(f"got {len(q_lens)} query lengths and {len(kv_lens)} key lengths, expected one of each per request")
    table = _page_table(o["table"], kv_lens, o["page_size"], o["device_kv_lens"])
    return table, index(len(q_lens)) if o["device_q_lens"] else q_lens


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


def _page_table(form: str, lengths: list[int], page_size: int, on_device: bool) -> Any:
    """A table of requests of these lengths, which a plan sees only if they are not on the device."""
    from kernelgen import PageTable

    pages = [-(-n // page_size) for n in lengths]
    lens = index(len(lengths)) if on_device else lengths
    if form == "contiguous":
        return PageTable.contiguous(lens, page_size, device="meta")
    if form == "blocks":  # one column would be a contiguous cache
        return PageTable.from_blocks(index(len(pages), max(2, *pages, 2)), lens, page_size)
    last = [n - (count - 1) * page_size if count else 0 for n, count in zip(lengths, pages)]
    starts = index(len(pages) + 1) if on_device else [0, *accumulate(pages)]
    return PageTable.from_csr(starts, index(sum(pages)), index(len(pages)) if on_device else last, page_size)


def _append(o: Options) -> Call:
    k, v = _tokens(o)
    return Call((_caches(o), k, v), _place(o) | _append_scales(o))


def _append_mla(o: Options) -> Call:
    ckv, k_rope = (meta((o["tokens"], o[f"head_dim_{part}"]), o["dtype"], grad=o["grad"]) for part in ("latent", "rope"))
    cache = o["cache_dtype"] or o["dtype"]
    caches = [meta((_pages(o), o["page_size"], dim), dtype)
              for dim, dtype in ((o["head_dim_latent"], cache), (o["head_dim_rope"], o["rope_cache_dtype"] or cache))]
    scale = {None: None, "number": 1.0, "tensor": meta((), "fp32")}[o["k_scale"]]
    return Call((caches[0], caches[1], ckv, k_rope), _place(o) | {"k_scale": scale})


def _rope_append(o: Options) -> Call:
    k, v = _tokens(o)
    q = meta((o["tokens"], o["q_heads"], o["head_dim"]), o["dtype"], grad=o["grad"])
    return Call((q, k, v, _caches(o)), {"positions": index(o["tokens"]), **_place(o), **_append_scales(o), **_rotation(o)})


def _rope(o: Options) -> Call:
    tokens, heads, dim = o["q"]
    kv_heads = heads if o["kv_heads"] is None else o["kv_heads"]
    q, k = (meta((tokens, h, dim), o["dtype"], grad=o["grad"]) for h in (heads, kv_heads))
    return Call((q, k, index(tokens)), {**_rotation(o), "inplace": o["inplace"]})


def _rotation(o: Options) -> Options:
    cached = o["cos_sin_dtype"]
    dim = o["rotary_dim"] or (o["q"][2] if "q" in o else o["head_dim"])
    return {"rotary_dim": o["rotary_dim"], "interleaved": o["interleaved"], "cos_sin_cache": meta((1, dim), cached) if cached else None}


def _merge_states(o: Options) -> Call:
    return Call((meta(o["outs"], o["dtype"], grad=o["grad"]), meta(o["outs"][:3], o["lse_dtype"])), {})


def _pages(o: Options) -> int:
    """Another number than that of the requests, so that a scale's shape says what it belongs to."""
    return int(o["tokens"]) + 2


def _tokens(o: Options) -> tuple[Any, Any]:
    return (meta((o["tokens"], o["kv_heads"], o["head_dim"]), o["dtype"], grad=o["grad"]),
            meta((o["tokens"], o["kv_heads"], _dim_v(o)), o["v_dtype"] or o["dtype"]))


def _dim_v(o: Options) -> int:
    return int(o["head_dim"] if o["head_dim_v"] is None else o["head_dim_v"])


def _caches(o: Options) -> tuple[Any, Any]:
    k = o["cache_dtype"] or o["dtype"]
    v = o["v_cache_dtype"] or o["cache_dtype"] or o["v_dtype"] or k
    shape = (_pages(o), o["page_size"], o["kv_heads"])
    return meta((*shape, o["head_dim"]), k), meta((*shape, _dim_v(o)), v)


def _place(o: Options) -> Options:
    from kernelgen import PageTable

    tokens = o["tokens"]  # each a request of its own
    tables: dict[str, Callable[[], Options]] = {
        "slots": lambda: {"slot_mapping": index(tokens)},
        "blocks": lambda: {"page_table": PageTable.from_blocks(index(tokens, 1), index(tokens), o["page_size"])},
        "csr": lambda: {"page_table": PageTable.from_csr(index(tokens + 1), index(tokens), index(tokens), o["page_size"])},
    }
    return tables[o["table"]]()


def _append_scales(o: Options) -> Options:
    heads = o["kv_heads"]
    shapes = {"tensor": (), "head": (heads,), "request_head": (o["tokens"], heads), "page": (_pages(o), heads)}
    kinds = {name: o[name] for name in ("k_scale", "v_scale")}
    return {name: None if kind is None else 1.0 if kind == "number" else meta(shapes[kind], "fp32") for name, kind in kinds.items()}


FORMS: dict[str, Form] = {
    "paged_attention": Form("Attention over a paged cache, as plan_attention and its run describe it.", (
        *_REQUESTS, number("--q-heads", "Query heads.", required=True), number("--head-dim", "Head dim of q and k.", required=True),
        *HEADS, flag("--no-causal"), choice("--kv-layout", ("NHD", "HND"), "Layout of a page.", default="NHD", show_default=True),
        choice("--mask", ("dense", "packed"), "With a mask."), flag("--rotation", "The cached keys are rotated."),
        choice("--kv-scales", ("tensor", "head", "request_head", "page"), "Tensors of scales of an fp8 cache."),
        flag("--q-scale", "With a tensor of scales of q."), *_RUN,
    ), _paged, _at_run),
    "mla": Form("Latent attention over a paged cache, as plan_mla and its run describe it.", (
        *_REQUESTS, number("--heads", "Query heads.", required=True),
        number("--head-dim-latent", "Latent part of a head.", default="512", show_default=True),
        number("--head-dim-rope", "Rotary part of a head.", default="64", show_default=True), flag("--no-causal"),
        choice("--kv-scales", ("tensor", "request_head", "page"), "A tensor of scales of an fp8 cache."),
        element("--rope-dtype", "Element type of the cache's rotary part (default: the cache's)."),
        flag("--batch-invariant"), NONDETERMINISTIC, *_RUN,
    ), _mla, _at_run),
    "append_kv": Form("New keys and values into a paged cache.", (*_APPEND, DTYPE, ALIGNMENT, _CACHE_ALIGNMENT, GRAD), _append),
    "append_mla": Form("New latents and rotary keys into an MLA cache.", (
        *_PLACE, number("--head-dim-latent", "Width of a latent.", default="512", show_default=True),
        number("--head-dim-rope", "Width of a rotary key.", default="64", show_default=True),
        element("--cache-dtype", "Element type of the cache (default: that of the tokens)."),
        element("--rope-cache-dtype", "That of the rotary part's cache (default: --cache-dtype)."),
        choice("--k-scale", ("number", "tensor"), "Form of k_scale, for an fp8 cache."), DTYPE, ALIGNMENT, _CACHE_ALIGNMENT, GRAD,
    ), _append_mla),
    "rope_append_kv": Form("Rotary embedding of q and k, and the keys and values into a paged cache.", (
        number("--q-heads", "Query heads.", required=True), *_APPEND, *_ROTATION, DTYPE, ALIGNMENT, _CACHE_ALIGNMENT, GRAD,
    ), _rope_append),
    "rope": Form("Rotary position embedding of q and k.", (
        click.option("--q", type=Dims("T,HQ,D", example="512,32,128"), required=True, help="Shape of q."),
        number("--kv-heads", "Heads of k (default: as many as query heads)."), *_ROTATION, flag("--inplace", "q and k are overwritten."),
        DTYPE, ALIGNMENT, GRAD,
    ), _rope),
    "merge_states": Form("Partial attention results combined by their LSE.", (
        click.option("--outs", type=Dims("N,T,H,D", example="2,512,32,128"), required=True, help="Shape of outs."),
        element("--lse-dtype", "Element type of lses.", default="fp32", show_default=True), DTYPE, ALIGNMENT, GRAD,
    ), _merge_states),
}
