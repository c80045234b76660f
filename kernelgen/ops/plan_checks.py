"""Checks of what plan_attention and plan_mla, and the runs of their plans, are given. Every one raises a named error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.guard import whole
from kernelgen.ops.checks import check_last_contiguous, check_rank, shape_text
from kernelgen.ops.planning import GraphBounds, mask_size_error
from kernelgen.reference.checks import check_option

if TYPE_CHECKING:
    from kernelgen.ops.paged import State


def check_sizes(num_q_heads: Any, num_kv_heads: Any, head_dim: Any, head_dim_v: Any) -> tuple[int, int, int, int]:
    """Head counts and head dims of a plan, as Python ints."""
    given = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "head_dim_v": head_dim_v}
    sizes: dict[str, int] = {}
    for name, value in given.items():
        size = whole(value)
        if size is None:
            raise ShapeError(f"{name}: got {value!r}, expected a whole number")
        sizes[name] = size
    num_q_heads, num_kv_heads, *dims = sizes.values()
    for name, size in zip(("head_dim", "head_dim_v"), dims):
        if size % 8 or not 8 <= size <= 512:
            raise ShapeError(f"{name}: got {size}, expected a multiple of 8 from 8 to 512 (for MLA caches of 576: plan_mla)")
    if num_kv_heads < 1 or num_q_heads < 0 or num_q_heads % num_kv_heads:
        raise ShapeError(f"got num_q_heads={num_q_heads} and num_kv_heads={num_kv_heads}, expected a multiple")
    return num_q_heads, num_kv_heads, dims[0], dims[1]


def check_bounds(bounds: Any) -> None:
    if bounds is not None and not isinstance(bounds, GraphBounds):
        raise SettingsError(f"cuda_graph_bounds: got {bounds!r}, expected GraphBounds(max_q_tokens, max_seq_k)")


def check_kinds(mask: Any, kv_scales: Any) -> None:
    """The forms of what a run is given."""
    check_option("mask", mask, (None, "dense", "packed"))
    check_option("kv_scales", kv_scales, (None, "tensor", "head", "request_head", "page"))


def check_rows(name: str, q: torch.Tensor, state: State) -> None:
    """The rows of q against the planned query lengths."""
    rows = q.shape[0] if state.rows is None else state.rows
    if q.shape[0] != rows:
        raise ShapeError(f"{name}: got {q.shape[0]} rows in {shape_text(q)}, expected {rows} as planned, the sum of the query lengths")
    if q.shape[0] < state.least_rows:
        raise ShapeError(f"{name}: got {q.shape[0]} rows in {shape_text(q)}, expected at least {state.least_rows}, the sum of the query "
                         "lengths of the last update")


def check_mask_form(mask: torch.Tensor, form: str | None, state: State) -> None:
    dtype, words = (torch.uint8, "packed bits in uint8") if form == "packed" else (torch.bool, "flat bool")
    if mask.dtype != dtype:
        raise DtypeError(f"mask: got {mask.dtype}, expected {words} as planned (mask={form!r})")
    check_rank("mask", mask, 1, f"({words} of sum(Sq_b * Sk_b))")
    check_last_contiguous(mask=mask)
    if state.mask_entries is not None and not state.mask_fits(mask):
        raise mask_size_error(mask, state.mask_entries)


def check_alibi(slopes: torch.Tensor, batch: int, heads: int) -> None:
    if slopes.dtype != torch.float32:
        raise DtypeError(f"alibi_slopes: got {slopes.dtype}, expected float32")
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ShapeError(f"alibi_slopes: got shape {shape_text(slopes)}, expected (Hq) = ({heads},) or (B, Hq) = ({batch}, {heads})")
