"""Planned calls that together take every path of attention/paged_mma, for the emulator and for a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from kernelgen.kernels.attention.mma import Config
from kernelgen.reference.masks import Variant
from kernelgen.testing.planned import Planned
from kernelgen.variants import bind_words, trace, variant

NAN, INF = float("nan"), float("inf")


@lru_cache(maxsize=4)
def _table(device: str) -> torch.Tensor:
    return torch.linspace(-8, 8, 8192, device=device)


@dataclass(frozen=True)
class RelativeBias:
    """What a traced variant gives a kernel: a table by distance, scaled by the head, and a mask that hides any key."""

    def code(self) -> str:
        return """struct VariantFunctions {
  static constexpr bool kSoftmax = true;
  static KERNELGEN_DEVICE float score(float s, const VariantContext& c, const int64_t* args) {
    const float* table = reinterpret_cast<const float*>(args[0]);
    return s + table[(c.q_pos - c.k_pos + 4096) * args[1]] * (c.head + 1);
  }
  static KERNELGEN_DEVICE bool visible(const VariantContext& c, const int64_t* args) {
    return (c.q_index + c.k_pos * 3 + c.batch) % 5 != 0;
  }
};"""

    def __str__(self) -> str:
        return "relative_bias"

    def reference(self, device: str) -> Variant:
        return Variant(lambda s, c: s + c.table[c.q_pos - c.k_pos + 4096] * (c.head + 1),
                       lambda c: (c.q_index + c.k_pos * 3 + c.batch) % 5 != 0, {"table": _table(device)})

    def words(self, device: str) -> torch.Tensor:
        return torch.tensor([_table(device).data_ptr(), 1], dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Weights:
    """A traced variant without a softmax: weights of either sign, some of them 0, inf and NaN where the mask hides them."""

    growth: float = 0.0  # per key, as an exponent of 2
    unit: float = 1.0    # a power of 2: in this unit fp16 holds all of them
    normalization = "none"

    def code(self) -> str:
        return trace(self.reference("cpu")).code("float")

    def __str__(self) -> str:
        return "weights"

    def reference(self, device: str, unit: float = 1.0) -> Variant:
        def score(s: Any, c: Any) -> Any:
            weight = torch.where(c.k_pos % 3 == 0, torch.clamp(s, min=0.0), s)
            return weight * torch.exp2(c.k_pos * c.growth) / ((c.k_pos + c.head) % 4 * c.unit)

        return variant(score, lambda c: (c.k_pos + c.head) % 4 != 0, scalars={"growth": self.growth, "unit": unit}, normalization="none")

    def words(self, device: str) -> torch.Tensor:
        functions = self.reference(device)
        return bind_words(functions, trace(functions), device)


MIXED, DECODE = ((3, 1, 0, 9), (150, 64, 17, 200)), ((1, 1, 1, 1), (150, 0, 17, 200))
ROWS_16 = Config(16, 32, 1, 3)

# name -> (call, config)
CASES: dict[str, tuple[Planned, Config]] = {
    "decode": (Planned(*DECODE), ROWS_16),
    "decode split": (Planned(*DECODE, chunk=64, sinks=True), ROWS_16),
    "decode key warps": (Planned((2, 3), (250, 64), heads=(8, 1), poison=(NAN, INF, -INF), page_size=7),
                         Config(16, 16, 1, 2, key_warps=4)),
    "mixed": (Planned(*MIXED, alibi=True, sinks=True, chunk=64), Config(64, 32, 4, 2)),
    "cap and window": (Planned(*MIXED, soft_cap=5.0, window=(40, 3), causal=False, chunk=64, scale=-0.3), Config(64, 64, 4)),
    "contiguous": (Planned((70, 1, 0, 33), (90, 60, 40, 20), one_page=True, chunk=64), Config(64, 64, 4, 2)),
    "prefill HND": (Planned((70, 1, 0, 33), (90, 160, 40, 20), dims=(128, 128), kv_layout="HND", chunk=64), Config(128, 64, 4)),
    "flat mask": (Planned(*MIXED, mask="dense", chunk=128, poison=(NAN, INF, -INF)), Config(64, 64, 4, 2)),
    "packed mask": (Planned(*MIXED, mask="packed", soft_cap=5.0, poison=(NAN,)), Config(64, 64, 4)),
    "everything": (Planned(*MIXED, variant=RelativeBias(), alibi=True, sinks=True, mask="packed", chunk=64), Config(64, 32, 4, 2)),
    "weights": (Planned(*MIXED, variant=Weights(), alibi=True, soft_cap=5.0, mask="packed", chunk=64), Config(64, 32, 4, 2)),
    "weights nonfinite": (Planned(*MIXED, variant=Weights(), window=(90, 0), poison=(NAN, INF, -INF), chunk=128), Config(64, 64, 4)),
    "weights key warps": (Planned((2, 3), (250, 64), heads=(8, 1), dtype="fp16", variant=Weights(0.05), page_size=7),
                          Config(16, 16, 1, 2, key_warps=4)),
    "weights beyond fp16": (Planned(*MIXED, dtype="fp16", variant=Weights(0.1, 2.0**8), value_scale=1e-3, chunk=128), Config(64, 32, 4, 2)),
    "weights fp8 fp16": (Planned(*MIXED, dtype="fp16", kv_dtype="e4m3", kv_scales="page", variant=Weights(0.03), chunk=64, page_size=8),
                         Config(64, 64, 4)),
    "nonfinite": (Planned((40, 30), (150, 64), poison=(NAN, INF, -INF), chunk=64, page_size=7), Config(64, 64, 4, 2)),
    "fp8": (Planned(*DECODE, kv_dtype="e4m3", kv_scales="tensor", dims=(128, 128)), ROWS_16),
    "fp8 e5m2 fp16": (Planned(*MIXED, dtype="fp16", kv_dtype="e5m2", kv_scales="request_head", page_size=5, chunk=64),
                      Config(64, 64, 4, 2)),
    "fp8 page scales": (Planned(*MIXED, kv_dtype="e4m3", kv_scales="page", chunk=64, page_size=8), Config(64, 64, 4)),
    "fp8 page scales fp16": (Planned(*DECODE, dtype="fp16", kv_dtype="e4m3", kv_scales="page", page_size=12),
                             Config(16, 16, 1, 3, key_warps=2)),
    "fp8 queries": (Planned(*MIXED, dtype="e4m3", kv_dtype="e5m2", kv_scales="head", q_scale=True, alibi=True), Config(64, 32, 4, 2)),
    "fp8 unscaled": (Planned(*MIXED, kv_dtype="e4m3", dims=(72, 40)), Config(64, 64, 4, 2)),
    "mla small": (Planned((1, 2, 1), (70, 0, 200), heads=(8, 1), dims=(80, 64), rope_dim=16, chunk=64), Config(16, 32, 1, 2)),
    "mla fp8": (Planned((1, 2, 1), (70, 0, 200), heads=(71, 1), dims=(80, 64), rope_dim=16, kv_dtype="e4m3", kv_scales="page", chunk=64),
                Config(64, 32, 4, 2)),
    "mla plain rope": (Planned((1, 2, 1), (70, 0, 200), heads=(8, 1), dims=(80, 64), rope_dim=16, rope_dtype="bf16", kv_dtype="e4m3",
                               kv_scales="request_head", chunk=64), Config(16, 32, 1, 2)),
    "mla plain rope page": (Planned((3, 2, 9), (70, 0, 200), heads=(7, 1), dims=(88, 64), rope_dim=24, rope_dtype="fp16", dtype="fp16",
                                    kv_dtype="e5m2", kv_scales="page", chunk=64, page_size=5, scale=-0.2), Config(64, 32, 4, 2)),
    "mla plain rope number": (Planned((1, 1), (70, 300), heads=(16, 1), dims=(576, 512), rope_dim=64, rope_dtype="bf16", kv_dtype="e4m3",
                                      k_factor=-1.7, chunk=128), Config(16, 32, 1, 3, value_splits=2)),
    "mla": (Planned((1, 2), (70, 100), heads=(16, 1), dims=(576, 512), rope_dim=64, chunk=64), Config(64, 32, 4, 1, value_splits=2)),
    "group of 71": (Planned(*MIXED, heads=(71, 1), dims=(64, 64), chunk=64), Config(128, 64, 4, 2, True)),
    "page of 1": (Planned(*MIXED, heads=(7, 1), page_size=1, dims=(40, 264)), Config(64, 16, 4, 2, value_splits=2)),
    "wide decode": (Planned(*DECODE, dims=(512, 512), page_size=100, chunk=64), Config(16, 16, 1, 2, value_splits=2)),
}
