"""moe by generated kernels on a GPU: real shapes at reduced sizes, quantised experts, maps, repeats, graphs, no wait for the device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen.dispatch import select
from kernelgen.kernels.moe import layer as layer_steps
from kernelgen.testing.data import random_tensor
from kernelgen.testing.moe_layer import check_added, check_moe, layer, pack_experts, quantize_experts
from kernelgen.testing.tolerance import assert_bits_equal

moe_op = importlib.import_module("kernelgen.ops.moe")  # the package has a function of that name
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


GATHERED: dict[str, Callable[[int], dict[str, Any]]] = {
    "bf16": lambda t: cuda(t, 12, 3, 264, 200, seed=t),
    "fp16, k of 8": lambda t: cuda(t, 32, 8, 1032, 96, FP16, seed=t),
    "one slot": lambda t: cuda(t, 5, 1, 512, 128, seed=t),
    "bias, interleaved": lambda t: cuda(t, 16, 4, 320, 320, activation="swiglu_oai", biases=BF16, seed=t) | {"gate_up": "interleaved"},
    "fp8 blocks": lambda t: quantize_experts(cuda(t, 24, 6, 1152, 256, seed=t), "block_128x128", "block_128x128"),
    "fp8 codes": lambda t: quantize_experts(cuda(t, 160, 8, 256, 384, seed=t), "block_128x128", "block_128x128"),
    "fp8 codes, more rows": lambda t: quantize_experts(cuda(t, 40, 14, 256, 512, seed=t), "block_128x128", "block_128x128"),
}


@pytest.mark.parametrize("name", GATHERED)
def test_first_product_gathers_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper: the same bits as from copies of the tokens, whatever the routing."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the products of Hopper")
    gathering = layer_steps._first_product
    for tokens in (40, 333):
        c = GATHERED[name](tokens)
        ids = c["ids"].clone()
        for routing, changed in {"random": ids, "skipped": torch.where(ids % 3 == 0, -1, ids), "none": torch.full_like(ids, -1),
                                 "one expert": torch.full_like(ids, 2)}.items():
            c["ids"] = changed
            results = []
            for copies in (False, True):
                monkeypatch.setattr(layer_steps, "_first_product", (lambda p, t: layer_steps._product(p, 0)) if copies else gathering)
                select.forget()
                moe_op._calls.clear()
                chosen = kernelgen.explain("moe", **c, backend="generated").chosen
                assert chosen is not None and ("permute" in dict(chosen.config.decisions)) is copies
                results.append(check_moe(c, what=f"{name} {tokens}") if routing == "random" and not copies else
                               kernelgen.moe(**c, backend="generated"))
            assert_bits_equal(results[0], results[1], what=f"{name} {tokens} {routing}")
    select.forget()
    moe_op._calls.clear()


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


@pytest.mark.parametrize("name, tokens", (("qwen3", 64), ("deepseek fp8", 64), ("fp8 codes", 1100), ("qwen3", 1100)))
def test_a_thousand_repeats_and_a_graph(name: str, tokens: int) -> None:
    c = CASES[name](tokens)
    first = kernelgen.moe(**c, backend="generated")
    for _ in range(1000):
        assert torch.equal(kernelgen.moe(**c, backend="generated"), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernelgen.moe(**c, backend="generated")
    other = CASES[name](tokens + 1)
    for part in ("x", "weights", "ids"):
        c[part].copy_(other[part][:tokens])
    graph.replay()
    replayed = captured.clone()
    assert_bits_equal(replayed, kernelgen.moe(**c, backend="generated"), what="replayed on new tokens")


def added(c: dict[str, Any]) -> bool:
    """Whether the layer's second product adds its rows to their tokens' itself."""
    chosen = kernelgen.explain("moe", **c, deterministic=False, backend="generated").chosen
    assert chosen is not None
    return "unpermute" not in dict(chosen.config.decisions)


ADDED: dict[str, Callable[[int], dict[str, Any]]] = {
    "bf16": lambda t: cuda(t, 12, 3, 264, 200, seed=t),
    "fp16": lambda t: cuda(t, 32, 8, 1032, 96, FP16, seed=t),
    "bias, interleaved": lambda t: cuda(t, 16, 4, 320, 320, activation="swiglu_oai", biases=BF16, seed=t) | {"gate_up": "interleaved"},
    "fp8 blocks": lambda t: quantize_experts(cuda(t, 24, 6, 1152, 256, seed=t), "block_128x128", "block_128x128"),
    "fp8 codes": lambda t: quantize_experts(cuda(t, 160, 8, 256, 384, seed=t), "block_128x128", "block_128x128"),
    "fp8 channels": lambda t: quantize_experts(cuda(t, 16, 4, 384, 128, seed=t), "channel", "channel"),
}


@pytest.mark.parametrize("name", ADDED)
def test_second_product_adds_to_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper, in any order: every kind of routing, weights of either type, tokens without a slot, a map, a shared expert, a view as out."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the products of Hopper")
    monkeypatch.setattr(layer_steps, "_SCATTERED_SLOTS", 1)
    monkeypatch.setattr(layer_steps, "_SCATTERED_RECIPES", ("", "row", "block_1x128"))
    select.forget()
    moe_op._calls.clear()
    for tokens in (40, 333):
        c = ADDED[name](tokens)
        assert added(c)
        check_added(c, what=f"{name} {tokens}")
        ids = c["ids"].clone()
        for routing, changed in {"skipped": torch.where(ids % 3 == 0, -1, ids), "none": torch.full_like(ids, -1),
                                 "one expert": torch.full_like(ids, 2), "tokens without": torch.where(ids[:, :1] % 2 == 0, -1, ids).long(),
                                 }.items():
            out = check_added(c | {"ids": changed}, what=f"{name} {tokens} {routing}")
            assert routing != "none" or bool((out == 0).all())
        check_added(c | {"weights": c["weights"].to(c["x"].dtype)}, what=f"{name} {tokens}, 16-bit weights")
        experts = c["w13"].shape[0]
        check_added(c | {"expert_map": torch.arange(experts, device="cuda").flip(0).int()}, what=f"{name} {tokens}, map")
    if c["activation"] == "swiglu":
        dtype, hidden = c["x"].dtype, c["x"].shape[1]
        shared = tuple(random_tensor(shape, dtype, seed=7, device="cuda", scale=0.1) for shape in ((128, hidden), (hidden, 64)))
        check_added(c | {"shared": shared}, what=f"{name}, shared")
    wide = torch.full((c["x"].shape[0], c["x"].shape[1] + 64), 3.0, dtype=c["x"].dtype, device="cuda")
    kernelgen.moe(**c, out=wide[:, : c["x"].shape[1]], deterministic=False, backend="generated")
    assert bool((wide[:, c["x"].shape[1]:] == 3.0).all()), "columns beside the output are not cleared"
    nan = c | {"x": c["x"].clone(), "w2": c["w2"]}
    nan["x"][5] = float("nan")
    result = kernelgen.moe(**nan, deterministic=False, backend="generated")
    assert bool(result[5].isnan().all()) and not bool(result[6:].isnan().any()), "a token's NaN is its own"
    select.forget()
    moe_op._calls.clear()


def test_additions_in_graphs_and_on_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers, whose sums are exact in any order: the bits of the fixed order, replayed and on two streams at the same time."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the products of Hopper")
    monkeypatch.setattr(layer_steps, "_SCATTERED_SLOTS", 1)
    monkeypatch.setattr(layer_steps, "_SCATTERED_RECIPES", ("",))
    select.forget()
    moe_op._calls.clear()
    c = cuda(700, 24, 6, 1152, 64, activation="identity")
    for name in ("x", "w13", "w2"):
        c[name] = (torch.arange(c[name].numel(), device="cuda") % (61 if name == "x" else 7) == 0).view(c[name].shape).to(BF16)
    c["weights"] = torch.ones_like(c["weights"])
    c["w2"] *= torch.arange(c["w2"].shape[2], device="cuda") == 3
    expected = kernelgen.moe(**c, backend="generated")
    assert added(c) and 0 < float(expected.abs().max()) <= 256
    kernelgen.moe(**c, deterministic=False, backend="generated")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernelgen.moe(**c, deterministic=False, backend="generated")
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        graph.replay()
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(kernelgen.moe(**c, deterministic=False, backend="generated"))
    torch.cuda.synchronize()
    for result in (captured, *results):
        assert_bits_equal(result, expected, what="sums of whole numbers")
    select.forget()
    moe_op._calls.clear()


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
