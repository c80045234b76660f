"""attention and attention_varlen: dense and ragged, through the dispatcher."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import choose, prepare
from kernelgen.dtypes import dtype_name
from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.guard import (
    ORDINARY,
    check_backend,
    check_flags,
    check_required,
    needs_torch,
    operator,
    record,
    through_torch,
    watched,
    whole,
)
from kernelgen.library.written import wrote
from kernelgen.ops.checks import (
    check_dim,
    check_last_contiguous,
    check_no_output_with_grad,
    check_output,
    check_rank,
    check_same_dtype,
    check_tensors,
    index_tensor,
    number,
    shape_text,
)
from kernelgen.ops.memo import layout_of, new_memo, remember
from kernelgen.ops.page_table import check_starts, on_host
from kernelgen.ops.planning import check_mask
from kernelgen.ops.scales import Scale, head_scale, split_numbers
from kernelgen.ops.variants import bind_words, trace_or_name
from kernelgen.problems.attention import AttentionProblem
from kernelgen.problems.common import alignment_of
from kernelgen.settings import settings
from kernelgen.targets import Target, target_of
from kernelgen.tensors import AttentionTensors

Window = tuple[int | None, int | None]
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_calls = new_memo()
_head_dims = {(576, 512)}  # beyond multiples of 8 up to 512: MLA with one latent head


@operator("attention")
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, window: Window | None = None,
    scale: float | None = None, soft_cap: float | None = None, alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, mask: torch.Tensor | None = None, block_mask: Any = None, variant: Any = None,
    kv_lens: torch.Tensor | None = None, q_scale: Scale | None = None, k_scale: Scale | None = None,
    v_scale: Scale | None = None, return_lse: bool = False, out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, deterministic: bool = True, batch_invariant: bool = False, backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a dense batch: softmax(mask(cap(scale * q k^T) + bias)) v.

    q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv); Hq a multiple of Hkv; D and Dv multiples of 8 up to 512,
    or 576/512. The last dimension must be contiguous, every other stride is free. Returns out (B, Sq, Hq, Dv) in q's
    dtype (bfloat16 for fp8), and with ``return_lse`` also the natural-log LSE (B, Hq, Sq) float32.

    Positions align at the bottom right: query i stands at i + Sk - Sq. ``causal`` sees keys up to its position;
    ``window=(left, right)`` counts keys, inclusive, None = unbounded. ``scale`` defaults to D ** -0.5; ``soft_cap``:
    s = cap * tanh(s / cap). ``kv_lens`` (B) int32: only that prefix of the keys is in use. A row that may attend to
    nothing gives 0 and LSE -inf; a sink of +inf gives 0 and LSE +inf. ``out`` and ``lse`` must not overlap anything else.
    KERNELGEN_CHECK=1 looks at index values.

    Raises ShapeError, DtypeError, DeviceError, LayoutError, SettingsError; NoBackendError with the table of reasons;
    CompileError. Source of the online softmax: Milakov and Gimelshein 2018; of the tiling: Dao et al. 2022.
    """
    # Numbers are part of the key by value: a tensor would be there by identity and could change behind it.
    if scale is not None and type(scale) is not float:
        scale = number("scale", scale)
    if soft_cap is not None and type(soft_cap) is not float:
        soft_cap = number("soft_cap", soft_cap)
    if window is not None:
        window = check_window(window)
    if not (type(causal) is type(return_lse) is type(deterministic) is type(batch_invariant) is bool and type(backend) is str):
        check_flags(causal=causal, return_lse=return_lse, deterministic=deterministic, batch_invariant=batch_invariant)
        check_backend(backend)
    # The plain call, with none of the rarer tensors: one look-up by everything that could change the prepared call.
    plain = (alibi_slopes is None and sinks is None and mask is None and block_mask is None and variant is None
             and kv_lens is None and q_scale is None and k_scale is None and v_scale is None
             and type(q) in ORDINARY and type(k) in ORDINARY and type(v) in ORDINARY and not watched()
             and q.layout == k.layout == v.layout == torch.strided)
    key: Any = None
    if plain:
        address_q, address_k, address_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        # Nothing there, or not as it seems: the long way looks closer.
        plain = bool(address_q and address_k and address_v) and not (q.is_neg() or k.is_neg() or v.is_neg())
    if plain:
        grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        key = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            (address_q | address_k | address_v) & 15, causal, window, scale, soft_cap, return_lse, deterministic,
            batch_invariant, backend, grad,
        )
        if out is not None or lse is not None:
            key = (key, layout_of(out, written=True), layout_of(lse, written=True))
        call = _calls.get(key)
        if call is not None:
            return call(q, k, v, out, lse)
    elif through_torch(q, k, v):
        return record("attention", locals())
    features = Features(
        causal, window, scale, soft_cap, alibi_slopes, sinks, mask, block_mask, variant, kv_lens, q_scale, k_scale, v_scale, return_lse,
        deterministic, batch_invariant,
    )
    if not plain:
        return _call(q, k, v, None, None, features, out, lse, backend)
    problem, tensors = _describe(q, k, v, None, None, features, out, lse, backend)
    _, run = prepare(problem, target_of(q.device), backend, tensors)
    remember(_calls, key, _prepared(tensors, run, return_lse))
    return _finish(tensors, run(tensors), return_lse, out, lse)


