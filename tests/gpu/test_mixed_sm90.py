"""Many rows times packed 4-bit weights by gemm/mixed_sm90 and gemm/grouped_mixed_sm90 on a Hopper GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernelgen import build
from kernelgen.kernels.gemm import grouped_mixed_sm90, mixed_sm90
from kernelgen.kernels.gemm.mixed_sm90 import Config
from kernelgen.targets import target_of
from kernelgen.testing.grouped_products import Grouped, run_grouped
from kernelgen.testing.mma_products import Product, run_product

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")

CONFIGS = (Config(16, 11, 2, 3, True, True), Config(32, 3), Config(48, 6, 2, 1, True), Config(64, 6, 2), Config(96, 5, 1, 1),
           Config(160, 4), Config(192, 5, apart=True), Config(256, 5))
FORMS: tuple[dict[str, Any], ...] = (
    dict(weight="mxfp4"), dict(weight="int4"), dict(weight="int4", group=64, symmetric=False), dict(weight="int4", group=32),
    dict(weight="int4", group=32, symmetric=False), dict(weight="int4", a="fp16", symmetric=False), dict(weight="int4", a="fp16", group=32))
SIZES = ((0, 0, 0, 0), (0, 5, 0, 3), (7,), (200, 0, 56, 192), (1, 1, 1, 1021), (0, 0, 2048, 0), tuple(1000 // (i + 1) for i in range(40)))


def run(case: Product, config: Config | None = None) -> None:
    run_product(case, mixed_sm90.FAMILY, target_of("cuda"), build.kernel, config, "cuda")


def run_rows(case: Grouped, config: Config | None = None, **others: Any) -> None:
    run_grouped(case, grouped_mixed_sm90.FAMILY, target_of("cuda"), build.kernel, config, "cuda", **others)


def product(m: int, n: int, k: int, **form: Any) -> Product:
    return Product(m, n, k, **({"a": "bf16"} | ({"out": "fp16"} if form.get("a") == "fp16" else {}) | form))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms(form: dict[str, Any], config: Config) -> None:
    for m, n, k in ((1, 8, 32), (70, 200, 96), (257, 136, 2080), (33, 1000, 2880)):
        run(product(m, n, k, **form), config)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("activation, gate_up", (
    (None, "gate_first"), ("gelu", "gate_first"), ("swiglu", "gate_first"), ("geglu", "up_first"), ("swiglu", "interleaved")))
def test_epilogues(activation: str | None, gate_up: str, config: Config) -> None:
    for out, bias, n in (("bf16", "bf16", 272), ("fp16", "fp32", 600), ("fp32", "fp32", 272), ("fp32", "bf16", 52)):
        run(product(75, n, 288, weight="mxfp4", activation=activation, gate_up=gate_up, out=out, bias=bias), config)
    for n in (272, 52):
        run(product(75, n, 288, weight="int4", activation=activation, gate_up=gate_up, bias="fp32"), config)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"{len(s)} groups of {max(s)}")
@pytest.mark.parametrize("grouping", ("rows", "masked"))
def test_groups(grouping: str, sizes: tuple[int, ...]) -> None:
    for config in (None, Config(16, 12, 2), Config(128, 6)):
        gated = product(0, 360, 416, weight="mxfp4", bias="bf16", activation="swiglu", gate_up="interleaved")
        run_rows(Grouped(grouping, sizes, gated), config)
        run_rows(Grouped(grouping, sizes, product(0, 136, 288, weight="int4", symmetric=False)), config)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_grouped_configs(config: Config) -> None:
    for n, k in ((136, 2080), (5760 // 4, 2880)):
        run_rows(Grouped("rows", (100, 0, 37, 300, 1), product(0, n, k, weight="mxfp4", activation="swiglu", bias="bf16")), config)


def test_sizes_change_under_a_prepared_call() -> None:
    run_rows(Grouped("rows", (100, 0, 200, 84), product(0, 136, 256, weight="mxfp4")),
             others=[(0, 0, 0, 0), (203, 0, 1, 2), (0, 384, 0, 0), (96, 96, 96, 96)])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_exact_inputs_give_exact_bits(config: Config) -> None:
    run(product(75, 200, 640, weight="mxfp4", whole=True, out="fp32"), config)
