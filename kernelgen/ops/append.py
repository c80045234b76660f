"""append_kv, append_mla and rope_append_kv: new tokens into paged caches, through the dispatcher."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from kernelgen import reference
from kernelgen.cache_tensors import AppendTensors, Place
from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import choose, prepare
from kernelgen.dtypes import dtype_name
from kernelgen.errors import DeviceError, DtypeError, LayoutError, SettingsError, ShapeError
from kernelgen.guard import ORDINARY, check_backend, check_plain, check_required, operator, record, through_torch, watched
from kernelgen.library.written import wrote
from kernelgen.ops.checks import (
    check_last_contiguous,
    check_no_output_with_grad,
    check_output,
    check_rank,
    check_same_dtype,
    check_takes_no_gradient,
    check_tensors,
    number,
    shape_text,
)
from kernelgen.ops.memo import layout_of, new_memo, remember
from kernelgen.ops.page_table import PageTable
from kernelgen.ops.rope import check_positions, describe_rotation, frozen_scaling, optional_layout, rotate_by_reference
from kernelgen.problems.cache_ops import AppendProblem
from kernelgen.problems.common import alignment_of
from kernelgen.reference.append import target_slots
from kernelgen.settings import settings
from kernelgen.targets import Target, target_of

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Scale = torch.Tensor | float
_calls = new_memo()
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@operator("append_kv")
def append_kv(
    kv_cache: Cache, k: torch.Tensor, v: torch.Tensor, page_table: PageTable | None = None, *, positions: torch.Tensor | None = None,
    batch_indices: torch.Tensor | None = None, slot_mapping: torch.Tensor | None = None, kv_layout: str = "NHD",
    k_scale: Scale | None = None, v_scale: Scale | None = None, kv_scales: str | None = None, backend: str = "auto",
) -> None:
    """Write k (T, Hkv, D) and v (T, Hkv, Dv) into a paged cache, in place; nothing else of the cache is touched.

    kv_cache: (pages, 2, page_size, Hkv, D) "NHD" or (pages, 2, Hkv, page_size, D) "HND", or a pair of 4-D tensors. Any
    strides but a contiguous last dimension, for k and v too.

    Where token t goes: ``slot_mapping[t]`` = page * page_size + row; or position ``positions[t]`` of request
    ``batch_indices[t]`` in ``page_table``. Without batch_indices there is one token per request. Without positions the
    table's lengths already count the new tokens, which are a request's last ones in order (with batch_indices that costs
    a sort: give positions where speed matters). Index tensors are int32 or int64 on the cache's device and are never
    read by the host. A negative value skips its token; so does one that leads outside the table or the cache, which is
    an error under KERNELGEN_CHECK=1. Two tokens for one slot are a race.

    An fp8 cache takes round(x / scale) in float32, saturating; scales: a number or a float32 tensor (), (Hkv), (B, Hkv)
    or (pages, Hkv), ``kv_scales`` ("tensor", "head", "request_head", "page") naming the form where two fit. fp8 tokens of
    the cache's dtype are copied as codes.

    Raises ShapeError, DtypeError, DeviceError, LayoutError, SettingsError, NoBackendError.
    """
    if watched() or type(k) not in ORDINARY:
        if through_torch(k):
            record("append_kv", locals())
            return
        check_plain("append_kv")
    _append(kv_cache, kv_layout, None, k, v, page_table, positions, batch_indices, slot_mapping, k_scale, v_scale, kv_scales, backend)


@operator("append_mla")
def append_mla(
    ckv_cache: torch.Tensor, k_rope_cache: torch.Tensor | None, ckv: torch.Tensor, k_rope: torch.Tensor,
    page_table: PageTable | None = None, *, positions: torch.Tensor | None = None, batch_indices: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None, k_scale: Scale | None = None, backend: str = "auto",
) -> None:
    """Write ckv (T, R) and k_rope (T, P) into an MLA cache, in place.

    ckv_cache (pages, page_size, R) and k_rope_cache (pages, page_size, P), or one (pages, page_size, R + P) tensor with
    k_rope_cache=None. ``k_scale``: one number, or float32 tensor (), for the fp8 parts of the cache. Places, skipped
    tokens and errors as in :func:`append_kv`.
    """
    if watched() or type(ckv) not in ORDINARY:
        if through_torch(ckv):
            record("append_mla", locals())
            return
        check_plain("append_mla")
    grad = torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in (ckv, k_rope))
    key: Hashable = (
        "mla", layout_of(ckv_cache, written=True), layout_of(k_rope_cache, written=True), layout_of(ckv), layout_of(k_rope),
        _table_key(page_table), optional_layout(positions), optional_layout(batch_indices), optional_layout(slot_mapping),
        _scale_key(k_scale), backend, grad, settings().check)
    where = (page_table, positions, batch_indices, slot_mapping)
    try:
        call = _calls.get(key)
    except TypeError:  # an option that has no hash is no legal one
        key = call = None
    if call is None:
        pair = _split_mla(ckv_cache, k_rope_cache, ckv, k_rope, k_scale)
        scales = _mla_scales(k_scale, *pair)
        _first_call(key, k_rope_cache is None, pair, "NHD", None, ckv.unsqueeze(1), k_rope.unsqueeze(1), *where, *scales, None, backend,
                    grad)
    else:
        caches = ckv_cache if k_rope_cache is None else (ckv_cache, k_rope_cache)
        scales = _mla_scales(k_scale, ckv_cache, ckv_cache if k_rope_cache is None else k_rope_cache)
        call(caches, None, ckv, k_rope, *where, *scales)


def _mla_scales(scale: Scale | None, ckv_cache: torch.Tensor, k_rope_cache: torch.Tensor) -> tuple[Scale | None, Scale | None]:
    """The scale of an MLA cache holds for its fp8 parts."""
    return scale if ckv_cache.dtype in _FP8 else None, scale if k_rope_cache.dtype in _FP8 else None


def _split_mla(
    ckv_cache: torch.Tensor, k_rope_cache: torch.Tensor | None, ckv: torch.Tensor, k_rope: torch.Tensor, scale: Scale | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parts of an MLA cache as views (pages, page_size, 1, R or P)."""
    check_required(ckv_cache=ckv_cache, ckv=ckv, k_rope=k_rope)
    check_tensors(ckv_cache=ckv_cache, k_rope_cache=k_rope_cache, ckv=ckv, k_rope=k_rope)
    if isinstance(scale, torch.Tensor) and scale.numel() != 1:
        raise ShapeError(f"k_scale: got shape {shape_text(scale)}, expected one number")
    if scale is not None and ckv_cache.dtype not in _FP8 and (k_rope_cache is None or k_rope_cache.dtype not in _FP8):
        raise DtypeError(f"k_scale: got one for a cache of {ckv_cache.dtype}, expected an fp8 cache; leave k_scale out")
    for name, t in (("ckv", ckv), ("k_rope", k_rope)):
        check_rank(name, t, 2, "(T, R or P)")
    for name, cache in (("ckv_cache", ckv_cache), ("k_rope_cache", k_rope_cache)):
        if cache is not None:
            check_rank(name, cache, 3, "(pages, page_size, R or P)")
    if k_rope_cache is not None:
        return ckv_cache.unsqueeze(2), k_rope_cache.unsqueeze(2)
    latent, rotary = ckv.shape[1], k_rope.shape[1]
    if ckv_cache.shape[2] != latent + rotary:
        raise ShapeError(f"ckv_cache: got {ckv_cache.shape[2]} in the last dimension of {shape_text(ckv_cache)}, expected {latent} + "
                         f"{rotary}, the widths of ckv and k_rope")
    whole = ckv_cache.unsqueeze(2)
    return whole[..., :latent], whole[..., latent:]


