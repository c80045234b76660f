"""moe/small_cuda on a GPU: layers of up to 64 tokens in two launches, every kind of routing, repeats, graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import build
from kernelgen.kernels.moe.small_cuda import Config
from kernelgen.targets import target_of
from kernelgen.testing.moe_layer import check_moe, layer, pack_experts, quantize_experts
from kernelgen.testing.moe_small import bound, check_small
from kernelgen.testing.tolerance import assert_bits_equal

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32


def cuda(*sizes: Any, **options: Any) -> dict[str, Any]:
    return layer(*sizes, device="cuda", **options)


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "mixtral": lambda t: cuda(t, 8, 2, 512, 1024, seed=t),
    "qwen3": lambda t: cuda(t, 64, 8, 128, 96, FP16, seed=t),
    "qwen3 next": lambda t: cuda(t, 200, 10, 128, 64, seed=t),
    "odd": lambda t: cuda(t, 6, 3, 200, 72, seed=t),
    "relu2": lambda t: cuda(t, 8, 2, 256, 192, activation="relu2", seed=t),
    "swiglu_oai": lambda t: cuda(t, 16, 4, 320, 320, activation="swiglu_oai", biases=BF16, seed=t, scale=5.0) | {"gate_up": "interleaved"},
    "geglu up first": lambda t: cuda(t, 8, 2, 256, 192, FP16, activation="geglu", biases=F32, seed=t) | {"gate_up": "up_first"},
    "clamped": lambda t: cuda(t, 8, 2, 256, 192, seed=t, scale=5.0) | {"limit": 2.0},
    "llama4": lambda t: cuda(t, 16, 1, 512, 256, seed=t) | {"weights_on_input": True},
    "deepseek fp8": lambda t: quantize_experts(cuda(t, 64, 8, 512, 256, seed=t), "block_128x128", "block_128x128"),
    "fp8 channels": lambda t: quantize_experts(cuda(t, 16, 4, 384, 128, seed=t), "channel", "channel"),
    "fp8 tensors": lambda t: quantize_experts(cuda(t, 16, 4, 384, 128, FP16, seed=t), "tensor", "expert"),
    "gpt-oss": lambda t: pack_experts(cuda(t, 32, 4, 352, 320, activation="swiglu_oai", biases=BF16, seed=t), "mxfp4") | {
        "gate_up": "interleaved"},
    "fp8 odd": lambda t: quantize_experts(cuda(t, 5, 2, 208, 144, seed=t), "block_128x128", "channel"),
}


def small(c: dict[str, Any], config: Config | None = None) -> Callable[..., torch.Tensor]:
    return bound(c, target_of(torch.device("cuda")), build.kernel, config)


def check(c: dict[str, Any], what: str, config: Config | None = None) -> torch.Tensor:
    return check_small(c, small(c, config), what=what)


@pytest.mark.parametrize("name", CASES)
def test_layer(name: str) -> None:
    for tokens in (1, 4, 8) if name == "gpt-oss" else (1, 9, 64):
        check(CASES[name](tokens), f"{name} {tokens}")


@pytest.mark.parametrize("ids", ("one expert", "none", "mixed", "repeated"))
@pytest.mark.parametrize("tokens", (1, 5, 64))
def test_routing(tokens: int, ids: str) -> None:
    c = cuda(tokens, 32, 4, 256, 128)
    slot = torch.arange(4 * tokens, device="cuda").view(tokens, 4)
    c["ids"] = {"one expert": torch.full_like(slot, 9), "none": torch.full_like(slot, -1),
                "mixed": torch.where(slot % 3 == 0, -1, c["ids"]), "repeated": c["ids"][:, :1].expand(tokens, 4).contiguous().long()}[ids]
    out = check(c, f"{ids} {tokens}")
    assert ids != "none" or bool((out == 0).all())


def test_nan_stays_with_its_token() -> None:
    """Tokens of one expert share a product; weights that no token takes are not part of any."""
    c = cuda(24, 8, 2, 256, 128)
    clean = check(c, "clean")
    c["x"][5] = float("nan")
    with_nan = small(c)()
    assert bool(with_nan[5].isnan().all())
    others = torch.arange(24, device="cuda") != 5
    assert_bits_equal(with_nan[others], clean[others], what="the other tokens")
    c = cuda(2, 8, 2, 256, 128)
    unused = (torch.arange(8, device="cuda").view(8, 1) != c["ids"].flatten()).all(1)
    for name in ("w13", "w2"):
        c[name][unused] = float("nan")
    check(c, "weights of nobody")


def test_shards() -> None:
    c = cuda(40, 32, 4, 256, 128)
    whole = check(c, "whole").float()
    parts = [check(c | {"w13": c["w13"][a : a + 16], "w2": c["w2"][a : a + 16], "expert_map": (a, a + 16)}, str(a)).float()
             for a in (0, 16)]
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=0.02, atol=0.02)
    table = torch.randperm(32, generator=torch.Generator().manual_seed(1)).to("cuda")
    check(c | {"expert_map": table}, "a table")


def test_held_rows_and_rows_that_come_with_weights() -> None:
    for name, tokens in (("mixtral", 9), ("deepseek fp8", 2), ("fp8 channels", 9)):
        for held in ((True, True), (True, False), (False, False)):
            check(CASES[name](tokens), f"{name} {held}", Config(4, 16, 8, 4, 1, 16, 8, 2, 4, *held))


@pytest.mark.parametrize("passes, split, up_split", ((0, 1, 3), (1, 2, 2), (2, 1, 12)))
@pytest.mark.parametrize("columns", (1, 2))
def test_teams_and_hidden_rows_of_mxfp4(columns: int, passes: int, split: int, up_split: int) -> None:
    """Teams of up; hidden rows of one unit in each warp, of all in one go, and by parts of K."""
    config = Config(columns, 32, 12, 2, 1, 24, 8, split, 2, True, True, passes, up_split)
    check(CASES["gpt-oss"](8), str(config), config)


def test_layers_of_one_binary() -> None:
    """The second one has fewer experts and narrower rows, so that it needs less shared memory; then the first one again."""
    config = Config(1, 32, 8, 3, 1, 16, 8, 1, 5, True, True)
    large, little = cuda(1, 8, 2, 4096, 128, seed=3), cuda(1, 4, 2, 256, 128, seed=4)
    calls = [small(c, config) for c in (large, little)]
    for c, call in zip((large, little, large), (*calls, calls[0])):
        check_small(c, call, what=str(tuple(c["w13"].shape)))


def test_one_token_by_dispatch() -> None:
    for name in ("qwen3", "deepseek fp8", "llama4"):
        c = CASES[name](1)
        chosen = kernelgen.explain("moe", **c, backend="generated").chosen
        assert chosen is not None and (chosen.kernel == "moe/small_cuda" or torch.cuda.get_device_capability()[0] != 9)
        check_moe(c, what=name)


@pytest.mark.parametrize("name, tokens", (("qwen3", 1), ("deepseek fp8", 8), ("qwen3 next", 64)))
def test_a_thousand_repeats_and_a_graph(name: str, tokens: int) -> None:
    c = CASES[name](tokens)
    layers = small(c)
    first = check(c, name)
    for _ in range(1000):
        assert torch.equal(layers(), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # two layers, so that one begins while the other runs
        captured = layers(x=layers())
    for seed in range(100, 103):
        other = CASES[name](seed)
        for part in ("x", "weights", "ids"):
            c[part].copy_(other[part][:tokens])
        graph.replay()
        replayed, middle = captured.clone(), layers()
        torch.cuda.synchronize()
        assert_bits_equal(replayed, layers(x=middle), what=f"replayed on new tokens {seed}")


def test_behind_route() -> None:
    """The second launch reads ids before the first one has ended: they are those of the router in front of both."""
    c, logits = cuda(8, 128, 8, 256, 96), torch.empty(8, 128, device="cuda")
    layers, generator, outs = small(c), torch.Generator(device="cuda"), []
    for _ in range(2):
        generator.manual_seed(3)
        for _ in range(200):
            logits.normal_(generator=generator)
            weights, ids = kernelgen.route(logits, 8, backend="generated")
            outs.append(layers(weights=weights, ids=ids))
            if len(outs) <= 200:
                torch.cuda.synchronize()
    for step in range(200):
        assert_bits_equal(outs[200 + step], outs[step], what=f"step {step} without a wait")
