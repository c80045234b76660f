"""Mixture of experts: sorting tokens by expert, moving rows there and back, and the whole layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.reference.activation import ACTIVATIONS, apply_activation, is_gated
from kernelgen.reference.checks import (
    as_index_list,
    check_compute_dtype,
    check_float,
    check_option,
    check_rank,
    check_same_device,
    check_shape,
    to_compute,
)
from kernelgen.reference.gemm import Weight, as_weight
from kernelgen.reference.quant import Scale, expand_scale_a, quantize_fp8
from kernelgen.reference.route import check_ids

ExpertMap = torch.Tensor | Sequence[int] | range | tuple[int, int]


@dataclass(frozen=True)
class MoESort:
    """Rows of the k copies of T tokens, grouped by expert.

    offsets       (E) int32 end offsets per expert, as :func:`~kernelgen.reference.gemm.grouped_gemm` takes them
    token_of_row  (T * k) int32 token of each row; -1 for rows past the last offset
    row_of_slot   (T, k) int32 row of each (token, slot); -1 where the slot is skipped
    """

    offsets: torch.Tensor
    token_of_row: torch.Tensor
    row_of_slot: torch.Tensor


def local_ids(ids: torch.Tensor, num_experts: int, expert_map: ExpertMap | None) -> torch.Tensor:
    """Local expert of each slot, -1 where it is skipped.

    Without a map ids are local. ``expert_map (E_global)`` int32 gives the local number of each global id; a pair
    (first, last + 1) or a ``range`` names the local ids first .. last in order. An id outside the map, or a local
    number outside 0 .. num_experts - 1, is skipped.
    """
    value = ids.long()
    if isinstance(expert_map, tuple):
        expert_map = range(*expert_map)
    if isinstance(expert_map, range):
        if len(expert_map) != num_experts or expert_map.step != 1:
            raise ShapeError(f"expert_map: got {expert_map}, expected a range of {num_experts} experts")
        value = value - expert_map.start
    elif expert_map is not None:
        table = torch.tensor([*as_index_list("expert_map", expert_map), -1], device=ids.device)
        known = (value >= 0) & (value < len(table) - 1)
        value = table[torch.where(known, value, len(table) - 1)]
    return torch.where((value >= 0) & (value < num_experts), value, -1)


def moe_sort(ids: torch.Tensor, num_experts: int, *, expert_map: ExpertMap | None = None) -> MoESort:
    """Group the slots of ``ids (T, k)`` by local expert, in the order of (token, slot) within one.

    ``num_experts`` counts the local experts; ``expert_map`` and skipped ids: see :func:`local_ids`. A repeated id has
    a row for each time.
    """
    check_ids(ids)
    flat = local_ids(ids, num_experts, expert_map).flatten()
    taken = flat >= 0
    order = torch.sort(torch.where(taken, flat, num_experts), stable=True).indices
    used = int(taken.sum())
    counts = torch.bincount(flat[taken], minlength=num_experts)[:num_experts]
    token_of_row = torch.full_like(flat, -1)
    token_of_row[:used] = order[:used] // max(ids.shape[1], 1)
    row_of_slot = torch.full_like(flat, -1)
    row_of_slot[order[:used]] = torch.arange(used, device=ids.device)
    return MoESort(counts.cumsum(0).to(torch.int32), token_of_row.to(torch.int32),
                   row_of_slot.reshape(ids.shape).to(torch.int32))


def moe_permute(x: torch.Tensor, sort: MoESort, *, compute_dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """``x (T, H)`` to rows ``(T * k, H)`` in the sort's order; rows past its last offset are unwritten, here NaN."""
    check_compute_dtype(compute_dtype)
    check_shape("x", x, (sort.row_of_slot.shape[0], x.shape[-1]), "(T, H)")
    used = sort.token_of_row >= 0
    rows = x.new_full((used.shape[0], x.shape[1]), float("nan"), dtype=compute_dtype)
    rows[used] = to_compute(x, compute_dtype)[sort.token_of_row[used].long()]
    return rows


