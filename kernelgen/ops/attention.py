"""attention and attention_varlen: dense and ragged, through the dispatcher."""

from __future__ import annotations

import math
from typing import Any

import torch

from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import choose, prepare
from kernelgen.dtypes import dtype_name
from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.guard import ORDINARY, check_backend, check_flags, check_required, needs_torch, watched
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
from kernelgen.ops.page_table import check_starts
from kernelgen.problems.attention import AttentionProblem
from kernelgen.problems.common import alignment_of
from kernelgen.settings import settings
from kernelgen.targets import Target, target_of
from kernelgen.tensors import AttentionTensors

Window = tuple[int | None, int | None]
Scale = torch.Tensor | float
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_calls = new_memo()
_head_dims = {(576, 512)}  # beyond multiples of 8 up to 512: MLA with one latent head


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
    nothing gives 0 and LSE -inf. ``out`` and ``lse`` must not overlap anything else. KERNELGEN_CHECK=1 looks at index values.

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
            key = (key, layout_of(out), layout_of(lse))
        call = _calls.get(key)
        if call is not None:
            return call(q, k, v, out, lse)
    problem, tensors = _describe(
        q, k, v, None, None, causal, window, scale, soft_cap, alibi_slopes, sinks, mask, block_mask, variant, kv_lens, q_scale,
        k_scale, v_scale, return_lse, out, lse, deterministic, batch_invariant,
    )
    _, run = prepare(problem, target_of(q.device), backend, tensors)
    if plain:
        remember(_calls, key, _prepared(tensors, run, return_lse))
    return _finish(tensors, run(tensors), return_lse)


def _prepared(sample: AttentionTensors, run: Any, return_lse: bool) -> Any:
    """The repeated dense call: allocate what was not given, run."""
    scale, soft_cap = sample.scale, sample.soft_cap
    out_shape, out_dtype, same = sample.out.shape, sample.out.dtype, sample.out.dtype == sample.q.dtype
    lse_shape = sample.lse.shape if sample.lse is not None else None

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None) -> Any:
        if out is None:
            out = q.new_empty(out_shape) if same else q.new_empty(out_shape, dtype=out_dtype)
        if lse is None and lse_shape is not None:
            lse = q.new_empty(lse_shape, dtype=torch.float32)
        result = run(AttentionTensors(q, k, v, out, lse, scale, soft_cap=soft_cap))
        if result is not None:
            return result if return_lse else result[0]
        return (out, lse) if return_lse else out

    return call


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
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if starts is None:
            raise ShapeError(f"{name}: got None, expected int32 starts (B + 1) of the requests: both are needed")
    problem, tensors = _describe(
        q, k, v, cu_seqlens_q, cu_seqlens_k, causal, window, scale, soft_cap, alibi_slopes, sinks, mask, block_mask, variant,
        kv_lens, q_scale, k_scale, v_scale, return_lse, out, lse, deterministic, batch_invariant,
    )
    _, run = prepare(problem, target_of(q.device), backend, tensors)
    return _finish(tensors, run(tensors), return_lse)