def _prepared(sample: AttentionTensors, run: Any, return_lse: bool) -> Any:
    """The repeated dense call: allocate what was not given, run."""
    scale, soft_cap = sample.scale, sample.soft_cap
    out_shape, out_dtype, same = sample.out.shape, sample.out.dtype, sample.out.dtype == sample.q.dtype
    lse_shape = sample.lse.shape if sample.lse is not None else None

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None) -> Any:
        if out is None:
            out = q.new_empty(out_shape) if same else q.new_empty(out_shape, dtype=out_dtype)
        else:
            wrote(out)
        if lse is not None:
            wrote(lse)
        elif lse_shape is not None:
            lse = q.new_empty(lse_shape, dtype=torch.float32)
        result = run(AttentionTensors(q, k, v, out, lse, scale, soft_cap=soft_cap))
        if result is not None:
            return result if return_lse else result[0]
        return (out, lse) if return_lse else out

    return call


@operator("attention_varlen")
def attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, *,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, causal: bool = False, window: Window | None = None,
    scale: float | None = None, soft_cap: float | None = None, alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, mask: torch.Tensor | None = None, block_mask: Any = None, variant: Any = None,
    kv_lens: torch.Tensor | None = None, q_scale: Scale | None = None, k_scale: Scale | None = None,
    v_scale: Scale | None = None, return_lse: bool = False, out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, deterministic: bool = True, batch_invariant: bool = False, backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over requests packed along one token axis ("ragged").

    q (Tq, Hq, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv); cu_seqlens_q, cu_seqlens_k (B + 1) int32 on the tensors' device:
    request b owns rows cu[b] .. cu[b + 1] - 1. Returns out (Tq, Hq, Dv) and with ``return_lse`` the LSE (Tq, Hq).
    ``max_seqlen_*`` are hints that nothing needs. Rows past the last request are left unwritten.
    Everything else, and the errors, as in :func:`attention`.
    """
    check_backend(backend)
    check_flags(causal=causal, return_lse=return_lse, deterministic=deterministic, batch_invariant=batch_invariant)
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if starts is None:
            raise ShapeError(f"{name}: got None, expected int32 starts (B + 1) of the requests: both are needed")
    if through_torch(q, k, v):
        return record("attention_varlen", locals())
    features = Features(
        causal, window, scale, soft_cap, alibi_slopes, sinks, mask, block_mask, variant, kv_lens, q_scale, k_scale, v_scale, return_lse,
        deterministic, batch_invariant,
    )
    return _call(q, k, v, cu_seqlens_q, cu_seqlens_k, features, out, lse, backend)


def explain_attention(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for a call of attention or attention_varlen with these arguments, without running it."""
    ragged = len(args) == 5 or "cu_seqlens_q" in kwargs
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k") if ragged else ("q", "k", "v")
    values = dict(zip(names, args)) | kwargs
    values.pop("max_seqlen_q", None), values.pop("max_seqlen_k", None)
    q, k, v, cu_q, cu_k, out, lse = (values.pop(name, None) for name in (*names[:3], "cu_seqlens_q", "cu_seqlens_k", "out", "lse"))
    problem, _ = _describe(q, k, v, cu_q, cu_k, Features(**values), out, lse, backend)
    return choose(problem, target, backend, live=live)


class Features(NamedTuple):
    """The keyword arguments of attention that say what is computed."""

    causal: bool = False
    window: Window | None = None
    scale: float | None = None
    soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    block_mask: Any = None
    variant: Any = None
    kv_lens: torch.Tensor | None = None
    q_scale: Scale | None = None
    k_scale: Scale | None = None
    v_scale: Scale | None = None
    return_lse: bool = False
    deterministic: bool = True
    batch_invariant: bool = False


