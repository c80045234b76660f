"""gemm/grouped_sm90_cute's compiled kernels, host side included, by the emulator of PTX: copies and products happen when they are waited
for, and warps fall behind. Three blocks, so that each has several tiles and groups."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from kernelgen.kernels import counters
from kernelgen.kernels.gemm import grouped_sm90_cute
from kernelgen.kernels.gemm.grouped_sm90_cute import FAMILY, Config
from kernelgen.settings import settings
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.data import poison_
from kernelgen.testing.grouped_products import Grouped, prepared, run_grouped
from kernelgen.testing.installed import toolchain_installed
from kernelgen.testing.mma_products import Product
from kernelgen.testing.moe_layer import layer
from kernelgen.testing.numbered_rows import run_forced_layer, run_gathered, run_layer, run_scattered
from kernelgen.testing.ptx_emulator import EmulatedCute
from kernelgen.testing.tolerance import assert_bits_equal

HOPPER = Target.parse("sm_90a")
TURNS = Config(2, 2, 128, 3, pingpong=True)
GATE = Product(0, 272, 136, "bf16", activation="swiglu", gate_up="interleaved", bias="fp32")


pytestmark = pytest.mark.skipif(shutil.which("g++") is None or not toolchain_installed("cutedsl"), reason="needs g++ and CuTe-DSL")


def _load(spec: KernelSpec, words: tuple[torch.Tensor, ...] = ()) -> EmulatedCute:
    return EmulatedCute(spec, settings().cache_dir / "emulated_ptx", lazy=True, stalls=True, seed=3, reachable=words)


@pytest.mark.parametrize("run, config", (
    (partial(run_grouped, Grouped("rows", (70, 0, 5, 130), GATE)), TURNS),
    # One slab of two in each tile: what its last store reads must not be written yet.
    (partial(run_gathered, Grouped("rows", (128, 0, 70), Product(0, 136, 136, "bf16", pad=8)), 40), Config(1, 1, 64, 2, dealt=True)),
    (partial(run_scattered, Grouped("rows", (5, 0, 70), Product(0, 72, 72, "fp16", out="fp16")), 60, False), Config(1, 1, 64, 3)),
), ids=("gate", "gathered", "scattered"))
def test_against_the_reference(run: Callable[..., None], config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.zeros(2, dtype=torch.int32)
    monkeypatch.setattr(grouped_sm90_cute, "_SMS", 3)
    monkeypatch.setattr(counters, "counter", lambda device: (words.data_ptr(), words))
    run(FAMILY, HOPPER, lambda spec: _load(spec, (words,)), config)
    assert words.tolist() == [0, 0], "the counter is left as it was found"


def test_ends_that_fall_or_leave_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose end lies before its begin is empty, and none reaches beyond the matrix: as groups that say so."""
    monkeypatch.setattr(grouped_sm90_cute, "_SMS", 3)
    t, call = prepared(Grouped("rows", (30, 30, 30), replace(GATE, n=80, k=16), spare=0), FAMILY, HOPPER, _load, TURNS, "cpu")

    def made(ends: tuple[int, ...]) -> torch.Tensor:
        t.ends.copy_(torch.tensor(ends, dtype=torch.int32))
        poison_(t.out)
        call(t)
        return t.out.clone()

    for strange, usual in (((-5, 40, 1000), (0, 40, 90)), ((70, 60, 60), (70, 70, 70)), ((400, 400, 400), (90, 90, 90)),
                           ((2**31 - 1, -(2**31), 0), (90, 90, 90))):
        given: Any = made(strange)
        assert_bits_equal(given, made(usual), what=f"ends {strange}")


def test_products_of_a_layer() -> None:
    """What moe/layer hands to a repeated call are tensors of other shapes, and addresses within its workspace."""
    run_layer(layer(9, 4, 2, 64, 48), FAMILY, Config(1, 1, 128, 2), HOPPER, _load,
              lambda spec: EmulatedKernel(spec, settings().cache_dir / "emulated"))


def test_a_layer_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the configs that dispatch takes: fp16, biases, a clamped gate whose columns take turns; most slots at one
    expert, some at nobody's."""
    words = torch.zeros(2, dtype=torch.int32)
    monkeypatch.setattr(grouped_sm90_cute, "_SMS", 3)
    monkeypatch.setattr(counters, "counter", lambda device: (words.data_ptr(), words))
    c = layer(9, 5, 2, 40, 48, torch.float16, activation="swiglu_oai", biases=torch.float32)
    c["ids"][:8, 0], c["ids"][3:, 1] = 2, -1
    run_forced_layer(c | {"gate_up": "interleaved"}, ("moe/layer", FAMILY.name), replace(HOPPER, sm_count=3),
                     lambda spec: _load(spec, (words,)), lambda spec: EmulatedKernel(spec, settings().cache_dir / "emulated"))
    assert words.tolist() == [0, 0]
