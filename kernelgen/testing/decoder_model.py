"""Small decoders out of public calls alone: what tests compile, export and capture."""

from __future__ import annotations

from typing import Any

import torch

import kernelgen

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDE, EXPERTS = 32, 4, 2, 16, 48, 4


class Layer(torch.nn.Module):
    """One decoder layer: Llama's, or with a mixture of experts in place of the dense product. x (B, S, H)."""

    def __init__(self, moe: bool) -> None:
        super().__init__()
        self.moe = moe

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape) * shape[-1] ** -0.5)

        self.norm1, self.norm2 = weight(HIDDEN), weight(HIDDEN)
        self.qkv, self.proj = weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), weight(HIDDEN, HEADS * HEAD_DIM)
        lead = (EXPERTS,) if moe else ()
        self.w13, self.w2, self.gate = weight(*lead, 2 * WIDE, HIDDEN), weight(*lead, HIDDEN, WIDE), weight(EXPERTS, HIDDEN)

    def split(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated q and k, and v, of x (.., H)."""
        heads = kernelgen.gemm(kernelgen.rmsnorm(x, self.norm1), self.qkv.t()).unflatten(-1, (HEADS + 2 * KV_HEADS, HEAD_DIM))
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), -2)
        q, k = kernelgen.rope(q, k, positions)
        return q, k, v

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of the layer, behind attention (.., Hq, D)."""
        x = x + kernelgen.gemm(attended.flatten(-2), self.proj.t())
        y = kernelgen.rmsnorm(x, self.norm2)
        if not self.moe:
            return x + kernelgen.gemm(kernelgen.gemm(y, self.w13.t(), activation="swiglu"), self.w2.t())
        rows = y.flatten(0, -2)
        weights, ids = kernelgen.route(kernelgen.gemm(rows, self.gate.t()), 2)
        return x + kernelgen.moe(rows, self.w13, self.w2, weights, ids).view(x.shape)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x, positions)
        out = kernelgen.attention(q, k, v, causal=True)
        assert isinstance(out, torch.Tensor)
        return self.finish(x, out)


class Decoder(torch.nn.Module):
    """Layers in a row: ``forward`` of whole sequences (B, S, H), ``decode`` of one token per request over paged caches."""

    def __init__(self, moe: bool, layers: int = 2) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(moe) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        for layer in self.layers:
            x = layer(x, positions)
        return x

    def decode(self, x: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, caches: list[torch.Tensor], plan: Any) -> torch.Tensor:
        """x (B, H); caches of (pages, 2, page_size, Hkv, D), of which ``slots`` (B) are written."""
        for layer, cache in zip(self.layers, caches):
            q, k, v = layer.split(x, positions)  # type: ignore[operator]
            kernelgen.append_kv(cache, k, v, slot_mapping=slots)
            x = layer.finish(x, plan.run(q, cache))  # type: ignore[operator]
        return x


def new_caches(pages: int, page_size: int, like: torch.Tensor, layers: int = 2) -> list[torch.Tensor]:
    return [like.new_zeros(pages, 2, page_size, KV_HEADS, HEAD_DIM) for _ in range(layers)]


def new_plan(table: kernelgen.PageTable, dtype: torch.dtype, **more: Any) -> Any:
    return kernelgen.plan_attention(table, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, q_dtype=dtype, **more)