@operator("rope_append_kv")
def rope_append_kv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: Cache, page_table: PageTable | None = None, *,
    positions: torch.Tensor, batch_indices: torch.Tensor | None = None, slot_mapping: torch.Tensor | None = None,
    theta: float = 10000.0, cos_sin_cache: torch.Tensor | None = None, rotary_dim: int | None = None, interleaved: bool = False,
    scaling: Mapping[str, Any] | None = None, kv_layout: str = "NHD", k_scale: Scale | None = None, v_scale: Scale | None = None,
    kv_scales: str | None = None, out: torch.Tensor | None = None, backend: str = "auto",
) -> torch.Tensor:
    """:func:`rope` of q and k and :func:`append_kv` of the rotated keys and of v, in one pass over the tokens.

    q (T, Hq, D), k (T, Hkv, D), v (T, Hkv, Dv). Returns the rotated q in ``out`` (default: a new tensor; ``out=q`` rotates
    in place); k stays as it is. ``positions`` (T) turn every token and, with a page table, place it too; a token that is
    not written still has its q rotated. A rotated key is rounded once, to the cache's type: an fp8 code is that of the
    float32 result. Everything else as in the two calls.

    A function of its own rather than arguments of append_kv: it takes q and returns it, and the two calls would
    otherwise share neither their required arguments nor their result.

    Raises ShapeError, DtypeError, DeviceError, LayoutError, SettingsError, NoBackendError.
    """
    if watched() or type(k) not in ORDINARY:
        if through_torch(k):
            recorded: torch.Tensor = record("rope_append_kv", locals())
            return recorded
        check_plain("rope_append_kv")
    if type(theta) is not float:
        theta = number("theta", theta)  # part of the key by value
    rotating = _Rotating(q, out, positions, theta, cos_sin_cache, rotary_dim, interleaved, scaling)
    result = _append(kv_cache, kv_layout, rotating, k, v, page_table, positions if slot_mapping is None else None, batch_indices,
                     slot_mapping, k_scale, v_scale, kv_scales, backend)
    assert result is not None
    return result


