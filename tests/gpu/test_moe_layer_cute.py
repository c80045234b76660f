"""Whole MoE layers whose two products are gemm/grouped_sm90_cute, by the public call, on a GPU: shapes like Mixtral's and Qwen3-30B's, few
tokens, skewed routing, experts without tokens; a graph, and a tuning that times both siblings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen import settings
from kernelgen.dispatch import measured, select
from kernelgen.kernels.gemm.grouped_sm90_cute import FAMILY
from kernelgen.ops.memo import forget_calls
from kernelgen.testing.data import poison_
from kernelgen.testing.moe_layer import check_moe, layer, oracle, plain
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs sm_90")

KERNELS = ("moe/layer", FAMILY.name)
# Experts, slots of a token, H, I: as many experts and slots as the models have, and narrower ones.
SHAPES = {"mixtral": (8, 2, 1024, 1792), "qwen3-30b": (128, 8, 512, 192)}


@pytest.fixture(autouse=True)
def _put_first() -> Iterator[None]:
    select.forget()
    forget_calls()
    with settings.override(kernels=KERNELS):
        yield
    select.forget()
    forget_calls()


def arguments(name: str, tokens: int, **more: Any) -> dict[str, Any]:
    made = layer(tokens, *SHAPES[name], device="cuda", **more)
    chosen = kernelgen.explain("moe", **made).chosen
    assert chosen is not None and chosen.kernel == "moe/layer"
    assert [d.chosen.kernel for _, d in chosen.config.decisions if d.problem.op == "grouped_gemm"] == [FAMILY.name] * 2
    return made


@pytest.mark.parametrize("tokens", (1, 3, 17, 150, 700))
@pytest.mark.parametrize("name", SHAPES)
def test_few_tokens(name: str, tokens: int) -> None:
    check_moe(arguments(name, tokens, seed=tokens), what=f"{name}, {tokens} tokens")


@pytest.mark.parametrize("name", SHAPES)
def test_skewed_routing(name: str) -> None:
    """Every first slot at one expert, the second ones at few or at nobody's; then all of them at nobody's."""
    c = arguments(name, 150)
    ids = c["ids"]
    ids[:, 0], ids[:, 1] = 5, torch.arange(150, device="cuda") % 3
    ids[::4, 1] = -1
    check_moe(c, what=f"{name}, skewed")
    ids.fill_(-1)
    check_moe(c, what=f"{name}, no slots")


@pytest.mark.parametrize("activation, gate_up, more", (
    ("swiglu_oai", "interleaved", {"biases": torch.float32, "dtype": torch.float16}), ("geglu", "up_first", {"biases": torch.bfloat16}),
    ("relu2", "gate_first", {}),
))
def test_activations_biases_and_maps(activation: str, gate_up: str, more: dict[str, Any]) -> None:
    c = arguments("qwen3-30b", 60, activation=activation, **more) | {"gate_up": gate_up, "weights_on_input": activation == "relu2"}
    table = torch.full((256,), -1, dtype=torch.int32)
    table[::2] = torch.randperm(128, generator=torch.Generator().manual_seed(1)).int()
    check_moe(c | {"ids": 2 * c["ids"], "expert_map": table.cuda()}, what=f"{activation} {gate_up}")


def test_a_graph_whose_routing_changes() -> None:
    c = arguments("mixtral", 40)
    out = torch.empty_like(c["x"])
    kernelgen.moe(**c, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernelgen.moe(**c, out=out)
    for ids in (c["ids"].clone(), c["ids"].flip(0), torch.zeros_like(c["ids"])):
        c["ids"].copy_(ids)
        poison_(out)
        graph.replay()
        assert_close_to_reference(out.cpu(), ref.moe(**oracle(c)), plain(c), what="replayed")
        assert_bits_equal(kernelgen.moe(**c), out, what="called")


def test_a_tuning_times_both_siblings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product of a layer by two configs of either, in a child process; what is faster runs the layer from then on."""
    c = arguments("qwen3-30b", 150)
    monkeypatch.setattr(measured, "tuning_folder", lambda: tmp_path / "tuning")
    with settings.override(kernels=()):
        select.forget()
        with kernelgen.tune(configs=2, samples=2) as report:
            out = kernelgen.moe(**c)
        found = {t.problem.n: {o.trial.kernel for o in t.outcomes if o.us is not None} for t in report.tuned}
        assert set(found) == {384, 512} and all({"gemm/grouped_sm90", FAMILY.name} <= kernels for kernels in found.values()), str(report)
        assert_close_to_reference(out.cpu(), ref.moe(**oracle(c)), plain(c), what="tuned")
        assert str(kernelgen.explain("moe", **c)).count("us measured") == 2
