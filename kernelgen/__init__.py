"""kernelgen: a just-in-time kernel generator with one dispatcher, for attention, GEMM and mixture-of-experts.

    import torch, kernelgen
    out = kernelgen.attention(q, k, v, causal=True)     # q (B, Sq, Hq, D), k and v (B, Sk, Hkv, D)
    print(kernelgen.explain("attention", q, k, v, causal=True))

Importing touches no device, no file of the cache and no compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kernelgen.errors import (
    ArtifactMissingError,
    BackendError,
    CacheError,
    CompileError,
    DeviceError,
    DtypeError,
    KernelgenError,
    LaunchError,
    LayoutError,
    NoBackendError,
    SettingsError,
    ShapeError,
    ToolchainMissing,
    UnknownBackendError,
    VariantError,
)

__version__ = "0.1.0"

# public name -> module, loaded on first use.
_PUBLIC = {
    "attention": "kernelgen.ops.attention",
    "attention_varlen": "kernelgen.ops.attention",
    "gemm": "kernelgen.ops.gemm",
    "moe": "kernelgen.ops.moe",
    "route": "kernelgen.ops.route",
    "AttentionFeatures": "kernelgen.ops.features",
    "AttentionPlan": "kernelgen.ops.paged",
    "PageTable": "kernelgen.ops.page_table",
    "plan_attention": "kernelgen.ops.paged",
    "GraphBounds": "kernelgen.ops.planning",
    "MLAPlan": "kernelgen.ops.mla",
    "plan_mla": "kernelgen.ops.mla",
    "cascade_attention": "kernelgen.ops.cascade",
    "append_kv": "kernelgen.ops.append",
    "append_mla": "kernelgen.ops.append",
    "rope_append_kv": "kernelgen.ops.append",
    "alibi_slopes": "kernelgen.ops.eager",
    "grouped_gemm": "kernelgen.ops.grouped",
    "grouped_gemm_masked": "kernelgen.ops.grouped",
    "merge_states": "kernelgen.ops.merge",
    "MoESort": "kernelgen.moe_tensors",
    "moe_permute": "kernelgen.ops.moe_pieces",
    "moe_sort": "kernelgen.ops.moe_pieces",
    "moe_unpermute": "kernelgen.ops.moe_pieces",
    "PackedWeight": "kernelgen.ops.weights",
    "pack_weight": "kernelgen.ops.weights",
    "quantize_fp8": "kernelgen.ops.quantize",
    "rope": "kernelgen.ops.rope",
    "rmsnorm": "kernelgen.ops.rows",
    "silu_and_mul": "kernelgen.ops.rows",
    "sdpa": "kernelgen.ops.sdpa",
    "explain": "kernelgen.dispatch.explain",
    "Target": "kernelgen.targets",
    "tune": "kernelgen.dispatch.tuning",
    "variant": "kernelgen.variants",
    "epilogue": "kernelgen.variants.epilogue_function",
    "row_max": "kernelgen.variants.epilogue_function",
    "row_sum": "kernelgen.variants.epilogue_function",
    "warmup": "kernelgen.aot.warmup",
    "distributed": "",  # modules of their own
    "variants": "",
}

if TYPE_CHECKING:
    from kernelgen.aot.warmup import warmup as warmup
    from kernelgen.dispatch.explain import explain as explain
    from kernelgen.dispatch.tuning import tune as tune
    from kernelgen.moe_tensors import MoESort as MoESort
    from kernelgen.ops.append import append_kv as append_kv
    from kernelgen.ops.append import append_mla as append_mla
    from kernelgen.ops.append import rope_append_kv as rope_append_kv
    from kernelgen.ops.attention import attention as attention
    from kernelgen.ops.attention import attention_varlen as attention_varlen
    from kernelgen.ops.cascade import cascade_attention as cascade_attention
    from kernelgen.ops.eager import alibi_slopes as alibi_slopes
    from kernelgen.ops.features import AttentionFeatures as AttentionFeatures
    from kernelgen.ops.gemm import gemm as gemm
    from kernelgen.ops.grouped import grouped_gemm as grouped_gemm
    from kernelgen.ops.grouped import grouped_gemm_masked as grouped_gemm_masked
    from kernelgen.ops.merge import merge_states as merge_states
    from kernelgen.ops.mla import MLAPlan as MLAPlan
    from kernelgen.ops.mla import plan_mla as plan_mla
    from kernelgen.ops.moe import moe as moe
    from kernelgen.ops.moe_pieces import moe_permute as moe_permute
    from kernelgen.ops.moe_pieces import moe_sort as moe_sort
    from kernelgen.ops.moe_pieces import moe_unpermute as moe_unpermute
    from kernelgen.ops.page_table import PageTable as PageTable
    from kernelgen.ops.paged import AttentionPlan as AttentionPlan
    from kernelgen.ops.paged import plan_attention as plan_attention
    from kernelgen.ops.planning import GraphBounds as GraphBounds
    from kernelgen.ops.quantize import quantize_fp8 as quantize_fp8
    from kernelgen.ops.rope import rope as rope
    from kernelgen.ops.route import route as route
    from kernelgen.ops.rows import rmsnorm as rmsnorm
    from kernelgen.ops.rows import silu_and_mul as silu_and_mul
    from kernelgen.ops.sdpa import sdpa as sdpa
    from kernelgen.ops.weights import PackedWeight as PackedWeight
    from kernelgen.ops.weights import pack_weight as pack_weight
    from kernelgen.targets import Target as Target
    from kernelgen.variants import variant as variant
    from kernelgen.variants.epilogue_function import epilogue as epilogue
    from kernelgen.variants.epilogue_function import row_max as row_max
    from kernelgen.variants.epilogue_function import row_sum as row_sum


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'kernelgen' has no attribute {name!r}")
    value = getattr(import_module(module), name) if module else import_module(f"kernelgen.{name}")
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])


# What every first call needs is imported here, about 0.1 s beyond torch (tools/bench/results): a program imports at its
# start, but its first call may be somebody's request. Last, because these modules import this one.
for _module in ("tvm_ffi", "kernelgen.ops.attention", "kernelgen.ops.gemm", "kernelgen.launch.host", "kernelgen.toolchains.cxx",
                "kernelgen.dispatch.backends.generated", "kernelgen.dispatch.backends.torch_native",
                "kernelgen.dispatch.backends.reference"):
    import_module(_module)
import_module("kernelgen.toolchains.nvrtc").import_bindings()

__all__ = [
    "ArtifactMissingError", "AttentionFeatures", "AttentionPlan", "BackendError", "CacheError", "CompileError", "DeviceError", "DtypeError",
    "GraphBounds", "KernelgenError", "LaunchError", "LayoutError", "MLAPlan", "MoESort", "NoBackendError", "PackedWeight", "PageTable",
    "SettingsError", "ShapeError", "Target", "ToolchainMissing", "UnknownBackendError", "VariantError",
    "alibi_slopes", "append_kv", "append_mla", "attention",
    "attention_varlen", "cascade_attention", "distributed", "epilogue", "explain", "gemm", "grouped_gemm", "grouped_gemm_masked",
    "merge_states", "moe", "moe_permute", "moe_sort", "moe_unpermute", "pack_weight", "plan_attention", "plan_mla", "quantize_fp8",
    "rmsnorm", "rope", "rope_append_kv", "route", "row_max", "row_sum", "sdpa", "silu_and_mul", "tune", "variant", "variants", "warmup",
]