class _Rotating:
    """The arguments of a fused call that append_kv does not have."""

    def __init__(
        self, q: torch.Tensor, out: torch.Tensor | None, positions: torch.Tensor, theta: float, cos_sin_cache: torch.Tensor | None,
        rotary_dim: int | None, interleaved: bool, scaling: Mapping[str, Any] | None,
    ) -> None:
        self.q, self.out, self.positions, self.theta, self.cos_sin_cache = q, out, positions, theta, cos_sin_cache
        self.rotary_dim, self.interleaved, self.scaling = rotary_dim, interleaved, scaling

    def key(self) -> Hashable:
        return (layout_of(self.q), layout_of(self.out, written=True), layout_of(self.positions), self.theta,
                optional_layout(self.cos_sin_cache), self.rotary_dim, self.interleaved, frozen_scaling(self.scaling))


def _append(
    kv_cache: Cache, kv_layout: str, rotating: _Rotating | None, k: torch.Tensor, v: torch.Tensor, table: PageTable | None,
    positions: torch.Tensor | None, requests: torch.Tensor | None, slots: torch.Tensor | None, k_scale: Scale | None,
    v_scale: Scale | None, kv_scales: str | None, backend: str,
) -> torch.Tensor | None:
    """Look the call up, or make it; run it."""
    inputs = (k, v, rotating.q if rotating is not None else None)
    grad = torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in inputs)
    whole = isinstance(kv_cache, torch.Tensor)
    key: Hashable = (
        tuple([layout_of(t, written=True) for t in kv_cache]) if isinstance(kv_cache, (tuple, list)) else layout_of(kv_cache, written=True),
        kv_layout, layout_of(k), layout_of(v), _table_key(table), optional_layout(positions), optional_layout(requests),
        optional_layout(slots), _scale_key(k_scale), _scale_key(v_scale), kv_scales, backend, grad,
        None if rotating is None else rotating.key(), settings().check,
    )
    try:
        call = _calls.get(key)
    except TypeError:  # an option that has no hash is no legal one
        key = call = None
    if call is not None:
        return call(kv_cache, rotating, k, v, table, positions, requests, slots, k_scale, v_scale)
    return _first_call(
        key, whole, kv_cache, kv_layout, rotating, k, v, table, positions, requests, slots, k_scale, v_scale, kv_scales, backend, grad)


def _first_call(
    key: Hashable, whole: bool, kv_cache: Any, kv_layout: str, rotating: _Rotating | None, k: torch.Tensor, v: torch.Tensor,
    table: PageTable | None, positions: torch.Tensor | None, requests: torch.Tensor | None, slots: torch.Tensor | None,
    k_scale: Scale | None, v_scale: Scale | None, kv_scales: str | None, backend: str, grad: bool,
) -> torch.Tensor | None:
    """Check, describe, prepare and remember the call; run it. ``whole``: one tensor holds both sides of the cache."""
    check_backend(backend)
    check_plain("append", kv_cache=kv_cache, k=k, v=v, q=None if rotating is None else rotating.q)
    check = settings().check
    problem, tensors = _describe(kv_cache, kv_layout, rotating, k, v, table, positions, requests, slots, k_scale, v_scale, kv_scales, grad)
    if check:
        _check_contents(problem, tensors, table, rotating)
    decision, run = prepare(problem, target_of(k.device), backend, tensors)
    if not check and decision.chosen is not None and decision.chosen.backend == "generated":
        remember(_calls, key, _prepared(tensors, run, whole))
    result = run(tensors)
    wrote(kv_cache, None if rotating is None else rotating.out)
    return tensors.q_out if result is None else result


