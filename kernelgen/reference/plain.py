"""Plain evaluations: what ordinary PyTorch gives in float32 with a kernel's roundings.

A kernel may be off by twice the error of these (see :mod:`kernelgen.testing.tolerance`). They dequantise to float32,
multiply and add in float32, round where a kernel must round - the softmax weights to the type of the second product,
a hidden activation to its storage type, the result to the output type - and nowhere else. float64 inputs are computed
in float32 too: the tolerance scales that error by the ratio of the two precisions.

On a GPU these are float32 only while ``torch.backends.cuda.matmul.allow_tf32`` is False, its default.
"""

from __future__ import annotations

from typing import Any

import torch

from kernelgen.reference.attention import Result, attention, attention_varlen
from kernelgen.reference.cascade import cascade_attention
from kernelgen.reference.checks import FP8_DTYPES
from kernelgen.reference.gemm import Weight, gemm, grouped_gemm, grouped_gemm_masked
from kernelgen.reference.mla import mla_attention
from kernelgen.reference.moe import moe
from kernelgen.reference.paged import Cache, paged_attention, split_cache

WIDE = (torch.float32, torch.float64)


def default_out_dtype(dtype: torch.dtype) -> torch.dtype:
    """The output type of a call on inputs of ``dtype``: the same, bfloat16 for fp8."""
    return torch.bfloat16 if dtype in FP8_DTYPES else dtype


def default_p_dtype(q_dtype: torch.dtype, v_dtype: torch.dtype) -> torch.dtype | None:
    """The type of a kernel's softmax weights: v's, or q's where wider queries meet an fp8 v. None = float32."""
    p_dtype = q_dtype if v_dtype in FP8_DTYPES and q_dtype not in FP8_DTYPES else v_dtype
    return None if p_dtype in WIDE else p_dtype


def _rounded(result: Any, out_dtype: torch.dtype) -> Any:
    """Round the output of float32 arithmetic; an LSE beside it stays float32, a float64 call stays unrounded."""
    if isinstance(result, tuple):
        return (_rounded(result[0], out_dtype), *result[1:])
    return result if out_dtype in WIDE else result.to(out_dtype)


def attention_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, p_dtype: torch.dtype | None = None,
                    out_dtype: torch.dtype | None = None, **features: Any) -> Result:
    """:func:`~kernelgen.reference.attention.attention` in float32 with a kernel's roundings.

    ``p_dtype``: type of the softmax weights, see :func:`default_p_dtype`; ``out_dtype``: see
    :func:`default_out_dtype`. The LSE is float32.
    """
    out = attention(q, k, v, compute_dtype=torch.float32, p_dtype=p_dtype or default_p_dtype(q.dtype, v.dtype),
                    **features)
    return _rounded(out, out_dtype or default_out_dtype(q.dtype))


def attention_varlen_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, *,
                           p_dtype: torch.dtype | None = None, out_dtype: torch.dtype | None = None,
                           **features: Any) -> Result:
    """:func:`~kernelgen.reference.attention.attention_varlen` in float32 with a kernel's roundings."""
    out = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, compute_dtype=torch.float32,
                           p_dtype=p_dtype or default_p_dtype(q.dtype, v.dtype), **features)
    return _rounded(out, out_dtype or default_out_dtype(q.dtype))


def paged_attention_plain(q: torch.Tensor, kv_cache: Cache, page_table: Any, *, p_dtype: torch.dtype | None = None,
                          out_dtype: torch.dtype | None = None, kv_layout: str = "NHD", **features: Any) -> Result:
    """:func:`~kernelgen.reference.paged.paged_attention` in float32 with a kernel's roundings."""
    v_dtype = split_cache(kv_cache, kv_layout)[1].dtype
    out = paged_attention(q, kv_cache, page_table, compute_dtype=torch.float32, kv_layout=kv_layout,
                          p_dtype=p_dtype or default_p_dtype(q.dtype, v_dtype), **features)
    return _rounded(out, out_dtype or default_out_dtype(q.dtype))


