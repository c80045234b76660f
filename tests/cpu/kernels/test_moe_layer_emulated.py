"""The whole layer of CUDA kernels on the CPU, lane by lane: what each step hands to the next; see cuda_emulator."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelgen import reference as ref
from kernelgen.dispatch.select import choose
from kernelgen.kernels.base import families
from kernelgen.kernels.gemm.gemm_mma import Config
from kernelgen.kernels.moe.layer import COMPOSITION
from kernelgen.ops.moe import describe_moe
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.data import poison_, random_tensor
from kernelgen.testing.moe_layer import layer, oracle, pack_experts, plain, quantize_experts
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

TARGET = Target.parse("sm_80")
BF16, F32 = torch.bfloat16, torch.float32
TILES = (Config(32, 32, 64, 2, 1, stages=2), Config(16, 32, 128, 1, 2, stages=2))
DEFAULTS: dict[str, Any] = dict(
    alpha=None, limit=None, gate_up="gate_first", bias13=None, bias2=None, scale13=None, scale2=None, shared=None, expert_map=None,
    weights_on_input=False, out=None, deterministic=True)


def skipping(c: dict[str, Any]) -> dict[str, Any]:
    c["ids"][1] = -1
    c["ids"][2, 1:] = 99
    return c


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "swiglu": lambda: skipping(layer(9, 4, 2, 64, 48)),
    "one token": lambda: layer(1, 40, 3, 72, 40, biases=F32),
    "llama4": lambda: layer(6, 3, 1, 64, 48) | {"weights_on_input": True},
    "shared, map": lambda: skipping(layer(9, 4, 2, 64, 48)) | {
        "shared": (random_tensor((64, 64), BF16, seed=7, scale=0.1), random_tensor((64, 32), BF16, seed=8, scale=0.1)),
        "expert_map": torch.tensor([3, -1, 2, 0])},
    "fp8 blocks": lambda: skipping(quantize_experts(layer(9, 3, 2, 200, 136), "block_128x128", "block_128x128")),
    "fp8 channels, weights on the input": lambda: quantize_experts(layer(9, 3, 2, 128, 64), "channel", "tensor") | {
        "weights_on_input": True},
    "mxfp4 of gpt-oss": lambda: pack_experts(layer(9, 3, 2, 64, 64, activation="swiglu_oai", biases=BF16), "mxfp4") | {
        "gate_up": "interleaved"},
}


@pytest.mark.parametrize("name", CASES)
def test_layer(name: str) -> None:
    check(name, CASES[name]())


def test_first_product_writes_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Hopper, whose kernels no emulator runs: the steps hand codes and scales on."""
    monkeypatch.setattr("kernelgen.kernels.moe.layer.writes_codes", lambda problem, target: True)
    names = check("codes of the first product", CASES["fp8 blocks"]())
    assert "up" in names and "quantize_hidden" not in names


def check(name: str, c: dict[str, Any]) -> list[str]:
    """The names of the steps."""
    folder = settings().cache_dir / "emulated"
    problem, tensors = describe_moe(**(DEFAULTS | c))
    steps = dict(COMPOSITION.steps(problem, TARGET))

    def prepare(step: str, given: Any) -> Callable[[Any], Any]:
        chosen = choose(steps[step], TARGET, "generated", live=False).chosen
        assert chosen is not None, step
        family = next(f for f in families(steps[step].op, "cuda") if f.name == chosen.kernel)
        config = chosen.config
        if chosen.kernel.startswith("gemm/"):  # tiles that take seconds, not minutes
            config = next(t for t in TILES if family.legal(steps[step], TARGET, t))
        return family.bind(steps[step], config, EmulatedKernel(family.spec(steps[step], TARGET, config), Path(folder)), given)

    assert COMPOSITION.supports(problem, TARGET)
    run = COMPOSITION.bind(problem, tuple(steps), prepare, tensors)
    made = []
    for _ in range(2):
        poison_(tensors.out)
        run(tensors)
        made.append(tensors.out.clone())
    assert_bits_equal(made[1], made[0], what=f"{name}, again")
    assert_close_to_reference(made[0], ref.moe(**oracle(c)), plain(c), what=name)
    return list(steps)