def _prepared(sample: AppendTensors, run: Any, whole: bool) -> Any:
    """The repeated call of a generated kernel, which reads addresses only: no view of the cache is made."""
    v_offset = sample.v_cache.data_ptr() - sample.k_cache.data_ptr() if whole else 0
    angles, device = sample.angles, sample.k.device

    def call(
        kv_cache: Any, rotating: _Rotating | None, k: torch.Tensor, v: torch.Tensor, table: PageTable | None,
        positions: torch.Tensor | None, requests: torch.Tensor | None, slots: torch.Tensor | None, k_scale: Any, v_scale: Any,
    ) -> torch.Tensor | None:
        wrote(kv_cache)
        k_cache, v_cache = (kv_cache, kv_cache) if whole else kv_cache
        place = _place_of(table, positions, requests, slots, device)
        if rotating is None:
            run(AppendTensors(k, v, k_cache, v_cache, place, k_scale, v_scale, v_offset=v_offset))
            return None
        q, out, cache = rotating.q, rotating.out, rotating.cos_sin_cache
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        else:
            wrote(out)
        turned = angles._replace(table=cache) if cache is not None and angles is not None else angles
        run(AppendTensors(k, v, k_cache, v_cache, place, k_scale, v_scale, q, out, rotating.positions, turned, v_offset=v_offset))
        return out

    return call


