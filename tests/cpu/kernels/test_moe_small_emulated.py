"""moe/small_cuda on the CPU, lane by lane: routing, rings, fragments and sums of both launches; see cuda_emulator."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelgen.kernels.moe.small_cuda import Config
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.moe_layer import layer, pack_experts, quantize_experts
from kernelgen.testing.moe_small import bound, check_small

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

TARGET = Target.parse("sm_80")
BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32


def skipping(c: dict[str, Any]) -> dict[str, Any]:
    """Ids of nobody, and a token that takes one expert twice."""
    c["ids"][1] = -1
    c["ids"][2, 1:] = 99
    c["ids"][3] = c["ids"][0, 0]
    return c


def poisoned(c: dict[str, Any]) -> dict[str, Any]:
    """A NaN row of x stays with its token, also where they share a product; weights of experts that nobody takes are not read."""
    c["x"][4] = float("nan")
    for name in ("w13", "w2"):
        c[name][3] = float("nan")
    c["ids"] = torch.where(c["ids"] == 3, 1, c["ids"])
    return c


def enlarged(c: dict[str, Any]) -> dict[str, Any]:
    """Some rows have scales above 2."""
    c["w13"][:, ::3] *= 256
    c["w2"][:, 1::5] *= 256
    return c


def with_nan_scale(c: dict[str, Any]) -> dict[str, Any]:
    """The last scale of a row of w2: it is alone in its word, beside the first ones of the next row."""
    c["w2"].scale[:, 5, -1] = 255
    c["w2"].scale[:, 7, 0] = 0
    return c


# Tokens of a product, then rows, warps, stages, blocks of up; rows, warps, split, stages of down.
CASES: dict[str, tuple[Callable[[], dict[str, Any]], Config]] = {
    "skipped, repeated, four outputs": (lambda: skipping(layer(9, 4, 2, 200, 48)), Config(2, 8, 4, 2, 2, 8, 4, 1, 4)),
    "relu2, 32 rows, up to 16 tokens": (lambda: layer(20, 2, 1, 136, 88, FP16, activation="relu2"), Config(16, 32, 4, 3, 1, 32, 4, 4, 2)),
    "swiglu_oai, interleaved": (lambda: layer(9, 3, 2, 64, 64, activation="swiglu_oai", biases=BF16, scale=5.0) | {
        "gate_up": "interleaved"}, Config(8, 16, 4, 3, 1, 16, 4, 4, 3)),
    "units of one slot": (lambda: skipping(layer(9, 8, 5, 72, 40, biases=F32)), Config(1, 16, 4, 2, 1, 16, 4, 2, 2, True, True)),
    "up first, NaN": (lambda: poisoned(layer(12, 4, 2, 64, 56)) | {"gate_up": "up_first"}, Config(8, 32, 4, 3, 1, 16, 4, 1, 3, True, True)),
    "llama4, map, clamped": (lambda: layer(6, 4, 1, 64, 48) | {
        "weights_on_input": True, "expert_map": torch.tensor([3, -1, 2, 0]), "limit": 0.5}, Config(4, 16, 4, 3, 1, 8, 4, 2, 3)),
    "fp8 blocks, range": (lambda: skipping(quantize_experts(layer(6, 4, 2, 208, 144), "block_128x128", "block_128x128")) | {
        "expert_map": (1, 5)}, Config(2, 16, 4, 3, 1, 16, 4, 1, 3, True, True, down_passes=2, up_split=2)),
    "fp8 blocks, four outputs": (lambda: quantize_experts(layer(2, 3, 2, 144, 208, FP16), "block_128x128", "block_128x128"),
                                 Config(2, 8, 4, 3, 1, 8, 4, 4, 3, down_held=True)),
    "mxfp4 of gpt-oss": (lambda: skipping(pack_experts(layer(7, 3, 2, 352, 160, activation="swiglu_oai", biases=BF16), "mxfp4")) | {
        "gate_up": "interleaved"}, Config(2, 16, 6, 3, 1, 24, 4, 1, 3, True, True, up_split=2)),
    "mxfp4, large scales, a NaN": (lambda: with_nan_scale(pack_experts(enlarged(layer(2, 3, 2, 288, 544)), "mxfp4")),
                                   Config(2, 32, 4, 2, 1, 8, 4, 1, 3, True, True, down_passes=2)),
    "mxfp4, rows of a unit": (lambda: skipping(pack_experts(layer(6, 3, 2, 96, 352), "mxfp4")), Config(
        2, 16, 4, 2, 1, 24, 4, 1, 3, True, True, down_passes=0, up_split=1)),
    "mxfp4, rows of a slot": (lambda: skipping(pack_experts(layer(4, 3, 2, 352, 96), "mxfp4")), Config(
        1, 32, 6, 2, 1, 24, 4, 1, 2, True, True, down_passes=0, up_split=3)),
    "fp8 channels, e5m2": (lambda: quantize_experts(layer(5, 3, 2, 128, 64), "channel", "expert", torch.float8_e5m2),
                           Config(8, 16, 4, 3, 1, 32, 4, 2, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_layer(name: str) -> None:
    make, config = CASES[name]
    c = make()
    # Copies that land at once, and when they are waited for.
    now, late = (bound(c, TARGET, partial(EmulatedKernel, folder=Path(settings().cache_dir / "emulated"), lazy=lazy, seed=2 + lazy), config)
                 for lazy in (False, True))
    check_small(c, now, what=name, again=late)