def moe_unpermute(rows: torch.Tensor, sort: MoESort, weights: torch.Tensor, *,
                  compute_dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """``out[t] = sum over slots s of weights[t, s] * rows[row_of_slot[t, s]]``, added in the order of the slots.

    ``rows (T * k, H)``, ``weights (T, k)`` to ``(T, H)``. A skipped slot adds nothing, whatever its weight.
    """
    check_compute_dtype(compute_dtype)
    check_shape("weights", weights, sort.row_of_slot.shape, "(T, k)")
    check_shape("rows", rows, (sort.token_of_row.shape[0], rows.shape[-1]), "(T * k, H)")
    value, factor = to_compute(rows, compute_dtype), to_compute(weights, compute_dtype)
    out = value.new_zeros(weights.shape[0], rows.shape[1])
    for s in range(weights.shape[1]):
        row = sort.row_of_slot[:, s].long()
        live = row >= 0
        part = value.new_zeros(out.shape)
        part[live] = value[row[live]] * factor[live, s, None]
        out = out + part
    return out


def moe(x: torch.Tensor, w13: Weight, w2: Weight, weights: torch.Tensor, ids: torch.Tensor, *,
        activation: str = "swiglu", alpha: float | None = None, limit: float | None = None,
        gate_up: str = "gate_first", bias13: torch.Tensor | None = None, bias2: torch.Tensor | None = None,
        scale13: Scale | None = None, scale2: Scale | None = None,
        shared: tuple[torch.Tensor, torch.Tensor] | None = None, expert_map: ExpertMap | None = None,
        weights_on_input: bool = False, scale_x: Scale | None = None, act_recipe: str | None = None,
        mid_dtype: torch.dtype | None = None, compute_dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """``out[t] = sum over s of weights[t, s] * (act(x[t] w13[e]^T + bias13[e]) w2[e]^T + bias2[e])``, e = ids[t, s].

    ``x (T, H)``, ``w13 (E, 2 I, H)`` (``(E, I, H)`` for an ungated activation), ``w2 (E, H, I)``, ``weights (T, k)``,
    ``ids (T, k)`` to ``(T, H)``. ``gate_up`` says how the 2 I rows of w13 and of ``bias13 (E, 2 I)`` are ordered;
    ``bias2 (E, H)``. Activations, ``alpha`` and ``limit``: :func:`~kernelgen.reference.activation.apply_activation`.

    ids           outside 0 .. E - 1 (or outside ``expert_map``, see :func:`local_ids`): skipped; repeated: adds again
    weights_on_input   the weight multiplies x instead of the expert's output (Llama 4)
    shared        (w13 (2 Is, H), w2 (H, Is)): one more expert of the same activation, with weight 1 for every token
    scale13, scale2    of fp8 weights: scalar, (E), per channel (E, N, 1) or (E, N), blocks (E, ceil(N/128),
                  ceil(K/128)); w13 and w2 may also be packed int4 or mxfp4 weights of the same shapes
    scale_x       of an fp8 x: scalar, (T, 1) or (T, ceil(H/128))
    act_recipe    "row" or "block_1x128": rounds x and the activation's result to e4m3 and back, for kernels that run
                  fp8 weights on fp8 activations; mid_dtype rounds the activation's result. None: exact

    The k contributions are added in slot order, the shared expert last. Raises ShapeError, DtypeError, DeviceError,
    SettingsError.
    """
    check_compute_dtype(compute_dtype)
    check_option("activation", activation, ACTIVATIONS)
    check_option("act_recipe", act_recipe, (None, "row", "block_1x128"))
    check_rank("x", x, (2,), "(T, H)")
    check_ids(ids)
    check_float(x=x, weights=weights, bias13=bias13, bias2=bias2)
    up, down = as_weight("w13", w13, scale13, compute_dtype), as_weight("w2", w2, scale2, compute_dtype)
    check_same_device(x=x, w13=up, w2=down, weights=weights, ids=ids, bias13=bias13, bias2=bias2)
    if isinstance(w13, torch.Tensor) and scale13 is None and x.dtype != w13.dtype:
        raise DtypeError(f"got x {x.dtype} and w13 {w13.dtype}, expected one dtype, or quantised weights with scales")
    _check_moe_shapes(x, up, down, weights, ids, activation, bias13, bias2)

    full_x = None if scale_x is None else expand_scale_a("scale_x", scale_x, x.shape, x.device, compute_dtype)
    value = to_compute(x, compute_dtype) if full_x is None else to_compute(x, compute_dtype) * full_x
    factor = to_compute(weights, compute_dtype)
    experts = local_ids(ids, up.shape[0], expert_map)

    def expert(rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor, e: int | None) -> torch.Tensor:
        hidden = _fp8_round(rows, act_recipe) @ first.t()
        if bias13 is not None and e is not None:
            hidden = hidden + to_compute(bias13[e], compute_dtype)
        hidden = apply_activation(hidden, activation, gate_up=gate_up, alpha=alpha, limit=limit)
        if mid_dtype is not None:
            hidden = hidden.to(mid_dtype).to(compute_dtype)
        out = _fp8_round(hidden, act_recipe) @ second.t()
        return out + to_compute(bias2[e], compute_dtype) if bias2 is not None and e is not None else out

    contributions = value.new_zeros(*ids.shape, down.shape[1])
    for e in range(up.shape[0]):
        token, slot = torch.nonzero(experts == e, as_tuple=True)
        if token.numel() == 0:
            continue
        weight = factor[token, slot, None]
        if weights_on_input:
            contributions[token, slot] = expert(value[token] * weight, up[e], down[e], e)
        else:
            contributions[token, slot] = expert(value[token], up[e], down[e], e) * weight
    out = value.new_zeros(x.shape[0], down.shape[1])
    for s in range(ids.shape[1]):
        out = out + contributions[:, s]
    if shared is not None:
        first, second = (to_compute(w, compute_dtype) for w in shared)
        check_rank("shared w13", first, (2,), "(2 Is, H)")
        check_shape("shared w2", second, (x.shape[1], first.shape[0] // (2 if is_gated(activation) else 1)), "(H, Is)")
        out = out + expert(value, first, second, None)
    return out


def _fp8_round(x: torch.Tensor, recipe: str | None) -> torch.Tensor:
    if recipe is None:
        return x
    codes, scale = quantize_fp8(x, recipe, compute_dtype=x.dtype)
    return to_compute(codes, x.dtype) * expand_scale_a("scale", scale, x.shape, x.device, x.dtype)


def _check_moe_shapes(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
                      activation: str, bias13: torch.Tensor | None, bias2: torch.Tensor | None) -> None:
    tokens, hidden = x.shape
    experts, wide = up.shape[:2]
    halves = 2 if is_gated(activation) else 1
    if wide % halves:
        raise SettingsError(f"w13: got {wide} rows, expected an even number for the gated activation {activation!r}")
    check_shape("w13", up, (experts, wide, hidden), "(E, 2 I, H)")
    check_shape("w2", down, (experts, hidden, wide // halves), "(E, H, I)")
    check_shape("ids", ids, (tokens, ids.shape[1]), "(T, k)")
    check_shape("weights", weights, ids.shape, "(T, k)")
    if bias13 is not None:
        check_shape("bias13", bias13, (experts, wide), "(E, 2 I)")
    if bias2 is not None:
        check_shape("bias2", bias2, (experts, hidden), "(E, H)")