def cascade_attention_plain(q: torch.Tensor, kv_cache: Cache, levels: Any, *, p_dtype: torch.dtype | None = None,
                            out_dtype: torch.dtype | None = None, kv_layout: str = "NHD", **features: Any) -> Result:
    """:func:`~kernelgen.reference.cascade.cascade_attention` in float32 with a kernel's roundings."""
    v_dtype = split_cache(kv_cache, kv_layout)[1].dtype
    out = cascade_attention(q, kv_cache, levels, compute_dtype=torch.float32, kv_layout=kv_layout,
                            p_dtype=p_dtype or default_p_dtype(q.dtype, v_dtype), **features)
    return _rounded(out, out_dtype or default_out_dtype(q.dtype))


def mla_attention_plain(q_nope: torch.Tensor, q_rope: torch.Tensor, ckv_cache: torch.Tensor,
                        k_rope_cache: torch.Tensor | None, page_table: Any, *, p_dtype: torch.dtype | None = None,
                        out_dtype: torch.dtype | None = None, **features: Any) -> Result:
    """:func:`~kernelgen.reference.mla.mla_attention` in float32 with a kernel's roundings."""
    out = mla_attention(q_nope, q_rope, ckv_cache, k_rope_cache, page_table, compute_dtype=torch.float32,
                        p_dtype=p_dtype or default_p_dtype(q_nope.dtype, ckv_cache.dtype), **features)
    return _rounded(out, out_dtype or default_out_dtype(q_nope.dtype))


def gemm_plain(a: torch.Tensor, b: Weight, *, out_dtype: torch.dtype | None = None, **features: Any) -> torch.Tensor:
    """:func:`~kernelgen.reference.gemm.gemm` in float32, rounded to ``out_dtype`` (default: a's, bfloat16 for fp8).

    A quantised result (``out_scale``) has no plain evaluation of its own: compare what it dequantises to.
    """
    return _rounded(gemm(a, b, compute_dtype=torch.float32, **features), out_dtype or default_out_dtype(a.dtype))


def grouped_gemm_plain(a: torch.Tensor, b: Weight, offsets: Any, *, out_dtype: torch.dtype | None = None,
                       **features: Any) -> torch.Tensor:
    """:func:`~kernelgen.reference.gemm.grouped_gemm` in float32, rounded to ``out_dtype``."""
    out = grouped_gemm(a, b, offsets, compute_dtype=torch.float32, **features)
    return _rounded(out, out_dtype or default_out_dtype(a.dtype))


def grouped_gemm_masked_plain(a: torch.Tensor, b: Weight, counts: Any, *, out_dtype: torch.dtype | None = None,
                              **features: Any) -> torch.Tensor:
    """:func:`~kernelgen.reference.gemm.grouped_gemm_masked` in float32, rounded to ``out_dtype``."""
    out = grouped_gemm_masked(a, b, counts, compute_dtype=torch.float32, **features)
    return _rounded(out, out_dtype or default_out_dtype(a.dtype))


def moe_plain(x: torch.Tensor, w13: Weight, w2: Weight, weights: torch.Tensor, ids: torch.Tensor, *,
              mid_dtype: torch.dtype | None = None, out_dtype: torch.dtype | None = None,
              **features: Any) -> torch.Tensor:
    """:func:`~kernelgen.reference.moe.moe` in float32; the activation's result is rounded to ``mid_dtype``.

    ``mid_dtype`` and ``out_dtype`` default to x's type, bfloat16 for fp8. Kernels with fp8 activations: ``act_recipe``.
    """
    dtype = default_out_dtype(x.dtype)
    mid = mid_dtype or dtype
    out = moe(x, w13, w2, weights, ids, compute_dtype=torch.float32, mid_dtype=None if mid in WIDE else mid, **features)
    return _rounded(out, out_dtype or dtype)
