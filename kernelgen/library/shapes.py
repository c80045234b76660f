"""What comes out of every operator: fresh tensors of its shapes, dtypes and strides, from the arguments of the public call.

Sizes may be symbols: nothing here may ask whether one is equal to a number, or a graph would be compiled anew for another. Each
function takes the public arguments by name and returns the results in their order.
"""

from __future__ import annotations

from typing import Any

import torch

from kernelgen.errors import SettingsError

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
Made = tuple[torch.Tensor, ...]
_GATED = ("swiglu", "geglu")
_BLOCK = 128


def _attended(q: torch.Tensor, width: Any, lse_shape: tuple[Any, ...], return_lse: bool, lse: Any) -> Made:
    out = q.new_empty((*q.shape[:-1], width), dtype=torch.bfloat16 if q.dtype in FP8 else q.dtype)
    return (out, q.new_empty(lse_shape, dtype=torch.float32)) if return_lse or lse is not None else (out,)


def attention(q: torch.Tensor, v: torch.Tensor, return_lse: bool, lse: Any, **rest: Any) -> Made:
    return _attended(q, v.shape[-1], (q.shape[0], q.shape[2], q.shape[1]), return_lse, lse)


def attention_varlen(q: torch.Tensor, v: torch.Tensor, return_lse: bool, lse: Any, **rest: Any) -> Made:
    return _attended(q, v.shape[-1], (q.shape[0], q.shape[1]), return_lse, lse)


def over_cache(q: torch.Tensor, kv_cache: Any, return_lse: bool, lse: Any, **rest: Any) -> Made:
    values = kv_cache if isinstance(kv_cache, torch.Tensor) else kv_cache[1]
    return _attended(q, values.shape[-1], (q.shape[0], q.shape[1]), return_lse, lse)


def latent(q_nope: torch.Tensor, return_lse: bool, lse: Any, **rest: Any) -> Made:
    return _attended(q_nope, q_nope.shape[-1], (q_nope.shape[0], q_nope.shape[1]), return_lse, lse)


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool, **rest: Any) -> Made:
    """(.., L, Hq, Ev): heads behind tokens, as attention writes them."""
    leads = [t.shape[:-3] for t in (query, key, value) if t.dim() >= 3]
    if not leads:
        return (query.new_empty((query.shape[0], value.shape[1])),)
    lead = torch.broadcast_shapes(*leads)
    heads = query.shape[-3] if query.dim() > 2 else 1
    if not enable_gqa:
        (heads,) = torch.broadcast_shapes(*((t.shape[-3],) for t in (query, key, value) if t.dim() > 2))
    return (query.new_empty((*lead, query.shape[-2], heads, value.shape[-1])),)


def _columns(b: Any) -> Any:
    return b.shape[-1] if isinstance(b, torch.Tensor) else b.shape[-2]


def _product(a: torch.Tensor, shape: tuple[Any, ...], out_dtype: torch.dtype | None, out_scale: str | None) -> Made:
    if out_scale is None:
        return (a.new_empty(shape, dtype=out_dtype or (torch.bfloat16 if a.dtype in FP8 else a.dtype)),)
    return _quantized(a, shape, out_scale, out_dtype or torch.float8_e4m3fn)


def _quantized(a: torch.Tensor, shape: tuple[Any, ...], recipe: str, dtype: torch.dtype) -> Made:
    rows, blocks = shape[-2], (shape[-1] + _BLOCK - 1) // _BLOCK
    last = {"row": (rows, 1), "block_1x128": (rows, blocks), "block_128x128": ((rows + _BLOCK - 1) // _BLOCK, blocks)}
    if recipe != "tensor" and recipe not in last:
        raise SettingsError(f"got recipe {recipe!r}, expected one of tensor, {', '.join(last)}")
    scale = () if recipe == "tensor" else (*shape[:-2], *last[recipe])
    return a.new_empty(shape, dtype=dtype), a.new_empty(scale, dtype=torch.float32)


def _outputs(activation: str | None, columns: Any) -> Any:
    return columns // 2 if activation in _GATED else columns


def gemm(a: torch.Tensor, b: Any, activation: str | None, out_dtype: Any, out_scale: str | None, epilogue: Any = None, **rest: Any) -> Made:
    gated = "swiglu" if epilogue is not None and epilogue.gated else activation
    made = _product(a, (*a.shape[:-1], _outputs(gated, _columns(b))), out_dtype, out_scale)
    totals = 0 if epilogue is None else len(epilogue.names_of_totals())
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    return (*made, a.new_empty((totals, *a.shape[:-1]), dtype=dtype)) if totals else made


def grouped_gemm(
    a: torch.Tensor, b: Any, activation: str | None, out_dtype: Any, out_scale: str | None, offsets: Any = None, **rest: Any,
) -> Made:
    columns = _outputs(activation, _columns(b))
    if len(b.shape) == 2:  # groups along K: one product for each
        groups = offsets.shape[0] if isinstance(offsets, torch.Tensor) else len(offsets)
        return _product(a, (groups, a.shape[0], columns), out_dtype, out_scale)
    return _product(a, (*a.shape[:-1], columns), out_dtype, out_scale)


def quantize_fp8(x: torch.Tensor, recipe: str, dtype: torch.dtype, activation: str | None, **rest: Any) -> Made:
    return _quantized(x, (*x.shape[:-1], _outputs(activation, x.shape[-1])), recipe, dtype or torch.float8_e4m3fn)


def merge_states(outs: torch.Tensor, lses: torch.Tensor, **rest: Any) -> Made:
    return outs.new_empty(outs.shape[1:]), outs.new_empty(lses.shape[1:], dtype=torch.float32)


def rope(q: torch.Tensor, k: torch.Tensor, **rest: Any) -> Made:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def like_q(q: torch.Tensor, **rest: Any) -> Made:
    return (q.new_empty(q.shape),)


def like_x(x: torch.Tensor, **rest: Any) -> Made:
    return (x.new_empty(x.shape),)


def silu_and_mul(x: torch.Tensor, **rest: Any) -> Made:
    return (x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),)


def route(logits: torch.Tensor, k: int, **rest: Any) -> Made:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def moe_sort(ids: torch.Tensor, num_experts: int, **rest: Any) -> Made:
    """One piece of memory: offsets, token_of_row, row_of_slot."""
    return (ids.new_empty((num_experts + 2 * ids.shape[0] * ids.shape[1],), dtype=torch.int32),)


def moe_permute(x: torch.Tensor, sort: Any, **rest: Any) -> Made:
    slots = sort.row_of_slot
    return (x.new_empty((slots.shape[0] * slots.shape[1], x.shape[1])),)


def moe_unpermute(rows: torch.Tensor, sort: Any, **rest: Any) -> Made:
    return (rows.new_empty((sort.row_of_slot.shape[0], rows.shape[1])),)


def nothing(**rest: Any) -> Made:
    return ()