def explain_attention(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for a call of attention or attention_varlen with these arguments, without running it."""
    ragged = len(args) == 5 or "cu_seqlens_q" in kwargs
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k") if ragged else ("q", "k", "v")
    values = dict(zip(names, args)) | kwargs
    values.pop("max_seqlen_q", None), values.pop("max_seqlen_k", None)
    defaults = dict(
        cu_seqlens_q=None, cu_seqlens_k=None, causal=False, window=None, scale=None, soft_cap=None, alibi_slopes=None,
        sinks=None, mask=None, block_mask=None, variant=None, kv_lens=None, q_scale=None, k_scale=None, v_scale=None,
        return_lse=False, out=None, lse=None, deterministic=True, batch_invariant=False,
    )
    problem, _ = _describe(**(defaults | values))
    return choose(problem, target, backend, live=live)


def _describe(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None,
    causal: bool, window: Window | None, scale: float | None, soft_cap: float | None, alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None, mask: torch.Tensor | None, block_mask: Any, variant: Any, kv_lens: torch.Tensor | None,
    q_scale: Scale | None, k_scale: Scale | None, v_scale: Scale | None, return_lse: bool, out: torch.Tensor | None,
    lse: torch.Tensor | None, deterministic: bool, batch_invariant: bool,
) -> tuple[AttentionProblem, AttentionTensors]:
    """Check everything, allocate outputs, and describe the call."""
    check_required(q=q, k=k, v=v)
    check_flags(causal=causal, return_lse=return_lse, deterministic=deterministic, batch_invariant=batch_invariant)
    check_tensors(q=q, k=k, v=v, out=out, lse=lse, alibi_slopes=alibi_slopes, sinks=sinks, mask=mask)
    ragged = cu_seqlens_q is not None or cu_seqlens_k is not None
    rank, form = (3, "(T, H, D)") if ragged else (4, "(B, S, H, D)")
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_rank(name, t, rank, form)
    check_last_contiguous(q=q, k=k, v=v)
    _check_dtypes(q, k, v)
    batch, seq_q, seq_k, hq, hkv, d, dv = _check_sizes(q, k, v, ragged)
    if ragged:
        if cu_seqlens_q is None or cu_seqlens_k is None:
            raise ShapeError("got one of cu_seqlens_q and cu_seqlens_k, expected both")
        cu_seqlens_q = index_tensor("cu_seqlens_q", cu_seqlens_q, None, q.device)
        cu_seqlens_k = index_tensor("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape[0], q.device)
        batch = cu_seqlens_q.shape[0] - 1
        if batch < 0:
            raise ShapeError("cu_seqlens_q: got shape (0), expected (B + 1) with a leading 0")
    if kv_lens is not None:
        kv_lens = index_tensor("kv_lens", kv_lens, batch, q.device)
    window = check_window(window)
    scale = None if scale is None else number("scale", scale)
    soft_cap = None if soft_cap is None else number("soft_cap", soft_cap)
    if soft_cap is not None and not 0 <= soft_cap < math.inf:
        raise SettingsError(f"soft_cap: got {soft_cap}, expected a finite number above 0, or None or 0 for no cap")
    scales = [s for s in (q_scale, k_scale, v_scale) if s is not None]
    out_dtype = torch.bfloat16 if q.dtype in _FP8 else q.dtype
    out_shape = (*q.shape[:-1], dv)
    lse_shape = (seq_q, hq) if ragged else (batch, hq, seq_q)
    grad = needs_torch(q, k, v, sinks, alibi_slopes)
    _check_masks(mask, block_mask, variant, (batch, hq, seq_q, seq_k), ragged)
    for name, value in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        if value is not None and not isinstance(value, torch.Tensor):
            number(name, value)
    if settings().check:
        _check_contents(cu_seqlens_q, cu_seqlens_k, kv_lens, seq_q, seq_k)
    if grad:
        check_no_output_with_grad(out=out, lse=lse)
    if out is None:
        out = torch.empty(out_shape, dtype=out_dtype, device=q.device)
    else:
        out_dtype = out.dtype if q.dtype in _FP8 else out_dtype
        check_output("out", out, out_shape, out_dtype, q.device)
    if lse is not None:
        check_output("lse", lse, lse_shape, torch.float32, q.device)
    elif return_lse:
        lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    problem = AttentionProblem(
        layout="ragged" if ragged else "dense", batch=batch, seq_q=seq_q, seq_k=seq_k, num_q_heads=hq, num_kv_heads=hkv,
        head_dim=d, head_dim_v=dv, q_dtype=dtype_name(q.dtype), kv_dtype=dtype_name(k.dtype), out_dtype=dtype_name(out_dtype),
        causal=bool(causal), window=window, soft_cap=bool(soft_cap), alibi=alibi_slopes is not None, sinks=sinks is not None,
        mask=_mask_kind(mask, ragged), variant=None if variant is None else str(getattr(variant, "name", "custom")),
        block_mask=block_mask is not None, kv_lens=kv_lens is not None, scales="tensor" if scales else None,
        return_lse=lse is not None, requires_grad=grad, deterministic=deterministic, batch_invariant=batch_invariant,
        alignment=alignment_of(q, k, v, out),
    )
    tensors = AttentionTensors(
        q, k, v, out, lse, d**-0.5 if scale is None else float(scale), cu_seqlens_q, cu_seqlens_k,
        float(soft_cap) if soft_cap else None, alibi_slopes, sinks, mask, kv_lens, q_scale, k_scale, v_scale, block_mask, variant,
    )
    return problem, tensors


def _check_dtypes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for t in (q, k, v):
        dtype_name(t.dtype)
    if k.dtype in _FP8 or q.dtype in _FP8:
        check_same_dtype(k=k, v=v)
    else:
        check_same_dtype(q=q, k=k, v=v)


def _check_sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ragged: bool) -> tuple[int, int, int, int, int, int, int]:
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
                raise ShapeError(
                    f"got head dim {size} of {name}, expected a multiple of 8 from 8 to 512 (or 576/512); pad the last "
                    f"dimension with zeros to {max(8, -(-size // 8) * 8)} and pass scale={d}**-0.5"
                )
    return batch, seq_q, seq_k, hq, hkv, d, dv


def check_window(window: Any) -> Window:
    """(left, right), None = unbounded. Raises SettingsError for anything else."""
    if window is None:
        return (None, None)
    if not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise SettingsError(f"window: got {window!r}, expected (left, right) with None for an unbounded side")
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0):
            raise SettingsError(f"window: got {window!r}, expected whole numbers of keys >= 0, or None for an unbounded side")
    return (window[0], window[1])


def _check_masks(mask: Any, block_mask: Any, variant: Any, shape: tuple[int, int, int, int], ragged: bool) -> None:
    if mask is not None and not ragged and mask.dtype == torch.bool:
        from kernelgen.reference.masks import dense_mask  # the oracles are no part of `import kernelgen`

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
            check_starts(name, starts.cpu(), total, f"the rows of {name[-1]}")
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


def _finish(tensors: AttentionTensors, result: Any, return_lse: bool) -> Any:
    out, lse = (tensors.out, tensors.lse) if result is None else result
    return (out, lse) if return_lse else out


