"""Eager oracles of the whole contract, in plain PyTorch, for any device.

They say what every call means; kernels are tested against them, and ``backend="reference"`` runs them.

Precision. Every oracle takes ``compute_dtype`` (``torch.float64`` by default, or ``torch.float32``). It converts its
floating inputs to that type, computes everything in it, and returns its floating results in it; callers round to the
output type. Exceptions are results whose type is the point: fp8 codes, float32 scales, packed bytes and integer ids.
Functions that write into a cache write the cache's type.

Signatures. Names and arguments are those of the public calls without ``backend``, ``out``, ``lse`` and the
performance switches. A plan and its run are one call here (``paged_attention``, ``mla_attention``).

What the contract leaves unwritten (rows outside any group, past the last request) is NaN in a result, so that a test
which compares it fails visibly.
"""

from kernelgen.reference.activation import apply_activation
from kernelgen.reference.append import append_kv, append_mla
from kernelgen.reference.attention import attention, attention_varlen, merge_states
from kernelgen.reference.cascade import cascade_attention
from kernelgen.reference.gemm import gemm, grouped_gemm, grouped_gemm_masked
from kernelgen.reference.masks import BlockMask, Variant, alibi_slopes, block_mask_dense, pack_mask, unpack_mask
from kernelgen.reference.mla import mla_attention
from kernelgen.reference.moe import MoESort, moe, moe_permute, moe_sort, moe_unpermute
from kernelgen.reference.norm import rmsnorm, silu_and_mul
from kernelgen.reference.paged import PageTable, paged_attention
from kernelgen.reference.plain import (
    attention_plain,
    attention_varlen_plain,
    cascade_attention_plain,
    gemm_plain,
    grouped_gemm_masked_plain,
    grouped_gemm_plain,
    mla_attention_plain,
    moe_plain,
    paged_attention_plain,
)
from kernelgen.reference.quant import quantize_fp8
from kernelgen.reference.quantize_attention import QuantizedAttention, quantize_attention
from kernelgen.reference.rope import make_cos_sin_cache, rope, rope_frequencies
from kernelgen.reference.rotation import rotate
from kernelgen.reference.route import route
from kernelgen.reference.weights import PackedWeight, pack_weight

__all__ = [
    "BlockMask",
    "MoESort",
    "PackedWeight",
    "PageTable",
    "QuantizedAttention",
    "Variant",
    "alibi_slopes",
    "append_kv",
    "append_mla",
    "apply_activation",
    "attention",
    "attention_plain",
    "attention_varlen",
    "attention_varlen_plain",
    "block_mask_dense",
    "cascade_attention",
    "cascade_attention_plain",
    "gemm",
    "gemm_plain",
    "grouped_gemm",
    "grouped_gemm_masked",
    "grouped_gemm_masked_plain",
    "grouped_gemm_plain",
    "make_cos_sin_cache",
    "merge_states",
    "mla_attention",
    "mla_attention_plain",
    "moe",
    "moe_permute",
    "moe_plain",
    "moe_sort",
    "moe_unpermute",
    "pack_mask",
    "pack_weight",
    "paged_attention",
    "paged_attention_plain",
    "quantize_attention",
    "quantize_fp8",
    "rmsnorm",
    "rope",
    "rope_frequencies",
    "rotate",
    "route",
    "silu_and_mul",
    "unpack_mask",
]