def _call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None,
    f: Features, out: torch.Tensor | None, lse: torch.Tensor | None, backend: str,
) -> Any:
    """A call with any feature; a repeated one is found by the layout of every tensor and the value of everything else."""
    key: Any = None
    if f.variant is None and f.block_mask is None and not watched():
        tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k)
        grad = torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in (q, k, v, f.sinks, f.alibi_slopes))
        window = tuple(f.window) if isinstance(f.window, list) else f.window
        key = (*map(layout_of, tensors), layout_of(out, written=True), layout_of(lse, written=True),
               *(layout_of(x) if isinstance(x, torch.Tensor) else x for x in f._replace(window=window)),
               backend, grad)
        try:
            run = _calls.get(key)
        except TypeError:  # something unhashable among the features: the checks below name it
            key = run = None
        if run is not None:
            given = _gather(q, k, v, cu_seqlens_q, cu_seqlens_k, f, out, lse)
            return _finish(given, run(given), f.return_lse, out, lse)
    problem, given = _describe(q, k, v, cu_seqlens_q, cu_seqlens_k, f, out, lse, backend)
    _, run = prepare(problem, target_of(q.device), backend, given)
    if key is not None:
        remember(_calls, key, run)
    return _finish(given, run(given), f.return_lse, out, lse)


def _describe(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None,
    f: Features, out: torch.Tensor | None, lse: torch.Tensor | None, backend: str,
) -> tuple[AttentionProblem, AttentionTensors]:
    """Check everything, allocate outputs, and describe the call."""
    check_required(q=q, k=k, v=v)
    check_flags(causal=f.causal, return_lse=f.return_lse, deterministic=f.deterministic, batch_invariant=f.batch_invariant)
    check_tensors(q=q, k=k, v=v, out=out, lse=lse, alibi_slopes=f.alibi_slopes, sinks=f.sinks, mask=f.mask)
    ragged = cu_seqlens_q is not None or cu_seqlens_k is not None
    rank, form = (3, "(T, H, D)") if ragged else (4, "(B, S, H, D)")
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_rank(name, t, rank, form)
    check_last_contiguous(q=q, k=k, v=v)
    _check_dtypes(q, k, v)
    batch, seq_q, seq_k, hq, hkv, d, dv = check_sizes(q, k, v, ragged)
    if ragged:
        if cu_seqlens_q is None or cu_seqlens_k is None:
            raise ShapeError("got one of cu_seqlens_q and cu_seqlens_k, expected both")
        index_tensor("cu_seqlens_q", cu_seqlens_q, None, q.device)
        index_tensor("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape[0], q.device)
        batch = cu_seqlens_q.shape[0] - 1
        if batch < 0:
            raise ShapeError("cu_seqlens_q: got shape (0), expected (B + 1) with a leading 0")
    if f.kv_lens is not None:
        index_tensor("kv_lens", f.kv_lens, batch, q.device)
    grad = needs_torch(q, k, v, f.sinks, f.alibi_slopes)
    _check_features(f, batch, hq, wide_sinks=grad and q.dtype == torch.float64)
    for name, scale, tensor in (("q_scale", f.q_scale, q), ("k_scale", f.k_scale, k), ("v_scale", f.v_scale, v)):
        if scale is not None and tensor.dtype not in _FP8:
            raise DtypeError(f"{name}: got one for {tensor.dtype}, expected an fp8 tensor; leave {name} out")
    _check_masks(f.mask, f.block_mask, f.variant, (batch, hq, seq_q, seq_k), ragged)
    if settings().check:
        _check_contents(cu_seqlens_q, cu_seqlens_k, f.kv_lens, seq_q, seq_k)
    window = check_window(f.window)
    if grad:
        check_no_output_with_grad(out=out, lse=lse)
    out_dtype = torch.bfloat16 if q.dtype in _FP8 else q.dtype
    if out is not None:
        out_dtype = out.dtype if q.dtype in _FP8 else out_dtype
        check_output("out", out, (*q.shape[:-1], dv), out_dtype, q.device)
    if lse is not None:
        check_output("lse", lse, (seq_q, hq) if ragged else (batch, hq, seq_q), torch.float32, q.device)
    tensors = _gather(q, k, v, cu_seqlens_q, cu_seqlens_k, f, out, lse)
    given = [s for s in (f.q_scale, f.k_scale, f.v_scale) if s is not None]
    problem = AttentionProblem(
        layout="ragged" if ragged else "dense", batch=batch, seq_q=seq_q, seq_k=seq_k, num_q_heads=hq, num_kv_heads=hkv,
        head_dim=d, head_dim_v=dv, q_dtype=dtype_name(q.dtype), kv_dtype=dtype_name(k.dtype), out_dtype=dtype_name(out_dtype),
        causal=bool(f.causal), window=window, soft_cap=bool(f.soft_cap), alibi=f.alibi_slopes is not None, sinks=f.sinks is not None,
        mask=_mask_kind(f.mask, ragged), block_mask=f.block_mask is not None, kv_lens=f.kv_lens is not None,
        variant=trace_or_name(f.variant, backend, return_lse=tensors.lse is not None, sinks=f.sinks is not None),
        scales="tensor" if any(isinstance(s, torch.Tensor) for s in given) else "number" if given else None,
        return_lse=tensors.lse is not None, requires_grad=grad, deterministic=bool(f.deterministic),
        batch_invariant=bool(f.batch_invariant),
        alignment=alignment_of(q, k, v, tensors.out),
    )
    return problem, tensors._replace(variant_words=bind_words(f.variant, problem.variant, q.device))


def _gather(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None,
    f: Features, out: torch.Tensor | None, lse: torch.Tensor | None,
) -> AttentionTensors:
    """The tensors of a checked call in the forms that kernels take; nothing here waits for a device."""
    ragged = cu_seqlens_q is not None
    hq, hkv = q.shape[-2], k.shape[-2]
    batch = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0]
    if out is None:
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=torch.bfloat16 if q.dtype in _FP8 else q.dtype, device=q.device)
    if lse is None and f.return_lse:
        lse = torch.empty((q.shape[0], hq) if ragged else (batch, hq, q.shape[1]), dtype=torch.float32, device=q.device)
    cu_q, cu_k, kv_lens = (None if t is None else t.to(torch.int32).contiguous() for t in (cu_seqlens_q, cu_seqlens_k, f.kv_lens))
    mask, mask_indptr = f.mask, None
    if mask is not None and ragged:
        assert cu_q is not None and cu_k is not None
        sizes = cu_q.diff().to(torch.int64) * (cu_k.diff() if kv_lens is None else kv_lens)
        mask_indptr = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
        if q.device.type == "cpu" or settings().check:
            check_mask(mask, mask_indptr)
    elif mask is not None:
        from kernelgen.reference.masks import dense_mask  # the oracles are no part of `import kernelgen`

        mask = dense_mask(mask, (batch, hq, q.shape[1], k.shape[1])).expand(batch, hq, q.shape[1], k.shape[1])
    scale = q.shape[-1] ** -0.5 if f.scale is None else number("scale", f.scale)
    logit_factor, v_factor, _ = split_numbers(f.q_scale, f.k_scale, f.v_scale)
    return AttentionTensors(
        q, k, v, out, lse, scale * logit_factor, cu_q, cu_k, float(f.soft_cap) if f.soft_cap else None, f.alibi_slopes, f.sinks, mask,
        kv_lens, head_scale("q_scale", f.q_scale, batch, hq, q.device), head_scale("k_scale", f.k_scale, batch, hkv, q.device),
        head_scale("v_scale", f.v_scale, batch, hkv, q.device), f.block_mask, f.variant, mask_indptr, None, v_factor,
    )


