"""moe by generated kernels on a GPU: real shapes at reduced sizes, quantised experts, maps, repeats, graphs, no wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen.testing.data import random_tensor
from kernelgen.testing.moe_layer import check_moe, layer, pack_experts, quantize_experts
from kernelgen.testing.tolerance import assert_bits_equal

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32


def cuda(*sizes: Any, **options: Any) -> dict[str, Any]:
    return layer(*sizes, device="cuda", **options)


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "mixtral": lambda t: cuda(t, 8, 2, 512, 1024, seed=t),
    "qwen3": lambda t: cuda(t, 128, 8, 256, 96, FP16, seed=t),
    "qwen3 next": lambda t: cuda(t, 512, 10, 256, 64, seed=t),
    "odd": lambda t: cuda(t, 6, 3, 77, 45, seed=t),
    "relu2": lambda t: cuda(t, 8, 2, 256, 192, activation="relu2", seed=t),
    "swiglu_oai": lambda t: cuda(t, 16, 4, 320, 320, activation="swiglu_oai", biases=BF16, seed=t, scale=5.0) | {"gate_up": "interleaved"},
    "geglu up first": lambda t: cuda(t, 8, 2, 256, 192, FP16, activation="geglu", biases=F32, seed=t) | {"gate_up": "up_first"},
    "clamped": lambda t: cuda(t, 8, 2, 256, 192, seed=t, scale=5.0) | {"limit": 2.0},
    "llama4": lambda t: cuda(t, 16, 1, 512, 256, seed=t) | {"weights_on_input": True},
    "deepseek fp8": lambda t: quantize_experts(cuda(t, 64, 8, 512, 256, seed=t), "block_128x128", "block_128x128"),
    "fp8 codes": lambda t: quantize_experts(cuda(t, 64, 8, 256, 384, seed=t), "block_128x128", "block_128x128"),
    "fp8 channels": lambda t: quantize_experts(cuda(t, 16, 4, 384, 128, seed=t), "channel", "channel"),
    "fp8 tensors": lambda t: quantize_experts(cuda(t, 16, 4, 384, 128, FP16, seed=t), "tensor", "expert"),
    "fp8 odd": lambda t: quantize_experts(cuda(t, 5, 2, 200, 136, seed=t), "block_128x128", "channel"),
    "fp8 on the input": lambda t: quantize_experts(cuda(t, 8, 1, 256, 128, seed=t), "channel", "channel") | {"weights_on_input": True},
    "int4": lambda t: pack_experts(cuda(t, 16, 4, 256, 128, seed=t), "int4", group_size=64, symmetric=False),
    "gpt-oss": lambda t: pack_experts(cuda(t, 32, 4, 320, 320, activation="swiglu_oai", biases=BF16, seed=t), "mxfp4") | {
        "gate_up": "interleaved"},
}


def test_first_product_writes_codes() -> None:
    """On Hopper, where its tiles fill the chip."""
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for name, codes in (("fp8 codes", hopper), ("fp8 channels", False)):
        chosen = kernelgen.explain("moe", **CASES[name](200), backend="generated").chosen
        assert chosen is not None
        assert ("quantize_hidden" in dict(chosen.config.decisions)) is not codes, name


@pytest.mark.parametrize("name", CASES)
def test_layer(name: str) -> None:
    for tokens in (1, 7, 200):
        check_moe(CASES[name](tokens), what=f"{name} {tokens}")


@pytest.mark.parametrize("ids", ("one expert", "none", "mixed", "repeated"))
def test_routing(ids: str) -> None:
    c = cuda(300, 32, 4, 256, 128)
    slot = torch.arange(1200, device="cuda").view(300, 4)
    c["ids"] = {"one expert": torch.full_like(slot, 9), "none": torch.full_like(slot, -1),
                "mixed": torch.where(slot % 3 == 0, -1, c["ids"]), "repeated": c["ids"][:, :1].expand(300, 4).contiguous().long()}[ids]
    out = check_moe(c, what=ids)
    assert ids != "none" or bool((out == 0).all())


def test_shards_and_shared_expert() -> None:
    c = cuda(200, 32, 4, 256, 128)
    whole = check_moe(c, what="whole").float()
    parts = [check_moe(c | {"w13": c["w13"][a : a + 16], "w2": c["w2"][a : a + 16], "expert_map": (a, a + 16)}, what=str(a))
             for a in (0, 16)]
    assert all(bool(p.abs().sum() > 0) for p in parts)
    torch.testing.assert_close(parts[0].float() + parts[1].float(), whole, rtol=0.02, atol=0.02)
    shared = tuple(random_tensor(shape, BF16, seed=7, device="cuda", scale=0.1) for shape in ((128, 256), (256, 64)))
    check_moe(c | {"shared": shared}, what="shared")


@pytest.mark.parametrize("name", ("qwen3", "deepseek fp8"))
def test_a_thousand_repeats_and_a_graph(name: str) -> None:
    c = CASES[name](64)
    first = kernelgen.moe(**c, backend="generated")
    for _ in range(1000):
        assert torch.equal(kernelgen.moe(**c, backend="generated"), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernelgen.moe(**c, backend="generated")
    other = CASES[name](65)
    for part in ("x", "weights", "ids"):
        c[part].copy_(other[part][:64])
    graph.replay()
    replayed = captured.clone()
    assert_bits_equal(replayed, kernelgen.moe(**c, backend="generated"), what="replayed on new tokens")


def test_nothing_waits_for_the_device() -> None:
    """torch reports every synchronising call of its own; the launcher makes none."""
    c, table = cuda(64, 16, 2, 256, 128), torch.arange(16, device="cuda")
    kernelgen.moe(**c, backend="generated")
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernelgen.moe(**c, backend="generated")
        kernelgen.moe(**c, expert_map=table, backend="generated")
        sort = kernelgen.moe_sort(c["ids"], 16, backend="generated")
        kernelgen.moe_unpermute(kernelgen.moe_permute(c["x"], sort), sort, c["weights"])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_many_tokens() -> None:
    """More slots than one block sorts; rows beyond 2^31 elements of the workspaces are a matter of memory alone."""
    check_moe(cuda(5000, 64, 8, 256, 128), what="5000 tokens")
