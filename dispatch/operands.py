"""Tensors for a problem, as a call of it would have them: what candidates are measured on. Random values, legal indices.

Contents that decide how long a call takes (lengths, offsets, counts, pages) may be given as they were in a real call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernelgen.dtypes import DTYPES
from kernelgen.moe_tensors import MoeTensors
from kernelgen.reference.moe import local_ids
from kernelgen.tensors import AttentionTensors, GemmTensors, GroupedGemmTensors, RmsNormTensors, SiluAndMulTensors
from kernelgen.verdicts import Verdict, first_no, yes

Indices = Mapping[str, list[int]]  # field of the tensors -> its values: plain, since a tensor is pickled as a file descriptor
_BLOCK = 128
_EXTENTS = ("batch", "m", "n", "k", "seq_q", "seq_k", "num_q_heads", "rows", "width")


def can_make(problem: Any) -> Verdict:
    """Can tensors be made from the problem alone (and the indices that a call had)?"""
    p = problem
    if p.op not in _MAKE:
        return Verdict(False, f"tensors of {p.op} are not made from a problem: its candidates cannot be measured")
    if any(getattr(p, extent, None) == 0 for extent in _EXTENTS):
        return Verdict(False, "an extent of 0 leaves nothing to measure")
    if getattr(p, "requires_grad", False):
        return Verdict(False, "a call with a gradient is not measured: its backward would have to be, too")
    if p.op == "attention":
        return first_no((p.variant is None and not p.block_mask, "a variant or a block mask is code: it is not measured"),
                        (p.mask is None, "masks are not measured: time depends on what they hide"))
    if getattr(p, "epilogue", None) is not None:
        return Verdict(False, "a user's epilogue is code: it is not measured")
    if getattr(p, "scattered", False):
        return Verdict(False, "rows are added to what is there: another call gives other numbers")
    if getattr(p, "out_scale", None) is not None or getattr(p, "residual", False):
        return Verdict(False, "a call that writes more than its output (codes with scales, a residual in place) is not measured")
    return yes()


def index_fields(tensors: Any) -> dict[str, list[int]]:
    """The integer tensors of a call that decide how long it takes."""
    if isinstance(tensors, MoeTensors):
        return {"ends": _ends(local_ids(tensors.ids, tensors.w13.shape[0], tensors.expert_map), tensors.w13.shape[0])}
    named = {name: getattr(tensors, name, None) for name in ("cu_seqlens_q", "cu_seqlens_k", "kv_lens", "ends")}
    return {name: t.tolist() for name, t in named.items() if t is not None}


def drawn_ends(problem: Any) -> dict[str, list[int]]:
    """Those of a layer of experts of which nothing but its problem is known: of random routing."""
    return {"ends": _ends(torch.randint(problem.experts, (problem.slots,), generator=torch.Generator().manual_seed(0)), problem.experts)}


def _ends(experts: torch.Tensor, count: int) -> list[int]:
    """Where the rows of each expert end; -1 is none."""
    found: list[int] = torch.bincount(experts[experts >= 0], minlength=count).cumsum(0).tolist()
    return found


def make(problem: Any, device: str, generator: torch.Generator, indices: Indices | None = None) -> Any:
    """The tensors of one call. ``generator`` is of the device."""
    return _MAKE[problem.op](problem, _Random(device, generator), dict(indices or {}))


class _Random:
    """Random tensors on a device."""

    def __init__(self, device: str, generator: torch.Generator) -> None:
        self.device, self._generator = device, generator

    def normal(self, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> torch.Tensor:
        wanted = DTYPES[dtype].torch
        drawn = torch.float64 if dtype == "fp64" else torch.bfloat16 if dtype in ("bf16", "e4m3", "e5m2") else torch.float32
        x = torch.empty(shape, dtype=drawn, device=self.device).normal_(0.0, scale, generator=self._generator)
        return x.to(wanted)

    def ordered(self, batch: int, rows: int, columns: int, dtype: str, order: str) -> torch.Tensor:
        """(batch, rows, columns) with the last or the last but one dimension contiguous."""
        if order == "row":
            return self.normal((batch, rows, columns), dtype)
        return self.normal((batch, columns, rows), dtype).mT

    def scales(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, device=self.device).uniform_(0.5, 1.5, generator=self._generator)

    def codes(self, shape: tuple[int, ...], low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=self.device, generator=self._generator)

    def empty(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=DTYPES[dtype].torch, device=self.device)

    def numbers(self, count: int, below: int) -> torch.Tensor:
        return torch.randint(below, (count,), dtype=torch.int32, device=self.device, generator=self._generator)

    def ints(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device="cpu").to(self.device)


def _starts(total: int, parts: int) -> list[int]:
    """Ends of ``parts`` even runs of ``total``, 0 first."""
    return [total * i // max(parts, 1) for i in range(parts + 1)]


def _attention(p: Any, r: _Random, given: dict[str, list[int]]) -> AttentionTensors:
    def shape(length: int, heads: int, width: int) -> tuple[int, ...]:
        return (p.batch, length, heads, width) if p.layout == "dense" else (length, heads, width)

    q = r.normal(shape(p.seq_q, p.num_q_heads, p.head_dim), p.q_dtype)
    k = r.normal(shape(p.seq_k, p.num_kv_heads, p.head_dim), p.kv_dtype)
    v = r.normal(shape(p.seq_k, p.num_kv_heads, p.head_dim_v), p.kv_dtype)
    out = r.empty(shape(p.seq_q, p.num_q_heads, p.head_dim_v), p.out_dtype)
    lse = None
    if p.return_lse:
        lse = r.empty((p.batch, p.num_q_heads, p.seq_q) if p.layout == "dense" else (p.seq_q, p.num_q_heads), "fp32")
    ragged = p.layout == "ragged"
    heads = (("q_scale", p.num_q_heads), ("k_scale", p.num_kv_heads), ("v_scale", p.num_kv_heads))
    scales: dict[str, Any] = {name: r.scales((1, 1)).expand(p.batch, n) for name, n in heads} if p.scales == "tensor" else {}
    return AttentionTensors(
        q, k, v, out, lse, p.head_dim**-0.5,
        cu_seqlens_q=r.ints(given.get("cu_seqlens_q", _starts(p.seq_q, p.batch))) if ragged else None,
        cu_seqlens_k=r.ints(given.get("cu_seqlens_k", _starts(p.seq_k, p.batch))) if ragged else None,
        soft_cap=30.0 if p.soft_cap else None, alibi_slopes=r.scales((1, p.num_q_heads)) if p.alibi else None,
        sinks=r.scales((p.num_q_heads,)) if p.sinks else None,
        kv_lens=r.ints(given.get("kv_lens", [p.seq_k // (p.batch if ragged else 1)] * p.batch)) if p.kv_lens else None, **scales,
    )


def _weight(p: Any, r: _Random, batch: int) -> dict[str, Any]:
    """b and what belongs to it."""
    if p.weight_format is None:
        return {"b": r.ordered(batch, p.k, p.n, p.b_dtype, p.b_order)}
    groups = -(-p.k // p.group_size)
    made: dict[str, Any] = {"b": r.codes((batch, p.n, -(-p.k // 2)))}
    if p.scale_dtype == "e8m0":
        made["scale_b"] = r.codes((batch, p.n, groups), 122, 130).mT
    else:
        made["scale_b"] = r.normal((batch, p.n, groups), p.scale_dtype, 0.05).mT
    if p.zero_points:
        made["zero_b"] = r.codes((batch, p.n, groups), 0, 16).mT
    return made


def _scales(p: Any, r: _Random, batch_a: int, rows: int, batch_b: int) -> dict[str, torch.Tensor]:
    blocks, wide = -(-p.k // _BLOCK), -(-p.n // _BLOCK)
    if p.scales == "tensor":
        return {"scale_a": r.scales((1, 1, 1)).expand(batch_a, rows, 1), "scale_b": r.scales((1, 1, 1)).expand(batch_b, 1, p.n)}
    if p.scales == "row":
        return {"scale_a": r.scales((batch_a, rows, 1)), "scale_b": r.scales((batch_b, 1, p.n))}
    if p.scales:
        columns = wide if p.scales == "block_128x128" else p.n
        return {"scale_a": r.scales((batch_a, rows, blocks)), "scale_b": r.scales((batch_b, columns, blocks)).mT}
    return {}


def _outputs(p: Any, r: _Random, batch: int, rows: int) -> dict[str, Any]:
    made: dict[str, Any] = {"out": r.empty((batch, rows, p.outputs), p.out_dtype)}
    if p.accumulate_c:
        made["c"] = r.normal((batch, rows, p.outputs), p.c_dtype)
    if p.out_scale == "tensor":
        made["out_scale"] = r.scales((1, 1, 1))
    elif p.out_scale:
        made["out_scale"] = r.scales((batch, rows, 1 if p.out_scale == "row" else -(-p.outputs // _BLOCK)))
    return made


def _gemm(p: Any, r: _Random, given: dict[str, list[int]]) -> GemmTensors:
    batch_b = p.batch if p.batched_b else 1
    return GemmTensors(
        a=r.ordered(p.batch, p.m, p.k, p.a_dtype, p.a_order), bias=r.normal((p.n,), p.bias_dtype) if p.bias else None,
        alpha=1.702, limit=7.0, **(_weight(p, r, batch_b) | _scales(p, r, p.batch, p.m, batch_b) | _outputs(p, r, p.batch, p.m)),
    )


def _grouped(p: Any, r: _Random, given: dict[str, list[int]]) -> GroupedGemmTensors:
    total = {"rows": p.m, "masked": p.m, "k": p.k}[p.grouping]
    ends = given.get("ends", [total] * p.batch if p.grouping == "masked" else _starts(total, p.batch)[1:])
    batch_a = p.batch if p.grouping == "masked" else 1
    batch_b = 1 if p.grouping == "k" else p.batch
    batch_out = 1 if p.grouping == "rows" else p.batch
    rows_a = p.tokens if p.gathered else p.m
    return GroupedGemmTensors(
        a=r.ordered(batch_a, rows_a, p.k, p.a_dtype, p.a_order), ends=r.ints(ends),
        rows=r.numbers(p.m, rows_a) if p.gathered else None,
        bias=r.normal((p.batch, p.n), p.bias_dtype) if p.bias else None, alpha=1.702, limit=7.0,
        **(_weight(p, r, batch_b) | _scales(p, r, batch_a, rows_a, batch_b) | _outputs(p, r, batch_out, p.m)),
    )


def _rmsnorm(p: Any, r: _Random, given: dict[str, list[int]]) -> RmsNormTensors:
    shape = (p.rows, p.width)
    return RmsNormTensors(r.normal(shape, p.dtype), r.normal((p.width,), p.weight_dtype), r.empty(shape, p.dtype),
                          r.normal(shape, p.dtype) if p.residual else None, 1e-6)


def _silu(p: Any, r: _Random, given: dict[str, list[int]]) -> SiluAndMulTensors:
    return SiluAndMulTensors(r.normal((p.rows, 2 * p.width), p.dtype), r.empty((p.rows, p.width), p.dtype))


_MAKE: dict[str, Callable[[Any, _Random, dict[str, list[int]]], Any]] = {
    "attention": _attention, "gemm": _gemm, "grouped_gemm": _grouped, "rmsnorm": _rmsnorm, "silu_and_mul": _silu,
}