def _check_features(f: Features, batch: int, num_heads: int, wide_sinks: bool) -> None:
    """What no later step would name: numbers, slopes, sinks. ``wide_sinks``: float64 ones are right too (gradcheck needs them)."""
    if f.scale is not None:
        number("scale", f.scale)
    check_soft_cap(f.soft_cap)
    for name in ("q_scale", "k_scale", "v_scale"):
        value = getattr(f, name)
        if value is not None and not isinstance(value, torch.Tensor):
            number(name, value)
    if f.alibi_slopes is not None:
        from kernelgen.reference.masks import check_alibi

        check_alibi(f.alibi_slopes, batch, num_heads)
    if f.sinks is not None:
        check_sinks(f.sinks, num_heads, wide=wide_sinks)


def check_soft_cap(value: Any) -> None:
    soft_cap = 0.0 if value is None else number("soft_cap", value)
    if not 0 <= soft_cap < math.inf:
        raise SettingsError(f"soft_cap: got {soft_cap}, expected a finite number above 0, or None or 0 for no cap")


def check_sinks(sinks: torch.Tensor, num_heads: int, *, wide: bool = False) -> None:
    if sinks.dtype != torch.float32 and not (wide and sinks.dtype == torch.float64):
        raise DtypeError(f"sinks: got {sinks.dtype}, expected float32; convert with .float()")
    if tuple(sinks.shape) != (num_heads,):
        raise ShapeError(f"sinks: got shape {shape_text(sinks)}, expected (Hq) = ({num_heads},)")