def explain_append_kv(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for an append_kv call, without running it. Without a place for the tokens: by a slot mapping."""
    given = dict(zip(("kv_cache", "k", "v", "page_table"), args)) | kwargs
    return _explained(given, target, backend, live)


def explain_append_mla(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The same for append_mla."""
    given = dict(zip(("ckv_cache", "k_rope_cache", "ckv", "k_rope", "page_table"), args)) | kwargs
    ckv, k_rope, scale = given.pop("ckv"), given.pop("k_rope"), given.pop("k_scale", None)
    pair = _split_mla(given.pop("ckv_cache"), given.pop("k_rope_cache", None), ckv, k_rope, scale)
    scales = dict(zip(("k_scale", "v_scale"), _mla_scales(scale, *pair)))
    return _explained({"kv_cache": pair, "k": ckv.unsqueeze(1), "v": k_rope.unsqueeze(1), **scales, **given}, target, backend, live)


def explain_rope_append_kv(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The same for rope_append_kv, positions left out or not."""
    defaults = dict(out=None, positions=None, theta=10000.0, cos_sin_cache=None, rotary_dim=None, interleaved=False, scaling=None)
    given = defaults | dict(zip(("q", "k", "v", "kv_cache", "page_table"), args)) | kwargs
    q, positions = given["q"], given["positions"]
    if positions is None:
        given["positions"] = positions = torch.empty(q.shape[0], dtype=torch.int64, device=q.device)
    rotating = _Rotating(*(given.pop(name) for name in ("q", *defaults)))
    in_table = given.get("page_table") is not None
    return _explained(given | {"positions": positions if in_table else None}, target, backend, live, rotating)


def _explained(given: dict[str, Any], target: Target, backend: str, live: bool, rotating: _Rotating | None = None) -> Decision:
    """``given``: arguments of append_kv by name."""
    names = ("page_table", "positions", "batch_indices", "slot_mapping", "k_scale", "v_scale", "kv_scales")
    table, positions, requests, slots, k_scale, v_scale, kind = (given.get(name) for name in names)
    k, v = given["k"], given["v"]
    if table is None and slots is None:
        slots = torch.empty(k.shape[0], dtype=torch.int64, device=k.device)
    grad = _wants_grad(k, v, rotating.q if rotating is not None else None)
    problem, _ = _describe(
        given["kv_cache"], given.get("kv_layout", "NHD"), rotating, k, v, table, positions, requests, slots, k_scale, v_scale, kind,
        grad)
    return choose(problem, target, backend, live=live)


def _wants_grad(*inputs: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in inputs)


def run_reference(problem: AppendProblem, t: AppendTensors) -> torch.Tensor | None:
    """The oracles; with rotation returns the rotated q where autograd needs it."""
    k, result = t.k, None
    if problem.rotation is not None:
        assert t.q is not None and t.q_out is not None and t.positions is not None and t.angles is not None
        turned, k = rotate_by_reference(t.q, t.k, t.positions, problem.rotation, t.angles, rounded=t.k_cache.dtype not in _FP8)
        result = turned if problem.requires_grad else t.q_out.copy_(turned)
    place = t.place
    table = None
    if place.slot_mapping is None:
        csr = place.page_indptr is not None
        table = PageTable(
            problem.page_size, kv_indptr=place.page_indptr, kv_indices=place.page_indices if csr else None,
            kv_last_page_len=place.lengths if csr else None, block_tables=None if csr else place.page_indices,
            seq_lens=None if csr else place.lengths)
    kinds = {problem.k_scale, problem.v_scale} & {"request_head", "page"}
    reference.append_kv(
        (t.k_cache, t.v_cache), k, t.v, table, positions=place.positions, batch_indices=place.requests, slot_mapping=place.slot_mapping,
        k_scale=t.k_scale, v_scale=t.v_scale, kv_scales=kinds.pop() if len(kinds) == 1 else None)
    return result


def _table_key(table: Any) -> Hashable:
    if not isinstance(table, PageTable):
        return table is not None and type(table).__name__
    return (table.page_size, layout_of(table.kv_indptr), layout_of(table.kv_indices), layout_of(table.kv_last_page_len),
            layout_of(table.block_tables), layout_of(table.seq_lens))


def _scale_key(scale: Any) -> Hashable:
    return layout_of(scale) if isinstance(scale, torch.Tensor) else scale


def _place_of(
    table: PageTable | None, positions: torch.Tensor | None, requests: torch.Tensor | None, slots: torch.Tensor | None,
    device: torch.device,
) -> Place:
    """The index tensors of one call. Lengths that a table has on the host are copied, which takes no sync."""
    if table is None:
        return Place(slot_mapping=slots)
    later = _later_tokens(requests) if positions is None and requests is not None else None
    csr = table.kv_indptr is not None
    return Place(
        None, positions, requests, later, _on(device, table.kv_indptr), table.kv_indices if csr else table.block_tables,
        _on(device, table.kv_last_page_len if csr else table.seq_lens))


def _on(device: torch.device, t: torch.Tensor | None) -> torch.Tensor | None:
    return t if t is None or t.device == device else t.to(device, non_blocking=True)


def _later_tokens(requests: torch.Tensor) -> torch.Tensor:
    """(T) int32: how many later tokens belong to the same request; on the device, whatever the order of the tokens."""
    order = torch.argsort(requests, stable=True)
    ranked = requests[order]
    behind = torch.searchsorted(ranked, ranked, right=True) - 1 - torch.arange(len(ranked), device=requests.device)
    return torch.empty_like(requests, dtype=torch.int32, memory_format=torch.contiguous_format).scatter_(0, order, behind.to(torch.int32))


def _check_contents(problem: AppendProblem, t: AppendTensors, table: PageTable | None, rotating: _Rotating | None) -> None:
    """KERNELGEN_CHECK=1: every token has a place within its request's pages and the cache. Reads the indices."""
    place = t.place
    target_slots(problem.tokens, t.k_cache.shape[0], problem.page_size, table, place.positions, place.requests, place.slot_mapping)
    if rotating is not None:
        check_positions(rotating.positions, rotating.cos_sin_cache)


def _split_cache(kv_cache: Any, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(k, v) as views (pages, page_size, Hkv, D) that may be written."""
    if kv_layout not in ("NHD", "HND"):
        raise SettingsError(f"kv_layout: got {kv_layout!r}, expected 'NHD' or 'HND'")
    if isinstance(kv_cache, torch.Tensor):
        if kv_cache.dim() != 5 or kv_cache.shape[1] != 2:
            raise ShapeError(f"kv_cache: got shape {shape_text(kv_cache)}, expected (pages, 2, page_size, Hkv, D) or "
                             "(pages, 2, Hkv, page_size, D), or a pair of 4-D tensors")
        k_cache, v_cache = kv_cache[:, 0], kv_cache[:, 1]
    elif isinstance(kv_cache, (tuple, list)) and len(kv_cache) == 2:
        k_cache, v_cache = kv_cache
    else:
        raise DtypeError(f"kv_cache: got {type(kv_cache).__name__}, expected a 5-D tensor or a pair of 4-D tensors")
    check_tensors(k_cache=k_cache, v_cache=v_cache)
    for name, t in (("k cache", k_cache), ("v cache", v_cache)):
        check_rank(name, t, 4, "(pages, page_size, Hkv, D) or (pages, Hkv, page_size, D)")
        check_last_contiguous(**{name: t})
        if any(extent > 1 and stride == 0 for extent, stride in zip(t.shape, t.stride())):
            raise LayoutError(f"{name}: got strides {t.stride()} of {shape_text(t)}, expected memory of its own for every element")
        check_takes_no_gradient(name, t)
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ShapeError(f"kv_cache: got k {shape_text(k_cache)} and v {shape_text(v_cache)}, expected equal sizes but for D")
    return (k_cache.transpose(1, 2), v_cache.transpose(1, 2)) if kv_layout == "HND" else (k_cache, v_cache)


def _check_index(name: str, t: Any, tokens: int, device: torch.device) -> None:
    if not isinstance(t, torch.Tensor):
        raise DtypeError(f"{name}: got {type(t).__name__}, expected an int32 or int64 tensor")
    if t.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{name}: got {t.dtype}, expected int32 or int64")
    if t.dim() != 1 or t.shape[0] != tokens:
        raise ShapeError(f"{name}: got shape {shape_text(t)}, expected ({tokens}), one entry per token")
    if t.device != device:
        raise DeviceError(f"{name} is on {t.device}, expected {device}, the device of the cache; move it with .to()")


def _check_place(
    table: Any, positions: Any, requests: Any, slots: Any, tokens: int, page_size: int, device: torch.device,
) -> str:
    """Checks what says where the tokens go; returns the problem's ``table``."""
    given = {"positions": positions, "batch_indices": requests, "slot_mapping": slots}
    for name, t in given.items():
        if t is not None:
            _check_index(name, t, tokens, device)
    if slots is not None:
        if table is not None or positions is not None or requests is not None:
            raise ShapeError("slot_mapping: got it together with a page table, positions or batch_indices, expected one of the two forms")
        return "slots"
    if table is None:
        raise ShapeError("got neither page_table nor slot_mapping, expected one of them")
    if not isinstance(table, PageTable):
        raise DtypeError(f"page_table: got {type(table).__name__}, expected a kernelgen.PageTable")
    if table.page_size != page_size:
        raise ShapeError(f"kv_cache: has pages of {page_size}, expected {table.page_size} as in the page table")
    if table.device != device:
        raise DeviceError(f"page_table is on {table.device}, expected {device}, the device of the cache; move its page numbers with .to()")
    if requests is None and table.batch != tokens:
        raise ShapeError(f"got {tokens} tokens for {table.batch} requests, expected batch_indices where they differ")
    return table.form


def _scale_kind(
    name: str, scale: Any, kv_scales: str | None, x: torch.Tensor, cache: torch.Tensor, batch: int | None,
) -> str | None:
    """The problem's word for a scale, after checks. ``batch``: requests of the page table, if there is one."""
    fp8 = cache.dtype in _FP8
    if not fp8 and (x.dtype != cache.dtype or scale is not None):
        raise DtypeError(f"{name}: got {x.dtype} {'with a scale ' if scale is not None else ''}for a cache of {cache.dtype}, expected "
                         "the cache's dtype without a scale; convert with .to()")
    if fp8 and not x.is_floating_point():
        raise DtypeError(f"{name}: got {x.dtype}, expected a floating-point tensor for a cache of {cache.dtype}")
    if scale is None:
        return None
    if not isinstance(scale, torch.Tensor):
        number(f"{name}_scale", scale)
        return "number"
    pages, heads = cache.shape[0], cache.shape[2]
    if scale.dtype != torch.float32:
        raise DtypeError(f"{name}_scale: got {scale.dtype}, expected float32")
    if scale.device != cache.device:
        raise DeviceError(f"{name}_scale is on {scale.device}, expected {cache.device}, the device of the cache; move it with .to()")
    shape = tuple(scale.shape)
    if scale.dim() <= 1 and scale.numel() == 1 and kv_scales in (None, "tensor", "head"):
        return "tensor"
    if shape == (heads,) and kv_scales in (None, "head"):
        return "head"
    by_request = batch is not None and shape == (batch, heads) and kv_scales in (None, "request_head")
    by_page = shape == (pages, heads) and kv_scales in (None, "page")
    if by_request == by_page:
        raise ShapeError(f"{name}_scale: got shape {shape} for {batch} requests, {pages} pages and {heads} heads, expected (), (Hkv), or "
                         "exactly one of (B, Hkv) and (pages, Hkv); kv_scales= names the form")
    return "request_head" if by_request else "page"


def _describe(
    kv_cache: Any, kv_layout: str, rotating: _Rotating | None, k: torch.Tensor, v: torch.Tensor, table: PageTable | None,
    positions: torch.Tensor | None, requests: torch.Tensor | None, slots: torch.Tensor | None, k_scale: Scale | None,
    v_scale: Scale | None, kv_scales: str | None, grad: bool,
) -> tuple[AppendProblem, AppendTensors]:
    k_cache, v_cache = _split_cache(kv_cache, kv_layout)
    check_required(k=k, v=v)
    check_tensors(kv_cache=k_cache, k=k, v=v)
    pages, page_size, heads, head_dim = k_cache.shape
    for name, t, width in (("k", k, head_dim), ("v", v, v_cache.shape[3])):
        check_rank(name, t, 3, "(T, Hkv, D)")
        if tuple(t.shape) != (k.shape[0], heads, width):
            raise ShapeError(f"{name}: got shape {shape_text(t)}, expected ({k.shape[0]}, {heads}, {width}), the tokens of k and the heads "
                             "and width of the cache")
    check_last_contiguous(k=k, v=v)
    tokens, device = k.shape[0], k.device
    if kv_scales not in (None, "tensor", "head", "request_head", "page"):
        raise SettingsError(f"kv_scales: got {kv_scales!r}, expected None, 'tensor', 'head', 'request_head' or 'page'")
    form = _check_place(table, positions, requests, slots, tokens, page_size, device)
    batch = None if table is None else table.batch
    kinds = [_scale_kind(name, scale, kv_scales, x, cache, batch)
             for name, scale, x, cache in (("k", k_scale, k, k_cache), ("v", v_scale, v, v_cache))]
    rotation = angles = q = q_out = None
    if rotating is not None:
        rotation, angles, q, q_out = _describe_rotating(rotating, k, grad)
    problem = AppendProblem(
        tokens, heads, head_dim, v_cache.shape[3], dtype_name(k.dtype), dtype_name(v.dtype), dtype_name(k_cache.dtype),
        dtype_name(v_cache.dtype), page_size, form, kinds[0], kinds[1], rotation, 0 if q is None else q.shape[1],
        alignment_of(k, v, q, q_out), alignment_of(k_cache, v_cache), grad)
    place = _place_of(table, positions, requests, slots, device)
    return problem, AppendTensors(k, v, k_cache, v_cache, place, k_scale, v_scale, q, q_out,
                                  rotating.positions if rotating is not None else None, angles)


def _describe_rotating(rotating: _Rotating, k: torch.Tensor, grad: bool) -> Any:
    """(rotation, angles, q, output of q), checked."""
    q, out = rotating.q, rotating.out
    check_tensors(k=k, q=q, out=out, cos_sin_cache=rotating.cos_sin_cache)
    check_rank("q", q, 3, "(T, Hq, D)")
    check_same_dtype(q=q, k=k)
    check_last_contiguous(q=q)
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ShapeError(f"q: got shape {shape_text(q)}, expected ({k.shape[0]}, Hq, {k.shape[2]}), the tokens and width of k")
    _check_index("positions", rotating.positions, k.shape[0], k.device)
    if grad:
        check_no_output_with_grad(out=out)
    rotation, angles = describe_rotation(
        q.shape[2], q.device, rotating.theta, rotating.cos_sin_cache, rotating.rotary_dim, rotating.interleaved, rotating.scaling)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    check_output("out", out, tuple(q.shape), q.dtype, q.device)
    return rotation, angles, q, out
