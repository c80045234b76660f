"""Pieces of MoE and small ops that the float64 oracle runs in this release, rounded to the contract's dtypes.

They are no part of dispatch yet: ``backend`` may be "auto" or "reference". They run on any device, read index values
back to the host, and are differentiable where their arithmetic is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernelgen import reference
from kernelgen.errors import NoBackendError
from kernelgen.ops.checks import check_output, check_tensors
from kernelgen.reference import MoESort
from kernelgen.reference.moe import ExpertMap
from kernelgen.reference.plain import default_out_dtype
from kernelgen.settings import settings

Scale = torch.Tensor | float
Offsets = torch.Tensor | Sequence[int]


def _only_reference(op: str, backend: str) -> None:
    asked = settings().backend if backend == "auto" else backend
    if asked not in ("auto", "reference"):
        raise NoBackendError(f"{op}: got backend={asked!r}, expected 'auto' or 'reference': this release has no kernel for it yet")


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """ALiBi slopes (num_heads) float32 on the CPU (Press et al. 2021, with its rule for other than powers of two).

    Raises ShapeError for fewer than one head.
    """
    return reference.alibi_slopes(num_heads)


def moe_sort(ids: torch.Tensor, num_experts: int, *, expert_map: ExpertMap | None = None) -> MoESort:
    """Group the slots of ids (T, k) int32 by local expert, within one in the order of (token, slot).

    Returns MoESort(offsets (E) end offsets, token_of_row (T * k), row_of_slot (T, k)), all int32, -1 where there is
    none. ``expert_map`` and skipped ids: as in ``moe``. Raises ShapeError, DtypeError.
    """
    check_tensors(ids=ids)
    return reference.moe_sort(ids, num_experts, expert_map=expert_map)


def moe_permute(x: torch.Tensor, sort: MoESort) -> torch.Tensor:
    """x (T, H) to rows (T * k, H) in the sort's order and x's dtype; rows past its last offset are unspecified.

    Raises ShapeError.
    """
    check_tensors(x=x)
    return reference.moe_permute(x, sort).to(x.dtype)


def moe_unpermute(rows: torch.Tensor, sort: MoESort, weights: torch.Tensor) -> torch.Tensor:
    """out[t] = sum over slots s of weights[t, s] * rows[row_of_slot[t, s]]: (T, H) in rows' dtype.

    rows (T * k, H), weights (T, k). Skipped slots add nothing. Raises ShapeError, DeviceError.
    """
    check_tensors(rows=rows, weights=weights)
    return reference.moe_unpermute(rows, sort, weights).to(rows.dtype)


def grouped_gemm(
    a: torch.Tensor, b: torch.Tensor, offsets: Offsets, *, bias: torch.Tensor | None = None, activation: str | None = None,
    gate_up: str = "gate_first", c: torch.Tensor | None = None, beta: float = 1.0, scale_a: Scale | None = None,
    scale_b: Scale | None = None, accumulate: str = "float32", out_dtype: torch.dtype | None = None, out_scale: str | None = None,
    out: torch.Tensor | None = None, deterministic: bool = True, backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """One product per group, ``offsets`` (E) int32 end offsets as in torch._grouped_mm.

    a (T, K) @ b (E, K, N): rows grouped, to (T, N); rows outside any group are left untouched in ``out`` (unspecified
    without it). a (M, T) @ b (T, N): K grouped, to (E, M, N). bias (N) or (E, N); the rest, the dtypes and the errors
    as in ``gemm``; with ``out_scale`` the result is (fp8 codes, float32 scale).
    """
    _only_reference("grouped_gemm", backend)
    check_tensors(a=a, b=b, bias=bias, c=c, out=out)
    initial = out if out is not None and b.dim() == 3 else None
    result = reference.grouped_gemm(
        a, b, offsets, bias=bias, activation=activation, gate_up=gate_up, c=c, beta=beta, scale_a=scale_a, scale_b=scale_b,
        accumulate=accumulate, out_dtype=out_dtype, out_scale=out_scale, initial=initial)
    return _deliver(result, a, out_dtype, out)


def grouped_gemm_masked(
    a: torch.Tensor, b: torch.Tensor, counts: Offsets, *, bias: torch.Tensor | None = None, activation: str | None = None,
    gate_up: str = "gate_first", c: torch.Tensor | None = None, beta: float = 1.0, scale_a: Scale | None = None,
    scale_b: Scale | None = None, accumulate: str = "float32", out_dtype: torch.dtype | None = None, out_scale: str | None = None,
    out: torch.Tensor | None = None, deterministic: bool = True, backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """a (E, Mmax, K) @ b (E, K, N) for the first counts[e] rows of each e, to (E, Mmax, N).

    ``counts`` (E) int32. Other rows are left untouched in ``out`` (unspecified without it). Otherwise as grouped_gemm.
    """
    _only_reference("grouped_gemm_masked", backend)
    check_tensors(a=a, b=b, bias=bias, c=c, out=out)
    result = reference.grouped_gemm_masked(
        a, b, counts, bias=bias, activation=activation, gate_up=gate_up, c=c, beta=beta, scale_a=scale_a, scale_b=scale_b,
        accumulate=accumulate, out_dtype=out_dtype, out_scale=out_scale, initial=out)
    return _deliver(result, a, out_dtype, out)


def _deliver(
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor], a: torch.Tensor, out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Round to the output dtype, into ``out`` where it is given; a quantised result is (codes, scale) already."""
    value, scale = result if isinstance(result, tuple) else (result, None)
    dtype = value.dtype if scale is not None else out_dtype or (out.dtype if out is not None else default_out_dtype(a.dtype))
    if out is not None:
        check_output("out", out, tuple(value.shape), dtype, a.device)
        value = out.copy_(value)
    else:
        value = value.to(dtype)
    return value if scale is None else (value, scale)