def _check_dtypes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for t in (q, k, v):
        dtype_name(t.dtype)
    if k.dtype in _FP8 or q.dtype in _FP8:
        check_same_dtype(k=k, v=v)
    else:
        check_same_dtype(q=q, k=k, v=v)


def check_sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ragged: bool) -> tuple[int, int, int, int, int, int, int]:
    batch, (seq_q, hq, d), (seq_k, hkv) = (0 if ragged else q.shape[0]), q.shape[-3:], k.shape[-3:-1]
    dv = v.shape[-1]
    check_dim("k", k, -1, d, "the head dim of q")
    check_dim("v", v, -2, hkv, "the head count of k")
    check_dim("v", v, -3, seq_k, "the length of k")
    if not ragged:
        check_dim("k", k, 0, batch, "the batch of q")
        check_dim("v", v, 0, batch, "the batch of q")
    if hkv == 0 or hq % hkv:
        raise ShapeError(f"got {hq} query heads in q {shape_text(q)} and {hkv} heads in k {shape_text(k)}, expected a multiple")
    if (d, dv) not in _head_dims:
        for name, size in (("q and k", d), ("v", dv)):
            if size % 8 or not 8 <= size <= 512:
                advice = (f"; pad the last dimension with zeros to {max(8, -(-size // 8) * 8)} and pass scale={d}**-0.5" if 0 < size < 512
                          else "")
                raise ShapeError(f"got head dim {size} of {name}, expected a multiple of 8 from 8 to 512 (or 576/512){advice}")
    return batch, seq_q, seq_k, hq, hkv, d, dv


def check_window(window: Any) -> Window:
    """(left, right), None = unbounded. Raises SettingsError for anything else."""
    if window is None:
        return (None, None)
    if not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise SettingsError(f"window: got {window!r}, expected (left, right) with None for an unbounded side")
    left, right = (None if side is None else whole(side) for side in window)
    for side, keys in zip(window, (left, right)):
        if side is not None and (keys is None or keys < 0):
            raise SettingsError(f"window: got {window!r}, expected whole numbers of keys >= 0, or None for an unbounded side")
    return (left, right)


def _check_masks(mask: Any, block_mask: Any, variant: Any, shape: tuple[int, int, int, int], ragged: bool) -> None:
    if mask is not None and ragged:
        check_rank("mask", mask, 1, "(flat bool, or packed bits in uint8, of sum(Sq_b * Sk_b))")
        check_last_contiguous(mask=mask)
    if mask is not None and not ragged and mask.dtype == torch.bool:
        from kernelgen.reference.masks import dense_mask

        dense_mask(mask, shape)
    needed = {"block_mask": ("kv_counts", "kv_indices", "block_size"), "variant": ("score", "mask")}
    for name, value in (("block_mask", block_mask), ("variant", variant)):
        if value is not None and not all(hasattr(value, field) for field in needed[name]):
            raise DtypeError(f"{name}: got {type(value).__name__}, expected an object with {', '.join(needed[name])}")


def _check_contents(cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, kv_lens: torch.Tensor | None, seq_q: int, seq_k: int) -> None:
    """Index values, under KERNELGEN_CHECK=1: it waits for the device. Raises ShapeError."""
    capacity: Any = seq_k
    for name, starts, total in (("cu_seqlens_q", cu_q, seq_q), ("cu_seqlens_k", cu_k, seq_k)):
        if starts is not None:
            check_starts(name, on_host(starts), total, f"the rows of {name[-1]}")
            capacity = starts.diff().cpu()
    if kv_lens is not None:
        lens = kv_lens.cpu()
        bad = ((lens < 0) | (lens > capacity)).nonzero().flatten().tolist()
        if bad:
            raise ShapeError(f"kv_lens: got {int(lens[bad[0]])} for request {bad[0]}, expected 0 to the keys that it has")


def _mask_kind(mask: torch.Tensor | None, ragged: bool) -> str | None:
    if mask is None:
        return None
    if mask.dtype not in (torch.bool, torch.uint8) or (mask.dtype == torch.uint8 and not ragged):
        raise DtypeError(f"mask: got {mask.dtype}, expected bool" + (" or packed bits in uint8" if ragged else ""))
    return "dense" if not ragged else "packed" if mask.dtype == torch.uint8 else "flat"


def _finish(
    tensors: AttentionTensors, result: Any, return_lse: bool, given: torch.Tensor | None, given_lse: torch.Tensor | None,
) -> Any:
    """What the caller gets. ``given``: what it gave to write to."""
    if not (given is None and given_lse is None):
        wrote(given, given_lse)
    out, lse = (tensors.out, tensors.lse) if result is None else result
    return (out, lse) if return_lse else out


